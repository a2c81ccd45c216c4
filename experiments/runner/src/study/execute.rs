//! One run: a process, and a directory that appears only when complete.

use super::commands;
use super::figures::{median, read_document};
#[cfg(unix)]
use super::forks::Forks;
use super::hung;
use super::neighbours::Neighbours;
use super::plan::{LIMIT, Run};
use super::printed;
use super::process::{Group, POLL, Pipes, Process, last_message, set_variables};
use super::programs::{self, CommandLine, Inputs, OUT_OF_MEMORY, Output, RECORD, RESULT, command_line};
use super::record::Planned;
use super::record::{
    Machine, RUN, RUNS, RunRecord, RunStatus, SCHEMA_VERSION, compress, part_of, provenance, read_json, remove,
    without_folders, write_compact, write_json,
};
use super::spec::{OptionValue, Program};
use super::work::START;
use crate::repository;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use terminal::Shard;
use terminal::signals::Signals;
use trainer::provenance::now;
use vramlab::device::CudaDeviceInfo;
use vramlab::input::{DOCUMENT, read_end, read_text};
use vramlab::{CudaDriver, DeviceName};

/// State shared by all runs of an experiment.
#[derive(Debug)]
pub(super) struct Experiment<'a> {
    pub(super) planned: &'a Planned,
    pub(super) device: &'a DeviceName,
    pub(super) inputs: &'a Inputs,
    pub(super) shard: Option<Shard>,
    /// Runs at the same time.
    pub(super) jobs: usize,
    /// No run starts that would end later, as far as finished runs show.
    pub(super) deadline: Option<Instant>,
    pub(super) walls: Walls,
    pub(super) signals: &'a Signals,
    /// `None`: not on a GPU, or unknown.
    pub(super) neighbours: Option<&'a Neighbours>,
    #[cfg(unix)]
    pub(super) forks: Forks,
}

/// The longest time of the finished runs of each cell in seconds, read when it is first asked for.
pub(super) type Walls = Mutex<Option<BTreeMap<usize, f64>>>;

/// Files of a process's output, and of the end of both if it has failed.
const STDOUT: &str = "stdout.txt";
const STDERR: &str = "stderr.txt";
const LOG: &str = "log.txt";
/// Bytes of each output that are kept of a failed command.
const MOST_LOG: u64 = 12 << 10;

/// A signal has asked the program to end.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted;

/// A finished process.
struct Ended {
    status: ExitStatus,
    wall: Duration,
    /// Its last line on stderr.
    message: Option<String>,
    /// The command of a process that it left running, of a `command`.
    left: Option<String>,
}

/// Notes the time of a finished run of a cell.
fn longest(walls: &mut BTreeMap<usize, f64>, cell: usize, wall_s: f64) {
    let most = walls.entry(cell).or_default();
    *most = most.max(wall_s);
}

impl Experiment<'_> {
    fn part(&self, run: &Run) -> PathBuf {
        part_of(&self.planned.folder.join(RUNS), &run.id)
    }

    /// Temporary name for the old directory of a repeated run.
    fn old(&self, run: &Run) -> PathBuf {
        self.planned.folder.join(RUNS).join(format!(".{}.old", run.id))
    }

    /// Starts the processes from which these runs are forked, on the thread that makes or waits for the runs.
    pub(super) fn prepare(&self, runs: &[&Run]) -> Result<()> {
        let line = |run: &&Run| command_line(run, self.device, self.inputs, None, None);
        let lines = runs.iter().filter(|run| run.fork).map(line).collect::<Result<Vec<CommandLine>>>()?;
        #[cfg(not(unix))]
        if !lines.is_empty() {
            anyhow::bail!("runs can be forked on Unix only; remove `fork` from the spec");
        }
        #[cfg(unix)]
        self.forks.prepare(&lines, self.signals.stop())?;
        Ok(())
    }

    /// Makes the run and leaves its directory; returns its status and its error. With `turns` the process takes them.
    pub(super) fn run(
        &self,
        run: &Run,
        start: Option<&str>,
        turns: Option<Sender<Pipes>>,
    ) -> Result<(RunStatus, Option<String>)> {
        let part = self.fresh(run)?;
        let limit = match self.limit(run)? {
            Ok(limit) => limit,
            Err(error) => {
                let record =
                    RunRecord { error: Some(error.clone()), ..self.record(run, RunStatus::Failed, Machine::now()) };
                self.publish(run, &part, &record)?;
                return Ok((RunStatus::Failed, Some(error)));
            }
        };
        let line = command_line(run, self.device, self.inputs, start, limit)?;
        let alone = self.neighbours.map(Neighbours::absent_at_start);
        let (machine, started_at) = (Machine { alone, ..Machine::now() }, now());
        let ended = self.process(&line, &part, turns)?;
        let is_result = match (run.program, ended.status.code()) {
            (Program::Inside, Some(OUT_OF_MEMORY)) => true,
            (Program::Command, Some(code)) => commands::find(&commands::name(run))?.codes.contains(&code),
            _ => ended.status.success(),
        };
        let mut error = (!is_result).then(|| {
            let how = format!("{} ended with {}", run.program.name(), ended.status);
            ended.message.map_or_else(|| format!("{how} and printed no error"), |message| self.plain(&message))
        });
        error =
            error.or_else(|| ended.left.map(|command| format!("it left a process behind: {}", self.plain(&command))));
        let mut files = Vec::new();
        if line.output == Output::Text {
            error = error.or(self.read_text(run, &part)?);
            files.extend(self.keep_log(&part, error.is_some())?);
        }
        files.extend(self.collect(&part, &line)?);
        let error = error.or_else(|| files.is_empty().then(|| "it left no result".to_owned()));
        let status = if error.is_some() { RunStatus::Failed } else { RunStatus::Done };
        let record = RunRecord {
            command: line.shown,
            started_at,
            wall_s: ended.wall.as_secs_f64(),
            exit_code: ended.status.code(),
            error: error.clone(),
            files,
            ..self.record(run, status, machine)
        };
        self.publish(run, &part, &record)?;
        Ok((status, error))
    }

    /// The memory limit of a run in bytes, if it has one, or the reason why it is unknown.
    fn limit(&self, run: &Run) -> Result<std::result::Result<Option<u64>, String>> {
        let (Some(OptionValue::Number(times)), Some(arm)) = (run.option(LIMIT), &self.planned.source.spec.limits_of)
        else {
            return Ok(Ok(None));
        };
        let same = |other: &&Run| other.arm == *arm && other.option("program") == run.option("program");
        let mut active = Vec::new();
        for other in self.planned.runs.iter().filter(same).filter(|other| other.option(LIMIT).is_none()) {
            if self.planned.status_of(other)? == Some(RunStatus::Done) {
                let result = read_document(&self.planned.run_folder(other), RESULT)?;
                active.extend(result["stats"]["active_bytes.all.peak"].as_f64());
            }
        }
        if active.is_empty() {
            return Ok(Err(format!("no finished run of arm '{arm}' reports the active memory that sets its limit")));
        }
        // CAST: a size of memory, exact in an f64.
        Ok(Ok(Some((times * median(&active)) as u64)))
    }

    /// Whether a run would end after the deadline: it is assumed to take as long as the longest finished run of its
    /// cell, or of the experiment.
    pub(super) fn is_late(&self, run: &Run) -> bool {
        let Some(deadline) = self.deadline else { return false };
        let mut walls = self.walls.lock().unwrap_or_else(PoisonError::into_inner);
        let walls = walls.get_or_insert_with(|| {
            let mut walls = BTreeMap::new();
            for run in &self.planned.runs {
                let wall =
                    read_json(&self.planned.run_folder(run).join(RUN)).ok().and_then(|run| run["wall_s"].as_f64());
                wall.into_iter().for_each(|wall| longest(&mut walls, run.cell, wall));
            }
            walls
        });
        let took = walls.get(&run.cell).copied().or_else(|| walls.values().copied().reduce(f64::max)).unwrap_or(0.0);
        deadline.saturating_duration_since(Instant::now()).as_secs_f64() <= took
    }

    /// Leaves the directory of a run that is not possible here.
    pub(super) fn skip(&self, run: &Run, reason: &str) -> Result<()> {
        let part = self.fresh(run)?;
        let reason = self.plain(reason);
        let record = RunRecord { error: Some(reason), ..self.record(run, RunStatus::Skipped, Machine::now()) };
        self.publish(run, &part, &record)
    }

    /// Makes the run and discards its record.
    pub(super) fn warm_up(&self, run: &Run, start: Option<&str>) -> Result<()> {
        let part = self.fresh(run)?;
        let line = command_line(run, self.device, self.inputs, start, None);
        let ended = line.and_then(|line| self.process(&line, &part, None));
        remove(&part)?;
        // A run that fails will fail again, and then its failure is recorded.
        ended.map(|_| ())
    }

    /// Writes the file with the trainer's weights and batches if it is missing; returns the error of a failure.
    pub(super) fn make_start(&self, name: &str, arguments: &[String]) -> Result<Option<String>> {
        if self.planned.folder.join(name).is_file() {
            return Ok(None);
        }
        // Several shards may make the same file: each in a separate directory; the file gets its name when it is
        // complete.
        let directory =
            self.shard.map_or_else(|| ".part".to_owned(), |shard| format!(".{}-of-{}.part", shard.number, shard.of));
        let part = self.planned.folder.join(START).join(directory);
        remove(&part)?;
        let fresh = part.join(name);
        let folder = fresh.parent().unwrap_or(&part);
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let line = CommandLine {
            program: repository::this_program()?.into(),
            arguments: arguments.iter().map(Into::into).collect(),
            shown: Vec::new(),
            folder: Some(part.clone()),
            variables: Vec::new(),
            server: None,
            output: Output::Record,
        };
        let ended = self.process(&line, &part, None)?;
        let complete = self.planned.folder.join(name);
        let moved = if ended.status.success() { std::fs::rename(&fresh, &complete) } else { Ok(()) };
        moved.with_context(|| format!("cannot make {}", complete.display()))?;
        remove(&part)?;
        Ok((!ended.status.success()).then(|| ended.message.unwrap_or_else(|| "the start file was not written".into())))
    }

    fn record<'a>(&'a self, run: &'a Run, status: RunStatus, machine: Machine) -> RunRecord<'a> {
        let machine = Machine { gpu: self.gpu(), ..machine };
        RunRecord {
            schema_version: SCHEMA_VERSION,
            experiment: &self.planned.source.spec.name,
            spec_sha256: &self.planned.sha256,
            run,
            device: programs::shown(self.device).to_string(),
            shard: self.shard.map(|shard| shard.to_string()),
            jobs: self.jobs,
            command: Vec::new(),
            started_at: now(),
            wall_s: 0.0,
            status,
            exit_code: None,
            error: None,
            machine,
            provenance: provenance(),
            files: Vec::new(),
        }
    }

    /// Name of the GPU of the runs, if they have one.
    fn gpu(&self) -> Option<String> {
        static GPUS: OnceLock<Vec<CudaDeviceInfo>> = OnceLock::new();
        let DeviceName::Cuda(number) = self.device else { return None };
        let all = GPUS.get_or_init(|| CudaDriver::probe().unwrap_or_default());
        all.iter().find(|gpu| gpu.ordinal == *number).map(|gpu| gpu.name.clone())
    }

    /// Removes the leftovers of a run that a killed runner began.
    pub(super) fn tidy(&self, run: &Run) -> Result<()> {
        remove(&self.old(run))?;
        remove(&self.part(run))
    }

    /// An empty directory to work in; removes one that a killed runner left.
    fn fresh(&self, run: &Run) -> Result<PathBuf> {
        let part = self.part(run);
        remove(&part)?;
        std::fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        Ok(part)
    }

    fn publish(&self, run: &Run, part: &Path, record: &RunRecord<'_>) -> Result<()> {
        write_json(&part.join(RUN), record)?;
        let (folder, old) = (self.planned.run_folder(run), self.old(run));
        // A failed or skipped run's directory is moved away as a unit: other shards read it.
        if folder.exists() {
            std::fs::rename(&folder, &old).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        std::fs::rename(part, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
        if let Some(walls) = self.walls.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            longest(walls, run.cell, record.wall_s);
        }
        remove(&old)
    }

    /// Starts a process and waits for it. A signal to this program ends the process: then its directory is removed,
    /// and the error is [`Interrupted`].
    fn process(&self, line: &CommandLine, part: &Path, turns: Option<Sender<Pipes>>) -> Result<Ended> {
        let err = part.join(STDERR);
        let (began, limit_s) = (Instant::now(), self.planned.source.spec.timeout_s);
        let mut process = self.start(line, part, &err, turns)?;
        let is_text = line.output == Output::Text;
        let (mut late, mut left) = (None, None);
        let status = loop {
            if late.is_none() && limit_s.is_some_and(|limit| began.elapsed().as_secs() >= u64::from(limit)) {
                late = Some(Instant::now());
                if is_text {
                    hung::report(process.group(), &err);
                }
            }
            let is_over = late.is_some_and(|since| !is_text || since.elapsed() >= hung::PATIENCE);
            if is_over || self.signals.stop().load(SeqCst) {
                process.kill();
            }
            if is_text && late.is_none() && left.is_none() && process.has_ended()? {
                left = Some(hung::left(process.group()));
            }
            match process.ended()? {
                Some(status) => break status,
                None => std::thread::sleep(POLL),
            }
        };
        if self.signals.stop().load(SeqCst) {
            remove(part)?;
            return Err(Interrupted.into());
        }
        let wall = began.elapsed();
        let reason =
            limit_s.filter(|_| late.is_some()).map(|limit| format!("it was ended after {limit} s, its timeout_s"));
        let printed = || is_text.then(|| last_message(&part.join(STDOUT))).flatten();
        // What a signal ended did not say why.
        let last = last_message(&err).or_else(printed).map(|last| match status.code() {
            Some(_) => last,
            None => format!("it ended with {status}; its last line: {last}"),
        });
        let message = reason.or_else(|| process.failure()).or(last);
        if !is_text {
            // If removing fails, the only effect is a leftover file.
            let _ = std::fs::remove_file(&err);
        }
        Ok(Ended { status, wall, message, left: left.flatten() })
    }

    /// Starts or forks a process. With `turns` its input and output are sent there.
    fn start(&self, line: &CommandLine, part: &Path, err: &Path, turns: Option<Sender<Pipes>>) -> Result<Process> {
        let folder = line.folder.as_deref().unwrap_or(part);
        #[cfg(unix)]
        if line.server.is_some() {
            let out = (line.output == Output::Text).then(|| part.join(STDOUT));
            return self.forks.start(line, folder, err, out.as_deref(), self.signals.stop()).map(Process::Forked);
        }
        let file = |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
        let mut command = Command::new(&line.program);
        command.args(&line.arguments).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(file(err)?);
        match line.output {
            Output::Printed => _ = command.stdout(file(&part.join(RESULT))?),
            Output::Text => _ = command.stdout(file(&part.join(STDOUT))?),
            Output::Written | Output::Record => {}
        }
        if turns.is_some() {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
        }
        set_variables(&mut command, &line.variables);
        if let Some(folder) = &self.inputs.data_dir {
            command.env("MNIST_DIR", folder);
        }
        let mut group = Group::start(&mut command)
            .with_context(|| format!("cannot start {}", Path::new(&line.program).display()))?;
        if let Some((turns, pipes)) = turns.zip(group.pipes()) {
            // The receiver waits for all senders.
            let _ = turns.send(pipes);
        }
        Ok(Process::Started(group))
    }

    /// Makes the result of a `command` from its text; returns the error of a text without one.
    fn read_text(&self, run: &Run, part: &Path) -> Result<Option<String>> {
        let path = part.join(STDOUT);
        let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let listed = commands::find(&commands::name(run))?;
        let mut result = match printed::read(listed, &String::from_utf8_lossy(&text)) {
            Ok(result) => result,
            Err(error) => return Ok(Some(error)),
        };
        let recorded = part.join(commands::RECORDED);
        if let Ok(entries) = std::fs::read_dir(&recorded) {
            // Apart from the summary of `vramlab run`.
            let is_record = |entry: &std::fs::DirEntry| entry.file_name() != "program.json" && entry.path().is_file();
            let count = entries.flatten().filter(is_record).count();
            result["recorded_files"] = count.into();
            if count == 0 && !listed.no_memory_calls && !result["skipped"].is_string() {
                return Ok(Some("vramlab run recorded nothing".to_owned()));
            }
        }
        write_compact(&part.join(RESULT), &result)?;
        Ok(None)
    }

    /// Keeps the end of a failed command's output as a file, whose name is returned; removes the other texts.
    fn keep_log(&self, part: &Path, has_failed: bool) -> Result<Option<String>> {
        let end = |name: &str| {
            let bytes = read_end(&part.join(name), MOST_LOG).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let text = self.plain(&format!("{}{}", end(STDOUT), end(STDERR)));
        // The rest of its directory is the program's, and may be large.
        for path in repository::entries(part)?.iter().filter(|path| !path.ends_with(RESULT)) {
            let removed = if path.is_dir() { remove(path) } else { Ok(std::fs::remove_file(path)?) };
            removed.with_context(|| format!("cannot remove {}", path.display()))?;
        }
        if !has_failed || text.trim().is_empty() {
            return Ok(None);
        }
        let path = part.join(LOG);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Some(LOG.to_owned()))
    }

    /// Moves the retained files of the record next to `run.json`; returns their names.
    fn collect(&self, part: &Path, line: &CommandLine) -> Result<Vec<String>> {
        let folders = self.folders(part);
        let mut files = Vec::new();
        let record = part.join(RECORD);
        let mut moves: Vec<(PathBuf, PathBuf)> =
            self.planned.source.spec.keep.iter().map(|name| (record.join(name), part.join(name))).collect();
        match line.output {
            Output::Printed => moves = vec![(part.join(RESULT), part.join(RESULT))],
            Output::Written | Output::Text => moves.push((part.join(RESULT), part.join(RESULT))),
            Output::Record => {}
        }
        for (from, to) in moves.iter().filter(|(from, _)| std::fs::metadata(from).is_ok_and(|file| file.len() > 0)) {
            std::fs::rename(from, to).with_context(|| format!("cannot move {}", from.display()))?;
            if to.ends_with("summary.json") || to.ends_with(RESULT) {
                let text = read_text(to, DOCUMENT).with_context(|| format!("cannot read {}", to.display()))?;
                if let Ok(mut value) = serde_json::from_str::<Value>(&text) {
                    without_folders(&mut value, &folders);
                    write_compact(to, &value)?;
                }
            }
            let name = compress(to)?.file_name().map(|name| name.to_string_lossy().into_owned());
            files.extend(name);
        }
        remove(&record)?;
        for left in [part.join(RESULT)].iter().filter(|left| !files.iter().any(|name| left.ends_with(name))) {
            // The file was never filled; it may be compressed or missing.
            let _ = std::fs::remove_file(left);
        }
        Ok(files)
    }

    /// Directories of this machine that a record should not name, the longest first.
    fn folders(&self, part: &Path) -> Vec<PathBuf> {
        let mut folders = vec![part.to_owned(), self.planned.folder.clone(), self.inputs.histories.clone()];
        folders.extend(self.inputs.data_dir.clone());
        folders.extend(self.inputs.pytorch.as_ref().map(|folder| folder.join("baselines")));
        if let DeviceName::Sim(Some(profile)) = self.device {
            folders.extend(profile.parent().map(Path::to_owned));
        }
        folders.extend(std::env::current_exe().ok().and_then(|file| Some(file.parent()?.to_owned())));
        folders.extend(std::env::current_dir());
        for variable in ["VRAMLAB_CACHE", "XDG_CACHE_HOME", "HOME"] {
            folders.extend(std::env::var_os(variable).map(PathBuf::from));
        }
        folders.sort_by_key(|folder| std::cmp::Reverse(folder.as_os_str().len()));
        folders
    }

    fn plain(&self, text: &str) -> String {
        let mut value = Value::String(text.to_owned());
        without_folders(&mut value, &self.folders(&self.planned.folder));
        value.as_str().unwrap_or_default().to_owned()
    }
}
