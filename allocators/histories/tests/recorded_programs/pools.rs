//! Programs with CUDA graphs, whose private pools are inferred from the segments because events do not name them.

use super::{MIB, Recording, all_recordings, run, run_under, under};
use std::sync::Arc;
use vramlab_device::NullDriver;
use vramlab_histories::plan::{CrossStream, lower_bound};
use vramlab_histories::replay::History;
use vramlab_policies::backends::{plan, remap};

/// Recordings with graphs, or the others.
fn recordings(graphs: bool) -> impl Iterator<Item = (Recording, History)> {
    let of_graphs = |recording: &Recording| recording.path.file_name().unwrap().to_str().unwrap().starts_with("graph");
    let chosen = all_recordings().filter(move |recording| of_graphs(recording) == graphs);
    chosen.map(|recording| {
        let (history, _) = recording.load();
        (recording, history)
    })
}

#[test]
fn private_pools_are_inferred_and_used() {
    let mut checked = 0;
    for (recording, history) in recordings(true) {
        let (_, settings) = recording.load();
        let name = recording.path.display();
        // One capture; two callables, each with one pool for all its graphs.
        let pools = if recording.path.to_str().unwrap().contains("graph_step") { 1 } else { 2 };
        assert_eq!((history.private_pools(), history.undetermined_pool_allocations()), (pools, 0), "{name}");
        assert!(history.private_pool_allocations() > 20, "{name}");
        let expands = recording.expandable;
        for kind in if expands { &["pytorch-expandable"][..] } else { &["pytorch", "caching"][..] } {
            let report = run_under(&under(kind, &settings), &history, Arc::new(NullDriver::new(1 << 50)));
            let mismatches = (report.address_mismatches, report.segment_mismatches);
            assert_eq!((mismatches, report.private_pools), ((Some(0), Some(0)), true), "{name} under {kind}");
            let peak = report.stats.reserved_bytes.all.peak;
            assert_eq!(Some(peak), recording.number("reserved_bytes.all.peak"), "{name} under {kind}");
        }
        if !expands {
            // A single pool serves them at other addresses.
            let report = run(&plan::BACKEND, &history, settings, Arc::new(NullDriver::new(1 << 50)));
            assert!(!report.private_pools && report.address_mismatches > Some(0), "{name}");
        }
        checked += 1;
    }
    assert!(checked >= 4, "the repository has four");
}

/// Graphs keep their blocks' memory, so peak live bytes are not enough, and `remap` can take none of their pages.
#[test]
fn remap_needs_little_more_than_live_and_graph_memory() {
    for (recording, history) in recordings(true) {
        let name = recording.path.display();
        let bound = lower_bound(&history.lifetimes(), CrossStream::AfterWait);
        assert!(history.max_live_bytes() < bound, "{name}: graphs keep memory");
        assert!(Some(bound) <= recording.number("reserved_bytes.all.peak"), "{name}: PyTorch shows that it is a bound");
        // CAST: bytes of a device, below 2^53. Small and large blocks of each stream and pool have separate pages.
        let device = (bound as f64 * 1.04) as u64 / (2 * MIB) * 2 * MIB;
        let (_, settings) = recording.load();
        let report = run(&remap::BACKEND, &history, settings, Arc::new(NullDriver::new(device)));
        assert_eq!(report.failed_allocations, 0, "{name} in {device} bytes for {bound}");
    }
}

#[test]
fn other_programs_have_no_private_pools() {
    for (recording, history) in recordings(false) {
        let pools =
            (history.private_pools(), history.private_pool_allocations(), history.undetermined_pool_allocations());
        assert_eq!(pools, (0, 0, 0), "{}", recording.path.display());
    }
}
