//! `vramlab oom`: what an error text about memory says, from its numbers alone.

mod advice;
mod engines;
mod host;
mod lines;
mod text;
mod verdict;
mod xla;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use std::io::{IsTerminal, Read};
use std::path::Path;
use terminal::Page;
use text::{Facts, Reporter};
use verdict::{Finding, findings};

/// More than any log that a person would copy; the message is at its end.
const MOST_BYTES: u64 = 64 << 20;
/// Longer files are not looked into for a hint.
const HINT_BYTES: u64 = 4 << 20;

#[derive(Debug, Args)]
pub(crate) struct OomArgs {
    /// Error text in quotes, or a file that contains it; without one, or with `-`, standard input
    #[arg(value_name = "FILE|TEXT")]
    text: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The answer; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct Answer {
    schema_version: u32,
    source: Reporter,
    #[serde(flatten)]
    facts: Facts,
    /// The cause first, then those who hold memory.
    findings: Vec<Finding>,
    /// Sentences: what happened, why, what to change.
    lines: Vec<String>,
    /// A setting that may help, as `NAME=VALUE`.
    setting: Option<String>,
    /// The command to type next.
    next: String,
}

/// Reads the text and prints the answer.
pub(crate) fn oom(args: &OomArgs) -> Result<()> {
    let text = input(args.text.as_deref())?;
    let Some((source, facts)) = text::read(&text) else {
        bail!(
            "the text has no message about memory that is known; copy the whole error, from \"out of memory\" to the end of the \
             paragraph"
        )
    };
    let findings = findings(source, &facts);
    let advice = advice::Advice::new(source, &facts, &findings);
    if args.json {
        return terminal::print_json(&Answer {
            schema_version: 1,
            source,
            facts,
            findings,
            lines: advice.lines,
            setting: advice.setting,
            next: advice.next,
        });
    }
    let mut page = Page::stdout();
    advice.lines.iter().for_each(|line| page.line(line));
    page.next(&advice.next);
    page.print()
}

/// The text of an argument: itself where it has words, else of a file.
fn input(argument: Option<&str>) -> Result<String> {
    let mut bytes = Vec::new();
    match argument {
        None | Some("-") => {
            let stdin = std::io::stdin();
            if argument.is_none() && stdin.is_terminal() {
                bail!("give an error text in quotes, a file, or a pipe: python train.py 2>&1 | vramlab oom");
            }
            stdin.lock().take(MOST_BYTES).read_to_end(&mut bytes).context("cannot read standard input")?;
        }
        Some("") => bail!("the argument is empty; give an error text in quotes, or a file"),
        Some(argument) if !Path::new(argument).exists() && argument.contains(char::is_whitespace) => {
            bytes.extend_from_slice(argument.as_bytes());
        }
        Some(path) => {
            let file = vramlab::input::open_stream(Path::new(path)).with_context(|| path.to_owned())?;
            file.take(MOST_BYTES).read_to_end(&mut bytes).with_context(|| path.to_owned())?;
        }
    }
    Ok(lines::decoded(&bytes))
}

/// Whether a file that is no recording contains an error text, so that a command can lead here.
pub(crate) fn is_message(path: &Path) -> bool {
    let Ok(metadata) = std::fs::metadata(path) else { return false };
    if !metadata.is_file() || metadata.len() > HINT_BYTES {
        return false;
    }
    std::fs::read(path).is_ok_and(|bytes| text::read(&lines::decoded(&bytes)).is_some())
}
