//! The section "What happened" of the screen: the recorded run, the limit for the comparison, and the pools.

use super::evidence::Evidence;
use super::sentences::paragraph;
use super::{Advice, LimitSource};
use crate::explain::{Pools, phases};
use crate::words::{counted, grouped};
use terminal::{Column, Page, Table};
use vramlab::Bytes;

/// Adds the section.
pub(super) fn report(advice: &Advice, page: &mut Page) {
    page.title("What happened");
    recorded_run(advice).iter().for_each(|sentence| paragraph(page, sentence));
    if let Some(pools) = &advice.pools {
        self::pools(pools, page);
    }
}

/// Adds the table of the pools.
fn pools(pools: &Pools, page: &mut Page) {
    let at = if pools.at == "out_of_memory" { "when memory ran out" } else { "at the reserved peak" };
    page.title(format!("Pools {at} (event {})", grouped(pools.event)));
    let mut table = Table::new([
        Column::left("pool"),
        Column::right("segments"),
        Column::right("reserved"),
        Column::right("active"),
        Column::right("free"),
        Column::right("partly used"),
    ]);
    for row in &pools.pools {
        table.row([
            row.pool.as_ref().map_or("default".to_owned(), |pool| format!("private {pool}")),
            grouped(row.segments),
            Bytes(row.reserved_bytes).to_string(),
            Bytes(row.active_bytes).to_string(),
            Bytes(row.free_bytes).to_string(),
            Bytes(row.partly_used_bytes).to_string(),
        ]);
    }
    page.table(&table);
    page.note("free memory of a private pool serves only requests inside that pool; while the pool exists, nothing releases it");
}

/// Sentences about the recorded run, and the limit for the comparison of settings.
pub(super) fn recorded_run(advice: &Advice) -> Vec<String> {
    let mut out = Vec::new();
    if advice.cut.is_some() {
        let events = counted(advice.events, "event");
        out.push(format!("The file was truncated; the answer covers its first {events}."));
    }
    out.extend(prior_cache(&advice.evidence));
    let recorded = &advice.recorded;
    // Spaces allow line breaks.
    let conf = recorded.conf.shown().replace(',', ", ");
    let mut text = match advice.settings_known {
        _ if !advice.of_pytorch => format!("{} The log names no settings of its allocator.", advice.run),
        true => format!("{} Settings: {conf}.", advice.run),
        false => format!("{} The file lacks the settings; {conf} assumed.", advice.run),
    };
    let compared = &advice.evidence.compared;
    let off = recorded.replayed_off_percent;
    if let Some(match_sentence) = compared.sentence() {
        text += &format!(" {match_sentence}");
    } else if let Some(off) = off.filter(|off| *off != 0.0) {
        let more = if off > 0.0 { "more" } else { "less" };
        text += &format!(" The replay under these settings reserves {:.2} % {more}.", off.abs());
    } else if off.is_some() && compared.changes() > 0 {
        text += &format!(" The replay under these settings has the same peak ({}).", compared.counts());
    }
    out.push(text);
    out.extend(phases::sentence(&advice.phases));
    if let Some((limit, source)) = advice.limit_bytes.zip(advice.limit_source) {
        let limit = Bytes(limit);
        out.push(match source {
            LimitSource::Given => match &advice.limit_text {
                Some(text) => format!("Memory limit: --limit {text}."),
                None => format!("Memory limit: {limit} (--limit)."),
            },
            LimitSource::Retries => {
                let (times, most) =
                    advice.released.as_ref().map_or((0, 0), |released| (released.times, released.limit_most_bytes));
                let times = if times == 1 { "once".to_owned() } else { format!("{times} times") };
                format!(
                    "Stack traces show that PyTorch emptied its cache {times} to serve a request. Inferred memory limit: {limit} to \
                     {}; {limit} is used, override with --limit.",
                    Bytes(most)
                )
            }
            LimitSource::Recorded => format!("Memory limit: {limit} (recorded)."),
            // The reserved bytes are no more than a part of what the device held.
            LimitSource::OutOfMemory if advice.unknown.device_free_bytes.is_none() => format!(
                "Inferred memory limit: {limit}, which was reserved; how much more was free is not recorded; override with --limit."
            ),
            LimitSource::OutOfMemory => {
                format!("Inferred memory limit: about {limit}; override with --limit.")
            }
            LimitSource::Collections => format!(
                "PyTorch collected garbage, which it does only under a memory limit. Inferred memory limit: at most {limit}; \
                 override with --limit."
            ),
        });
    }
    if let Some(unclear) = advice.unclear_releases.filter(|_| advice.limit_bytes.is_none()) {
        let requests = counted(unclear, "request");
        out.push(format!(
            "PyTorch released cached memory right before {requests}: memory was full, or the program called empty_cache. If it was full, \
             pass the memory limit with --limit."
        ));
    }
    if advice.unknown.limit {
        out.push(
            "PyTorch may have collected garbage, which it does only under a memory limit. Pass the limit with --limit; \
             without it these frees count as the program's own."
                .to_owned(),
        );
    }
    out
}

/// Memory cached before recording started: reused, released or never used.
fn prior_cache(Evidence { before, told_from_end, .. }: &Evidence) -> Option<String> {
    if before.reserved_bytes == 0 {
        return None;
    }
    let (reserved, active) = (Bytes(before.reserved_bytes), Bytes(before.in_blocks_bytes.min(before.reserved_bytes)));
    let mut out = match told_from_end {
        true => format!(
            "The recording has no segment events; the {reserved} reserved at its end are assumed to predate it."
        ),
        false => format!("{reserved} were reserved before recording started, {active} of them active."),
    };
    let (first, released) = (before.returned_at_once_bytes, before.returned_unused_bytes);
    if first > 0 {
        let bytes = Bytes(first);
        out += &format!(
            " {bytes} were cached and released before the first allocation, as when empty_cache drops an earlier run's cache."
        );
    }
    if released > first {
        out += &format!(" {} were cached and released without being used.", Bytes(released - first));
    }
    if before.kept_unused_bytes > 0 {
        out += &format!(" {} stayed cached to the end and were never used.", Bytes(before.kept_unused_bytes));
    }
    Some(out)
}
