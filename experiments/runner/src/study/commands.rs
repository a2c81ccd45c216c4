//! The program `command`: a command line of the catalogue, unchanged, under `vramlab run`, or with an allocator under
//! PyTorch. This file knows the catalogue, the requirements of its entries and the words of a command;
//! [`super::printed`] reads the output.

use super::inside;
use super::plan::Run;
use super::programs::{ALLOC, Inputs};
use super::spec::{OptionValue, Program};
use crate::repository::{self, this_program};
use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use vramlab::backends::parse_host_list;
use vramlab::input::{WRITTEN, read_text};
use vramlab::settings::Meant;
use vramlab::{DeviceKind, Selection};

/// The options, switches last. `program` is a name in the catalogue, `of` the value of its `{of}`, `host-alloc` that of its
/// `{host-alloc}`: an allocator of pinned memory, or `pytorch`.
pub(super) const OPTIONS: [&str; 7] = ["program", "of", HOST_ALLOC, WAY, ALLOC, OWN_POOL, POISON];
pub(super) const SWITCHES: [&str; 2] = [OWN_POOL, POISON];
const HOST_ALLOC: &str = "host-alloc";
/// PyTorch's own allocator of pinned memory.
const OWN_HOST_ALLOC: &str = "pytorch";
const WAY: &str = "way";
const OWN_POOL: &str = "own-pool";
const POISON: &str = "poison";
/// File of the catalogue, in `experiments/`.
const CATALOGUE: &str = "commands.toml";
/// Directory of compiled programs, in the experiment's directory.
pub(super) const BUILT: &str = "built";
/// Directory of what `vramlab run` records, in the run's directory.
pub(super) const RECORDED: &str = "recorded";
/// The placeholder of the interpreter.
const PYTHON: &str = "{python}";
/// Programs of CUDA's toolkit that is not on the PATH.
const TOOLKIT: &str = "/usr/local/cuda/bin";
/// Ports of jobs of several processes, below those that the kernel chooses itself.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

vramlab::device::named! {
    /// How a command runs.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(super) enum Way {
        /// Without `vramlab run`.
        #[default]
        Plain "plain",
        /// Recorded, with the driver's memory, or PyTorch's.
        Record "record",
        /// Recorded with call stacks.
        Stacks "stacks",
        /// Served by `alloc` with `--free driver`.
        Driver "driver",
        /// Served by `alloc` with `--free waits`.
        Waits "waits",
        /// Served by `alloc` with `--free ordered`.
        Ordered "ordered",
    }
}

impl Way {
    fn serves(self) -> bool {
        matches!(self, Self::Driver | Self::Waits | Self::Ordered)
    }
}

/// An entry of the catalogue.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Listed {
    /// CUDA source below `experiments/`, which is compiled to `{built}`.
    pub(super) source: Option<String>,
    /// Options of the compiler.
    #[serde(default)]
    pub(super) flags: Vec<String>,
    /// Words, with placeholders in braces: `built`, `this` (this program), `python`, `experiments`, `of`, `host-alloc`, `repeat`,
    /// `port`, and variables of the environment in capitals, which have to be set.
    command: Vec<String>,
    /// The words of the option `own-pool`: the program with the pool that it has itself.
    own_pool: Option<Vec<String>>,
    /// Variables that are set unless the user's environment has them.
    #[serde(default)]
    environment: BTreeMap<String, String>,
    /// Python modules that it needs.
    #[serde(default)]
    modules: Vec<String>,
    /// Programs that it needs, on the PATH or in CUDA's toolkit.
    #[serde(default)]
    programs: Vec<String>,
    /// Whether `alloc` is put under PyTorch, and not between the program and the driver.
    #[serde(default)]
    pub(super) pytorch: bool,
    /// Lines of the output that have the values: text with names in braces.
    #[serde(default)]
    pub(super) prints: Vec<String>,
    /// Lines with values that not every run prints.
    #[serde(default)]
    pub(super) may_print: Vec<String>,
    /// First key of the JSON objects that it prints, one a process.
    pub(super) json: Option<String>,
    /// Names of values that have to be equal in all runs of the program.
    #[serde(default)]
    pub(super) results: Vec<String>,
    /// Steps over which the printed time is divided.
    pub(super) steps: Option<f64>,
    /// Whether it makes no memory calls, so that its record is empty.
    #[serde(default)]
    pub(super) no_memory_calls: bool,
    /// Exit codes of a run that is not a failure.
    #[serde(default = "zero")]
    pub(super) codes: Vec<i32>,
}

fn zero() -> Vec<i32> {
    vec![0]
}

fn read() -> Result<BTreeMap<String, Listed>> {
    let path = repository::find(CATALOGUE).with_context(|| format!("experiments/{CATALOGUE} is not here"))?;
    let text = read_text(&path, WRITTEN).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).map_err(|error| anyhow!("{}: {}", path.display(), error.message()))
}

/// The entry of a name. The catalogue is read once a process.
pub(super) fn find(name: &str) -> Result<&'static Listed> {
    static CATALOGUED: OnceLock<Result<BTreeMap<String, Listed>, String>> = OnceLock::new();
    let all = CATALOGUED.get_or_init(|| read().map_err(|error| format!("{error:#}")));
    let all = all.as_ref().map_err(|error| anyhow!("{error}"))?;
    all.get(name).ok_or_else(|| {
        let among: Vec<&str> = all.keys().map(String::as_str).collect();
        anyhow!("no program is called '{name}' in {CATALOGUE}{}", Meant { name, among: &among })
    })
}

/// The name of the run's program in the catalogue.
pub(super) fn name(run: &Run) -> String {
    run.option("program").map(ToString::to_string).unwrap_or_default()
}

fn text(run: &Run, option: &str) -> Option<String> {
    run.option(option).map(ToString::to_string).filter(|text| !text.is_empty())
}

fn is_on(run: &Run, option: &str) -> bool {
    run.option(option) == Some(&OptionValue::Switch(true))
}

pub(super) fn way(run: &Run) -> Way {
    text(run, WAY).and_then(|way| Way::named(&way)).unwrap_or_default()
}

/// Whether a run is one that others are compared with: unchanged, under the memory that the program has by itself.
pub(super) fn is_plain(run: &Run) -> bool {
    let native = text(run, ALLOC).is_none_or(|alloc| alloc == "native");
    let own_host = text(run, HOST_ALLOC).is_none_or(|alloc| alloc == OWN_HOST_ALLOC);
    way(run) == Way::Plain && native && own_host && !is_on(run, OWN_POOL)
}

/// Checks a value of an option.
pub(super) fn check(option: &str, value: &OptionValue) -> Result<(), String> {
    let text = value.to_string();
    match option {
        WAY => Way::named(&text)
            .map(drop)
            .ok_or_else(|| format!("{WAY} is one of {}, found '{text}'", Way::ALL.map(Way::name).join(", "))),
        "program" => find(&text).map(drop).map_err(|error| format!("{error:#}")),
        "of" if text.is_empty() || text.starts_with('-') || text.contains(['/', '\\']) => {
            Err(format!("of must be a word, found '{text}'"))
        }
        HOST_ALLOC if text == OWN_HOST_ALLOC => Ok(()),
        HOST_ALLOC => match parse_host_list(&text).map_err(|error| error.to_string())?.len() {
            1 => Ok(()),
            _ => Err(format!("{HOST_ALLOC} must be one allocator, found '{text}'")),
        },
        ALLOC if inside::is_native(&text) => Ok(()),
        ALLOC => text.parse::<Selection>().map(drop).map_err(|error| error.to_string()),
        _ => Ok(()),
    }
}

/// Checks the options of a run together; the error is about the first of its two texts, an option.
pub(super) fn check_run(run: &Run) -> Result<(), (&'static str, String)> {
    if run.program != Program::Command {
        return Ok(());
    }
    let fails = |option, message: &str| Err((option, message.to_owned()));
    let Some(name) = text(run, "program") else {
        return fails("program", "command needs the option 'program', a name in commands.toml");
    };
    let listed = find(&name).map_err(|error| ("program", format!("{error:#}")))?;
    let has = |placeholder: &str| listed.command.iter().any(|word| word.contains(placeholder));
    let (way, alloc) = (way(run), text(run, ALLOC));
    for option in ["of", HOST_ALLOC] {
        let needed = has(&format!("{{{option}}}"));
        if needed != run.option(option).is_some() {
            let needs = if needed { "needs" } else { "has not" };
            return Err(("program", format!("{name} {needs} the option '{option}'")));
        }
    }
    if run.fork && listed.command.first().is_none_or(|first| first != PYTHON) {
        return Err(("fork", format!("{name} does not begin with {PYTHON}, so it cannot be forked")));
    }
    if run.fork && (way != Way::Plain || alloc.is_some() || is_on(run, OWN_POOL)) {
        return fails("fork", "a forked command runs as it is; leave way, alloc and own-pool out");
    }
    if is_on(run, OWN_POOL) && listed.own_pool.is_none() {
        return Err((OWN_POOL, format!("{name} has no pool of its own in {CATALOGUE}")));
    }
    if is_on(run, POISON) && !way.serves() {
        return fails(POISON, "poison fills memory that is served; way is driver, waits or ordered");
    }
    match (listed.pytorch, alloc) {
        (true, _) if way.serves() => fails(WAY, "alloc serves a program of PyTorch; way is plain, record or stacks"),
        (false, Some(_)) if !way.serves() => fails(ALLOC, "alloc serves nothing here; way is driver, waits or ordered"),
        _ => Ok(()),
    }
}

/// The compiler of CUDA sources.
pub(super) fn nvcc() -> PathBuf {
    std::env::var_os("NVCC").map_or_else(|| located("nvcc"), PathBuf::from)
}

/// A program on the PATH or of CUDA's toolkit; its name if it is in neither.
fn located(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from(TOOLKIT)]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file()).unwrap_or_else(|| PathBuf::from(name))
}

/// Variables of the environment that words name: placeholders in capitals.
fn variables_of(words: &[String]) -> impl Iterator<Item = &str> {
    let placeholders = words.iter().flat_map(|word| word.split('{').skip(1));
    let names = placeholders.filter_map(|rest| rest.split_once('}')).map(|(name, _)| name);
    names.filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
}

/// The reason why a run is not possible here, if any.
pub(super) fn missing(run: &Run, inputs: &Inputs) -> Result<Option<String>> {
    let name = name(run);
    let listed = find(&name)?;
    let quiet = |command: &mut Command| {
        command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok().filter(|output| output.status.success())
    };
    if listed.source.is_some() && quiet(Command::new(nvcc()).arg("--version")).is_none() {
        return Ok(Some(format!("{name} needs nvcc, which is not here; install CUDA's toolkit, or name it with NVCC")));
    }
    let words = words_of(listed, run);
    if let Some(variable) = variables_of(words).find(|variable| std::env::var_os(variable).is_none()) {
        return Ok(Some(format!("{name} needs the variable {variable}; {CATALOGUE} says what it names")));
    }
    if let Some(program) = listed.programs.iter().find(|program| !located(program).is_file()) {
        return Ok(Some(format!("{name} needs {program}, which is not on the PATH")));
    }
    if !listed.modules.is_empty() {
        let code = "import sys; from importlib.util import find_spec\n\
                    print(next((name for name in sys.argv[1:] if find_spec(name) is None), ''), end='')";
        let python = inputs.python.to_string_lossy();
        let Some(output) = quiet(Command::new(&inputs.python).args(["-c", code]).args(&listed.modules)) else {
            return Ok(Some(format!("{name} needs Python 3, and {python} does not start; name it with PYTHON")));
        };
        let module = String::from_utf8_lossy(&output.stdout).into_owned();
        if !module.is_empty() {
            return Ok(Some(format!("{name} needs the Python package {module}, which {python} has not")));
        }
    }
    Ok(None)
}

fn words_of<'a>(listed: &'a Listed, run: &Run) -> &'a [String] {
    listed.own_pool.as_ref().filter(|_| is_on(run, OWN_POOL)).unwrap_or(&listed.command)
}

/// The words of a run's command, each as the system and as a reader has it.
pub(super) fn words(run: &Run, inputs: &Inputs, kind: DeviceKind) -> Result<Vec<(String, String)>> {
    let (name, way) = (name(run), way(run));
    let listed = find(&name)?;
    let folder =
        repository::find(CATALOGUE).and_then(|path| Some(std::path::absolute(path).ok()?.parent()?.to_owned()));
    let folder = folder.with_context(|| format!("experiments/{CATALOGUE} is not here"))?;
    let python = inputs.python.to_string_lossy().into_owned();
    let program = this_program()?.to_string_lossy().into_owned();
    let [of, host] = ["of", HOST_ALLOC].map(|option| text(run, option).unwrap_or_default());
    let words = words_of(listed, run);
    let fill = |word: &String| -> Result<(String, String)> {
        let port = if word.contains("{port}") { free_port()?.to_string() } else { String::new() };
        let repeat = run.repeat.to_string();
        let common = |word: &str| {
            let word = word.replace("{of}", &of).replace("{host-alloc}", &host).replace("{repeat}", &repeat);
            word.replace("{port}", &port)
        };
        let mut actual = common(word)
            .replace("{built}", &format!("../../{BUILT}/{name}"))
            .replace("{this}", &program)
            .replace(PYTHON, &python)
            .replace("{experiments}", &folder.to_string_lossy());
        let mut shown = common(word)
            .replace("{built}", &name)
            .replace("{this}", "experiments")
            .replace(PYTHON, "python3")
            .replace("{experiments}", "experiments");
        for variable in variables_of(words) {
            let value = std::env::var(variable).unwrap_or_else(|_| format!("{{{variable}}}"));
            actual = actual.replace(&format!("{{{variable}}}"), &value);
            shown = shown.replace(&format!("{{{variable}}}"), &format!("${variable}"));
        }
        Ok((actual, shown))
    };
    let mut out = words.iter().map(fill).collect::<Result<Vec<_>>>()?;
    if let Some((first, _)) = out.first_mut().filter(|(first, _)| listed.programs.contains(first)) {
        *first = located(first).to_string_lossy().into_owned();
    }
    if listed.pytorch && kind != DeviceKind::Cuda {
        out.push(("--device=cpu".to_owned(), "--device=cpu".to_owned()));
    }
    if way == Way::Plain {
        return Ok(out);
    }
    let same = |word: &str| (word.to_owned(), word.to_owned());
    let mut under = vec![(program, "vramlab".to_owned()), ("vramlab".to_owned(), String::new())];
    under.extend(["run", "--quiet", "--no-advise"].map(same));
    under.push((format!("--output={RECORDED}"), String::new()));
    if way != Way::Stacks {
        under.push(same("--stacks=off"));
    }
    // A program of Python without an allocator under PyTorch is recorded at the driver.
    if !listed.pytorch && words.iter().any(|word| word == PYTHON) {
        under.push(same("--at-driver"));
    }
    if way.serves() {
        let alloc = text(run, ALLOC).unwrap_or_else(|| "caching".to_owned());
        under.extend([format!("--alloc={alloc}"), format!("--free={}", way.name())].iter().map(|word| same(word)));
    } else if let Some(alloc) = text(run, ALLOC).filter(|alloc| !inside::is_native(alloc)) {
        under.push(same(&format!("--alloc={alloc}")));
    }
    if is_on(run, POISON) {
        under.push(same("--poison"));
    }
    under.push(same("--"));
    under.extend(out);
    Ok(under)
}

/// The variables of a run; `None`: removed.
pub(super) fn variables(run: &Run, inputs: &Inputs) -> Result<Vec<(String, Option<OsString>)>> {
    let listed = find(&name(run))?;
    let pytorch = inputs.pytorch.as_deref().context("experiments/pytorch is not here")?;
    let alloc = text(run, ALLOC).filter(|_| listed.pytorch);
    // `vramlab run` puts its own hook in.
    let hook = way(run) == Way::Plain;
    let mut out = inside::environment(alloc.as_deref(), None, hook, hook, pytorch);
    let unset = listed.environment.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    out.extend(unset.map(|(name, value)| (name.clone(), Some(value.into()))));
    // For programs that are linked with the toolkit's shared libraries.
    let nvcc = nvcc();
    let libraries = nvcc.parent().and_then(Path::parent).map(|toolkit| toolkit.join("lib64"));
    if let Some(libraries) = libraries.filter(|folder| listed.source.is_some() && folder.is_dir()) {
        let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let paths = std::env::split_paths(&given).chain([libraries]);
        out.extend(std::env::join_paths(paths).ok().map(|paths| ("LD_LIBRARY_PATH".to_owned(), Some(paths))));
    }
    Ok(out)
}

/// A port that is free and that no other run of this process had.
fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    for _ in PORTS {
        let port = PORTS.start + NEXT.fetch_add(1, Relaxed) % (PORTS.end - PORTS.start);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port from {} to {} is free", PORTS.start, PORTS.end)
}

/// Compiles a program into a directory, unless it is there.
pub(super) fn build(name: &str, folder: &Path) -> Result<()> {
    let listed = find(name)?;
    let (Some(source), target) = (&listed.source, folder.join(name)) else { return Ok(()) };
    if target.is_file() {
        return Ok(());
    }
    let source = repository::find(source).with_context(|| format!("experiments/{source} is not here"))?;
    let source = std::path::absolute(source).context("the current directory has no path")?;
    // A name of its own until it is complete: shards share the directory.
    let partial = folder.join(format!(".{name}.{}", std::process::id()));
    let mut command = Command::new(nvcc());
    command.args(["-arch=native", "-O2", "-g", "-o"]).arg(&partial).arg(&source).args(&listed.flags);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", nvcc().display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        let line = said.lines().find(|line| line.contains("error")).or(said.lines().next_back()).unwrap_or_default();
        bail!("{} cannot be compiled: {}", listed.source.as_deref().unwrap_or_default(), line.trim());
    }
    std::fs::rename(&partial, &target).with_context(|| format!("cannot make {}", target.display()))
}
