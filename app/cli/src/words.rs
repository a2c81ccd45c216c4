//! Figures in words, the same on every screen.

use vramlab::Bytes;

pub(crate) fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// A part in percent of the whole; a dash where there is none, or where the recording does not show all of it.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    // CAST: shares for display.
    if whole == 0 || part > whole { "-".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// The lines of Python that record what a replay needs: one before the work, one after it. Not PyTorch's default, `context="all"`:
/// it gathers frames on frees as well, where an exception that is being unwound through C++ is lost and the program ends.
pub(crate) const RECORD: [&str; 2] = [
    "torch.cuda.memory._record_memory_history(context=\"alloc\", max_entries=1000000, stacks=\"python\")",
    "torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")",
];

/// A count with its noun.
pub(crate) fn counted(count: u64, noun: &str) -> String {
    match (count, noun.strip_suffix("ry")) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{count} {stem}ries"),
        _ => format!("{count} {noun}s"),
    }
}
