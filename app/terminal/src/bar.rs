//! Progress on standard error, where that is a terminal.

use crate::escape::visible;
use indicatif::{ProgressBar, ProgressBarIter, ProgressDrawTarget, ProgressStyle};

/// A progress bar, or a spinner where the amount of work is unknown. It is drawn on standard error if that is a
/// terminal that can move its cursor, and nowhere else.
#[derive(Clone, Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar of `total` steps, in a form that [`indicatif`] describes.
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

    /// What is being done.
    pub fn message(&self, text: impl AsRef<str>) {
        self.0.set_message(visible(text.as_ref()).into_owned());
        self.0.tick();
    }

    /// What all of it is for.
    pub fn prefix(&self, text: impl AsRef<str>) {
        self.0.set_prefix(visible(text.as_ref()).into_owned());
    }

    /// So many steps were done before; they say nothing about the time that is left.
    pub fn begin_at(&self, position: u64) {
        self.0.set_position(position);
        self.0.reset_eta();
    }

    /// So many more steps are done.
    pub fn advance(&self, steps: u64) {
        self.0.inc(steps);
    }

    /// Whether it is on a screen.
    #[must_use]
    pub fn is_drawn(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Writes a line above the bar.
    pub fn say(&self, text: &str) {
        // A bar that is drawn must make room; without one the line goes out as it is.
        self.0.suspend(|| crate::say(text));
    }

    /// Counts the bytes that are read.
    pub fn reading<R: std::io::Read>(&self, source: R) -> ProgressBarIter<R> {
        self.0.wrap_read(source)
    }

    /// Takes the bar off the screen.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}
