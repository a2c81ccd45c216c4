//! Ways to launch a step, and streams: they change when work is done, and never what comes out.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use allocators::BackendKind;
use common::{arms, attempt, digits, iris, train};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use trainer::Settings;
use trainer::arithmetic::{Dtype, FuseMode, GemmMode, WeightsMode};
use trainer::observer::Silent;
use trainer::settings::{LaunchMode, LoaderMode, SyncMode};

/// Two epochs whose last batch is smaller, for each kind of step.
fn steps() -> Vec<(&'static str, Settings)> {
    let base = Settings { batch: 32, ..iris() };
    vec![
        ("f32", base.clone()),
        ("f32 update", Settings { fuse: FuseMode::Update, ..base.clone() }),
        ("tf32 epilogue", Settings { dtype: Dtype::Tf32, fuse: FuseMode::Epilogue, ..base.clone() }),
        (
            "f16 update",
            Settings { dtype: Dtype::F16, weights: WeightsMode::Half, fuse: FuseMode::Update, ..base.clone() },
        ),
        (
            "f16 update by cublaslt",
            Settings { dtype: Dtype::F16, gemm: Some(GemmMode::CublasLt), fuse: FuseMode::Update, ..base.clone() },
        ),
        ("bf16 master", Settings { dtype: Dtype::Bf16, fuse: FuseMode::Update, layers: 4, ..base }),
    ]
}

fn graph(settings: &Settings) -> Settings {
    Settings { launch: LaunchMode::Graph, ..settings.clone() }
}

fn refusal(settings: &Settings) -> String {
    let (outcome, _directory) = attempt(settings, &AtomicBool::new(false), Arc::new(Silent));
    outcome.unwrap_err().to_string()
}

#[test]
fn a_graph_gives_the_losses_of_single_launches() {
    for (name, settings) in steps() {
        let eager = train(&settings).finished();
        let expected = eager.column("loss");
        assert!(expected.windows(2).all(|pair| pair[0] != pair[1]), "{name}: the loss should move: {expected:?}");
        for (arm, settings) in arms(&graph(&settings)) {
            for sync in [SyncMode::Never, SyncMode::Step] {
                let done = train(&Settings { sync, ..settings.clone() }).finished();
                assert_eq!(done.column("loss"), expected, "{name}, {arm}, {sync:?}");
                let validation = |done: &common::Done| {
                    done.outcome.summary.epochs.iter().map(|epoch| epoch.val_loss.to_bits()).collect::<Vec<_>>()
                };
                assert_eq!(validation(&done), validation(&eager), "{name}, {arm}, {sync:?}");
            }
        }
    }
}

#[test]
fn streams_change_no_loss() {
    for (name, settings) in steps() {
        let expected = train(&settings).finished().column("loss");
        for (arm, settings) in arms(&settings) {
            for streams in 2..=4 {
                for loader in [LoaderMode::Copy, LoaderMode::Pinned, LoaderMode::Resident] {
                    let settings = Settings { streams, loader, ..settings.clone() };
                    assert_eq!(
                        train(&settings).finished().column("loss"),
                        expected,
                        "{name}, {arm}, {streams}, {loader:?}"
                    );
                }
                let settings = Settings { streams, ..graph(&settings) };
                assert_eq!(train(&settings).finished().column("loss"), expected, "{name}, {arm}, {streams}, graph");
            }
        }
    }
}

#[test]
fn the_checker_finds_nothing_and_changes_nothing() {
    for (name, settings) in steps() {
        let expected = train(&settings).finished().column("loss");
        let eager = Settings { streams: 4, loader: LoaderMode::Pinned, ..settings.clone() };
        for settings in [eager, graph(&settings), Settings { streams: 4, ..graph(&settings) }] {
            let done = train(&Settings { check: true, ..settings.clone() }).finished();
            let report = done.outcome.summary.check.as_ref().unwrap();
            assert!(report.is_clean(), "{name}, {settings:?}: {report:?}");
            assert_eq!(done.column("loss"), expected, "{name}, {settings:?}");
        }
    }
}

/// A step of a graph is one call; the kernels are launched for the captures and the validation only, and nothing is
/// allocated for a step any more.
#[test]
fn a_step_of_a_graph_is_one_call() {
    for allocator in [BackendKind::Naive, BackendKind::Caching, BackendKind::StreamOrdered] {
        let settings = Settings { allocator, epochs: 3, fuse: FuseMode::Update, batch: 32, ..iris() };
        let done = train(&graph(&settings)).finished();
        let epochs = &done.outcome.summary.epochs;
        let calls = |epoch: usize, call: &str| {
            let calls = serde_json::to_value(epochs[epoch].driver_calls).unwrap();
            calls.get(call).map_or(0, |totals| totals["count"].as_u64().unwrap())
        };
        let steps = epochs[0].steps;
        assert_eq!((0..3).map(|epoch| calls(epoch, "graph_launch")).collect::<Vec<_>>(), [steps; 3], "{allocator:?}");
        // A full batch and the last, smaller one.
        assert_eq!((0..3).map(|epoch| calls(epoch, "capture_end")).collect::<Vec<_>>(), [2, 0, 0], "{allocator:?}");
        let single = train(&settings).finished();
        let launches = serde_json::to_value(single.outcome.summary.epochs[1].driver_calls).unwrap();
        let all = launches["kernel_launch"]["count"].as_u64().unwrap();
        let validation = calls(1, "kernel_launch");
        assert!(validation > 0 && validation + 5 * steps < all, "{allocator:?}: {validation} of {all}");
        assert_eq!(done.json()["settings"]["launch"], "graph");
    }
}

#[test]
fn streams_of_their_own_are_waited_for() {
    let settings = Settings { streams: 4, loader: LoaderMode::Pinned, fuse: FuseMode::Update, ..digits() };
    let done = train(&settings).finished();
    let calls = serde_json::to_value(done.outcome.summary.driver_calls).unwrap();
    let steps = done.outcome.summary.epochs[0].steps;
    // The loader's, one for each layer's update, and the end of the updates.
    assert!(calls["stream_wait_event"]["count"].as_u64().unwrap() >= steps * (1 + 3 + 1));
    assert_eq!(done.json()["settings"]["streams"], 4);
    let alone = train(&Settings { streams: 1, ..settings }).finished();
    let calls = serde_json::to_value(alone.outcome.summary.driver_calls).unwrap();
    assert!(calls.get("stream_wait_event").is_none_or(|totals| totals["count"] == 0));
}

#[test]
fn what_cannot_be_a_graph_is_refused() {
    for loader in [LoaderMode::Copy, LoaderMode::Pinned] {
        assert!(refusal(&Settings { loader, ..graph(&iris()) }).contains("--loader resident"));
    }
    assert!(refusal(&Settings { sync: SyncMode::Op, ..graph(&iris()) }).contains("--sync step"));
}
