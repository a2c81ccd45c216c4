//! Named settings: each is declared once, with its type, default, accepted values and help.
//!
//! [`settings!`](crate::settings!) makes a struct of them. Its `Default`, the list for help, and the reader of `name=value` are
//! generated from the same lines, so they cannot contradict each other.
//!
//! ```
//! use vramlab_device::settings::{Settings, bytes, switch};
//!
//! vramlab_device::settings! {
//!     /// Settings of an arena.
//!     #[derive(Clone, Copy, Debug, PartialEq)]
//!     pub struct ArenaSettings {
//!         /// Bytes that are taken from the device at once.
//!         pub chunk: u64 = 64 << 20, bytes().at_least(4096);
//!         /// Give chunks back when they are empty.
//!         pub release: bool = false, switch();
//!     }
//! }
//!
//! let mut settings = ArenaSettings::default();
//! settings.set("chunk", "2M").unwrap();
//! assert_eq!(settings.chunk, 2 << 20);
//! let error = settings.set("chunk", "12").unwrap_err();
//! assert_eq!(error.to_string(), "'chunk' takes bytes, such as 512M, at least 4K; found '12'");
//! let error = settings.set("chunks", "2M").unwrap_err();
//! assert_eq!(error.to_string(), "there is no setting 'chunks'; did you mean 'chunk'? There are chunk, release");
//! ```

mod kinds;

pub use kinds::{Choices, Kind, bytes, choice, fraction, number, switch, text};

use serde::Serialize;
#[doc(hidden)]
pub use serde_json;
use std::any::Any;
use std::fmt;

/// One setting of a [`Settings`] and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Name, as written before the `=`.
    pub name: &'static str,
    /// Its value, as written after the `=`.
    pub value: String,
    /// The accepted values: `on or off`.
    pub takes: String,
    /// Its effect.
    pub help: String,
}

/// The reason why a setting was not set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// No setting has this name.
    #[error("there is no setting '{name}'{}", Meant { name, among })]
    Unknown {
        /// The name.
        name: String,
        /// The existing names.
        among: Vec<&'static str>,
    },
    /// The setting does not accept the value.
    #[error("'{name}' takes {takes}; found '{found}'")]
    Value {
        /// The setting.
        name: &'static str,
        /// The accepted values.
        takes: String,
        /// The value.
        found: String,
    },
}

/// `; did you mean 'x'? There are x, y`.
#[derive(Debug)]
pub struct Meant<'a> {
    /// The given name.
    pub name: &'a str,
    /// The existing names.
    pub among: &'a [&'a str],
}

impl fmt::Display for Meant<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.among, nearest(self.name, self.among.iter().copied())) {
            ([], _) => f.write_str("; there are none"),
            (among, Some(near)) => write!(f, "; did you mean '{near}'? There are {}", among.join(", ")),
            (among, None) => write!(f, "; there are {}", among.join(", ")),
        }
    }
}

/// The most similar name, if any is similar (Jaro-Winkler, 0.7 and above).
#[must_use]
pub fn nearest<'a>(name: &str, among: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let similarity = |other: &str| strsim::jaro_winkler(&name.to_lowercase(), other);
    let scored = among.into_iter().map(|other| (similarity(other), other));
    scored.filter(|(score, _)| *score >= 0.7).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other)
}

/// A struct that [`settings!`](crate::settings!) made: its settings by name.
pub trait Settings: Any + fmt::Debug + Send + Sync {
    /// Every setting with its current value, in the order of the declaration.
    fn list(&self) -> Vec<Setting>;

    /// Sets a setting from text.
    ///
    /// # Errors
    /// [`SettingError`] where the name or the value is wrong; nothing has changed then.
    fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError>;

    /// The value of a setting as text that [`set`](Self::set) accepts.
    fn get(&self, name: &str) -> Option<String> {
        self.list().into_iter().find(|setting| setting.name == name).map(|setting| setting.value)
    }

    /// All of them as a JSON object.
    fn json(&self) -> serde_json::Value;

    /// Checks that the settings do not contradict each other. The declaration names the check.
    ///
    /// # Errors
    /// Which settings contradict each other, and the fix.
    fn check(&self) -> Result<(), String>;

    /// A copy.
    fn boxed(&self) -> Box<dyn Settings>;

    /// Copies all values from settings that these extend, those included that [`set`](Self::set) would refuse; false where they
    /// extend none of that type.
    fn take_over(&mut self, _other: &dyn Settings) -> bool {
        false
    }
}

impl dyn Settings {
    /// The struct, if it is an `S`.
    #[must_use]
    pub fn get_as<S: Settings>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A documentation comment as one line of plain text.
#[doc(hidden)]
#[must_use]
pub fn one_line(comment: &str) -> String {
    comment.replace('`', "").split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
}

/// The parts between the commas of a list that are not in brackets; at least one part.
pub fn list_parts(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let ends = |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    text.split(ends).collect()
}

/// Reads a value; the error contains the accepted values.
#[doc(hidden)]
pub fn read<T>(name: &'static str, kind: &Kind<T>, text: &str) -> Result<T, SettingError> {
    let wrong = || SettingError::Value { name, takes: kind.takes().to_owned(), found: text.to_owned() };
    kind.read(text).ok_or_else(wrong)
}

/// Declares a struct of [settings](mod@crate::settings). Each has documentation, which help shows, and the form `name: type =
/// default, kind;`. Kinds are functions of [`settings`](mod@crate::settings): `bytes`, `number`, `fraction`, `switch`, `choice`,
/// `text`. `check path;` at the end names a function `fn(&Self) -> Result<(), String>` that checks the combination of values. The
/// struct must be `Clone` and `Debug`.
///
/// `struct Name extends base: Base` also has the settings of another such struct, in its field `base`. They come first in lists.
#[macro_export]
macro_rules! settings {
    (
        $(#[$outer:meta])*
        $visible:vis struct $name:ident $(extends $base:ident: $extended:ty)? {
            $(
                $(#[doc = $help:literal])+
                $field_visible:vis $field:ident : $type:ty = $default:expr, $kind:expr;
            )*
        }
        $(check $check:path;)?
    ) => {
        $(#[$outer])*
        $visible struct $name {
            $(
                /// The settings that these extend.
                pub $base: $extended,
            )?
            $($(#[doc = $help])+ $field_visible $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($base: <$extended>::default(),)? $($field: $default,)* }
            }
        }

        impl $crate::settings::Settings for $name {
            fn list(&self) -> Vec<$crate::settings::Setting> {
                let list: Vec<$crate::settings::Setting> = vec![$($crate::settings::Setting {
                    name: stringify!($field),
                    value: $crate::settings::Kind::<$type>::from($kind).write(&self.$field),
                    takes: $crate::settings::Kind::<$type>::from($kind).takes().to_owned(),
                    help: $crate::settings::one_line(concat!($($help, "\n"),+)),
                },)*];
                $(let list = [$crate::settings::Settings::list(&self.$base), list].concat();)?
                list
            }

            #[allow(unused_variables, reason = "there may be no settings")]
            fn set(&mut self, name: &str, value: &str) -> Result<(), $crate::settings::SettingError> {
                match name {
                    $(stringify!($field) => {
                        self.$field = $crate::settings::read(stringify!($field), &$crate::settings::Kind::<$type>::from($kind), value)?;
                        Ok(())
                    })*
                    $(_ if $crate::settings::Settings::get(&self.$base, name).is_some() => {
                        $crate::settings::Settings::set(&mut self.$base, name, value)
                    })?
                    _ => Err($crate::settings::SettingError::Unknown {
                        name: name.to_owned(),
                        among: $crate::settings::Settings::list(self).iter().map(|setting| setting.name).collect(),
                    }),
                }
            }

            fn json(&self) -> $crate::settings::serde_json::Value {
                #[allow(unused_mut, reason = "there may be no settings")]
                let mut out = $crate::settings::serde_json::Map::new();
                $(if let $crate::settings::serde_json::Value::Object(all) = $crate::settings::Settings::json(&self.$base) {
                    out = all;
                })?
                $(out.insert(stringify!($field).to_owned(), $crate::settings::serde_json::json!(self.$field));)*
                $crate::settings::serde_json::Value::Object(out)
            }

            fn check(&self) -> Result<(), String> {
                $($crate::settings::Settings::check(&self.$base)?;)?
                $($check(self)?;)?
                Ok(())
            }

            fn boxed(&self) -> Box<dyn $crate::settings::Settings> {
                Box::new(self.clone())
            }

            $(fn take_over(&mut self, other: &dyn $crate::settings::Settings) -> bool {
                other.get_as::<$extended>().inspect(|all| self.$base.clone_from(all)).is_some()
            })?
        }
    };
}

crate::settings! {
    /// Settings of an object without settings.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct NoSettings {}
}

#[cfg(test)]
mod tests;
