//! Python call stacks, which `nsys profile --python-backtrace=cuda` collects in CUDA calls and `--python-sampling=true` at times.
//!
//! Each stack is an NVTX mark of the domain `Python Backtrace` with a binary payload:
//!
//! | bytes | contents |
//! |---|---|
//! | 4 | state of the thread |
//! | 4 | source: 1 a periodic sample, 2 an event, such as a CUDA call |
//! | 8 | number of frames |
//! | 24 for each frame, innermost first | ids of function and file in `StringIds`, and the line |
//!
//! Exports of 2024.6 and later have it in `NVTX_EVENTS.binaryData`, behind a header of 32 bytes. Older ones leave it out.

use crate::capture::{Call, Capture};
use crate::tables::{Strings, Tables, integer, text};
use std::collections::{HashMap, HashSet};

const DOMAIN: &str = "Python Backtrace";
/// Of ENUM_NSYS_EVENT_TYPE.
const DOMAIN_CREATED: i64 = 75;
const HEADER: usize = 32;
const FRAME: usize = 24;
/// A stack with more frames is damage.
const MOST_FRAMES: usize = 1 << 16;
/// A stack that was collected in a call may have a time outside of it, by this many nanoseconds.
const SLACK: i64 = 20_000;
/// Calls that can begin before another call and still contain it: those that nest.
const NESTED: usize = 8;

/// A stack at a moment of one thread.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) time: i64,
    pub(crate) thread: i64,
    /// Whether it was collected because of a call.
    of_event: bool,
    frames: Vec<String>,
}

/// The domains of Python stacks: process and number.
pub(crate) fn domains(
    tables: &Tables<'_>,
    table: &str,
    strings: &mut Strings<'_>,
) -> rusqlite::Result<HashSet<(i64, i64)>> {
    let mut out = HashSet::new();
    if !tables.has(table, "domainId") {
        return Ok(out);
    }
    let columns = ["text", "textId", "globalTid", "domainId"].map(|column| tables.first(table, &[column]));
    let created = format!("WHERE eventType = {DOMAIN_CREATED}");
    tables.each(table, &columns.each_ref().map(String::as_str), &created, |row| {
        let registered = integer(row, 1).and_then(|id| strings.get(id)).map(str::to_owned);
        if text(row, 0).or(registered).as_deref() == Some(DOMAIN) {
            out.extend(integer(row, 2).zip(integer(row, 3)).map(|(thread, domain)| (thread >> 24, domain)));
        }
    })?;
    Ok(out)
}

/// The stack in a payload; `None` if it is not one.
pub(crate) fn sample(time: i64, thread: i64, data: &[u8], strings: &mut Strings<'_>) -> Option<Sample> {
    // The header has the size of what follows it.
    let sized = data.len() >= HEADER && word(data, 16) == Some(data.len() as u64 - HEADER as u64);
    let data = if sized { &data[HEADER..] } else { data };
    let count = usize::try_from(word(data, 8)?).ok().filter(|count| (1..=MOST_FRAMES).contains(count))?;
    let frames = data.get(16..16 + count * FRAME)?;
    let mut name = |at: &[u8], offset: usize| {
        let known = i64::try_from(word(at, offset)?).ok().and_then(|id| strings.get(id));
        // The exporter escapes `<module>`.
        Some(known.unwrap_or("?").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    };
    let frame = |at: &[u8]| Some(format!("{} ({}:{})", name(at, 0)?, name(at, 8)?, word(at, 16)?));
    let frames = frames.chunks_exact(FRAME).map(frame).collect::<Option<Vec<_>>>()?;
    let source = u32::from_le_bytes(data.get(4..8)?.try_into().ok()?);
    Some(Sample { time, thread, of_event: source != 1, frames })
}

fn word(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(data.get(at..at + 8)?.try_into().ok()?))
}

/// Whether a frame is one of Python: a function, its file and line.
#[must_use]
pub fn is_python(frame: &str) -> bool {
    parts(frame).is_some()
}

/// Function, file and line of a frame of Python: `step (train.py:12)`.
#[must_use]
pub fn parts(frame: &str) -> Option<(&str, &str, u32)> {
    let (function, place) = frame.strip_suffix(')')?.split_once(" (")?;
    let (file, line) = place.rsplit_once(':')?;
    Some((function, file, line.parse().ok()?))
}

/// Gives each stack to the calls of its thread that contain it. A stack that was collected because of a call and lies next to it belongs
/// to it, too. `wanted` tells calls whose stacks are kept. The calls are ordered by start. O((calls + samples) · log calls).
pub(crate) fn attach(capture: &mut Capture, samples: Vec<Sample>, wanted: impl Fn(&Capture, &Call) -> bool) {
    let mut threads: HashMap<i64, Vec<usize>> = HashMap::new();
    for (index, call) in capture.calls.iter().enumerate() {
        threads.entry(call.thread).or_default().push(index);
    }
    // By call: the stack, and whether a call's own stack replaces it.
    let mut found: HashMap<usize, (usize, bool)> = HashMap::new();
    let mut numbers: HashMap<Vec<String>, usize> = HashMap::new();
    let mut stacks: Vec<Vec<String>> = Vec::new();
    for sample in samples {
        let own = threads.get(&sample.thread).map_or(&[][..], Vec::as_slice);
        let next = own.partition_point(|&index| capture.calls[index].start <= sample.time);
        let before = own[..next].iter().rev().take(NESTED);
        let mut of: Vec<usize> = before.copied().filter(|&index| capture.calls[index].end >= sample.time).collect();
        if of.is_empty() && sample.of_event {
            let last = own[..next].iter().rev().take(NESTED).max_by_key(|&&index| capture.calls[index].end);
            let after = last.map(|&index| (sample.time - capture.calls[index].end, index));
            let ahead = own.get(next).map(|&index| (capture.calls[index].start - sample.time, index));
            of.extend(
                after.into_iter().chain(ahead).min().filter(|(apart, _)| *apart <= SLACK).map(|(_, index)| index),
            );
        }
        of.retain(|&index| wanted(capture, &capture.calls[index]));
        if of.is_empty() {
            continue;
        }
        let number = *numbers.entry(sample.frames).or_insert_with_key(|frames| {
            stacks.push(frames.clone());
            stacks.len() - 1
        });
        for call in of {
            let place = found.entry(call).or_insert((number, sample.of_event));
            // A call has one stack of its own; of several samples, the first.
            if sample.of_event && !place.1 {
                *place = (number, true);
            }
        }
    }
    // Behind the frames of native code, which are further in.
    let mut joined: HashMap<(Option<usize>, usize), usize> = HashMap::new();
    let mut found: Vec<(usize, usize)> = found.into_iter().map(|(call, (stack, _))| (call, stack)).collect();
    found.sort_unstable();
    for (call, python) in found {
        let native = capture.calls[call].stack;
        let stack = *joined.entry((native, python)).or_insert_with(|| {
            let native = native.map_or(&[][..], |stack| capture.stacks[stack].as_slice());
            let frames = native.iter().chain(&stacks[python]).cloned().collect();
            capture.stacks.push(frames);
            capture.stacks.len() - 1
        });
        capture.calls[call].stack = Some(stack);
    }
}
