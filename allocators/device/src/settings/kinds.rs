//! What values a setting takes: how they are written, read and described.

use crate::bytes::Bytes;
use serde::Serialize;
use std::fmt::Display;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// What values a setting of type `T` takes.
pub trait Kind<T> {
    /// What it takes, in a few words, as it stands behind "takes".
    fn takes(&self) -> String;

    /// The value that a text stands for; `None` for what is no such value.
    fn read(&self, text: &str) -> Option<T>;

    /// A value as text that [`read`](Self::read) gives back to the bit.
    fn write(&self, value: &T) -> String;
}

/// Bytes, with units or without. See [`bytes`].
#[derive(Clone, Debug)]
pub struct ByteCount {
    range: RangeInclusive<u64>,
}

/// A number of bytes: `512M`, `1.5GiB`, `4096`.
#[must_use]
pub fn bytes() -> ByteCount {
    ByteCount { range: 0..=u64::MAX }
}

impl ByteCount {
    /// No fewer than these.
    #[must_use]
    pub fn at_least(self, least: u64) -> Self {
        Self { range: least..=*self.range.end() }
    }

    /// No more than these.
    #[must_use]
    pub fn at_most(self, most: u64) -> Self {
        Self { range: *self.range.start()..=most }
    }

    /// Also `word`, for a bound that is not there: [`None`] where the type is an option, else [`u64::MAX`].
    #[must_use]
    pub fn or(self, word: &'static str) -> Or<Self> {
        Or { kind: self, word }
    }
}

/// A size so that it reads back exactly: in the largest unit that divides it.
fn exact(bytes: u64) -> String {
    let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    match units.into_iter().find(|(_, log2)| bytes > 0 && bytes.trailing_zeros() >= *log2) {
        Some((unit, log2)) => format!("{}{unit}", bytes >> log2),
        None => bytes.to_string(),
    }
}

impl Kind<u64> for ByteCount {
    fn takes(&self) -> String {
        let mut out = "bytes, such as 512M".to_owned();
        if *self.range.start() > 0 {
            out = format!("{out}, at least {}", exact(*self.range.start()));
        }
        if *self.range.end() < u64::MAX {
            out = format!("{out}, at most {}", exact(*self.range.end()));
        }
        out
    }

    fn read(&self, text: &str) -> Option<u64> {
        text.parse::<Bytes>().ok().map(|bytes| bytes.0).filter(|bytes| self.range.contains(bytes))
    }

    fn write(&self, value: &u64) -> String {
        exact(*value)
    }
}

/// A kind, or a word for what has no bound.
#[derive(Clone, Debug)]
pub struct Or<K> {
    kind: K,
    word: &'static str,
}

impl Kind<Option<u64>> for Or<ByteCount> {
    fn takes(&self) -> String {
        format!("{}, or {}", self.kind.takes(), self.word)
    }

    fn read(&self, text: &str) -> Option<Option<u64>> {
        if text == self.word { Some(None) } else { self.kind.read(text).map(Some) }
    }

    fn write(&self, value: &Option<u64>) -> String {
        value.map_or_else(|| self.word.to_owned(), |value| self.kind.write(&value))
    }
}

impl Kind<u64> for Or<ByteCount> {
    fn takes(&self) -> String {
        format!("{}, or {}", self.kind.takes(), self.word)
    }

    fn read(&self, text: &str) -> Option<u64> {
        if text == self.word { Some(u64::MAX) } else { self.kind.read(text) }
    }

    fn write(&self, value: &u64) -> String {
        if *value == u64::MAX { self.word.to_owned() } else { self.kind.write(value) }
    }
}

/// A whole number. See [`number`].
#[derive(Clone, Debug)]
pub struct Number<T>(RangeInclusive<T>);

/// A whole number in a range.
#[must_use]
pub fn number<T>(range: RangeInclusive<T>) -> Number<T> {
    Number(range)
}

impl<T: FromStr + Display + PartialOrd> Kind<T> for Number<T> {
    fn takes(&self) -> String {
        format!("a whole number from {} to {}", self.0.start(), self.0.end())
    }

    fn read(&self, text: &str) -> Option<T> {
        text.parse().ok().filter(|value| self.0.contains(value))
    }

    fn write(&self, value: &T) -> String {
        value.to_string()
    }
}

/// A fraction. See [`fraction`].
#[derive(Clone, Debug)]
pub struct Fraction(());

/// A number from 0 to 1.
#[must_use]
pub fn fraction() -> Fraction {
    Fraction(())
}

impl Kind<f64> for Fraction {
    fn takes(&self) -> String {
        "a number from 0 to 1".to_owned()
    }

    fn read(&self, text: &str) -> Option<f64> {
        text.parse().ok().filter(|value| (0.0..=1.0).contains(value))
    }

    fn write(&self, value: &f64) -> String {
        value.to_string()
    }
}

/// On or off. See [`switch`].
#[derive(Clone, Debug)]
pub struct Switch(());

/// `on` or `off`; `true` and `false`, as PyTorch writes them in small letters or not, are read as well.
#[must_use]
pub fn switch() -> Switch {
    Switch(())
}

impl Kind<bool> for Switch {
    fn takes(&self) -> String {
        "on or off".to_owned()
    }

    fn read(&self, text: &str) -> Option<bool> {
        match text {
            "on" | "true" | "True" => Some(true),
            "off" | "false" | "False" => Some(false),
            _ => None,
        }
    }

    fn write(&self, value: &bool) -> String {
        if *value { "on" } else { "off" }.to_owned()
    }
}

/// One of the values that a setting can have.
#[derive(Clone, Copy, Debug)]
pub struct Choice<T: 'static> {
    /// As it is written.
    pub name: &'static str,
    /// What it is.
    pub value: T,
}

/// A type with few values, each with a name.
pub trait Choices: Copy + PartialEq + 'static {
    /// All of them, in the order in which they are listed.
    const ALL: &'static [Choice<Self>];
}

/// One of a few names. See [`choice`].
#[derive(Clone, Debug)]
pub struct OneOf<T>(PhantomData<T>);

/// One of the names of a type's values.
#[must_use]
pub fn choice<T: Choices>() -> OneOf<T> {
    OneOf(PhantomData)
}

impl<T: Choices> Kind<T> for OneOf<T> {
    fn takes(&self) -> String {
        let names: Vec<&str> = T::ALL.iter().map(|choice| choice.name).collect();
        match names.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            _ => names.concat(),
        }
    }

    fn read(&self, text: &str) -> Option<T> {
        T::ALL.iter().find(|choice| choice.name == text).map(|choice| choice.value)
    }

    fn write(&self, value: &T) -> String {
        T::ALL.iter().find(|choice| choice.value == *value).map(|choice| choice.name.to_owned()).unwrap_or_default()
    }
}

/// A text of the setting's own. See [`text`].
#[derive(Clone, Debug)]
pub struct Text(&'static str);

/// What a type reads from text, described in a few words. A value with commas is written in brackets: `[1:4,>:8]`.
#[must_use]
pub fn text(takes: &'static str) -> Text {
    Text(takes)
}

impl<T: FromStr + Display + Serialize> Kind<T> for Text {
    fn takes(&self) -> String {
        self.0.to_owned()
    }

    fn read(&self, text: &str) -> Option<T> {
        text.parse().ok()
    }

    fn write(&self, value: &T) -> String {
        value.to_string()
    }
}
