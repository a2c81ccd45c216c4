//! What the architecture promises and a text search can hold: who may name CUDA, who may be unsafe, who may read a
//! clock, how long a file may be.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// Longest source file, in lines: one that a person can hold in mind.
const LONGEST: usize = 600;

struct Source {
    /// Path relative to the workspace, with slashes.
    name: String,
    text: String,
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn collect(folder: &Path, out: &mut Vec<Source>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // What a crate of its own is built into is nobody's source.
            if path.ends_with("target") {
                continue;
            }
            collect(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(workspace()).unwrap().to_string_lossy().replace('\\', "/");
            out.push(Source { name, text: fs::read_to_string(&path).unwrap() });
        }
    }
}

/// Every Rust source below some folders of the workspace.
fn sources(folders: &[&str]) -> Vec<Source> {
    let mut out = Vec::new();
    for folder in folders {
        collect(&workspace().join(folder), &mut out);
    }
    assert!(!out.is_empty(), "{folders:?} should hold sources");
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

fn all() -> Vec<Source> {
    sources(&["allocators", "kernels", "trainer", "experiments"])
}

/// The code of a line: without its comment, and nothing of a comment line.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

fn is_unsafe(line: &str) -> bool {
    let code = code(line);
    // Not a name such as `unsafe_code`, nor the word in a message.
    ["unsafe {", "unsafe impl", "unsafe fn", "unsafe extern"].iter().any(|form| code.contains(form))
        && !code.contains("\"unsafe")
}

/// Whether a line is a test's.
fn is_test(source: &Source, at: usize) -> bool {
    let tests = source.text.find("#[cfg(test)]\nmod tests").unwrap_or(source.text.len());
    source.name.contains("/tests") || source.text[..tests].lines().count() <= at
}

/// Lines of all sources for which `bad` holds, as `name:line`.
fn offences(sources: &[Source], bad: impl Fn(&Source, &[&str], usize) -> bool) -> Vec<String> {
    let mut out = Vec::new();
    for source in sources {
        let lines: Vec<&str> = source.text.lines().collect();
        let found = (0..lines.len()).filter(|at| bad(source, &lines, *at));
        out.extend(found.map(|at| format!("{}:{}: {}", source.name, at + 1, lines[at].trim())));
    }
    out
}

#[test]
fn backends_policies_and_instruments_never_name_cuda() {
    let folders = ["allocators/src/backends", "allocators/src/policy", "allocators/src/instruments"];
    let found = offences(&sources(&folders), |source, lines, at| {
        let code = code(lines[at]);
        let device = ["cudarc", "CudaDriver", "device::cuda", "SimDriver"].iter().any(|name| code.contains(name));
        device && !is_test(source, at)
    });
    assert_eq!(found, [""; 0], "a backend should speak to `Driver`");
}

#[test]
fn only_the_cuda_folder_names_the_binding() {
    let found = offences(&sources(&["allocators/src"]), |source, lines, at| {
        code(lines[at]).contains("cudarc") && !source.name.starts_with("allocators/src/device/cuda")
    });
    assert_eq!(found, [""; 0]);
}

#[test]
fn unsafe_code_is_where_it_is_expected() {
    // Each with what it is needed for.
    let allowed = [
        "allocators/src/contract/allocator.rs",      // the contract of a free
        "allocators/src/client/buffer.rs",           // buffers that keep that contract
        "allocators/src/device/clock.rs",            // the processor's counter
        "allocators/src/device.rs",                  // the contracts of a device
        "allocators/src/device/cuda",                // CUDA
        "allocators/src/device/graph.rs",            // the contract of a graph
        "allocators/src/device/ids.rs",              // the contract of a handle
        "allocators/src/device/hooked.rs",           // passes contracts on
        "allocators/src/device/faulty.rs",           // a hook
        "allocators/src/device/metered.rs",          // frees what it measures with
        "allocators/src/device/null",                // a device
        "allocators/src/device/sim.rs",              // a device
        "allocators/src/device/sim/graphs.",         // a device's graphs
        "allocators/src/device/sim/memory.",         // host memory behind addresses
        "allocators/src/device/sim/pools.",          // a device's pools
        "allocators/src/device/sim/vmm.",            // mappings of host memory
        "allocators/src/backends/",                  // frees
        "allocators/src/policy/heap.rs",             // gives segments back, destroys events
        "allocators/src/policy/heap/extend.rs",      // maps and unmaps parts of segments
        "allocators/src/policy/source.rs",           // gives segments back
        "allocators/src/policy/source/expandable.",  // maps and unmaps handles
        "allocators/src/client/graph.rs",            // destroys graphs
        "allocators/src/instruments/",               // passes contracts on
        "allocators/src/sync.rs",                    // the lock of a shard
        "allocators/src/histories/replay/driver.rs", // a hook with addresses of its own
        "allocators/src/histories/replay/near.",     // frees what it moved
        "allocators/src/histories/replay/counting.", // a hook
        "allocators/src/histories/replay/watched.",  // a hook
        "allocators/src/histories/replay/run.rs",    // a client: frees, fills
        "allocators/src/histories/workload.rs",      // frees
        "allocators/src/testing/",                   // a client: uses, frees, launches
    ];
    let found = offences(&sources(&["allocators/src"]), |source, lines, at| {
        is_unsafe(lines[at]) && !allowed.iter().any(|name| source.name.starts_with(name))
    });
    assert_eq!(found, [""; 0]);
    for name in [
        "allocators/src/backends/caching/core.rs",
        "allocators/src/policy/fit.rs",
        "allocators/src/policy/grow.rs",
        "allocators/src/policy/size.rs",
        "allocators/src/policy/split.rs",
        "allocators/src/space.rs",
        "allocators/src/device/sim/heap.rs",
        "allocators/src/device/sim/timeline.rs",
    ] {
        let text = fs::read_to_string(workspace().join(name)).unwrap();
        assert!(text.contains("#![forbid(unsafe_code)]"), "{name} should forbid unsafe code");
    }
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let found = offences(&all(), |source, lines, at| {
        let code = code(lines[at]);
        let asks = is_unsafe(lines[at]) && (code.contains("unsafe {") || code.contains("unsafe impl"));
        // The forwarding wrapper says it once for all of its calls.
        let said_above = source.name.ends_with("device/hooked.rs") && source.text.contains("// SAFETY (for every");
        let first = at.saturating_sub(3);
        // A comment block counts from its first line on, however long it is.
        let start =
            (0..first).rev().find(|line| !lines[*line].trim_start().starts_with("//")).map_or(0, |line| line + 1);
        asks && !said_above && !lines[start..=at].iter().any(|line| line.contains("SAFETY"))
    });
    assert_eq!(found, [""; 0], "an unsafe block without a SAFETY comment within three lines");
}

#[test]
fn only_the_clock_reads_the_time() {
    let found = offences(&sources(&["allocators/src", "kernels/src"]), |source, lines, at| {
        // A graph is instantiated, which takes no time of ours.
        let code = code(lines[at]).replace("Instantiate", "");
        let reads = ["Instant", "SystemTime"].iter().any(|name| code.contains(name));
        reads && source.name != "allocators/src/device/clock.rs"
    });
    assert_eq!(found, [""; 0], "time should come from a `Clock`");
}

#[test]
fn bookkeeping_knows_no_device_and_no_clock() {
    let mut looked_at = sources(&["allocators/src"]);
    let files = ["space", "policy/size", "policy/fit", "policy/split", "backends/caching/core"];
    looked_at.retain(|source| files.iter().any(|file| source.name.starts_with(&format!("allocators/src/{file}"))));
    assert!(looked_at.len() > 12, "these files should be there");
    let found = offences(&looked_at, |_, lines, at| {
        let code = code(lines[at]);
        ["Driver", "Clock", "Mutex", "Arc<"].iter().any(|name| code.contains(name))
    });
    assert_eq!(found, [""; 0]);
}

/// Nothing but its own file names a backend; the rest asks the list for settings and capabilities. What the command line's
/// help says is a default or an example has the name in a longer text.
#[test]
fn a_backend_is_named_in_its_file_and_in_the_list() {
    let all = vramlab::backends::all();
    // Words that are something else there.
    let lab = "allocators/src/backends/lab.rs";
    let other = [("experiments/src/study/spec.rs", "pytorch"), (lab, "bfc"), (lab, "tlsf")];
    let sources = sources(&["allocators/src", "trainer/src", "experiments/src"]);
    for backend in &all {
        let (literal, entry) = (format!("\"{}\"", backend.name), format!("name: \"{}\"", backend.name));
        let own: Vec<&str> =
            sources.iter().filter(|source| source.text.contains(&entry)).map(|source| source.name.as_str()).collect();
        assert_eq!(own.len(), 1, "{} has its entry in one file: {own:?}", backend.name);
        let found = offences(&sources, |source, lines, at| {
            let known = other.iter().any(|(file, word)| *file == source.name && *word == backend.name);
            code(lines[at]).contains(&literal) && !own.contains(&source.name.as_str()) && !known && !is_test(source, at)
        });
        assert_eq!(found, [""; 0], "ask for a setting or a capability instead of the name");
    }
    let found = offences(&sources, |source, lines, at| {
        let code = code(lines[at]);
        let list = source.name.starts_with("allocators/src/backends/registry");
        code.contains("::BACKEND") && !list && !is_test(source, at)
    });
    assert_eq!(found, [""; 0], "ask for a setting or a capability instead of the entry");
    let found = offences(&sources, |source, lines, at| {
        code(lines[at]).contains("backend().capabilities") && !is_test(source, at)
    });
    assert_eq!(found, [""; 0], "settings change what a backend can do: ask the selection");
}

#[test]
fn no_file_is_too_long() {
    let folders = ["allocators", "kernels", "trainer", "experiments"];
    let long: Vec<String> = sources(&folders)
        .iter()
        .filter(|source| source.text.lines().count() > LONGEST)
        .map(|source| format!("{}: {} lines", source.name, source.text.lines().count()))
        .collect();
    assert_eq!(long, [""; 0], "split what has more than {LONGEST} lines");
}
