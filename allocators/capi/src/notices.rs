//! Callbacks of the program: the current ones, the events to deliver, and the order of the threads that deliver.
//!
//! Events are queued in the order of the driver's calls, each under the thread whose call caused it, and each thread delivers its
//! own at the end of its call, when no lock of this library is held. A thread whose events are not at the front waits for its turn,
//! and so does a thread that was served from a segment that the program does not know yet.
//!
//! *No deadlock.* Three rules keep a thread from waiting forever. A call that is made inside a callback never waits: it also
//! delivers the events before its own. A thread that waited for [`PATIENCE`] while no callback returned leaves its events to the
//! thread at the front: that one may need a lock that the waiting thread's caller holds. And an event whose thread left it is
//! delivered by the next thread that has a turn. The order is kept in every case.
//!
//! *Unwinding.* No frame of this library between the program and its callback has anything to drop, so that a callback may be left
//! by `longjmp` or by a C++ exception. The thread's next delivery finds that the frame of the callback does not exist any more.
//!
//! *Cost.* Two loads in a call without events.

use crate::driver::SegmentEvent;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a thread waits while the same callback runs on another thread.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of the stack between a callback and the call that makes it. The next call after a callback that was left may take as many more
/// and is still known not to be inside of it: `vramlab_close` takes more than other calls.
const ROOM: usize = 16 << 10;

/// The thread of an event that its own thread left to others.
const NO_THREAD: u64 = 0;

thread_local! {
    /// The lowest address of the frame that runs this thread's innermost callback; 0 outside of callbacks.
    static CALLBACK_FRAME: Cell<usize> = const { Cell::new(0) };
    /// The number of this thread, 0 before its first use.
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The number of this thread, unique in the process.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(NO_THREAD + 1);
    if THREAD.get() == NO_THREAD {
        // Relaxed: only uniqueness matters.
        THREAD.set(NEXT.fetch_add(1, Relaxed));
    }
    THREAD.get()
}

/// Whether this thread is inside a callback, given the address of a frame of the current call. Stacks grow downwards, so a callback
/// whose frame is not above was left by `longjmp` or an exception.
fn is_inside_callback(frame: usize) -> bool {
    let inside = frame < CALLBACK_FRAME.get();
    if !inside {
        CALLBACK_FRAME.set(0);
    }
    inside
}

/// A callback of the program, with its context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callback<T> {
    pub(crate) context: usize,
    pub(crate) function: unsafe extern "C-unwind" fn(*mut c_void, T),
}

/// An event for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notice {
    Segment(SegmentEvent),
    /// The block at this address, which other streams used, is reusable.
    Freed(u64),
}

impl Notice {
    /// Whether it concerns memory of a block that the program must know before it gets the block.
    fn concerns(&self, block: &Range<u64>) -> bool {
        match self {
            Self::Segment(event) => {
                event.action.adds_memory() && event.address < block.end && block.start < event.address + event.bytes
            }
            Self::Freed(address) => block.contains(address),
        }
    }
}

#[derive(Debug)]
struct Entry {
    number: u64,
    /// The thread that delivers it.
    thread: u64,
    /// False while the driver's call has not returned, which may still fail.
    ready: bool,
    notice: Notice,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Entry>,
    /// Entries so far.
    entries: u64,
    /// The thread that runs a callback, and its allocator.
    running: Option<(u64, Notice)>,
    /// Number of callbacks that have returned.
    returned: u64,
    on_segment: Option<Callback<*const SegmentEvent>>,
    on_free: Option<Callback<u64>>,
}

/// A callback to make.
#[derive(Clone, Copy, Debug)]
enum Call {
    Segment(Callback<*const SegmentEvent>, SegmentEvent),
    Freed(Callback<u64>, u64),
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Notices {
    /// Whether the program has a callback for segments.
    segments: AtomicBool,
    /// Whether it has one for reusable blocks.
    frees: AtomicBool,
    /// Entries in the queue, with the one whose callback runs.
    waiting: AtomicUsize,
    state: Mutex<State>,
    /// A callback has returned, or the front of the queue has changed.
    turn: Condvar,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies others of a changed queue.
    fn changed(&self, state: MutexGuard<'_, State>) {
        self.waiting.store(state.waiting(), Release);
        drop(state);
        self.turn.notify_all();
    }

    pub(crate) fn set_on_segment(&self, callback: Option<Callback<*const SegmentEvent>>) {
        let mut state = self.lock();
        self.segments.store(callback.is_some(), Release);
        state.on_segment = callback;
        if callback.is_none() {
            state.queue.retain(|entry| !matches!(entry.notice, Notice::Segment(_)));
        }
        self.changed(state);
    }

    pub(crate) fn set_on_free(&self, callback: Option<Callback<u64>>) {
        let mut state = self.lock();
        self.frees.store(callback.is_some(), Release);
        state.on_free = callback;
        if callback.is_none() {
            state.queue.retain(|entry| !matches!(entry.notice, Notice::Freed(_)));
        }
        self.changed(state);
    }

    pub(crate) fn wants_segments(&self) -> bool {
        self.segments.load(Acquire)
    }

    pub(crate) fn wants_frees(&self) -> bool {
        self.frees.load(Acquire)
    }

    /// Queues an event of this thread. One that is not `ready` is followed by [`settle`](Self::settle) with the number returned.
    pub(crate) fn queue(&self, event: SegmentEvent, ready: bool) -> Option<u64> {
        if !self.wants_segments() {
            return None;
        }
        let mut state = self.lock();
        state.entries += 1;
        let (number, thread) = (state.entries, this_thread());
        state.queue.push_back(Entry { number, thread, ready, notice: Notice::Segment(event) });
        self.waiting.store(state.waiting(), Release);
        Some(number)
    }

    /// The driver's call of an entry has returned.
    pub(crate) fn settle(&self, number: u64, succeeded: bool) {
        let mut state = self.lock();
        match succeeded {
            true => state.queue.iter_mut().filter(|entry| entry.number == number).for_each(|entry| entry.ready = true),
            false => state.queue.retain(|entry| entry.number != number),
        }
        self.changed(state);
    }

    /// Queues reusable blocks before all undelivered events: a block of memory that the program does not know cannot have been
    /// freed, and a segment is released after its blocks.
    pub(crate) fn queue_freed(&self, addresses: &[u64]) {
        if addresses.is_empty() || !self.wants_frees() {
            return;
        }
        let mut state = self.lock();
        let thread = this_thread();
        for address in addresses.iter().rev() {
            state.entries += 1;
            let number = state.entries;
            state.queue.push_front(Entry { number, thread, ready: true, notice: Notice::Freed(*address) });
        }
        self.waiting.store(state.waiting(), Release);
    }

    /// Whether this thread is inside a callback of this allocator.
    #[inline(never)]
    pub(crate) fn is_running_here(&self) -> bool {
        let frame = 0u8;
        is_inside_callback((&raw const frame).addr()) && self.lock().is_running_on(this_thread())
    }

    /// Delivers this thread's events, and waits for those of others that concern a block's memory.
    #[inline]
    pub(crate) fn deliver(&self, block: Option<Range<u64>>) {
        if self.waiting.load(Acquire) != 0 {
            self.deliver_queued(block);
        }
    }

    #[cold]
    #[inline(never)]
    fn deliver_queued(&self, block: Option<Range<u64>>) {
        let frame = 0u8;
        let (thread, nested) = (this_thread(), is_inside_callback((&raw const frame).addr()));
        let outer = CALLBACK_FRAME.get();
        while let Some((call, running)) = self.next(thread, nested, block.as_ref()) {
            call.make();
            CALLBACK_FRAME.set(outer);
            self.end_turn(running);
        }
    }

    fn end_turn(&self, running: Option<(u64, Notice)>) {
        let mut state = self.lock();
        state.running = running;
        state.returned += 1;
        self.changed(state);
    }

    /// The next callback that this thread makes, once it has the turn, and the thread that had it before; `None` when it has none,
    /// or leaves them to others.
    fn next(&self, thread: u64, nested: bool, block: Option<&Range<u64>>) -> Option<(Call, Option<(u64, Notice)>)> {
        let mut state = self.lock();
        if !nested && state.is_running_on(thread) {
            // Its callback was left by `longjmp` or an exception.
            state.running = None;
            state.returned += 1;
            self.waiting.store(state.waiting(), Release);
            self.turn.notify_all();
        }
        loop {
            match state.step(thread, nested, block) {
                Step::Nothing => return None,
                Step::Call => {
                    let (call, before) = (state.take_front(), state.running);
                    if let Some(call) = call {
                        state.running = Some((thread, call.notice()));
                    }
                    self.waiting.store(state.waiting(), Release);
                    if let Some(call) = call {
                        return Some((call, before));
                    }
                }
                Step::Wait => {
                    let returned = state.returned;
                    let stays = |state: &mut State| {
                        state.returned == returned && matches!(state.step(thread, nested, block), Step::Wait)
                    };
                    // A call inside a callback does not wait.
                    let patience = if nested { Duration::ZERO } else { PATIENCE };
                    let waited = self.turn.wait_timeout_while(state, patience, stays);
                    let (after, wait) = waited.unwrap_or_else(PoisonError::into_inner);
                    state = after;
                    if wait.timed_out() {
                        let entries = state.queue.iter_mut().filter(|entry| entry.thread == thread);
                        entries.for_each(|entry| entry.thread = NO_THREAD);
                        self.changed(state);
                        return None;
                    }
                }
            }
        }
    }
}

/// The next step of a thread that delivers.
enum Step {
    /// It has nothing to deliver.
    Nothing,
    /// It takes the front of the queue.
    Call,
    /// It waits for its turn.
    Wait,
}

impl Call {
    /// Calls the program. Never inlined, so that the frame of a callback is that of this function.
    #[inline(never)]
    fn make(self) {
        let mut room = MaybeUninit::<[u8; ROOM]>::uninit();
        CALLBACK_FRAME.set(black_box(room.as_mut_ptr()).addr());
        match self {
            Self::Segment(Callback { context, function }, event) => {
                // SAFETY: the program promises a function that may be called with its context from any thread, see
                // `vramlab_on_segment`; the event lives until the function returns.
                unsafe { function(context as *mut c_void, &raw const event) };
            }
            Self::Freed(Callback { context, function }, address) => {
                // SAFETY: as above, see `vramlab_on_free`.
                unsafe { function(context as *mut c_void, address) };
            }
        }
        black_box(room.as_mut_ptr());
    }

    fn notice(self) -> Notice {
        match self {
            Self::Segment(_, event) => Notice::Segment(event),
            Self::Freed(_, address) => Notice::Freed(address),
        }
    }
}

impl State {
    fn waiting(&self) -> usize {
        self.queue.len() + usize::from(self.running.is_some())
    }

    fn is_running_on(&self, thread: u64) -> bool {
        self.running.is_some_and(|(running, _)| running == thread)
    }

    fn step(&self, thread: u64, nested: bool, block: Option<&Range<u64>>) -> Step {
        let has_turn = self.running.is_none() || self.is_running_on(thread);
        let front = self.queue.front().filter(|front| has_turn && front.ready);
        let is_left = front.is_some_and(|front| front.thread == NO_THREAD);
        let concerns = |notice: &Notice| block.is_some_and(|block| notice.concerns(block));
        let is_delivered_now = self.running.is_some_and(|(running, notice)| running != thread && concerns(&notice));
        let is_due = |entry: &Entry| entry.thread == thread || concerns(&entry.notice);
        if !is_left && !is_delivered_now && !self.queue.iter().any(is_due) {
            return Step::Nothing;
        }
        match front {
            Some(front) if nested || is_left || front.thread == thread => Step::Call,
            _ => Step::Wait,
        }
    }

    /// Takes the front of the queue; `None` where it has no callback.
    ///
    /// Memory is mapped and unmapped page by page; the event covers all of it.
    fn take_front(&mut self) -> Option<Call> {
        let Entry { thread, notice, .. } = self.queue.pop_front()?;
        let mut event = match notice {
            Notice::Freed(address) => return self.on_free.map(|callback| Call::Freed(callback, address)),
            Notice::Segment(event) => event,
        };
        while let Some(next) = self.queue.front().filter(|next| next.ready && next.thread == thread) {
            let Notice::Segment(next) = next.notice else { break };
            let Some(joined) = event.joined_with(&next) else { break };
            event = joined;
            self.queue.pop_front();
        }
        self.on_segment.map(|callback| Call::Segment(callback, event))
    }
}
