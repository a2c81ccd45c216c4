"""Other libraries that allocate on the same GPU in the same process, and pass memory to PyTorch."""

import os

import torch

from acceptance.common import close, normals, must, program


@program(needs=("cupy",), cpu=False, gib=4.0, seconds=25.0)
def cupy_neighbour(run):
    """CuPy next to PyTorch: its own pool, arrays passed both ways without a copy, freed on either side."""
    import cupy

    for step in range(6):
        x = normals(step, 512 + 256 * step, 1024).to(run.device)
        theirs = cupy.from_dlpack(x)
        product = theirs @ theirs.T
        back = torch.from_dlpack(product)
        # CuPy has its own stream.
        cupy.cuda.get_current_stream().synchronize()
        must(close(back.double().sum(), (x @ x.T).double().sum(), 1e-2), "the two products differ")
        run.loss(theirs.sum().item())
        del x, theirs, product
        run.loss(back.double().square().mean())
        junk = [cupy.full(1 << 22, 7.0) for _ in range(3)]
        run.loss(float(junk[1].sum()))
        del back, junk
        if step % 2:
            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()


@program(needs=("cupy",), cpu=False, gib=4.0, seconds=25.0)
def cupy_over_torch(run):
    """CuPy allocates its memory from PyTorch's allocator, as in CuPy's documentation."""
    import cupy

    def allocate(size):
        memory = cupy.cuda.UnownedMemory
        address = torch.cuda.caching_allocator_alloc(max(size, 1), run.device.index, cupy.cuda.get_current_stream().ptr)

        class Owner:
            def __del__(self):
                torch.cuda.caching_allocator_delete(address)

        return cupy.cuda.MemoryPointer(memory(address, size, Owner(), run.device.index), 0)

    cupy.cuda.set_allocator(allocate)
    before = torch.cuda.memory_allocated()
    for step in range(6):
        x = cupy.arange(1 << (18 + step), dtype=cupy.float32) % 97
        run.loss(float(cupy.sort(x)[::2].astype(cupy.float64).sum()))
        must(torch.cuda.memory_allocated() > before, "CuPy's array is not PyTorch's memory")
        del x
    cupy.cuda.get_current_stream().synchronize()
    must(torch.cuda.memory_allocated() == before, "CuPy's memory is still there")


@program(needs=("jax",), cpu=False, gib=6.0, seconds=40.0, tolerance=1e-2)
def jax_neighbour(run):
    """JAX next to PyTorch, each with its own memory; arrays are passed both ways by DLPack."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    from jax import dlpack

    @jax.jit
    def step(x):
        return jnp.tanh(x @ x.T) @ x / x.shape[0]

    for number in range(5):
        x = normals(number, 256 * (1 + number % 3), 512).to(run.device)
        torch.cuda.synchronize()
        theirs = step(dlpack.from_dlpack(x))
        theirs.block_until_ready()
        back = torch.from_dlpack(theirs)
        wanted = torch.tanh(x @ x.T) @ x / x.shape[0]
        must(torch.allclose(back, wanted, rtol=5e-2, atol=5e-2), "JAX says something else")
        run.loss(back.double().square().mean())
        del theirs, x
        run.loss((back * 2).double().abs().sum())
        del back
        torch.cuda.empty_cache()


@program(needs=("triton",), cpu=False, seconds=25.0)
def triton_kernel(run):
    """A custom Triton kernel between PyTorch's, with requested scratch memory."""
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, count, size: tl.constexpr):
        at = tl.program_id(0) * size + tl.arange(0, size)
        inside = at < count
        tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)

    for step in range(8):
        count = 100_003 * (step + 1)
        x, y = (normals(2 * step + at, count).to(run.device) for at in range(2))
        out = torch.empty_like(x)
        add[(triton.cdiv(count, 1024),)](x, y, out, count, size=1024)
        must(torch.equal(out, x + y), "the kernel adds wrongly")
        run.loss(out.double().sum())


@program(cpu=False)
def arrays_of_others(run):
    """The CUDA array interface: an object that imitates an array, and views of PyTorch's memory by address."""

    class Looks:
        def __init__(self, tensor):
            self.tensor = tensor
            self.__cuda_array_interface__ = {
                "shape": tuple(tensor.shape), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 2,
            }  # fmt: skip

    for step in range(6):
        x = normals(step, 1 << (16 + step)).to(run.device)
        view = torch.as_tensor(Looks(x), device=run.device)
        must(view.data_ptr() == x.data_ptr(), "the view is a copy")
        view.add_(1)
        wanted = x.double().sum()
        del x
        must(float(view.double().sum()) == float(wanted), "the memory is gone with its first owner")
        run.loss(wanted)
