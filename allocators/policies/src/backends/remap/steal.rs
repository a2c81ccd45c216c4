//! The rule for taking free pages before new ones.

use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// When free pages are taken before new ones. Written `pressure`, `always` or a number from 1 on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Steal {
    /// When the limit or the device refuses new ones.
    Pressure,
    /// Whenever there are free ones.
    Always,
    /// When reserved memory would exceed this multiple of the peak of active bytes.
    Above(Ratio),
}

/// Reserved over active bytes, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Ratio(f64);

/// The form of the text.
pub(super) const FORM: &str = "pressure, always, or a number from 1 on, such as 1.05";

/// The text has none of the forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write {FORM}")]
pub struct ParseStealError;

impl Steal {
    /// Bytes up to which new memory is used before free pages, given the peak of active bytes.
    #[must_use]
    pub fn new_memory_up_to(self, active: u64) -> u64 {
        match self {
            Self::Pressure => u64::MAX,
            Self::Always => 0,
            // CAST: bytes of a device, below 2^53; larger values saturate.
            Self::Above(Ratio(ratio)) => (active as f64 * ratio) as u64,
        }
    }
}

impl FromStr for Steal {
    type Err = ParseStealError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "pressure" => Ok(Self::Pressure),
            "always" => Ok(Self::Always),
            number => {
                let ratio = number.parse().ok().filter(|ratio: &f64| ratio.is_finite() && *ratio >= 1.0);
                ratio.map(|ratio| Self::Above(Ratio(ratio))).ok_or(ParseStealError)
            }
        }
    }
}

impl fmt::Display for Steal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pressure => f.write_str("pressure"),
            Self::Always => f.write_str("always"),
            Self::Above(Ratio(ratio)) => ratio.fmt(f),
        }
    }
}

impl Serialize for Steal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Above(Ratio(ratio)) => serializer.serialize_f64(*ratio),
            word => serializer.collect_str(word),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::RemapSettings;
    use super::*;
    use vramlab_device::settings::Settings as _;

    #[test]
    fn a_ratio_is_read_back_to_the_bit_and_refused_below_one() {
        let mut settings = RemapSettings::default();
        for text in ["always", "1", "1.05", "1.0000000000000002", "pressure"] {
            settings.set("steal", text).unwrap();
            assert_eq!(settings.get("steal").as_deref(), Some(text));
        }
        for text in ["0.99", "0", "-1.5", "nan", "inf", "", "often", "Always", "1,05"] {
            let error = settings.set("steal", text).unwrap_err().to_string();
            let takes = "pressure, always, or a number from 1 on, such as 1.05";
            assert_eq!(error, format!("'steal' takes {takes}; found '{text}'"));
        }
        assert_eq!(settings.json()["steal"], "pressure");
        settings.set("steal", "1.05").unwrap();
        assert_eq!(settings.json()["steal"], 1.05);
    }

    #[test]
    fn new_memory_ends_at_the_ratio() {
        let up_to = |text: &str, active| text.parse::<Steal>().unwrap().new_memory_up_to(active);
        assert_eq!((up_to("pressure", 7), up_to("always", 7)), (u64::MAX, 0));
        assert_eq!((up_to("1", 7 << 40), up_to("1.5", 6), up_to("1e300", 1 << 50)), (7 << 40, 9, u64::MAX));
    }
}
