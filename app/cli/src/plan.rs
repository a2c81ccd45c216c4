//! `vramlab plan`: where the blocks of a recorded history are placed so that it needs little memory.

use crate::gpus::chosen;
use crate::history::{Trace, load};
use crate::output;
use crate::reading::ReadArgs;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{Bar, Page, command, quoted};
use vramlab::Bytes;
use vramlab::histories::plan::{CrossStream, PlanSettings, SearchEnd, misses, plan as place, stitched};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Recording: a PyTorch snapshot or another format of `convert`, plain, .gz or .xz
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Output file for `--alloc plan:file=FILE`
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Reuse another stream's memory only where the recording shows that its work has completed, so that no stream waits
    #[arg(long)]
    known_order: bool,
    /// Maximum number of search steps; thirty million take about a second, the number that other commands make
    #[arg(long, value_name = "N", default_value_t = PlanSettings::MOST_STEPS)]
    steps: u64,
    /// Seed of the search
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Memory limit during recording, to distinguish retries from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// GPU to plan for, if the recording contains several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The offline placement; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    /// Placed blocks.
    allocations: usize,
    /// Peak active bytes.
    lower_bound_bytes: u64,
    /// Size of the placement.
    plan_bytes: u64,
    /// Proved lower bound for placements that keep each block contiguous: `lower_bound_bytes` or more. If it equals `plan_bytes`,
    /// the placement is optimal.
    least_bytes: u64,
    /// `plan_bytes / lower_bound_bytes - 1`.
    gap: f64,
    /// Peak reserved by an allocator that builds each block above 1 MiB from any free 2 MiB pages of its stream (an ideal GMLake);
    /// smaller blocks use separate pages, by best fit.
    stitched_bytes: u64,
    /// Requests above 1 MiB for which PyTorch's native policy, with default settings, allocates a segment.
    segment_requests: u64,
    /// Of these, requests that the fully free 2 MiB pages in large segments of the stream could serve, each taken separately.
    stitchable_requests: u64,
    /// Of these, requests that were not examined: each takes a snapshot, and 33,554,432 blocks were examined.
    unexamined_requests: u64,
    /// Steps of the search.
    steps: u64,
    /// Why the search stopped: `best` (no smaller placement exists, or it is within 0.012 % of the lower bound), `steps` (raise
    /// `--steps`) or `memory` (raise `--read-memory`).
    end: SearchEnd,
    seed: u64,
    /// Whether memory changes streams only where the recording shows the order, so that streams do not wait.
    known_order: bool,
}

/// Searches for an offline placement.
pub(crate) fn plan(args: &PlanArgs) -> Result<()> {
    let out = args.out.as_deref().map(|out| output::replacing(out, [&args.file])).transpose()?;
    let bar = Bar::new(args.steps, "{bar:30} {percent} % {wide_msg} [{elapsed} left {eta}]");
    bar.message(format!("reading {}", args.file.display()));
    let Trace { history, budget, .. } = load(&args.file, args.gpu, args.limit, &args.read)?;
    let file = || args.file.display().to_string();
    let mut claim = budget.claim();
    claim.add(history.bytes_of_lifetimes()).with_context(file)?;
    let lifetimes = history.lifetimes();
    drop(history);
    let cross_stream = if args.known_order { CrossStream::KnownOrder } else { CrossStream::AfterWait };
    let settings = PlanSettings { cross_stream, steps: args.steps, seed: args.seed };
    let mut steps_shown = 0;
    let placement = place(&lifetimes, &settings, &budget, |steps, bytes| {
        bar.advance(steps - steps_shown);
        steps_shown = steps;
        bar.message(format!("placement in {}", Bytes(bytes)));
    })
    .with_context(file)?;
    bar.clear();
    if let Some(out) = out {
        out.fill(placement.table(&lifetimes).to_json())?;
    }
    let trace = args.file.display().to_string();
    let misses = misses(&lifetimes);
    if args.json {
        return terminal::print_json(&Report {
            trace,
            allocations: lifetimes.len(),
            lower_bound_bytes: placement.lower_bound,
            plan_bytes: placement.bytes,
            least_bytes: placement.least,
            gap: placement.gap(),
            stitched_bytes: stitched(&lifetimes),
            segment_requests: misses.requests,
            stitchable_requests: misses.stitchable,
            unexamined_requests: misses.unexamined,
            steps: placement.steps,
            end: placement.end,
            seed: args.seed,
            known_order: args.known_order,
        });
    }
    let mut page = Page::stdout();
    page.line(format!("{trace}: {} allocations, lower bound {}", lifetimes.len(), Bytes(placement.lower_bound)));
    page.line(format!("an allocator that stitches free 2 MiB pages would reserve {}", Bytes(stitched(&lifetimes))));
    page.line(format!(
        "stitching would serve {}{} of the {} requests for which PyTorch's native policy allocates a large segment",
        if misses.unexamined > 0 { "at least " } else { "" },
        misses.stitchable,
        misses.requests
    ));
    let note = match placement.end {
        SearchEnd::Best => None,
        SearchEnd::Steps => Some("search stopped: out of steps, raise --steps"),
        SearchEnd::Memory => Some("search stopped: out of memory, raise --read-memory"),
    };
    note.iter().for_each(|note| page.note(note));
    let answer = format!(
        "Offline placement: {}, {:.2} % above the lower bound.",
        Bytes(placement.bytes),
        100.0 * placement.gap()
    );
    let next = match &args.out {
        Some(out) => {
            let alloc = format!("plan:file={}", out.display());
            format!("replay {} --alloc caching,{}{}", quoted(&trace), quoted(&alloc), chosen(args.gpu))
        }
        None => format!("plan {} -o plan.json{}", quoted(&trace), chosen(args.gpu)),
    };
    page.end(answer, &command("vramlab", &next));
    page.print()
}
