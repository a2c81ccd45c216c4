//! Questions about a snapshot, answered by a process of their own: what goes wrong there, a fault, the end of memory or a
//! file that takes for ever, is no harm to a run that is over and has its exit code.

use crate::advise::{self, First, Replayed};
use anyhow::Result;
use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::Duration;
use terminal::arguments;
use vramlab::Selection;
use vramlab::input::DOCUMENT;

/// The hidden command of this program that answers.
const COMMAND: &str = "answer";
/// Time for an answer. Large snapshots take a minute.
const PATIENCE: Duration = Duration::from_secs(600);
/// Words of this process's command line behind which it is `vramlab`: programs of other crates contain it.
static LEAD: OnceLock<Vec<OsString>> = OnceLock::new();

#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    snapshot: PathBuf,
    /// Bytes that the program might reserve
    #[arg(long)]
    limit: Option<u64>,
    /// What it comes to under its own settings, or an allocator, in place of advice
    #[arg(long)]
    replay: bool,
    #[arg(long, requires = "replay", value_parser = arguments::allocator())]
    alloc: Option<Selection>,
}

/// Is told how `vramlab` was started in this process: with `arguments`, the last words of the command line.
pub(crate) fn set_command_line(arguments: &[OsString]) {
    let all: Vec<OsString> = std::env::args_os().collect();
    let lead = all.len().saturating_sub(arguments.len());
    let _ = LEAD.set(all.into_iter().skip(1).take(lead).collect());
}

/// Answers, as JSON on standard output.
///
/// # Errors
/// The answer cannot be written.
pub(crate) fn answer(args: &AnswerArgs) -> Result<()> {
    // Where memory runs out, the system is to end this process and not the one that waits for it.
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let AnswerArgs { snapshot, limit, replay, alloc } = args;
    let found = match replay {
        false => advise::first(snapshot, *limit).and_then(|first| Ok(serde_json::to_value(first)?)),
        true => advise::replayed(snapshot, *limit, alloc.as_ref()).and_then(|found| Ok(serde_json::to_value(found)?)),
    };
    terminal::print_json(&match found {
        Ok(found) => json!({"answer": found}),
        Err(error) => json!({"error": format!("{error:#}")}),
    })
}

/// Advice for a snapshot.
///
/// # Errors
/// Why nothing is, in a few words.
pub(crate) fn advice_for(snapshot: &Path, limit: Option<u64>) -> Result<First, String> {
    ask(snapshot, limit, &[])
}

/// Memory and driver calls of a replay of a program's recording, under its own settings or an allocator; `None` if it runs out of it.
///
/// # Errors
/// Why that is not known, in a few words.
pub(crate) fn replay(
    snapshot: &Path,
    limit: Option<u64>,
    alloc: Option<&Selection>,
) -> Result<Option<Replayed>, String> {
    let alloc = alloc.map(|alloc| format!("--alloc={alloc}"));
    let words: Vec<&str> = ["--replay"].into_iter().chain(alloc.as_deref()).collect();
    ask(snapshot, limit, &words)
}

fn ask<T: DeserializeOwned>(snapshot: &Path, limit: Option<u64>, words: &[&str]) -> Result<T, String> {
    let mut command = command();
    command.args(words);
    if let Some(limit) = limit {
        command.arg(format!("--limit={limit}"));
    }
    command.arg("--").arg(snapshot);
    let (status, text) = output(&mut command).map_err(|error| format!("the question cannot be asked: {error}"))?;
    let value: Option<Value> =
        serde_json::from_str(&text).ok().filter(|_| status.is_some_and(|status| status.success()));
    let found = value.and_then(|mut value| match value["error"].as_str() {
        Some(error) => Some(Err(error.to_owned())),
        None => Some(Ok(serde_json::from_value(value["answer"].take()).ok()?)),
    });
    found.unwrap_or_else(|| {
        let how =
            status.map_or_else(|| format!("took more than {} s", PATIENCE.as_secs()), |status| status.to_string());
        Err(format!("looking at the snapshot failed ({how})"))
    })
}

/// This program.
fn command() -> Command {
    // Also where its file was replaced meanwhile.
    #[cfg(target_os = "linux")]
    let exe = PathBuf::from("/proc/self/exe");
    #[cfg(not(target_os = "linux"))]
    let exe = std::env::current_exe().unwrap_or_default();
    let mut command = Command::new(exe);
    command.args(LEAD.get().into_iter().flatten()).arg(COMMAND);
    command
}

/// How a command ended, `None` where that took too long, and what it printed.
fn output(command: &mut Command) -> std::io::Result<(Option<ExitStatus>, String)> {
    #[cfg(target_os = "linux")]
    terminal::around::end_with_parent(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let (done, printed) = channel();
    let (hand_over, pipe) = channel::<std::process::ChildStdout>();
    // Before anything is started that nobody could listen to.
    std::thread::Builder::new().name("answer".to_owned()).spawn(move || {
        let mut text = String::new();
        let read = pipe.recv().map(|pipe| pipe.take(DOCUMENT).read_to_string(&mut text));
        let _ = done.send(read.is_ok_and(|read| read.is_ok()).then_some(text));
    })?;
    let mut child = command.spawn()?;
    if let Some(pipe) = child.stdout.take() {
        let _ = hand_over.send(pipe);
    }
    // It ends when it has printed, or is ended.
    let printed = printed.recv_timeout(PATIENCE);
    if printed.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    Ok((printed.is_ok().then_some(status), printed.ok().flatten().unwrap_or_default()))
}
