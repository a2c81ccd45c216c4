//! Names of devices on command lines, in specs and records.

use super::DeviceKind;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A device by name: `cuda`, `cuda:N`, `sim`, `sim:PROFILE.json` or `null`.
///
/// ```
/// use vramlab_device::{DeviceKind, DeviceName};
///
/// assert_eq!("cuda:1".parse(), Ok(DeviceName::Cuda(1)));
/// let error = DeviceName::among("cuda", &[DeviceKind::Sim, DeviceKind::Null]).unwrap_err();
/// assert_eq!(error.to_string(), "'cuda' is not a device for this: write sim, sim:PROFILE.json or null");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The GPU of this number.
    Cuda(usize),
    /// The simulated GPU with a profile from a file, or with the built-in one.
    Sim(Option<PathBuf>),
    /// The device without memory or costs.
    Null,
}

/// The text does not name a usable device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a device{}: write {write}", if *.known { " for this" } else { "" })]
pub struct DeviceNameError {
    text: String,
    /// Whether it names a device of another kind.
    known: bool,
    write: String,
}

impl DeviceKind {
    /// The forms of names of this kind.
    fn forms(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["cuda", "cuda:N"],
            Self::Sim => &["sim", "sim:PROFILE.json"],
            Self::Null => &["null"],
        }
    }
}

impl DeviceName {
    /// The kind of the device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Cuda(_) => DeviceKind::Cuda,
            Self::Sim(_) => DeviceKind::Sim,
            Self::Null => DeviceKind::Null,
        }
    }

    /// Reads the name of a device of one of these kinds.
    ///
    /// # Errors
    /// [`DeviceNameError`], which lists the names of these kinds.
    pub fn among(text: &str, kinds: &[DeviceKind]) -> Result<Self, DeviceNameError> {
        let named = match text.split_once(':') {
            None if text == "cuda" => Some(Self::Cuda(0)),
            None if text == "sim" => Some(Self::Sim(None)),
            None if text == "null" => Some(Self::Null),
            Some(("cuda", number)) => number.parse().ok().map(Self::Cuda),
            Some(("sim", path)) if !path.is_empty() => Some(Self::Sim(Some(path.into()))),
            _ => None,
        };
        let known = named.is_some();
        named.filter(|name| kinds.contains(&name.kind())).ok_or_else(|| {
            let forms: Vec<&str> = kinds.iter().flat_map(|kind| kind.forms()).copied().collect();
            let write = match forms.split_last() {
                Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
                _ => forms.concat(),
            };
            DeviceNameError { text: text.to_owned(), known, write }
        })
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::among(text, &DeviceKind::ALL)
    }
}

/// The shortest name: the first GPU is `cuda`.
impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(0) | Self::Sim(None) | Self::Null => self.kind().fmt(f),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::Sim(Some(path)) => write!(f, "sim:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let named = [
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
            ("sim", DeviceName::Sim(None)),
            ("sim:a:b.json", DeviceName::Sim(Some("a:b.json".into()))),
            ("null", DeviceName::Null),
        ];
        for (text, name) in named {
            assert_eq!(text.parse(), Ok(name.clone()));
            assert_eq!(name.to_string(), text);
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceName::Cuda(0)));
        for text in ["", "gpu", "auto", "sim:", "cuda:", "cuda:x", "cuda:-1", "null:1"] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            let write = "is not a device: write cuda, cuda:N, sim, sim:PROFILE.json or null";
            assert_eq!(error, format!("'{text}' {write}"));
        }
    }

    #[test]
    fn other_kinds_are_refused() {
        let error = |text| DeviceName::among(text, &[DeviceKind::Null]).unwrap_err().to_string();
        assert_eq!(error("sim"), "'sim' is not a device for this: write null");
        assert_eq!(error("tpu"), "'tpu' is not a device: write null");
    }

    #[test]
    fn kinds_have_one_name() {
        for kind in DeviceKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
