//! Ranges that a program named, as slices of a timeline.

use std::collections::HashMap;
use vramlab::histories::formats::{Origins, TextId, TraceWriter, WriteError};

/// Tracks for ranges that overlap without one holding the other.
const TRACKS: [&str; 3] = ["annotations", "annotations 2", "annotations 3"];

/// Writes the ranges, and returns how many of their beginnings and ends found a place. A range that does not end, and one that
/// would overlap others on every track, has none.
pub(super) fn write(writer: &mut dyn TraceWriter, origins: &Origins, gpu: Option<u16>) -> Result<u64, WriteError> {
    let mut open: HashMap<TextId, Vec<u64>> = HashMap::new();
    let mut ranges: Vec<(u64, u64, TextId)> = Vec::new();
    let elsewhere = |device: Option<u16>| gpu.zip(device).is_some_and(|(gpu, device)| gpu != device);
    for annotation in origins.annotations().iter().filter(|annotation| !elsewhere(annotation.device)) {
        if annotation.start {
            open.entry(annotation.name).or_default().push(annotation.time_ns);
        } else if let Some(start) = open.get_mut(&annotation.name).and_then(Vec::pop) {
            ranges.push((start, annotation.time_ns.max(start), annotation.name));
        }
    }
    ranges.sort_by_key(|(start, end, _)| (*start, std::cmp::Reverse(*end)));
    let mut written = 0;
    // Ends of the ranges that are open on each track.
    let mut ends: [Vec<u64>; TRACKS.len()] = Default::default();
    for (start, end, name) in ranges {
        let fits = |ends: &mut Vec<u64>| {
            while ends.last().is_some_and(|last| *last <= start) {
                ends.pop();
            }
            ends.last().is_none_or(|last| end <= *last)
        };
        if let Some(track) = ends.iter_mut().position(fits) {
            ends[track].push(end);
            writer.slice(TRACKS[track], origins.spelt(name), start, end - start)?;
            written += 2;
        }
    }
    Ok(written)
}
