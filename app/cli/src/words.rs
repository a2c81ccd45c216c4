//! Sizes, shares and counts as text, formatted alike on every screen.

use vramlab::Bytes;

pub(crate) fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// A share in percent; a dash if the total is 0 or, in an incomplete recording, smaller than the part.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    // CAST: shares for display.
    if whole == 0 || part > whole { "-".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// The Python lines that record a replayable snapshot: one before the work, one after it. They do not use PyTorch's default,
/// `context="all"`: it gathers frames on frees too, which loses an exception that is unwinding through C++ and ends the program.
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

/// A count with thousands separators: `4,075`.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The note of a recording without stack frames. Other programs' logs have none, and their authors have no use for PyTorch's
/// functions.
pub(crate) fn no_frames(of_pytorch: bool) -> &'static str {
    if of_pytorch {
        "the recording has no stack frames; to see lines, record with \
         torch.cuda.memory._record_memory_history(context=\"alloc\", stacks=\"python\")"
    } else {
        "the recording has no stack frames, so lines are unknown"
    }
}
