//! Which calls waited for the device, for how long, and behind which work.
//!
//! A call can only wait for work that was queued before it. The correlation id says which call queued a kernel, so the work that was
//! outstanding when a call began is known: of all work queued before on the stream, event or device that the call is about, let W
//! be the piece that ends last.
//!
//! - **Whether a kind of call waits** is observed. A call that began with W outstanding either returned before the end of W, and so
//!   did not wait for it, or after. A kind of which more than one in twenty returned before does not wait; a kind of which none did,
//!   in at least 20 cases, does. With fewer cases the documents decide ([`names`](crate::names)).
//! - **A candidate** is a call of a kind that waits, with work queued that no earlier call has waited for. W may be over when the call
//!   begins: the news may not have reached the host.
//! - **`waited_ns`** is the end of W minus the start of the call, or 0 if W was over. Both are timestamps. It is a lower bound of the
//!   time lost.
//! - **`idle_cost_ns`** is the median duration of calls of that name that are not candidates.
//! - **`blocked_ns`** is the host time lost: `waited_ns` and the part of the return, from the end of W to the end of the call, that
//!   exceeds the idle cost. A return of more than four idle costs contains work of the call's own, such as releasing pages; it counts
//!   with the median excess of the others.
//! - **A launch** waits when the queue of launches is full: at least 1,000 are outstanding and the call takes four times the median.
//!   W is then the last work to end inside the call.
//! - **A copy** that is not asynchronous, or touches host memory that is not pinned, waits for itself.
//!
//! Cost: O((calls + work) · log(work) · streams).

use crate::capture::{Capture, WorkKind};
use crate::names::Scope;
use crate::queue::{Queue, Records};
use std::collections::HashMap;

/// Outstanding launches from which the queue of a context counts as full. The driver holds 1,024 (CUDA C++ programming guide,
/// "Concurrent kernel execution"; not documented for every device).
const QUEUE: usize = 1000;
/// A return of so many idle costs contains work of the call's own.
const OWN_WORK: i64 = 4;
/// Cases from which a kind of call is judged by observation.
const ENOUGH: u64 = 20;
/// One in this many may contradict.
const CONTRARY: u64 = 20;

/// A call that waited.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Index in [`Capture::calls`].
    pub call: usize,
    /// Index in [`Capture::work`] of the work behind which it waited.
    pub work: usize,
    /// Until the end of the work.
    pub waited_ns: i64,
    /// Host time lost.
    pub blocked_ns: i64,
    /// From the end of the work, or the start of the call if that is later, to the end of the call.
    pub return_ns: i64,
}

/// The calls of one name in a capture.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Calls.
    pub calls: u64,
    /// Host time in them.
    pub total_ns: i64,
    /// Of them: began with work outstanding that they could wait for.
    pub outstanding: u64,
    /// Of those: returned while that work still ran.
    pub returned_before: u64,
    /// The documented wait.
    pub documented: Scope,
    /// The verdict.
    pub waits_for: Scope,
    /// Calls that had nothing to wait for.
    pub idle_calls: u64,
    /// Their median duration.
    pub idle_cost_ns: Option<i64>,
    /// Calls that waited.
    pub waited: u64,
    /// Their time until the end of the work.
    pub waited_ns: i64,
    /// Their host time lost.
    pub blocked_ns: i64,
}

impl Evidence {
    fn new(documented: Scope) -> Self {
        Self {
            calls: 0,
            total_ns: 0,
            outstanding: 0,
            returned_before: 0,
            documented,
            waits_for: Scope::Nothing,
            idle_calls: 0,
            idle_cost_ns: None,
            waited: 0,
            waited_ns: 0,
            blocked_ns: 0,
        }
    }

    /// Whether the verdict rests on this capture (`seen`), or on the documents because there were too few cases (`documented`).
    #[must_use]
    pub fn grounds(&self) -> &'static str {
        let own = self.waits_for == Scope::Own && self.documented != Scope::Own;
        let judged = !matches!(self.documented, Scope::Own | Scope::Room) && self.outstanding >= ENOUGH;
        if own || judged { "seen" } else { "documented" }
    }

    fn verdict(&self) -> Scope {
        if matches!(self.documented, Scope::Own | Scope::Room) || self.outstanding < ENOUGH {
            return self.documented;
        }
        if self.returned_before * CONTRARY > self.outstanding {
            return Scope::Nothing;
        }
        if self.documented == Scope::Nothing && self.returned_before == 0 { Scope::Device } else { self.documented }
    }
}

/// The waits of a capture.
#[derive(Clone, Debug)]
pub struct Attribution {
    /// The calls that waited, in order.
    pub waits: Vec<Wait>,
    /// For each of [`Capture::call_names`].
    pub evidence: Vec<Evidence>,
}

/// Attributes the waits in a capture.
#[must_use]
pub fn attribute(capture: &Capture) -> Attribution {
    let mut queue = Queue::new(capture);
    let records = Records::new(capture);
    let mut evidence: Vec<Evidence> = capture.call_names.iter().map(|name| Evidence::new(name.scope)).collect();
    for call in &capture.calls {
        evidence[call.name].calls += 1;
        evidence[call.name].total_ns += call.duration();
    }
    let own = own_copies(capture);
    // The lanes of each call that may wait, and the time before which work must have been queued.
    let mut reaches: Vec<Option<(Vec<usize>, i64)>> = Vec::with_capacity(capture.calls.len());
    for (index, call) in capture.calls.iter().enumerate() {
        let documented = evidence[call.name].documented;
        if own.contains_key(&index) || matches!(documented, Scope::Own | Scope::Room) {
            reaches.push(None);
            continue;
        }
        // Calls that are documented not to wait are held against the whole device.
        let (stream, until) = records.reach(call, documented);
        let lanes = queue.reach(call, stream);
        if let Some(last) = queue.latest(&lanes, until).filter(|&last| capture.work[last].end > call.start) {
            evidence[call.name].outstanding += 1;
            evidence[call.name].returned_before += u64::from(capture.work[last].end > call.end);
        }
        reaches.push(Some((lanes, until)));
    }
    for one in &mut evidence {
        one.waits_for = one.verdict();
    }
    let mut idle: Vec<Vec<i64>> = vec![Vec::new(); evidence.len()];
    let mut candidates: Vec<Vec<(usize, usize)>> = vec![Vec::new(); evidence.len()];
    let mut waits = Vec::new();
    for (index, (call, reach)) in capture.calls.iter().zip(&reaches).enumerate() {
        if let Some(&copy) = own.get(&index) {
            let end = capture.work[copy].end;
            evidence[call.name].waits_for = Scope::Own;
            let waited = end - call.start;
            waits.push(Wait {
                call: index,
                work: copy,
                waited_ns: waited,
                blocked_ns: waited,
                return_ns: call.end - end,
            });
        } else if let Some((lanes, until)) = reach.as_ref().filter(|_| evidence[call.name].waits_for != Scope::Nothing)
        {
            let unknown: Vec<usize> = lanes.iter().copied().filter(|&lane| queue.unknown(lane, *until)).collect();
            match queue.latest(&unknown, *until) {
                None => idle[call.name].push(call.duration()),
                Some(last) => candidates[call.name].push((index, last)),
            }
            queue.settle(lanes, *until);
        }
    }
    for (name, candidates) in candidates.iter().enumerate() {
        evidence[name].idle_calls = idle[name].len() as u64;
        evidence[name].idle_cost_ns = median(&mut idle[name]);
        waits.extend(priced(capture, candidates, evidence[name].idle_cost_ns));
    }
    waits.extend(full_queues(capture, &evidence, &queue));
    waits.sort_by_key(|wait| wait.call);
    for wait in &waits {
        let one = &mut evidence[capture.calls[wait.call].name];
        one.waited += 1;
        one.waited_ns += wait.waited_ns;
        one.blocked_ns += wait.blocked_ns;
    }
    Attribution { waits, evidence }
}

/// How long each of these candidates of one name waited.
fn priced(capture: &Capture, candidates: &[(usize, usize)], idle_cost: Option<i64>) -> Vec<Wait> {
    let wait = |&(index, last): &(usize, usize)| {
        let (call, over) = (&capture.calls[index], capture.work[last].end);
        // A call that returned before the end of the work was not held up by it.
        let held = over <= call.end;
        let waited = if held { (over - call.start).max(0) } else { 0 };
        let return_ns = if held { call.end - call.start.max(over) } else { 0 };
        Wait { call: index, work: last, waited_ns: waited, blocked_ns: waited, return_ns }
    };
    let mut waits: Vec<Wait> = candidates.iter().map(wait).collect();
    let Some(cost) = idle_cost else {
        waits.retain(|wait| wait.waited_ns > 0);
        return waits;
    };
    let short = |wait: &Wait| wait.return_ns <= OWN_WORK.saturating_mul(cost);
    let mut excess: Vec<i64> = waits
        .iter()
        .filter(|wait| wait.return_ns > 0 && short(wait))
        .map(|wait| (wait.return_ns - cost).max(0))
        .collect();
    let typical = median(&mut excess).unwrap_or(0);
    for wait in &mut waits {
        if wait.return_ns > 0 {
            wait.blocked_ns += if short(wait) { (wait.return_ns - cost).max(0) } else { typical };
        }
    }
    waits.retain(|wait| wait.blocked_ns > 0);
    waits
}

/// Copies that ended inside the call that queued them and held it: call to work.
fn own_copies(capture: &Capture) -> HashMap<usize, usize> {
    let mut own = HashMap::new();
    for (index, work) in capture.work.iter().enumerate() {
        let Some(call) = work.call.filter(|_| work.kind == WorkKind::Memcpy) else { continue };
        let of = &capture.calls[call];
        let held = work.pageable || capture.call_name(of).scope == Scope::Own;
        if held && of.start < work.end && work.end <= of.end {
            own.insert(call, index);
        }
    }
    own
}

/// Launches that waited for a place in the queue.
fn full_queues(capture: &Capture, evidence: &[Evidence], queue: &Queue<'_>) -> Vec<Wait> {
    let mut durations: Vec<Vec<i64>> = vec![Vec::new(); evidence.len()];
    for call in &capture.calls {
        if evidence[call.name].documented == Scope::Room {
            durations[call.name].push(call.duration());
        }
    }
    let usual: Vec<Option<i64>> = durations.iter_mut().map(|durations| median(durations)).collect();
    let mut waits = Vec::new();
    for (index, call) in capture.calls.iter().enumerate() {
        let slow = usual[call.name].is_some_and(|usual| call.duration() > OWN_WORK.saturating_mul(usual));
        if !slow {
            continue;
        }
        let lanes = queue.reach(&crate::Call { device: None, ..call.clone() }, None);
        if queue.outstanding(&lanes, call.start) < QUEUE {
            continue;
        }
        if let Some(work) = queue.last_within(&lanes, call) {
            let over = capture.work[work].end;
            let waited = over - call.start;
            waits.push(Wait { call: index, work, waited_ns: waited, blocked_ns: waited, return_ns: call.end - over });
        }
    }
    waits
}

/// The median, rounded half to even between the two in the middle; `None` without values.
pub(crate) fn median(values: &mut [i64]) -> Option<i64> {
    values.sort_unstable();
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => {
            let (low, high) = (values[middle - 1], values[middle]);
            let (half, odd) = ((low + high).div_euclid(2), (low + high).rem_euclid(2));
            Some(half + if odd == 1 { half.rem_euclid(2) } else { 0 })
        }
    }
}
