//! A page of titles, tables and sentences, laid out for the screen that it is printed on.

use crate::escape::{glued, unglued, visible};
use crate::screen::{PIPED, Screen, wrapped};
use crate::table::{Comparison, Table};

/// What a program prints on standard output, piece by piece. All text is made [visible](crate::visible).
#[derive(Clone, Debug)]
pub struct Page {
    screen: Screen,
    text: String,
}

impl Page {
    /// An empty page for a screen.
    #[must_use]
    pub fn new(screen: Screen) -> Self {
        Self { screen, text: String::new() }
    }

    /// An empty page for standard output.
    #[must_use]
    pub fn stdout() -> Self {
        Self::new(Screen::stdout())
    }

    /// One line; it wraps at words.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.indented(text.as_ref(), 0);
    }

    fn indented(&mut self, text: &str, indent: usize) {
        self.text += unglued(&wrapped(&glued(text), Some(self.screen.width.unwrap_or(PIPED)), indent)).trim_end();
        self.text.push('\n');
    }

    /// A line that says more about what stands above; it wraps at words and is indented from there.
    pub fn note(&mut self, text: impl AsRef<str>) {
        self.indented(text.as_ref(), 2);
    }

    /// A label of `width` columns with a text beside it, whose lines begin in the same column.
    pub fn labelled(&mut self, label: &str, width: usize, text: &str) {
        self.indented(&format!("{label:width$}{text}"), width);
    }

    /// An empty line, except at the top.
    pub fn gap(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }

    /// A gap and a line.
    pub fn title(&mut self, text: impl AsRef<str>) {
        self.gap();
        self.line(text);
    }

    /// A table. Where the screen has no room for all columns, a note names those left out and says that `--json` has
    /// them.
    pub fn table(&mut self, table: &Table) {
        let (text, gone) = table.show(self.screen);
        self.text += &text;
        self.text.push('\n');
        if !gone.is_empty() {
            self.note(format!("no room for: {}; --json has everything", gone.join(", ")));
        }
    }

    /// Whether the screen has room for all columns of a table.
    #[must_use]
    pub fn fits(&self, table: &Table) -> bool {
        table.fits(self.screen.width)
    }

    /// Subjects side by side.
    pub fn comparison(&mut self, comparison: &Comparison) {
        self.text += &comparison.show(self.screen);
        self.text.push('\n');
    }

    /// Ends the page: what was found, and the command that goes on from here.
    pub fn end(&mut self, found: impl AsRef<str>, next: &str) {
        self.gap();
        self.line(found);
        self.next(next);
    }

    /// The command that goes on from here. Where it is too long for a line of the terminal, each line but the last ends in a backslash,
    /// so that all of them can be pasted.
    pub fn next(&mut self, command: &str) {
        let text = format!("Next: {}", visible(command));
        let width = self.screen.width.map(|width| width.saturating_sub(2));
        self.text += &wrapped(&text, width, 6).replace('\n', " \\\n");
        self.text.push('\n');
    }

    /// The page as text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Prints the page on standard output. A reader that went away (`| head`) is no error.
    ///
    /// # Errors
    /// A [`RuntimeFailure`](crate::RuntimeFailure) when it cannot be written.
    pub fn print(self) -> anyhow::Result<()> {
        crate::write_out(&self.text)
    }
}

/// Nanoseconds in the unit that needs three digits.
#[must_use]
pub fn duration(ns: u64) -> String {
    // CAST: a display value of three digits.
    let value = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} us", digits(value / 1e3)),
        1_000_000..1_000_000_000 => format!("{} ms", digits(value / 1e6)),
        _ => format!("{} s", digits(value / 1e9)),
    }
}

/// Seconds in the unit that needs three digits.
#[must_use]
pub fn seconds(value: f64) -> String {
    // CAST: a display value.
    duration((value * 1e9).round() as u64)
}

/// A number with three digits or so.
#[must_use]
pub fn digits(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_three_digits() {
        for (ns, text) in
            [(0, "0 ns"), (999, "999 ns"), (1_500, "1.50 us"), (25_400, "25.4 us"), (2_243_000, "2.24 ms")]
        {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(duration(61_000_000_000), "61.0 s");
    }
}
