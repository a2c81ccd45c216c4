//! The page: one self-contained HTML file.
//!
//! Text from files and programs is embedded as JSON; the page's script renders it as text, never as markup. A content-security
//! policy allows only this script and this style sheet, by their hashes. No policy prevents a browser from opening a connection
//! early without sending data (to the server of a refused frame, or for a `preconnect` link), or a refresh that leaves the page;
//! the only protection against these is that text from files never becomes markup.

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
/// The script, as one function so that it defines no global names.
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

/// Maximum page size in bytes. Maps under other allocators are omitted if they would exceed it.
pub(super) const LARGEST: usize = 15_000_000;
/// Bytes of it reserved for all content except numbers.
const WITHOUT_NUMBERS: usize = 500_000;

/// The numbers of the page, in packed groups.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    groups: Vec<String>,
    bytes: usize,
}

impl Numbers {
    /// Adds columns and returns their group number.
    pub(super) fn add(&mut self, columns: &Columns) -> Result<usize> {
        self.push(columns.text()?)
    }

    /// Adds columns if they fit into the page.
    pub(super) fn add_if_small(&mut self, columns: &Columns) -> Result<Option<usize>> {
        let text = columns.text()?;
        if self.bytes + text.len() + WITHOUT_NUMBERS > LARGEST {
            return Ok(None);
        }
        self.push(text).map(Some)
    }

    /// Adds nothing, and checks that these columns would leave the page small enough.
    ///
    /// # Errors
    /// The page would be larger than browsers handle well.
    pub(super) fn check(&self, columns: &Columns) -> Result<()> {
        check_size(self.bytes + columns.text()?.len())
    }

    fn push(&mut self, text: String) -> Result<usize> {
        self.bytes += text.len();
        self.groups.push(text);
        Ok(self.groups.len() - 1)
    }
}

/// The complete document.
///
/// # Errors
/// The page would be larger than browsers handle well.
pub(super) fn document(title: &str, data: &impl Serialize, numbers: &Numbers) -> Result<String> {
    // The escape keeps text from closing the script element.
    let json = serde_json::to_string(data).context("the page's texts")?.replace('<', "\\u003c");
    let mut groups = String::with_capacity(numbers.bytes + 64 * numbers.groups.len());
    for (number, text) in numbers.groups.iter().enumerate() {
        // Base64 contains no character with a meaning in HTML.
        writeln!(groups, "<script type=\"text/plain\" id=\"numbers-{number}\">{text}</script>")?;
    }
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    let page = fill_template(&[
        ("policy", &policy),
        ("title", &escaped(title)),
        ("style", STYLE),
        ("data", &json),
        ("numbers", &groups),
        ("script", SCRIPT),
    ]);
    check_size(page.len())?;
    Ok(page)
}

/// Checks the size of a page, or of the part that is known.
fn check_size(bytes: usize) -> Result<()> {
    anyhow::ensure!(
        bytes <= LARGEST,
        "the page would have {} or more, and browsers handle at most {} well; use fewer or shorter recordings",
        Bytes(bytes as u64),
        Bytes(LARGEST as u64)
    );
    Ok(())
}

/// Fills the template. Inserted values are not scanned again.
fn fill_template(values: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let mut remainder = TEMPLATE;
    while let Some((before, after)) = remainder.split_once("{{") {
        out.push_str(before);
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        out.push_str(values.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value));
        remainder = after;
    }
    out.push_str(remainder);
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

/// A browser that still runs after this time shows the page; some stay in the foreground until closed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two checks for its exit.
const PAUSE: Duration = Duration::from_millis(20);

/// Opens a page in the first browser of `BROWSER` that starts, else in the desktop's.
///
/// # Errors
/// No browser starts; the error lists those tried.
pub(super) fn open(page: &Path) -> Result<()> {
    // A running browser may have another working directory.
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

/// The commands to try, in order. `BROWSER` lists commands as for `xdg-open` and Python: `%s` stands for the page, which is
/// otherwise the last argument.
fn commands(named: &str, page: &Path) -> Vec<Vec<String>> {
    let page = page.to_string_lossy().into_owned();
    let separator = if cfg!(windows) { ';' } else { ':' };
    let with_page = |command: &str| -> Vec<String> {
        let mut words: Vec<String> = command.split_whitespace().map(|word| word.replace("%s", &page)).collect();
        if !command.contains("%s") {
            words.push(page.clone());
        }
        words
    };
    let mut out: Vec<Vec<String>> =
        named.split(separator).filter(|command| !command.trim().is_empty()).map(with_page).collect();
    out.push(with_page(match std::env::consts::OS {
        "macos" => "open",
        "windows" => "explorer",
        _ => "xdg-open",
    }));
    out
}

/// Whether the command runs, or exited successfully.
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
    fn text_of_a_file_does_not_become_markup() {
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
    fn every_placeholder_of_the_template_is_filled() {
        let page = document("a", &serde_json::json!({}), &Numbers::default()).unwrap();
        let places: Vec<&str> = TEMPLATE.split("{{").skip(1).filter_map(|rest| rest.split("}}").next()).collect();
        assert_eq!(places, ["policy", "title", "style", "data", "numbers", "script"]);
        assert!(page.contains(&hash(SCRIPT)) && page.contains(SCRIPT) && page.ends_with("</html>\n"));
    }

    #[test]
    fn numbers_that_fill_the_page_are_refused_before_more_are_made() {
        let columns = Columns::default();
        let text = columns.text().unwrap().len();
        let mut numbers = Numbers { bytes: LARGEST - text, ..Numbers::default() };
        numbers.check(&columns).unwrap();
        numbers.bytes += 1;
        let error = numbers.check(&columns).unwrap_err().to_string();
        assert!(error.starts_with("the page would have ") && error.contains("shorter recordings"), "{error}");
    }

    /// The words between two texts of the script.
    fn between(begin: &str, end: &str) -> &'static str {
        SCRIPT.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).unwrap().0
    }

    #[test]
    fn legends_name_every_kind_of_bar_and_of_mark() {
        let styled: Vec<&str> =
            STYLE.split("\n.bar i.").skip(1).filter_map(|rest| rest.split([' ', '{']).next()).collect();
        assert!(styled.contains(&"failed") && styled.len() > 2, "{styled:?}");
        let words = between("const BAR_KINDS = {", "}");
        for kind in styled {
            assert!(words.contains(&format!("{kind}: \"")), "bar {kind}: {words}");
        }
        // Every table with kinds of bars has the legend.
        for (kind, _) in SCRIPT.match_indices("\"failed\" :").chain(SCRIPT.match_indices("? \"pinned\" :")) {
            assert!(
                SCRIPT[kind..].chars().take(1500).collect::<String>().contains("barLegend("),
                "{}",
                &SCRIPT[kind..kind + 80]
            );
        }
        let words = between("const MARK_KEYS = [", "];");
        let made = [include_str!("timeline.rs"), include_str!("source.rs")].concat();
        let kinds: Vec<&str> = made.split("kind: \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(kinds.contains(&"annotation"), "{kinds:?}");
        for kind in kinds {
            assert!(words.contains(&format!("[\"{kind}\", ")), "mark {kind}: {words}");
        }
    }

    #[cfg(not(windows))]
    #[test]
    fn browsers_are_tried_in_the_order_of_their_list() {
        let words = |named: &str| -> Vec<String> {
            let commands = commands(named, Path::new("/a b.html"));
            commands[..commands.len() - 1].iter().map(|words| words.join("|")).collect()
        };
        assert_eq!(words("firefox --new-tab %s:: w3m "), ["firefox|--new-tab|/a b.html", "w3m|/a b.html"]);
        assert!(words("").is_empty());
        let desktop = commands("", Path::new("/a")).pop().unwrap();
        assert_eq!(desktop[1..], ["/a"]);
    }
}
