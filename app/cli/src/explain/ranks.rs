//! Several recordings, such as the ranks of a job: one table, outliers first, then the first recording in full.

use super::explanation::Explanation;
use super::screen::size_if_known;
use super::{ExplainArgs, explanation, screen};
use crate::gpus::Gpus;
use crate::reading::{Unread, each};
use crate::words::size;
use anyhow::Result;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{Column, Page, Table};

/// Summary of one recording.
#[derive(Clone, Debug, Serialize)]
struct Rank {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    events: u64,
    /// `null` if unknown.
    peak_reserved_bytes: Option<u64>,
    /// Peak active bytes, including pending frees.
    peak_active_bytes: u64,
    /// Reserved less active bytes at the reserved peak; `null` if unknown.
    unused_bytes: Option<u64>,
    /// Peak pending bytes.
    pending_peak_bytes: u64,
    /// Requests during which PyTorch released cached memory.
    num_retries: u64,
    refused: u64,
    /// Relative difference between the reserved peak and the median rank's; `null` if unknown.
    off: Option<f64>,
    /// The line that holds the most memory at the active peak.
    line: Option<String>,
    /// Where the file was truncated, and what is missing.
    cut: Option<String>,
}

#[derive(Debug, Serialize)]
struct Ranks {
    ranks: Vec<Rank>,
    unread: Vec<Unread>,
    /// The first recording of the table, in full.
    worst: Explanation,
}

impl Rank {
    fn new(explanation: &Explanation) -> Self {
        let peak = &explanation.peak_reserved;
        Self {
            trace: explanation.trace.clone(),
            gpus: explanation.gpus.clone(),
            events: explanation.events,
            peak_reserved_bytes: peak.reserved_bytes,
            peak_active_bytes: explanation.peak_active.active_bytes,
            unused_bytes: peak.reserved_bytes.map(|reserved| reserved.saturating_sub(peak.active_bytes)),
            pending_peak_bytes: explanation.reserved.pending.peak_bytes,
            num_retries: explanation.num_retries,
            refused: explanation.refused,
            off: None,
            line: explanation.who.first().and_then(|who| who.lines.first()).map(|share| share.line.clone()),
            cut: explanation.cut.clone(),
        }
    }

    /// Distance from the median; 0 if unknown.
    fn distance(&self) -> f64 {
        self.off.map_or(0.0, f64::abs)
    }

    /// The order of the rows: refused requests, retries, distance from the median, reserved peak.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let counts = |rank: &Self| (rank.refused, rank.num_retries);
        counts(other)
            .cmp(&counts(self))
            .then(other.distance().total_cmp(&self.distance()))
            .then(other.peak_reserved_bytes.cmp(&self.peak_reserved_bytes))
            .then(self.trace.cmp(&other.trace))
    }
}

/// Explains each recording, prints one table, and its first recording in full.
pub(super) fn ranks(args: &ExplainArgs, files: &[PathBuf]) -> Result<()> {
    let (mut ranks, unread) = each("explain", files, |file| Ok(Rank::new(&explanation(&args.how, file)?)))?;
    compare(&mut ranks);
    // The first is read again: of hundreds of files only one row each is kept in memory.
    let worst = explanation(&args.how, ranks[0].trace.as_ref())?;
    if args.json {
        return terminal::print_json(&Ranks { ranks, unread, worst });
    }
    let mut page = Page::stdout();
    table(&ranks, args, &mut page);
    screen::report(&worst, args, &mut page);
    screen::end(&worst, &mut page);
    page.print()
}

/// Computes the distance of each rank from the median, and sorts outliers first.
fn compare(ranks: &mut [Rank]) {
    let mut peaks: Vec<u64> = ranks.iter().filter_map(|rank| rank.peak_reserved_bytes).collect();
    peaks.sort_unstable();
    // CAST: bytes far below 2^53.
    let median = peaks.get(peaks.len().saturating_sub(1) / 2).map_or(0.0, |median| *median as f64);
    for rank in ranks.iter_mut() {
        let off = |peak: u64| if median > 0.0 { (peak as f64 - median) / median } else { 0.0 };
        rank.off = rank.peak_reserved_bytes.map(off);
    }
    ranks.sort_by(Rank::order);
}

fn table(ranks: &[Rank], args: &ExplainArgs, page: &mut Page) {
    page.line(format!("{} recordings, outliers first", ranks.len()));
    let mut table = Table::new([
        Column::left("recording"),
        Column::right("reserved"),
        Column::right("vs median").priority(1),
        Column::right("active"),
        Column::right("unused").priority(2),
        Column::right("peak pending").priority(3),
        Column::right("retries"),
        Column::right("refused"),
    ]);
    let names = short_names(ranks);
    let shown = usize::from(args.top).max(8);
    for (rank, name) in ranks.iter().zip(&names).take(shown) {
        table.row([
            name.clone(),
            size_if_known(rank.peak_reserved_bytes),
            rank.off.map_or_else(|| "-".to_owned(), difference),
            size(rank.peak_active_bytes),
            size_if_known(rank.unused_bytes),
            size(rank.pending_peak_bytes),
            rank.num_retries.to_string(),
            rank.refused.to_string(),
        ]);
    }
    page.table(&table);
    if ranks.len() > shown {
        let (more, others) = (ranks.len() - shown, ranks.iter().skip(shown).map(|rank| 100.0 * rank.distance()));
        let off = others.fold(0.0, f64::max);
        page.note(format!("{more} more recordings, at most {off:.1} % from the median; --top N shows more rows"));
    }
    page.title(format!("In full: {}", names[0]));
}

/// A relative difference: in percent, or as a multiple from ten times on.
fn difference(off: f64) -> String {
    if off >= 9.0 { format!("{:.0} times", off + 1.0) } else { format!("{:+.1} %", 100.0 * off) }
}

/// The files' names without their common directory.
fn short_names(ranks: &[Rank]) -> Vec<String> {
    let directory = |rank: &Rank| rank.trace.rfind('/').map_or(0, |at| at + 1);
    let common = ranks.iter().all(|rank| rank.trace[..directory(rank)] == ranks[0].trace[..directory(&ranks[0])]);
    ranks.iter().map(|rank| rank.gpus.named(&rank.trace[if common { directory(rank) } else { 0 }..])).collect()
}
