//! Memory calls by place in the run: the NVTX ranges around them, all epochs and steps together.

use crate::attribution::Attribution;
use crate::capture::Capture;
use crate::names;
use std::collections::{BTreeMap, HashMap};

/// One place in the run.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Texts of the ranges, with slashes; empty outside of any range.
    pub path: String,
    /// Allocations and frees of an allocator that names each in a range.
    pub operations: u64,
    /// Host time in them.
    pub operations_ns: i64,
    /// How the allocator served them, by the marks inside: `split`, `driver_free`.
    pub paths: BTreeMap<String, u64>,
    /// Driver calls about memory, by name.
    pub calls: BTreeMap<String, u64>,
    /// Host time in them.
    pub calls_ns: i64,
    /// Host time lost in them.
    pub blocked_ns: i64,
}

/// A path without the numbers of epochs and steps, and without the ranges of single allocations.
#[must_use]
pub fn general(path: &str) -> String {
    let parts = path.split('/').filter(|part| !operation(part)).map(|part| {
        let mut words = part.split(' ');
        match (words.next(), words.next()) {
            (Some(word @ ("epoch" | "step" | "steps")), Some(number)) if digits(number) => word,
            _ => part,
        }
    });
    parts.collect::<Vec<_>>().join("/")
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Ranges that the trainer's NVTX instrument opens around each operation of the allocator: `alloc 196 KiB`.
fn operation(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("alloc ").or_else(|| text.strip_prefix("free ")) else { return false };
    rest.split_once(' ')
        .is_some_and(|(number, unit)| number.parse::<f64>().is_ok() && unit.ends_with('B') && unit.len() <= 3)
}

/// Memory calls by place, the place with the most time first.
#[must_use]
pub fn memory(capture: &Capture, attribution: &Attribution) -> Vec<Place> {
    let blocked: HashMap<usize, i64> = attribution.waits.iter().map(|wait| (wait.call, wait.blocked_ns)).collect();
    let mut paths: HashMap<Option<usize>, String> = HashMap::new();
    let mut places: BTreeMap<String, Place> = BTreeMap::new();
    let mut path = |range: Option<usize>| paths.entry(range).or_insert_with(|| general(&capture.path(range))).clone();
    for (index, call) in capture.calls.iter().enumerate() {
        let name = capture.call_name(call);
        if names::manages_memory(&name.kind) {
            let place = places.entry(path(call.range)).or_default();
            *place.calls.entry(name.name.clone()).or_default() += 1;
            place.calls_ns += call.duration();
            place.blocked_ns += blocked.get(&index).copied().unwrap_or(0);
        }
    }
    let mut marks: HashMap<i64, Vec<usize>> = HashMap::new();
    for (index, mark) in capture.marks.iter().enumerate() {
        marks.entry(mark.thread).or_default().push(index);
    }
    for (index, range) in capture.ranges.iter().enumerate().filter(|(_, range)| operation(&range.text)) {
        let place = places.entry(path(Some(index))).or_default();
        place.operations += 1;
        place.operations_ns += range.end - range.start;
        let own = marks.get(&range.thread).map_or(&[][..], Vec::as_slice);
        let first = own.partition_point(|&mark| capture.marks[mark].time < range.start);
        for &mark in own[first..].iter().take_while(|&&mark| capture.marks[mark].time <= range.end) {
            *place.paths.entry(capture.marks[mark].text.clone()).or_default() += 1;
        }
    }
    let mut rows: Vec<Place> = places.into_iter().map(|(path, place)| Place { path, ..place }).collect();
    rows.sort_by_key(|place| std::cmp::Reverse(place.operations_ns.max(place.calls_ns)));
    rows
}
