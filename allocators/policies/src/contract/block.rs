//! A live block, and the path by which it was served.

use crate::contract::Token;
use std::fmt;
use vramlab_device::DeviceAddr;

/// Alignment that every backend guarantees, in bytes. CUDA promises 256 for `cuMemAlloc`.
pub const GUARANTEED_ALIGN: u64 = 256;

vramlab_device::named! {
    /// The path that served an operation; latency is reported by operation and path, because their costs differ by orders of
    /// magnitude.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    // As wide as a copy of a `Block` reads it, see `Block::new`.
    #[repr(u64)]
    pub enum Path {
        /// A cached block was allocated without a split, or a freed block was put into the cache.
        Hit "hit",
        /// A cached block was split.
        Split "split",
        /// A freed block was coalesced with a free neighbour.
        Coalesce "coalesce",
        /// The free is deferred until events of other streams complete.
        Deferred "deferred",
        /// The allocating or freeing stream waits on the device for another stream's use.
        WaitInserted "wait_inserted",
        /// A CUDA memory pool served it (its internal path is not visible).
        Pool "pool",
        /// The driver allocated memory.
        DriverAlloc "driver_alloc",
        /// Memory was released to the driver.
        DriverFree "driver_free",
        /// Old cached segments were released first because the garbage collection threshold was exceeded.
        Collect "collect",
        /// Free pages from other addresses were mapped for it.
        Steal "steal",
        /// The device refused; the cache was released and the device was asked again.
        Retry "retry",
        /// The operation failed.
        Failed "failed",
    }
}

/// A live block of device memory.
///
/// Affine: neither `Clone` nor `Copy`, so freeing it twice does not compile. Forging one does not compile either:
///
/// ```compile_fail,E0133
/// let addr = vramlab_device::DeviceAddr::new(4096).unwrap();
/// let token = vramlab_policies::Tokens::next().token();
/// let forged = vramlab_policies::Block::new(addr, 512, 512, vramlab_policies::Path::Hit, token); // unsafe
/// ```
/// ```compile_fail,E0382
/// fn twice(a: &dyn vramlab_policies::DeviceAllocator, b: vramlab_policies::Block, s: vramlab_device::StreamId) {
///     unsafe { a.deallocate(b, s) };
///     unsafe { a.deallocate(b, s) }; // use of moved value
/// }
/// ```
#[must_use = "a dropped Block leaks device memory; hand it to `deallocate`"]
#[derive(PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Block {
    bytes: u64,
    requested: u64,
    /// First address, and the path in its low bits, which are zero for every block: together half a cache line.
    place: DeviceAddr,
    token: Token,
}

const _: () = assert!(size_of::<Block>() == 32, "a block is written in two halves of 16 bytes");

impl Block {
    /// Makes a block, for implementations of [`DeviceAllocator`](crate::DeviceAllocator). `token` is one of the allocator's
    /// [`Tokens`](super::Tokens): it distinguishes its blocks from those of others, also of its own kind, because devices return
    /// the same addresses. An allocator refuses a block with the token of another allocator.
    ///
    /// # Safety
    /// `addr` is a multiple of [`GUARANTEED_ALIGN`]. From there `bytes` bytes, at least `requested`, are device memory of this
    /// block only: no other live block shares a byte, and none is released to the device or allocated again before the block has
    /// been freed and its uses have completed.
    // Written in two halves, as a copy reads it: a processor forwards a store to a load only if the load is within the store.
    // Otherwise each copy of a new block waits for the stores. Written word by word, replays of recorded traces take 3 to 10 %
    // longer (`experiments/notes/caching.md`). The alignment keeps each half in one cache line.
    #[inline(always)]
    pub unsafe fn new(addr: DeviceAddr, bytes: u64, requested: u64, path: Path, token: Token) -> Self {
        debug_assert!(addr.get().is_multiple_of(GUARANTEED_ALIGN), "every backend aligns its blocks");
        // CAST: the discriminant.
        let tagged = addr.with_low_bits(path as u64);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_set_epi64x, _mm_store_si128};
            // SAFETY: every x86-64 processor has this instruction, which accesses no memory.
            let half = |low: u64, high: u64| unsafe { _mm_set_epi64x(high.cast_signed(), low.cast_signed()) };
            let mut block = std::mem::MaybeUninit::<Self>::uninit();
            let at = block.as_mut_ptr().cast::<__m128i>();
            // SAFETY: a block is as large as two halves and aligned like one, and has the declared layout. All four words are
            // written before it is read, and `place` is an address.
            unsafe {
                _mm_store_si128(at, half(bytes, requested));
                _mm_store_si128(at.add(1), half(tagged.get(), token.get()));
                block.assume_init()
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self { bytes, requested, place: tagged, token }
    }

    /// Copies the block for an instrument to pass on: written as [`new`](Self::new) writes it.
    #[inline(always)]
    pub(crate) fn hand_on(self) -> Self {
        // SAFETY: the promises for the consumed block hold for this one.
        unsafe { Self::new(self.addr(), self.bytes, self.requested, self.path(), self.token) }
    }

    /// First address.
    #[must_use]
    #[inline(always)]
    pub fn addr(&self) -> DeviceAddr {
        self.place.without_low_bits(GUARANTEED_ALIGN - 1)
    }

    /// Size after the backend's rounding, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Requested size, in bytes.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// How the allocation was served.
    #[must_use]
    #[inline(always)]
    pub fn path(&self) -> Path {
        // CAST: less than the number of paths, as `new` wrote it.
        Path::ALL[(self.place.get() % GUARANTEED_ALIGN) as usize]
    }

    /// The token of the allocator that made it.
    #[must_use]
    #[inline(always)]
    pub fn token(&self) -> Token {
        self.token
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("addr", &self.addr())
            .field("bytes", &self.bytes)
            .field("requested", &self.requested)
            .field("path", &self.path())
            .field("token", &self.token)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_reads_back_as_what_it_was_made_of() {
        for (number, path) in (0u64..).zip(Path::ALL) {
            assert_eq!(path as u64, number, "a path is stored by its place in the order");
            let addr = DeviceAddr::new(0x7f00_0000_0100 + number * GUARANTEED_ALIGN).unwrap();
            // CAST: few paths.
            let token = Token::new(number as u32, 7);
            // SAFETY: the block is new and not used.
            let made = || unsafe { Block::new(addr, u64::MAX - number, number, path, token) };
            for block in [made(), made().hand_on()] {
                assert_eq!((block.addr(), block.bytes(), block.requested()), (addr, u64::MAX - number, number));
                assert_eq!((block.path(), block.token()), (path, token));
            }
        }
    }
}
