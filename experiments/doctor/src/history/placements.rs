//! How the requests of a history were served, told by a replay that puts every block where it was recorded.

use std::sync::Arc;
use vramlab::backends::{CachingSettings, parse_list};
use vramlab::histories::replay::{Addresses, BlockPlace, History, ReplaySettings, Watched, replay_watched};
use vramlab::{Driver, NullDriver};

/// PyTorch's two policies.
const POLICIES: &str = "caching,pytorch-expandable";

/// A place for each allocation, those from before the first event first; `None` where no replay puts every block and every
/// segment where it was.
pub(crate) fn as_recorded(history: &History, settings: &CachingSettings) -> Option<Vec<BlockPlace>> {
    history.check_comparable().ok()?;
    parse_list(POLICIES).ok()?.into_iter().find_map(|mut policy| {
        policy.adopt(settings);
        policy.set_memory_limit(settings.memory_limit);
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(super::UNLIMITED));
        let recorded = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
        let mut watched = Watched::default();
        let report = replay_watched(history, &policy, &driver, &recorded, &mut watched).ok()?;
        let exact = report.address_mismatches == Some(0) && report.segment_mismatches.unwrap_or(0) == 0;
        exact.then_some(watched.places)
    })
}
