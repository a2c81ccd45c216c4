//! What text is laid out for, and how it wraps there.

use anstream::{AutoStream, ColorChoice};
use std::io::IsTerminal;
use terminal_size::{Height, Width, terminal_size_of};
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// The width of a terminal that does not tell.
const UNTOLD: usize = 80;
/// Nothing is laid out for less.
const NARROWEST: usize = 20;
/// How wide sentences are that go to a file or another program, and the widest help.
pub(crate) const PIPED: usize = 120;

/// What a page is laid out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Columns; without, sentences wrap at 120, and nothing is left out or broken.
    pub width: Option<usize>,
    /// Whether escape sequences for bold are understood.
    pub styled: bool,
}

impl Screen {
    /// Standard output. Its width is `COLUMNS` if that is set, else the terminal's; what goes to a file or another
    /// program has none. It is styled where it is a terminal, unless `NO_COLOR`, `CLICOLOR=0` or
    /// `TERM=dumb` say no; `CLICOLOR_FORCE` says yes.
    #[must_use]
    pub fn stdout() -> Self {
        let out = std::io::stdout();
        let asked = std::env::var("COLUMNS").ok().and_then(|text| text.trim().parse().ok()).filter(|width| *width > 0);
        let asked = asked.map(|width: usize| width.max(NARROWEST));
        let width = asked.or_else(|| terminal_width(&out, terminal_size_of(&out)));
        Self { width, styled: AutoStream::choice(&out) != ColorChoice::Never }
    }

    /// Standard error, where only lines are written. What is no terminal gets them whole, whatever `COLUMNS` says:
    /// programs read them.
    #[must_use]
    pub(crate) fn stderr() -> Self {
        let out = std::io::stderr();
        Self { width: terminal_width(&out, terminal_size_of(&out)), styled: false }
    }
}

/// Columns of a stream, if it is a terminal; `size` is what the system says of it.
fn terminal_width(stream: &impl IsTerminal, size: Option<(Width, Height)>) -> Option<usize> {
    let columns = size.map_or(UNTOLD, |(width, _)| usize::from(width.0));
    stream.is_terminal().then(|| columns.max(NARROWEST))
}

/// Lines of at most `width` columns, all but the first indented. Only a word that is longer than a line is broken.
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
