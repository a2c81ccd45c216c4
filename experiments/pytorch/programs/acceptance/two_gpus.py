"""One process with two GPUs: copies between them, models over both."""

import torch
from torch import nn

from acceptance.common import normals, must, program


@program(gpus=2, cpu=False, gib=3.0, seconds=20.0)
def data_parallel(run):
    """DataParallel, which copies the model to both GPUs in each step and calls them in threads."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        loss = model(normals(step, 512 + 128 * (step % 3), 1024).to(run.device)).square().mean()
        run.step(optimizer, loss)


@program(gpus=2, cpu=False, gib=3.0, seconds=20.0)
def between_gpus(run):
    """Copies from one GPU to the other and back on several streams, with the memory dropped in between."""
    for step in range(12):
        there = torch.arange(1 << (18 + step % 6), device="cuda:0", dtype=torch.float) % 97
        here = there.to("cuda:1")
        back = (here + 1).to("cuda:0", non_blocking=True)
        must(torch.equal(back, there + 1), "what came back is something else")
        run.loss(back.double().sum())
        side = torch.cuda.Stream(1)
        with torch.cuda.stream(side):
            again = there.to("cuda:1", non_blocking=True)
            again.record_stream(torch.cuda.current_stream(1))
            total = (again * 2).double().sum()
        there.record_stream(torch.cuda.current_stream(0))
        del there, here, again
        side.synchronize()
        run.loss(total)
        if step % 5 == 4:
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            torch.cuda.empty_cache()


@program(gpus=2, cpu=False, gib=3.0, seconds=20.0)
def model_parallel(run):
    """A model whose layers alternate between the GPUs, forward and backward."""
    layers = [nn.Linear(2048, 2048).to(f"cuda:{at % 2}") for at in range(6)]
    optimizer = torch.optim.AdamW([weight for layer in layers for weight in layer.parameters()], lr=1e-4)
    for step in range(8):
        x = normals(step, 256 + 128 * (step % 3), 2048).to("cuda:0")
        for at, layer in enumerate(layers):
            x = torch.tanh(layer(x.to(f"cuda:{at % 2}")))
        loss = x.square().mean()
        run.step(optimizer, loss)


@program(gpus=2, cpu=False, gib=3.0, seconds=20.0)
def graph_each(run):
    """A CUDA graph on each GPU, replayed in turn with copies between them, and a memory pool on the second."""
    graphs = []
    for number in range(2):
        with torch.cuda.device(number):
            x = torch.zeros(512, 512, device=f"cuda:{number}")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.tanh(x @ x.T)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # A capture's stream belongs to one GPU.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                out = torch.tanh(x @ x.T) + x
            graphs.append((graph, x, out))
    with torch.cuda.device(1):
        pool = torch.cuda.MemPool()
    with torch.cuda.device(1), torch.cuda.use_mem_pool(pool, device=1):
        held = torch.ones(1 << 20, device="cuda:1")
    carried = normals(0, 512, 512) / 32
    for _ in range(4):
        for number, (graph, x, out) in enumerate(graphs):
            with torch.cuda.device(number):
                x.copy_(carried)
                graph.replay()
                torch.cuda.synchronize()
                carried = out.clone() / 2
            run.loss(carried.double().square().mean())
    run.loss(held.sum())
