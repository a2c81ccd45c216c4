//! `vramlab diff`: which lines hold more and which less, in one snapshot than in another or at one moment than at another.

use crate::explain::{Held, Line, Moment, held_at, place, when};
use crate::reading::ReadArgs;
use crate::recording::Recording;
use crate::words::size;
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::{Bar, Column, Page, Table};

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// One history or two: PyTorch snapshots and the other formats of `convert`, plain, .gz or .xz
    #[arg(required = true, num_args = 1..=2, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Moments to compare: start, peak (of use), end, numbers of events, or names of annotations, which begin there; of one file
    /// two, of two files one for both or one for each [default: the end of each, when the snapshots were taken]
    #[arg(long, num_args = 1..=2, value_names = ["A", "B"])]
    at: Vec<String>,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    top: u16,
    /// Every stack frame; otherwise those of libraries, of PyTorch, Python and C++ are folded
    #[arg(long)]
    frames: bool,
    /// Which GPU's memory is compared, where a history holds several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    /// Print one JSON object with everything
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    read: ReadArgs,
}

/// Two moments compared; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Diff {
    before: Side,
    after: Side,
    /// Whether any event of either has stack frames.
    frames: bool,
    /// By line, what changed most first; what did not change is left out.
    lines: Vec<LineChange>,
    /// By bytes asked for, what changed most first.
    sizes: Vec<SizeChange>,
}

/// One of the moments.
#[derive(Debug, Serialize)]
struct Side {
    trace: String,
    /// As `--at` names it.
    at: String,
    moment: Moment,
}

/// What became of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    /// Nothing of it was held before.
    New,
    /// More is held.
    Grew,
    /// Less is held.
    Shrank,
    /// Nothing of it is held any more.
    Gone,
}

/// What a line holds at both moments.
#[derive(Debug, Serialize)]
struct LineChange {
    line: String,
    /// The place in a library, or the node of autograd, that it went through.
    inside: Option<String>,
    /// Whether the blocks have no frames: the line is then the last one before them.
    nearby: bool,
    #[serde(flatten)]
    amounts: Amounts,
}

/// What blocks of one size hold at both moments.
#[derive(Debug, Serialize)]
struct SizeChange {
    requested_bytes: u64,
    #[serde(flatten)]
    amounts: Amounts,
}

/// How much was held, and is.
#[derive(Clone, Copy, Debug, Serialize)]
struct Amounts {
    change: Change,
    before_bytes: u64,
    after_bytes: u64,
    before_blocks: u64,
    after_blocks: u64,
}

impl Amounts {
    /// Of bytes and blocks; `None` where the bytes are the same.
    fn of((before_bytes, before_blocks): (u64, u64), (after_bytes, after_blocks): (u64, u64)) -> Option<Self> {
        let change = match (before_bytes, after_bytes) {
            (before, after) if before == after => return None,
            (0, _) => Change::New,
            (_, 0) => Change::Gone,
            (before, after) if before < after => Change::Grew,
            _ => Change::Shrank,
        };
        Some(Self { change, before_bytes, after_bytes, before_blocks, after_blocks })
    }

    fn bytes(&self) -> u64 {
        self.before_bytes.abs_diff(self.after_bytes)
    }

    /// What changed, the two amounts, and the blocks, for a table.
    fn cells(&self) -> [String; 5] {
        let word = match self.change {
            Change::New => "new",
            Change::Grew => "grew",
            Change::Shrank => "shrank",
            Change::Gone => "gone",
        };
        let blocks = format!("{} -> {}", self.before_blocks, self.after_blocks);
        [
            more(self.before_bytes, self.after_bytes),
            word.to_owned(),
            size(self.before_bytes),
            size(self.after_bytes),
            blocks,
        ]
    }
}

fn more(before: u64, after: u64) -> String {
    format!("{}{}", if after < before { "-" } else { "+" }, size(after.abs_diff(before)))
}

/// Compares, and prints it.
pub(crate) fn diff(args: &DiffArgs) -> Result<()> {
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let read = |file: &Path, moments: &[String]| -> Result<Vec<Held>> {
        bar.message(format!("reading {}", file.display()));
        held_at(&Recording::read(file, args.gpu, None, &args.read)?, args.frames, moments)
    };
    let (named, held) = match (&args.files[..], &args.at[..]) {
        ([file], [before, after]) => {
            let named = [(file, before.clone()), (file, after.clone())];
            (named, read(file, &args.at)?)
        }
        ([_], _) => bail!("name a second snapshot, or two moments of this one: --at start peak, --at 100 2000"),
        ([first, second], at) => {
            let end = "end".to_owned();
            let before = at.first().unwrap_or(&end);
            let named = [(first, before.clone()), (second, at.get(1).unwrap_or(before).clone())];
            let mut held = Vec::new();
            for (file, at) in &named {
                held.extend(read(file, std::slice::from_ref(at))?);
            }
            (named, held)
        }
        _ => bail!("diff wants one snapshot or two"),
    };
    bar.clear();
    let [before, after] = &held[..] else { bail!("diff wants two moments") };
    let found = compared(before, after, named.map(|(file, at)| (file.display().to_string(), at)));
    if args.json {
        return terminal::print_json(&found);
    }
    let mut page = Page::stdout();
    report(&found, usize::from(args.top), &mut page);
    page.print()
}

fn compared(before: &Held, after: &Held, named: [(String, String); 2]) -> Diff {
    let lines = changes(&before.lines, &after.lines);
    let sizes = changes(&before.sizes, &after.sizes);
    let frames = before.frames || after.frames;
    let [before, after] = [before, after].map(|held| held.moment.clone());
    let side = |(trace, at), moment| Side { trace, at, moment };
    let [first, second] = named;
    Diff {
        before: side(first, before),
        after: side(second, after),
        frames,
        lines: lines
            .into_iter()
            .map(|((line, inside, nearby), amounts): (Line, Amounts)| LineChange { line, inside, nearby, amounts })
            .collect(),
        sizes: sizes.into_iter().map(|(requested_bytes, amounts)| SizeChange { requested_bytes, amounts }).collect(),
    }
}

/// What differs, the largest first.
fn changes<K: Ord + Clone>(before: &BTreeMap<K, (u64, u64)>, after: &BTreeMap<K, (u64, u64)>) -> Vec<(K, Amounts)> {
    let of = |held: &BTreeMap<K, (u64, u64)>, key: &K| held.get(key).copied().unwrap_or_default();
    let gone = before.keys().filter(|key| !after.contains_key(key));
    let all = after.keys().chain(gone).cloned();
    let mut out: Vec<(K, Amounts)> =
        all.filter_map(|key| Amounts::of(of(before, &key), of(after, &key)).map(|amounts| (key, amounts))).collect();
    out.sort_by_cached_key(|(key, amounts)| (Reverse(amounts.bytes()), key.clone()));
    out
}

fn report(diff: &Diff, top: usize, page: &mut Page) {
    let (before, after) = (&diff.before, &diff.after);
    let active = (before.moment.active_bytes, after.moment.active_bytes);
    page.line(format!("{} in use: {} before, {} after", more(active.0, active.1), size(active.0), size(active.1)));
    for (name, side) in [("before", before), ("after", after)] {
        let reserved = size(side.moment.reserved_bytes);
        page.note(format!("{name}: {}{} ({}); {reserved} reserved", side.trace, said(&side.at), when(&side.moment)));
    }
    if active == (0, 0) {
        page.note("nothing is in use at either moment: --at peak compares the peaks");
        return;
    }
    if diff.sizes.is_empty() {
        let hint =
            if (&*before.at, &*after.at) == ("end", "end") { "; --at peak compares the peaks of use" } else { "" };
        page.note(format!("what is held is the same{hint}"));
        return;
    }
    let lines = diff.frames;
    let (what, count) = if lines { ("line", diff.lines.len()) } else { ("blocks of size", diff.sizes.len()) };
    page.title(format!("What changed, by {}", if lines { "line" } else { "size" }));
    let mut table = Table::new([
        Column::right("change"),
        Column::left(""),
        Column::right("before").priority(1),
        Column::right("after"),
        Column::right("blocks").priority(2),
        Column::text(what),
    ]);
    let line = |row: &LineChange| (row.amounts, place(&row.line, row.inside.as_deref(), row.nearby));
    let by_size = |row: &SizeChange| (row.amounts, size(row.requested_bytes));
    let rows: Vec<(Amounts, String)> =
        if lines { diff.lines.iter().map(line).collect() } else { diff.sizes.iter().map(by_size).collect() };
    for (amounts, name) in rows.iter().take(top) {
        let [change, word, before, after, blocks] = amounts.cells();
        table.row([change, word, before, after, blocks, name.clone()]);
    }
    page.table(&table);
    if count > top {
        let (mut up, mut down) = (0, 0);
        for (amounts, _) in &rows[top..] {
            if amounts.after_bytes > amounts.before_bytes { up += amounts.bytes() } else { down += amounts.bytes() }
        }
        page.note(format!("{} more: +{} and -{}; --top shows more", count - top, size(up), size(down)));
    }
    if !lines {
        page.note(
            "no stack frames were recorded, so lines are not known; record with \
             torch.cuda.memory._record_memory_history(context=\"alloc\", stacks=\"python\")",
        );
    }
}

/// A moment as `--at` names it, in a sentence that gives its number.
fn said(at: &str) -> String {
    match at {
        "start" => ", at the start".to_owned(),
        "end" => ", at the end".to_owned(),
        "peak" => ", at the peak of use".to_owned(),
        number if number.parse::<u64>().is_ok() => String::new(),
        name => format!(", when {name} begins"),
    }
}
