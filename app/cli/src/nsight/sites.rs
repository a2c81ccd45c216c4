//! The line of a program that made a call: of its call stack, the innermost frame of the user's own code.

use crate::explain::frames;
use serde::Serialize;
use std::collections::BTreeMap;
use vramlab_nsight::{Attribution, Capture, python};

/// The calls of one name from one line of the program.
#[derive(Debug, Serialize)]
pub(crate) struct SiteRow {
    pub(crate) call: String,
    /// File, line and function in Python, or a symbol of native code.
    pub(crate) site: String,
    pub(crate) count: u64,
    pub(crate) total_ns: i64,
    /// Host time lost waiting for the device.
    pub(crate) blocked_ns: i64,
}

/// The line that a stack names; `None` if it has frames of CUDA and of the profiler only.
pub(crate) fn site(stack: &[String]) -> Option<String> {
    let frames: Vec<_> = stack.iter().filter_map(|frame| python::parts(frame)).collect();
    let own = frames.iter().find(|(function, file, _)| frames::is_program(function, file)).or(frames.first());
    if let Some((function, file, line)) = own {
        return Some(frames::text(function, file, *line));
    }
    stack.iter().find(|symbol| !is_cuda(symbol)).map(|symbol| frames::text(symbol, "", 0))
}

/// Whether a symbol has no name, or is one of CUDA's libraries or of the profiler.
fn is_cuda(symbol: &str) -> bool {
    let call = symbol.strip_prefix("cuda").or_else(|| symbol.strip_prefix("cu"));
    let unnamed = symbol.starts_with("0x") || symbol.starts_with('[') || symbol == "?";
    unnamed
        || call.is_some_and(|name| name.starts_with(|first: char| first.is_ascii_uppercase()))
        || ["libcuda", "cudart", "libcupti", "CUPTI", "ToolsInjection"].iter().any(|part| symbol.contains(part))
}

/// Calls by name and line, the longest waits first. Only calls whose stack was captured count.
pub(crate) fn rows(capture: &Capture, attribution: &Attribution) -> Vec<SiteRow> {
    let sites: Vec<Option<String>> = capture.stacks.iter().map(|stack| site(stack)).collect();
    let mut blocked = vec![0; capture.calls.len()];
    attribution.waits.iter().for_each(|wait| blocked[wait.call] = wait.blocked_ns);
    let mut rows: BTreeMap<(usize, &str), SiteRow> = BTreeMap::new();
    for (call, blocked_ns) in capture.calls.iter().zip(blocked) {
        let Some(site) = call.stack.and_then(|stack| sites[stack].as_deref()) else { continue };
        let row = rows.entry((call.name, site)).or_insert_with(|| SiteRow {
            call: capture.call_name(call).name.clone(),
            site: site.to_owned(),
            count: 0,
            total_ns: 0,
            blocked_ns: 0,
        });
        row.count += 1;
        row.total_ns += call.duration();
        row.blocked_ns += blocked_ns;
    }
    let mut rows: Vec<SiteRow> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.blocked_ns, row.total_ns)));
    rows
}

#[cfg(test)]
mod tests {
    use super::site;

    #[test]
    fn a_site_is_the_innermost_frame_of_the_users_code() {
        let stack = |frames: &[&str]| frames.iter().map(|&frame| frame.to_owned()).collect::<Vec<_>>();
        for (frames, expected) in [
            (&["cudaFree", "c10::free(void*)", "step (/home/me/proj/train.py:12)"][..], Some("proj/train.py:12 step")),
            (
                &[
                    "backward (/opt/venv/lib/python3.12/site-packages/torch/_tensor.py:648)",
                    "<module> (/home/me/train.py:40)",
                ],
                Some("me/train.py:40 <module>"),
            ),
            (&["empty (/x/site-packages/torch/cuda/memory.py:3)"], Some("cuda/memory.py:3 empty")),
            (&["0x7f0012", "libcudart.so.13!0x11", "cudaFree", "release(Matrix&)", "main"], Some("release")),
            (&["cuMemFree_v2", "[Unknown]"], None),
            (&[], None),
        ] {
            assert_eq!(site(&stack(frames)).as_deref(), expected, "{frames:?}");
        }
    }
}
