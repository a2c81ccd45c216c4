//! Progress bars on standard error, if it is a terminal.

use crate::escape::visible;
use indicatif::{ProgressBar, ProgressBarIter, ProgressDrawTarget, ProgressStyle};

/// A progress bar, or a spinner for an unknown amount of work. It is drawn only if standard error is a terminal that can move its
/// cursor.
#[derive(Clone, Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar of `total` steps, in an [`indicatif`] template.
    #[must_use]
    pub fn new(total: impl Into<Option<u64>>, form: &str) -> Self {
        let bar = ProgressBar::with_draw_target(total.into(), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        Self(bar)
    }

    /// A bar that is never drawn.
    #[must_use]
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Sets the message: the current work.
    pub fn message(&self, text: impl AsRef<str>) {
        self.0.set_message(visible(text.as_ref()).into_owned());
        self.0.tick();
    }

    /// Sets the prefix: the purpose of the work.
    pub fn prefix(&self, text: impl AsRef<str>) {
        self.0.set_prefix(visible(text.as_ref()).into_owned());
    }

    /// Sets the number of steps done before; they do not count for the remaining time.
    pub fn begin_at(&self, position: u64) {
        self.0.set_position(position);
        self.0.reset_eta();
    }

    /// Adds finished steps.
    pub fn advance(&self, steps: u64) {
        self.0.inc(steps);
    }

    /// Whether the bar is visible.
    #[must_use]
    pub fn is_drawn(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Writes a line above the bar.
    pub fn say(&self, text: &str) {
        // A visible bar is cleared and redrawn around the line.
        self.0.suspend(|| crate::say(text));
    }

    /// Wraps a reader to count the bytes read.
    pub fn reading<R: std::io::Read>(&self, source: R) -> ProgressBarIter<R> {
        self.0.wrap_read(source)
    }

    /// Removes the bar from the screen.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}
