//! Second stage: the allocator's events between two events of the client, as windows.

use super::timeline::Timeline;
use crate::formats::Event;
use crate::history::{Kind, Op, SegmentEvent};
use crate::steps;

/// A deferred free that completed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The operation that requested it.
    pub(super) op: u32,
    /// Address of the block.
    pub(super) addr: u64,
    /// Requested bytes.
    pub(super) bytes: u64,
    /// Size, if the recording has the block's segment: a request may get more than it requested.
    pub(super) size: Option<u64>,
    /// Handle of its stream.
    pub(super) stream: u64,
    /// Whether a segment was released before.
    pub(super) after_release: bool,
}

impl Completion {
    fn of(op: u32, event: &Event, after_release: bool) -> Self {
        Self { op, addr: event.addr, bytes: event.bytes, size: None, stream: event.stream, after_release }
    }
}

/// The allocator's events between two of the client's.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// Frees that completed.
    pub(super) completions: Vec<Completion>,
    /// The previous operation, if it is a free that completed immediately. It may also have been pending, and completed as the
    /// first event of this window.
    pub(super) before: Option<Completion>,
    /// Upper bound on the free range that contains its block when the request of the window was made.
    pub(super) before_room: u64,
    /// Segments in order.
    pub(super) segments: Vec<SegmentEvent>,
    /// Bytes reserved before its first segment event.
    pub(super) reserved: u64,
    /// Reserved size from which the device refused, if no limit is known and failed requests show it.
    pub(super) refused_from: Option<u64>,
    /// Whether a segment was released.
    pub(super) released: bool,
    /// Whether frees stayed pending on other streams. `empty_cache` waits for all of them.
    pub(super) waits_on: bool,
}

/// The client's event that ends a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An allocation: the window is part of it, or of an `empty_cache` before it.
    Alloc {
        /// Requested bytes.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
    /// A failed allocation: likewise.
    Refused {
        /// Requested bytes.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
    /// Another event, or the end of the recording.
    Other,
}

/// Why segments were released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// None was released.
    Nothing,
    /// The client emptied the cache.
    Trim,
    /// Garbage collection or the release of oversize segments, after the usual poll of pending frees.
    Collect,
    /// The limit refused; the allocator waited for all pending frees and flushed the cache.
    Retry,
    /// The device refused; the allocator waited for all pending frees and flushed the cache.
    Full,
    /// The device refused without a limit, and the allocator did not wait for all pending frees.
    Device,
}

impl Window {
    /// Whether it may have been a call of `empty_cache`.
    pub(super) fn may_be_trim(&self, end: End) -> bool {
        end == End::Other || self.released
    }

    pub(super) fn is_empty(&self) -> bool {
        self.completions.is_empty() && self.segments.is_empty()
    }

    /// Whether the reason for the release depends on the sizes of blocks with pending frees.
    pub(super) fn asks_for_sizes(&self, end: End) -> bool {
        self.released && end != End::Other && !(self.completions.is_empty() && self.before.is_none())
    }

    /// For each completed free, whether the allocator waited for it after no free block fitted, or polled it.
    pub(super) fn waited_for(&self, cause: Cause) -> impl Iterator<Item = (u32, bool)> + '_ {
        let some_after = self.completions.iter().any(|completion| completion.after_release);
        let retry = matches!(cause, Cause::Retry | Cause::Full) && !some_after;
        self.completions.iter().map(move |completion| (completion.op, completion.after_release || retry))
    }

    /// Marks its frees as completed in operation `op`. Adds those that were pending to `deferred`.
    pub(super) fn complete(&self, cause: Cause, op: u32, timeline: &mut Timeline, deferred: &mut Vec<u32>) {
        // In a retry the allocator is assumed to have waited for the previous free: if its block had been free, the request might
        // have got it. If it was free, nothing changes, since the request did not get it.
        let waits = matches!(cause, Cause::Retry | Cause::Full | Cause::Device);
        let before = self.before.filter(|_| waits).map(|completion| completion.op);
        deferred.extend(before);
        steps::count(self.completions.len());
        for (free, waited) in self.waited_for(cause).chain(before.map(|free| (free, true))) {
            // A free that was waited for is not ready when the operation polls.
            timeline.set_ready(free, op + u32::from(waited));
        }
    }
}

/// A window in which segments may have been released; the cause is decided at the end.
#[derive(Clone, Debug)]
pub(super) struct ClosedWindow {
    pub(super) window: Window,
    /// The operation that becomes `empty_cache`, if that is the cause.
    pub(super) placeholder: u32,
    /// Position of its segments in the timeline.
    pub(super) first: usize,
    pub(super) end: End,
}

/// The current window, and closed ones that await a decision.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows {
    pub(super) current: Window,
    pub(super) closed: Vec<ClosedWindow>,
}

impl Windows {
    /// Drops all of them and keeps their memory for later ones.
    pub(super) fn clear(&mut self) {
        let Self { current: Window { mut completions, mut segments, .. }, mut closed } = std::mem::take(self);
        completions.clear();
        segments.clear();
        closed.clear();
        *self = Self { current: Window { completions, segments, ..Window::default() }, closed };
    }

    /// A free of the client completed immediately.
    pub(super) fn completed_at_once(&mut self, op: u32, event: &Event) {
        self.current.before = Some(Completion::of(op, event, false));
    }

    /// A deferred free was found completed.
    pub(super) fn completed_late(&mut self, op: u32, event: &Event) {
        self.current.completions.push(Completion::of(op, event, self.current.released));
    }

    /// A segment or range was allocated or released, with this many bytes reserved before.
    pub(super) fn add_segment(&mut self, event: SegmentEvent, reserved: u64) {
        let window = &mut self.current;
        if window.segments.is_empty() {
            window.reserved = reserved;
        }
        window.released |= event.released;
        window.segments.push(event);
    }

    /// Ends the window. Sets when frees completed that the allocator found since the client's last event. If segments were
    /// released, the reason depends on the settings, which snapshots contain after the events, so the decision waits for the end.
    /// `waits_on` is whether frees stay pending.
    pub(super) fn close(&mut self, end: End, waits_on: bool, timeline: &mut Timeline, deferred: &mut Vec<u32>) {
        // The free before a failed request may have been pending, which only the whole recording shows.
        let refused_after_free = matches!(end, End::Refused { .. }) && self.current.before.is_some();
        if self.current.is_empty() && !refused_after_free {
            self.current.before = None;
            return;
        }
        let mut window = Window { waits_on, ..std::mem::take(&mut self.current) };
        let waits = window.may_be_trim(end) || refused_after_free;
        let placeholder = timeline.next_op();
        if waits {
            // Placeholder for `empty_cache`, if that is the cause.
            timeline.ops.push(Op::new(Kind::Nothing, 0, 0, 0));
        }
        let (op, first) = (timeline.next_op(), timeline.segments.len());
        timeline.segments.extend(window.segments.iter().map(|segment| SegmentEvent { op, ..*segment }));
        if waits {
            self.closed.push(ClosedWindow { window, placeholder, first, end });
            return;
        }
        let cause = if matches!(end, End::Refused { .. }) { Cause::Retry } else { Cause::Nothing };
        window.complete(cause, op, timeline, deferred);
        // The next window reuses its memory.
        window.completions.clear();
        window.segments.clear();
        self.current = Window { completions: window.completions, segments: window.segments, ..Window::default() };
    }
}
