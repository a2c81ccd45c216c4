//! The answer for a snapshot without events: its contents, and how to record the events that a replay needs.

use super::conf::Conf;
use super::{AdviseArgs, LimitSource, Verdict};
use crate::explain;
use crate::recording::Recording;
use crate::words::RECORD;
use anyhow::Result;
use serde_json::{Value, json};
use std::path::Path;
use terminal::Page;

/// Prints the explanation of the snapshot, and how to record events.
///
/// # Errors
/// Those of explaining it.
pub(super) fn answer(file: &Path, recording: &Recording, args: &AdviseArgs, limit: Option<u64>) -> Result<()> {
    if args.json {
        return terminal::print_json(&advice(file, recording, limit)?);
    }
    let mut page = Page::stdout();
    explain::show(file, recording, &mut page)?;
    page.title("What would help");
    let [before, after] = RECORD;
    page.labelled("", 2, "No setting can be compared: the snapshot contains no events.");
    page.labelled("", 2, "Before the work:");
    page.labelled("", 2, before);
    page.labelled("", 2, "After it, or when memory ran out:");
    page.labelled("", 2, after);
    page.gap();
    page.line("Next: record the events as above, then run vramlab advise on the new snapshot");
    page.print()
}

/// The keys of [`Advice`](super::Advice); `null` where events would be needed.
fn advice(file: &Path, recording: &Recording, limit: Option<u64>) -> Result<Value> {
    let settings = &recording.summary.allocator_settings;
    let recorded = recording.settings.memory_limit.map(|limit| (limit, LimitSource::Recorded));
    let limit = limit.map(|limit| (limit, LimitSource::Given)).or(recorded);
    let mut out = json!({
        "trace": file.display().to_string(),
        "events": 0,
        "allocations": null,
        "streams": null,
        "cut": recording.summary.cut.map(|cut| cut.to_string()),
        "recorded": {
            "conf": Conf::recorded(settings, recording.has_expandable_segments())?,
            "peak_reserved_bytes": null,
            "peak_requested_bytes": null,
            "replayed": null,
            "smallest_memory_bytes": null,
            "replayed_off_percent": null,
            "out_of_memory": null,
        },
        "limit_bytes": limit.map(|(limit, _)| limit),
        "limit_source": limit.map(|(_, source)| source),
        "released": null,
        "verdict": Verdict::NotRecorded,
        "not_reproduced": null,
        "saving_percent": null,
        "evidence": null,
        "torch": null,
        "without_expandable_segments": null,
        "obstacle": null,
        "needed_bytes": null,
        "settings": null,
        "program_changes": null,
        "pools": null,
        "phases": null,
        "also_tried": null,
        "other_allocators": null,
        "unclear_releases": null,
        "live_bytes": null,
        "lower_bound_bytes": null,
        "plan_bytes": null,
        "plan_end": null,
        "ordered_lower_bound_bytes": null,
        "ordered_plan_bytes": null,
        "ordered_plan_end": null,
        "host": crate::host::advice(recording, None)?,
        "unknown": {
            "deferred_frees": null,
            "prologue_allocations": recording.initial.blocks.len(),
            "prologue_reserved_bytes": recording.initial.segments.iter().map(|initial| initial.segment.bytes).sum::<u64>(),
            "undetermined_blocks": null,
            "device_free_bytes": null,
            "limit": null,
            "events": recording.summary.unknown_events(),
        },
    });
    if let (Value::Object(out), Value::Object(gpus)) = (&mut out, serde_json::to_value(&recording.gpus)?) {
        out.extend(gpus);
    }
    Ok(out)
}
