//! The ranks of a run as one of them sees the others: what they compute together on the host, and how they end together.
//!
//! Rank 0 has a connection to every other rank. What all compute together (losses, times of the simulated links, records) goes
//! through it, so every rank has the same result. A rank that fails tells rank 0, which tells the others. A connection that closes
//! without a farewell, or on which nothing arrives for the time limit, is a failure of the rank behind it. So no rank waits for one
//! that has ended.

use super::frame::{self, Kind};
use crate::error::{Result, TrainError};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use terminal::{exit, fail};

/// A rank that cannot end in order after a failure, because a call does not return, ends by force after this time.
const GRACE: Duration = Duration::from_secs(6);
/// Pause between two signs of life.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Why a rank ended early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) rank: u32,
    pub(super) code: u8,
    pub(super) message: String,
}

impl Failure {
    fn error(&self) -> TrainError {
        TrainError::Rank { rank: self.rank, code: self.code, message: self.message.clone() }
    }
}

/// Where a rank's steps are, for an end at the same step on all ranks.
#[derive(Debug, Default)]
struct Gate {
    /// Steps that the rank has begun.
    begun: u64,
    /// True while the rank may begin none, because rank 0 looks for the step at which all end.
    held: bool,
    /// The first step, from 0, that no rank begins.
    stop_before: Option<u64>,
    /// True once this rank has asked for the end.
    requested: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Data that arrived, by the rank of the sender.
    inbox: Vec<VecDeque<Vec<u8>>>,
    /// Ranks that said farewell.
    left: Vec<bool>,
    failure: Option<Failure>,
    gate: Gate,
    /// On rank 0: the steps before which the others wait, while it looks for the step at which all end.
    held: Option<Vec<Option<u64>>>,
    /// True when this rank says farewell.
    leaving: bool,
}

type Abort = Box<dyn Fn() + Send + Sync>;

/// State that the threads of one rank share.
struct Shared {
    rank: u32,
    state: Mutex<State>,
    changed: Condvar,
    /// By rank; `None` where there is no connection.
    writers: Vec<Option<Mutex<TcpStream>>>,
    /// Ends what a failed rank would keep waiting, such as kernels of a collective.
    abort: Mutex<Option<Abort>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("rank", &self.rank).field("ranks", &self.writers.len()).finish_non_exhaustive()
    }
}

/// One rank's connection to the others.
#[derive(Debug)]
pub struct Group {
    shared: Arc<Shared>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn peers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.writers).filter_map(|(rank, writer)| writer.as_ref().map(|_| rank))
    }

    fn send(&self, to: u32, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let Some(writer) = self.writers.get(to as usize).and_then(Option::as_ref) else { return Ok(()) };
        frame::write(&mut *lock(writer), kind, payload)
    }

    /// Sends to every rank with a connection; what cannot be sent is noticed by the reader of that connection.
    fn send_all(&self, kind: Kind, payload: &[u8]) {
        for peer in self.peers() {
            let _ = self.send(peer, kind, payload);
        }
    }

    /// Ends the run on every rank. The first failure counts.
    fn fail(&self, failure: Failure) {
        {
            let mut state = lock(&self.state);
            if state.failure.is_some() || state.leaving {
                return;
            }
            state.failure = Some(failure.clone());
        }
        self.changed.notify_all();
        let (own, code) = (failure.rank == self.rank, failure.code);
        let line = if own { failure.message.clone() } else { failure.error().to_string() };
        // A failure is plain data, so it has a JSON text.
        self.send_all(Kind::Failure, &serde_json::to_vec(&failure).unwrap_or_default());
        // The call that aborts may itself wait for ever, so the deadline does not depend on it.
        let _ = thread::Builder::new().name("deadline".to_owned()).spawn(move || {
            thread::sleep(GRACE);
            vramlab::output::discard_unfinished();
            fail(format_args!("{line}; a call of this rank did not return, so its record may lack the end"));
            super::end_now(code);
        });
        if let Some(abort) = &*lock(&self.abort) {
            abort();
        }
    }

    /// Messages from one connection.
    fn listen(&self, peer: u32, stream: TcpStream, silence: Duration) {
        let mut input = BufReader::with_capacity(1 << 16, stream);
        loop {
            let (kind, payload) = match frame::read(&mut input, u64::MAX) {
                Ok(message) => message,
                Err(error) => {
                    if lock(&self.state).left[peer as usize] {
                        return;
                    }
                    let message = match error.kind() {
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                            format!(
                                "nothing arrived for {} s; it is stopped, or its host cannot be reached",
                                silence.as_secs()
                            )
                        }
                        _ => "ended without a message; it was killed, or its connection broke".to_owned(),
                    };
                    return self.fail(Failure { rank: peer, code: exit::FAILED, message });
                }
            };
            match kind {
                Kind::Data => lock(&self.state).inbox[peer as usize].push_back(payload),
                Kind::Failure => {
                    if let Ok(failure) = serde_json::from_slice(&payload) {
                        self.fail(failure);
                    }
                }
                Kind::Bye => lock(&self.state).left[peer as usize] = true,
                Kind::StopRequest => self.stop(),
                Kind::Hold => {
                    let mut state = lock(&self.state);
                    state.gate.held = true;
                    let begun = state.gate.begun;
                    drop(state);
                    let _ = self.send(peer, Kind::Held, &begun.to_le_bytes());
                }
                Kind::Held => self.held(peer, number(&payload)),
                Kind::StopBefore => lock(&self.state).gate.stop_before = Some(number(&payload)),
                Kind::Hello | Kind::Welcome | Kind::Alive => {}
            }
            self.changed.notify_all();
        }
    }

    /// On rank 0: asks every rank where it is, so that all can end before the same step.
    fn stop(&self) {
        let mut state = lock(&self.state);
        if state.held.is_some() {
            return;
        }
        let mut held = vec![None; self.writers.len()];
        state.gate.held = true;
        held[self.rank as usize] = Some(state.gate.begun);
        state.held = Some(held);
        drop(state);
        self.send_all(Kind::Hold, &[]);
        // With one rank there is no answer to wait for.
        self.agree();
    }

    fn held(&self, peer: u32, begun: u64) {
        if let Some(held) = &mut lock(&self.state).held {
            held[peer as usize] = Some(begun);
        }
        self.agree();
    }

    /// Once all ranks wait: all end before the first step that none has begun.
    fn agree(&self) {
        let mut state = lock(&self.state);
        let known = state.held.as_ref().and_then(|held| held.iter().copied().collect::<Option<Vec<u64>>>());
        let Some(last) = known.and_then(|held| held.into_iter().max()).filter(|_| state.gate.stop_before.is_none())
        else {
            return;
        };
        state.gate.stop_before = Some(last);
        drop(state);
        self.send_all(Kind::StopBefore, &last.to_le_bytes());
        self.changed.notify_all();
    }

    /// Waits until a condition on the state gives a value, or a rank has failed.
    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.error());
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn receive(&self, from: u32) -> Result<Vec<u8>> {
        self.wait(|state| state.inbox[from as usize].pop_front())
    }
}

fn number(payload: &[u8]) -> u64 {
    payload.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Group {
    /// A rank that is connected: rank 0 to all others, the others to rank 0. `connections` are by rank. A rank from which nothing
    /// arrives for the time `silence` counts as failed.
    ///
    /// # Errors
    /// Errors of the connections.
    pub(super) fn new(rank: u32, connections: Vec<Option<TcpStream>>, silence: Duration) -> io::Result<Self> {
        let count = connections.len();
        let mut readers = Vec::new();
        let mut writers = Vec::with_capacity(count);
        for (peer, connection) in (0..).zip(connections) {
            if let Some(stream) = &connection {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(silence))?;
                stream.set_write_timeout(Some(silence))?;
                readers.push((peer, stream.try_clone()?));
            }
            writers.push(connection.map(Mutex::new));
        }
        let state = State { inbox: vec![VecDeque::new(); count], left: vec![false; count], ..State::default() };
        let shared = Arc::new(Shared {
            rank,
            state: Mutex::new(state),
            changed: Condvar::new(),
            writers,
            abort: Mutex::default(),
        });
        for (peer, stream) in readers {
            let shared = Arc::clone(&shared);
            let listener = thread::Builder::new().name(format!("rank {peer}"));
            listener.spawn(move || shared.listen(peer, stream, silence))?;
        }
        let alive = Arc::downgrade(&shared);
        thread::Builder::new().name("alive".to_owned()).spawn(move || {
            loop {
                thread::sleep(ALIVE_EVERY);
                let Some(shared) = alive.upgrade() else { return };
                if lock(&shared.state).leaving {
                    return;
                }
                shared.send_all(Kind::Alive, &[]);
            }
        })?;
        Ok(Self { shared })
    }

    /// This rank, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        // CAST: made from a u32.
        self.shared.writers.len() as u32
    }

    /// The failure of a rank, if there was one.
    ///
    /// # Errors
    /// That failure.
    pub(crate) fn check(&self) -> Result<()> {
        match &lock(&self.shared.state).failure {
            Some(failure) => Err(failure.error()),
            None => Ok(()),
        }
    }

    /// Calls this once when a rank fails, on a thread of this group.
    pub(crate) fn on_failure(&self, abort: impl Fn() + Send + Sync + 'static) {
        *lock(&self.shared.abort) = Some(Box::new(abort));
    }

    /// Ends the run on all ranks with the error of this one. Without effect if a rank has failed before.
    pub(crate) fn fail(&self, error: &TrainError) {
        let failure = Failure { rank: self.rank(), code: error.exit_code(), message: error.to_string() };
        self.shared.fail(failure);
    }

    /// Says farewell: from now on the others may end.
    pub(crate) fn leave(&self) {
        lock(&self.shared.state).leaving = true;
        self.shared.send_all(Kind::Bye, &[]);
    }

    /// Gives what `combine` makes, on rank 0, of what all ranks put in, in the order of the ranks. Every rank calls this at the same
    /// point of its run. Waits for all ranks.
    ///
    /// # Errors
    /// The failure of a rank; an error of `combine`, which ends the run on all ranks.
    pub(crate) fn exchange(
        &self,
        payload: Vec<u8>,
        combine: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let shared = &self.shared;
        if self.rank() != 0 {
            // A connection that cannot be written to is reported by its reader.
            let _ = shared.send(0, Kind::Data, &payload);
            return shared.receive(0);
        }
        let mut parts = vec![payload];
        for peer in 1..self.size() {
            parts.push(shared.receive(peer)?);
        }
        let combined = combine(parts).inspect_err(|error| self.fail(error))?;
        shared.send_all(Kind::Data, &combined);
        Ok(combined)
    }

    /// Waits until all ranks are here; gives what rank 0 puts in.
    ///
    /// # Errors
    /// The failure of a rank.
    pub(crate) fn broadcast(&self, payload: Vec<u8>) -> Result<Vec<u8>> {
        self.exchange(payload, |mut parts| Ok(parts.swap_remove(0)))
    }

    /// Announces that this rank begins `count` steps, the first of which is `step`, counted over the whole run from 0. `stop` is the
    /// flag of a signal that this rank received.
    ///
    /// # Errors
    /// [`TrainError::Interrupted`] on all ranks before the same step after a signal to any of them; the failure of a rank.
    pub(crate) fn begin_steps(&self, step: u64, count: u64, stop: bool) -> Result<()> {
        let shared = &self.shared;
        let requests = {
            let mut state = lock(&shared.state);
            let requests = stop && !state.gate.requested;
            state.gate.requested |= stop;
            requests
        };
        if requests && self.rank() == 0 {
            shared.stop();
        } else if requests {
            let _ = shared.send(0, Kind::StopRequest, &[]);
        }
        let may_begin = shared.wait(|state| match state.gate.stop_before {
            Some(first) => Some(step < first),
            None if state.gate.held => None,
            None => {
                // Under the same lock, so that rank 0 hears of this step or holds it.
                state.gate.begun = step + count;
                Some(true)
            }
        })?;
        if may_begin { Ok(()) } else { Err(TrainError::Interrupted) }
    }
}

impl Drop for Group {
    /// Ends the threads that read. What they wait for comes no more.
    fn drop(&mut self) {
        for writer in self.shared.writers.iter().flatten() {
            let _ = lock(writer).shutdown(std::net::Shutdown::Both);
        }
    }
}
