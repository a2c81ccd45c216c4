//! Files that exhaust memory, and mutated files: memory allocated by reading and compiling, and no panic.

use crate::mutate::{mutations, seeds};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Read;
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{Action, Event, Format, Problem, ReadError, ReadOptions, Summary, read_from};
use vramlab_histories::replay::{HistoryBuilder, ReplayError};
use vramlab_policies::backends::CachingSettings;

std::thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, which counts the bytes of each thread.
struct Counting;

fn add(bytes: i64) {
    HELD.set(HELD.get() + bytes);
    PEAK.set(PEAK.get().max(HELD.get()));
}

// SAFETY: the system's allocator does the work; the counters are plain cells that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as i64);
        // SAFETY: the caller keeps the promises of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as i64));
        // SAFETY: the caller keeps the promises of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Limits of the tests.
const LIMIT: u64 = 32 << 20;
/// A reader's memory besides the budget.
const BUFFERS: i64 = 2 << 20;

/// Peak bytes of this thread during `work`, beyond those before.
fn peak<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let before = HELD.get();
    PEAK.set(before);
    let out = work();
    (out, PEAK.get() - before)
}

/// Endless repetition.
struct Endless {
    item: Box<dyn FnMut(u64) -> Vec<u8>>,
    count: u64,
    here: Vec<u8>,
    at: usize,
}

fn endless(item: impl FnMut(u64) -> Vec<u8> + 'static) -> Endless {
    Endless { item: Box::new(item), count: 0, here: Vec::new(), at: 0 }
}

fn again(item: &[u8]) -> Endless {
    let item = item.to_vec();
    endless(move |_| item.clone())
}

impl Read for Endless {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        while self.at == self.here.len() {
            self.here = (self.item)(self.count);
            (self.count, self.at) = (self.count + 1, 0);
        }
        let count = out.len().min(self.here.len() - self.at);
        out[..count].copy_from_slice(&self.here[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

fn read(source: impl Read) -> (Result<Summary, ReadError>, i64, Budget) {
    let options = ReadOptions { budget: Budget::new(LIMIT), ..ReadOptions::default() };
    let (result, peak) = peak(|| read_from(Box::new(source), &options, &mut |_| Ok(())));
    (result, peak, options.budget)
}

/// Reads until the budget is used up, and checks that it is not exceeded and mostly used.
fn refused(what: &str, source: impl Read) {
    let (result, peak, budget) = read(source);
    let error = result.expect_err(what);
    let over = match &error.problem {
        Problem::TooLarge(over) => *over,
        _ => panic!("{what}: {error}"),
    };
    println!("{what}: {peak} bytes at most, {} claimed", budget.peak());
    assert!(peak <= LIMIT as i64 + BUFFERS, "{what}: {peak} bytes were taken, {} claimed", budget.peak());
    assert!(peak >= LIMIT as i64 / 8, "{what}: refused although only {peak} bytes were taken");
    assert!(over.limit == LIMIT && over.needed > LIMIT, "{what}: {over}");
    assert_eq!(budget.held(), 0, "{what}: all claims are returned");
}

fn pickle(start: &[u8], rest: Endless) -> impl Read {
    [b"\x80\x04", start].concat().chain_with(rest)
}

trait ChainWith {
    fn chain_with(self, rest: Endless) -> Box<dyn Read>;
}

impl ChainWith for Vec<u8> {
    fn chain_with(self, rest: Endless) -> Box<dyn Read> {
        Box::new(std::io::Cursor::new(self).chain(rest))
    }
}

#[test]
fn pickles_that_never_end() {
    for (what, item) in [
        ("marks", &b"("[..]),
        ("dictionaries", b"}"),
        ("lists", b"]"),
        ("values", b"N"),
        ("full dictionaries", b"}\x8c\x01xK\x01s"),
        ("large dictionaries", b"}(K\0K\0K\0K\0K\0K\0K\0K\0K\0K\0u"),
        ("full lists", b"]K\x01a"),
        ("lists from the inside", b"(K\x01K\x02l"),
        ("dictionaries from the inside", b"(K\x01K\x02d"),
    ] {
        // A list at the very beginning is one of segments.
        refused(what, pickle(b"N", again(item)));
    }
    refused("memo", pickle(b"}", again(b"\x94")));
    refused("memo with gaps", pickle(b"}", endless(|at| [&b"r"[..], &(2 * at as u32 + 2).to_le_bytes()].concat())));
    refused("one list", pickle(b"N]", again(b"K\x01a")));
    refused("one dictionary", pickle(b"}", again(b"K\x01K\x01s")));
    let before = b"}(\x8c\x0ddevice_traces]\x8c\x08segments](";
    let segment = b"}(\x8c\x07addressK\x10\x8c\x0atotal_sizeK\x20\x8c\x06blocks]";
    let block = b"}(\x8c\x04sizeK\x10\x8c\x05state\x8c\x08inactiveu";
    let one_by_one = [segment, &b"(\x8c\x04sizeK\x10\x8c\x05state\x8c\x08inactived"[..], b"au", b"a"].concat();
    refused("segments", pickle(&before[..before.len() - 1], again(&one_by_one)));
    refused("blocks", pickle(&[&before[..], segment].concat(), again(&[&block[..], b"a"].concat())));
    refused("blocks at once", pickle(&[&before[..], segment, b"("].concat(), again(block)));
    refused("kept events", pickle(b"(\x8c\x0ddevice_traces((", again(b"(\x8c\x04addrK\x10d")));
}

#[test]
fn pickle_that_copies_its_stack_is_bounded() {
    // The complete stack is put into one list.
    let values = b"N".repeat(LIMIT as usize / 24);
    let source = [b"\x80\x04](", &values[..], b"e."].concat();
    refused("a list of the stack", std::io::Cursor::new(source));
}

#[test]
fn settings_with_one_shared_text_are_bounded() {
    // A text of 4 KiB, named a million times.
    let text = [&b"X"[..], &4096_u32.to_le_bytes(), &[b'a'; 4096], b"\x94"].concat();
    let list = [&b"}("[..], &text, b"](", &b"h\0".repeat(16_000), b"eu"].concat();
    let settings = [&b"\x8c\x12allocator_settings"[..], &list].concat();
    let again = b"\x8c\x12allocator_settings}\x8c\x01x](".to_vec();
    let more = [&again[..], &b"h\0".repeat(16_000), b"es"].concat();
    let source = [&b"\x80\x04}(\x8c\x0ddevice_traces]"[..], &settings, &more.repeat(60), b"u."].concat();
    let (result, peak, _) = read(std::io::Cursor::new(source));
    // Values beyond the budget are null; a training run's settings are some twenty numbers.
    assert!(result.unwrap().allocator_settings.contains_key("x"));
    assert!(peak <= LIMIT as i64 + BUFFERS, "{peak} bytes were taken");
}

#[test]
fn json_that_never_ends() {
    let json = |start: &str, item: &str| start.as_bytes().to_vec().chain_with(again(item.as_bytes()));
    let block = "{\"size\":1,\"state\":\"inactive\"},";
    refused(
        "segments",
        json(
            "{\"segments\":[",
            &format!("{{\"address\":1,\"total_size\":2,\"blocks\":[{}]}},", &block[..block.len() - 1]),
        ),
    );
    refused("blocks", json("{\"segments\":[{\"blocks\":[", block));
    for (what, start, item) in [
        ("depth", "{\"a\":", "{\"a\":"),
        ("a text", "{\"", "a"),
        ("a key", "{\"segments\":[{\"", "a"),
        ("blanks", "{", " "),
    ] {
        let (result, peak, _) = read(json(start, item));
        let error = result.unwrap_err();
        assert!(matches!(error.problem, Problem::Content(_)), "{what}: {error}");
        assert!(peak <= BUFFERS, "{what}: {peak} bytes were taken");
    }
}

#[test]
fn settings_in_json_are_bounded() {
    for item in ["[],", "{\"a\":{\"a\":{}}},", "\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\","] {
        let text = format!("{{\"device_traces\":[],\"allocator_settings\":{{\"a\":[{}0]}}}}", item.repeat(1 << 17));
        let (_, peak, _) = read(std::io::Cursor::new(text));
        assert!(peak <= LIMIT as i64 + BUFFERS, "{item}: {peak} bytes were taken");
    }
}

#[test]
fn decompression_memory_is_bounded() {
    // A dictionary of 4 MiB, whose size the decoder reads first.
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 3);
    std::io::Write::write_all(&mut encoder, b"1 4096 512 0\n").unwrap();
    let packed = encoder.finish().unwrap();
    let options = |limit| ReadOptions { budget: Budget::new(limit), ..ReadOptions::default() };
    let read = |limit| read_from(Box::new(&packed[..]), &options(limit), &mut |_| Ok(()));
    assert_eq!(read(32 << 20).unwrap().events, [1]);
    let error = read(8 << 20).unwrap_err().to_string();
    assert!(error.contains("unpacking takes more than 2 MiB") && error.contains("--read-memory"), "{error}");
}

#[test]
fn text_that_never_ends() {
    for blank in ["\n", " \r\n"] {
        let (result, peak, _) = read(b"1 4096 512 0\n".to_vec().chain_with(again(blank.as_bytes())));
        let error = result.unwrap_err();
        assert!(matches!(error.problem, Problem::Content(_)), "{error}");
        assert!(peak <= BUFFERS, "{peak} bytes were taken");
    }
}

#[test]
fn tables_that_never_end() {
    refused("buffers", b"id,lower,upper,size\n".to_vec().chain_with(again(b"a,0,1,1\n")));
}

/// Compiles endless events until the budget is used up.
fn compiled(what: &str, event: impl Fn(u64) -> Event) {
    let budget = Budget::new(LIMIT);
    let (error, peak) = peak(|| {
        let mut builder = HistoryBuilder::new(None).within(&budget);
        (0..).find_map(|at| builder.push(&event(at)).err()).unwrap()
    });
    println!("{what}: {peak} bytes at most, {} claimed", budget.peak());
    assert!(matches!(error, ReplayError::TooLarge(over) if over.limit == LIMIT), "{what}: {error}");
    assert!(error.is_bad_input(), "{what}");
    assert!(peak <= LIMIT as i64 + BUFFERS, "{what}: {peak} bytes were taken");
    assert!(peak >= LIMIT as i64 / 8, "{what}: refused although only {peak} bytes were taken");
    assert_eq!(budget.held(), 0, "{what}");
}

fn event(action: Action, addr: u64) -> Event {
    Event { action, device: 0, addr: (1 << 40) + addr * 4096, bytes: 1024, stream: 0, time_ns: 0 }
}

/// The actions in turn, each at this many addresses.
fn turns<const N: usize>(actions: [Action; N], addresses: u64) -> impl Fn(u64) -> Event {
    move |at| event(actions[(at % N as u64) as usize], at / N as u64 % addresses)
}

#[test]
fn histories_that_never_end() {
    use Action::{Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree, Snapshot};
    let all = u64::MAX >> 20;
    compiled("blocks", turns([Alloc], all));
    compiled("blocks in turn", turns([Alloc, FreeRequested, FreeCompleted], 7));
    compiled("frees that never complete", turns([Alloc, FreeRequested, Snapshot], all));
    compiled("frees that complete late", turns([Alloc, FreeRequested, Snapshot, FreeCompleted], 1));
    compiled("blocks from before", turns([FreeRequested, FreeCompleted], all));
    compiled("segments", turns([SegmentAlloc], all));
    compiled("segments in turn", turns([SegmentAlloc, SegmentFree], 1));
    compiled("windows", turns([SegmentAlloc, SegmentFree, Snapshot], 1));
    compiled("refusals", turns([Oom], 1));
}

#[test]
fn history_keeps_its_claim() {
    let budget = Budget::new(LIMIT);
    let mut builder = HistoryBuilder::new(None).within(&budget);
    for at in 0..10_000 {
        builder.push(&turns([Action::FreeRequested, Action::FreeCompleted], u64::MAX >> 20)(at)).unwrap();
    }
    let history = builder.finish(&CachingSettings::default()).unwrap();
    assert_eq!(history.prologue_allocations(), 5000);
    // 16 bytes for each operation and 8 for each allocation, of which there are twice as many.
    assert!(budget.held() >= 16 * 10_000 + 8 * 5000, "{} bytes", budget.held());
}

// Seeds of the fuzz targets and some thousand mutations of them, through the targets' entry points: no parser panics, and every
// error is one line. Every run uses the same mutations.

/// Mutations of each seed.
const ROUNDS: u64 = 1500;

fn parse(bytes: &[u8], formats: &[Format]) -> u32 {
    let mut sound = 0;
    for format in formats.iter().copied().map(Some).chain([None]) {
        let options = ReadOptions { format, budget: Budget::new(1 << 26) };
        match read_from(Box::new(bytes), &options, &mut |_| Ok(())) {
            Ok(_) => sound += 1,
            Err(error) => assert!(!error.to_string().contains('\n'), "an error is one line: {error}"),
        }
    }
    sound
}

fn smoke(target: &str, formats: &[Format]) {
    let seeds = seeds(target);
    for (_, seed) in &seeds {
        assert!(parse(seed, formats) >= 1, "a seed should be sound");
    }
    let mut sound = 0;
    for mutation in mutations(&seeds, ROUNDS) {
        sound += u32::from(parse(&mutation, formats) > 0);
    }
    assert!(sound > 0, "some mutations should still be sound, or they reach nothing but the head");
}

#[test]
fn pickles() {
    smoke("pickle", &[Format::SnapshotPickle]);
}

#[test]
fn json() {
    smoke("json", &[Format::SnapshotJson, Format::Jsonl]);
}

#[test]
fn csv() {
    smoke("csv", &[Format::RmmCsv, Format::MinimallocCsv, Format::Stalloc]);
}

/// Reads and compiles; returns the one-line error.
fn compile(bytes: &[u8]) -> Result<(), String> {
    let options = ReadOptions { format: None, budget: Budget::new(1 << 26) };
    let mut builder = HistoryBuilder::new(None).within(&options.budget);
    read_from(Box::new(bytes), &options, &mut |event| builder.push(&event).map_err(ReadError::stop))
        .map_err(|error| error.to_string())?;
    let settings = CachingSettings { memory_limit: Some(1 << 20), ..CachingSettings::default() };
    builder.finish(&settings).map(drop).map_err(|error| error.to_string())
}

#[test]
fn compilations() {
    let windows = seeds("json").iter().filter(|(_, seed)| compile(seed).is_ok()).count();
    assert!(windows >= 3, "most seeds should compile, not {windows}");
    let seeds: Vec<_> = ["pickle", "json", "csv"].into_iter().flat_map(seeds).collect();
    for mutation in mutations(&seeds, ROUNDS / 3) {
        if let Err(error) = compile(&mutation) {
            assert!(!error.contains('\n'), "an error is one line: {error}");
        }
    }
}
