//! Many steps as one kernel: the same losses as step by step, and a record that says how they were launched.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{StopAt, arms, attempt, digits, iris, train, train_with};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use trainer::arithmetic::{Accumulate, Dtype, FuseMode, GemmMode, WeightsMode};
use trainer::observer::Silent;
use trainer::settings::{LaunchMode, LoaderMode, ProfileSteps, SyncMode};
use trainer::{Settings, TrainError, exit};
use vramlab::CallKind;
use vramlab::backends::naive;

/// With all of a step in few launches, which `launch` may ask for.
fn fused(base: Settings, launch: LaunchMode) -> Settings {
    Settings { fuse: FuseMode::Update, launch, ..base }
}

fn losses(settings: &Settings) -> Vec<String> {
    let losses = train(settings).finished().column("loss");
    assert!(losses.iter().all(|loss| loss.parse::<f32>().unwrap().is_finite()), "{losses:?}");
    losses
}

/// Short epochs of many steps: 120 of one row.
fn row_by_row() -> Settings {
    Settings { batch: 1, epochs: 2, learning_rate: 0.02, ..iris() }
}

#[test]
fn every_way_to_launch_gives_the_same_losses_in_every_type() {
    let all = [LaunchMode::Eager, LaunchMode::Graph, LaunchMode::Persistent];
    for dtype in [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16] {
        for base in [iris(), digits()] {
            let base = Settings { dtype, ..base };
            let [eager, graph, persistent] = all.map(|launch| losses(&fused(base.clone(), launch)));
            assert_eq!(graph, eager, "{dtype:?}");
            assert_eq!(persistent, eager, "{dtype:?}");
        }
    }
    let half = Settings { dtype: Dtype::F16, accumulate: Accumulate::F16, weights: WeightsMode::Half, ..iris() };
    let [eager, graph, persistent] = all.map(|launch| losses(&fused(half.clone(), launch)));
    assert_eq!((&graph, &persistent), (&eager, &eager));
}

#[test]
fn allocators_do_not_change_the_losses_of_steps_in_one_kernel() {
    let expected = losses(&fused(Settings { epochs: 3, ..iris() }, LaunchMode::Eager));
    for (name, settings) in arms(&fused(Settings { epochs: 3, check: true, ..iris() }, LaunchMode::Persistent)) {
        let done = train(&settings).finished();
        assert_eq!(done.column("loss"), expected, "{name}");
        assert_eq!(done.json()["check"]["live"], serde_json::json!([]), "{name}: everything is freed");
    }
}

#[test]
fn steps_need_not_fill_their_launches() {
    for steps in [1, 99, 100, 101, 130, 240] {
        let base = Settings { steps: Some(steps), ..row_by_row() };
        let eager = losses(&fused(base.clone(), LaunchMode::Eager));
        assert_eq!(losses(&fused(base, LaunchMode::Persistent)), eager);
        assert_eq!(eager.len() as u64, steps);
    }
}

fn launches(settings: &Settings) -> u64 {
    train(settings).finished().outcome.summary.driver_calls.get(CallKind::KernelLaunch).count
}

#[test]
fn a_launch_does_up_to_a_hundred_steps() {
    let base = fused(Settings { steps: Some(120), ..row_by_row() }, LaunchMode::Persistent);
    // Each validation and nothing else launches its operations by themselves.
    let validation = launches(&base) - 2;
    assert_eq!(launches(&Settings { steps: Some(240), ..base.clone() }), 2 * (validation + 2));
    // The host waits for each step, so each has a launch of its own.
    assert_eq!(launches(&Settings { sync: SyncMode::Step, ..base.clone() }), validation + 120);
    // Where a profiler's capture begins and ends, so does a launch: 1..9, 10..59, 60..120.
    let profile_steps = Some(ProfileSteps { first: 10, last: 59 });
    let profiled = Settings { profile_steps, ..base.clone() };
    assert_eq!(launches(&profiled), validation + 3);
    assert_eq!(losses(&profiled), losses(&base));
    // A last batch with fewer rows has a launch of its own.
    let uneven = fused(Settings { epochs: 1, ..iris() }, LaunchMode::Persistent);
    assert_eq!(launches(&uneven) - launches(&Settings { steps: Some(4), ..uneven.clone() }), 1);
}

#[test]
fn the_record_says_how_steps_were_launched() {
    let settings = fused(Settings { steps: Some(120), ..row_by_row() }, LaunchMode::Persistent);
    let done = train(&settings).finished();
    assert_eq!(done.json()["settings"]["launch"], "persistent");
    assert_eq!(done.column("step").len(), 120);
    let times: Vec<u64> = done.column("host_ns").iter().map(|time| time.parse().unwrap()).collect();
    assert!(times[..100].iter().all(|time| *time == times[0]), "the steps of a launch were queued at once");
    assert!(times[100..].iter().all(|time| *time == times[100]) && times[100] > times[0]);
    let reserved = done.column("reserved_bytes");
    assert!(reserved.windows(2).all(|pair| pair[0] == pair[1]), "what steps use is allocated once");
    // Their memory is held as long as they may be launched.
    let eager = train(&Settings { launch: LaunchMode::Eager, ..settings }).finished();
    let allocated = |done: &common::Done| done.column("allocated_bytes")[119].parse::<u64>().unwrap();
    assert!(allocated(&done) > allocated(&eager));
}

#[test]
fn what_cannot_be_launched_so_is_refused() {
    let base = fused(iris(), LaunchMode::Persistent);
    let refused = [
        (Settings { loader: LoaderMode::Copy, ..base.clone() }, "--loader resident"),
        (Settings { sync: SyncMode::Op, ..base.clone() }, "--sync step"),
        (Settings { fuse: FuseMode::Epilogue, ..base.clone() }, "--fuse update"),
        (Settings { gemm: Some(GemmMode::Naive), ..base.clone() }, "--fuse update"),
        (
            Settings { gemm: Some(GemmMode::CublasLt), ..base.clone() },
            "leave out --gemm cublaslt, or use --launch graph",
        ),
        (Settings { streams: 2, ..base.clone() }, "--streams 1"),
        (Settings { gemm: Some(GemmMode::Tensor), ..base.clone() }, "use --gemm tiled or --launch graph"),
    ];
    for (settings, advice) in refused {
        let (outcome, directory) = attempt(&settings, &AtomicBool::new(false), Arc::new(Silent));
        let error = outcome.unwrap_err();
        assert_eq!(error.exit_code(), exit::BAD_INPUT);
        assert!(error.to_string().contains(advice), "{error}");
        assert!(!directory.path().join("record").exists(), "no record of what never began");
    }
}

#[test]
fn a_net_that_does_not_fit_the_kernel_is_told_what_else_there_is() {
    let deep = fused(Settings { layers: 12, hidden: 8, ..iris() }, LaunchMode::Persistent);
    // Few outputs of many inputs for many rows: a tile that the kernel does not have.
    let large = fused(Settings { hidden: 1500, batch: 1024, steps: Some(1), ..digits() }, LaunchMode::Persistent);
    for (settings, part) in [(deep, "too many layers"), (large, "no part of persistent_steps_f32")] {
        let place = tempfile::TempDir::new().unwrap();
        let save_start = Some(place.path().join("start.safetensors"));
        let settings = Settings { save_start, ..settings };
        let (outcome, directory) = attempt(&settings, &AtomicBool::new(false), Arc::new(Silent));
        let error = outcome.unwrap_err();
        assert!(matches!(error, TrainError::Input(_)));
        assert_eq!(error.exit_code(), exit::BAD_INPUT);
        let text = error.to_string();
        assert!(text.contains(part) && text.ends_with("use --launch graph") && !text.contains('\n'), "{text}");
        assert!(!directory.path().join("record").exists(), "no record of what never began");
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "and no start file");
    }
}

#[test]
fn an_interrupted_run_keeps_the_steps_of_its_last_launch() {
    let settings = fused(row_by_row(), LaunchMode::Persistent);
    let whole = losses(&settings);
    for (_, settings) in arms(&Settings { check: true, ..settings }) {
        let stop = Arc::new(AtomicBool::new(false));
        let done = train_with(&settings, &stop, Arc::new(StopAt(30, Arc::clone(&stop))));
        assert!(matches!(done.outcome.error, Some(TrainError::Interrupted)));
        let steps = if settings.sync == SyncMode::Step { 30 } else { 100 };
        assert_eq!(done.column("loss"), whole[..steps]);
        assert_eq!(done.json()["check"]["live"], serde_json::json!([]), "everything is freed");
    }
}

#[test]
fn an_allocator_that_hands_out_memory_anew_does_not_reach_what_is_recorded() {
    // Validation allocates between the launches; a trace shows that no block of a step lies where another one does.
    let settings = Settings { epochs: 3, trace: true, check: true, allocator: (&naive::BACKEND).into(), ..iris() };
    let done = train(&fused(settings, LaunchMode::Persistent)).finished();
    assert_eq!(done.json()["check"]["violations"], serde_json::json!([]));
}
