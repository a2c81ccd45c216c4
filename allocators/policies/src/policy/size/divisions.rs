//! The text of `roundup_power2_divisions`: one number for every size, or a list by size in MiB as PyTorch's.

use super::torch::{DIVISION_INTERVALS, Divisions};
use std::fmt;
use std::str::FromStr;

/// Maximum divisions between two powers of two.
const MOST: u64 = 1 << 20;

impl Divisions {
    /// The form of the text.
    pub(crate) const FORM: &'static str =
        "off, a power of two, or powers of two by size in MiB, such as [1:4,64:8,>:16]";
}

/// The text has none of the forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write {}", Divisions::FORM)]
pub struct ParseDivisionsError;

fn power(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|number: &u64| number.is_power_of_two())
}

fn divisions(text: &str) -> Option<u64> {
    if text.trim() == "0" { Some(0) } else { power(text).filter(|number| *number <= MOST) }
}

/// PyTorch's rules: the first size stands for all smaller ones too, `>` for all larger than the last (without one, larger than the
/// smallest), and sizes that are omitted in between have plain rounding. Sizes may be in any order; a later entry counts.
fn by_size(list: &str) -> Option<Divisions> {
    let (mut out, mut last, mut first) = (Divisions::default(), 0, true);
    let mut parts = list.split(',').peekable();
    while let Some(part) = parts.next() {
        // PyTorch accepts a comma at the end, and an empty list.
        if part.trim().is_empty() && parts.peek().is_none() {
            break;
        }
        let (size, number) = part.split_once(':')?;
        let number = divisions(number)?;
        if size.trim() == ">" {
            out.0[last + 1..].fill(number);
            continue;
        }
        let at = (power(size)?.ilog2() as usize).min(DIVISION_INTERVALS - 1);
        if std::mem::take(&mut first) {
            out.0[..at].fill(number);
        }
        out.0[at] = number;
        last = at;
    }
    Some(out)
}

impl FromStr for Divisions {
    type Err = ParseDivisionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let list = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let read = match list {
            Some(list) => by_size(list),
            None if text == "off" => Some(Self::default()),
            None => divisions(text).map(Self::uniform),
        };
        read.ok_or(ParseDivisionsError)
    }
}

impl fmt::Display for Divisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.0;
        let (first, last) = (counts[0], counts[DIVISION_INTERVALS - 1]);
        if counts.iter().all(|count| *count == first) {
            return if first == 0 { f.write_str("off") } else { write!(f, "{first}") };
        }
        // One entry for the equal values at the start, one for those at the end, one for each value in between that is not plain.
        let head = counts.iter().take_while(|count| **count == first).count();
        let tail = DIVISION_INTERVALS - counts.iter().rev().take_while(|count| **count == last).count();
        write!(f, "[{}:{first}", 1_u64 << (head - 1))?;
        let mut named = head - 1;
        for (at, count) in counts.iter().enumerate().take(tail).skip(head).filter(|(_, count)| **count != 0) {
            write!(f, ",{}:{count}", 1_u64 << at)?;
            named = at;
        }
        if last != 0 {
            // `>` begins after the last size in the list.
            if named + 1 < tail {
                write!(f, ",{}:{}", 1_u64 << (tail - 1), counts[tail - 1])?;
            }
            write!(f, ",>:{last}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_pytorch_reads() {
        let list: Divisions = "[2:4,8:8,>:16]".parse().unwrap_or_default();
        assert_eq!(list.0[..6], [4, 4, 0, 8, 16, 16]);
        assert_eq!(list.0[15], 16);
        assert_eq!("4".parse(), Ok(Divisions::uniform(4)));
        assert_eq!("off".parse(), Ok(Divisions::default()));
        // Larger than the last interval: the last.
        assert_eq!("[1048576:2]".parse(), Ok(Divisions::uniform(2)));
        // Without a size before it, `>` begins behind the smallest.
        let above: Divisions = "[>:4]".parse().unwrap_or_default();
        assert_eq!((above.0[0], above.0[1], above.0[15]), (0, 4, 4));
        // The first size fills up to it, also after `>`; a later entry counts.
        let later: Divisions = "[>:4,4:2,1:8]".parse().unwrap_or_default();
        assert_eq!(later.0[..5], [8, 2, 2, 4, 4]);
        assert_eq!("[1:2,>:4,8:4]".parse(), "[1:2,>:4]".parse::<Divisions>());
        assert_eq!(("[]".parse(), "[1:2,]".parse()), (Ok(Divisions::default()), "[1:2]".parse::<Divisions>()));
        for text in ["", "3", "[", "[1:3]", "[3:4]", "[,1:2]", "-1", "[1]"] {
            assert_eq!(text.parse::<Divisions>(), Err(ParseDivisionsError), "{text}");
        }
    }

    #[test]
    fn every_pattern_reads_back() {
        // Three values for the intervals: all patterns of the first eight, the others like the last of them.
        for pattern in (0..3_u32.pow(8)).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let mut out = Divisions::default();
            let mut rest = pattern;
            for at in 0..DIVISION_INTERVALS {
                if at < 8 {
                    out.0[at] = [0, 1, 8][(rest % 3) as usize];
                    rest /= 3;
                } else {
                    out.0[at] = out.0[7];
                }
            }
            assert_eq!(out.to_string().parse(), Ok(out), "{out}");
        }
    }
}
