//! `vramlab plan`: where the blocks of a recorded history are placed so that it needs little memory.

use crate::gpus::chosen;
use crate::history::{Compiled, load};
use crate::reading::ReadArgs;
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{Bar, Page, command, quoted};
use vramlab::Bytes;
use vramlab::histories::plan::{CrossStream, PlanSettings, SearchEnd, misses, plan as place, stitched};
use vramlab::output::{Existing, OutputFile};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// History: a PyTorch snapshot or another format of `convert`, plain, .gz or .xz
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where the plan goes, for `--alloc plan:file=FILE`
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Let memory go from one stream to another only where the history shows that the work is over, so that no stream waits
    #[arg(long)]
    known_order: bool,
    /// Most steps of the search; thirty million take about a second, and the other commands make as many
    #[arg(long, value_name = "N", default_value_t = PlanSettings::MOST_STEPS)]
    steps: u64,
    /// Seed of the search
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Memory limit of the recording, which tells a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// Which GPU's events are planned, where a history holds several
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Found {
    trace: String,
    /// Blocks that were placed.
    allocations: usize,
    /// Most bytes that were in use at once.
    lower_bound_bytes: u64,
    /// Bytes that are enough by the plan.
    plan_bytes: u64,
    /// Bytes below which no plan keeps each block in one piece, as far as the search proved it: `lower_bound_bytes` or
    /// more. If it is `plan_bytes`, the plan is the best there is.
    least_bytes: u64,
    /// `plan_bytes / lower_bound_bytes - 1`.
    gap: f64,
    /// What an allocator would reserve that makes each block above 1 MiB of any free pages of 2 MiB of its stream
    /// (GMLake at its best); smaller blocks lie in pages of their own, by best fit.
    stitched_bytes: u64,
    /// Requests above 1 MiB for which PyTorch's native policy, with its default settings, takes a segment from the
    /// device.
    segment_requests: u64,
    /// Those of them for which the wholly free pages of 2 MiB in large segments of the stream would have sufficed; each
    /// is looked at by itself.
    stitchable_requests: u64,
    /// Those of them that were not looked at, as that takes a snapshot each: 33,554,432 blocks were seen.
    unexamined_requests: u64,
    /// Steps of the search.
    steps: u64,
    /// Why it ended: `best` (there is no plan of fewer bytes, or it is within 0.012 % of the lower bound), `steps` (`--steps`
    /// allows more) or `memory` (`--read-memory` does).
    end: SearchEnd,
    seed: u64,
    /// Whether memory changes streams only where the history shows the order, so that streams do not wait.
    known_order: bool,
}

/// Plans a history.
pub(crate) fn plan(args: &PlanArgs) -> Result<()> {
    let out = args.out.as_deref().map(|out| OutputFile::create(out, Existing::Replace)).transpose()?;
    let bar = Bar::new(args.steps, "{bar:30} {percent} % {wide_msg} [{elapsed} left {eta}]");
    bar.message(format!("reading {}", args.file.display()));
    let Compiled { history, budget, .. } = load(&args.file, args.gpu, args.limit, &args.read)?;
    let file = || args.file.display().to_string();
    let mut claim = budget.claim();
    claim.add(history.bytes_of_lifetimes()).with_context(file)?;
    let lifetimes = history.lifetimes();
    drop(history);
    let cross_stream = if args.known_order { CrossStream::KnownOrder } else { CrossStream::AfterWait };
    let settings = PlanSettings { cross_stream, steps: args.steps, seed: args.seed };
    let mut done = 0;
    let found = place(&lifetimes, &settings, &budget, |steps, bytes| {
        bar.advance(steps - done);
        done = steps;
        bar.message(format!("{} are enough", Bytes(bytes)));
    })
    .with_context(file)?;
    bar.clear();
    if let Some(out) = out {
        out.fill(found.table(&lifetimes).to_json())?;
    }
    let trace = args.file.display().to_string();
    let misses = misses(&lifetimes);
    if args.json {
        return terminal::print_json(&Found {
            trace,
            allocations: lifetimes.len(),
            lower_bound_bytes: found.lower_bound,
            plan_bytes: found.bytes,
            least_bytes: found.least,
            gap: found.gap(),
            stitched_bytes: stitched(&lifetimes),
            segment_requests: misses.requests,
            stitchable_requests: misses.stitchable,
            unexamined_requests: misses.unexamined,
            steps: found.steps,
            end: found.end,
            seed: args.seed,
            known_order: args.known_order,
        });
    }
    let mut page = Page::stdout();
    page.line(format!(
        "{trace}: {} allocations, at least {} in use at once",
        lifetimes.len(),
        Bytes(found.lower_bound)
    ));
    page.line(format!("an allocator that stitches free pages of 2 MiB would reserve {}", Bytes(stitched(&lifetimes))));
    page.line(format!(
        "stitching would serve {}{} of the {} requests for which PyTorch's native policy takes a large segment",
        if misses.unexamined > 0 { "at least " } else { "" },
        misses.stitchable,
        misses.requests
    ));
    let short = match found.end {
        SearchEnd::Best => None,
        SearchEnd::Steps => Some("the search ended at its steps, --steps allows more"),
        SearchEnd::Memory => Some("the search ended at its memory, --read-memory allows more"),
    };
    short.iter().for_each(|short| page.note(short));
    let said = format!("A plan of {} serves them, {:.2} % above that.", Bytes(found.bytes), 100.0 * found.gap());
    let next = match &args.out {
        Some(out) => {
            let alloc = format!("plan:file={}", out.display());
            format!("replay {} --alloc caching,{}{}", quoted(&trace), quoted(&alloc), chosen(args.gpu))
        }
        None => format!("plan {} -o plan.json{}", quoted(&trace), chosen(args.gpu)),
    };
    page.end(said, &command("vramlab", &next));
    page.print()
}
