//! A program's standard output, kept and shown.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Most bytes that are kept. Outputs are compared up to there.
const MOST: usize = 64 << 20;
/// Time for the last bytes to arrive after the program has ended: a process that it left in the background may hold the pipe open.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where the copy goes.
#[derive(Clone, Copy, Debug)]
enum Show {
    Stdout,
    Stderr,
    Nowhere,
}

/// A pipe whose content is kept.
#[derive(Debug)]
pub(super) struct Copied {
    writer: PipeWriter,
    kept: Arc<Mutex<Vec<u8>>>,
    end: Receiver<()>,
}

impl Copied {
    /// A pipe that is shown on standard output, or on standard error.
    pub(super) fn new(to_stderr: bool) -> std::io::Result<Self> {
        Self::open(if to_stderr { Show::Stderr } else { Show::Stdout })
    }

    /// A pipe that is not shown.
    pub(super) fn hidden() -> std::io::Result<Self> {
        Self::open(Show::Nowhere)
    }

    fn open(show: Show) -> std::io::Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let kept: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (done, end) = channel();
        let into = Arc::clone(&kept);
        std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            copy(reader, &into, show);
            let _ = done.send(());
        })?;
        Ok(Self { writer, kept, end })
    }

    /// The end that the program writes to.
    pub(super) fn writer(&self) -> &PipeWriter {
        &self.writer
    }

    /// The program's output.
    pub(super) fn finish(self) -> Vec<u8> {
        drop(self.writer);
        let _ = self.end.recv_timeout(PATIENCE);
        std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn copy(mut from: PipeReader, into: &Mutex<Vec<u8>>, show: Show) {
    let mut buffer = [0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..count];
        // A reader that is gone does not end the program.
        let _ = match show {
            Show::Stdout => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
            Show::Stderr => std::io::stderr().write_all(bytes),
            Show::Nowhere => Ok(()),
        };
        let mut kept = into.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST.saturating_sub(kept.len()).min(count);
        kept.extend_from_slice(&bytes[..room]);
    }
}

/// The lines that every unchanged run printed alike. A program that prints times prints some lines that differ by themselves.
#[derive(Debug)]
pub(super) struct Expected {
    /// `None`: this line varies by itself.
    lines: Vec<Option<Vec<u8>>>,
    /// Whether the number of lines varies by itself.
    any_length: bool,
}

impl Expected {
    /// Of the outputs of unchanged runs.
    pub(super) fn of(outputs: &[Vec<u8>]) -> Self {
        let Some((first, others)) = outputs.split_first() else { return Self { lines: Vec::new(), any_length: true } };
        let mut lines: Vec<Option<Vec<u8>>> = split(first).map(|line| Some(line.to_vec())).collect();
        let mut any_length = false;
        for other in others {
            let other: Vec<&[u8]> = split(other).collect();
            any_length |= other.len() != lines.len();
            for (at, line) in lines.iter_mut().enumerate() {
                if other.get(at).copied() != line.as_deref() {
                    *line = None;
                }
            }
        }
        Self { lines, any_length }
    }

    /// The number of lines that vary by themselves.
    pub(super) fn varying(&self) -> usize {
        self.lines.iter().filter(|line| line.is_none()).count()
    }

    /// The number of the first line that differs from the unchanged runs, from 1; `None` if the output is equal.
    pub(super) fn difference(&self, output: &[u8]) -> Option<usize> {
        let lines: Vec<&[u8]> = split(output).collect();
        let differs = |(at, line): (usize, &Option<Vec<u8>>)| {
            let expected = line.as_deref()?;
            (lines.get(at).copied() != Some(expected)).then_some(at + 1)
        };
        let found = self.lines.iter().enumerate().find_map(differs);
        let longer =
            (!self.any_length && lines.len() != self.lines.len()).then(|| lines.len().min(self.lines.len()) + 1);
        found.or(longer)
    }
}

fn split(output: &[u8]) -> impl Iterator<Item = &[u8]> {
    output.split_inclusive(|byte| *byte == b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(texts: &[&str]) -> Vec<Vec<u8>> {
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    }

    #[test]
    fn lines_that_vary_by_themselves_are_not_compared() {
        let expected = Expected::of(&outputs(&["1 us\nsum 7\n", "2 us\nsum 7\n"]));
        assert_eq!(expected.varying(), 1);
        assert_eq!(expected.difference(b"3 us\nsum 7\n"), None);
        assert_eq!(expected.difference(b"3 us\nsum 8\n"), Some(2));
        assert_eq!(expected.difference(b"3 us\n"), Some(2));
        assert_eq!(expected.difference(b"3 us\nsum 7\nmore\n"), Some(3));
    }

    #[test]
    fn a_number_of_lines_that_varies_is_not_compared() {
        let expected = Expected::of(&outputs(&["a\n", "a\nb\n"]));
        assert_eq!(expected.difference(b"a\nb\nc\n"), None);
        assert_eq!(expected.difference(b"b\n"), Some(1));
    }
}
