//! One operation of a compiled history: sixteen bytes, with numbers instead of addresses and handles.

use std::collections::BTreeMap;
use std::fmt;

/// Maximum number of streams; a log with more is not of a training run.
pub const MAX_STREAMS: usize = 4096;

/// Operations of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Requests `value` bytes and stores the block in its slot.
    Alloc,
    /// Frees the slot's block, which no other stream uses.
    Free,
    /// Frees the slot's block while another stream may use it; `value` is a packed [`Release`].
    Release,
    /// Announces that the stream uses the slot's block.
    Use,
    /// Empties the cache.
    Trim,
    /// Requests `value` bytes that the recorded allocator refused; only replayed at recorded addresses.
    Refused,
    /// Nothing.
    Nothing,
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Op {
    /// Bytes, or a packed [`Release`].
    pub(crate) value: u64,
    /// Slot of the block.
    pub(crate) slot: u32,
    /// Kind in the lowest byte, above it twelve bits for the stream's number and twelve for the private pool's.
    code: u32,
}

/// Position of the private pool in a code.
const POOL_SHIFT: u32 = 20;

/// Maximum number of private pools. They are numbered from 1.
pub(crate) const MAX_POOLS: u32 = (1 << (u32::BITS - POOL_SHIFT)) - 1;

const _: () = assert!(MAX_STREAMS <= 1 << (POOL_SHIFT - 8), "a stream's number has twelve bits");

impl Op {
    pub(crate) fn new(kind: Kind, stream: u32, slot: u32, value: u64) -> Self {
        // CAST: the discriminant of a `repr(u8)` enum.
        Self { value, slot, code: stream << 8 | kind as u32 }
    }

    pub(crate) fn kind(self) -> Kind {
        match self.code & 0xFF {
            0 => Kind::Alloc,
            1 => Kind::Free,
            2 => Kind::Release,
            3 => Kind::Use,
            4 => Kind::Trim,
            5 => Kind::Refused,
            _ => Kind::Nothing,
        }
    }

    /// Number of the stream, below [`MAX_STREAMS`].
    pub(crate) fn stream(self) -> u32 {
        (self.code & ((1 << POOL_SHIFT) - 1)) >> 8
    }

    /// Number of its private pool; 0 if none.
    pub(crate) fn pool(self) -> u32 {
        self.code >> POOL_SHIFT
    }

    pub(crate) fn set_kind(&mut self, kind: Kind) {
        *self = Self::new(kind, self.stream(), self.slot, self.value).of_pool(self.pool());
    }

    pub(crate) fn set_stream(&mut self, stream: u32) {
        *self = Self::new(self.kind(), stream, self.slot, self.value).of_pool(self.pool());
    }

    /// When a free completes; only of a [`Kind::Free`] or [`Kind::Release`].
    pub(crate) fn release(self) -> Release {
        // CAST: the two halves.
        Release { ready: self.value as u32, user: (self.value >> 32) as u32 }
    }

    pub(crate) fn set_release(&mut self, release: Release) {
        self.value = release.pack();
    }

    /// Makes it a free whose completion the device decides.
    pub(crate) fn complete_by_device(&mut self) {
        self.set_release(Release { ready: BY_DEVICE, user: NO_STREAM });
    }

    /// Assigns the operation to a private pool (0: none).
    pub(crate) fn of_pool(self, pool: u32) -> Self {
        Self { code: self.code & ((1 << POOL_SHIFT) - 1) | pool << POOL_SHIFT, ..self }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, stream, pool) = (self.kind(), self.stream(), self.pool());
        f.debug_struct("Op")
            .field("kind", &kind)
            .field("stream", &stream)
            .field("pool", &pool)
            .field("slot", &self.slot)
            .field("value", &self.value)
            .finish()
    }
}

/// When a block with a deferred free becomes reusable, and which stream uses it until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Release {
    /// The first operation at which its events have completed, [`NEVER`] or [`BY_DEVICE`].
    pub(crate) ready: u32,
    /// The stream whose use is not recorded and must be announced; [`NO_STREAM`] if all are recorded.
    pub(crate) user: u32,
}

/// The recording ends before the free completes.
pub(crate) const NEVER: u32 = u32::MAX;
/// The recording does not show when frees complete: the device decides.
pub(crate) const BY_DEVICE: u32 = u32::MAX - 1;
/// No stream.
pub(crate) const NO_STREAM: u32 = u32::MAX;

impl Release {
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.user) << 32 | u64::from(self.ready)
    }
}

/// Requested frees that complete in a later operation.
#[derive(Debug)]
pub(crate) struct DueFrees<T>(BTreeMap<u32, Vec<T>>);

impl<T> Default for DueFrees<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> DueFrees<T> {
    /// Records that operation `number` frees `item`, which is returned if it is free immediately.
    pub(crate) fn request(&mut self, number: u32, op: Op, item: T) -> Option<T> {
        match (op.kind(), op.release().ready) {
            (Kind::Release, NEVER) => None,
            (Kind::Release, ready) if ready != BY_DEVICE && ready > number => {
                self.0.entry(ready).or_default().push(item);
                None
            }
            _ => Some(item),
        }
    }

    /// Frees that complete up to operation `number` and have not been returned, by first operation.
    pub(crate) fn complete(&mut self, number: u32) -> Option<Vec<T>> {
        let due = self.0.first_entry().filter(|due| *due.key() <= number)?;
        Some(due.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_sixteen_bytes_and_keeps_its_fields() {
        assert_eq!(size_of::<Op>(), 16);
        let mut op = Op::new(Kind::Alloc, 7, 9, 11);
        for kind in [Kind::Alloc, Kind::Free, Kind::Release, Kind::Use, Kind::Trim, Kind::Refused, Kind::Nothing] {
            op.set_kind(kind);
            op.set_stream(kind as u32 + 4000);
            op = op.of_pool(MAX_POOLS - kind as u32);
            let fields = (op.kind(), op.stream(), op.pool(), op.slot, op.value);
            assert_eq!(fields, (kind, kind as u32 + 4000, MAX_POOLS - kind as u32, 9, 11));
        }
        let release = Release { ready: BY_DEVICE, user: NO_STREAM };
        assert_eq!(Op::new(Kind::Release, 0, 0, release.pack()).release(), release);
    }
}
