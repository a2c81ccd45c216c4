//! A share of work that several processes do: `K/N` on the command line.

use std::fmt;
use std::str::FromStr;

/// A share of the plan: every N-th run, beginning with the K-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 1.
    pub number: usize,
    /// How many shards there are.
    pub of: usize,
}

impl Shard {
    /// Whether the run of this number in the plan is its own.
    pub fn holds(self, index: usize) -> bool {
        index % self.of == self.number - 1
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((number, of)) if (1..=of).contains(&number) => Ok(Self { number, of }),
            _ => Err("write K/N with K from 1 to N, as 2/8".into()),
        }
    }
}
