//! Other libraries' policies compared with plain models of them: the rules of each original, written naively, with vectors that are
//! searched from the front. On random requests of several streams, whose work completes at random times, every block must have the
//! model's address, and free memory must be split as in the model.

mod arena;
mod by_lists;
mod device;
mod lists;

use crate::common::{KIB, MIB, Random, allocate, free};
use by_lists::{CuPy, Own, Paddle, Tlsf};
use device::{ByHand, Device};
use std::sync::Arc;
use vramlab_device::HookedDriver;
use vramlab_device::{Driver, NullDriver};
use vramlab_policies::{Block, BlockState, Selection};

const STREAMS: usize = 4;

/// An allocator's rules without its bookkeeping.
trait Model {
    /// First address of the block for a request; `None` refuses it.
    fn allocate(&mut self, device: &mut Device, stream: usize, bytes: u64) -> Option<u64>;

    /// A block becomes reusable.
    fn free(&mut self, addr: u64);

    /// Free ranges as (first address, bytes), in the units of a snapshot.
    fn free_ranges(&self) -> Option<Vec<(u64, u64)>>;
}

/// Steps of a seed, each of which a failure names.
const STEPS: usize = 500;

/// Compares an allocator with a model on `seeds` random programs with requests of up to 2^`largest_log2` bytes, on a device with
/// `room`. Returns the number of refused requests.
fn hold<M: Model>(allocator: &str, model: impl Fn() -> M, seeds: u64, largest_log2: u64, room: u64) -> u64 {
    let selection: Selection = allocator.parse().unwrap();
    selection.check().unwrap();
    let (mut served, mut refused) = (0, 0);
    for seed in 0..seeds {
        let mut random = Random::new(seed + 1);
        let driver = Arc::new(HookedDriver::with_hook(Arc::new(NullDriver::new(room)), ByHand::default()));
        let streams = [(); STREAMS].map(|()| driver.stream_create().unwrap());
        let allocator = selection.build(&(Arc::clone(&driver) as Arc<dyn Driver>)).unwrap();
        let (mut model, mut device) = (model(), Device::new(room, STREAMS));
        let mut live: Vec<(Block, usize, Vec<usize>)> = Vec::new();
        for step in 0..STEPS {
            let at = format!("{selection}, seed {seed}, step {step}");
            driver.hook().at(step);
            let stream = random.below(STREAMS as u64) as usize;
            match random.below(20) {
                0..10 => {
                    device.completed(false).into_iter().for_each(|addr| model.free(addr));
                    let bytes = random.size(largest_log2);
                    let real = allocate(allocator.as_ref(), bytes, streams[stream]).ok();
                    let addr = real.as_ref().map(|block| block.addr().get());
                    assert_eq!(addr, model.allocate(&mut device, stream, bytes), "{at}: {bytes} bytes on {stream}");
                    *(if real.is_some() { &mut served } else { &mut refused }) += 1;
                    live.extend(real.map(|block| (block, stream, Vec::new())));
                }
                10..17 if !live.is_empty() => {
                    let (block, owner, users) = live.swap_remove(random.below(live.len() as u64) as usize);
                    let addr = block.addr().get();
                    free(allocator.as_ref(), block, streams[owner]).unwrap();
                    if users.is_empty() { model.free(addr) } else { device.defer(addr, &users, step) }
                }
                17 | 18 if !live.is_empty() => {
                    let which = random.below(live.len() as u64) as usize;
                    let (block, owner, users) = &mut live[which];
                    allocator.record_use(block, streams[stream]).unwrap();
                    if stream != *owner && !users.contains(&stream) {
                        users.push(stream);
                    }
                }
                _ => {
                    driver.hook().complete(streams[stream], step);
                    device.complete(stream, step);
                }
            }
            if let Some(free) = model.free_ranges() {
                let snapshot = allocator.snapshot().unwrap();
                let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
                let real = blocks.filter(|block| block.state == BlockState::Free);
                assert_eq!(real.map(|block| (block.addr.get(), block.bytes)).collect::<Vec<_>>(), free, "{at}");
            }
        }
        for (block, owner, _) in live {
            free(allocator.as_ref(), block, streams[owner]).unwrap();
        }
    }
    assert!(served > 100 * seeds, "{selection}: {served} served and {refused} refused");
    refused
}

#[test]
fn rmm_pool() {
    let model = |maximum| move || by_lists::RmmPool::new(MIB, maximum);
    hold("rmm-pool:initial_pool_size=1M", model(None), 60, 17, 256 * MIB);
    // Where the device refuses to double the pool, and where whole blocks are released to stay below a maximum.
    let refused = hold("rmm-pool:initial_pool_size=1M", model(None), 60, 20, 6 * MIB);
    let bounded = hold("rmm-pool:initial_pool_size=1M,maximum_pool_size=6M", model(Some(6 * MIB)), 60, 20, 256 * MIB);
    assert!(refused > 0 && bounded > 0, "{refused} {bounded}");
}

#[test]
fn rmm_arena() {
    let refused = hold("rmm-arena:arena_size=24M", || arena::RmmArena::new(24 * MIB), 60, 22, 256 * MIB);
    assert!(refused > 0);
}

#[test]
fn bfc() {
    let model = |limit| move || by_lists::Bfc::new(64 * KIB, limit);
    hold("bfc:initial_region=64K", model(None), 60, 18, 256 * MIB);
    let limited = hold("bfc:initial_region=64K,memory_limit=4M", model(Some(4 * MIB)), 60, 19, 256 * MIB);
    let refused = hold("bfc:initial_region=64K", model(None), 60, 19, 4 * MIB);
    assert!(refused > 0 && limited > 0, "{refused} {limited}");
}

#[test]
fn cupy() {
    hold("cupy", || Own::new(CuPy), 60, 16, 256 * MIB);
    assert!(hold("cupy", || Own::new(CuPy), 60, 20, 6 * MIB) > 0);
}

#[test]
fn paddle() {
    let model = || Own::new(Paddle { chunk: 256 * KIB });
    hold("paddle:chunk_size=256K", model, 60, 18, 256 * MIB);
    assert!(hold("paddle:chunk_size=256K", model, 60, 19, 3 * MIB) > 0);
}

#[test]
fn tlsf() {
    let model = || Own::new(Tlsf { segment: 2 * MIB });
    hold("tlsf:segment=2M", model, 60, 18, 256 * MIB);
    assert!(hold("tlsf:segment=2M", model, 60, 20, 6 * MIB) > 0);
}
