//! How the ranks of a run find each other: rank 0 listens, the others introduce themselves.

use super::frame::{self, Kind};
use super::group::{Failure, Group};
use super::{Meeting, Membership};
use crate::error::{Result, TrainError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Version of the messages; ranks of other versions are refused.
const PROTOCOL: u32 = 1;
/// Longest introduction, in bytes.
const MOST_HELLO: u64 = 1 << 20;
/// Who connects and says nothing for this long is not a rank.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// Pause before another attempt to connect or to accept.
const PAUSE: Duration = Duration::from_millis(10);

/// How a rank introduces itself.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    protocol: u32,
    code_version: String,
    /// Tells runs on one port from each other.
    run: String,
    rank: u32,
    size: u32,
    /// Settings that have to be equal on all ranks, by the names of their options.
    settings: Map<String, Value>,
}

impl Hello {
    fn new(membership: &Membership, settings: &Map<String, Value>) -> Self {
        Self {
            protocol: PROTOCOL,
            code_version: env!("CARGO_PKG_VERSION").into(),
            run: membership.run.clone(),
            rank: membership.rank,
            size: membership.size,
            settings: settings.clone(),
        }
    }

    /// Why the rank with this introduction cannot take part in the run of `self`.
    fn conflict(&self, other: &Self) -> Option<String> {
        if (self.protocol, &self.code_version) != (other.protocol, &other.code_version) {
            return Some(format!(
                "runs version {} of this program and rank 0 version {}; use one version",
                other.code_version, self.code_version
            ));
        }
        if self.size != other.size {
            return Some(format!(
                "was started as one of {} ranks and rank 0 as one of {}; set WORLD_SIZE alike",
                other.size, self.size
            ));
        }
        let show = |value: Option<&Value>| match value {
            None | Some(Value::Null) => "the default".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        };
        let names = self.settings.keys().chain(other.settings.keys());
        let differing = names.into_iter().find(|name| self.settings.get(*name) != other.settings.get(*name));
        differing.map(|name| {
            let (here, there) = (show(self.settings.get(name)), show(other.settings.get(name)));
            format!("has --{name} {there} and rank 0 {here}; give all ranks the same options")
        })
    }
}

/// Connects a rank to the others. Waits for all of them, at most for the time limit of the membership.
///
/// # Errors
/// [`TrainError::Input`] when the address cannot be used, when ranks are missing at the end of the time limit, and when they were
/// started with different settings.
pub(super) fn join(membership: &Membership, settings: &Map<String, Value>) -> Result<Group> {
    let hello = Hello::new(membership, settings);
    let connections = if membership.rank == 0 { host(membership, &hello)? } else { visit(membership, &hello)? };
    let broken = |error: io::Error| TrainError::Input(format!("cannot use the connections between ranks: {error}"));
    Group::new(membership.rank, connections, membership.patience).map_err(broken)
}

fn listener(membership: &Membership) -> Result<TcpListener> {
    match &membership.meeting {
        Meeting::Inherited(listener) => listener.try_clone().map_err(|error| {
            TrainError::Input(format!("cannot use the socket that the starting process opened: {error}"))
        }),
        Meeting::At { host, port } => {
            // Any address of this host, because the others may reach it by another one than its name says here.
            let bound = TcpListener::bind(("0.0.0.0", *port));
            bound.map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => TrainError::Input(format!(
                    "port {port} of MASTER_ADDR {host} is in use by another program; set MASTER_PORT to a free one"
                )),
                _ => TrainError::Input(format!("cannot listen on port {port} (MASTER_PORT): {error}")),
            })
        }
    }
}

/// Rank 0: a connection to each other rank, by rank.
fn host(membership: &Membership, own: &Hello) -> Result<Vec<Option<TcpStream>>> {
    let until = Instant::now() + membership.patience;
    let listener = listener(membership)?;
    let failed = |error: io::Error| TrainError::Input(format!("cannot accept connections of other ranks: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    let mut connections: Vec<Option<TcpStream>> = (0..membership.size).map(|_| None).collect();
    let mut missing = membership.size - 1;
    while missing > 0 {
        if Instant::now() >= until {
            let absent: Vec<String> = (1..)
                .zip(&connections[1..])
                .filter(|(_, there)| there.is_none())
                .map(|(rank, _)| rank.to_string())
                .collect();
            let plural = if absent.len() == 1 { "" } else { "s" };
            let message = format!(
                "rank{plural} {} did not connect within {} s; start every rank, or raise --rank-timeout",
                absent.join(", "),
                membership.patience.as_secs()
            );
            refuse(&connections, &message);
            return Err(TrainError::Input(message));
        }
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // A rank that ended before all had come.
                if let Some(rank) = closed(&connections) {
                    let message = format!("rank {rank} ended before all ranks had connected");
                    refuse(&connections, &message);
                    return Err(TrainError::Rank { rank, code: terminal::exit::FAILED, message });
                }
                thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        // Whoever is not a rank is none of this run's business.
        let Some(hello) = introduction(&mut stream) else { continue };
        if hello.run != own.run {
            let message = "another run uses this MASTER_PORT; set a free one".to_owned();
            let _ = turn_away(&mut stream, hello.rank, &message);
            continue;
        }
        let taken = || connections.get(hello.rank as usize).is_none_or(Option::is_some) || hello.rank == 0;
        let conflict = own
            .conflict(&hello)
            .or_else(|| taken().then(|| "was started twice; give each rank its own RANK".to_owned()));
        if let Some(why) = conflict {
            let _ = turn_away(&mut stream, hello.rank, &why);
            refuse(&connections, &format!("rank {} {why}", hello.rank));
            return Err(TrainError::Input(format!("rank {} {why}", hello.rank)));
        }
        connections[hello.rank as usize] = Some(stream);
        missing -= 1;
    }
    for connection in connections.iter_mut().flatten() {
        // A rank that has ended meanwhile is reported by the reader of its connection.
        let _ = frame::write(connection, Kind::Welcome, &[]);
    }
    Ok(connections)
}

/// The first rank whose connection was closed.
fn closed(connections: &[Option<TcpStream>]) -> Option<u32> {
    let is_closed = |stream: &TcpStream| {
        let mut byte = [0];
        stream.set_nonblocking(true).is_ok()
            && match stream.peek(&mut byte) {
                Ok(read) => read == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
    };
    let connection = (0..).zip(connections).find(|(_, stream)| stream.as_ref().is_some_and(is_closed));
    for stream in connections.iter().flatten() {
        let _ = stream.set_nonblocking(false);
    }
    connection.map(|(rank, _)| rank)
}

fn introduction(stream: &mut TcpStream) -> Option<Hello> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(HELLO_WITHIN)).ok()?;
    let (kind, payload) = frame::read(stream, MOST_HELLO).ok()?;
    (kind == Kind::Hello).then(|| serde_json::from_slice(&payload).ok())?
}

/// Tells a rank why it cannot take part.
fn turn_away(stream: &mut TcpStream, rank: u32, message: &str) -> io::Result<()> {
    let failure = Failure { rank, code: terminal::exit::BAD_INPUT, message: message.to_owned() };
    frame::write(stream, Kind::Failure, &serde_json::to_vec(&failure)?)
}

/// Tells the ranks that are connected why the run does not begin.
fn refuse(connections: &[Option<TcpStream>], message: &str) {
    for mut stream in connections.iter().flatten() {
        let failure = Failure { rank: 0, code: terminal::exit::BAD_INPUT, message: message.to_owned() };
        let _ = frame::write(&mut stream, Kind::Failure, &serde_json::to_vec(&failure).unwrap_or_default());
    }
}

/// Another rank: its connection to rank 0.
fn visit(membership: &Membership, own: &Hello) -> Result<Vec<Option<TcpStream>>> {
    let until = Instant::now() + membership.patience;
    let (host, port) = match &membership.meeting {
        Meeting::At { host, port } => (host.as_str(), *port),
        Meeting::Inherited(_) => unreachable!("the socket that listens belongs to rank 0"),
    };
    let mut stream = loop {
        match connect(host, port) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= until => {
                return Err(TrainError::Input(format!(
                    "cannot reach rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT) within {} s: {error}; start rank 0, or raise \
                     --rank-timeout",
                    membership.patience.as_secs()
                )));
            }
            Err(_) => thread::sleep(PAUSE),
        }
    };
    let broken = |error: io::Error| {
        TrainError::Input(format!(
            "rank 0 at {host}:{port} ended the connection before all ranks had connected: {error}"
        ))
    };
    frame::write(&mut stream, Kind::Hello, &serde_json::to_vec(own).unwrap_or_default()).map_err(broken)?;
    // Rank 0 gives up at its own time limit and says so; this one is for a program that is not rank 0.
    stream.set_read_timeout(Some(membership.patience + HELLO_WITHIN)).map_err(broken)?;
    match frame::read(&mut stream, MOST_HELLO).map_err(broken)? {
        (Kind::Welcome, _) => {}
        (Kind::Failure, payload) => {
            let failure: Option<Failure> = serde_json::from_slice(&payload).ok();
            let why = failure.map_or_else(
                || "without a reason".to_owned(),
                |failure| match failure.rank {
                    rank if rank == own.rank => format!("this rank {}", failure.message),
                    _ => failure.message,
                },
            );
            return Err(TrainError::Input(format!("rank 0 ended the run: {why}")));
        }
        (kind, _) => {
            return Err(TrainError::Input(format!(
                "{host}:{port} is not rank 0 of this run: it sent '{}'",
                kind.name()
            )));
        }
    }
    let mut connections: Vec<Option<TcpStream>> = (0..membership.size).map(|_| None).collect();
    connections[0] = Some(stream);
    Ok(connections)
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    const ATTEMPT: Duration = Duration::from_secs(2);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()?.collect::<Vec<SocketAddr>>() {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_was_started_otherwise_is_refused_with_the_difference() {
        let hello = || Hello {
            protocol: PROTOCOL,
            code_version: "1.0.0".into(),
            run: String::new(),
            rank: 0,
            size: 2,
            settings: Map::from_iter([("lr".to_owned(), Value::from(0.5)), ("dtype".to_owned(), Value::Null)]),
        };
        assert_eq!(hello().conflict(&hello()), None);
        let mut settings = hello().settings;
        settings["lr"] = Value::from(0.25);
        let cases = [
            (
                Hello { code_version: "1.1.0".into(), ..hello() },
                "runs version 1.1.0 of this program and rank 0 version 1.0.0",
            ),
            (Hello { protocol: PROTOCOL + 1, ..hello() }, "use one version"),
            (Hello { size: 3, ..hello() }, "one of 3 ranks and rank 0 as one of 2; set WORLD_SIZE alike"),
            (Hello { settings, ..hello() }, "has --lr 0.25 and rank 0 0.5"),
            (Hello { settings: Map::new(), ..hello() }, "has --lr the default and rank 0 0.5"),
        ];
        for (other, words) in cases {
            let conflict = hello().conflict(&other).unwrap();
            assert!(conflict.contains(words), "{conflict}");
        }
    }
}
