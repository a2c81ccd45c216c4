//! A full device without a known limit.

use super::{STREAMS, Step, cases, check_faithful, compile, play, run, steps};
use crate::common::MIB;
use crate::recorder::Recorder;
use proptest::prelude::*;
use vramlab_histories::formats::{Action, Event};
use vramlab_histories::replay::Addresses;
use vramlab_policies::backends::{CachingSettings, caching};

/// The device is full and no limit is set, which PyTorch's logs do not contain: failed requests show it.
#[test]
fn retry_on_a_full_device_is_not_empty_cache() {
    let settings = CachingSettings::default();
    let mut recorder = Recorder::new(settings, 200 * MIB, STREAMS);
    let free_last = |recorder: &mut Recorder| recorder.free(recorder.live.len() - 1);
    assert!(recorder.alloc(120 * MIB, 0));
    free_last(&mut recorder);
    // 260 MiB are more than the device has.
    assert!(recorder.alloc(140 * MIB, 0));
    free_last(&mut recorder);
    recorder.empty_cache();
    for mib in [60, 50] {
        assert!(recorder.alloc(mib * MIB, 0));
    }
    free_last(&mut recorder);
    recorder.empty_cache();
    // The client's: 110 and 60 MiB would have fitted.
    assert!(recorder.alloc(58 * MIB, 0) && !recorder.alloc(90 * MIB, 0));
    let recorded = recorder.caching.stats();
    assert_eq!(recorded.num_alloc_retries, 2);
    let history = compile(&recorder.events(), &settings).unwrap();
    let report = run(&history, &caching::BACKEND, settings, Addresses::Recorded);
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)));
    assert_eq!((&report.stats, report.ledger), (&recorded, recorder.caching.ledger_at_peak()));
    // Five blocks, three frees, two calls of `empty_cache`.
    assert_eq!(report.operations, 10);
    // Without the failed request nothing shows it.
    let events: Vec<Event> = recorder.events().into_iter().filter(|event| event.action != Action::Oom).collect();
    let history = compile(&events, &settings).unwrap();
    assert_eq!(run(&history, &caching::BACKEND, settings, Addresses::Recorded).operations, 11);
}

proptest! {
    #![proptest_config(cases(200))]

    /// A full device without a limit: releases and refusals are reproduced, whether or not the log shows the reason.
    #[test]
    fn caching_follows_its_history_on_a_full_device(
        steps in steps(300),
        room in 60..200u64,
    ) {
        let settings = CachingSettings::default();
        // Blocks with which a deferred free coalesced in a retry are not always known.
        let mut steps = steps;
        steps.retain(|step| !matches!(step, Step::Use { .. }));
        let mut recorder = Recorder::new(settings, room * MIB, STREAMS);
        play(&mut recorder, &steps);
        check_faithful(settings, &recorder);
    }
}
