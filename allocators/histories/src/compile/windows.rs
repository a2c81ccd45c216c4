//! Second stage: what the allocator did between two events of the client, as windows of its own events.

use super::timeline::Timeline;
use crate::formats::Event;
use crate::history::{Kind, Op, SegmentEvent};
use crate::steps;

/// A free that completed later than it was requested.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The operation that requested it.
    pub(super) op: u32,
    /// Address of the block.
    pub(super) addr: u64,
    /// Bytes asked for.
    pub(super) bytes: u64,
    /// Size, where the history shows the block's segment: a request may get more than it asked for.
    pub(super) size: Option<u64>,
    /// Handle of its stream.
    pub(super) stream: u64,
    /// Whether a segment had gone back before.
    pub(super) after_release: bool,
}

impl Completion {
    fn of(op: u32, event: &Event, after_release: bool) -> Self {
        Self { op, addr: event.addr, bytes: event.bytes, size: None, stream: event.stream, after_release }
    }
}

/// The events between two of the client's.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Frees that completed.
    pub(super) completions: Vec<Completion>,
    /// The operation right before it, if that is a free which completed at once. It may as well have been held up and
    /// completed as the first event of this window.
    pub(super) before: Option<Completion>,
    /// Segments in order.
    pub(super) segments: Vec<SegmentEvent>,
    /// Bytes reserved before its first segment event.
    pub(super) reserved: u64,
    /// From how many reserved bytes on the device refused, where no limit is known and refused requests tell.
    pub(super) refused_from: Option<u64>,
    /// Whether a segment has gone back.
    pub(super) released: bool,
    /// Whether frees went on waiting for other streams. `empty_cache` waits for all of them.
    pub(super) waits_on: bool,
}

/// The client's event that ends a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An allocation: the window is a part of it, or of an `empty_cache` before it.
    Alloc {
        /// Bytes asked for.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
    /// A refused allocation: likewise.
    Refused {
        /// Bytes asked for.
        bytes: u64,
        /// Handle of the stream.
        stream: u64,
    },
    /// Anything else, or the end of the history.
    Other,
}

/// Why segments went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// None did.
    Nothing,
    /// The client emptied the cache.
    Trim,
    /// Garbage collection or the release of oversize segments, after the usual look at pending frees.
    Collect,
    /// The limit refused, everything pending was waited for, and the cache was released.
    Retry,
    /// The device refused, everything pending was waited for, and the cache was released.
    Full,
    /// The device refused where no limit did, and not everything was waited for.
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

    /// Whether the reason for which segments went back hangs on how large blocks were whose frees were held up.
    pub(super) fn asks_for_sizes(&self, end: End) -> bool {
        self.released && end != End::Other && !(self.completions.is_empty() && self.before.is_none())
    }

    /// Whether each completed free was found by waiting for it, after no free block had fitted, and not by asking.
    pub(super) fn waited_for(&self, cause: Cause) -> impl Iterator<Item = (u32, bool)> + '_ {
        let some_after = self.completions.iter().any(|done| done.after_release);
        let retry = matches!(cause, Cause::Retry | Cause::Full) && !some_after;
        self.completions.iter().map(move |done| (done.op, done.after_release || retry))
    }

    /// Says that its frees completed in operation `op`. Those that were held up are added to `deferred`.
    pub(super) fn complete(&self, cause: Cause, op: u32, timeline: &mut Timeline, deferred: &mut Vec<u32>) {
        // In a retry the free right before is taken for one that was waited for: had its block been free, the request
        // may have got it. If it was, nothing changes, since the request did not get it.
        let waits = matches!(cause, Cause::Retry | Cause::Full | Cause::Device);
        let before = self.before.filter(|_| waits).map(|done| done.op);
        deferred.extend(before);
        steps::count(self.completions.len());
        for (free, waited) in self.waited_for(cause).chain(before.map(|free| (free, true))) {
            // What was waited for is not ready yet when the operation asks.
            timeline.set_ready(free, op + u32::from(waited));
        }
    }
}

/// A window in which segments may have gone back; why is decided at the end.
#[derive(Debug)]
pub(super) struct ClosedWindow {
    pub(super) window: Window,
    /// The operation that becomes `empty_cache`, if that is what it was.
    pub(super) placeholder: u32,
    /// Where its segments are in the timeline.
    pub(super) first: usize,
    pub(super) end: End,
}

/// The window under way, and those that were closed and wait for a decision.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pub(super) current: Window,
    pub(super) closed: Vec<ClosedWindow>,
}

impl Windows {
    /// Forgets all of them. Their memory serves the next ones.
    pub(super) fn clear(&mut self) {
        let Self { current: Window { mut completions, mut segments, .. }, mut closed } = std::mem::take(self);
        completions.clear();
        segments.clear();
        closed.clear();
        *self = Self { current: Window { completions, segments, ..Window::default() }, closed };
    }

    /// A free of the client completed at once.
    pub(super) fn completed_at_once(&mut self, op: u32, event: &Event) {
        self.current.before = Some(Completion::of(op, event, false));
    }

    /// A free that was held up is found completed.
    pub(super) fn completed_late(&mut self, op: u32, event: &Event) {
        self.current.completions.push(Completion::of(op, event, self.current.released));
    }

    /// A segment or a part came or went, when so many bytes were reserved.
    pub(super) fn add_segment(&mut self, event: SegmentEvent, reserved: u64) {
        let window = &mut self.current;
        if window.segments.is_empty() {
            window.reserved = reserved;
        }
        window.released |= event.released;
        window.segments.push(event);
    }

    /// Ends the window. Says when frees completed that the allocator found since the client's last event. Where segments
    /// went back the reason depends on the settings, which snapshots name after the events, so that waits for the end.
    /// `waits_on` says whether frees go on waiting.
    pub(super) fn close(&mut self, end: End, waits_on: bool, timeline: &mut Timeline, deferred: &mut Vec<u32>) {
        if self.current.is_empty() && !(matches!(end, End::Refused { .. }) && self.current.before.is_some()) {
            self.current.before = None;
            return;
        }
        let mut window = Window { waits_on, ..std::mem::take(&mut self.current) };
        let waits = window.may_be_trim(end);
        let placeholder = timeline.next_op();
        if waits {
            // Where `empty_cache` stands, if that is what it was.
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
        // Its memory serves the next one.
        window.completions.clear();
        window.segments.clear();
        self.current = Window { completions: window.completions, segments: window.segments, ..Window::default() };
    }
}
