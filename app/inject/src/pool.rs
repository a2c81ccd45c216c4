//! Managed memory that the program freed, kept for its next request of the same size and flags (`--pool managed`).
//!
//! The driver serves such memory slowly, and an allocator of device memory cannot serve it. Whole allocations are kept, so that queries
//! and exports answer as for the driver's own. Memory is given out again when all work that was queued before its free has
//! completed, since the host may use it at once. Memory whose placement the program advised, or that it attached to a stream, goes back
//! to the driver. At most as many bytes are kept as the program held at once.

use crate::real::real;
use crate::serve::{self, Pending, SUCCESS};
use crate::settings::{self, Free};
use crate::streams;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The properties that memory and a request must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    context: u64,
    bytes: u64,
    flags: u32,
}

#[derive(Default)]
struct Kept {
    /// The program's live memory, by address.
    held: HashMap<u64, Key>,
    ready: HashMap<Key, Vec<u64>>,
    /// Freed, with work before it that may still run.
    pending: HashMap<u64, Pending<(Key, u64)>>,
    /// How many of them there are.
    waiting: HashMap<Key, usize>,
    held_bytes: u64,
    peak_bytes: u64,
    kept_bytes: u64,
}

static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether memory is kept.
pub(crate) fn is_on() -> bool {
    let settings = settings::get();
    settings.free != Free::Driver && settings.pool_managed
}

/// Kept memory for a request, or `None`: the driver serves, and [`made`] is to be called.
pub(crate) fn take(bytes: u64, flags: u32) -> Option<u64> {
    if !is_on() || bytes == 0 || streams::is_capturing() {
        return None;
    }
    let key = Key { context: serve::context(), bytes, flags };
    let mut kept = lock();
    let kept = kept.as_mut()?;
    kept.collect(key.context, false);
    let is_ready = kept.ready.get(&key).is_some_and(|ready| !ready.is_empty());
    if !is_ready && kept.waiting.get(&key).is_some_and(|count| *count > 0) {
        // The driver's free would have waited for the same work.
        kept.collect(key.context, true);
    }
    let addr = kept.ready.get_mut(&key)?.pop()?;
    kept.kept_bytes -= bytes;
    kept.hold(addr, key);
    Some(addr)
}

/// Notes memory that the driver made for the program.
pub(crate) fn made(bytes: u64, flags: u32, addr: u64) {
    let context = serve::context();
    if is_on() && context != 0 {
        streams::follow(context);
        lock().get_or_insert_default().hold(addr, Key { context, bytes, flags });
    }
}

/// Keeps memory that the program frees: its bytes, and what `before` returned, which is called before another request can have it. `None`:
/// it is not such memory, or there is enough, and the driver has to free it.
pub(crate) fn keep<T>(addr: u64, before: impl FnOnce() -> T) -> Option<(u64, T)> {
    if !is_on() {
        return None;
    }
    let key = {
        let mut kept = lock();
        let kept = kept.as_mut()?;
        let key = *kept.held.get(&addr)?;
        kept.held.remove(&addr);
        kept.held_bytes -= key.bytes;
        if kept.kept_bytes + key.bytes > kept.peak_bytes || key.context != serve::context() {
            return None;
        }
        kept.kept_bytes += key.bytes;
        key
    };
    let waits = settings::get().free == Free::Waits && !streams::is_capturing();
    if waits {
        // Other threads may go on meanwhile.
        real!(cuCtxSynchronize());
    }
    let mut kept = lock();
    let kept = kept.as_mut()?;
    let placed = before();
    if waits {
        kept.ready.entry(key).or_default().push(addr);
    } else {
        *kept.waiting.entry(key).or_default() += 1;
        kept.pending.entry(key.context).or_insert_with(Pending::everywhere).add((key, addr));
        kept.collect(key.context, false);
    }
    Some((key.bytes, placed))
}

/// Lets memory that an address lies in go back to the driver when it is freed: it has properties now that another request has not.
pub(crate) fn forget(addr: u64) {
    let mut kept = lock();
    let Some(kept) = kept.as_mut() else { return };
    let found = kept.held.iter().find(|(base, key)| addr.wrapping_sub(**base) < key.bytes).map(|(base, _)| *base);
    if let Some(key) = found.and_then(|base| kept.held.remove(&base)) {
        kept.held_bytes -= key.bytes;
    }
}

/// Forgets all memory of a context, which is gone with it.
pub(crate) fn context_gone(context: u64) {
    if let Some(kept) = lock().as_mut() {
        kept.held.retain(|_, key| key.context != context);
        kept.ready.retain(|key, _| key.context != context);
        kept.pending.remove(&context);
        kept.pending.values_mut().for_each(|pending| pending.forget(context));
        kept.waiting.retain(|key, _| key.context != context);
        kept.held_bytes = kept.held.values().map(|key| key.bytes).sum();
    }
}

/// Gives what is kept for the current context back to the driver; true if that was any. No work is captured.
pub(crate) fn trim() -> bool {
    let context = serve::context();
    let mut kept = lock();
    let Some(kept) = kept.as_mut() else { return false };
    kept.collect(context, true);
    let mut any = false;
    let keys: Vec<Key> = kept.ready.keys().copied().filter(|key| key.context == context).collect();
    for key in keys {
        for addr in kept.ready.remove(&key).unwrap_or_default() {
            kept.kept_bytes -= key.bytes;
            any |= real!(cuMemFree_v2(addr => u64)) == SUCCESS;
        }
    }
    any
}

impl Kept {
    fn hold(&mut self, addr: u64, key: Key) {
        self.held.insert(addr, key);
        self.held_bytes += key.bytes;
        self.peak_bytes = self.peak_bytes.max(self.held_bytes);
    }

    /// Makes memory ready whose earlier work has completed. The context is current.
    fn collect(&mut self, context: u64, all: bool) {
        let Some(pending) = self.pending.get_mut(&context).filter(|pending| all || pending.is_due()) else { return };
        for (key, addr) in pending.collect(context, all) {
            if let Some(count) = self.waiting.get_mut(&key) {
                *count = count.saturating_sub(1);
            }
            self.ready.entry(key).or_default().push(addr);
        }
    }
}
