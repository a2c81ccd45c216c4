//! The page's data: text and values as JSON for its script (`data.js`), and long lists of numbers as packed columns: differences
//! in few bytes, deflated, as base64.

use super::maps::{self, Map, Replayed, length};
use super::page::Numbers;
use super::replays::ReplaysData;
use super::run::{Figure, RunData};
use super::source::Source;
use super::timeline::{Mark, Stacks, Timeline};
use crate::history::Trace;
use crate::replay::bound::{Bounds, search_note};
use crate::words::RECORD;
use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde::Serialize;
use serde_json::Value;
use std::io::Write;
use vramlab::histories::memory::NEVER;
use vramlab::histories::plan::SearchEnd;
use vramlab::{Bytes, Ledger, Selection};

/// The page.
#[derive(Debug, Serialize)]
pub(super) struct PageData<'p> {
    pub(super) title: &'p str,
    pub(super) runs: &'p [RunData],
    pub(super) replays: &'p [ReplaysData],
    pub(super) histories: &'p [HistoryData],
}

/// One recording.
#[derive(Debug, Serialize)]
pub(super) struct HistoryData {
    pub(super) name: String,
    /// Number of events; 1, for the moment of the snapshot, without events.
    pub(super) events: u64,
    /// Whether the recording has events.
    pub(super) recorded: bool,
    /// Whether its events have times.
    timed: bool,
    streams: Vec<String>,
    paths: Vec<&'static str>,
    #[serde(flatten)]
    texts: Stacks,
    /// Group number of the stacks' columns.
    stacks: Option<usize>,
    figures: Vec<Figure>,
    notes: Vec<String>,
    marks: Vec<Mark>,
    /// Group number of the columns with times and lifetimes.
    lives: usize,
    maps: Vec<MapData>,
    ledger: Option<LedgerData>,
    settings: Vec<SettingData>,
    lower_bound_bytes: Option<u64>,
    plan_bytes: Option<u64>,
    answers: Answers,
}

/// The answers of `advise` and `explain` for a recording, or the reasons for missing answers.
#[derive(Debug, Serialize)]
pub(super) struct Answers {
    /// Absent for runs under other allocators, to which PyTorch's settings do not apply.
    pub(super) advise: Option<Answer>,
    pub(super) explain: Option<Answer>,
}

/// The `--json` output of a command, or its error.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    #[serde(rename = "said")]
    Output(Value),
    Failed(String),
}

impl Answers {
    /// The number of retries in the recording; `None` without events.
    fn retries(&self) -> Option<u64> {
        match &self.explain {
            Some(Answer::Output(explanation)) => explanation["num_retries"].as_u64(),
            _ => None,
        }
    }
}

impl From<Result<Value>> for Answer {
    fn from(answer: Result<Value>) -> Self {
        answer.map_or_else(|error| Self::Failed(format!("{error:#}")), Self::Output)
    }
}

/// A block map.
#[derive(Debug, Serialize)]
struct MapData {
    name: String,
    group: usize,
    unit: u64,
    /// Whether segments are known.
    segments: bool,
    /// Kinds of segments, as text.
    pools: Vec<String>,
    failed: u64,
}

/// The reserved-memory breakdown over time.
#[derive(Debug, Serialize)]
struct LedgerData {
    group: usize,
    /// The replayed allocator.
    allocator: String,
    /// Whether that replay matches every recorded block address.
    as_recorded: bool,
}

/// A PyTorch setting or another allocator, with its results.
#[derive(Debug, Serialize)]
struct SettingData {
    name: String,
    peak_reserved_bytes: u64,
    retries: Option<u64>,
    failed: u64,
    driver_calls: Option<u64>,
    /// Whether the values are recorded, not replayed.
    measured: bool,
}

/// A recording, and the groups of its numbers that do not depend on replays.
pub(super) struct Recorded {
    pub(super) source: Source,
    lives: usize,
    stacks: Option<usize>,
}

/// Adds the numbers that do not depend on replays to the page.
///
/// # Errors
/// They and the map of the recording are too large for a page.
pub(super) fn recorded(source: Source, numbers: &mut Numbers) -> Result<Recorded> {
    let lives = numbers.add(&lives(&source))?;
    let stacks = source.stacks.columns().map(|columns| numbers.add(&columns)).transpose()?;
    // With placements it has more numbers.
    numbers.check(&maps::recorded(&source.timeline, None).columns(&source.timeline).0)?;
    Ok(Recorded { source, lives, stacks })
}

/// The data of a recording; its other numbers are added to the page.
pub(super) fn history(
    Recorded { source, lives, stacks }: Recorded,
    served: Option<&Replayed>,
    bounds: Option<Bounds>,
    others: &[(Selection, Replayed)],
    answers: Answers,
    numbers: &mut Numbers,
) -> Result<HistoryData> {
    let timeline = &source.timeline;
    let exact = served.filter(|served| served.as_recorded);
    let placements = source.served.as_deref().or(exact.map(|served| served.map.places.as_slice()));
    let mut notes = notes(&source, placements.is_some());
    let mut shown = vec![pack(&maps::recorded(timeline, placements), timeline, numbers, true)?];
    let mut omitted = Vec::new();
    for (selection, other) in others {
        match pack(&other.map, timeline, numbers, false)? {
            Some(map) => shown.push(Some(map)),
            None => omitted.push(selection.to_string()),
        }
    }
    if !omitted.is_empty() {
        notes.push(format!("Block maps omitted to keep the page below 15 MB: {}.", omitted.join(", ")));
    }
    let ledger = match served.filter(|served| !served.ledgers.is_empty()) {
        Some(served) => Some(LedgerData {
            group: numbers.add(&ledger(&served.ledgers))?,
            allocator: served.map.name.clone(),
            as_recorded: served.as_recorded,
        }),
        None => None,
    };
    Ok(HistoryData {
        events: timeline.events() as u64,
        recorded: source.compiled.is_some(),
        timed: timeline.times_ns.iter().any(|time| *time != timeline.times_ns[0]),
        streams: timeline.streams.list.iter().map(|stream| stream_name(*stream)).collect(),
        paths: maps::path_names(),
        stacks,
        figures: figures(&source, exact, bounds, answers.retries()),
        notes,
        lives,
        maps: shown.into_iter().flatten().collect(),
        ledger,
        settings: settings(&source, others),
        lower_bound_bytes: bounds.map(|bounds| bounds.lower_bound_bytes),
        plan_bytes: bounds.and_then(|bounds| bounds.plan_bytes),
        answers,
        name: source.name,
        texts: source.stacks,
        marks: source.timeline.marks,
    })
}

/// A stream handle: small numbers in decimal, pointers in hexadecimal.
fn stream_name(handle: u64) -> String {
    if handle < 1 << 16 { handle.to_string() } else { format!("{handle:#x}") }
}

fn pack(map: &Map, timeline: &Timeline, numbers: &mut Numbers, always: bool) -> Result<Option<MapData>> {
    let (columns, unit) = map.columns(timeline);
    let group = if always { Some(numbers.add(&columns)?) } else { numbers.add_if_small(&columns)? };
    let (name, segments, failed) = (map.name.clone(), !map.segments.is_empty(), map.failed);
    Ok(group.map(|group| MapData { name, group, unit, segments, pools: map.pools(), failed }))
}

/// Times of events, and lifetimes of blocks in events.
fn lives(source: &Source) -> Columns {
    let timeline = &source.timeline;
    let events = timeline.events();
    let first = timeline.times_ns.first().copied().unwrap_or(0);
    let mut columns = Columns::default();
    // Times in logs of several threads may decrease slightly; the page needs ascending times.
    let mut latest = 0;
    let times: Vec<u64> = (timeline.times_ns.iter())
        .map(|time| {
            latest = latest.max(time.saturating_sub(first));
            latest
        })
        .collect();
    columns.push(times.into_iter());
    let blocks = || timeline.blocks.iter();
    columns.push(blocks().map(|life| u64::from(life.start)));
    columns.push(blocks().map(|life| length(life.start, life.freed, events)));
    columns.push(blocks().map(|life| match life.freed {
        NEVER => 0,
        freed => length(freed, life.end, events),
    }));
    columns.push(blocks().map(|life| life.bytes));
    columns.push(blocks().map(|life| timeline.streams.number(life.stream).saturating_sub(1)));
    columns.push(blocks().map(|life| source.origins.stack(life.origin)));
    columns.push(blocks().map(|life| source.origins.category(life.origin)));
    columns.push(blocks().map(|life| u64::from(life.before)));
    columns
}

fn ledger(ledgers: &[(u32, Ledger)]) -> Columns {
    let mut columns = Columns::default();
    columns.push(ledgers.iter().map(|(event, _)| u64::from(*event)));
    let parts: [fn(&Ledger) -> u64; 6] = [
        |ledger| ledger.requested,
        |ledger| ledger.internal,
        |ledger| ledger.pending,
        |ledger| ledger.hard,
        |ledger| ledger.stream,
        |ledger| ledger.soft,
    ];
    for part in parts {
        columns.push(ledgers.iter().map(|(_, ledger)| part(ledger)));
    }
    columns
}

/// Values of a snapshot without events.
fn snapshot_figures(timeline: &Timeline) -> [Figure; 4] {
    let reserved: u64 = timeline.segments.iter().map(|segment| segment.bytes).sum();
    let requested: u64 = timeline.blocks.iter().filter(|life| life.freed == NEVER).map(|life| life.bytes).sum();
    [
        ("events", "none".to_owned()),
        ("segments", timeline.segments.len().to_string()),
        ("reserved", Bytes(reserved).to_string()),
        ("requested", Bytes(requested).to_string()),
    ]
}

fn figures(source: &Source, exact: Option<&Replayed>, bounds: Option<Bounds>, retries: Option<u64>) -> Vec<Figure> {
    let timeline = &source.timeline;
    let mut out = source.figures.clone();
    let Some((Trace { history, recorded_peaks, .. }, bounds)) = source.compiled.as_ref().zip(bounds) else {
        out.extend(snapshot_figures(timeline));
        return out;
    };
    out.push(("events", timeline.events().to_string()));
    out.push(("allocations", history.allocations().to_string()));
    let span = timeline.times_ns.iter().max().zip(timeline.times_ns.first());
    if let Some(seconds) = span.map(|(last, first)| (last - first) as f64 / 1e9).filter(|seconds| *seconds > 0.0) {
        out.push(("time", format!("{seconds:.3} s")));
    }
    if let Some(recorded) = recorded_peaks {
        out.push(("peak reserved, recorded", Bytes(recorded.reserved).to_string()));
        out.push(("segments allocated, released", format!("{}, {}", recorded.segments.0, recorded.segments.1)));
    }
    if let Some(exact) = exact {
        let stats = &exact.report.stats;
        out.push(("peak active", Bytes(stats.active_bytes.all.peak).to_string()));
    }
    if let Some(retries) = retries {
        out.push(("retries", retries.to_string()));
    }
    out.push(("peak requested", Bytes(history.max_live_bytes()).to_string()));
    out.push(("lower bound", Bytes(bounds.lower_bound_bytes).to_string()));
    if let Some(plan) = bounds.plan_bytes {
        out.push(("offline placement", Bytes(plan).to_string()));
    }
    if bounds.plan_end == Some(SearchEnd::Memory) {
        out.push(("placement search", search_note(bounds.plan_end).to_owned()));
    }
    if history.refused_allocations() > 0 {
        out.push(("refused requests", history.refused_allocations().to_string()));
    }
    if history.deferred_frees() > 0 {
        out.push(("deferred frees", history.deferred_frees().to_string()));
    }
    out
}

fn notes(source: &Source, served: bool) -> Vec<String> {
    let mut out = source.gpus.clone();
    let Some(Trace { history, settings, .. }) = &source.compiled else {
        let [before, after] = RECORD;
        out.push(format!(
            "The snapshot has no events. The page shows the memory held when it was taken; comparing settings needs events. To record \
             them, call {before} before the work, and {after} after it."
        ));
        return out;
    };
    if source.timeline.before() > 0 {
        out.push(format!(
            "{} blocks existed before recording started; they are inferred from the final snapshot.",
            source.timeline.before()
        ));
    }
    out.extend(
        history.prologue_problem().map(|why| format!("Reserved memory before recording started is unknown: {why}.")),
    );
    if source.timeline.segments.is_empty() {
        out.push("The log has no segments, so the map shows only blocks.".to_owned());
    }
    if !served {
        let mut note =
            "No replay matches every recorded block address, so paths and rounded sizes are unknown; blocks are drawn with \
                        their requested sizes."
                .to_owned();
        if history.refused_allocations() > 0 && settings.memory_limit.is_none() {
            note += " The program ran out of memory: with its memory limit (--limit) a replay may match the recording.";
        }
        out.push(note);
    }
    if source.unknown_actions > 0 {
        let events = crate::words::counted(source.unknown_actions, "event");
        out.push(format!("{events} with unknown actions: left out."));
    }
    out
}

fn settings(source: &Source, others: &[(Selection, Replayed)]) -> Vec<SettingData> {
    let peaks = source.compiled.as_ref().and_then(|compiled| Some((compiled, compiled.recorded_peaks?)));
    let recorded = peaks.map(|(compiled, recorded)| SettingData {
        name: "as recorded".to_owned(),
        peak_reserved_bytes: recorded.reserved,
        retries: None,
        failed: compiled.history.refused_allocations(),
        driver_calls: None,
        measured: true,
    });
    let replayed = others.iter().map(|(selection, Replayed { report, .. })| SettingData {
        name: selection.to_string(),
        peak_reserved_bytes: report.stats.reserved_bytes.all.peak,
        retries: Some(report.stats.num_alloc_retries),
        failed: report.failed_allocations,
        driver_calls: Some(report.driver_calls.values().sum()),
        measured: false,
    });
    recorded.into_iter().chain(replayed).collect()
}

/// Columns of integers, which `data.js` reads in the same order.
///
/// A column is its length, followed by the difference of each number from the previous one: seven bits a byte, lowest first, the
/// sign in the lowest bit.
#[derive(Debug, Default)]
pub(super) struct Columns(Vec<u8>);

impl Columns {
    /// Adds a column. Numbers are below 2^53, which the page's script represents exactly.
    pub(super) fn push(&mut self, numbers: impl ExactSizeIterator<Item = u64>) {
        // CAST: a number of rows.
        self.varint(numbers.len() as u64);
        let mut last = 0;
        for number in numbers {
            let number = number.min((1 << 53) - 1).cast_signed();
            let step = number - last;
            self.varint((step << 1 ^ step >> 63).cast_unsigned());
            last = number;
        }
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            // CAST: the lowest seven bits.
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        // CAST: below 128.
        self.0.push(number as u8);
    }

    /// The columns as text.
    ///
    /// # Errors
    /// Compression fails; compression into memory does not.
    pub(super) fn text(&self) -> std::io::Result<String> {
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::new(6));
        packed.write_all(&self.0)?;
        Ok(STANDARD.encode(packed.finish()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_its_length_and_differences() {
        let mut columns = Columns::default();
        columns.push([3, 1, 200].into_iter());
        columns.push(std::iter::empty());
        // 3 numbers: +3, -2, +199 (398 in two groups of seven bits); then none.
        assert_eq!(columns.0, [3, 6, 3, 0x8E, 3, 0]);
        assert!(columns.text().unwrap().len() > 4);
    }
}
