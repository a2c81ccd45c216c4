//! The program `inside`: its options, and the environment that puts an allocator under PyTorch.

use super::plan::{LIMIT, Run};
use super::programs::ALLOC;
use super::spec::{OptionValue, Program};
use std::ffi::OsString;
use std::path::Path;
use vramlab::Selection;

/// The options, switches last. `program` is the first word of `programs.py`; `alloc`, an allocator of VramLab or of
/// [`NATIVE`], and `conf`, the text of `PYTORCH_CUDA_ALLOC_CONF`, become variables; the limit follows from other runs.
pub(super) const OPTIONS: [&str; 12] = [
    "program",
    ALLOC,
    "conf",
    LIMIT,
    "steps",
    "warm-up",
    "seed",
    "while-loading",
    "recorder",
    "latency",
    "history",
    "small",
];
pub(super) const SWITCHES: [&str; 3] = ["latency", "history", "small"];
/// PyTorch's own allocators with their settings.
const NATIVE: [(&str, &str); 3] =
    [("native", ""), ("expandable", "expandable_segments:True"), ("cudaMallocAsync", "backend:cudaMallocAsync")];

/// The settings of an allocator of PyTorch, by its name.
fn native_conf(alloc: &str) -> Option<&'static str> {
    NATIVE.iter().find(|(name, _)| *name == alloc).map(|(_, conf)| *conf)
}

/// Whether an option becomes a variable, or a limit in bytes.
pub(super) fn is_variable(name: &str) -> bool {
    [ALLOC, "conf", LIMIT].contains(&name)
}

/// Whether a name is one of PyTorch's own allocators.
pub(super) fn is_native(alloc: &str) -> bool {
    native_conf(alloc).is_some()
}

/// The variables of a run.
pub(super) fn variables(run: &Run, pytorch: &Path) -> Vec<(String, Option<OsString>)> {
    let text = |name: &str| run.option(name).map(ToString::to_string).filter(|text| !text.is_empty());
    // A forked process calls the start hook itself.
    environment(text(ALLOC).as_deref(), text("conf"), true, !run.fork, pytorch)
}

/// The variables that put an allocator under PyTorch: neither the user's settings of PyTorch's allocator nor another
/// allocator reach the process. `serves`: an allocator of VramLab is named; `hook`: the start hook puts it in.
pub(super) fn environment(
    alloc: Option<&str>,
    conf: Option<String>,
    serves: bool,
    hook: bool,
    pytorch: &Path,
) -> Vec<(String, Option<OsString>)> {
    let native = alloc.and_then(native_conf);
    let conf = conf.or_else(|| native.filter(|conf| !conf.is_empty()).map(str::to_owned));
    let alloc = alloc.filter(|_| native.is_none() && serves);
    let inherited = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut out: Vec<(String, Option<OsString>)> = inherited
        .filter(|name| name.starts_with("PYTORCH_") || name.starts_with("VRAMLAB_ALLOC"))
        .map(|name| (name, None))
        .collect();
    // The package, and before it the start hook.
    let package = pytorch.join("../../app/python/src");
    let mut paths = vec![package.clone()];
    paths.extend(std::env::var_os("PYTHONPATH").iter().flat_map(std::env::split_paths));
    if alloc.is_some() && hook {
        paths.insert(0, package.join("vramlab/_site"));
    }
    out.extend(std::env::join_paths(paths).ok().map(|paths| ("PYTHONPATH".to_owned(), Some(paths))));
    out.extend(conf.map(|conf| ("PYTORCH_CUDA_ALLOC_CONF".to_owned(), Some(conf.into()))));
    out.extend(alloc.map(|alloc| ("VRAMLAB_ALLOC".to_owned(), Some(alloc.into()))));
    out
}

/// Checks a value of an option; names of programs are Python's.
pub(super) fn check(name: &str, value: &OptionValue) -> Result<(), String> {
    let text = value.to_string();
    match name {
        ALLOC if native_conf(&text).is_none() => text.parse::<Selection>().map(drop).map_err(|error| error.to_string()),
        LIMIT if !matches!(value, OptionValue::Number(times) if (0.1..=100.0).contains(times)) => {
            Err(format!("{LIMIT} must be a number from 0.1 to 100, such as 1.15, found {text}"))
        }
        "program" | "while-loading" | "recorder" if text.is_empty() || text.starts_with('-') => {
            Err(format!("{name} must be a word, found '{text}'"))
        }
        "steps" | "warm-up" | "seed" if !matches!(value, OptionValue::Integer(0..)) => {
            Err(format!("--{name} must be a count, found {text}"))
        }
        _ => Ok(()),
    }
}

/// Checks the options of a run together; the error is about the first of its two texts, an option.
pub(super) fn check_run(run: &Run) -> Result<(), (&'static str, String)> {
    if run.program != Program::Inside {
        return Ok(());
    }
    if run.option("program").is_none() {
        return Err(("program", "inside needs the option 'program', a name in programs.py".to_owned()));
    }
    let alloc = run.option(ALLOC).map(ToString::to_string).unwrap_or_default();
    if run.option("conf").is_some() && native_conf(&alloc).is_some_and(|conf| !conf.is_empty()) {
        return Err((ALLOC, format!("{ALLOC} = \"{alloc}\" sets conf; leave conf out")));
    }
    Ok(())
}
