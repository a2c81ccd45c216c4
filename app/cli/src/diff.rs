//! `vramlab diff`: compares the memory that each line holds in two snapshots, or at two moments of one.

use crate::explain::{Held, Line, Moment, held_at, place, when};
use crate::reading::ReadArgs;
use crate::recording::Recording;
use crate::words::{no_frames, size};
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::{Bar, Column, Page, Table};

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// One or two recordings: PyTorch snapshots or other formats that `convert` reads; plain, .gz or .xz
    #[arg(required = true, num_args = 1..=2, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Moments to compare: start, peak (of active memory), end, an event number or the start of a named annotation. Give two for
    /// one file; for two files one for both, or one each [default: end]
    #[arg(long, num_args = 1..=2, value_names = ["A", "B"])]
    at: Vec<String>,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    top: u16,
    /// Show every stack frame [default: fold frames of libraries, PyTorch, Python and C++]
    #[arg(long)]
    frames: bool,
    /// Compare the memory of this GPU [default: one that ran out of memory, else the one with the highest reserved peak]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    /// Print one JSON object with all results
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    read: ReadArgs,
}

/// Comparison of two moments; `analysis/schema.md` describes the keys.
#[derive(Debug, Serialize)]
struct Diff {
    before: Side,
    after: Side,
    /// Whether any event of either recording has stack frames.
    frames: bool,
    #[serde(skip)]
    of_pytorch: bool,
    /// Changes by line, the largest first.
    lines: Vec<LineChange>,
    /// Changes by requested size, the largest first.
    sizes: Vec<SizeChange>,
}

/// One of the two moments.
#[derive(Debug, Serialize)]
struct Side {
    trace: String,
    /// The moment as given to `--at`.
    at: String,
    moment: Moment,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    /// Held no bytes before.
    New,
    /// Holds more bytes.
    Grew,
    /// Holds fewer bytes.
    Shrank,
    /// Holds no bytes any more.
    Gone,
}

/// Memory that a line holds at both moments.
#[derive(Debug, Serialize)]
struct LineChange {
    line: String,
    /// The library function or autograd node that the line called.
    inside: Option<String>,
    /// Whether the blocks have no frames; `line` is then the last recorded line before them.
    nearby: bool,
    #[serde(flatten)]
    amounts: Amounts,
}

/// Memory in blocks of one size at both moments.
#[derive(Debug, Serialize)]
struct SizeChange {
    requested_bytes: u64,
    #[serde(flatten)]
    amounts: Amounts,
}

/// Bytes and blocks at both moments.
#[derive(Clone, Copy, Debug, Serialize)]
struct Amounts {
    change: Change,
    before_bytes: u64,
    after_bytes: u64,
    before_blocks: u64,
    after_blocks: u64,
}

impl Amounts {
    /// From bytes and blocks; `None` if the bytes are equal.
    fn new((before_bytes, before_blocks): (u64, u64), (after_bytes, after_blocks): (u64, u64)) -> Option<Self> {
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

    /// The cells of a table row: change, kind, both amounts, blocks.
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

/// Compares two moments and prints the result.
pub(crate) fn diff(args: &DiffArgs) -> Result<()> {
    if matches!(&args.files[..], [first, second] if first == Path::new("-") && second == first) {
        bail!(
            "both recordings are the standard input; name a file for one, or two moments of one: diff - --at start peak"
        )
    }
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let read = |file: &Path, moments: &[String]| -> Result<Vec<Held>> {
        bar.message(format!("reading {}", file.display()));
        held_at(&Recording::read(file, args.gpu, None, &args.read)?, args.frames, moments)
    };
    let (names, holdings) = match (&args.files[..], &args.at[..]) {
        ([file], [before, after]) => {
            let names = [(file, before.clone()), (file, after.clone())];
            (names, read(file, &args.at)?)
        }
        ([_], _) => {
            bail!("diff compares two moments; name a second snapshot, or two moments: --at start peak, --at 100 2000")
        }
        ([first, second], at) => {
            let end = "end".to_owned();
            let before = at.first().unwrap_or(&end);
            let names = [(first, before.clone()), (second, at.get(1).unwrap_or(before).clone())];
            let mut holdings = Vec::new();
            for (file, at) in &names {
                holdings.extend(read(file, std::slice::from_ref(at))?);
            }
            (names, holdings)
        }
        _ => bail!("diff takes one or two snapshots"),
    };
    bar.clear();
    let [before, after] = &holdings[..] else { bail!("diff takes two moments") };
    let diff = compare(before, after, names.map(|(file, at)| (file.display().to_string(), at)));
    if args.json {
        return terminal::print_json(&diff);
    }
    let mut page = Page::stdout();
    report(&diff, usize::from(args.top), &mut page);
    page.print()
}

fn compare(before: &Held, after: &Held, names: [(String, String); 2]) -> Diff {
    let lines = changes(&before.lines, &after.lines);
    let sizes = changes(&before.sizes, &after.sizes);
    let frames = before.frames || after.frames;
    let of_pytorch = before.of_pytorch && after.of_pytorch;
    let [before, after] = [before, after].map(|side| side.moment.clone());
    let side = |(trace, at), moment| Side { trace, at, moment };
    let [first, second] = names;
    Diff {
        before: side(first, before),
        after: side(second, after),
        frames,
        of_pytorch,
        lines: lines
            .into_iter()
            .map(|((line, inside, nearby), amounts): (Line, Amounts)| LineChange { line, inside, nearby, amounts })
            .collect(),
        sizes: sizes.into_iter().map(|(requested_bytes, amounts)| SizeChange { requested_bytes, amounts }).collect(),
    }
}

/// The changes, the largest first.
fn changes<K: Ord + Clone>(before: &BTreeMap<K, (u64, u64)>, after: &BTreeMap<K, (u64, u64)>) -> Vec<(K, Amounts)> {
    let amount = |side: &BTreeMap<K, (u64, u64)>, key: &K| side.get(key).copied().unwrap_or_default();
    let removed = before.keys().filter(|key| !after.contains_key(key));
    let all = after.keys().chain(removed).cloned();
    let mut out: Vec<(K, Amounts)> =
        all.filter_map(|key| Some((key.clone(), Amounts::new(amount(before, &key), amount(after, &key))?))).collect();
    out.sort_by_cached_key(|(key, amounts)| (Reverse(amounts.bytes()), key.clone()));
    out
}

fn report(diff: &Diff, top: usize, page: &mut Page) {
    let (before, after) = (&diff.before, &diff.after);
    let active = (before.moment.active_bytes, after.moment.active_bytes);
    page.line(format!(
        "active memory {}: {} before, {} after",
        more(active.0, active.1),
        size(active.0),
        size(active.1)
    ));
    for (name, side) in [("before", before), ("after", after)] {
        let reserved = side.moment.reserved_bytes.map_or_else(|| "unknown".to_owned(), size);
        let at = moment_words(&side.at);
        page.note(format!("{name}: {}{at} ({}); reserved {reserved}", side.trace, when(&side.moment)));
    }
    if active == (0, 0) {
        page.note("no memory is active at either moment; compare the peaks with --at peak");
        return;
    }
    if diff.sizes.is_empty() {
        let hint = if (&*before.at, &*after.at) == ("end", "end") { "; compare the peaks with --at peak" } else { "" };
        page.note(format!("no difference: every requested size holds the same bytes at both moments{hint}"));
        return;
    }
    let lines = diff.frames;
    let (heading, count) = if lines { ("line", diff.lines.len()) } else { ("requested size", diff.sizes.len()) };
    page.title(format!("Changes by {}", if lines { "line" } else { "requested size" }));
    let mut table = Table::new([
        Column::right("change"),
        Column::left(""),
        Column::right("before").priority(1),
        Column::right("after"),
        Column::right("blocks").priority(2),
        Column::text(heading),
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
        page.note(no_frames(diff.of_pytorch));
    }
}

/// A moment given to `--at`, for a sentence that also contains its event number.
fn moment_words(at: &str) -> String {
    match at {
        "start" => ", at the start".to_owned(),
        "end" => ", at the end".to_owned(),
        "peak" => ", at the active peak".to_owned(),
        number if number.parse::<u64>().is_ok() => String::new(),
        name => format!(", at the start of {name}"),
    }
}
