//! The page: one HTML file that holds everything and loads nothing else.
//!
//! What files and programs said goes into JSON, from which the page's script makes text and never markup. A content-security
//! policy allows this one script and this one style sheet by their hashes, and nothing else. What no policy stops is a connection
//! that a browser opens early, without sending anything (to the server of a frame that it then refuses, or for a `preconnect`
//! link), and a refresh that leaves the page: against these stands only that no markup is made of what files say.

use super::data::Columns;
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use terminal::{RuntimeFailure, quoted};
use vramlab::Bytes;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
/// One function, so that nothing of it is seen outside.
const SCRIPT: &str = concat!(
    "\"use strict\";(() => {\n",
    include_str!("data.js"),
    include_str!("draw.js"),
    include_str!("segments.js"),
    include_str!("levels.js"),
    include_str!("words.js"),
    include_str!("panel.js"),
    include_str!("answers.js"),
    include_str!("runs.js"),
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

/// A browser that still runs by then shows the page: some stay in the foreground until they are closed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at whether it has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Shows a page: in the first browser of `BROWSER` that starts, else in the desktop's own.
///
/// # Errors
/// Where none starts, with what was tried.
pub(super) fn open(page: &Path) -> Result<()> {
    // A browser that runs already has another working directory.
    let page = std::path::absolute(page).with_context(|| page.display().to_string())?;
    let named = std::env::var("BROWSER").unwrap_or_default();
    let mut tried = Vec::new();
    for words in commands(&named, &page) {
        if starts(&words) {
            return Ok(());
        }
        tried.push(words.first().cloned().unwrap_or_default());
    }
    let page = quoted(&page.to_string_lossy());
    let why = format!("no browser could be started (tried {}); the page is written: {page}", tried.join(", "));
    Err(RuntimeFailure::new(why).into())
}

/// What to run, in this order. `BROWSER` lists commands, as `xdg-open` and Python read it: `%s` stands for the page, which
/// otherwise comes last.
fn commands(named: &str, page: &Path) -> Vec<Vec<String>> {
    let page = page.to_string_lossy().into_owned();
    let separator = if cfg!(windows) { ';' } else { ':' };
    let own = |command: &str| -> Vec<String> {
        let mut words: Vec<String> = command.split_whitespace().map(|word| word.replace("%s", &page)).collect();
        if !command.contains("%s") {
            words.push(page.clone());
        }
        words
    };
    let mut out: Vec<Vec<String>> =
        named.split(separator).filter(|command| !command.trim().is_empty()).map(own).collect();
    out.push(own(match std::env::consts::OS {
        "macos" => "open",
        "windows" => "explorer",
        _ => "xdg-open",
    }));
    out
}

/// Whether it runs, or has ended well.
fn starts(words: &[String]) -> bool {
    let Some((program, arguments)) = words.split_first() else { return false };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut browser) = command.spawn() else { return false };
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        match browser.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) => std::thread::sleep(PAUSE),
            Err(_) => return false,
        }
    }
    true
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

    #[cfg(not(windows))]
    #[test]
    fn browsers_are_tried_in_the_order_of_their_list() {
        let words = |named: &str| -> Vec<String> {
            let found = commands(named, Path::new("/a b.html"));
            found[..found.len() - 1].iter().map(|words| words.join("|")).collect()
        };
        assert_eq!(words("firefox --new-tab %s:: w3m "), ["firefox|--new-tab|/a b.html", "w3m|/a b.html"]);
        assert!(words("").is_empty());
        let own = commands("", Path::new("/a")).pop().unwrap();
        assert_eq!(own[1..], ["/a"]);
    }
}
