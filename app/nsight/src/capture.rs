//! A capture in memory: calls, the device's work, NVTX ranges. Times are nanoseconds of the capture's clock.

use crate::names::{self, Scope};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// A call of the CUDA driver or runtime by the host.
#[derive(Clone, Debug)]
pub struct Call {
    /// When the call began.
    pub start: i64,
    /// When the call returned.
    pub end: i64,
    /// Index in [`Capture::call_names`].
    pub name: usize,
    /// Nsight's global id of the thread.
    pub thread: i64,
    /// Nsight's global id of the process.
    pub process: i64,
    /// Joins the call with the work that it queued, within one process.
    pub correlation: i64,
    /// Whether the call returned success.
    pub ok: bool,
    /// The stream of a synchronise call or of an event's record.
    pub stream: Option<i64>,
    /// The device of memory that the call allocates or frees.
    pub device: Option<i64>,
    /// The size of that memory.
    pub bytes: Option<i64>,
    /// The event that the call records or waits for.
    pub event: Option<i64>,
    /// Index of the innermost range of the thread in which the call starts.
    pub range: Option<usize>,
    /// Stack frames from the innermost out, where they were captured.
    pub stack: Option<usize>,
}

impl Call {
    /// Host time in the call.
    #[must_use]
    pub fn duration(&self) -> i64 {
        self.end - self.start
    }
}

/// A name of calls, with its meaning.
#[derive(Clone, Debug)]
pub struct CallName {
    /// Without version: `cuMemFree`.
    pub name: String,
    /// What such calls do, in the words of a run record.
    pub kind: String,
    /// The documented wait.
    pub scope: Scope,
}

/// The kinds of device work.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkKind {
    /// A kernel.
    Kernel,
    /// A copy.
    Memcpy,
    /// A fill.
    Memset,
    /// A whole launch of a graph, where the capture has no times of its nodes.
    Graph,
}

/// Something that the device did.
#[derive(Clone, Debug)]
pub struct Work {
    /// When it began.
    pub start: i64,
    /// When it completed.
    pub end: i64,
    /// What it is.
    pub kind: WorkKind,
    /// Index in [`Capture::work_names`].
    pub name: usize,
    /// The device.
    pub device: i64,
    /// The stream.
    pub stream: i64,
    /// Nsight's global id of the process.
    pub process: i64,
    /// Joins the work with the call that queued it, within one process.
    pub correlation: i64,
    /// The size of a copy or fill.
    pub bytes: Option<i64>,
    /// Whether a copy reads or writes host memory that is not pinned.
    pub pageable: bool,
    /// Index of the call that queued the work.
    pub call: Option<usize>,
    /// Start of that call; without one, the work's own start.
    pub queued: i64,
}

/// An NVTX range that was pushed and popped on one thread.
#[derive(Clone, Debug)]
pub struct Range {
    /// When it was pushed.
    pub start: i64,
    /// When it was popped.
    pub end: i64,
    /// Its text.
    pub text: String,
    /// Nsight's global id of the thread.
    pub thread: i64,
    /// The number of ranges around it.
    pub level: usize,
    /// Index of the range around it.
    pub parent: Option<usize>,
}

/// An NVTX mark: a moment of one thread.
#[derive(Clone, Debug)]
pub struct Mark {
    /// When it was set.
    pub time: i64,
    /// Its text.
    pub text: String,
    /// Nsight's global id of the thread.
    pub thread: i64,
}

/// A time in which the profiler held a thread for its own work.
#[derive(Clone, Debug)]
pub struct Overhead {
    /// When it began.
    pub start: i64,
    /// When it ended.
    pub end: i64,
    /// Nsight's global id of the thread.
    pub thread: i64,
}

/// Versions and devices of a capture; nothing of the machine's name or environment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Source {
    /// Version of Nsight Systems that exported the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nsight_systems: Option<String>,
    /// Version of the export's schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export_schema: Option<String>,
    /// Names of the GPUs.
    pub devices: Vec<String>,
}

/// The contents of a capture. Lists are ordered by start.
#[derive(Clone, Debug, Default)]
pub struct Capture {
    /// Calls by the host.
    pub calls: Vec<Call>,
    /// Names of calls.
    pub call_names: Vec<CallName>,
    /// Work of the devices.
    pub work: Vec<Work>,
    /// Names of work.
    pub work_names: Vec<String>,
    /// NVTX ranges.
    pub ranges: Vec<Range>,
    /// NVTX marks.
    pub marks: Vec<Mark>,
    /// Times that the profiler took for itself.
    pub overhead: Vec<Overhead>,
    /// Call stacks, frames from the innermost out.
    pub stacks: Vec<Vec<String>>,
    /// Names of threads by global id.
    pub threads: BTreeMap<i64, String>,
    /// Names of streams by number.
    pub streams: BTreeMap<i64, String>,
    /// Versions and devices.
    pub source: Source,
    /// What the capture lacks, a sentence each.
    pub notes: Vec<String>,
}

impl Capture {
    /// Orders everything, nests the ranges, and joins work with calls. O(n log n).
    pub(crate) fn join(&mut self) {
        self.calls.sort_by_key(|call| (call.start, call.correlation));
        self.work.sort_by_key(|work| (work.start, work.correlation));
        self.marks.sort_by_key(|mark| mark.time);
        nest(&mut self.ranges);
        place(&mut self.calls, &self.ranges);
        let mut at: HashMap<(i64, i64), usize> = HashMap::with_capacity(self.calls.len());
        for (index, call) in self.calls.iter().enumerate() {
            at.insert((call.process, call.correlation), index);
        }
        let mut orphans = 0;
        for work in &mut self.work {
            work.call = at.get(&(work.process, work.correlation)).copied();
            work.queued = work.call.map_or(work.start, |call| self.calls[call].start);
            orphans += usize::from(work.call.is_none());
        }
        let numbers: std::collections::HashSet<i64> = self.work.iter().map(|work| work.stream).collect();
        self.streams.retain(|stream, _| numbers.contains(stream));
        let note = format!(
            "{orphans} of {} kernels and copies were queued by calls that are not in the capture; their starts stand in for the \
             times at which they were queued.",
            self.work.len()
        );
        // Extracted tables bring the notes of their capture.
        if orphans > 0 && !self.calls.is_empty() && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// From the first call, range or work to the end of the last.
    #[must_use]
    pub fn span(&self) -> (i64, i64) {
        let calls = self.calls.iter().map(|call| (call.start, call.end));
        let work = self.work.iter().map(|work| (work.start, work.end));
        let ranges = self.ranges.iter().map(|range| (range.start, range.end));
        calls
            .chain(work)
            .chain(ranges)
            .reduce(|(first, last), (start, end)| (first.min(start), last.max(end)))
            .unwrap_or((0, 0))
    }

    /// The name of a call.
    #[must_use]
    pub fn call_name(&self, call: &Call) -> &CallName {
        &self.call_names[call.name]
    }

    /// The name of work.
    #[must_use]
    pub fn work_name(&self, work: &Work) -> &str {
        &self.work_names[work.name]
    }

    /// Texts of a range and those around it, from the outside in, with slashes; empty without a range.
    #[must_use]
    pub fn path(&self, range: Option<usize>) -> String {
        let mut texts = Vec::new();
        let mut next = range;
        while let Some(index) = next {
            texts.push(self.ranges[index].text.as_str());
            next = self.ranges[index].parent;
        }
        texts.reverse();
        texts.join("/")
    }

    /// Ranges around the call that queued the work.
    #[must_use]
    pub fn launch_path(&self, work: &Work) -> String {
        self.path(work.call.and_then(|call| self.calls[call].range))
    }

    /// The number of training steps that ranges name: `step 3` is one, `steps 9 to 16` eight.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.ranges
            .iter()
            .filter_map(|range| steps(&range.text))
            .map(|(first, last)| last.saturating_sub(first) + 1)
            .sum()
    }
}

/// First and last step of a range: `step 3` or `steps 9 to 16`.
#[must_use]
pub fn steps(text: &str) -> Option<(u64, u64)> {
    let numbers = text.strip_prefix("steps ").or_else(|| text.strip_prefix("step "))?;
    match numbers.split_once(" to ") {
        Some((first, last)) => Some((first.parse().ok()?, last.parse().ok()?)),
        None => numbers.parse().ok().map(|number| (number, number)),
    }
}

/// Gives each range its level and parent. Ranges of one thread nest, because they are pushed and popped.
fn nest(ranges: &mut [Range]) {
    // The longer first where two start at once: it is the outer one.
    ranges.sort_by_key(|range| (range.start, std::cmp::Reverse(range.end)));
    let mut open: HashMap<i64, Vec<usize>> = HashMap::new();
    for index in 0..ranges.len() {
        let (start, thread) = (ranges[index].start, ranges[index].thread);
        let stack = open.entry(thread).or_default();
        while stack.last().is_some_and(|&outer| ranges[outer].end <= start) {
            stack.pop();
        }
        ranges[index].level = stack.len();
        ranges[index].parent = stack.last().copied();
        stack.push(index);
    }
}

/// Gives each call the innermost range of its thread that is open when it starts.
fn place(calls: &mut [Call], ranges: &[Range]) {
    let mut threads: HashMap<i64, (Vec<usize>, usize, Vec<usize>)> = HashMap::new();
    for (index, range) in ranges.iter().enumerate() {
        threads.entry(range.thread).or_default().0.push(index);
    }
    for call in calls {
        let Some((all, next, stack)) = threads.get_mut(&call.thread) else { continue };
        while let Some(&index) = all.get(*next).filter(|&&index| ranges[index].start <= call.start) {
            while stack.last().is_some_and(|&outer| ranges[outer].end <= ranges[index].start) {
                stack.pop();
            }
            stack.push(index);
            *next += 1;
        }
        while stack.last().is_some_and(|&outer| ranges[outer].end <= call.start) {
            stack.pop();
        }
        call.range = stack.last().copied();
    }
}

/// Numbers names in the order in which they appear.
#[derive(Debug, Default)]
pub(crate) struct CallNames {
    known: HashMap<String, usize>,
    pub(crate) list: Vec<CallName>,
}

impl CallNames {
    pub(crate) fn number(&mut self, name: &str) -> usize {
        let base = names::base(name);
        if let Some(&number) = self.known.get(base) {
            return number;
        }
        let number = self.list.len();
        let (kind, scope) = (names::kind(base).to_owned(), names::scope(base));
        self.list.push(CallName { name: base.to_owned(), kind, scope });
        self.known.insert(base.to_owned(), number);
        number
    }
}

/// Numbers texts in the order in which they appear.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    known: HashMap<String, usize>,
    pub(crate) list: Vec<String>,
}

impl Texts {
    pub(crate) fn number(&mut self, text: &str) -> usize {
        if let Some(&number) = self.known.get(text) {
            return number;
        }
        self.list.push(text.to_owned());
        self.known.insert(text.to_owned(), self.list.len() - 1);
        self.list.len() - 1
    }
}
