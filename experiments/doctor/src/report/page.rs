//! The page: one HTML file that holds everything and loads nothing else.
//!
//! What files and programs said goes into JSON, from which the page's script makes text and never markup. A content-security
//! policy allows this one script and this one style sheet by their hashes, and nothing else. What no policy stops is a connection
//! that a browser opens early, without sending anything (to the server of a frame that it then refuses, or for a `preconnect`
//! link), and a refresh that leaves the page: against these stands only that no markup is made of what files say.

use super::columns::Columns;
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use serde::Serialize;
use std::fmt::Write;
use vramlab::Bytes;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
/// One function, so that nothing of it is seen outside.
const SCRIPT: &str = concat!(
    "\"use strict\";(() => {\n",
    include_str!("data.js"),
    include_str!("raster.js"),
    include_str!("draw.js"),
    include_str!("segments.js"),
    include_str!("levels.js"),
    include_str!("words.js"),
    include_str!("panel.js"),
    include_str!("tables.js"),
    include_str!("answers.js"),
    include_str!("charts.js"),
    include_str!("runs.js"),
    include_str!("replays.js"),
    include_str!("main.js"),
    "})();\n"
);

/// Most bytes of a page. Maps under other allocators are left out where it would be larger.
pub(super) const LARGEST: usize = 15_000_000;
/// Room in it for everything but numbers.
const REST: usize = 500_000;

/// All numbers of the page, each group packed by itself.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    groups: Vec<String>,
    bytes: usize,
}

impl Numbers {
    /// Adds columns; their number in the page.
    pub(super) fn add(&mut self, columns: &Columns) -> Result<usize> {
        self.push(columns.text()?)
    }

    /// Adds columns that have room in the page.
    pub(super) fn add_if_small(&mut self, columns: &Columns) -> Result<Option<usize>> {
        let text = columns.text()?;
        if self.bytes + text.len() + REST > LARGEST {
            return Ok(None);
        }
        self.push(text).map(Some)
    }

    fn push(&mut self, text: String) -> Result<usize> {
        self.bytes += text.len();
        self.groups.push(text);
        Ok(self.groups.len() - 1)
    }
}

/// The whole document.
///
/// # Errors
/// A page that is larger than a browser opens well.
pub(super) fn document(title: &str, data: &impl Serialize, numbers: &Numbers) -> Result<String> {
    // Nothing in it can end the element that holds it.
    let json = serde_json::to_string(data).context("the page's texts")?.replace('<', "\\u003c");
    let mut groups = String::with_capacity(numbers.bytes + 64 * numbers.groups.len());
    for (number, text) in numbers.groups.iter().enumerate() {
        // Base64 has no character that HTML gives a meaning.
        writeln!(groups, "<script type=\"text/plain\" id=\"numbers-{number}\">{text}</script>")?;
    }
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    let page = filled(&[
        ("policy", &policy),
        ("title", &escaped(title)),
        ("style", STYLE),
        ("data", &json),
        ("numbers", &groups),
        ("script", SCRIPT),
    ]);
    anyhow::ensure!(
        page.len() <= LARGEST,
        "the page would have {}, and browsers open no more than {} well; give it fewer histories or shorter ones",
        Bytes(page.len() as u64),
        Bytes(LARGEST as u64)
    );
    Ok(page)
}

/// The template with its places filled. What fills one is not looked at again.
fn filled(values: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("{{") {
        out.push_str(before);
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        out.push_str(values.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value));
        rest = after;
    }
    out.push_str(rest);
    out
}

fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
        out
    })
}

fn hash(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(digest(&SHA256, text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_stays_text() {
        let hostile = "</script><script>alert(1)</script>\"'&{{script}}";
        let data = serde_json::json!({ "name": hostile });
        let page = document(hostile, &data, &Numbers::default()).unwrap();
        // The page's own: data and script.
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</script").count(), 2);
        assert_eq!(page.matches("alert(1)").count(), 2, "title and data");
        let json =
            page.split("type=\"application/json\" id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        let read: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(read["name"], hostile);
    }

    #[test]
    fn every_place_of_the_template_is_filled() {
        let page = document("a", &serde_json::json!({}), &Numbers::default()).unwrap();
        let places: Vec<&str> = TEMPLATE.split("{{").skip(1).filter_map(|rest| rest.split("}}").next()).collect();
        assert_eq!(places, ["policy", "title", "style", "data", "numbers", "script"]);
        assert!(page.contains(&hash(SCRIPT)) && page.contains(SCRIPT) && page.ends_with("</html>\n"));
    }
}
