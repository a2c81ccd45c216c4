//! `experiments register`: measures which kinds of memory NCCL can register, and what that changes.
//!
//! For each kind every rank is a process of its own, as in a run of the trainer: NCCL treats GPUs of one process differently, and a
//! kind of memory that hangs or faults ends only its own processes. Rank 0 prints its results so far as a line of JSON, again and again.

mod record;

use anyhow::{Context, Result, bail};
use clap::Args;
use record::{Communicators, KindRecord, Register};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use terminal::Bar;
use trainer::ranks::{BufferMemory, MeasuringRank, measure_communicators, measure_registration};
use vramlab::input::read_end;
use vramlab::output::{Existing, OutputFile};
use vramlab::{Bytes, CudaDriver, ParseBytesError};

/// Bytes of each collective: smaller than a page of memory, two sizes of buckets, and one that shows the bandwidth.
const SIZES: &str = "64K,1M,25M,256M";
/// Numbers of communicators.
const COUNTS: [u64; 4] = [1, 2, 4, 8];
/// Ranks that have not ended this long after one has failed are killed.
const GRACE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);
/// Most that is read of what a rank writes.
const MOST_TEXT: u64 = 64 << 10;

#[derive(Debug, Args)]
pub(crate) struct RegisterArgs {
    /// GPUs, each with a process of its own [default: all of the machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    gpus: Option<u32>,
    /// Kinds of memory [default: all]
    #[arg(long, value_name = "KIND,...", value_enum, value_delimiter = ',')]
    kinds: Vec<BufferMemory>,
    /// Sizes of the collectives
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', value_parser = bytes, default_value = SIZES)]
    sizes: Vec<u64>,
    /// Seconds after which a kind is given up
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    limit: u32,
    /// Machine and date, for the record
    #[arg(long, value_name = "TEXT", required_unless_present = "rank")]
    source: Option<String>,
    /// Write the record to this file, as JSON
    #[arg(short, long, value_name = "FILE", required_unless_present = "rank")]
    out: Option<PathBuf>,
    /// This process is one rank of a measurement
    #[arg(long, hide = true, requires = "meeting")]
    rank: Option<u32>,
    /// Directory in which the ranks of a measurement meet
    #[arg(long, hide = true)]
    meeting: Option<PathBuf>,
}

fn bytes(text: &str) -> std::result::Result<u64, ParseBytesError> {
    text.parse().map(|Bytes(bytes)| bytes)
}

/// Measures every kind, writes the record and prints its tables.
pub(crate) fn register(args: &RegisterArgs) -> Result<()> {
    if let (Some(rank), Some(meeting)) = (args.rank, &args.meeting) {
        return one_rank(args, rank, meeting);
    }
    if let Some(bytes) = args.sizes.iter().find(|bytes| !(4096..=4 << 30).contains(*bytes)) {
        bail!("--sizes {bytes} is not a size from 4K to 4G");
    }
    let present = CudaDriver::probe().map_or(0, |gpus| gpus.len());
    // CAST: a number of GPUs of one host.
    let gpus = args.gpus.unwrap_or(present as u32);
    if gpus < 2 || gpus as usize > present {
        bail!(
            "registration is measured on several GPUs, and this machine has {present}; set --gpus to their number, at least 2 \
             (`trainer doctor` prints which GPUs are usable)"
        );
    }
    let (Some(source), Some(out)) = (&args.source, &args.out) else { bail!("--source and --out are needed") };
    let out = OutputFile::create(out, Existing::Replace)?;
    let started_at = trainer::provenance::now();
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let kinds = if args.kinds.is_empty() { BufferMemory::ALL.to_vec() } else { args.kinds.clone() };
    let measured = kinds.into_iter().map(|kind| -> Result<KindRecord> {
        bar.message(kind.name());
        let sizes = args.sizes.iter().map(ToString::to_string).collect::<Vec<String>>().join(",");
        let (lines, error) = measure(args, gpus, &["--kinds", kind.name(), "--sizes", &sizes])?;
        Ok(KindRecord::new(kind, &lines, error))
    });
    let kinds = measured.collect::<Result<Vec<KindRecord>>>()?;
    bar.message("communicators");
    let (lines, error) = measure(args, gpus, &[])?;
    let communicators = Communicators::new(&lines, error);
    bar.clear();
    let record = Register::new(source.clone(), started_at, gpus, kinds, communicators);
    record.write(out)?;
    record.page().print()
}

/// The measurement of one rank; rank 0 prints it.
fn one_rank(args: &RegisterArgs, rank: u32, meeting: &Path) -> Result<()> {
    let of = MeasuringRank { rank, ranks: args.gpus.unwrap_or(2), meeting: meeting.to_owned() };
    let print = |text: serde_json::Result<String>| match text {
        Ok(text) if rank == 0 => terminal::print_json_text(&(text + "\n")),
        other => Ok(other.map(drop)?),
    };
    let Some(kind) = args.kinds.first() else {
        return print(serde_json::to_string(&measure_communicators(&of, &COUNTS)?));
    };
    let mut printed = Ok(());
    measure_registration(&of, *kind, &args.sizes, |so_far| {
        if printed.is_ok() {
            printed = print(serde_json::to_string(so_far));
        }
    })?;
    printed
}

/// The processes of one measurement, which end with this value.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail only for a process that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The output of rank 0 of a measurement, and why it ended early if it did.
fn measure(args: &RegisterArgs, gpus: u32, of: &[&str]) -> Result<(String, Option<String>)> {
    let meeting = tempfile::tempdir().context("a directory in which the ranks meet")?;
    let file = |name: String| meeting.path().join(name);
    let program = crate::repository::this_program()?;
    let mut ranks = Ranks(Vec::new());
    for rank in 0..gpus {
        let mut command = Command::new(&program);
        command.args(["register", "--rank", &rank.to_string(), "--gpus", &gpus.to_string(), "--meeting"]);
        command.arg(meeting.path()).args(of).stdin(Stdio::null());
        command.stdout(File::create(file(format!("out{rank}")))?).stderr(File::create(file(format!("err{rank}")))?);
        #[cfg(target_os = "linux")]
        terminal::around::end_with_parent(&mut command);
        ranks.0.push(command.spawn().context("a rank")?);
    }
    let until = Instant::now() + Duration::from_secs(args.limit.into());
    let (mut ended, mut failed, mut late) = (vec![None; ranks.0.len()], None, false);
    while ended.contains(&None) && !late {
        for (number, child) in ranks.0.iter_mut().enumerate() {
            ended[number] = child.try_wait()?;
            if ended[number].is_some_and(|status| !status.success()) {
                failed.get_or_insert((number, Instant::now() + GRACE));
            }
        }
        if failed.is_some_and(|(_, until)| Instant::now() >= until) {
            break;
        }
        late = Instant::now() >= until;
        std::thread::sleep(PAUSE);
    }
    drop(ranks);
    let output = std::fs::read_to_string(file("out0".to_owned()))?;
    let Some((rank, _)) = failed else {
        return Ok((output, late.then(|| format!("no further result within {} s", args.limit))));
    };
    let text = read_end(&file(format!("err{rank}")), MOST_TEXT)?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned);
    let status = ended[rank].map(|status| status.to_string()).unwrap_or_default();
    Ok((output, Some(format!("rank {rank}: {}", line.unwrap_or(status)))))
}
