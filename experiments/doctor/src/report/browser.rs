//! Shows a page in the browser.

use anyhow::{Context, Result};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use terminal::RuntimeFailure;
use terminal::quoted;

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
