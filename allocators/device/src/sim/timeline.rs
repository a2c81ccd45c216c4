//! Virtual time: a clock for the host and one for each stream, and the order between streams.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

/// A point of a stream: the work queued on it so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) stream: u64,
    /// Number of operations queued on the stream by then.
    pub(super) sequence: u64,
    /// Virtual time at which they complete.
    pub(super) time_ns: u64,
}

/// Whether work may use memory that was freed at a [`Mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Usable,
    AfterWait,
    Unusable,
}

#[derive(Debug, Default)]
struct Stream {
    /// Time at which all its queued work completes.
    ready_ns: u64,
    sequence: u64,
    /// End times of operations that may be unfinished, oldest first.
    queue: VecDeque<u64>,
    /// For each other stream, the sequence number that this stream is ordered after (a vector clock).
    after: BTreeMap<u64, u64>,
    /// Device time spent in kernels and copies.
    busy_ns: u64,
    /// Whether the last queued operation is a free.
    frees: bool,
}

/// The clocks of one device.
#[derive(Debug)]
pub(super) struct Timeline {
    now_ns: u64,
    blocked_ns: u64,
    depth: usize,
    streams: BTreeMap<u64, Stream>,
    next_stream: u64,
    /// Device time of destroyed streams.
    past_busy_ns: u64,
}

/// A recorded event: the point, and the streams that its stream was ordered after.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    pub(super) mark: Mark,
    after: BTreeMap<u64, u64>,
}

impl Timeline {
    pub(super) fn new(depth: usize) -> Self {
        Self { now_ns: 0, blocked_ns: 0, depth, streams: BTreeMap::new(), next_stream: 1, past_busy_ns: 0 }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    pub(super) fn blocked_ns(&self) -> u64 {
        self.blocked_ns
    }

    /// Device time spent in kernels and copies on all streams.
    pub(super) fn busy_ns(&self) -> u64 {
        self.past_busy_ns + self.streams.values().map(|stream| stream.busy_ns).sum::<u64>()
    }

    /// The host works for `ns`.
    pub(super) fn spend(&mut self, ns: u64) {
        self.now_ns += ns;
    }

    /// The host waits until `time_ns`.
    fn wait_until(&mut self, time_ns: u64) {
        if time_ns > self.now_ns {
            self.blocked_ns += time_ns - self.now_ns;
            self.now_ns = time_ns;
        }
    }

    pub(super) fn create_stream(&mut self) -> u64 {
        let id =
            (self.next_stream..).find(|id| !self.has_stream(*id)).expect("there should be fewer than 2^64 streams");
        self.next_stream = id + 1;
        self.streams.insert(id, Stream::default());
        id
    }

    /// A stream under a number of the program's choice; no effect if it exists.
    pub(super) fn adopt_stream(&mut self, id: u64) {
        self.streams.entry(id).or_default();
    }

    pub(super) fn has_stream(&self, stream: u64) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Removes a stream; its queued work still takes its time.
    pub(super) fn destroy_stream(&mut self, stream: u64) {
        if let Some(stream) = self.streams.remove(&stream) {
            self.past_busy_ns += stream.busy_ns;
            self.wait_until(stream.ready_ns);
        }
    }

    fn stream(&mut self, stream: u64) -> &mut Stream {
        self.streams.get_mut(&stream).expect("the driver should have checked the stream")
    }

    /// Queues work of `duration_ns` that can start `latency_ns` from now at the earliest, in pieces with `gaps_ns` in total between
    /// them, in which the device is idle. Blocks the host while the queue is full, as a launch does.
    pub(super) fn enqueue(&mut self, stream: u64, latency_ns: u64, duration_ns: u64, gaps_ns: u64) {
        self.wait_for_room(stream);
        let earliest = self.now_ns + latency_ns;
        let state = self.stream(stream);
        let end = state.ready_ns.max(earliest) + duration_ns + gaps_ns;
        state.ready_ns = end;
        state.busy_ns += duration_ns;
        state.frees = false;
        state.sequence += 1;
        state.queue.push_back(end);
    }

    /// Blocks the host while the queue of a stream is full.
    fn wait_for_room(&mut self, stream: u64) {
        let (now, depth) = (self.now_ns, self.depth);
        let state = self.stream(stream);
        while state.queue.front().is_some_and(|&end| end <= now) {
            state.queue.pop_front();
        }
        if state.queue.len() >= depth {
            let free_at = state.queue[state.queue.len() - depth];
            self.wait_until(free_at);
        }
    }

    /// The time at which work that is queued now can start, `latency_ns` from now at the earliest. Blocks the host while the queue
    /// is full.
    pub(super) fn start_of_next(&mut self, stream: u64, latency_ns: u64) -> u64 {
        self.wait_for_room(stream);
        let earliest = self.now_ns + latency_ns;
        self.stream(stream).ready_ns.max(earliest)
    }

    /// Delays the next work on a stream until a time.
    pub(super) fn delay_until(&mut self, stream: u64, time_ns: u64) {
        let state = self.stream(stream);
        state.ready_ns = state.ready_ns.max(time_ns);
    }

    /// Delays the next work on `stream` by `ns`, behind a free. Consecutive frees are one break between two pieces of work, so the
    /// second and later ones cost nothing.
    pub(super) fn delay_by_free(&mut self, stream: u64, ns: u64) {
        let now = self.now_ns;
        let state = self.stream(stream);
        if !std::mem::replace(&mut state.frees, true) {
            state.ready_ns = state.ready_ns.max(now) + ns;
        }
    }

    /// The point at which all work queued so far on `stream` completes.
    pub(super) fn mark(&mut self, stream: u64) -> Mark {
        let state = self.stream(stream);
        Mark { stream, sequence: state.sequence, time_ns: state.ready_ns }
    }

    /// A point of its own for an operation without duration, such as a free.
    pub(super) fn step(&mut self, stream: u64) -> Mark {
        self.stream(stream).sequence += 1;
        self.mark(stream)
    }

    /// Records an event: on an idle stream it completes immediately.
    pub(super) fn record(&mut self, stream: u64) -> Recorded {
        let mut mark = self.step(stream);
        mark.time_ns = mark.time_ns.max(self.now_ns);
        Recorded { mark, after: self.stream(stream).after.clone() }
    }

    /// Orders later work on `stream` after the recorded point.
    pub(super) fn wait_for(&mut self, stream: u64, event: &Recorded) {
        let state = self.stream(stream);
        state.ready_ns = state.ready_ns.max(event.mark.time_ns);
        let points = event.after.iter().map(|(id, sequence)| (*id, *sequence));
        for (id, sequence) in points.chain([(event.mark.stream, event.mark.sequence)]) {
            let known = state.after.entry(id).or_insert(0);
            *known = (*known).max(sequence);
        }
    }

    /// Orders later work on `stream` after `mark`, as a driver's hidden wait does.
    pub(super) fn wait_for_mark(&mut self, stream: u64, mark: Mark) {
        self.wait_for(stream, &Recorded { mark, after: BTreeMap::new() });
    }

    /// Whether `stream` is known, by stream order or by events, to run after `mark`.
    pub(super) fn is_ordered_after(&self, stream: u64, mark: Mark) -> bool {
        stream == mark.stream
            || self
                .streams
                .get(&stream)
                .is_some_and(|state| state.after.get(&mark.stream).is_some_and(|&known| known >= mark.sequence))
    }

    pub(super) fn has_passed(&self, mark: Mark) -> bool {
        mark.time_ns <= self.now_ns
    }

    pub(super) fn synchronize_mark(&mut self, mark: Mark) {
        self.wait_until(mark.time_ns);
    }

    pub(super) fn synchronize_stream(&mut self, stream: u64) {
        let ready = self.stream(stream).ready_ns;
        self.wait_until(ready);
    }

    pub(super) fn synchronize_device(&mut self) {
        let ready = self.streams.values().map(|stream| stream.ready_ns).max().unwrap_or(0);
        self.wait_until(ready);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_queues_and_the_host_runs_ahead() {
        let mut time = Timeline::new(100);
        let stream = time.create_stream();
        for _ in 0..3 {
            time.spend(2);
            time.enqueue(stream, 1, 10, 0);
        }
        assert_eq!((time.now_ns(), time.mark(stream).time_ns), (6, 33));
        time.synchronize_stream(stream);
        assert_eq!((time.now_ns(), time.blocked_ns(), time.busy_ns()), (33, 27, 30));
    }

    #[test]
    fn a_full_queue_blocks_the_launch() {
        let mut time = Timeline::new(2);
        let stream = time.create_stream();
        for _ in 0..3 {
            time.enqueue(stream, 0, 10, 0);
        }
        // The third had to wait for the first, and that counts as blocked.
        assert_eq!((time.now_ns(), time.blocked_ns()), (10, 10));
    }

    #[test]
    fn events_order_streams_transitively() {
        let mut time = Timeline::new(100);
        let (a, b, c) = (time.create_stream(), time.create_stream(), time.create_stream());
        time.enqueue(a, 0, 50, 0);
        let freed = time.step(a);
        let event = time.record(a);
        assert!(!time.is_ordered_after(b, freed));
        time.wait_for(b, &event);
        let event = time.record(b);
        time.wait_for(c, &event);
        assert!(time.is_ordered_after(c, freed));
        assert_eq!(time.mark(c).time_ns, 50);
        let later = time.step(a);
        assert!(!time.is_ordered_after(c, later));
    }
}
