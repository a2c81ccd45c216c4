//! The calls of the driver that an allocator makes: counted, and the segments noted.

use super::held::{segment_gone, segment_made};
use crate::record;
use std::cell::Cell;
use vramlab_device::{CallArguments, CallKind, CallOutcome, Driver, DriverResult, Hook};

/// Watches the driver of an allocator.
#[derive(Debug)]
pub(super) struct Watch;

thread_local! {
    /// Bytes of the segment that is being given back.
    static GOING: Cell<u64> = const { Cell::new(0) };
}

fn is_memory(kind: CallKind) -> bool {
    use CallKind as Call;
    matches!(
        kind,
        Call::MemAlloc
            | Call::MemFree
            | Call::MemAllocAsync
            | Call::MemFreeAsync
            | Call::MemCreate
            | Call::MemMap
            | Call::MemSetAccess
            | Call::MemUnmap
            | Call::MemRelease
    )
}

// SAFETY: looks at calls and changes none.
unsafe impl Hook for Watch {
    /// When the call began.
    type Before = u64;

    fn before(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<u64> {
        if kind == CallKind::MemFree
            && let Some(addr) = arguments.addr
        {
            // Before the call, because the driver may give the address out at once.
            GOING.set(segment_gone(addr.get()).unwrap_or(0));
        }
        Ok(record::start())
    }

    fn after(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments, start: u64, outcome: CallOutcome) {
        if is_memory(kind) {
            record::driver_call(start);
        }
        let bytes = arguments.bytes;
        match (kind, outcome.ok) {
            (CallKind::MemAlloc, true) => {
                if let Some(addr) = outcome.addr {
                    segment_made(addr.get(), bytes);
                }
                record::reserve(bytes, 0);
            }
            (CallKind::MemFree, true) => record::reserve(0, GOING.take()),
            (CallKind::MemFree, false) => {
                if let Some(addr) = arguments.addr {
                    segment_made(addr.get(), GOING.take());
                }
            }
            (CallKind::MemMap, true) => record::reserve(bytes, 0),
            (CallKind::MemUnmap, true) => record::reserve(0, bytes),
            (CallKind::MemAddressReserve, true) => {
                if let Some(addr) = outcome.addr {
                    segment_made(addr.get(), bytes);
                }
            }
            (CallKind::MemAddressFree, true) => {
                if let Some(addr) = arguments.addr {
                    segment_gone(addr.get());
                }
            }
            _ => {}
        }
    }
}
