"""Work on several streams: if the allocator reuses memory too early, the sums are wrong."""

import torch

from acceptance.common import normals, must, program

SIZE = 1 << 22


def slow(x, products=60):
    """Keeps a stream busy for some milliseconds, and returns a number that depends on all its work."""
    square = x[: 1 << 20].view(1024, 1024)
    for _ in range(products):
        square = torch.tanh(square @ square.T / 1024)
    return square.mean()


@program(cpu=False, gib=4.0)
def record_stream(run):
    """Tensors of the main stream that a side stream reads after they were dropped, with record_stream."""
    side = torch.cuda.Stream()
    busy = normals(0, SIZE).to(run.device)
    sums = []
    for number in range(24):
        x = torch.full((SIZE,), float(number), device=run.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            slow(busy)
            sums.append(x.double().sum())
        x.record_stream(side)
        del x
        # Reuses the memory immediately, if allowed.
        for _ in range(3):
            torch.full((SIZE,), -1.0, device=run.device)
    torch.cuda.synchronize()
    for number, total in enumerate(sums):
        must(float(total) == number * SIZE, "the sum of", number, "is", float(total))
    run.loss(sum(sums))


@program(cpu=False, gib=4.0)
def dropped_beside(run):
    """A side stream's own tensors are dropped while it uses them, and the main stream waits only for its results."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    busy = normals(0, SIZE).to(run.device)
    torch.cuda.synchronize()
    results = []
    for number in range(20):
        for stream in (side, other):
            with torch.cuda.stream(stream):
                slow(busy, 30)
                x = torch.full((SIZE,), float(number), device=run.device)
                y = x * 2 + 1
                del x
                result = y.double().sum()
                del y
                results.append((number, result))
        torch.full((SIZE,), -1.0, device=run.device)
        if number % 5 == 4:
            event = side.record_event()
            torch.cuda.current_stream().wait_event(event)
    torch.cuda.synchronize()
    for number, total in results:
        must(float(total) == (2 * number + 1) * SIZE, "the sum of", number, "is", float(total))
    run.loss(sum(total for _, total in results))


@program(cpu=False, gib=4.0)
def prefetch(run):
    """Batches are copied from pinned memory by a side stream while the previous step still runs."""
    copies = torch.cuda.Stream()
    batches = [normals(number, 2048, 1024).pin_memory() for number in range(10)]
    weight = (normals(99, 1024, 1024) / 32).to(run.device).requires_grad_()

    def fetch(number):
        with torch.cuda.stream(copies):
            return batches[number].to(run.device, non_blocking=True)

    coming = fetch(0)
    for number in range(len(batches)):
        torch.cuda.current_stream().wait_stream(copies)
        x = coming
        x.record_stream(torch.cuda.current_stream())
        if number + 1 < len(batches):
            coming = fetch(number + 1)
        loss = torch.tanh(x @ weight).square().mean()
        loss.backward()
        with torch.no_grad():
            weight -= weight.grad
        weight.grad = None
        run.loss(loss)


@program(cpu=False, gib=5.0)
def many_streams(run):
    """Thirty temporary streams, each with tensors that another one frees, and a cache flush in between."""
    total = torch.zeros((), dtype=torch.double, device=run.device)
    for turn in range(6):
        streams = [torch.cuda.Stream() for _ in range(30)]
        parts = []
        for number, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = torch.full((SIZE >> (number % 5),), float(number), device=run.device)
                parts.append((x + turn).double().sum())
            x.record_stream(streams[(number + 1) % 30])
            del x
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        total += sum(parts)
        for part in parts:
            part.record_stream(torch.cuda.current_stream())
        del streams, stream, parts, part
        if turn % 2:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    wanted = sum((SIZE >> (number % 5)) * (number + turn) for turn in range(6) for number in range(30))
    must(float(total) == wanted, "the sum is", float(total), "and not", wanted)
    run.loss(total)


@program(cpu=False)
def pinned(run):
    """Pinned memory that is dropped during copies from it, and results that are copied back the same way."""
    side = torch.cuda.Stream()
    total = 0.0
    for number in range(20):
        host = torch.full((SIZE,), float(number), pin_memory=True)
        with torch.cuda.stream(side):
            x = host.to(run.device, non_blocking=True)
            del host
            torch.full((SIZE,), -1.0, pin_memory=True)
            back = torch.empty(SIZE, pin_memory=True)
            back.copy_(x * 2, non_blocking=True)
        side.synchronize()
        value = float(back.double().sum())
        must(value == 2 * number * SIZE, "what came back of", number, "sums to", value)
        total += value
    run.loss(total)
