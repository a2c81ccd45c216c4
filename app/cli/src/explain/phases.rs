//! Phases of a program, such as loading, training and generating, and the memory of each. Settings cannot change during a run, so
//! the phase with the highest peak determines the memory that the program needs.
//!
//! The program's outermost annotations separate phases; without annotations its longest pauses do.

use crate::recording::Recording;
use crate::words::grouped;
use serde::Serialize;
use vramlab::Bytes;
use vramlab::budget::OverBudget;

/// More parts than this are steps, not phases.
const MOST: usize = 8;
/// A part without an annotation and with fewer events belongs to its neighbour.
const LEAST_EVENTS: usize = 20;
/// A pause separates phases if it takes this share of the recorded time, and at least `LEAST_PAUSE_NS`.
const PAUSE_SHARE: u64 = 20;
const LEAST_PAUSE_NS: u64 = 100_000_000;
/// Peaks that differ by less than one part in this many count as equal.
const SAME: u64 = 200;
/// PyTorch annotates calls of optimizers under names that begin so; these are not phases of the program.
const TORCH_ANNOTATIONS: &str = "Optimizer.";

/// A phase of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Phase {
    /// The annotation; `null` for a phase between pauses.
    pub(crate) name: Option<String>,
    /// Number of its first event.
    pub(crate) first_event: u64,
    /// Number of its last event.
    pub(crate) last_event: u64,
    /// Duration; `null` in recordings without times.
    pub(crate) time_ns: Option<u64>,
    /// Peak reserved bytes, including memory reserved at its start; `null` if unknown.
    pub(crate) peak_reserved_bytes: Option<u64>,
    /// Peak active bytes, including pending frees.
    pub(crate) peak_active_bytes: u64,
    /// Whether it determines the peak: of the phases that reach the reserved peak within half a percent, the one with the most
    /// active memory.
    pub(crate) decides: bool,
}

impl Phase {
    /// The level that other phases are compared with: reserved memory, or active memory if segment events are missing.
    fn level(&self) -> u64 {
        self.peak_reserved_bytes.map_or(self.peak_active_bytes, |reserved| reserved.max(self.peak_active_bytes))
    }

    /// The annotation, or the range of events: `load` or `events 1 to 4,075`.
    pub(crate) fn named(&self) -> String {
        let range = || format!("events {} to {}", grouped(self.first_event), grouped(self.last_event));
        self.name.clone().unwrap_or_else(range)
    }
}

/// The phases of a recording; empty if nothing separates them. O(n log n) in the events.
///
/// # Errors
/// [`OverBudget`] if the memory budget is exceeded.
pub(crate) fn phases(recording: &Recording) -> Result<Vec<Phase>, OverBudget> {
    for parts in [annotated_parts(recording), parts_between_pauses(recording)] {
        if parts.len() < 2 {
            continue;
        }
        let phases = merge(measure(recording, parts)?);
        if (2..=MOST).contains(&phases.len()) {
            return Ok(phases);
        }
    }
    Ok(Vec::new())
}

/// The peaks of each phase and the phase that determines the peak, as a sentence.
pub(crate) fn sentence(phases: &[Phase]) -> Option<String> {
    let decides = phases.iter().find(|phase| phase.decides)?.named();
    // Without segments only active memory is known.
    let known = phases.iter().any(|phase| phase.peak_reserved_bytes.is_some());
    let peaks = |phase: &Phase| {
        let of = match phase.peak_reserved_bytes {
            Some(reserved) => format!(" of {}", Bytes(reserved)),
            None if known => " of unknown".to_owned(),
            None => String::new(),
        };
        format!("{} {}{of}", phase.named(), Bytes(phase.peak_active_bytes))
    };
    let all: Vec<String> = phases.iter().map(peaks).collect();
    let (all, of) = (all.join("; "), if known { " of peak reserved" } else { "" });
    Some(format!("Phases (peak active{of}): {all}. The phase that determines the peak: {decides}."))
}

/// A part of a recording before short parts are merged.
struct Part {
    name: Option<String>,
    from: usize,
    /// Whether an annotation covers it.
    annotated: bool,
}

impl Part {
    fn unnamed(from: usize) -> Self {
        Self { name: None, from, annotated: false }
    }

    fn around(name: String, from: usize) -> Self {
        Self { name: Some(name), from, annotated: false }
    }
}

/// A measured part.
struct Measured {
    phase: Phase,
    annotated: bool,
    /// Whether it has the peak of active memory.
    busiest: bool,
}

impl Measured {
    /// Whether it belongs to its neighbour.
    fn is_minor(&self) -> bool {
        // CAST: a number of events in memory.
        let events = (self.phase.last_event - self.phase.first_event + 1) as usize;
        !self.annotated && !self.phase.decides && !self.busiest && events < LEAST_EVENTS
    }
}

/// Measures the parts in one pass over the events, and marks the part that determines the peak.
fn measure(recording: &Recording, parts: Vec<Part>) -> Result<Vec<Measured>, OverBudget> {
    let mut out: Vec<Measured> = Vec::with_capacity(parts.len());
    let mut memory = recording.memory()?;
    let mut parts = parts.into_iter().peekable();
    for (index, event, immediate) in recording.events.walk(0) {
        let number = recording.number(index);
        if let Some(Part { name, annotated, .. }) = parts.next_if(|part| part.from == index) {
            let totals = memory.totals();
            let phase = Phase {
                name,
                first_event: number,
                last_event: number,
                time_ns: None,
                peak_reserved_bytes: recording.reserved(totals),
                peak_active_bytes: totals.active,
                decides: false,
            };
            out.push(Measured { phase, annotated, busiest: false });
        }
        // CAST: Recording::read limits the number of events.
        memory.apply(&event, index as u32, immediate)?;
        let Some(Measured { phase, .. }) = out.last_mut() else { continue };
        let totals = memory.totals();
        phase.last_event = number;
        phase.peak_reserved_bytes = phase.peak_reserved_bytes.max(recording.reserved(totals));
        phase.peak_active_bytes = phase.peak_active_bytes.max(totals.active);
    }
    let peak = out.iter().map(|part| part.phase.level()).max().unwrap_or(0);
    let near = out.iter_mut().map(|part| &mut part.phase).filter(|phase| phase.level() >= peak - peak / SAME);
    // Of equal phases the first.
    if let Some(highest) = near.rev().max_by_key(|phase| phase.peak_active_bytes) {
        highest.decides = true;
    }
    // A part that begins at the end of the busiest one has the same peak; of equal parts the first.
    if let Some(part) = out.iter_mut().rev().max_by_key(|part| part.phase.peak_active_bytes) {
        part.busiest = true;
    }
    for Measured { phase, .. } in &mut out {
        // CAST: an index in memory.
        let since = |number: u64| recording.since_start(number as usize - 1);
        phase.time_ns =
            since(phase.last_event).zip(since(phase.first_event)).map(|(end, from)| end.saturating_sub(from));
    }
    Ok(out)
}

/// Merges minor parts with their neighbours, and consecutive parts of the same name. Annotated parts and the parts with the peaks are
/// never merged into another one.
fn merge(parts: Vec<Measured>) -> Vec<Phase> {
    let mut out: Vec<Measured> = Vec::new();
    for part in parts {
        let Some(last) = out.last_mut() else {
            out.push(part);
            continue;
        };
        let same_name = part.phase.name.is_some() && part.phase.name == last.phase.name;
        if same_name || part.is_minor() {
            absorb(last, part);
        } else if last.is_minor() {
            let minor = std::mem::replace(last, part);
            absorb(last, minor);
        } else {
            out.push(part);
        }
    }
    out.into_iter().map(|part| part.phase).collect()
}

/// Extends a part by a neighbour.
fn absorb(part: &mut Measured, Measured { phase: other, annotated, busiest }: Measured) {
    let phase = &mut part.phase;
    phase.time_ns = phase.time_ns.zip(other.time_ns).map(|(time, other)| time + other);
    phase.first_event = phase.first_event.min(other.first_event);
    phase.last_event = phase.last_event.max(other.last_event);
    phase.peak_reserved_bytes = phase.peak_reserved_bytes.max(other.peak_reserved_bytes);
    phase.peak_active_bytes = phase.peak_active_bytes.max(other.peak_active_bytes);
    phase.decides |= other.decides;
    part.busiest |= busiest;
    part.annotated |= annotated && phase.name == other.name;
}

/// Parts by the program's outermost annotations, and the parts around them; empty without annotations.
fn annotated_parts(recording: &Recording) -> Vec<Part> {
    let mut parts = vec![Part::around("the beginning".to_owned(), 0)];
    let mut until = 0;
    let mut last_name: Option<String> = None;
    for (name, start_ns, end_ns) in recording.outermost().filter(|(name, ..)| !name.starts_with(TORCH_ANNOTATIONS)) {
        let from = recording.events.at_time(start_ns);
        if from > until
            && let Some(last) = &last_name
        {
            parts.push(Part::around(format!("after {last}"), until));
        }
        until = end_ns.map_or(recording.events.len(), |end| recording.events.at_time(end));
        if until > from {
            parts.retain(|part| part.from < from);
            parts.push(Part { name: Some(name.to_owned()), from, annotated: true });
            last_name = Some(name.to_owned());
        }
    }
    let Some(last) = last_name else { return Vec::new() };
    if until < recording.events.len() {
        parts.push(Part::around(format!("after {last}"), until));
    }
    parts
}

/// Parts between the longest pauses; empty without events.
fn parts_between_pauses(recording: &Recording) -> Vec<Part> {
    let Some((first, last)) = recording.events.first().zip(recording.events.last()) else { return Vec::new() };
    if !recording.is_timed() {
        return vec![Part::unnamed(0)];
    }
    let long = (last.time_ns.saturating_sub(first.time_ns) / PAUSE_SHARE).max(LEAST_PAUSE_NS);
    let mut before = first.time_ns;
    let mut parts = vec![Part::unnamed(0)];
    for (index, event) in recording.events.iter().enumerate() {
        if event.time_ns.saturating_sub(before) >= long {
            parts.push(Part::unnamed(index));
        }
        before = event.time_ns;
    }
    parts
}
