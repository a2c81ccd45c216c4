//! Ways to launch a step, and streams: they change when work is done, and never what comes out.

use crate::common::{self, FinishedRun, StopAt, arms, attempt, digits, iris, train, train_with};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use trainer::arithmetic::{Dtype, FuseMode, WeightsMode};
use trainer::data::Progress;
use trainer::observer::{Observer, Silent};
use trainer::settings::{LaunchMode, LoaderMode, ProfileSteps, SyncMode};
use trainer::{Settings, TrainError, exit};
use vramlab::backends::{self, GraphCapture, stream_ordered};
use vramlab::{Backend, CallKind, Profile};

/// Two epochs whose last batch is smaller, for each kind of step.
fn steps() -> Vec<(&'static str, Settings)> {
    let base = Settings { batch: 32, ..iris() };
    vec![
        ("f32", base.clone()),
        ("f32 update", Settings { fuse: FuseMode::Update, ..base.clone() }),
        ("tf32", Settings { dtype: Dtype::Tf32, ..base.clone() }),
        ("tf32 update", Settings { dtype: Dtype::Tf32, fuse: FuseMode::Update, ..base.clone() }),
        ("tf32 epilogue", Settings { dtype: Dtype::Tf32, fuse: FuseMode::Epilogue, ..base.clone() }),
        (
            "f16 update",
            Settings { dtype: Dtype::F16, weights: WeightsMode::Half, fuse: FuseMode::Update, ..base.clone() },
        ),
        ("bf16 master", Settings { dtype: Dtype::Bf16, fuse: FuseMode::Update, layers: 4, ..base }),
    ]
}

/// Backends that serve requests while work is captured.
fn capturing() -> impl Iterator<Item = &'static Backend> {
    backends::all().into_iter().filter(|backend| backend.capabilities.graph_capture != GraphCapture::Refused)
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
                let run = train(&Settings { sync, ..settings.clone() }).finished();
                assert_eq!(run.column("loss"), expected, "{name}, {arm}, {sync:?}");
                let validation = |run: &common::FinishedRun| {
                    run.outcome.summary.epochs.iter().map(|epoch| epoch.val_loss.to_bits()).collect::<Vec<_>>()
                };
                assert_eq!(validation(&run), validation(&eager), "{name}, {arm}, {sync:?}");
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
            let run = train(&Settings { check: true, ..settings.clone() }).finished();
            let report = run.outcome.summary.check.as_ref().unwrap();
            assert!(report.is_clean(), "{name}, {settings:?}: {report:?}");
            assert_eq!(run.column("loss"), expected, "{name}, {settings:?}");
        }
    }
}

/// A step of a graph is one call; the kernels are launched for the captures and the validation only, and nothing is
/// allocated for a step any more.
#[test]
fn a_step_of_a_graph_is_one_call() {
    for allocator in capturing() {
        let settings = Settings { allocator: allocator.into(), epochs: 3, fuse: FuseMode::Update, batch: 32, ..iris() };
        let run = train(&graph(&settings)).finished();
        let epochs = &run.outcome.summary.epochs;
        let calls = |epoch: usize, call: &str| {
            let calls = serde_json::to_value(epochs[epoch].driver_calls).unwrap();
            calls.get(call).map_or(0, |totals| totals["count"].as_u64().unwrap())
        };
        let steps = epochs[0].steps;
        assert_eq!((0..3).map(|epoch| calls(epoch, "graph_launch")).collect::<Vec<_>>(), [steps; 3], "{allocator}");
        // A full batch and the last, smaller one.
        assert_eq!((0..3).map(|epoch| calls(epoch, "capture_end")).collect::<Vec<_>>(), [2, 0, 0], "{allocator}");
        let single = train(&settings).finished();
        let launches = serde_json::to_value(single.outcome.summary.epochs[1].driver_calls).unwrap();
        let all = launches["kernel_launch"]["count"].as_u64().unwrap();
        let validation = calls(1, "kernel_launch");
        assert!(validation > 0 && validation + 5 * steps < all, "{allocator}: {validation} of {all}");
        assert_eq!(run.json()["settings"]["launch"], "graph");
    }
}

#[test]
fn streams_of_their_own_are_waited_for() {
    let settings = Settings { streams: 4, loader: LoaderMode::Pinned, fuse: FuseMode::Update, ..digits() };
    let run = train(&settings).finished();
    let calls = serde_json::to_value(run.outcome.summary.driver_calls).unwrap();
    let steps = run.outcome.summary.epochs[0].steps;
    // The loader's, one for each layer's update, and the end of the updates.
    assert!(calls["stream_wait_event"]["count"].as_u64().unwrap() >= steps * (1 + 3 + 1));
    assert_eq!(run.json()["settings"]["streams"], 4);
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

/// Epochs of 17 whole batches and one smaller one.
fn many() -> Settings {
    Settings { batch: 7, learning_rate: 0.02, ..iris() }
}

/// Graphs of this many steps.
fn several(settings: &Settings, steps: u32) -> Settings {
    Settings { graph_steps: Some(steps), ..graph(settings) }
}

fn count(run: &FinishedRun, kind: CallKind) -> u64 {
    run.outcome.summary.driver_calls.get(kind).count
}

#[test]
fn steps_in_one_graph_change_no_loss_under_any_allocator() {
    for (name, settings) in steps() {
        // The second epoch is cut short: 18 steps and 13.
        let base = Settings { steps: Some(31), ..settings };
        let base = Settings { batch: many().batch, learning_rate: many().learning_rate, ..base };
        let expected = train(&base).finished().column("loss");
        assert_eq!(expected.len(), 31);
        for (arm, settings) in arms(&base) {
            for (steps, streams) in [(1, 1), (3, 2), (8, 1), (8, 2), (17, 4), (64, 2)] {
                // This arm waits for each step.
                let steps = if settings.sync == SyncMode::Step { 1 } else { steps };
                let run = train(&Settings { streams, check: true, ..several(&settings, steps) }).finished();
                assert_eq!(run.column("loss"), expected, "{name}, {arm}, {steps} steps, {streams} streams");
                let report = run.outcome.summary.check.as_ref().unwrap();
                assert!(report.is_clean(), "{name}, {arm}, {steps} steps, {streams} streams: {report:?}");
            }
        }
    }
}

#[test]
fn steps_in_one_graph_change_no_loss_of_any_type() {
    for dtype in [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16] {
        for weights in [WeightsMode::Master, WeightsMode::Half] {
            if weights == WeightsMode::Half && dtype != Dtype::F16 {
                continue;
            }
            for fuse in [FuseMode::None, FuseMode::Epilogue, FuseMode::Update] {
                let base = Settings { dtype, weights, fuse, steps: Some(31), ..many() };
                let eager = train(&base).finished().column("loss");
                for settings in [several(&base, 1), several(&base, 8), Settings { streams: 2, ..several(&base, 6) }] {
                    assert_eq!(train(&settings).finished().column("loss"), eager, "{settings:?}");
                }
            }
        }
    }
}

/// Counts its notifications.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<(u32, u64)>>);

impl Progress for Heard {}

impl Observer for Heard {
    fn step(&self, epoch: u32, step: u64) {
        self.0.lock().unwrap().push((epoch, step));
    }
}

#[test]
fn a_graph_is_launched_once_for_its_steps() {
    for allocator in capturing() {
        let base = Settings { allocator: allocator.into(), ..many() };
        for (steps, launches, captures) in [
            // Each of two epochs: full graphs, single steps, the smaller batch.
            (1, 2 * (17 + 1), 2),
            (2, 2 * (8 + 1 + 1), 3),
            (8, 2 * (2 + 1 + 1), 3),
            // All whole batches at once, and more than there are.
            (17, 2 * (1 + 1), 2),
            (18, 2 * (17 + 1), 2),
        ] {
            let heard = Arc::new(Heard::default());
            let run = train_with(&several(&base, steps), &AtomicBool::new(false), Arc::clone(&heard) as _).finished();
            assert_eq!(count(&run, CallKind::GraphLaunch), launches, "{allocator}, {steps}");
            assert_eq!(count(&run, CallKind::CaptureEnd), captures, "{allocator}, {steps}");
            assert_eq!(run.json()["settings"]["graph_steps"], steps);
            let expected = (1..=2).flat_map(|epoch| (1..=18).map(move |step| (epoch, step)));
            assert_eq!(*heard.0.lock().unwrap(), expected.collect::<Vec<_>>(), "every step is heard of, in order");
            assert_eq!(run.column("step").len(), 36);
            assert_eq!(run.column("rows")[17], "1");
            let summary = &run.outcome.summary;
            let launched = summary.driver_calls.get(CallKind::GraphLaunch);
            assert_eq!(launched.total_ns, launches * Profile::h200().graphs.launch_ns, "a launch costs what it does");
        }
    }
}

#[test]
fn steps_of_one_graph_were_queued_at_one_time() {
    let run = train(&several(&many(), 8)).finished();
    let mut steps: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (step, time) in run.column("host_ns").iter().enumerate() {
        steps.entry(time.parse().unwrap()).or_default().push(step);
    }
    let together: Vec<usize> = steps.values().map(Vec::len).collect();
    assert_eq!(together, [8, 8, 1, 1, 8, 8, 1, 1]);
    // Captured memory is allocated once, before the first launch.
    let reserved = run.column("reserved_bytes");
    assert!(reserved.windows(2).all(|pair| pair[0] == pair[1]), "{reserved:?}");
}

/// The private memory of a capture serves step after step, and the graphs of a run one after the other.
#[test]
fn more_steps_in_a_graph_take_no_more_memory() {
    let wide = Settings { hidden: 300, batch: 7, ..iris() };
    let half = Settings { dtype: Dtype::F16, fuse: FuseMode::Update, streams: 2, ..wide.clone() };
    // Large enough that tensors have segments of their own.
    let large = Settings { hidden: 1100, batch: 40, epochs: 1, steps: Some(3), layers: 4, ..iris() };
    for base in [wide, half, large] {
        let most = if base.steps.is_some() { 2 } else { 8 };
        for (arm, settings) in arms(&base).into_iter().filter(|(_, settings)| settings.sync != SyncMode::Step) {
            let peaks = |steps: u32| {
                let stats = train(&several(&settings, steps)).finished().outcome.summary.allocator_stats;
                let graphs = stats.graph_memory.map_or(0, |memory| memory.used_high);
                ([stats.reserved_bytes, stats.active_bytes, stats.allocated_bytes].map(|gauge| gauge.all.peak), graphs)
            };
            let (one, several) = (peaks(1), peaks(most));
            assert_eq!(several.0, one.0, "{arm}: reserved, active, allocated");
            // The simulated driver lets no two graphs share memory: there is one more of them, for single steps.
            assert!(several.1 <= 2 * one.1, "{arm}: {} and {}", several.1, one.1);
        }
    }
    // With nothing left over it is the same number of graphs.
    let even = Settings { allocator: (&stream_ordered::BACKEND).into(), batch: 5, ..iris() };
    let used = |steps: u32| {
        let stats = train(&several(&even, steps)).finished().outcome.summary.allocator_stats;
        stats.graph_memory.unwrap().used_high
    };
    assert!(used(1) > 0);
    assert_eq!([2, 4, 8, 24].map(used), [used(1); 4]);
}

#[test]
fn a_profiled_range_is_crossed_by_no_graph() {
    let base = Settings { batch: 1, learning_rate: 0.02, steps: Some(120), ..iris() };
    let expected = train(&base).finished().column("loss");
    let profile_steps = Some(ProfileSteps { first: 10, last: 59 });
    let run = train(&Settings { profile_steps, ..several(&base, 8) }).finished();
    assert_eq!(run.column("loss"), expected);
    // Steps 1 to 9, 10 to 59, 60 to 120: full graphs and single steps.
    assert_eq!(count(&run, CallKind::GraphLaunch), (1 + 1) + (6 + 2) + (7 + 5));
}

#[test]
fn an_interrupted_run_keeps_the_steps_of_its_last_graph() {
    let base = Settings { batch: 1, learning_rate: 0.02, ..iris() };
    let whole = train(&base).finished().column("loss");
    for (arm, settings) in arms(&Settings { check: true, ..graph(&base) }) {
        let stop = Arc::new(AtomicBool::new(false));
        let run = train_with(&settings, &stop, Arc::new(StopAt(30, Arc::clone(&stop))));
        assert!(matches!(run.outcome.error, Some(TrainError::Interrupted)), "{arm}");
        let steps = if settings.sync == SyncMode::Step { 30 } else { 32 };
        assert_eq!(run.column("loss"), whole[..steps], "{arm}");
        assert_eq!(run.json()["check"]["live"], serde_json::json!([]), "{arm}: everything is freed");
    }
}

#[test]
fn the_number_of_steps_in_effect_is_recorded() {
    let recorded = |settings: &Settings| train(settings).finished().json()["settings"]["graph_steps"].clone();
    assert_eq!(recorded(&graph(&many())), 8);
    assert_eq!(recorded(&Settings { sync: SyncMode::Step, ..graph(&many()) }), 1);
    assert_eq!(recorded(&Settings { sync: SyncMode::Step, ..several(&many(), 1) }), 1);
    assert_eq!(recorded(&many()), serde_json::Value::Null);
}

#[test]
fn steps_that_cannot_be_in_a_graph_are_refused() {
    let eager = Settings { graph_steps: Some(8), ..iris() };
    for (settings, words) in [
        (eager, "--graph-steps is for --launch graph"),
        (several(&iris(), 0), "between 1 and 64, found 0"),
        (several(&iris(), 65), "between 1 and 64, found 65"),
        (Settings { sync: SyncMode::Step, ..several(&iris(), 2) }, "use --graph-steps 1 instead of 2"),
        // Copies that the host makes for each step cannot be in a graph.
        (Settings { loader: LoaderMode::Pinned, ..several(&iris(), 8) }, "--loader resident"),
    ] {
        let (outcome, directory) = attempt(&settings, &AtomicBool::new(false), Arc::new(Silent));
        let error = outcome.unwrap_err();
        assert_eq!(error.exit_code(), exit::BAD_INPUT);
        assert!(error.to_string().contains(words) && !error.to_string().contains('\n'), "{error}");
        assert!(!directory.path().join("record").exists(), "no record of what never began");
    }
}
