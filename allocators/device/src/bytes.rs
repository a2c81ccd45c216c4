//! Sizes as people read and write them: powers of 1024 with `KiB`, `MiB`, `GiB`.

use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// A number of bytes that prints as `1.5 MiB` and parses from `1536K`, `1.5MiB`, `1572864`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            None => format!("{} B", self.0),
            Some((name, unit)) if self.0.is_multiple_of(*unit) => format!("{} {name}", self.0 / unit),
            Some((name, unit)) => {
                // CAST: a display value; f64 keeps 15 digits and two are printed.
                let value = self.0 as f64 / *unit as f64;
                if value < 10.0 { format!("{value:.2} {name}") } else { format!("{value:.1} {name}") }
            }
        };
        f.pad(&text)
    }
}

/// The text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a size: write bytes, or a number with K, M, G or T (powers of 1024), such as 512M or 1.5GiB")]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = unit.trim().to_ascii_lowercase();
        let scale = match unit.as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1u64 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1 << 40,
            _ => return Err(error()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Bytes).ok_or_else(error);
        }
        let value = number.parse::<f64>().map_err(|_| error())? * scale as f64;
        // CAST: the range was checked; a fraction of a byte is dropped.
        if value.is_finite() && (0.0..9.0e18).contains(&value) { Ok(Bytes(value as u64)) } else { Err(error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn prints_in_powers_of_1024() {
        let cases = [
            (0, "0 B"),
            (512, "512 B"),
            (2048, "2 KiB"),
            (1_572_864, "1.50 MiB"),
            (20 << 20, "20 MiB"),
            (u64::MAX, "16777216.0 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn parses_what_people_write() {
        for (text, bytes) in [("0", 0), ("512", 512), ("1k", 1024), ("1.5 MiB", 1_572_864), ("2GB", 2 << 30)] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "MiB", "-1", "1.2.3", "5 parsecs", "99999999999T", "1e9"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
