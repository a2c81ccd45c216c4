"""Programs that handle exceptions: tensors are freed while one propagates, in Python, in C++ and in generators.

A recorder or an allocator that runs Python code, or reads its frames, at such a moment must not change the exception.
"""

import contextlib
import gc
import threading
import weakref

import torch
from torch import nn

from acceptance.common import normals, gpt, must, program, text_loss, tokens, train


class Expected(Exception):
    """The exception that these programs raise, with a number and tensors."""


class Raises(torch.autograd.Function):
    """Raises in its backward pass, while its own tensors are alive."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        (doubled,) = context.saved_tensors
        scratch = [doubled * number for number in range(4)]
        raise Expected(len(scratch), doubled.shape[0])


def network(run, depth=6):
    """A network of equal layers."""
    width = run.size(1024, 16)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]).to(run.device)


def batch(run, number):
    """A batch for `network`."""
    return normals(number, run.size(512 + 256 * (number % 3), 4), run.size(1024, 16)).to(run.device)


@program()
def hook_errors(run):
    """Exceptions out of forward hooks, backward hooks, hooks of saved tensors and custom functions, and training after each."""
    model = network(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_hook(module, inputs, out):
        raise Expected("forward", out * 2)

    def backward_hook(module, inputs, outputs):
        raise Expected("backward", outputs[0] * 2)

    def pack(x):
        return x

    def unpack(x):
        scratch = x + 1
        raise Expected("unpack", scratch.shape)

    def step(number, around=contextlib.nullcontext, own=False):
        with around():
            x = batch(run, number)
            out = model(Raises.apply(x.requires_grad_()) if own else x)
            loss = out.square().mean()
            loss.backward()
        return loss

    for number in range(12):
        kind, caught = number % 6, None
        try:
            if kind == 0:
                handle = model[3].register_forward_hook(forward_hook)
                step(number)
            elif kind == 1:
                handle = model[2].register_full_backward_hook(backward_hook)
                step(number)
            elif kind == 2:
                handle = None
                step(number, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            elif kind == 3:
                handle = None
                step(number, own=True)
            elif kind == 4:
                handle = model[1][0].weight.register_hook(lambda gradient: backward_hook(None, None, [gradient]))
                step(number)
            else:
                handle = None
                loss = step(number)
                optimizer.step()
                run.loss(loss)
        except Expected as error:
            caught = error
        must((caught is None) == (kind == 5), "of kind", kind, "came", caught)
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
        del caught
    run.loss(model(batch(run, 0)).square().mean())


def pieces(run, count, closed):
    """Yields tensors, keeps others alive, and stores in `closed` how it ended."""
    held = []
    try:
        for number in range(count):
            held.append(batch(run, number))
            yield held[-1] * 2
    except GeneratorExit:
        closed.append("exit")
        raise
    except Expected as error:
        closed.append(error.args[0])
        yield held[0] + 1
    finally:
        scratch = sum((one.mean() for one in held), torch.zeros((), device=run.device))
        closed.append(float(scratch))
        held.clear()


@program()
def generators(run):
    """Generators that hold tensors: exhausted, closed early, dropped, thrown into, collected in a cycle."""
    for turn in range(4):
        closed = []
        for piece in pieces(run, 4, closed):
            run.loss(piece.mean())
        early = pieces(run, 4, closed)
        next(early)
        early.close()
        dropped = pieces(run, 4, closed)
        next(dropped)
        del dropped
        thrown = pieces(run, 4, closed)
        next(thrown)
        run.loss(thrown.throw(Expected(f"turn {turn}")).mean())
        thrown.close()
        with contextlib.closing(pieces(run, 3, closed)) as within, contextlib.suppress(Expected):
            next(within)
            raise Expected("around")
        looped = pieces(run, 2, closed)
        cycle = [next(looped), looped]
        cycle.append(cycle)
        del cycle, looped
        gc.collect()
        must(closed.count("exit") == 4 and f"turn {turn}" in closed, "the generators ended so:", closed)
        for value in closed:
            if isinstance(value, float):
                run.loss(value)


class Holder:
    """Frees and allocates tensors when it is collected."""

    count = 0

    def __init__(self, tensor):
        self.tensor = tensor
        weakref.finalize(self, Holder.ended)

    def __del__(self):
        self.tensor = self.tensor + 1

    @staticmethod
    def ended():
        """Counts the collected objects."""
        Holder.count += 1


@program()
def unwinding(run):
    """One exception ends deep calls that each hold tensors; it is caught, chained, raised again and inspected."""

    def deep(level):
        holder = Holder(batch(run, level))
        local = holder.tensor * 2
        try:
            if level == 0:
                raise Expected("the bottom", local.mean())
            return deep(level - 1)
        except Expected as error:
            raise Expected(level, local.mean()) from error
        finally:
            local = local + 1

    for _ in range(6):
        try:
            deep(12)
        except Expected as error:
            depth, one = 0, error
            while one is not None:
                depth, last, one = depth + 1, one, one.__cause__
            must(depth == 14, "the chain has", depth)
            run.loss(last.args[1])
            del one, last
        gc.collect()
    must(Holder.count == 6 * 13, Holder.count, "holders are gone")

    class Leaves:
        def __enter__(self):
            self.held = batch(run, 1)

        def __exit__(self, kind, error, trace):
            self.held = self.held * 2
            return kind is Expected

    with Leaves():
        deep(3)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(Leaves())
        raise Expected("through five")
    run.loss(batch(run, 2).mean())


@program()
def stopped(run):
    """StopIteration, KeyboardInterrupt and SystemExit through autograd's C++, and a coroutine that holds tensors."""
    model = network(run, 4)

    def raises(error):
        def hook(gradient):
            scratch = gradient * 2
            raise error(str(tuple(scratch.shape)))

        return hook

    for number, error in enumerate((StopIteration, KeyboardInterrupt, SystemExit, ValueError)):
        x = batch(run, number).requires_grad_()
        x.register_hook(raises(error))
        try:
            model(x).square().mean().backward()
        except BaseException as caught:
            must(isinstance(caught, (error, RuntimeError)), "came", repr(caught))
        else:
            raise AssertionError("nothing came")
        model.zero_grad()

    async def waits():
        held = batch(run, 3)
        try:
            await Forever()
        finally:
            run.loss(held.mean())

    class Forever:
        def __await__(self):
            while True:
                yield batch(run, 5)

    for _ in range(3):
        coroutine = waits()
        coroutine.send(None)
        coroutine.close()
        run.loss(model(batch(run, 4)).mean())


@program(cpu=False, gib=6.0)
def out_of_memory(run):
    """Requests too large for any GPU, and a batch size search within a memory fraction, which continues after each error."""
    total = torch.cuda.get_device_properties(run.device).total_memory
    for size in (2 * total, 64 * total, 1 << 50):
        try:
            torch.empty(size, dtype=torch.uint8, device=run.device)
        except torch.OutOfMemoryError as error:
            must("out of memory" in str(error), error)
        else:
            raise AssertionError(f"{size} bytes were served")
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    model = gpt(run, layers=6)
    rows, refused = 4, 0
    while rows < 4096:
        text = tokens(rows, model.vocabulary, rows, 257).to(run.device)
        try:
            with run.autocast():
                loss = text_loss(model, text)
            loss.backward()
            rows *= 2
        except torch.OutOfMemoryError:
            refused += 1
            break
        finally:
            model.zero_grad(set_to_none=True)
    must(refused == 1, "all sizes ran")
    torch.cuda.empty_cache()
    train(run, model, steps=4, shapes=((4, 256), (8, 128)))


@program()
def threads(run):
    """Six threads that train on separate streams; in two of them some steps fail and training continues."""
    found, failures = {}, []

    def work(number):
        try:
            stream = torch.cuda.Stream() if run.on_gpu else None
            with torch.cuda.stream(stream) if run.on_gpu else contextlib.nullcontext():
                # The threads share one generator, so no random number is drawn from it.
                width = run.size(768, 16)
                weights = [(normals(10 * number + at, width, width) / width**0.5).to(run.device).requires_grad_() for at in range(4)]
                for step in range(10):
                    x = normals(step, run.size(256, 4), width).to(run.device)
                    for weight in weights:
                        x = torch.tanh(x @ weight)
                    loss = (Raises.apply(x) if number < 2 and step % 3 == 1 else x).square().mean()
                    with contextlib.suppress(Expected):
                        loss.backward()
                        with torch.no_grad():
                            for weight in weights:
                                weight -= 0.1 * weight.grad
                    for weight in weights:
                        weight.grad = None
                found[number] = float(loss.detach())
        except BaseException as error:
            failures.append(repr(error))

    started = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    must(not failures, failures)
    for number in sorted(found):
        run.loss(found[number])
