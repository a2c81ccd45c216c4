//! Makes control characters visible, so that a file's name or contents cannot move the cursor, change the title or hide other text.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// Whether a terminal acts on this character instead of showing it: control characters (C0, DEL, C1), line and paragraph separators,
/// and marks that change the writing direction.
fn acts(character: char) -> bool {
    let turns =
        matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    character.is_control() || turns || matches!(character, '\u{2028}' | '\u{2029}')
}

/// Replaces the characters of one kind in `text`.
fn escaped(text: &str, kind: impl Fn(char) -> bool, write: impl Fn(&mut String, char) -> fmt::Result) -> Cow<'_, str> {
    if !text.contains(&kind) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        // Writing to a string cannot fail.
        let _ = if kind(character) { write(&mut out, character) } else { out.write_char(character) };
    }
    Cow::Owned(out)
}

/// `text` on one line, with control characters escaped: `\n`, `\x1b`, `\u{202e}`.
#[must_use]
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, acts, |out, character| match character {
        '\n' => out.write_str("\\n"),
        '\r' => out.write_str("\\r"),
        '\t' => out.write_str("\\t"),
        '\0'..='\u{ff}' => write!(out, "\\x{:02x}", u32::from(character)),
        _ => write!(out, "\\u{{{:x}}}", u32::from(character)),
    })
}

/// Units that are kept on the line of their number.
const UNITS: [&str; 13] = ["%", "B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "ms", "s", "x", "steps", "times"];
/// Replaces a space at which no line may break, until the text is printed.
const GLUE: char = '\u{a0}';

/// [`visible`] text in which a number and its unit are one word; [`unglued`] before it is printed.
pub(crate) fn glued(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (number, word) in visible(text).split(' ').enumerate() {
        let after_number = out.ends_with(|character: char| character.is_ascii_digit());
        let unit = word.trim_end_matches([',', '.', ';', ':', ')']);
        if number > 0 {
            out.push(if after_number && UNITS.contains(&unit) { GLUE } else { ' ' });
        }
        out += word;
    }
    out
}

/// The text with normal spaces, for printing.
pub(crate) fn unglued(text: &str) -> String {
    text.replace(GLUE, " ")
}

/// Makes each line of a text visible and keeps its line breaks.
pub(crate) fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}

/// Makes JSON visible without changing the document: control characters occur only in strings, where `\u001b` is equivalent. Line
/// breaks between values stay.
pub(crate) fn visible_json(text: &str) -> Cow<'_, str> {
    // All of these characters are in the basic multilingual plane.
    let write = |out: &mut String, character| write!(out, "\\u{:04x}", u32::from(character));
    escaped(text, |character| acts(character) && character != '\n', write)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, shown) in [
            ("a\u{1b}[31mred\u{1b}[0m", r"a\x1b[31mred\x1b[0m"),
            ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
            ("\0\u{7}\u{8}\u{7f}\u{85}\u{9b}2J", r"\x00\x07\x08\x7f\x85\x9b2J"),
            ("snapshot\u{202e}gnp.exe\u{2066}\u{2069}", r"snapshot\u{202e}gnp.exe\u{2066}\u{2069}"),
            ("a\u{2028}b\u{200f}", r"a\u{2028}b\u{200f}"),
        ] {
            assert_eq!(visible(text), shown);
            assert!(!visible(text).contains(acts));
        }
        for plain in ["", "plain", "größer, 2 × 3 → 6 µs", "日本語"] {
            assert!(matches!(visible(plain), Cow::Borrowed(same) if same == plain));
        }
        assert_eq!(visible_lines("a\u{1b}\nb"), "a\\x1b\nb");
    }

    #[test]
    fn every_control_character_is_recognised() {
        for code in (0..0x20).chain(0x7f..0xa0).chain(0x202a..0x202f).chain(0x2066..0x206a) {
            let character = char::from_u32(code).unwrap();
            assert!(!visible(&character.to_string()).contains(character), "U+{code:04x}");
        }
    }

    #[test]
    fn json_stays_the_same_document() {
        let value = serde_json::json!({"name": "a\u{1b}[2J\u{9b}\u{202e}\u{7f}\n", "list": [1, "b"]});
        for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            let shown = visible_json(&text);
            assert!(!shown.contains(|character| acts(character) && character != '\n'), "{shown}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
        }
    }
}
