//! A kernel writes beyond its block into the neighbour, which `compute-sanitizer` sees when it is told of blocks:
//!
//! ```sh
//! cargo build --release -p trainer --example overrun
//! compute-sanitizer --nvtx=yes --force-blocking-launches target/release/examples/overrun caching
//! ```
//!
//! `--nvtx-memory off` after the allocator keeps the blocks from the checker, which then finds nothing; `--inside` stays inside
//! the block. Needs a GPU.

use kernels::{CudaKernels, Fill, Operation};
use std::error::Error;
use std::sync::Arc;
use vramlab::instruments::nvtx::memory::{Heaps, NvtxMemory};
use vramlab::{CudaDriver, DeviceAllocator, Driver, Request, Selection};

/// Values of a block.
const VALUES: u64 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().filter(|word| !word.starts_with("--")).map_or("caching", String::as_str);
    let given = |option: &str| arguments.iter().any(|word| word == option);
    let cuda = Arc::new(CudaDriver::new(0)?);
    cuda.bind_to_thread()?;
    let kernels = CudaKernels::load()?;
    let mut driver: Arc<dyn Driver> = Arc::clone(&cuda) as _;
    let heaps = if given("off") { None } else { Heaps::of_attached_tool() };
    if let Some(heaps) = &heaps {
        driver = heaps.watch(driver);
    }
    let mut allocator: Arc<dyn DeviceAllocator> = name.parse::<Selection>()?.build(&driver)?;
    if let Some(heaps) = &heaps {
        allocator = Arc::new(NvtxMemory::new(allocator, Arc::clone(heaps)));
    }
    let stream = driver.stream_create()?;
    let bytes = VALUES * 4;
    let first = allocator.allocate(Request::new(bytes), stream)?;
    let second = allocator.allocate(Request::new(bytes), stream)?;
    let apart = second.addr().get().saturating_sub(first.addr().get()) / 4;
    let len = if given("--inside") { VALUES } else { apart + 1 };
    let fill = Fill { len, value: 7.0, out: first.addr().get() };
    // SAFETY: the kernels are of this driver's context. Beyond the block lies the neighbour, which this program holds, so the
    // wrong write that is shown here harms nothing else.
    unsafe { fill.launch(&kernels, cuda.raw_stream(stream)?) }?;
    let synchronised = driver.stream_synchronize(stream);
    println!("{{\"apart\": {apart}, \"written\": {len}, \"told\": {}}}", heaps.is_some());
    synchronised?;
    for block in [first, second] {
        // SAFETY: the kernel has ended.
        unsafe { allocator.deallocate(block, stream) }?;
    }
    Ok(())
}
