//! Pinned host memory: recordings of it, `replay --host`, and what `advise` and `explain` say of it.

mod advice;
mod holders;
mod replay;

pub(crate) use advice::HostAdvice;
pub(crate) use holders::HostMemoryUse;
pub(crate) use replay::{HostArgs, HostLists, replay};

use crate::reading::ReadArgs;
use crate::recording::Recording;
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use std::path::Path;
use vramlab::backends::{HostPyTorchSettings, HostRelease};
use vramlab::histories::formats::{Action, Format, HostEvent, Origins, ReadError, ReadOptions, Summary, read_origins};
use vramlab::histories::host::{HostTrace, HostTraceBuilder, RecordedLimits, Sizes};
use vramlab::histories::replay::ReplayError;
use vramlab::settings::Settings as _;

const MIB: u64 = 1 << 20;

/// A recording of pinned memory.
pub(crate) struct HostRecording {
    pub(crate) trace: HostTrace,
    pub(crate) origins: Origins,
    /// Settings of the recorded allocator; defaults where the file has none.
    pub(crate) settings: HostPyTorchSettings,
}

/// Reads the pinned memory of a snapshot, or any other trace as requests of host memory.
///
/// # Errors
/// Those of reading; the file has no pinned memory.
pub(crate) fn read(path: &Path, reading: &ReadArgs) -> Result<HostRecording> {
    read_with(path, &reading.keeping(path))
}

fn read_with(path: &Path, options: &ReadOptions) -> Result<HostRecording> {
    let budget = &options.budget;
    let (mut events, mut claim) = (Vec::<HostEvent>::new(), budget.claim());
    let mut several = false;
    let read = read_origins(path, options, &mut |event, origin, _| {
        several |= event.device > 0;
        let (action, addr, bytes, stream) = (event.action, event.addr, event.bytes, event.stream);
        let event = HostEvent { action, addr, bytes, stream, time_ns: event.time_ns, stack: origin.stack };
        claim.push(&mut events, event).map_err(|over| ReadError::stop(ReplayError::from(over)))
    });
    let (summary, origins) = read?;
    let file = path.display();
    if summary.format.is_snapshot() {
        claim.free(events);
        let Some(trace) = of_snapshot(&summary, budget).with_context(|| file.to_string())? else {
            bail!(
                "{file}: the snapshot has no pinned host memory; PyTorch 2.14 and newer record it with \
                 torch.cuda.memory._record_memory_history(record_pinned_host_memory=True), and for older ones `vramlab run` \
                 writes the pinned calls"
            );
        };
        return Ok(HostRecording { trace, origins, settings: recorded_settings(&summary) });
    }
    if several {
        bail!("{file}: the trace is of several GPUs; requests of host memory have no GPU");
    }
    let completes = events.iter().any(|event| event.action == Action::FreeCompleted);
    let mut builder = HostTraceBuilder::new(Sizes::Requested, completes, budget);
    events.iter().try_for_each(|event| builder.push(event)).with_context(|| file.to_string())?;
    let trace = builder.finish();
    if trace.requests() == 0 {
        bail!("{file}: the trace has no request");
    }
    Ok(HostRecording { trace, origins, settings: recorded_settings(&summary) })
}

/// The pinned memory of a snapshot; `None` if it has none.
///
/// # Errors
/// The memory budget is used up.
pub(crate) fn of_snapshot(summary: &Summary, budget: &vramlab::budget::Budget) -> Result<Option<HostTrace>> {
    let settings = recorded_settings(summary);
    let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(MIB));
    let limits = RecordedLimits {
        max_round: bytes(settings.pinned_max_round_threshold_mb),
        max_cached: bytes(settings.pinned_max_cached_size_mb),
    };
    let trace = HostTrace::of_record(&summary.host_record, limits, budget)?;
    Ok((trace.requests() > 0).then_some(trace))
}

/// The requests that `vramlab run` wrote beside a recording: `NAME-host.jsonl` of `NAME.pickle`. `None` without such a file, and if it
/// cannot be read: a killed process may have left half a line.
fn beside(recording: &Recording) -> Option<HostRecording> {
    let path = recording.path();
    let stem = path.file_name()?.to_str()?.strip_suffix(".pickle")?;
    let file = path.with_file_name(format!("{stem}-host.jsonl"));
    if !file.symlink_metadata().is_ok_and(|file| file.is_file()) {
        return None;
    }
    read_with(&file, &ReadOptions { format: Some(Format::Jsonl), budget: recording.budget.clone() }).ok()
}

/// Advice on a recording's pinned memory, of its snapshot or of the requests beside it; `None` if it has none. `release` is the one that
/// will run the program, if it is named.
///
/// # Errors
/// Those of a replay.
pub(crate) fn advice(recording: &Recording, release: Option<HostRelease>) -> Result<Option<HostAdvice>> {
    if let Some(requests) = beside(recording) {
        return advice::advise(&requests.trace, &requests.settings, release);
    }
    let Some(trace) = of_snapshot(&recording.summary, &recording.budget)? else { return Ok(None) };
    advice::advise(&trace, &recorded_settings(&recording.summary), release)
}

/// Who pins host memory in a recording, or in the requests beside it; `None` if it has none.
///
/// # Errors
/// The memory budget is used up.
pub(crate) fn memory_use(recording: &Recording) -> Result<Option<HostMemoryUse>> {
    if let Some(requests) = beside(recording) {
        return Ok(Some(holders::describe(&requests.trace, &requests.origins)));
    }
    let trace = of_snapshot(&recording.summary, &recording.budget)?;
    Ok(trace.map(|trace| holders::describe(&trace, &recording.origins)))
}

/// Settings of PyTorch's host allocator in a snapshot. Values that it does not accept count as not set.
pub(crate) fn recorded_settings(summary: &Summary) -> HostPyTorchSettings {
    let mut out = HostPyTorchSettings::default();
    if summary.format.is_snapshot() {
        let release = if summary.keys.has("internal_metadata") { HostRelease::R2_15 } else { HostRelease::R2_14 };
        out.release = release;
    } else if let Some(release) = summary.allocator_settings.get("release").and_then(Value::as_str) {
        // Without a known release the newest one's rules are followed.
        let _ = out.set("release", release);
    }
    for setting in
        HostPyTorchSettings::default().list().into_iter().filter(|setting| setting.name.starts_with("pinned_"))
    {
        if let Some(value) = recorded(&summary.allocator_settings, setting.name) {
            let _ = out.set(setting.name, &value);
        }
    }
    out
}

/// The value of a setting: of its own key, or in the text of the environment's variable.
fn recorded(settings: &Map<String, Value>, name: &str) -> Option<String> {
    match settings.get(name) {
        Some(Value::String(text)) => return Some(text.clone()),
        Some(Value::Null) | None => {}
        Some(value) => return Some(value.to_string()),
    }
    let texts =
        ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].into_iter().filter_map(|key| settings.get(key)?.as_str());
    let pairs = texts.flat_map(|text| text.split(','));
    pairs
        .filter_map(|pair| pair.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim().to_owned())
}
