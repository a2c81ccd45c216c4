//! A page of titles, tables and sentences, laid out for a screen.

use crate::escape::{glued, unglued, visible};
use crate::screen::{PIPED, Screen, wrapped};
use crate::table::{Comparison, Table};

/// The output of a program, built piece by piece. Control characters are made [visible](crate::visible).
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

    /// Adds a line, which wraps at words.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.indented(text.as_ref(), 0);
    }

    fn indented(&mut self, text: &str, indent: usize) {
        self.text += unglued(&wrapped(&glued(text), Some(self.screen.width.unwrap_or(PIPED)), indent)).trim_end();
        self.text.push('\n');
    }

    /// Adds a line with details on the line above; continuation lines are indented.
    pub fn note(&mut self, text: impl AsRef<str>) {
        self.indented(text.as_ref(), 2);
    }

    /// Adds a label of `width` columns and a text, whose lines all start in that column.
    pub fn labelled(&mut self, label: &str, width: usize, text: &str) {
        self.indented(&format!("{label:width$}{text}"), width);
    }

    /// Adds a line that does not wrap, indented by two columns: for text to copy.
    pub fn verbatim(&mut self, text: &str) {
        self.text += &format!("  {}\n", visible(text));
    }

    /// Adds an empty line, except at the top.
    pub fn gap(&mut self) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
    }

    /// Adds a gap and a line.
    pub fn title(&mut self, text: impl AsRef<str>) {
        self.gap();
        self.line(text);
    }

    /// Adds a table. If the screen is too narrow for all columns, a note names the omitted ones and refers to `--json`.
    pub fn table(&mut self, table: &Table) {
        let (text, omitted) = table.show(self.screen);
        self.text += &text;
        self.text.push('\n');
        if !omitted.is_empty() {
            self.note(format!("columns omitted: {}; --json has all", omitted.join(", ")));
        }
    }

    /// Whether all columns of a table fit on the screen.
    #[must_use]
    pub fn fits(&self, table: &Table) -> bool {
        table.fits(self.screen.width)
    }

    /// Adds a comparison.
    pub fn comparison(&mut self, comparison: &Comparison) {
        self.text += &comparison.show(self.screen);
        self.text.push('\n');
    }

    /// Ends the page with the result and the next command.
    pub fn end(&mut self, result: impl AsRef<str>, next: &str) {
        self.gap();
        self.line(result);
        self.next(next);
    }

    /// Adds the next command. If it is longer than a line of the terminal, each line but the last ends in a backslash, so that all lines
    /// can be pasted.
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

    /// Prints the page on standard output. A closed pipe (`| head`) is not an error.
    ///
    /// # Errors
    /// A [`RuntimeFailure`](crate::RuntimeFailure) if it cannot be written.
    pub fn print(self) -> anyhow::Result<()> {
        crate::write_out(&self.text)
    }
}

/// Nanoseconds with a unit and three digits.
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

/// Seconds with a unit and three digits.
#[must_use]
pub fn seconds(value: f64) -> String {
    // CAST: a display value.
    duration((value * 1e9).round() as u64)
}

/// A number with about three digits.
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
