//! The phases of a program, as loading, training and generating, and how much memory each holds. No setting can change during a
//! run, so the phase that needs most decides.
//!
//! The program's own outermost annotations part a history, else its longest pauses.

use crate::explain::line_of;
use crate::recording::Recording;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::budget::OverBudget;
use vramlab::histories::memory::Totals;

/// A program of more parts has steps, not phases.
const MOST: usize = 8;
/// A part has so many events at least, or it belongs to the one before it.
const LEAST_EVENTS: usize = 20;
/// A pause is long that takes this share of the time, and no shorter than this.
const PAUSE_SHARE: u64 = 20;
const LEAST_PAUSE_NS: u64 = 100_000_000;
/// Peaks that differ by less than one part of this are the same.
const SAME: u64 = 200;

/// A phase of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Phase {
    /// The annotation, or the line with which it begins; `null` where a pause parts it and nothing has frames.
    pub(crate) name: Option<String>,
    /// Number of its first event.
    pub(crate) first_event: u64,
    /// Number of its last event.
    pub(crate) last_event: u64,
    /// For how long, where the history has times.
    pub(crate) time_ns: Option<u64>,
    /// Most bytes held from the device, what was held when it began included.
    pub(crate) peak_reserved_bytes: u64,
    /// Most bytes in blocks that are in use or wait for other streams.
    pub(crate) peak_active_bytes: u64,
    /// Whether it is the first that reaches the peak of the whole, within half a percent.
    pub(crate) decides: bool,
}

impl Phase {
    fn beginning(name: Option<String>, first_event: u64, held: Totals) -> Self {
        let (peak_reserved_bytes, peak_active_bytes) = (held.reserved, held.active);
        let (last_event, time_ns, decides) = (first_event, None, false);
        Self { name, first_event, last_event, time_ns, peak_reserved_bytes, peak_active_bytes, decides }
    }

    /// What decides: what is reserved, and no less than what is in use where events of segments are missing.
    fn level(&self) -> u64 {
        self.peak_reserved_bytes.max(self.peak_active_bytes)
    }

    /// In words: `load` or `events 1 to 200`.
    pub(crate) fn named(&self) -> String {
        self.name.clone().unwrap_or_else(|| format!("events {} to {}", self.first_event, self.last_event))
    }
}

/// The phases of a recording; none where nothing parts it. O(n log n) in the events.
///
/// # Errors
/// [`OverBudget`] when the recorded memory takes more than there is.
pub(crate) fn phases(recording: &Recording) -> Result<Vec<Phase>, OverBudget> {
    let parts = named(recording).or_else(|| paused(recording)).unwrap_or_default();
    let mut out: Vec<Phase> = Vec::with_capacity(parts.len());
    if parts.is_empty() {
        return Ok(out);
    }
    let mut memory = recording.memory()?;
    let mut parts = parts.into_iter().peekable();
    for (index, event, at_once) in recording.events.walk(0) {
        if let Some(Part { name, .. }) = parts.next_if(|part| part.from == index) {
            out.push(Phase::beginning(name, recording.number(index), memory.totals()));
        }
        // CAST: bounded when the history was read.
        memory.apply(&event, index as u32, at_once)?;
        let Some(phase) = out.last_mut() else { continue };
        let Totals { reserved, active, .. } = memory.totals();
        phase.last_event = recording.number(index);
        phase.peak_reserved_bytes = phase.peak_reserved_bytes.max(reserved);
        phase.peak_active_bytes = phase.peak_active_bytes.max(active);
    }
    for phase in &mut out {
        let since = |number: u64| recording.since_start(number as usize - 1);
        phase.time_ns =
            since(phase.last_event).zip(since(phase.first_event)).map(|(end, from)| end.saturating_sub(from));
    }
    let peak = out.iter().map(Phase::level).max().unwrap_or(0);
    if let Some(first) = out.iter_mut().find(|phase| phase.level() >= peak - peak / SAME) {
        first.decides = true;
    }
    Ok(out)
}

/// What each phase holds and which decides, in a sentence, where all have names.
pub(crate) fn sentence(phases: &[Phase]) -> Option<String> {
    phases.iter().all(|phase| phase.name.is_some()).then_some(())?;
    let decides = phases.iter().find(|phase| phase.decides)?;
    let said = |phase: &Phase| {
        format!("{} {} of {}", phase.named(), Bytes(phase.peak_active_bytes), Bytes(phase.peak_reserved_bytes))
    };
    let all: Vec<String> = phases.iter().map(said).collect();
    let all = all.join("; ");
    let decides = decides.named();
    Some(format!("Its phases, most in use of most reserved: {all}. The peak is reached first in {decides}."))
}

/// Where a part begins.
struct Part {
    name: Option<String>,
    from: usize,
}

/// Joins parts that are too short with those before them, and those that follow one of the same name. `None` where that leaves
/// no more than one, or too many.
fn parted(recording: &Recording, all: impl IntoIterator<Item = Part>) -> Option<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    for part in all {
        if let Some(last) = parts.last_mut().filter(|last| part.from - last.from < LEAST_EVENTS) {
            // The one before was too short.
            last.name = part.name;
        } else {
            parts.push(part);
        }
        let count = parts.len();
        if count > 1 && parts[count - 1].name.is_some() && parts[count - 1].name == parts[count - 2].name {
            parts.pop();
        }
    }
    while parts.last().is_some_and(|last| recording.events.len() - last.from < LEAST_EVENTS) {
        parts.pop();
    }
    if let Some(first) = parts.first_mut() {
        first.from = 0;
    }
    (2..=MOST).contains(&parts.len()).then_some(parts)
}

/// By the outermost annotations of the program.
fn named(recording: &Recording) -> Option<Vec<Part>> {
    let mut parts = vec![Part { name: Some("the beginning".to_owned()), from: 0 }];
    let mut until = 0;
    for (name, start_ns, end_ns) in recording.outermost() {
        let from = recording.events.at_time(start_ns);
        if from > until {
            // What has no name goes on from the last.
            let after = parts.last().and_then(|last| last.name.clone()).filter(|_| until > 0);
            parts.extend(after.map(|name| Part { name: Some(format!("after {name}")), from: until }));
        }
        until = end_ns.map_or(recording.events.len(), |end| recording.events.at_time(end));
        if until > from {
            parts.push(Part { name: Some(name.to_owned()), from });
        }
    }
    if until < recording.events.len() && until > 0 {
        let name = parts.last().and_then(|last| last.name.as_ref()).map(|name| format!("after {name}"));
        parts.push(Part { name, from: until });
    }
    parted(recording, parts)
}

/// By the pauses that take longest.
fn paused(recording: &Recording) -> Option<Vec<Part>> {
    let (first, last) = recording.events.first().zip(recording.events.last())?;
    let long = (last.time_ns.saturating_sub(first.time_ns) / PAUSE_SHARE).max(LEAST_PAUSE_NS);
    let mut before = first.time_ns;
    let mut parts = vec![Part { name: None, from: 0 }];
    for (index, event) in recording.events.iter().enumerate() {
        if event.time_ns.saturating_sub(before) >= long {
            parts.push(Part { name: None, from: index });
        }
        before = event.time_ns;
    }
    let mut parts = parted(recording, parts)?;
    for part in &mut parts {
        let mut stacks = recording.events.iter_from(part.from).take(LEAST_EVENTS).map(|event| event.origin.stack);
        part.name = stacks.find_map(|stack| line_of(&recording.origins, stack));
    }
    Some(parts)
}
