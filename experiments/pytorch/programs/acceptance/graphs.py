"""CUDA graphs that a program captures itself, and its own memory pools."""

import gc

import torch
from torch import nn

from acceptance.common import normals, must, program


def chain(x, steps):
    """Matrix products whose results are allocated within the capture."""
    for _ in range(steps):
        x = torch.tanh(x @ x.T) @ x / x.shape[0]
    return x


def captured(function, pool=None):
    """A graph of a function, captured after two calls on a side stream; and the function's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function()
    return graph, out


@program(cpu=False)
def graphs_in_one_pool(run):
    """Three graphs of different sizes share a pool and are replayed in order; one is dropped and captured anew."""
    inputs = [normals(size, size, 512).to(run.device) for size in (256, 1024, 512)]
    pool = torch.cuda.graph_pool_handle()
    graphs = [captured(lambda x=x: chain(x, 4), pool) for x in inputs]
    for turn in range(4):
        for x in inputs:
            x.copy_(normals(100 + turn, *x.shape))
        for graph, out in graphs:
            graph.replay()
            run.loss(out.double().square().mean())
        wanted = [chain(x, 4).double().square().mean() for x in inputs]
        must(all(torch.isfinite(one) for one in wanted), "what is computed without a graph is not finite")
    del graphs[-1], graph, out
    gc.collect()
    graphs.append(captured(lambda: chain(inputs[2], 8), pool))
    for graph, out in graphs:
        graph.replay()
        run.loss(out.double().square().mean())
    del graphs, graph, out
    torch.cuda.empty_cache()
    run.loss(chain(inputs[1], 2).double().mean())


@program(cpu=False)
def graphed_training(run):
    """A whole training step as one graph, with an optimizer whose state is on the GPU, and work without a graph."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 1024)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=True)
    x = normals(0, 256, 1024).to(run.device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = captured(step)
    for number in range(8):
        x.copy_(normals(number, 256, 1024))
        graph.replay()
        run.loss(loss)
        with torch.no_grad():
            run.loss(model(normals(50 + number, 64 * (1 + number % 3), 1024).to(run.device)).square().mean())


@program(cpu=False)
def graphed_callables(run):
    """torch.cuda.make_graphed_callables: parts of a model as graphs in one pool, forward and backward."""
    parts = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(run.device) for _ in range(3)]
    samples = tuple((normals(at, 128, 1024).to(run.device).requires_grad_(),) for at in range(3))
    graphed = torch.cuda.make_graphed_callables(tuple(parts), samples)
    head = nn.Linear(1024, 10).to(run.device)
    weights = [weight for part in parts for weight in part.parameters()] + list(head.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for step in range(6):
        x = normals(step, 128, 1024).to(run.device).requires_grad_()
        for part in graphed:
            x = part(x)
        loss = head(x).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        run.loss(loss)


@program(cpu=False)
def pools_mixed(run):
    """A MemPool, a graph with a private pool, a side stream and the default pool; tensors outlive their pool."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = [normals(at, 1 << 20).to(run.device) for at in range(8)]
        del held[::2]
    x = torch.zeros(1 << 20, device=run.device)
    graph, out = captured(lambda: chain(x.view(1024, 1024), 2) + 1)
    for number in range(3):
        x.fill_(number)
        graph.replay()
        run.loss(out[0, 0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        beside = torch.full((1 << 22,), 3.0, device=run.device)
        beside.record_stream(torch.cuda.current_stream())
    side.synchronize()
    run.loss(beside.double().sum())
    segments = pool.snapshot()
    must(segments and all(tuple(one["segment_pool_id"]) == pool.id for one in segments), "the pool has no segments")
    del pool
    gc.collect()
    run.loss(sum(one.double().sum() for one in held))
    del held
    torch.cuda.empty_cache()
    run.loss(torch.ones(1 << 22, device=run.device).sum())


@program(cpu=False, gib=4.0)
def pools_in_turn(run):
    """Two pools used in turn, nested, on many streams, with a cache flush in between."""
    pools = [torch.cuda.MemPool() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    held = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]), torch.cuda.use_mem_pool(pools[turn % 2]):
            x = normals(turn, 512 + 64 * turn, 1024).to(run.device)
            with torch.cuda.use_mem_pool(pools[(turn + 1) % 2]):
                y = x * 2
            held.append(y + x)
            del x, y
        if turn % 4 == 3:
            torch.cuda.synchronize()
            run.loss(sum(one.double().sum() for one in held))
            del held[: len(held) // 2]
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    run.loss(sum(one.double().sum() for one in held))
