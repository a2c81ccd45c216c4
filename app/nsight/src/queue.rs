//! The work of each stream in the order in which it was queued.

use crate::capture::{Call, Capture, Work};
use crate::names::Scope;
use std::collections::HashMap;

/// The work of one stream.
#[derive(Debug)]
pub(crate) struct Lane {
    process: i64,
    device: i64,
    stream: i64,
    /// When each piece was queued, ascending.
    queued: Vec<i64>,
    /// Of the pieces up to this one, that which ends last.
    last: Vec<usize>,
    /// Ends of the pieces, ascending, and their indices.
    ends: Vec<(i64, usize)>,
    /// The host knows that work queued before this time is over.
    known: i64,
}

/// All streams.
#[derive(Debug)]
pub(crate) struct Queue<'c> {
    work: &'c [Work],
    lanes: Vec<Lane>,
}

impl<'c> Queue<'c> {
    pub(crate) fn new(capture: &'c Capture) -> Self {
        let work = &capture.work;
        let mut numbers: HashMap<(i64, i64, i64), usize> = HashMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        for (index, piece) in work.iter().enumerate() {
            let number = *numbers.entry((piece.process, piece.device, piece.stream)).or_insert(members.len());
            if number == members.len() {
                members.push(Vec::new());
            }
            members[number].push(index);
        }
        let lane = |mut indices: Vec<usize>| {
            let piece = &work[indices[0]];
            let (process, device, stream) = (piece.process, piece.device, piece.stream);
            let mut ends: Vec<(i64, usize)> = indices.iter().map(|&index| (work[index].end, index)).collect();
            ends.sort_unstable();
            indices.sort_by_key(|&index| (work[index].queued, work[index].start));
            let mut last: Vec<usize> = Vec::with_capacity(indices.len());
            for &index in &indices {
                let latest = last.last().copied().filter(|&latest| work[latest].end > work[index].end);
                last.push(latest.unwrap_or(index));
            }
            let queued = indices.iter().map(|&index| work[index].queued).collect();
            Lane { process, device, stream, queued, last, ends, known: i64::MIN }
        };
        Self { work, lanes: members.into_iter().map(lane).collect() }
    }

    /// The lanes that a call is about: of its process, of its stream if that is known, and of its device where that has work.
    pub(crate) fn reach(&self, call: &Call, stream: Option<i64>) -> Vec<usize> {
        let mut lanes: Vec<usize> = (0..self.lanes.len())
            .filter(|&lane| self.lanes[lane].process == call.process)
            .filter(|&lane| stream.is_none_or(|stream| self.lanes[lane].stream == stream))
            .collect();
        let device = call.device.filter(|&device| lanes.iter().any(|&lane| self.lanes[lane].device == device));
        lanes.retain(|&lane| device.is_none_or(|device| self.lanes[lane].device == device));
        lanes
    }

    /// Of the work queued on these lanes before a time, that which ends last.
    pub(crate) fn latest(&self, lanes: &[usize], time: i64) -> Option<usize> {
        let last = lanes.iter().filter_map(|&lane| {
            let lane = &self.lanes[lane];
            let place = lane.queued.partition_point(|&queued| queued < time);
            place.checked_sub(1).map(|place| lane.last[place])
        });
        // The first of equals, whatever the order of the lanes' hashes was.
        last.reduce(|best, other| if self.work[other].end > self.work[best].end { other } else { best })
    }

    /// Whether work was queued on the lane before a time that no call has waited for.
    pub(crate) fn unknown(&self, lane: usize, time: i64) -> bool {
        let lane = &self.lanes[lane];
        let place = lane.queued.partition_point(|&queued| queued < time);
        place > 0 && lane.queued[place - 1] >= lane.known
    }

    /// The host has learnt that what was queued on these lanes before a time is over.
    pub(crate) fn settle(&mut self, lanes: &[usize], time: i64) {
        for &lane in lanes {
            self.lanes[lane].known = self.lanes[lane].known.max(time);
        }
    }

    /// How many pieces were queued on these lanes before a time and not over by then.
    pub(crate) fn outstanding(&self, lanes: &[usize], time: i64) -> usize {
        lanes
            .iter()
            .map(|&lane| {
                let lane = &self.lanes[lane];
                let queued = lane.queued.partition_point(|&queued| queued < time);
                queued.saturating_sub(lane.ends.partition_point(|&(end, _)| end <= time))
            })
            .sum()
    }

    /// The last work on these lanes to end within a call.
    pub(crate) fn last_within(&self, lanes: &[usize], call: &Call) -> Option<usize> {
        let inside = lanes.iter().filter_map(|&lane| {
            let ends = &self.lanes[lane].ends;
            let place = ends.partition_point(|&(end, _)| end <= call.end);
            place.checked_sub(1).map(|place| ends[place]).filter(|&(end, _)| end > call.start)
        });
        inside.max_by_key(|&(end, index)| (end, std::cmp::Reverse(index))).map(|(_, index)| index)
    }
}

/// The recorded events of each process, to find the record before a wait.
#[derive(Debug, Default)]
pub(crate) struct Records(HashMap<(i64, i64), Vec<Record>>);

/// When an event was recorded, and on which stream.
type Record = (i64, Option<i64>);

impl Records {
    pub(crate) fn new(capture: &Capture) -> Self {
        let mut records: HashMap<(i64, i64), Vec<Record>> = HashMap::new();
        for call in &capture.calls {
            if let Some(event) = call.event.filter(|_| capture.call_name(call).kind == "event_record") {
                records.entry((call.process, event)).or_default().push((call.start, call.stream));
            }
        }
        Self(records)
    }

    /// The stream that a call is about, and the time before which the work must have been queued.
    pub(crate) fn reach(&self, call: &Call, scope: Scope) -> (Option<i64>, i64) {
        if scope == Scope::Event {
            let records = call.event.and_then(|event| self.0.get(&(call.process, event)));
            let before = records.and_then(|records| {
                let place = records.partition_point(|&(start, _)| start < call.start);
                place.checked_sub(1).map(|place| records[place])
            });
            if let Some((start, stream)) = before {
                return (stream, start);
            }
        }
        (call.stream.filter(|_| scope == Scope::Stream), call.start)
    }
}
