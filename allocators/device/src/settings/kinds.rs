//! Kinds of values: how they are written, read and described.

use crate::bytes::Bytes;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

type Read<T> = Box<dyn Fn(&str) -> Option<T>>;
type Write<T> = Box<dyn Fn(&T) -> String>;

/// The accepted values of a setting of type `T`.
pub struct Kind<T> {
    takes: String,
    read: Read<T>,
    write: Write<T>,
}

impl<T> fmt::Debug for Kind<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kind").field("takes", &self.takes).finish_non_exhaustive()
    }
}

impl<T> Kind<T> {
    /// A kind of values, described in a few words that follow "takes". `read` returns exactly the value that `write` wrote.
    pub fn new(
        takes: impl Into<String>,
        read: impl Fn(&str) -> Option<T> + 'static,
        write: impl Fn(&T) -> String + 'static,
    ) -> Self {
        Self { takes: takes.into(), read: Box::new(read), write: Box::new(write) }
    }

    /// The accepted values.
    #[must_use]
    pub fn takes(&self) -> &str {
        &self.takes
    }

    /// The value of a text; `None` where it has none.
    #[must_use]
    pub fn read(&self, text: &str) -> Option<T> {
        (self.read)(text)
    }

    /// A value as text.
    #[must_use]
    pub fn write(&self, value: &T) -> String {
        (self.write)(value)
    }
}

/// Bytes, with units or without. See [`bytes`].
#[derive(Clone, Copy, Debug)]
pub struct ByteCount {
    least: u64,
    most: u64,
    unbounded: Option<&'static str>,
}

/// A number of bytes: `512M`, `1.5GiB`, `4096`.
#[must_use]
pub fn bytes() -> ByteCount {
    ByteCount { least: 0, most: u64::MAX, unbounded: None }
}

impl ByteCount {
    /// Sets the minimum.
    #[must_use]
    pub fn at_least(self, least: u64) -> Self {
        Self { least, ..self }
    }

    /// Sets the maximum.
    #[must_use]
    pub fn at_most(self, most: u64) -> Self {
        Self { most, ..self }
    }

    /// Also accepts `word`, for no bound: [`None`] where the type is an option, else [`u64::MAX`].
    #[must_use]
    pub fn or(self, word: &'static str) -> Self {
        Self { unbounded: Some(word), ..self }
    }

    fn takes(self) -> String {
        let least = if self.least > 0 { format!(", at least {}", exact(self.least)) } else { String::new() };
        let most = if self.most < u64::MAX { format!(", at most {}", exact(self.most)) } else { String::new() };
        let word = self.unbounded.map(|word| format!(", or {word}")).unwrap_or_default();
        format!("bytes, such as 512M{least}{most}{word}")
    }

    /// Bytes, or none where the text is the word for no bound.
    fn read(self, text: &str) -> Option<Option<u64>> {
        if self.unbounded == Some(text) {
            return Some(None);
        }
        let bytes = text.parse::<Bytes>().ok()?.0;
        (self.least..=self.most).contains(&bytes).then_some(Some(bytes))
    }

    fn write(self, value: Option<u64>) -> String {
        value.map_or_else(|| self.unbounded.unwrap_or_default().to_owned(), exact)
    }
}

/// A size that reads back exactly: in the largest unit that divides it.
fn exact(bytes: u64) -> String {
    let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    match units.into_iter().find(|(_, log2)| bytes > 0 && bytes.trailing_zeros() >= *log2) {
        Some((unit, log2)) => format!("{}{unit}", bytes >> log2),
        None => bytes.to_string(),
    }
}

impl From<ByteCount> for Kind<Option<u64>> {
    fn from(count: ByteCount) -> Self {
        Self::new(count.takes(), move |text| count.read(text), move |value| count.write(*value))
    }
}

impl From<ByteCount> for Kind<u64> {
    fn from(count: ByteCount) -> Self {
        let bounded = move |value: u64| Some(value).filter(|value| count.unbounded.is_none() || *value < u64::MAX);
        let read = move |text: &str| Some(count.read(text)?.unwrap_or(u64::MAX));
        Self::new(count.takes(), read, move |value| count.write(bounded(*value)))
    }
}

/// A whole number in a range.
#[must_use]
pub fn number<T: FromStr + fmt::Display + PartialOrd + 'static>(range: RangeInclusive<T>) -> Kind<T> {
    let takes = format!("a whole number from {} to {}", range.start(), range.end());
    Kind::new(takes, move |text| text.parse().ok().filter(|value| range.contains(value)), T::to_string)
}

/// A number from 0 to 1.
#[must_use]
pub fn fraction() -> Kind<f64> {
    let read = |text: &str| text.parse().ok().filter(|value| (0.0..=1.0).contains(value));
    Kind::new("a number from 0 to 1", read, f64::to_string)
}

/// `on` or `off`; `true` and `false`, as PyTorch writes them in small letters or not, are read as well.
#[must_use]
pub fn switch() -> Kind<bool> {
    let read = |text: &str| match text {
        "on" | "true" | "True" => Some(true),
        "off" | "false" | "False" => Some(false),
        _ => None,
    };
    Kind::new("on or off", read, |on| if *on { "on" } else { "off" }.to_owned())
}

/// A type with few named values; [`named`](crate::named) makes one.
pub trait Choices: Copy + PartialEq + 'static {
    /// All values, in order.
    const ALL: &'static [Self];

    /// The name of a value.
    fn name(self) -> &'static str;
}

/// One of the names of a type's values.
#[must_use]
pub fn choice<T: Choices>() -> Kind<T> {
    let names: Vec<&str> = T::ALL.iter().map(|choice| choice.name()).collect();
    let takes = match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => names.concat(),
    };
    let read = |text: &str| T::ALL.iter().find(|choice| choice.name() == text).copied();
    Kind::new(takes, read, |value| value.name().to_owned())
}

/// A type that is read from text, described in a few words. A value with commas is written in brackets: `[1:4,>:8]`.
#[must_use]
pub fn text<T: FromStr + fmt::Display + 'static>(takes: &'static str) -> Kind<T> {
    Kind::new(takes, |text| text.parse().ok(), T::to_string)
}
