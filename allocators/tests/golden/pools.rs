//! Programs with CUDA graphs, whose private pools the events do not name: they are told from the segments.

use super::{Recording, all_recordings, run};
use std::sync::Arc;
use vramlab::NullDriver;
use vramlab::backends::{caching, expandable, plan, pytorch};
use vramlab::histories::replay::History;

/// Those with graphs, and the others.
fn recordings(graphs: bool) -> impl Iterator<Item = (Recording, History)> {
    let of_graphs = |recording: &Recording| recording.path.file_name().unwrap().to_str().unwrap().starts_with("graph");
    let chosen = all_recordings().filter(move |recording| of_graphs(recording) == graphs);
    chosen.map(|recording| {
        let (history, _) = recording.load();
        (recording, history)
    })
}

#[test]
fn private_pools_are_told_and_kept() {
    let mut found = 0;
    for (recording, history) in recordings(true) {
        let (_, settings) = recording.load();
        let name = recording.path.display();
        // One capture; two callables, each with a pool for all its graphs.
        let pools = if recording.path.to_str().unwrap().contains("graph_step") { 1 } else { 2 };
        assert_eq!((history.private_pools(), history.undetermined_pool_allocations()), (pools, 0), "{name}");
        assert!(history.private_pool_allocations() > 20, "{name}");
        let expands = recording.expandable;
        let kinds = if expands { vec![&expandable::BACKEND] } else { vec![&pytorch::BACKEND, &caching::BACKEND] };
        for kind in kinds {
            let report = run(kind, &history, settings, Arc::new(NullDriver::new(1 << 50)));
            let mismatches = (report.address_mismatches, report.segment_mismatches);
            assert_eq!((mismatches, report.private_pools), ((Some(0), Some(0)), true), "{name} under {kind}");
            let peak = report.stats.reserved_bytes.all.peak;
            assert_eq!(Some(peak), recording.number("reserved_bytes.all.peak"), "{name} under {kind}");
        }
        if !expands {
            // From one pool they are served elsewhere.
            let report = run(&plan::BACKEND, &history, settings, Arc::new(NullDriver::new(1 << 50)));
            assert!(!report.private_pools && report.address_mismatches > Some(0), "{name}");
        }
        found += 1;
    }
    assert!(found >= 4, "the repository has four");
}

#[test]
fn other_programs_have_none() {
    for (recording, history) in recordings(false) {
        let told =
            (history.private_pools(), history.private_pool_allocations(), history.undetermined_pool_allocations());
        assert_eq!(told, (0, 0, 0), "{}", recording.path.display());
    }
}
