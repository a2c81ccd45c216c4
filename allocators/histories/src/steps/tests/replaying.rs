//! Replaying a history. What the allocator itself does is its own and not counted.

use super::{MANY, linear};
use crate::formats::{Action, Event};
use crate::replay::{Addresses, HistoryBuilder, ReplaySettings, replay};
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver};
use vramlab_policies::Selection;
use vramlab_policies::backends::CachingSettings;

const MIB: u64 = 1 << 20;
const BASE: u64 = 1 << 40;

#[test]
fn segments_that_another_allocator_does_not_take() {
    // The recorded program took a segment for each block. What a replay does not take is passed over once.
    let each = |at: u64| {
        let (addr, stream) = (BASE + at * 2 * MIB, 1 + at % 8);
        [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted, Action::SegmentFree]
            .map(|action| Event { action, device: 0, addr, bytes: 2 * MIB, stream, time_ns: 0 })
    };
    let mut builder = HistoryBuilder::new(None);
    (0..MANY / 5).flat_map(each).for_each(|event| builder.push(&event).unwrap());
    let history = builder.finish(&CachingSettings::default()).unwrap();
    for addresses in [Addresses::Recorded, Addresses::Near] {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 46));
        let settings = ReplaySettings { addresses, ..ReplaySettings::default() };
        let selection: Selection = "caching".parse().unwrap();
        let report = linear("replay", 2 * history.allocations(), || replay(&history, &selection, &driver, &settings));
        assert_eq!(report.unwrap().allocations, MANY / 5);
    }
}
