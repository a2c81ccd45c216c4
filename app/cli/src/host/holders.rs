//! Who pins host memory, how much of it is rounding, and what waits for which event.

use crate::explain::lines::line_of;
use crate::words::{counted, percent, size};
use serde::Serialize;
use std::collections::BTreeMap;
use vramlab::histories::formats::{Origins, StackId};
use vramlab::histories::host::{HostOp, HostTrace};

/// Number of lines that are reported.
const MOST_LINES: usize = 20;
/// Number of lines on the screen.
const SHOWN: usize = 3;

/// Pinned host memory over a recording.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostMemoryUse {
    /// Most bytes in blocks that were live, or freed and still used by a stream.
    pub(crate) peak_active_bytes: u64,
    /// Most bytes that PyTorch had pinned; `null` if the file does not have its segments.
    pub(crate) peak_reserved_bytes: Option<u64>,
    /// At the peak of active bytes, upper bound on the bytes due to rounding; the requested sizes are not recorded.
    pub(crate) rounding_most_bytes: u64,
    /// Most bytes registered in place at once (`cudaHostRegister`), as far as the file tells.
    pub(crate) registered_bytes: u64,
    /// Lines that hold the bytes at that peak, the most first; at most 20.
    pub(crate) lines: Vec<HostLine>,
    /// Frees that waited for an event of a stream.
    pub(crate) deferred_frees: u64,
    /// Most bytes of freed blocks that waited for events at once.
    pub(crate) peak_waiting_bytes: u64,
    /// The free at the front of the queue when most bytes waited; `null` if none waited.
    pub(crate) front: Option<HostWait>,
    /// The oldest free that had not completed at the end; `null` without one.
    pub(crate) stuck: Option<HostWait>,
}

/// Pinned memory of a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostLine {
    /// Line of the program; `null` without frames.
    pub(crate) line: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// Upper bound on the part due to rounding.
    pub(crate) rounding_most_bytes: u64,
}

/// A free that waits at the front of the queue, and what waits behind it. PyTorch drains its queue in order up to the first event that
/// has not completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostWait {
    /// Line that allocated the block; `null` without frames.
    pub(crate) line: Option<String>,
    pub(crate) bytes: u64,
    /// Frees behind it.
    pub(crate) behind: u64,
    /// Their bytes.
    pub(crate) behind_bytes: u64,
}

/// Describes the pinned memory of a recording.
pub(crate) fn describe(trace: &HostTrace, origins: &Origins) -> HostMemoryUse {
    let block = |number: u32| &trace.blocks[number as usize];
    let rounding = |number: u32| block(number).bytes - trace.least(block(number));
    // Live or waiting blocks, and waiting ones in the order of their frees.
    let (mut active, mut waiting) = (BTreeMap::<u32, ()>::new(), BTreeMap::<u64, u32>::new());
    let mut order: BTreeMap<u32, u64> = BTreeMap::new();
    let (mut waiting_bytes, mut peak_waiting, mut front) = (0_u64, 0_u64, None);
    let (mut lines, mut frees) = (BTreeMap::<Option<String>, HostLine>::new(), 0_u64);
    let mut names: BTreeMap<StackId, Option<String>> = BTreeMap::new();
    let mut name = |stack: StackId| names.entry(stack).or_insert_with(|| line_of(origins, stack)).clone();
    let mut rounding_most_bytes = 0;
    let wait = |waiting: &BTreeMap<u64, u32>, name: &mut dyn FnMut(StackId) -> Option<String>| {
        let first = *waiting.values().next()?;
        let behind: u64 = waiting.values().skip(1).map(|number| block(*number).bytes).sum();
        let count = waiting.len() as u64 - 1;
        Some(HostWait {
            line: name(block(first).stack),
            bytes: block(first).bytes,
            behind: count,
            behind_bytes: behind,
        })
    };
    for (at, op) in trace.ops.iter().enumerate() {
        match *op {
            HostOp::Allocate(number) => _ = active.insert(number, ()),
            // A free that completes at once does not wait.
            HostOp::Free(number) if trace.ops.get(at + 1) != Some(&HostOp::Complete(number)) => {
                frees += 1;
                waiting.insert(frees, number);
                order.insert(number, frees);
                waiting_bytes += block(number).bytes;
                if waiting_bytes > peak_waiting {
                    peak_waiting = waiting_bytes;
                    front = wait(&waiting, &mut name);
                }
            }
            HostOp::Complete(number) => {
                active.remove(&number);
                if let Some(place) = order.remove(&number) {
                    waiting.remove(&place);
                    waiting_bytes -= block(number).bytes;
                }
            }
            HostOp::Free(_) | HostOp::Use { .. } | HostOp::Empty => {}
        }
        if at + 1 == trace.peak_op {
            for number in active.keys() {
                let line = name(block(*number).stack);
                let entry = lines.entry(line.clone()).or_insert_with(|| HostLine {
                    line,
                    bytes: 0,
                    blocks: 0,
                    rounding_most_bytes: 0,
                });
                entry.bytes += block(*number).bytes;
                entry.blocks += 1;
                entry.rounding_most_bytes += rounding(*number);
                rounding_most_bytes += rounding(*number);
            }
        }
    }
    let mut lines: Vec<HostLine> = lines.into_values().collect();
    lines.sort_by_key(|line| std::cmp::Reverse(line.bytes));
    lines.truncate(MOST_LINES);
    let stuck = wait(&waiting, &mut name);
    HostMemoryUse {
        peak_active_bytes: trace.peak_active,
        peak_reserved_bytes: trace.recorded_peak,
        rounding_most_bytes,
        registered_bytes: trace.peak_registered,
        lines,
        deferred_frees: frees,
        peak_waiting_bytes: peak_waiting,
        front,
        stuck,
    }
}

impl HostWait {
    fn words(&self) -> String {
        let line = self.line.as_ref().map_or(String::new(), |line| format!(" of {line}"));
        let behind = match self.behind {
            0 => "nothing waits behind it".to_owned(),
            count => format!("{} ({}) wait behind it", counted(count, "free"), size(self.behind_bytes)),
        };
        format!("{}{line}: {behind}", size(self.bytes))
    }
}

impl HostMemoryUse {
    /// The sentences of the screen.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let mut first = format!("{} in pinned blocks at the peak", size(self.peak_active_bytes));
        if let Some(reserved) = self.peak_reserved_bytes {
            first += &format!(", {} pinned in all", size(reserved));
        }
        if self.rounding_most_bytes > 0 {
            first += &format!(
                "; up to {} ({}) of it is rounding to powers of two",
                size(self.rounding_most_bytes),
                percent(self.rounding_most_bytes, self.peak_active_bytes)
            );
        }
        let mut out = vec![first];
        for line in self.lines.iter().take(SHOWN).filter(|line| line.line.is_some()) {
            let name = line.line.as_deref().unwrap_or_default();
            out.push(format!("{} in {} by {name}", size(line.bytes), counted(line.blocks, "block")));
        }
        if let Some(front) = &self.front {
            out.push(format!(
                "most that waited for copies: {}, behind {}",
                size(self.peak_waiting_bytes),
                front.words()
            ));
        }
        if let Some(stuck) = &self.stuck {
            out.push(format!("not completed at the end: {}", stuck.words()));
        }
        if self.registered_bytes > 0 {
            out.push(format!("{} registered in place", size(self.registered_bytes)));
        }
        out
    }
}
