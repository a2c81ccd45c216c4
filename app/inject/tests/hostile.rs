//! Programs that do what disturbs a library in them: they end as without it.

use crate::programs::{Built, equal, printed};
use crate::records::{notes_of, records};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use vramlab_histories::calls::{Calls, Counter};

/// A hostile program, with and without the library, in a directory of its own.
fn both(test: &str, set: impl Fn(&mut Command)) -> (String, Vec<Calls>) {
    let (built, at) = (Built::get(), tempfile::tempdir().unwrap());
    let run = |name: &str, mut command: Command| {
        let at = at.path().join(name);
        std::fs::create_dir(&at).unwrap();
        set(&mut command);
        equal(command.current_dir(at))
    };
    let record = at.path().join("record");
    std::fs::create_dir(&record).unwrap();
    let plain = run("plain", built.hostile(test));
    let printed = run("with", with(test, &record));
    assert_eq!(plain, printed);
    (printed, records(&record))
}

fn with(test: &str, record: &Path) -> Command {
    let mut command = Built::get().hostile(test);
    Built::get().preload(&mut command, Some("caching"), record);
    command.env("VRAMLAB_INJECT_STACKS", "1");
    command
}

/// Calls that were recorded, and those that had no room.
fn counts(calls: &[Calls]) -> (usize, u64) {
    let [calls] = calls else { panic!("{} records", calls.len()) };
    (calls.records.len(), calls.counter(Counter::Dropped))
}

#[test]
#[ignore = "needs a C compiler"]
fn closed_descriptors_leave_the_record_and_other_files_whole() {
    let (_, calls) = both("descriptors", |_| ());
    assert_eq!(counts(&calls), (2 * (256 + 20_000 + 100), 0));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_cancelled_thread_leaves_no_lock() {
    both("cancelled", |_| ());
}

#[test]
#[ignore = "needs a C compiler"]
fn a_message_that_nobody_reads_ends_no_program() {
    let folder = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = with("refused", folder.path());
    let output = command.env("REFUSED", "1").stderr(writer).stdout(Stdio::piped()).output().unwrap();
    assert!(output.status.success() && printed(&output).contains("equal"), "{output:?}");
    // A file that has the number of standard error is the program's.
    equal(with("reused", folder.path()).env("REFUSED", "1").current_dir(&folder));
    let said = equal(with("refused", folder.path()).env("REFUSED", "1"));
    assert!(said.contains("cuIpcGetMemHandle was refused"), "{said}");
}

#[test]
#[ignore = "needs a C compiler"]
fn a_program_that_is_executed_in_the_same_process_has_its_own_record() {
    let folder = tempfile::tempdir().unwrap();
    equal(&mut with("exec", folder.path()));
    let mut all = records(folder.path());
    all.sort_by_key(|calls| calls.records.len());
    let counts: Vec<usize> = all.iter().map(|calls| calls.records.len()).collect();
    assert_eq!(counts, [20, 400]);
    for (name, calls) in [("", &all[0]), ("-2", &all[1])] {
        let notes = notes_of(&folder.path().join(format!("calls-{}{name}.txt", calls.pid)));
        assert!(calls.records.iter().all(|record| notes.stack(record.stack).next().is_some()));
    }
}

/// Runs a program whose record is on a disk of 1 MiB; `None`, with a line, where that cannot be mounted.
fn on_small_disk(test: &str, kernel: &str) -> Option<(Output, Vec<Calls>)> {
    let (disk, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let command = with(test, disk.path());
    let words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let script = "mount -t tmpfs -o size=1m none \"$1\" || exit 77; disk=$1; copy=$2; preload=$3; shift 3
        LD_PRELOAD=$preload timeout \"$@\"; code=$?; cp --sparse=always \"$disk\"/* \"$copy\"; exit $code";
    let mut outer = Command::new("unshare");
    outer.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).args([disk.path(), copy.path()]);
    let variables = || command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    outer.arg(variables().find(|(name, _)| *name == "LD_PRELOAD").unwrap().1).args(words);
    outer.envs(variables().filter(|(name, _)| *name != "LD_PRELOAD")).env("KERNEL", kernel);
    let output = outer.output().unwrap();
    if output.status.code() == Some(77) || printed(&output).contains("unshare failed") {
        println!("skipped: no disk can be mounted: {}", printed(&output));
        return None;
    }
    Some((output, records(copy.path())))
}

#[test]
#[ignore = "needs a C compiler"]
fn a_full_disk_ends_the_record_and_not_the_program() {
    for kernel in ["new", "old", "no-fallocate"] {
        let Some((output, calls)) = on_small_disk("many", kernel) else { return };
        assert!(output.status.success() && printed(&output).contains("equal"), "{kernel}: {output:?}");
        let (recorded, dropped) = counts(&calls);
        assert_eq!(recorded as u64 + dropped, 100_200, "{kernel}");
        assert!(dropped > 0, "{kernel}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn old_kernels_record_through_the_file() {
    for kernel in ["old", "no-fallocate"] {
        let (_, calls) = both("many", |command| _ = command.env("KERNEL", kernel));
        assert_eq!(counts(&calls), (100_200, 0));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn locked_memory_takes_no_more_than_is_recorded() {
    for may_lock in [None, Some("1")] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = with("locked", folder.path());
        if let Some(may_lock) = may_lock {
            command.env("MAY_LOCK", may_lock);
        }
        let output = command.output().unwrap();
        let text = printed(&output);
        if may_lock.is_some() && text.contains("mlockall") {
            continue;
        }
        assert!(output.status.success() && text.contains("equal"), "{output:?}");
        assert_eq!(counts(&records(folder.path())), (200, 0), "{text}");
        for entry in std::fs::read_dir(&folder).unwrap() {
            let blocks = std::os::unix::fs::MetadataExt::blocks(&entry.unwrap().metadata().unwrap());
            assert!(blocks * 512 < 4 << 20, "{blocks}");
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_record_leaves_addresses_to_the_program() {
    let (_, calls) = both("addresses", |_| ());
    assert_eq!(counts(&calls), (200, 0));
}

#[test]
#[ignore = "needs a C compiler"]
fn settings_are_those_at_load() {
    for test in ["clearenv", "environ"] {
        let (_, calls) = both(test, |_| ());
        assert_eq!(counts(&calls), (200, 0));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn initialisers_of_libraries_allocate_beside_threads() {
    let library = Built::get().path("allocates.so");
    both("constructor", |command| _ = command.env("INITIALISER", &library));
}
