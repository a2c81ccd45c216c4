//! The screen for which text is laid out, and its wrapping.

use anstream::{AutoStream, ColorChoice};
use std::io::IsTerminal;
use terminal_size::{Height, Width, terminal_size_of};
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// Width of a terminal that does not report its width.
const DEFAULT: usize = 80;
/// Minimum width.
const NARROWEST: usize = 20;
/// Width of sentences written to a file or another program, and maximum width of help.
pub(crate) const PIPED: usize = 120;

/// A screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Number of columns; without, sentences wrap at 120, and nothing is omitted or broken.
    pub width: Option<usize>,
    /// Whether the screen supports escape sequences for bold text.
    pub styled: bool,
}

impl Screen {
    /// Standard output. Its width is `COLUMNS` if set, else the terminal's; a file or pipe has none. A terminal is styled unless
    /// `NO_COLOR`, `CLICOLOR=0` or `TERM=dumb` disable styles; `CLICOLOR_FORCE` enables them.
    #[must_use]
    pub fn stdout() -> Self {
        let out = std::io::stdout();
        let columns =
            std::env::var("COLUMNS").ok().and_then(|text| text.trim().parse().ok()).filter(|width| *width > 0);
        let columns = columns.map(|width: usize| width.max(NARROWEST));
        let width = columns.or_else(|| terminal_width(&out, terminal_size_of(&out)));
        Self { width, styled: AutoStream::choice(&out) != ColorChoice::Never }
    }

    /// Standard error, to which only lines are written. A file or pipe gets unwrapped lines regardless of `COLUMNS`, because programs
    /// read them.
    #[must_use]
    pub(crate) fn stderr() -> Self {
        let out = std::io::stderr();
        Self { width: terminal_width(&out, terminal_size_of(&out)), styled: false }
    }
}

/// The columns of a stream, if it is a terminal; `size` is the size reported by the system.
fn terminal_width(stream: &impl IsTerminal, size: Option<(Width, Height)>) -> Option<usize> {
    let columns = size.map_or(DEFAULT, |(width, _)| usize::from(width.0));
    stream.is_terminal().then(|| columns.max(NARROWEST))
}

/// Wraps text into lines of at most `width` columns; all but the first are indented. Only words longer than a line are broken.
pub(crate) fn wrapped(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width else { return text.to_owned() };
    let indent = " ".repeat(indent.min(width / 2));
    let options = Options::new(width)
        .subsequent_indent(&indent)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit)
        .break_words(true);
    textwrap::wrap(text, options).join("\n")
}
