//! How little memory `remap` needs, and that it costs nothing where there is enough.

use super::{MIB, load};
use std::path::Path;
use std::sync::Arc;
use vramlab::backends::{expandable, remap};
use vramlab::histories::replay::{History, ReplayReport, ReplaySettings, replay};
use vramlab::{Driver, NullDriver, Selection};

fn history(name: &str) -> History {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../experiments/histories/{name}.pickle.xz")), None, None)
        .0
}

fn run(history: &History, allocator: &str, bytes: u64) -> ReplayReport {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(bytes));
    replay(history, &allocator.parse::<Selection>().unwrap(), &driver, &ReplaySettings::default()).unwrap()
}

#[test]
fn histories_run_in_hardly_more_than_they_hold() {
    // The network's blocks are small, so that its pages are never all free; side streams keep pages until their work is over.
    for (name, most) in [("gpt2", 1.015), ("resnet50", 1.015), ("mlp", 1.05), ("streams", 1.05)] {
        let history = history(name);
        // CAST: bytes of a device, below 2^53.
        let device = (history.max_live_bytes() as f64 * most) as u64 / (2 * MIB) * 2 * MIB;
        let report = run(&history, remap::BACKEND.name, device);
        assert_eq!(report.failed_allocations, 0, "{name} in {device} bytes");
        assert!(report.stats.reserved_bytes.all.peak <= device);
        let pytorch = run(&history, expandable::BACKEND.name, device);
        let moved = report.driver_calls.get("mem_unmap").copied().unwrap_or(0);
        assert!(moved > 0 || pytorch.failed_allocations == 0, "{name}: pages moved where PyTorch fails");
    }
}

#[test]
fn with_room_to_spare_no_page_moves() {
    for name in ["gpt2", "resnet50", "mlp", "streams"] {
        let history = history(name);
        let [ours, pytorch] =
            [&remap::BACKEND, &expandable::BACKEND].map(|backend| run(&history, backend.name, 1 << 50));
        assert_eq!(ours.driver_calls.get("mem_unmap"), None, "{name}");
        assert_eq!(ours.driver_calls["mem_set_access"], pytorch.driver_calls["mem_set_access"], "{name}: growth");
        assert_eq!(ours.stats.reserved_bytes.all.peak, pytorch.stats.reserved_bytes.all.peak, "{name}");
    }
}

#[test]
fn pages_that_are_always_taken_first_keep_reserved_at_what_is_active() {
    for (name, most) in [("gpt2", 1.015), ("resnet50", 1.015), ("mlp", 1.05), ("streams", 1.04)] {
        let stats = run(&history(name), "remap:steal=always", 1 << 50).stats;
        let ratio = stats.reserved_bytes.all.peak as f64 / stats.active_bytes.all.peak as f64;
        assert!(ratio <= most, "{name}: {ratio}");
    }
}
