//! The page of a capture: the sentence, one picture, the table of calls. It works offline and runs no script.

use super::picture::{self, Window, escaped};
use super::screen;
use super::summary::Summary;
use anyhow::Result;
use std::fmt::Write;
use std::path::Path;
use terminal::duration;
use vramlab::output::OutputFile;
use vramlab_nsight::{Attribution, Capture};

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
    svg{width:100%;height:auto}table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}\
    th:first-child,td:first-child,th:last-child,td:last-child{text-align:left}.legend span{margin-right:1em;white-space:nowrap}\
    .legend i{display:inline-block;width:1em;height:.8em;margin-right:.3em}\
    .wait{background:repeating-linear-gradient(45deg,#000 0 1px,#fff 1px 3px);border:1px solid #000}\
    @media(prefers-color-scheme:dark){body{color:#ddd;background:#1c1c1c}th,td{border-color:#444}}";

/// Call stacks on the page, those with the longest waits first.
const MOST_STACKS: usize = 30;

/// Writes the page.
pub(crate) fn write(
    file: &Path,
    out: OutputFile,
    capture: &Capture,
    attribution: &Attribution,
    summary: &Summary,
) -> Result<()> {
    let window = Window::new(capture, attribution);
    let title = file.file_name().map_or_else(|| "capture".into(), |name| name.to_string_lossy());
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{0}</title><style>{STYLE}</style></head><body>\
         <h1>{0}</h1><p>{1}</p><h2>{2}, {3}</h2>{4}<p class=\"legend\">{5}</p><h2>Calls</h2>",
        escaped(&title),
        escaped(&screen::sentence(summary)),
        escaped(&window.title),
        duration(window.length().unsigned_abs()),
        picture::svg(capture, attribution, &window),
        picture::legend(),
    );
    let has_sites = !summary.tables.sites.is_empty();
    let at = if has_sites { "<th>at" } else { "" };
    let _ = write!(html, "<table><tr><th>call<th>calls<th>time<th>waiting<th>waited{at}<th>behind</tr>");
    for row in screen::rows(summary, usize::MAX, usize::MAX) {
        let _ = write!(
            html,
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}{}<td>{}</tr>",
            escaped(&row.call),
            row.calls,
            row.time,
            row.waiting,
            row.waited,
            if has_sites { format!("<td>{}", escaped(&row.at)) } else { String::new() },
            escaped(&row.behind)
        );
    }
    html += "</table>";
    if !summary.tables.stacks.is_empty() {
        html += "<h2>Call stacks</h2><table><tr><th>call<th>calls<th>time<th>waiting<th>stack</tr>";
        for row in summary.tables.stacks.iter().take(MOST_STACKS) {
            let [time, waiting] = [row.total_ns, row.blocked_ns].map(|ns| duration(ns.unsigned_abs()));
            let stack = screen::frames(&row.frames).join(" < ");
            let (call, stack) = (escaped(&row.call), escaped(&stack));
            let _ = write!(html, "<tr><td>{call}<td>{}<td>{time}<td>{waiting}<td>{stack}</tr>", row.count);
        }
        html += "</table>";
    }
    for note in &summary.notes {
        let _ = write!(html, "<p>Note: {}</p>", escaped(note));
    }
    html += "</body></html>\n";
    out.fill(html)?;
    Ok(())
}
