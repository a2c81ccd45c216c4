//! Programs get the same results as without the library, however they find the driver's functions.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Ways in which programs find functions: linked, `dlsym`, the name without a version, both ABIs of `cuGetProcAddress`, and the
/// latter with the flag for per-thread streams.
const WAYS: [&str; 6] = ["link", "dlsym", "unversioned", "address1", "address2", "ptsz"];

/// Versions of older drivers that serve: without `cuGetProcAddress`, with its first ABI, and without attributes that came later.
const OLDER: [&str; 3] = ["11020", "11080", "12020"];

/// Longest run of a program.
const SECONDS: &str = "120";

/// The library. Cargo builds none for tests, so it is built of what the tests of the workspace are built of, as in the tests of
/// `libvramlab`. `VRAMLAB_INJECT_LIBRARY` names one that is built already.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| std::env::var_os("VRAMLAB_INJECT_LIBRARY").map_or_else(build_library, PathBuf::from))
}

fn build_library() -> PathBuf {
    let test = std::env::current_exe().expect("a test should know its file");
    // The test lies in `target/PROFILE/deps`.
    let folder = test.ancestors().nth(2).expect("a test should lie in target/PROFILE/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--locked", "--workspace", "--lib", "--example", "time_kernels", "--target-dir"])
        .arg(folder.parent().expect("a profile should lie in a target folder"));
    for (name, _) in std::env::vars_os() {
        if ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|of| name.to_string_lossy().starts_with(of)) {
            cargo.env_remove(name);
        }
    }
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("Cargo should run").success());
    folder.join("libvramlab_inject.so")
}

/// The stand-in for the driver, and programs over it.
pub(crate) struct Built {
    folder: TempDir,
}

impl Built {
    pub(crate) fn get() -> &'static Self {
        static BUILT: OnceLock<Built> = OnceLock::new();
        BUILT.get_or_init(|| {
            let built = Self { folder: tempfile::tempdir().expect("a temporary folder should be there") };
            built.compile(
                "driver.c",
                "libcuda.so.1",
                &["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"],
            );
            for version in ["11010"].iter().chain(&OLDER) {
                std::fs::create_dir(built.path(version)).expect("a folder should be made");
                let version_flag = format!("-DDRIVER={version}");
                let shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"];
                let flags: Vec<&str> = std::iter::once(version_flag.as_str()).chain(shared).collect();
                built.compile("driver.c", &format!("{version}/libcuda.so.1"), &flags);
            }
            built.compile("initialiser.c", "initialiser.so", &["-shared", "-fPIC", "-ldl", "-lpthread"]);
            built.compile("initialiser.c", "allocates.so", &["-DALLOCATES", "-shared", "-fPIC", "-ldl", "-lpthread"]);
            built.compile("hostile.c", "hostile", &["-rdynamic", "-ldl", "-lpthread"]);
            built.compile("program.c", "program", &["-rdynamic", "-ldl", "-lpthread"]);
            let driver = built.path("libcuda.so.1");
            built.compile("program.c", "linked", &["-Wl,--no-as-needed", &driver, "-ldl", "-lpthread"]);
            // As `libcuda.so` of an installation.
            std::os::unix::fs::symlink("libcuda.so.1", built.path("libcuda.so")).expect("a link should be made");
            built
        })
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a temporary folder should have a plain name").to_owned()
    }

    fn compile(&self, source: &str, out: &str, flags: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler
            .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(self.path(out))
            .arg(source)
            .args(flags);
        assert!(compiler.status().expect("a C compiler should be there").success());
    }

    /// A program without the library.
    pub(crate) fn plain(&self, way: &str, test: &str) -> Command {
        let mut command = Command::new("timeout");
        let program = if way == "link" { "linked" } else { "program" };
        command.args([SECONDS, &self.path(program), way, test]);
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("VRAMLAB_CUDA", self.path("libcuda.so.1"));
        command.env("PLAIN", "1").env_remove("LD_PRELOAD");
        command
    }

    /// A program with the library, recorded in a folder.
    pub(crate) fn with(&self, way: &str, test: &str, alloc: Option<&str>, record: &Path) -> Command {
        let mut command = self.plain(way, test);
        self.preload(&mut command, alloc, record);
        command
    }

    /// A hostile program without the library.
    pub(crate) fn hostile(&self, test: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args([SECONDS, &self.path("hostile"), test]);
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("VRAMLAB_CUDA", self.path("libcuda.so.1"));
        command.env_remove("LD_PRELOAD");
        command
    }

    /// Puts the library in front of a program.
    pub(crate) fn preload(&self, command: &mut Command, alloc: Option<&str>, record: &Path) {
        // For the program only, not for what measures its time.
        command.env("VRAMLAB_INJECT_RECORD", record).env("LD_PRELOAD", library());
        if let Some(alloc) = alloc {
            command.env_remove("PLAIN").env("VRAMLAB_INJECT_ALLOC", alloc);
        }
    }
}

pub(crate) fn printed(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a program, which has to find everything equal.
pub(crate) fn equal(command: &mut Command) -> String {
    let output = command.output().expect("a program should run");
    let printed = printed(&output);
    assert!(output.status.success() && printed.contains("equal"), "{command:?}: {}: {printed}", output.status);
    printed
}

/// How often the driver was called, by the word that the program prints.
pub(crate) fn driver_calls(printed: &str, word: &str) -> u64 {
    let line = printed.lines().find(|line| line.starts_with("driver:")).expect("the program should count driver calls");
    let after = line.split(&format!(" {word} ")).nth(1).and_then(|rest| rest.split([' ', '\n']).next());
    after.and_then(|number| number.parse().ok()).expect("a count should be a number")
}

const TESTS: [&str; 8] = ["loop", "errors", "capture", "contexts", "streams", "exit", "fork", "late-fork"];

#[test]
#[ignore = "needs a C compiler"]
fn programs_see_the_same_however_they_find_the_driver() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for way in WAYS {
        // The library that `vramlab run` adds answers to the name without a version.
        if way == "unversioned" {
            continue;
        }
        for test in TESTS {
            equal(&mut built.plain(way, test));
            equal(&mut built.with(way, test, None, folder.path()));
            equal(&mut built.with(way, test, Some("caching"), folder.path()));
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn initialisers_of_libraries_call_cuda_beside_threads() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let library = built.path("initialiser.so");
    equal(built.plain("dlsym", "initialiser").env("INITIALISER", &library));
    equal(built.with("dlsym", "initialiser", Some("caching"), folder.path()).env("INITIALISER", &library));
}

#[test]
#[ignore = "needs a C compiler"]
fn every_way_in_is_served_by_the_allocator() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for way in ["link", "dlsym", "address1", "address2"] {
        let plain = equal(&mut built.plain(way, "loop"));
        let served = equal(&mut built.with(way, "loop", Some("caching"), folder.path()));
        assert_eq!(driver_calls(&plain, "alloc"), 200, "{plain}");
        assert_eq!((driver_calls(&served, "alloc"), driver_calls(&served, "free")), (1, 0), "{way}: {served}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_recorded_call_that_is_served_asks_for_no_device() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let served = equal(&mut built.with("dlsym", "loop", Some("caching"), folder.path()));
    // 200 allocations and as many frees; the device is asked for when the allocator is made, and for its segment.
    assert!(driver_calls(&served, "device") < 20, "{served}");
}

#[test]
#[ignore = "needs a C compiler"]
fn every_allocator_serves() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    // Those that need virtual memory management, pools or a plan find none here, and leave memory to the driver.
    for backend in vramlab_policies::backends::all() {
        equal(&mut built.with("address2", "loop", Some(backend.name), folder.path()));
        equal(&mut built.with("address2", "streams", Some(backend.name), folder.path()));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn one_stream_needs_no_event_and_several_wait_for_all_work() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let one = equal(built.with("dlsym", "loop", Some("caching"), folder.path()).env("DRIVER_WORK", "5"));
    assert_eq!((driver_calls(&one, "record"), driver_calls(&one, "synchronize")), (0, 0), "{one}");
    let several = equal(built.with("dlsym", "streams", Some("caching"), folder.path()).env("DRIVER_WORK", "5"));
    // Once, when the second stream gets work.
    assert_eq!(driver_calls(&several, "synchronize"), 1, "{several}");
    assert!(driver_calls(&several, "record") >= 2, "{several}");
    // Streams that never had work get no event.
    assert_eq!(driver_calls(&several, "idle"), 0, "{several}");
}

#[test]
#[ignore = "needs a C compiler"]
fn a_free_waits_if_that_is_asked_for() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let mut command = built.with("address2", "loop", Some("caching"), folder.path());
    let waits = equal(command.env("VRAMLAB_INJECT_FREE", "waits"));
    // One more measures what waiting for an idle device costs.
    assert_eq!((driver_calls(&waits, "alloc"), driver_calls(&waits, "synchronize")), (1, 201), "{waits}");
    let mut command = built.with("address2", "loop", Some("caching"), folder.path());
    let driver = equal(command.env("VRAMLAB_INJECT_FREE", "driver").env("PLAIN", "1"));
    assert_eq!((driver_calls(&driver, "alloc"), driver_calls(&driver, "free")), (200, 200), "{driver}");
}

#[test]
#[ignore = "needs a C compiler"]
fn sixteen_threads_find_no_error() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for alloc in ["caching", "pytorch", "naive"] {
        let mut command = built.with("address2", "threads", Some(alloc), folder.path());
        equal(command.env("ROUNDS", "3000").env("DRIVER_WORK", "1"));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_part_of_a_segment_is_not_exported() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let caching = equal(&mut built.with("dlsym", "exports", Some("caching"), folder.path()));
    assert!(caching.contains("export 801") && caching.contains("cuIpcGetMemHandle was refused"), "{caching}");
    // Each allocation is a segment of its own.
    let naive = equal(&mut built.with("dlsym", "exports", Some("naive"), folder.path()));
    assert!(naive.contains("export 0"), "{naive}");
}

#[test]
#[ignore = "needs a C compiler"]
fn an_unknown_allocator_is_said_and_the_program_runs() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let mut command = built.with("dlsym", "loop", Some("cachign"), folder.path());
    let text = equal(command.env("PLAIN", "1"));
    assert!(text.contains("no allocator is called 'cachign'") && text.contains("memory stays the driver's"), "{text}");
}

#[test]
#[ignore = "needs a C compiler"]
fn a_driver_before_stream_ordered_memory_is_only_recorded() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for alloc in [None, Some("caching")] {
        for test in ["loop", "streams", "contexts"] {
            let mut command = built.with("dlsym", test, alloc, folder.path());
            command.env("OLD_DRIVER", "1").env("VRAMLAB_CUDA", built.path("11010/libcuda.so.1"));
            command.env("LD_LIBRARY_PATH", built.path("11010")).env("PLAIN", "1");
            let printed = equal(&mut command);
            let line = "memory stays the driver's: the NVIDIA driver supports CUDA 11.1 and 11.2 is needed: install driver 460 or newer\n";
            let said = printed.contains(line);
            assert_eq!(said, alloc.is_some(), "{printed}");
            if test == "loop" {
                assert_eq!(driver_calls(&printed, "alloc"), 200, "{printed}");
            }
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn older_drivers_serve_with_equal_results() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for version in OLDER {
        let on = |command: &mut Command| {
            command.env("VRAMLAB_CUDA", built.path(&format!("{version}/libcuda.so.1")));
            equal(command.env("LD_LIBRARY_PATH", built.path(version)))
        };
        let plain = on(&mut built.plain("dlsym", "loop"));
        assert_eq!(driver_calls(&plain, "alloc"), 200, "{version}: {plain}");
        // Also where the driver has no such function, since programs find the one of the library.
        for way in ["dlsym", "address1", "address2", "ptsz"] {
            for test in ["loop", "streams", "capture", "contexts", "errors", "threads"] {
                let served = on(built.with(way, test, Some("caching"), folder.path()).env("ROUNDS", "200"));
                if test == "loop" && way != "ptsz" {
                    assert_eq!(driver_calls(&served, "alloc"), 1, "{version}: {way}: {served}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn managed_and_pinned_memory_is_kept_on_request() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let plain = equal(&mut built.plain("dlsym", "kinds"));
    assert_eq!((driver_calls(&plain, "managed"), driver_calls(&plain, "pinned")), (100, 100), "{plain}");
    for free in ["waits", "ordered"] {
        for test in ["kinds", "advised", "errors", "threads", "contexts"] {
            let mut command = built.with("dlsym", test, Some("caching"), folder.path());
            command.env("VRAMLAB_INJECT_POOL", "managed,pinned").env("VRAMLAB_INJECT_FREE", free).env("POOLED", "1");
            let pooled = equal(command.env("ROUNDS", "200"));
            if test == "kinds" {
                assert_eq!((driver_calls(&pooled, "managed"), driver_calls(&pooled, "pinned")), (2, 2), "{pooled}");
            }
        }
    }
    let mut command = built.with("dlsym", "kinds", Some("caching"), folder.path());
    let one = equal(command.env("VRAMLAB_INJECT_POOL", "pinned"));
    assert_eq!(driver_calls(&one, "managed"), 100, "{one}");
}

/// Every allocator of pinned memory.
const HOSTS: [&str; 4] = ["host-exact", "host-pytorch", "host-cupy", "host-rmm-pool:initial_pool_size=1M"];

impl Built {
    /// A program whose pinned memory an allocator serves, and nothing else of it.
    pub(crate) fn pinned(&self, way: &str, test: &str, host: &str, record: &Path) -> Command {
        let mut command = self.with(way, test, None, record);
        command.env("VRAMLAB_INJECT_HOST", host).env_remove("PLAIN").env("DRIVER_HOST", "256");
        command
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn pinned_memory_is_served_with_equal_results() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let tests = ["pinned", "pinned-state", "pinned-exit", "kinds", "errors", "fork"];
    for host in HOSTS {
        for test in tests {
            for free in ["ordered", "waits"] {
                let mut command = built.pinned("address2", test, host, folder.path());
                // Other memory is the driver's.
                command.env("VRAMLAB_INJECT_FREE", free).env("DRIVER_WORK", "3").env("PLAIN", "1");
                if test == "pinned" {
                    command.env_remove("PLAIN");
                }
                equal(&mut command);
            }
        }
    }
    for way in WAYS.into_iter().filter(|way| *way != "unversioned") {
        equal(&mut built.plain(way, "pinned"));
        let served = equal(&mut built.pinned(way, "pinned", "host-exact", folder.path()));
        // One segment for each of eight flags; three requests are wrong, and the driver's.
        let plain = equal(&mut built.plain(way, "pinned"));
        let (served, plain) = (driver_calls(&served, "pinned"), driver_calls(&plain, "pinned"));
        assert_eq!((served, plain), (8 + 3, 26 + 3), "{way}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn pinned_memory_is_left_to_an_allocator_inside_the_program() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    equal(&mut built.plain("dlsym", "pinned-left"));
    let left = equal(&mut built.pinned("dlsym", "pinned-left", "host-exact", folder.path()));
    // One segment, and three requests after it; three frees, and one of a block that is free.
    assert_eq!((driver_calls(&left, "pinned"), driver_calls(&left, "unpinned")), (1 + 3, 3 + 1), "{left}");
}

#[test]
#[ignore = "needs a C compiler"]
fn a_driver_before_stream_ordered_memory_serves_segments_of_pinned_memory() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    let mut command = built.pinned("dlsym", "pinned", "host-exact", folder.path());
    command.env("OLD_DRIVER", "1").env("VRAMLAB_CUDA", built.path("11010/libcuda.so.1"));
    let served = equal(command.env("LD_LIBRARY_PATH", built.path("11010")));
    assert_eq!(driver_calls(&served, "pinned"), 8 + 3, "{served}");
}

#[test]
#[ignore = "needs a C compiler"]
fn a_pinned_block_waits_for_its_copies() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for host in HOSTS {
        for work in ["1", "40", "1000"] {
            for (alloc, free) in [(None, "ordered"), (Some("caching"), "ordered"), (None, "waits")] {
                let mut command = built.pinned("dlsym", "slow", host, folder.path());
                if let Some(alloc) = alloc {
                    command.env("VRAMLAB_INJECT_ALLOC", alloc);
                }
                command.env("VRAMLAB_INJECT_FREE", free).env("DRIVER_WORK", work);
                let served = equal(&mut command);
                assert!(driver_calls(&served, "pinned") < 67, "{host}: {served}");
                // The other device's context gets events, too.
                let waits = free == "waits";
                assert_eq!(driver_calls(&served, "elsewhere") == 0, waits, "{host}: {served}");
            }
        }
    }
    let exact = built.pinned("dlsym", "slow", "host-exact", folder.path()).env("DRIVER_WORK", "40").output().unwrap();
    // Segments of two sizes, and one for each of the two flags that the last blocks have.
    assert!(driver_calls(&printed(&exact), "pinned") <= 4, "{}", printed(&exact));
}

#[test]
#[ignore = "needs a C compiler"]
fn cached_pinned_memory_goes_back_before_a_request_is_refused() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    equal(built.plain("dlsym", "pinned-memory").env("DRIVER_HOST", "256"));
    // The others round 150 MiB up to what does not fit.
    equal(&mut built.pinned("dlsym", "pinned-memory", "host-exact", folder.path()));
    let mut command = built.pinned("dlsym", "pinned-memory", "host-exact:memory_limit=100M", folder.path());
    let limited = command.output().unwrap();
    assert!(!limited.status.success(), "a request above the limit is refused: {}", printed(&limited));
}

#[test]
#[ignore = "needs a C compiler"]
fn without_the_permission_to_pin_each_request_has_the_drivers_refusal() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    equal(built.plain("dlsym", "pinned-forbidden").env("DRIVER_FORBIDS", "1"));
    for host in HOSTS {
        equal(built.pinned("dlsym", "pinned-forbidden", host, folder.path()).env("DRIVER_FORBIDS", "1"));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn sixteen_threads_pin_memory() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for host in HOSTS {
        for free in ["ordered", "waits"] {
            let mut command = built.pinned("address2", "pinned-threads", host, folder.path());
            equal(command.env("ROUNDS", "400").env("DRIVER_WORK", "2").env("VRAMLAB_INJECT_FREE", free));
        }
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn an_unknown_allocator_of_pinned_memory_is_said_and_the_program_runs() {
    let (built, folder) = (Built::get(), tempfile::tempdir().unwrap());
    for (name, why) in [("host-exacd", "no allocator is called 'host-exacd'"), ("host-exact:keep=1", "keep")] {
        let text = equal(built.pinned("dlsym", "kinds", name, folder.path()).env("PLAIN", "1"));
        assert!(text.contains(why) && text.contains("pinned memory stays the driver's"), "{text}");
        assert_eq!(driver_calls(&text, "pinned"), 100, "{text}");
    }
}
