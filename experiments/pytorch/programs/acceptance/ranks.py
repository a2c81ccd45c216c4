"""Jobs of two processes with a GPU each: training and communication through NCCL."""

import contextlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acceptance.common import close, normals, gpt, must, program, resnet, text_loss, tokens, train

# Shapes whose product with the width keeps both GPUs busy for some milliseconds.
SHAPES = ((6, 512), (4, 768), (8, 256))


def wrapped(run, model, **options):
    """A model under DDP."""
    return DistributedDataParallel(model, device_ids=[run.device.index] if run.on_gpu else None, **options)


def words(run):
    """The number of words of the models."""
    return run.size(16000, 200)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def ddp(run):
    """DistributedDataParallel with texts of varying shape, and steps that only accumulate."""
    model = wrapped(run, gpt(run))
    optimizer = train(run, model, words=words(run), steps=4, shapes=SHAPES)
    for step in range(4):
        text = tokens(100 + 2 * step + run.rank, words(run), 2, run.size(384, 17)).to(run.device)
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext(), run.autocast():
            loss = text_loss(model, text)
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        run.loss(loss)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def ddp_hook(run):
    """DDP with a static graph, gradients as views of buckets, and a hook that sends them as bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = wrapped(run, gpt(run), gradient_as_bucket_view=True, static_graph=True)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(run, model, words=words(run), shapes=SHAPES)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def ddp_checkpointed(run):
    """DDP over checkpoints with dropout; a part of the model gets no gradient in some steps."""
    from torch.utils.checkpoint import checkpoint

    model = gpt(run, dropout=0.1, around=lambda block, x: checkpoint(block, x, use_reentrant=False))
    model = wrapped(run, model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(5):
        model.module.around = None if step % 2 else lambda block, x: checkpoint(block, x, use_reentrant=False)
        some = model.module.blocks if step % 2 else model.module.blocks[:-1]
        kept, model.module.blocks = model.module.blocks, some
        text = tokens(2 * step + run.rank, words(run), 4, run.size(385, 17)).to(run.device)
        with run.autocast():
            loss = text_loss(model, text)
        loss.backward()
        model.module.blocks = kept
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.loss(loss)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def ddp_uneven(run):
    """Ranks with different numbers of batches, by Join, and batch norms with statistics over both."""
    from torch.distributed.algorithms.join import Join

    model = resnet(run.size(32, 4), 10).to(run.device)
    if run.on_gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = wrapped(run, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number):
        side = run.size(96, 8)
        x, y = normals(2 * number + run.rank, run.size(24, 4), 3, side, side), tokens(number, 10, run.size(24, 4))
        loss = nn.functional.cross_entropy(model(x.to(run.device)), y.to(run.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.loss(loss)

    for number in range(3):
        step(number)
    # Statistics over both ranks would wait for the rank that has ended.
    model.eval()
    with Join([model]):
        for number in range(3 + 3 * run.rank):
            step(10 + number)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def zero_optimizer(run):
    """An optimizer whose state is sharded over the ranks, and gathered for a checkpoint."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped(run, gpt(run))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-4)
    train(run, model, optimizer, words=words(run), shapes=SHAPES)
    optimizer.consolidate_state_dict(to=0)
    if run.rank == 0:
        must(len(optimizer.state_dict()["state"]) == len(list(model.parameters())), "the state is not whole")


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def fsdp1(run):
    """FullyShardedDataParallel (FSDP1), block by block, with its state dict at the end."""
    import functools

    from acceptance.common import Block
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FullyShardedDataParallel(gpt(run), auto_wrap_policy=policy, use_orig_params=True, device_id=run.device)
    train(run, model, words=words(run), shapes=SHAPES)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    run.loss(sum(value.double().sum() for value in whole.values()))


def sharded(run, **options):
    """A model under FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    model = gpt(run)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def fsdp2(run):
    """fully_shard with matrix products in bfloat16; blocks are gathered again in the backward pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(run, sharded(run, mp_policy=mixed), words=words(run), shapes=SHAPES)


@program(ranks=2, gpus=2, cpu=False, gib=4.0, seconds=25.0)
def fsdp2_host(run):
    """fully_shard with weights and gradients offloaded to pinned host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    train(run, sharded(run, offload_policy=CPUOffloadPolicy()), words=words(run), steps=4, shapes=SHAPES)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def fsdp2_checkpoint(run):
    """A sharded model and its optimizer are saved by torch.distributed.checkpoint, and training resumes from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(run)
    optimizer = train(run, model, words=words(run), steps=3, shapes=SHAPES)
    folder = [tempfile.mkdtemp() if run.rank == 0 else None]
    dist.broadcast_object_list(folder)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states}
    dcp.load(saved, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    train(run, model, optimizer, words=words(run), steps=3, shapes=SHAPES)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def tensor_parallel(run):
    """The layers of each block split by columns and by rows, inputs split along the text."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(run.device.type, (2,))
    width = run.size(1024, 16)

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = nn.Sequential(*[Mlp() for _ in range(4)]).to(run.device)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(6):
        x = normals(step, run.size(512 + 512 * (step % 3), 4), width).to(run.device)
        loss = model(x).square().mean()
        run.step(optimizer, loss)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def pipeline(run):
    """Two stages of a pipeline, GPipe and then one forward, one backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    width, rows = run.size(1024, 16), run.size(512, 8)
    for kind in (ScheduleGPipe, Schedule1F1B):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]).to(run.device)
        stage = PipelineStage(model, run.rank, 2, run.device)
        schedule = kind(stage, 4, loss_fn=nn.MSELoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            losses = []
            if run.rank == 0:
                schedule.step(normals(step, rows, width).to(run.device))
            else:
                schedule.step(target=normals(50 + step, rows, width).to(run.device), losses=losses)
                run.loss(torch.stack(losses).mean())
            optimizer.step()
            optimizer.zero_grad()


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def all_to_all(run):
    """Experts on both ranks: the number of tokens sent to the other rank differs from step to step."""
    width = run.size(512, 8)
    for step in range(12):
        counts = [1 + (37 * step + 101 * (run.rank + 2 * to)) % run.size(4000, 20) for to in range(2)]
        back = [1 + (37 * step + 101 * (source + 2 * run.rank)) % run.size(4000, 20) for source in range(2)]
        x = normals(2 * step + run.rank, sum(counts), width).to(run.device)
        there = torch.empty(sum(back), width, device=run.device)
        work = dist.all_to_all_single(there, x, back, counts, async_op=True)
        beside = torch.tanh(x[: counts[0]]).mean()
        work.wait()
        there = there * 2
        home = torch.empty_like(x)
        dist.all_to_all_single(home, there, counts, back)
        must(torch.equal(home, 2 * x), "what came back is not twice what went")
        run.loss(beside)
        run.loss(home.double().mean())


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def dropped_in_flight(run):
    """Tensors are dropped while NCCL's stream still uses them, and their memory is requested again immediately."""
    size = run.size(1 << 22, 1 << 8)
    for step in range(24):
        works = [dist.all_reduce(torch.full((size,), float(step), device=run.device), async_op=True) for _ in range(4)]
        junk = [torch.full((size,), -1.0, device=run.device) for _ in range(4)]
        for work in works:
            work.wait()
        del works, junk
    each = [torch.full((size,), float(run.rank + 1), device=run.device) for _ in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in each]
    for work in works:
        work.wait()
    total = float(sum(x.double().sum() for x in each))
    must(total == 8 * 3 * size, "the sum is", total)
    run.loss(total)


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def sent_directly(run):
    """Pairs of sends and receives, gathers of uneven parts, objects, and a second group in addition to the first."""
    other = 1 - run.rank
    group = dist.new_group([0, 1], backend="gloo")
    for step in range(8):
        size = run.size(1 << (16 + step % 5), 64)
        x = torch.full((size,), float(run.rank + step), device=run.device)
        got = torch.empty_like(x)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, got, other)])
        for work in works:
            work.wait()
        must(float(got[-1]) == other + step, "rank", run.rank, "got", float(got[-1]))
        parts = [torch.empty(size, device=run.device) for _ in range(2)]
        dist.all_gather(parts, got)
        scattered = torch.empty(size // 2, device=run.device)
        dist.reduce_scatter_tensor(scattered, x)
        run.loss(scattered.double().sum() + sum(part.double().sum() for part in parts))
        said = [None, None]
        dist.all_gather_object(said, {"rank": run.rank, "sum": float(x.sum())}, group=group)
        must(said[other]["rank"] == other, "the other rank said", said[other])
        host = torch.ones(8) * run.rank
        dist.all_reduce(host, group=group)
        run.loss(host.sum())


@program(ranks=2, gpus=2, cpu=False, gib=4.0, seconds=25.0)
def graphed_reduce(run):
    """All-reduces within a CUDA graph, on memory that the capture allocated and on earlier memory."""
    x = torch.full((1 << 22,), float(run.rank + 1), device=run.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            dist.all_reduce(x.clone())
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    for step in range(8):
        x.fill_(run.rank + step)
        graph.replay()
        wanted = 2 * (2 * step + 1) + 1
        must(float(z[0]) == float(z[-1]) == wanted, "the graph says", float(z[0]), "and not", wanted)
        run.loss(z.double().sum())
        eager = torch.full((1 << 20,), float(step), device=run.device)
        dist.all_reduce(eager)
        run.loss(eager.double().sum())


@program(ranks=2, gpus=2, gib=4.0, seconds=25.0)
def reduced_again(run):
    """The same tensors are reduced many times, with allocations and frees in between: NCCL's registrations must stay valid."""
    held = [torch.ones(run.size(1 << (18 + at % 5), 32), device=run.device) for at in range(12)]
    for step in range(16):
        for x in held:
            dist.all_reduce(x)
            x.mul_(0.5)
        held.append(torch.ones(run.size(1 << 22, 32), device=run.device))
        held.pop(0)
        if step == 8 and run.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    for x in held:
        must(bool((x == 1).all()), "a mean of ones is not one")
    run.loss(sum(x.double().sum() for x in held))


@program(ranks=2, gpus=2, cpu=False, gib=4.0, seconds=25.0)
def nccl_pool(run):
    """A MemPool over NCCL's own allocator, registered with the communicator, next to the default pool."""
    backend = dist.group.WORLD._get_backend(run.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        held = [torch.full((1 << 22,), float(run.rank + 1), device=run.device) for _ in range(3)]
    backend.register_mem_pool(pool)
    for x in held:
        dist.all_reduce(x)
        common = torch.full((1 << 20,), 1.0, device=run.device)
        dist.all_reduce(common)
        must(float(x[0]) == 3.0 and float(common[-1]) == 2.0, "a sum is", float(x[0]), float(common[-1]))
        run.loss(x.double().sum())
    torch.cuda.synchronize()
    backend.deregister_mem_pool(pool)
    del held, x
    torch.cuda.synchronize()


@program(ranks=2, gpus=2, cpu=False, gib=4.0, seconds=25.0)
def symmetric_memory(run):
    """Symmetric memory: a tensor at the same offset on both GPUs, reduced by reading the other's, next to ordinary memory."""
    import torch.distributed._symmetric_memory as symmetric

    x = symmetric.empty(1 << 20, dtype=torch.float32, device=run.device)
    handle = symmetric.rendezvous(x, dist.group.WORLD)
    for step in range(5):
        common = [torch.full((1 << 20,), -1.0, device=run.device) for _ in range(4)]
        handle.barrier()
        x.fill_(run.rank + 1 + step)
        out = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)
        must(float(out[0]) == float(out[-1]) == 3 + 2 * step, "the sum is", float(out[0]))
        run.loss(out.double().sum())
        other = handle.get_buffer(1 - run.rank, (1 << 20,), torch.float32)
        handle.barrier()
        run.loss(other[0])
        handle.barrier()
        del common, other
    torch.cuda.synchronize()


@program(ranks=2, gpus=2, cpu=False, gib=5.0, seconds=60.0, tolerance=1e-2)
def ddp_compiled(run):
    """A compiled model under DDP, whose graph is split where buckets are reduced."""
    torch.use_deterministic_algorithms(False)
    width = 1024
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]).to(run.device)
    model = torch.compile(wrapped(run, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(normals(2 * step + run.rank, 1024, width).to(run.device)).square().mean()
        run.step(optimizer, loss)


@program(ranks=2, gpus=2, gib=3.0, seconds=25.0)
def failing_rank(run):
    """Both ranks fail on a batch and skip it together; gradients in flight are dropped."""
    model = wrapped(run, gpt(run, layers=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(6):
        bad = torch.tensor(float(step % 3 == 2 and run.rank == step // 3), device=run.device)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        text = tokens(2 * step + run.rank, words(run), 4, run.size(257, 17)).to(run.device)
        try:
            with run.autocast():
                loss = text_loss(model, text)
            loss.backward()
            if bad.item():
                raise ValueError("a bad batch")
            optimizer.step()
            run.loss(loss)
        except ValueError:
            del loss
        optimizer.zero_grad(set_to_none=True)
    weights = sum(weight.double().sum() for weight in model.parameters())
    both = [torch.zeros_like(weights) for _ in range(2)]
    dist.all_gather(both, weights.detach())
    must(close(both[0], both[1], 1e-9), "the ranks have different weights")
    run.loss(both[0])
