//! Fetches MNIST into the cache, from the first mirror that answers.
//!
//! A file grows as `NAME.gz.part`, gets its checksums verified, and only then its name, so what has a name is whole. A
//! `.part` that an earlier run left is continued. Runs at the same time need no lock: each writes the bytes of one and
//! the same file at their own offsets, so they can only write what others wrote, and the result is verified.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use terminal::visible;
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::{Agent, Body};

use super::error::{shown, url_without_password, without_passwords};
use super::{Candidate, DataError, DataRequest, DatasetName, Hashed, Progress, Sources, StandardFile, hex, unpacked};

/// Timeout for a mirror's answer once any mirror has answered, so that the network is known to work.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// Maximum number of retries of a connection that broke after it sent data.
const ATTEMPTS: u32 = 4;
/// Incompressible data grows by a few bytes in every 64 KiB block when it is compressed.
const SLACK: u64 = 64 << 10;

/// Downloads the files that `cache` lacks.
pub(super) fn fetch(
    request: &DataRequest,
    cache: &Candidate,
    sources: &Sources,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    let directory = &cache.directory;
    fs::create_dir_all(directory).map_err(|source| DataError::Cache { path: shown(directory), source })?;
    // A request for MNIST by name has more patience than one for any data.
    let patience = match request.name {
        DatasetName::Auto => sources.connect_within,
        _ => 4 * sources.connect_within,
    };
    let mut session = Session { sources, contact_by: Some(Instant::now() + patience), preferred: 0 };
    let missing = |file: &&StandardFile| cache.missing.contains(&file.name);
    let mut files = sources.files.iter().filter(missing);
    files.try_for_each(|file| session.fetch(file, directory, progress))
}

/// Why a mirror did not give a file.
enum Failure {
    /// It is the mirror's or the network's fault: another may do better. `gained` bytes arrived before.
    Mirror { problem: String, gained: u64 },
    /// It is the cache's fault: no mirror will do better.
    Cache(io::Error),
}

impl Failure {
    fn mirror(problem: impl ToString) -> Self {
        Self::after(0, problem)
    }

    fn after(gained: u64, problem: impl ToString) -> Self {
        Self::Mirror { problem: visible(&without_passwords(&problem.to_string())).into_owned(), gained }
    }
}

/// State of the mirrors, shared while fetching several files.
struct Session<'a> {
    sources: &'a Sources,
    /// Until then some mirror must have answered; none once one has.
    contact_by: Option<Instant>,
    /// The mirror that answered last.
    preferred: usize,
}

impl Session<'_> {
    fn fetch(&mut self, file: &StandardFile, cache: &Path, progress: &dyn Progress) -> Result<(), DataError> {
        let mirrors = &self.sources.mirrors;
        let part = cache.join(format!("{}.gz.part", file.name));
        let mut problems = Vec::new();
        for tried in 0..mirrors.len() {
            let mirror = (self.preferred + tried) % mirrors.len();
            let url = format!("{}/{}.gz", mirrors[mirror].trim_end_matches('/'), file.name);
            // Whatever time is left is shared by the mirrors that are left.
            let patience = self.contact_by.map_or(ANSWER_WITHIN, |by| {
                by.saturating_duration_since(Instant::now()) / (mirrors.len() - tried) as u32
            });
            match self.fetch_from(&url, file, &part, patience, progress) {
                Ok(()) => {
                    self.preferred = mirror;
                    return Ok(());
                }
                Err(Failure::Mirror { problem, .. }) => problems.push((host(&url), problem)),
                Err(Failure::Cache(source)) => {
                    return Err(DataError::Cache { path: shown(&part), source });
                }
            }
        }
        Err(unavailable(file, &problems))
    }

    /// Fetches a file from one mirror, going on where a broken connection left off.
    fn fetch_from(
        &mut self,
        url: &str,
        file: &StandardFile,
        part: &Path,
        patience: Duration,
        progress: &dyn Progress,
    ) -> Result<(), Failure> {
        let mut patience = patience;
        let mut deadline = None;
        for attempt in 1.. {
            let mut target = open_part(part).map_err(Failure::Cache)?;
            let start = target.metadata().map_err(Failure::Cache)?.len();
            let outcome = self.transfer(url, file, (&mut target, start), patience, &mut deadline, progress);
            match outcome {
                Ok(()) => {}
                Err(Failure::Mirror { gained, .. }) if gained > 0 && attempt < ATTEMPTS => {
                    patience = ANSWER_WITHIN;
                    continue;
                }
                Err(failure) => {
                    // An empty `.part` tells the next run nothing.
                    if target.metadata().is_ok_and(|now| now.len() == 0) {
                        let _ = fs::remove_file(part);
                    }
                    return Err(failure);
                }
            }
            match verify(&mut target, file) {
                Ok(compressed) => {
                    return publish(&target, part, file, compressed).map_err(Failure::Cache);
                }
                Err(failure) => {
                    drop(target);
                    fs::remove_file(part).or_else(gone_is_fine).map_err(Failure::Cache)?;
                    // The data of an earlier run may be damaged: retry without it.
                    if start == 0 || attempt >= ATTEMPTS {
                        return Err(failure);
                    }
                }
            }
        }
        Err(Failure::mirror("every attempt failed"))
    }

    /// Asks for the bytes from `start` on and writes what comes to `target`. The first answer sets the deadline, which
    /// holds for all attempts.
    fn transfer(
        &mut self,
        url: &str,
        file: &StandardFile,
        (target, start): (&mut File, u64),
        patience: Duration,
        deadline: &mut Option<Instant>,
        progress: &dyn Progress,
    ) -> Result<(), Failure> {
        let response = answer(url, start, patience, self.sources.stalled_after)?;
        self.contact_by = None;
        let text = |name| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let mut at = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if text(header::CONTENT_RANGE).starts_with(&format!("bytes {start}-")) => start,
            // There is nothing after `start`: all of it came before, and verification follows.
            StatusCode::RANGE_NOT_SATISFIABLE if start > 0 => return Ok(()),
            status => return Err(Failure::mirror(format!("it answered {status}"))),
        };
        let limit = file.bytes + SLACK;
        let too_long = || Failure::mirror(format!("it sends more than the {limit} bytes that the file can have"));
        let total = response.body().content_length().map(|length| length.saturating_add(at));
        if total.is_some_and(|total| total > limit) {
            return Err(too_long());
        }

        let ahead = total.unwrap_or(limit).saturating_sub(at);
        // Each attempt may end in a stall.
        let allowed =
            self.sources.stalled_after * ATTEMPTS + Duration::from_secs(ahead / self.sources.least_bytes_per_s.max(1));
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + allowed);

        progress.download_begin(&format!("{}.gz", file.name), total);
        progress.download_advance(at);
        let mut gained = 0;
        let outcome = (|| {
            let mut body = response.into_body().into_reader();
            let mut buffer = vec![0; 64 << 10];
            target.seek(SeekFrom::Start(at)).map_err(Failure::Cache)?;
            loop {
                let read = match body.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => {
                        return Err(Failure::after(gained, format!("after {at} bytes: {error}")));
                    }
                };
                if at + read as u64 > limit {
                    return Err(too_long());
                }
                target.write_all(&buffer[..read]).map_err(Failure::Cache)?;
                at += read as u64;
                gained += read as u64;
                progress.download_advance(read as u64);
                if Instant::now() > deadline {
                    // Nothing gained, for it would be no faster the next time.
                    return Err(Failure::mirror(format!(
                        "it sent {gained} bytes in {:.1} s, which is too slow",
                        allowed.as_secs_f64()
                    )));
                }
            }
            if total.is_some_and(|total| at < total) {
                return Err(Failure::after(gained, format!("the connection ended after {at} bytes")));
            }
            // A longer `.part` of something else may have been there.
            target.set_len(at).map_err(Failure::Cache)
        })();
        progress.download_finish();
        outcome
    }
}

/// Opens or creates a `.part`. Refuses anything but a regular file: a link would lead to a file that nobody named.
fn open_part(part: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW);
    let is_other = || part.symlink_metadata().is_ok_and(|there| !there.is_file());
    match options.open(part) {
        Ok(target) if target.metadata()?.is_file() => Ok(target),
        Err(error) if !is_other() => Err(error),
        _ => Err(io::Error::new(io::ErrorKind::AlreadyExists, "it is no regular file; remove it")),
    }
}

/// Sends the request and waits for the response's head, `patience` in all.
fn answer(url: &str, start: u64, patience: Duration, stalled_after: Duration) -> Result<Response<Body>, Failure> {
    let uri: Uri = url.parse().map_err(|_| Failure::mirror("this is no URL"))?;
    let mut config = Agent::config_builder()
        .timeout_resolve(Some(patience))
        .timeout_connect(Some(patience))
        .timeout_recv_response(Some(patience))
        .timeout_per_read(Some(stalled_after))
        .http_status_as_error(false)
        // The file is to arrive as it is, compressed.
        .accept_encoding("identity");
    if matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]")) {
        // A proxy would look for it on its own machine.
        config = config.proxy(None);
    }
    let agent: Agent = config.build().into();
    let mut request = agent.get(uri);
    if start > 0 {
        request = request.header(header::RANGE, format!("bytes={start}-"));
    }
    // The limits above count one step after another, and redirects anew; this one holds for all of them.
    let (give, take) = mpsc::sync_channel(1);
    let spawned = thread::Builder::new().name("download".to_owned()).spawn(move || give.send(request.call()).ok());
    spawned.map_err(Failure::mirror)?;
    match take.recv_timeout(patience) {
        Ok(answer) => answer.map_err(|error| Failure::mirror(in_few_words(&error))),
        Err(RecvTimeoutError::Timeout) => {
            Err(Failure::mirror(format!("no answer within {:.1} s", patience.as_secs_f64())))
        }
        Err(RecvTimeoutError::Disconnected) => Err(Failure::mirror("the request failed")),
    }
}

/// Reason that a request failed. The usual reasons come from several layers, each with its own wording.
fn in_few_words(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => "name not found".to_owned(),
        ureq::Error::Timeout(_) => "no answer in time".to_owned(),
        ureq::Error::Io(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
            io::ErrorKind::ConnectionReset => "connection reset".to_owned(),
            io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => "network unreachable".to_owned(),
            io::ErrorKind::TimedOut => "no answer in time".to_owned(),
            // The standard library has no kind for it.
            _ if error.to_string().starts_with("failed to lookup address") => "name not found".to_owned(),
            _ => error.to_string(),
        },
        _ => error.to_string(),
    }
}

/// Error from the answers of all mirrors, with equal answers grouped.
fn unavailable(file: &StandardFile, problems: &[(String, String)]) -> DataError {
    let mut alike: Vec<(Vec<&str>, &str)> = Vec::new();
    for (host, problem) in problems {
        match alike.iter_mut().find(|(_, known)| known == problem) {
            Some((hosts, _)) => hosts.push(host),
            None => alike.push((vec![host], problem)),
        }
    }
    if alike.is_empty() {
        let none = "MNIST_MIRROR names no mirror".to_owned();
        return DataError::Download { file: file.name, problems: none.clone(), brief: none };
    }
    let failures: Vec<String> =
        alike.iter().map(|(hosts, problem)| format!("{}: {problem}", hosts.join(", "))).collect();
    let brief: Vec<&str> = alike.iter().map(|(_, problem)| *problem).collect();
    DataError::Download { file: file.name, problems: failures.join("; "), brief: brief.join("; ") }
}

/// The part of `url` that says who it was: enough for a message, which names the file itself.
fn host(url: &str) -> String {
    let url = url_without_password(url);
    let rest = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
    visible(rest.split_once('/').map_or(rest, |(host, _)| host)).into_owned()
}

/// Checks both sums of a downloaded file, and returns whether it is compressed.
fn verify(target: &mut File, file: &StandardFile) -> Result<bool, Failure> {
    let mut start = [0; 2];
    target.rewind().map_err(Failure::Cache)?;
    let compressed = target.read_exact(&mut start).is_ok() && start == [0x1f, 0x8b];
    if let Some(expected) = &file.gz_sha256 {
        target.rewind().map_err(Failure::Cache)?;
        let digest = hash(&mut *target, u64::MAX).map_err(Failure::Cache)?;
        if digest != *expected {
            return Err(Failure::mirror(format!(
                "the SHA-256 of what it sent is {digest} where {expected} was expected"
            )));
        }
    }
    target.rewind().map_err(Failure::Cache)?;
    let contents = unpacked(target.try_clone().map_err(Failure::Cache)?).map_err(Failure::Cache)?;
    // One byte more than there should be is enough to know better.
    let digest = hash(contents, file.bytes + 1).map_err(Failure::mirror)?;
    if digest != file.sha256 {
        return Err(Failure::mirror(format!(
            "the SHA-256 of what it sent is, unpacked, {digest} where {} was expected",
            file.sha256
        )));
    }
    Ok(compressed)
}

/// SHA-256 of at most the first `limit` bytes.
fn hash(contents: impl Read, limit: u64) -> io::Result<String> {
    let mut hashed = Hashed::new(io::sink());
    io::copy(&mut contents.take(limit), &mut hashed)?;
    Ok(hex(hashed.hash.finish().as_ref()))
}

/// Gives a verified file its name.
fn publish(target: &File, part: &Path, file: &StandardFile, compressed: bool) -> io::Result<()> {
    // Without this a power cut could leave the name without the bytes.
    target.sync_all()?;
    let name = if compressed { format!("{}.gz", file.name) } else { file.name.to_owned() };
    let path: PathBuf = part.with_file_name(name);
    match fs::rename(part, &path) {
        // Another run was there first.
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_file() => Ok(()),
        outcome => outcome,
    }
}

fn gone_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
