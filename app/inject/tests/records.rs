//! The records.

use crate::programs::{Built, driver_calls, equal};
use std::fs::File;
use std::io::BufReader;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use vramlab_histories::calls::{Call, Calls, Counter, NO_STACK, Notes, Served};

/// The records of a folder.
pub(crate) fn records(folder: &Path) -> Vec<Calls> {
    let entries = std::fs::read_dir(folder).expect("the folder should be there");
    let paths = entries.map(|entry| entry.expect("an entry should be read").path());
    let files = paths.filter(|path| path.extension().is_some_and(|end| end == "bin")).map(File::open);
    files.map(|file| Calls::read(file.expect("a record should open")).expect("a record should be read")).collect()
}

/// The notes of a folder with one process.
fn notes(folder: &Path) -> Notes {
    let paths = || std::fs::read_dir(folder).expect("the folder should be there").flatten().map(|entry| entry.path());
    let path = paths().find(|path| path.extension().is_some_and(|end| end == "txt")).expect("notes should be there");
    notes_of(&path)
}

/// The notes of a file.
pub(crate) fn notes_of(path: &Path) -> Notes {
    Notes::read(BufReader::new(File::open(path).expect("notes should open"))).expect("notes should be read")
}

fn count(calls: &Calls, call: Call) -> usize {
    calls.records.iter().filter(|record| record.call == call).count()
}

#[test]
#[ignore = "needs a C compiler"]
fn pinned_memory_is_recorded_with_who_served_it() {
    let folder = tempfile::tempdir().unwrap();
    equal(&mut Built::get().pinned("address2", "pinned", "host-exact", folder.path()));
    let all = records(folder.path());
    let [calls] = &all[..] else { panic!("{} records", all.len()) };
    let of = |call, served, ok: bool| {
        let same = |record: &&_| {
            let record: &vramlab_histories::calls::CallRecord = record;
            (record.call, record.served, record.code == 0) == (call, served, ok)
        };
        calls.records.iter().filter(same).count()
    };
    use Served::{Allocator, Driver};
    // Three requests that the driver refused, with one that has nowhere to write.
    assert_eq!((of(Call::HostAlloc, Allocator, true), of(Call::HostAlloc, Driver, false)), (29, 4));
    assert_eq!((of(Call::HostFree, Allocator, true), of(Call::HostFree, Driver, false)), (29, 4));
    // A shared segment of 2 MiB for each of nine kinds of memory.
    assert_eq!((calls.counter(Counter::HostReservedPeak), calls.counter(Counter::HostDriverCalls)), (9 << 21, 9));
    assert_eq!((calls.counter(Counter::Reserved), calls.counter(Counter::DriverCalls)), (0, 0));
}

#[test]
#[ignore = "needs a C compiler"]
fn each_call_is_recorded_in_the_order_of_its_effect() {
    let folder = tempfile::tempdir().unwrap();
    equal(Built::get().with("address2", "threads", Some("caching"), folder.path()).env("ROUNDS", "500"));
    let all = records(folder.path());
    let [calls] = &all[..] else { panic!("{} records", all.len()) };
    let mut live = std::collections::BTreeMap::new();
    for record in &calls.records {
        assert_eq!(record.code, 0, "{record:?}");
        match record.call {
            Call::Alloc | Call::AllocAsync => {
                assert_eq!(live.insert(record.addr, record.bytes), None, "{record:?} is allocated twice");
            }
            Call::Free | Call::FreeAsync => assert_eq!(live.remove(&record.addr), Some(record.bytes), "{record:?}"),
            _ => panic!("{record:?}"),
        }
    }
    assert!(live.is_empty() && calls.incomplete == 0);
    let threads: std::collections::BTreeSet<u32> = calls.records.iter().map(|record| record.thread).collect();
    assert_eq!(threads.len(), 16);
    assert_eq!(calls.counter(Counter::Streams), 1);
}

#[test]
#[ignore = "needs a C compiler"]
fn what_the_driver_serves_is_recorded_with_its_wait() {
    let folder = tempfile::tempdir().unwrap();
    equal(&mut Built::get().with("dlsym", "errors", None, folder.path()));
    let all = records(folder.path());
    let [calls] = &all[..] else { panic!("{} records", all.len()) };
    assert!(calls.records.iter().all(|record| record.served == Served::Driver));
    for call in [Call::Alloc, Call::Pitch, Call::Managed, Call::HostAlloc, Call::HostFree, Call::AllocAsync] {
        assert!(count(calls, call) > 0, "{call}");
    }
    assert!(calls.records.iter().all(|record| record.blocked_ns <= record.total_ns));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_free_waits_for_earlier_work_and_notes_the_last_kernel() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Built::get().with("address2", "loop", None, folder.path());
    equal(command.env("DRIVER_WORK", "1").env("DRIVER_NAP", "300"));
    let all = records(folder.path());
    let frees: Vec<_> = all[0].records.iter().filter(|record| record.call == Call::Free).collect();
    let notes = notes(folder.path());
    // Of two frees in a row, only the first has work before it.
    assert_eq!(frees.len(), 200);
    for pair in frees.chunks(2) {
        assert!(pair[0].blocked_ns > 100_000 && pair[0].blocked_ns <= pair[0].total_ns, "{pair:?}");
        assert_eq!(notes.behind(pair[0].behind), Some("_Z4gemmPfi"), "{pair:?}");
        assert_eq!((pair[1].blocked_ns, pair[1].behind), (0, 0), "{pair:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn stacks_name_the_addresses_of_calls_in_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let built = Built::get();
    for (alloc, stacks) in [(None, true), (Some("caching"), true), (None, false)] {
        let folder = folder.path().join(format!("{alloc:?}-{stacks}"));
        std::fs::create_dir(&folder).unwrap();
        let mut command = built.with("dlsym", "loop", alloc, &folder);
        equal(command.env("VRAMLAB_INJECT_STACKS", if stacks { "1" } else { "0" }));
        let all = records(&folder);
        let numbers: std::collections::BTreeSet<u32> = all[0].records.iter().map(|record| record.stack).collect();
        if !stacks {
            assert_eq!(numbers, [NO_STACK].into());
            continue;
        }
        // Two allocations and two frees in the loop.
        assert_eq!(numbers.len(), 4, "{numbers:?}");
        let notes = notes(&folder);
        for number in numbers {
            let modules: Vec<&str> = notes.stack(number).map(|(_, frame)| frame.module.as_str()).collect();
            assert!(modules[0].ends_with("/program"), "{modules:?}");
            assert!(!modules.iter().any(|module| module.contains("vramlab_inject")), "{modules:?}");
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "stacks are remembered on x86-64")]
fn a_stack_is_walked_once_for_each_place() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Built::get().with("dlsym", "depths", Some("caching"), folder.path());
    let printed = equal(command.env("VRAMLAB_INJECT_STACKS", "1"));
    // 100 depths with two calls each, 20 times.
    let walks = driver_calls(&printed, "walks");
    assert!((200..400).contains(&walks), "{printed}");
    let all = records(folder.path());
    let numbers: std::collections::BTreeSet<u32> = all[0].records.iter().map(|record| record.stack).collect();
    // Frames further out are not kept.
    assert!(numbers.len() > 30, "{}", numbers.len());
}

#[test]
#[ignore = "needs a C compiler"]
fn a_record_is_complete_up_to_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let output = Built::get().with("dlsym", "crash", Some("caching"), folder.path()).output().unwrap();
    assert!(output.status.signal().is_some() || output.status.code() == Some(134), "{output:?}");
    let all = records(folder.path());
    assert_eq!((all[0].records.len(), all[0].incomplete), (40, 0));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_child_forked_before_cuda_started_has_its_own_record() {
    for (test, expected) in [("fork", [20, 400]), ("fork-used", [20, 401])] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Built::get().with("address2", test, Some("caching"), folder.path());
        equal(command.env("VRAMLAB_INJECT_STACKS", "1"));
        let all = records(folder.path());
        let mut counts: Vec<usize> = all.iter().map(|calls| calls.records.len()).collect();
        counts.sort_unstable();
        assert_eq!(counts, expected);
        // Of processes with one thread.
        assert!(all.iter().all(|calls| calls.records.iter().all(|record| record.thread == calls.pid)), "{all:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn signals_of_the_program_cost_no_record() {
    let folder = tempfile::tempdir().unwrap();
    equal(Built::get().with("dlsym", "loop", Some("caching"), folder.path()).env("INTERRUPTED", "1"));
    let all = records(folder.path());
    assert_eq!((all[0].records.len(), all[0].counter(Counter::Dropped)), (400, 0));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_limit_on_file_sizes_ends_the_record_and_not_the_program() {
    // Blocks have 512 or 1024 bytes. The notes of the second have more than 10.
    for (test, blocks, count) in [("loop", 32, 400), ("places", 10, 1024)] {
        let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
        let command = built.with("dlsym", test, Some("caching"), folder.path());
        let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("ulimit -f {blocks}; exec timeout \"$@\""), "sh"]).args(words);
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        equal(shell.env_remove("PLAIN").env("VRAMLAB_INJECT_STACKS", "1"));
        let all = records(folder.path());
        let [calls] = &all[..] else { panic!("{} records", all.len()) };
        // CAST: a length.
        assert_eq!(calls.records.len() as u64 + calls.counter(Counter::Dropped), count);
        assert!(calls.counter(Counter::Dropped) > 0);
    }
}
