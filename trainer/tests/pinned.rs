//! Pinned host memory: how it is pinned and what is kept in it changes no loss, and the record says what it cost.

use crate::common::{digits, iris, train};
use trainer::arithmetic::{Dtype, FuseMode, WeightsMode};
use trainer::settings::{LaunchMode, LoaderMode, OffloadMode, PinMode, SyncMode};
use trainer::{Settings, exit};
use vramlab::{CallKind, HostCosts, Pinning, Profile};

const PINS: [PinMode; 3] = [PinMode::Plain, PinMode::Registered, PinMode::Pooled];

fn offloaded(base: &Settings) -> Settings {
    Settings { offload: Some(OffloadMode::Optimizer), ..base.clone() }
}

fn half(base: Settings) -> Settings {
    Settings { dtype: Dtype::Bf16, ..base }
}

fn losses(settings: &Settings) -> Vec<String> {
    train(settings).finished().column("loss")
}

#[test]
fn pinning_does_not_change_the_losses() {
    for base in [iris(), half(iris()), digits()] {
        let expected = losses(&base);
        for pin in PINS {
            let pinned = Settings { loader: LoaderMode::Pinned, pin: Some(pin), ..base.clone() };
            assert_eq!(losses(&pinned), expected, "{pin:?}");
        }
    }
}

#[test]
fn state_on_the_host_does_not_change_the_losses() {
    for fuse in [FuseMode::None, FuseMode::Epilogue, FuseMode::Update] {
        for layers in [1, 2, 5] {
            let base = Settings { fuse, layers, ..half(iris()) };
            let expected = losses(&base);
            assert!(expected.windows(2).all(|pair| pair[0] != pair[1]), "the loss should move: {expected:?}");
            for pin in PINS {
                let settings = Settings { pin: Some(pin), ..offloaded(&base) };
                assert_eq!(losses(&settings), expected, "{fuse:?}, {layers} layers, {pin:?}");
            }
        }
    }
}

#[test]
fn state_on_the_host_works_under_every_allocator_and_number_of_streams() {
    let base = Settings { fuse: FuseMode::Update, layers: 4, epochs: 1, ..half(iris()) };
    let expected = losses(&base);
    for backend in vramlab::backends::all() {
        for (streams, sync) in [(1, SyncMode::Never), (4, SyncMode::Never), (2, SyncMode::Op)] {
            let settings =
                Settings { allocator: backend.into(), streams, sync, check: streams == 2, ..offloaded(&base) };
            assert_eq!(losses(&settings), expected, "{backend}, {streams} streams");
        }
    }
}

#[test]
fn the_record_counts_what_was_pinned_and_copied() {
    let base = Settings { loader: LoaderMode::Pinned, layers: 4, hidden: 300, epochs: 1, ..half(iris()) };
    let base = Settings { batch: 10, ..base };
    for pin in PINS {
        let run = train(&Settings { pin: Some(pin), ..offloaded(&base) }).finished();
        let summary = &run.outcome.summary;
        let host = summary.host_memory.as_ref().unwrap();
        let offload = host.offload.unwrap();
        assert_eq!(summary.settings.chosen.pin, Some(pin));
        let steps: u64 = summary.epochs.iter().map(|epoch| epoch.steps).sum();
        assert_eq!(host.to_host_bytes, steps * offload.state_bytes, "{pin:?}");
        // The batches, and the state once a step.
        assert!(host.to_device_bytes > host.to_host_bytes, "{pin:?}");
        assert!(offload.window_bytes < offload.state_bytes, "{offload:?}");
        assert!(offload.step_wait_s.unwrap() >= 0.0);
        assert!(
            host.peak_requested_bytes >= offload.state_bytes && host.peak_reserved_bytes >= host.peak_requested_bytes
        );
        assert!(host.pin_s > 0.0, "{pin:?}");
        let calls = |kind: CallKind| summary.driver_calls.get(kind).count;
        match pin {
            PinMode::Plain => {
                // Two rings of four buffers, and a buffer for each layer.
                assert_eq!((host.pin_calls, host.buffers), (12, 12));
                assert_eq!((calls(CallKind::HostAlloc), calls(CallKind::HostRegister)), (12, 0));
            }
            PinMode::Registered => {
                assert_eq!((host.pin_calls, calls(CallKind::HostAlloc), calls(CallKind::HostRegister)), (12, 0, 12));
                assert_eq!(host.pinning, Pinning::Register { threads: 4 }.to_string());
            }
            PinMode::Pooled => {
                assert_eq!(host.allocator.as_deref(), Some("host-exact"));
                assert!(host.buffers > 12 && host.pin_calls < host.buffers, "{host:?}");
            }
        }
    }
}

#[test]
fn registering_costs_what_was_measured() {
    let run = train(&Settings { pin: Some(PinMode::Registered), layers: 2, ..offloaded(&half(iris())) }).finished();
    let host = run.outcome.summary.host_memory.unwrap();
    let whole = HostCosts::h100x8().pin_ns(host.peak_requested_bytes, Pinning::Register { threads: 4 }).unwrap();
    // Whole nanoseconds of each call, behind which the program takes its own time.
    let rest = host.pin_s * 1e9 - whole as f64;
    let most = host.pin_calls * Profile::h200().program_ns_per_call;
    assert!(-(host.pin_calls as f64) <= rest && rest <= most as f64, "{} {whole}", host.pin_s);
}

#[test]
fn state_on_the_host_leaves_the_device() {
    let base = Settings { layers: 8, hidden: 200, epochs: 1, allocator: "naive".parse().unwrap(), ..half(iris()) };
    let peak =
        |settings: &Settings| train(settings).finished().outcome.summary.allocator_stats.requested_bytes.all.peak;
    let offload = train(&offloaded(&base)).finished().outcome.summary.host_memory.unwrap().offload.unwrap();
    let (kept, offloaded) = (peak(&base), peak(&offloaded(&base)));
    assert!(kept - offloaded >= offload.state_bytes - 2 * offload.window_bytes, "{kept} {offloaded} {offload:?}");
}

#[test]
fn a_run_without_pinned_memory_records_none() {
    let summary = train(&iris()).finished().outcome.summary;
    assert!(summary.host_memory.is_none() && summary.settings.chosen.pin.is_none());
}

#[test]
fn settings_that_do_not_go_together_are_refused() {
    let half = half(digits());
    let cases = [
        (Settings { pin: Some(PinMode::Pooled), ..digits() }, "--loader pinned"),
        (offloaded(&digits()), "--dtype bf16"),
        (Settings { weights: WeightsMode::Half, ..offloaded(&half) }, "--weights master"),
        (Settings { launch: LaunchMode::Graph, ..offloaded(&half) }, "--launch eager"),
    ];
    for (settings, fix) in cases {
        let (outcome, _) = crate::common::attempt(
            &settings,
            &std::sync::atomic::AtomicBool::new(false),
            std::sync::Arc::new(trainer::observer::Silent),
        );
        let error = outcome.unwrap_err();
        assert_eq!(error.exit_code(), exit::BAD_INPUT, "{error}");
        assert!(error.to_string().contains(fix), "{error}");
    }
}
