//! The allocator decides where tensors lie and when the host waits, never what is computed; and the record says so.

use crate::common::{FinishedRun, arms, attempt, digits, iris, train, train_with};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use trainer::arithmetic::{Arithmetic, Dtype};
use trainer::data::Progress;
use trainer::data::{Features, Split};
use trainer::device::Device;
use trainer::loader::Loader;
use trainer::observer::{Observer, Silent};
use trainer::record::Status;
use trainer::settings::{LoaderMode, SyncMode};
use trainer::tensor::Context;
use trainer::{Settings, TrainError, exit};
use vramlab::backends::{caching, naive};
use vramlab::instruments::NvtxMode;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{CallKind, Memory, Selection};

/// The losses of a run as text. The shortest text that reads back as the same f32 stands for its bits.
fn losses(settings: &Settings) -> Vec<String> {
    let run = train(settings).finished();
    let losses = run.column("loss");
    assert!(losses.iter().all(|loss| loss.parse::<f32>().unwrap().is_finite()), "{losses:?}");
    losses
}

fn check_arms(base: &Settings, steps: usize) {
    let mut expected: Option<Vec<String>> = None;
    for (name, settings) in arms(base) {
        let losses = losses(&settings);
        assert_eq!(losses.len(), steps, "{name}");
        assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{name}: the loss should move: {losses:?}");
        assert_eq!(&losses, expected.get_or_insert_with(|| losses.clone()), "{name}");
    }
}

#[test]
fn allocators_do_not_change_the_losses_of_iris() {
    // 120 rows in batches of 25: the last batch of an epoch is smaller than the others.
    check_arms(&Settings { epochs: 4, ..iris() }, 20);
}

#[test]
fn allocators_do_not_change_the_losses_of_digits() {
    check_arms(&digits(), 10);
}

#[test]
fn no_allocator_of_the_list_changes_the_losses() {
    for base in [iris(), digits()] {
        let expected = losses(&base);
        for backend in vramlab::backends::all() {
            let settings = Settings { allocator: Selection::of(backend), ..base.clone() };
            assert_eq!(losses(&settings), expected, "{backend}");
        }
    }
}

#[test]
fn waiting_does_not_change_the_losses() {
    for base in [iris(), digits()] {
        let expected = losses(&base);
        for sync in [SyncMode::Step, SyncMode::Op] {
            assert_eq!(losses(&Settings { sync, ..base.clone() }), expected, "{sync:?}");
        }
    }
}

#[test]
fn loaders_do_not_change_the_losses() {
    for base in [iris(), digits()] {
        let expected = losses(&base);
        for loader in [LoaderMode::Copy, LoaderMode::Pinned] {
            for (name, settings) in arms(&Settings { loader, ..base.clone() }) {
                assert_eq!(losses(&settings), expected, "{loader:?}, {name}");
            }
        }
    }
}

/// The other data sets have a shift of zero, where rounding a product before the addition changes nothing. This data
/// set has a nonzero shift.
#[test]
fn loaders_give_the_same_bits_whatever_the_scale_and_shift() {
    let labels: Vec<u8> = (0..16).map(|row| row % 3).collect();
    let bytes: Vec<u8> = (0..16 * 50).map(|at| (at * 37 % 256) as u8).collect();
    let signed = |at: usize| if at.is_multiple_of(7) { -0.0 } else { (at as f32 - 300.0) / 7.0 };
    let kinds = [
        Features::U8 { bytes, scale: 0.017_353_1, shift: -0.424_212_9 },
        Features::F32((0..16 * 50).map(signed).collect()),
    ];
    let order: Vec<u32> = vec![3, 15, 0, 7, 7, 9, 1, 2, 14, 5];
    for features in kinds {
        let split = Split { rows: 16, features, labels: labels.clone() };
        for arithmetic in [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16].map(Arithmetic::of) {
            let dtype = arithmetic.dtype;
            let gathered = LOADERS.map(|mode| load(&Settings { loader: mode, ..iris() }, &split, &order, &arithmetic));
            let expected: Vec<u32> = order.iter().map(|row| u32::from(labels[*row as usize])).collect();
            for (bits, labels) in &gathered {
                assert_eq!(labels, &expected);
                assert_eq!(bits, &gathered[0].0, "{dtype:?}");
            }
            let mut row = vec![0.0; 50];
            let rounded = order.iter().flat_map(|number| {
                split.features.rows().copy(*number as usize, &mut row);
                row.iter().map(|value| arithmetic.element().round(*value).to_bits()).collect::<Vec<_>>()
            });
            assert_eq!(gathered[0].0, rounded.collect::<Vec<_>>(), "{dtype:?}: one rounding, to nearest");
        }
    }
}

const LOADERS: [LoaderMode; 3] = [LoaderMode::Resident, LoaderMode::Copy, LoaderMode::Pinned];

/// Bits of the values and labels of the rows in this order, in batches of four.
fn load(settings: &Settings, split: &Split, order: &[u32], arithmetic: &Arithmetic) -> (Vec<u32>, Vec<u32>) {
    let ranges = Ranges::new(NvtxMode::Off);
    let device = Device::open(&settings.device, SyncMode::Never, ranges, None).unwrap();
    let allocator = Selection::of(&caching::BACKEND).build(&device.driver()).unwrap();
    let context = Context { memory: Memory::new(allocator), device };
    let mut loader = Loader::new(&context, split, 50, 4, settings.loader, arithmetic).unwrap();
    loader.begin_pass(&context, order).unwrap();
    let mut out = (Vec::new(), Vec::new());
    for start in (0..order.len()).step_by(4) {
        let range = start..(start + 4).min(order.len());
        let batch = loader.batch(&context, split, order, range.clone()).unwrap();
        assert_eq!((batch.inputs.element, batch.inputs.pitch), (arithmetic.element(), arithmetic.pitch(50)));
        out.0.extend(context.read_values(&batch.inputs).unwrap().into_iter().map(f32::to_bits));
        out.1.extend(context.read::<u32>(&batch.labels, range.len()).unwrap());
    }
    out
}

#[test]
fn another_seed_gives_other_losses() {
    for base in [iris(), digits()] {
        assert_ne!(losses(&base), losses(&Settings { seed: base.seed + 1, ..base.clone() }));
    }
}

/// A summary without what real clocks and the place of the run put into it.
fn comparable(run: &FinishedRun) -> Value {
    let mut json = run.json();
    let object = json.as_object_mut().unwrap();
    for volatile in ["started_at", "process_s", "first_step_s", "command"] {
        assert!(object.remove(volatile).is_some(), "{volatile}");
    }
    for cost in object["instruments"].as_array_mut().unwrap() {
        assert!(cost.as_object_mut().unwrap().remove("ns_per_operation").is_some());
    }
    json
}

#[test]
fn runs_of_the_same_settings_leave_the_same_record() {
    for (name, settings) in arms(&Settings { trace: true, ..iris() }) {
        for settings in [Settings { check: true, ..settings.clone() }, settings] {
            let runs = [train(&settings).finished(), train(&settings).finished()];
            assert_eq!(comparable(&runs[0]), comparable(&runs[1]), "{name}");
            for file in ["steps.csv", "trace.jsonl"] {
                let [first, second] = runs.each_ref().map(|run| std::fs::read(run.path().join(file)).unwrap());
                assert_eq!(first, second, "{name}: {file}");
            }
        }
    }
}

#[test]
fn the_record_on_disk_is_the_outcome() {
    let run = train(&iris()).finished();
    let text = serde_json::to_string_pretty(&run.outcome.summary).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), run.json());
    assert_eq!(run.outcome.directory, run.path());
}

#[test]
fn caching_asks_the_driver_in_the_first_epoch_only() {
    for loader in [LoaderMode::Copy, LoaderMode::Pinned, LoaderMode::Resident] {
        let run = train(&Settings { loader, epochs: 4, ..iris() }).finished();
        let summary = &run.outcome.summary;
        assert!(summary.driver_calls.get(CallKind::MemAlloc).count > 0);
        for epoch in &summary.epochs[1..] {
            assert_eq!(epoch.driver_calls.driver_allocations(), 0, "{loader:?}, epoch {}", epoch.epoch);
        }
        assert_eq!(summary.driver_calls.get(CallKind::MemFree).count, 0, "nothing goes back while there is room");
    }
}

#[test]
fn naive_asks_the_driver_for_each_tensor() {
    let settings = Settings { allocator: (&naive::BACKEND).into(), epochs: 3, trace: true, ..iris() };
    let summary = train(&settings).finished().outcome.summary;
    let counts: Vec<u64> =
        summary.epochs.iter().map(|epoch| epoch.driver_calls.get(CallKind::MemAlloc).count).collect();
    assert!(counts[0] > 0 && counts.iter().all(|count| *count == counts[0]), "{counts:?}");

    let operations =
        |name: &str| -> u64 { summary.latency.iter().filter(|row| row.operation == name).map(|row| row.count).sum() };
    let [allocs, frees] = [CallKind::MemAlloc, CallKind::MemFree].map(|kind| summary.driver_calls.get(kind));
    assert_eq!(allocs.count, operations("allocate"));
    assert_eq!(frees.count, operations("deallocate"));
    assert_eq!(allocs.count, frees.count, "every tensor goes back");
    assert_eq!(allocs.count, summary.allocator_stats.num_device_alloc);
    assert_eq!(allocs.count, summary.allocator_stats.allocation.all.allocated);

    // A free of plain memory waits for the device, an allocation does not.
    assert_eq!(allocs.blocked_ns, 0);
    assert!(frees.blocked_ns > 0 && frees.blocked_ns <= frees.total_ns, "{frees:?}");
    for epoch in &summary.epochs {
        assert!(epoch.driver_calls.get(CallKind::MemFree).blocked_ns > 0);
    }
}

/// Allocations of an epoch's steps, counted by hand for a network of three layers.
#[test]
fn naive_allocates_what_a_step_needs() {
    let base = Settings { allocator: (&naive::BACKEND).into(), loader: LoaderMode::Copy, ..iris() };
    let per_step = |settings: &Settings| -> u64 {
        let counts = train(settings).finished().column("driver_allocations");
        let counts: Vec<u64> = counts.iter().map(|count| count.parse().unwrap()).collect();
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        counts[0]
    };
    // Batch 2; a layer forward 2, its ReLU 1; losses and their gradient 2; backward 2 a layer and 2 more for each
    // layer but the first.
    let expected = |layers: u64| 2 + 2 * layers + (layers - 1) + 2 + 2 * layers + 2 * (layers - 1);
    for layers in [1, 2, 3, 5] {
        assert_eq!(per_step(&Settings { layers, ..base.clone() }), expected(layers.into()), "{layers} layers");
    }
}

#[test]
fn epochs_add_up() {
    for (name, settings) in arms(&Settings { epochs: 3, ..iris() }) {
        let run = train(&settings).finished();
        let summary = &run.outcome.summary;
        assert_eq!(summary.epochs.iter().map(|epoch| epoch.epoch).collect::<Vec<_>>(), [1, 2, 3], "{name}");
        for (epoch, losses) in summary.epochs.iter().zip(run.column("loss").chunks(5)) {
            let rows = [25.0, 25.0, 25.0, 25.0, 20.0];
            let mean = losses.iter().zip(rows).map(|(loss, rows)| f64::from(loss.parse::<f32>().unwrap()) * rows);
            assert_eq!(epoch.train_loss, mean.sum::<f64>() / 120.0, "{name}");
            assert_eq!(epoch.steps, 5);
            assert!((0.0..=1.0).contains(&epoch.val_accuracy) && epoch.val_loss > 0.0);
            let busy = epoch.device_busy_s.unwrap();
            assert!(0.0 < busy && busy <= epoch.device_s && epoch.device_s <= epoch.wall_s, "{name}: {epoch:?}");
            for (kind, totals) in epoch.driver_calls.iter() {
                assert!(totals.blocked_ns <= totals.total_ns, "{name}: {kind} {totals:?}");
                assert!(totals.count <= summary.driver_calls.get(kind).count, "{name}: {kind}");
            }
        }
        let ledger = &summary.fragmentation;
        assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested, "{name}");
        assert_eq!(ledger.reserved, summary.allocator_stats.reserved_bytes.all.peak, "{name}");
        let stats = &summary.allocator_stats;
        for (gauge, what) in [(&stats.allocated_bytes, "allocated"), (&stats.active_bytes, "active")] {
            assert_eq!(gauge.all.current, 0, "{name}: {what} bytes are left at the end");
        }
        let host: Vec<u64> = run.column("host_ns").iter().map(|ns| ns.parse().unwrap()).collect();
        assert!(host.windows(2).all(|pair| pair[0] < pair[1]), "{name}: {host:?}");
    }
}

#[test]
fn the_checker_finds_nothing() {
    for loader in [LoaderMode::Copy, LoaderMode::Pinned, LoaderMode::Resident] {
        for (name, settings) in arms(&Settings { check: true, loader, ..iris() }) {
            let run = train(&settings).finished();
            let report = run.outcome.summary.check.unwrap();
            assert!(report.is_clean(), "{name}, {loader:?}: {report:?}");
            assert!(report.operations > 100, "{name}: {report:?}");
            assert_eq!(report.verified_bytes > 0, name.starts_with("caching"), "{name}: {report:?}");
        }
    }
}

#[test]
fn the_checker_does_not_change_the_losses() {
    for (name, settings) in arms(&iris()) {
        assert_eq!(losses(&Settings { check: true, ..settings.clone() }), losses(&settings), "{name}");
    }
}

#[test]
fn a_limit_below_the_weights_is_bad_input() {
    for (name, settings) in arms(&iris()) {
        let settings = Settings { memory_limit: Some(1024), ..settings };
        let (outcome, directory) = attempt(&settings, &AtomicBool::new(false), Arc::new(Silent));
        let error = outcome.err().unwrap();
        assert!(matches!(error, TrainError::Input(_)), "{name}: {error:?}");
        assert_eq!(error.exit_code(), exit::BAD_INPUT);
        assert!(error.to_string().contains("--memory-limit") && !error.to_string().contains('\n'), "{error}");
        assert!(!directory.path().join("record").exists(), "{name}: nothing ran, so there is nothing to record");
    }
}

#[test]
fn a_limit_between_weights_and_need_is_out_of_memory() {
    for (name, settings) in arms(&Settings { trace: true, ..iris() }) {
        let weights = train(&iris()).outcome.summary.parameter_bytes;
        let run = train(&Settings { memory_limit: Some(weights + 8192), ..settings });
        let error = run.outcome.error.as_ref().unwrap();
        assert!(matches!(error, TrainError::Alloc(error) if error.is_out_of_memory()), "{name}: {error:?}");
        assert_eq!(error.exit_code(), exit::FAILED);
        let text = error.to_string();
        assert!(text.contains("out of memory") && text.contains("limit") && !text.contains('\n'), "{name}: {text}");
        let json = run.json();
        assert_eq!((&json["status"], &json["error"]), (&"failed".into(), &text.as_str().into()), "{name}");
        assert_eq!(json["settings"]["memory_limit"], weights + 8192);
        assert_eq!(json["epochs"], serde_json::json!([]));
        assert_eq!(json["allocator_stats"]["allocation.all.current"], 0, "{name}: what was taken goes back");
    }
}

#[test]
fn a_loss_that_is_no_number_ends_the_run() {
    let base = Settings { learning_rate: 1e30, ..iris() };
    let run = train(&base);
    let error = run.outcome.error.as_ref().unwrap();
    assert!(matches!(error, TrainError::Diverged { epoch: 1, step: 2, .. }), "{error:?}");
    assert_eq!(error.exit_code(), exit::FAILED);
    assert_eq!(run.json()["status"], "failed");
    let losses: Vec<f32> = run.column("loss").iter().map(|loss| loss.parse().unwrap()).collect();
    assert!(losses[0].is_finite() && !losses[1].is_finite(), "{losses:?}");

    // The last update of the last epoch shows in the validation only.
    let run = train(&Settings { steps: Some(1), ..base });
    let error = run.outcome.error.as_ref().unwrap();
    assert!(matches!(error, TrainError::DivergedInValidation { epoch: 1, .. }), "{error:?}");
    assert_eq!(error.exit_code(), exit::FAILED);
    assert_eq!(run.json()["status"], "failed");
}

#[derive(Debug)]
struct StopAt {
    epoch: u32,
    step: u64,
    stop: Arc<AtomicBool>,
}

impl Progress for StopAt {}

impl Observer for StopAt {
    fn step(&self, epoch: u32, step: u64) {
        if (epoch, step) == (self.epoch, self.step) {
            self.stop.store(true, SeqCst);
        }
    }
}

#[test]
fn an_interrupted_run_keeps_what_was_done() {
    let whole = train(&Settings { epochs: 3, ..iris() }).finished();
    for loader in [LoaderMode::Pinned, LoaderMode::Resident] {
        for (name, settings) in arms(&Settings { epochs: 3, loader, trace: true, check: true, ..iris() }) {
            // In mid-epoch, and behind the last step of an epoch, where the flag is seen in the next one.
            for (epoch, step, steps) in [(2, 3, 8), (1, 5, 5)] {
                let stop = Arc::new(AtomicBool::new(false));
                let observer = StopAt { epoch, step, stop: Arc::clone(&stop) };
                let run = train_with(&settings, &stop, Arc::new(observer));
                let error = run.outcome.error.as_ref().unwrap();
                assert!(matches!(error, TrainError::Interrupted), "{name}: {error:?}");
                assert_eq!(error.exit_code(), 130);
                assert_eq!(run.outcome.summary.status, Status::Interrupted);
                let json = run.json();
                assert_eq!(json["status"], "interrupted", "{name}");
                assert_eq!(json["epochs"].as_array().unwrap().len(), 1, "{name}");
                assert_eq!(json["check"]["violations"], serde_json::json!([]), "{name}");
                assert_eq!(json["check"]["live"], serde_json::json!([]), "{name}: everything is freed");
                assert_eq!(run.column("loss"), whole.column("loss")[..steps], "{name}");
                for file in ["latency.hlog", "trace.jsonl"] {
                    assert!(std::fs::metadata(run.path().join(file)).unwrap().len() > 0, "{name}: {file}");
                }
            }
        }
    }
}

#[test]
fn a_flag_set_before_the_start_stops_the_first_step() {
    let run = train_with(&iris(), &AtomicBool::new(true), Arc::new(Silent));
    assert!(matches!(run.outcome.error, Some(TrainError::Interrupted)));
    assert_eq!(run.json()["epochs"], serde_json::json!([]));
    assert!(run.column("loss").is_empty());
}
