//! Several histories, such as those of the ranks of a job: one table, what stands out first, then the worst in full.

use super::explanation::Explanation;
use super::{ExplainArgs, explanation, screen};
use crate::gpus::Gpus;
use crate::reading::{Unread, each};
use crate::words::size;
use anyhow::Result;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{Column, Page, Table};

/// What is kept of each history.
#[derive(Clone, Debug, Serialize)]
struct Rank {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    events: u64,
    peak_reserved_bytes: u64,
    /// Most bytes in blocks that are in use or wait for other streams.
    peak_active_bytes: u64,
    /// Reserved less active at the peak of reserved.
    unused_bytes: u64,
    /// Most bytes that waited for other streams at once.
    pending_peak_bytes: u64,
    /// Requests during which memory went back to the device.
    num_retries: u64,
    refused: u64,
    /// How far the reserved peak is from that of the middle rank, in parts of that.
    off: f64,
    /// The line that holds most at the peak of active.
    line: Option<String>,
    /// What is missing of a file that was cut short.
    cut: Option<String>,
}

#[derive(Debug, Serialize)]
struct Ranks {
    ranks: Vec<Rank>,
    unread: Vec<Unread>,
    /// The first of the histories, in full.
    worst: Explanation,
}

impl Rank {
    fn of(found: &Explanation) -> Self {
        let peak = &found.peak_reserved;
        Self {
            trace: found.trace.clone(),
            gpus: found.gpus.clone(),
            events: found.events,
            peak_reserved_bytes: peak.reserved_bytes,
            peak_active_bytes: found.peak_active.active_bytes,
            unused_bytes: peak.reserved_bytes.saturating_sub(peak.active_bytes),
            pending_peak_bytes: found.reserved.pending.peak_bytes,
            num_retries: found.num_retries,
            refused: found.refused,
            off: 0.0,
            line: found.who.first().and_then(|who| who.lines.first()).map(|share| share.line.clone()),
            cut: found.cut.clone(),
        }
    }

    /// The order of the rows: first what ran out of memory, then what retried, is far from the others, and holds most.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let counts = |rank: &Self| (rank.refused, rank.num_retries);
        counts(other)
            .cmp(&counts(self))
            .then(other.off.abs().total_cmp(&self.off.abs()))
            .then(other.peak_reserved_bytes.cmp(&self.peak_reserved_bytes))
            .then(self.trace.cmp(&other.trace))
    }
}

/// Explains each history and prints one table, and the first of it in full.
pub(super) fn ranks(args: &ExplainArgs, files: &[PathBuf]) -> Result<()> {
    let (mut ranks, unread) = each("explain", files, |file| Ok(Rank::of(&explanation(&args.how, file)?)))?;
    compare(&mut ranks);
    // The first is read once more: of hundreds only a row each is kept.
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

/// Says how far each is from the middle, and puts what stands out first.
fn compare(ranks: &mut [Rank]) {
    let mut peaks: Vec<u64> = ranks.iter().map(|rank| rank.peak_reserved_bytes).collect();
    peaks.sort_unstable();
    // CAST: bytes far below 2^53.
    let middle = peaks[(peaks.len() - 1) / 2] as f64;
    for rank in ranks.iter_mut() {
        let off = (rank.peak_reserved_bytes as f64 - middle) / middle;
        rank.off = if middle > 0.0 { off } else { 0.0 };
    }
    ranks.sort_by(Rank::order);
}

fn table(ranks: &[Rank], args: &ExplainArgs, page: &mut Page) {
    page.line(format!("{} histories, what stands out first", ranks.len()));
    let mut table = Table::new([
        Column::left("history"),
        Column::right("reserved"),
        Column::right("vs median").priority(1),
        Column::right("active"),
        Column::right("unused").priority(2),
        Column::right("waits at most").priority(3),
        Column::right("retries"),
        Column::right("refused"),
    ]);
    let names = short_names(ranks);
    let shown = usize::from(args.top).max(8);
    for (rank, name) in ranks.iter().zip(&names).take(shown) {
        table.row([
            name.clone(),
            size(rank.peak_reserved_bytes),
            format!("{:+.1} %", 100.0 * rank.off),
            size(rank.peak_active_bytes),
            size(rank.unused_bytes),
            size(rank.pending_peak_bytes),
            rank.num_retries.to_string(),
            rank.refused.to_string(),
        ]);
    }
    page.table(&table);
    if ranks.len() > shown {
        let (more, rest) = (ranks.len() - shown, ranks.iter().skip(shown).map(|rank| 100.0 * rank.off.abs()));
        let off = rest.fold(0.0, f64::max);
        page.note(format!("{more} more are within {off:.1} % of the median, or like these; --top shows more"));
    }
    page.title(format!("In full: {}", names[0]));
}

/// The files' names without what all of them begin with.
fn short_names(ranks: &[Rank]) -> Vec<String> {
    let folder = |rank: &Rank| rank.trace.rfind('/').map_or(0, |at| at + 1);
    let common = ranks.iter().all(|rank| rank.trace[..folder(rank)] == ranks[0].trace[..folder(&ranks[0])]);
    ranks.iter().map(|rank| rank.gpus.named(&rank.trace[if common { folder(rank) } else { 0 }..])).collect()
}
