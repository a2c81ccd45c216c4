//! Runs of the program `command` over a catalogue of shell scripts and of a C program with a stand-in for CUDA's driver.

use crate::common::{PROGRAM, Ran, TestDir, json_at, names};
use serde_json::{Value, json};
use std::path::Path;

/// A stand-in for the compiler: its source is a shell script.
const NVCC: &str = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\ncp \"$6\" \"$5\" && chmod 755 \"$5\"\n";

const CATALOGUE: &str = r#"
[built]
source = "loop.cu"
command = ["{built}", "500"]
prints = ["{us} us a step, total {total}"]
results = ["total"]

[broken]
source = "missing.cu"
command = ["{built}"]

[words]
command = ["sh", "{experiments}/words.sh", "{of}"]
json = "acceptance"
results = ["losses"]

[pool]
command = ["echo", "plain"]
own-pool = ["echo", "pool"]

[variable]
command = ["{NOT_SET_HERE}"]

[module]
command = ["true"]
modules = ["no_such_module"]
"#;

/// What it does follows from its word.
const WORDS: &str = r#"
case $1 in
  breaks) echo "error: no luck" >&2; exit 7 ;;
  refused) echo "cudaMalloc: no device"; exit 1 ;;
  silent) exit 0 ;;
  hangs) exec sleep 600 ;;
  leaves) sleep 600 & ;;
esac
loss=1.0
[ "$1" = differs ] && [ -n "$PYTORCH_CUDA_ALLOC_CONF" ] && loss=2.0
echo "{\"acceptance\": \"$1\", \"rank\": 0, \"losses\": [0.5, $loss], \"peak_reserved\": 4096}"
"#;

/// A directory with the catalogue, and a spec with these arms.
fn test_dir(arms: &str) -> TestDir {
    let test_dir = TestDir::new();
    std::fs::create_dir_all(test_dir.at("experiments")).unwrap();
    test_dir.write("experiments/commands.toml", CATALOGUE);
    test_dir.write("experiments/words.sh", WORDS);
    test_dir.write("experiments/loop.cu", "#!/bin/sh\necho \"12.5 us a step, total $1\"\n");
    test_dir.program("nvcc", NVCC);
    let text = format!("name = \"small\"\nquestion = \"?\"\nrepeats = 2\ndevices = [\"sim\"]\nkeep = []\n{arms}");
    test_dir.write("small.toml", text);
    test_dir
}

fn arm(name: &str, options: &str, matrix: &str) -> String {
    format!(
        "[[arms]]\nname = \"{name}\"\nprogram = \"command\"\ndevices = [\"sim\"]\noptions = {{ {options} }}\nmatrix = {{ {matrix} }}\n"
    )
}

fn run(test_dir: &TestDir, more: &[&str]) -> Ran {
    let mut command = test_dir.process(&[&["run", "small.toml", "--device", "sim", "-o", "out"], more].concat());
    command.env("NVCC", test_dir.at("nvcc")).env_remove("PYTORCH_CUDA_ALLOC_CONF");
    Ran::of(command.output().unwrap())
}

fn file(test_dir: &TestDir, run: &str, name: &str) -> Value {
    json_at(&test_dir.at("out/small/runs").join(run).join(name))
}

#[cfg(unix)]
#[test]
fn a_program_is_compiled_once_and_its_values_are_read() {
    let test_dir = test_dir(
        &[arm("all", "program = \"built\"", ""), arm("pool", "program = \"pool\"", "own-pool = [false, true]")]
            .concat(),
    );
    let output = run(&test_dir, &["--json"]).ok();
    let cells: Vec<Value> = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(cells[0]["median"], 12.5e-6);
    let result = file(&test_dir, "00-all-r0", "result.json");
    assert_eq!(result, json!({"us": 12.5, "values": {"total": 500.0}, "results": {"total": 500.0}}));
    let record = file(&test_dir, "00-all-r0", "run.json");
    assert_eq!((&record["command"], &record["files"]), (&json!(["built", "500"]), &json!(["result.json"])));
    assert_eq!(file(&test_dir, "04-pool-on-r0", "result.json")["results"], json!({"output": "pool"}));
    assert!(
        output.stderr.contains("note: results of pool differ from its unchanged runs': pool on r0 by inf"),
        "{output:?}"
    );
    assert!(output.stderr.contains("results  small of equal results: built"), "{output:?}");
    // The compiled program can be made again.
    assert_eq!(names(&test_dir.at("out/small")), ["experiment.json", "runs"]);
}

#[cfg(unix)]
#[test]
fn results_are_compared_with_those_of_unchanged_runs() {
    let arms = arm("all", "program = \"words\"", "of = [\"good\", \"differs\"], alloc = [\"native\", \"expandable\"]");
    let test_dir = test_dir(&arms.replace("repeats = 2", "repeats = 1"));
    std::fs::write(test_dir.at("experiments/commands.toml"), CATALOGUE.replace("[words]", "[words]\npytorch = true"))
        .unwrap();
    let output = run(&test_dir, &[]).ok();
    assert!(output.stderr.contains("results  small of equal results: words good"), "{output:?}");
    let differs =
        "note: results of words differs differ from its unchanged runs': all differs expandable r0 by 5.0e-1, ";
    assert!(output.stderr.contains(differs), "{output:?}");
    let command = file(&test_dir, "00-all-good-native-r0", "run.json")["command"].clone();
    assert_eq!(command, json!(["sh", "experiments/words.sh", "good", "--device=cpu"]));
    let result = file(&test_dir, "02-all-good-expandable-r0", "result.json");
    assert_eq!(result["peak_reserved_bytes"], 4096);
}

#[cfg(target_os = "linux")]
#[test]
fn a_command_that_fails_hangs_or_leaves_processes_says_so_and_costs_no_other() {
    let words = arm(
        "all",
        "program = \"words\"",
        "of = [\"breaks\", \"silent\", \"hangs\", \"leaves\", \"good\", \"refused\"]",
    );
    let test_dir = test_dir(&format!("timeout_s = 2\nconcurrent = true\n{words}"));
    let output = run(&test_dir, &["--jobs", "12"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let error = |id: &str| file(&test_dir, id, "run.json")["error"].as_str().map(str::to_owned);
    assert_eq!(error("00-all-breaks-r0").as_deref(), Some("no luck"));
    assert_eq!(error("02-all-silent-r0").as_deref(), Some("it printed no JSON object that begins with \"acceptance\""));
    assert_eq!(error("04-all-hangs-r0").as_deref(), Some("it was ended after 2 s, its timeout_s"));
    assert_eq!(error("06-all-leaves-r0").as_deref(), Some("it left a process behind: sleep 600"));
    assert_eq!(error("08-all-good-r0"), None);
    assert_eq!(error("10-all-refused-r0").as_deref(), Some("cudaMalloc: no device"), "what it printed to stdout");
    let log = std::fs::read_to_string(test_dir.at("out/small/runs/04-all-hangs-r0/log.txt")).unwrap();
    assert!(log.contains(": sleep 600\n") && log.contains("\n  sleep S"), "its threads and what they wait for: {log}");
    // The same command tries again only those.
    let before = std::fs::read_to_string(test_dir.at("out/small/runs/08-all-good-r0/run.json")).unwrap();
    run(&test_dir, &["--jobs", "12"]);
    assert_eq!(std::fs::read_to_string(test_dir.at("out/small/runs/08-all-good-r0/run.json")).unwrap(), before);
}

#[cfg(unix)]
#[test]
fn commands_that_are_not_possible_here_are_skipped_with_the_reason() {
    let test_dir = test_dir(&arm("all", "", "program = [\"built\", \"variable\", \"module\", \"pool\"]"));
    let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let output = Ran::of(command.env("NVCC", test_dir.at("none")).env_remove("NOT_SET_HERE").output().unwrap()).ok();
    let error = |id: &str| file(&test_dir, id, "run.json")["error"].as_str().unwrap().to_owned();
    assert_eq!(
        error("00-all-built-r0"),
        "built needs nvcc, which is not here; install CUDA's toolkit, or name it with NVCC"
    );
    assert!(error("02-all-variable-r0").contains("needs the variable NOT_SET_HERE"));
    assert!(error("04-all-module-r0").starts_with("module needs "), "{}", error("04-all-module-r0"));
    assert!(
        output.stderr.contains("note: small: skipped: built needs nvcc") && output.stdout.contains("2 skipped"),
        "{output:?}"
    );
    let broken = test_dir_of_broken();
    let output = run(&broken, &[]);
    assert!(output.stderr.contains("small/broken: experiments/missing.cu is not here"), "{output:?}");
}

fn test_dir_of_broken() -> TestDir {
    test_dir(&arm("all", "program = \"broken\"", ""))
}

#[test]
fn options_that_make_no_sense_are_refused_with_their_line() {
    for (options, message) in [
        ("program = \"buildt\"", "no program is called 'buildt' in commands.toml; did you mean 'built'?"),
        ("program = \"built\", of = \"a\"", "built has not the option 'of'"),
        ("program = \"words\"", "words needs the option 'of'"),
        ("program = \"words\", of = \"../a\"", "of must be a word"),
        ("program = \"built\", way = \"served\"", "way is one of plain, record, stacks, driver, waits, ordered"),
        ("program = \"built\", alloc = \"caching\"", "alloc serves nothing here"),
        ("program = \"built\", own-pool = true", "built has no pool of its own"),
        ("program = \"built\", poison = true", "poison fills memory that is served"),
        ("program = \"built\", way = \"waits\", alloc = \"cachin\"", "cachin"),
    ] {
        let output = run(&test_dir(&arm("all", options, "")), &["--dry-run"]);
        assert_eq!(output.code, Some(2), "{options}: {output:?}");
        assert!(output.stderr.contains("small.toml:") && output.stderr.contains(message), "{options}: {output:?}");
    }
}

/// Under PyTorch an allocator is a variable, or `vramlab run`'s; elsewhere `vramlab run` serves it at the driver.
#[test]
fn an_allocator_is_put_under_pytorch_or_serves_at_the_driver() {
    let torch = arm("torch", "program = \"torch\"", "alloc = [\"native\", \"caching\"], way = [\"plain\", \"record\"]");
    let raw = arm("raw", "program = \"raw\", poison = true", "way = [\"waits\"], alloc = [\"bfc\"]");
    let test_dir = test_dir(&[torch, raw].concat());
    let catalogue = "[torch]\npytorch = true\ncommand = [\"true\"]\n[raw]\ncommand = [\"{python}\", \"a.py\"]\n";
    test_dir.write("experiments/commands.toml", catalogue);
    let plan = run(&test_dir, &["--dry-run"]).ok().stdout;
    let command =
        |id: &str| plan.lines().find(|line| line.contains(id)).unwrap().rsplit("to do").next().unwrap().trim();
    assert_eq!(command("torch-native-plain-r0"), "true --device=cpu");
    assert_eq!(command("torch-caching-plain-r0"), "VRAMLAB_ALLOC=caching true --device=cpu");
    let recorded = "vramlab run --quiet --no-advise --stacks=off";
    assert_eq!(command("torch-native-record-r0"), format!("{recorded} -- true --device=cpu"));
    assert_eq!(command("torch-caching-record-r0"), format!("{recorded} --alloc=caching -- true --device=cpu"));
    let served = format!("{recorded} --at-driver --alloc=bfc --free=waits --poison -- python3 a.py");
    assert_eq!(command("raw-waits-bfc-r0"), served);
}

/// Plain, recorded and served: a program in C over a stand-in for CUDA's driver.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs a C compiler"]
fn a_cuda_program_is_recorded_and_served() {
    if !Path::new(PROGRAM).with_file_name("libvramlab_inject.so").is_file() {
        println!("skipped: libvramlab_inject.so is not built");
        return;
    }
    let test_dir =
        test_dir(&arm("all", "program = \"loops\"", "way = [\"plain\", \"record\", \"driver\", \"ordered\"]"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../app/inject/tests/c");
    let compile = |source: &str, out: &str, flags: &[&str]| {
        let mut compiler = std::process::Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-std=gnu11", "-O1", "-o"]).arg(test_dir.at(out)).arg(sources.join(source)).args(flags);
        assert!(compiler.status().unwrap().success());
    };
    let flags = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"];
    compile("driver.c", "libcuda.so.1", &flags);
    compile("program.c", "experiments/loops.cu", &["-ldl", "-lpthread"]);
    let catalogue = "[loops]\nsource = \"loops.cu\"\ncommand = [\"{built}\", \"address2\", \"loop\"]\n";
    test_dir.write("experiments/commands.toml", catalogue);
    let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    command.env("NVCC", test_dir.at("nvcc")).env("VRAMLAB_CUDA", test_dir.at("libcuda.so.1"));
    command.env("LD_LIBRARY_PATH", test_dir.at(".")).env_remove("LD_PRELOAD").env("PLAIN", "1");
    let output = Ran::of(command.output().unwrap());
    for (id, way) in
        [("02-all-record-r0", ""), ("04-all-driver-r0", "--free=driver"), ("06-all-ordered-r0", "--free=ordered")]
    {
        let record = file(&test_dir, id, "run.json");
        let words: Vec<&str> = record["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(words.contains(&"vramlab") && (way.is_empty() || words.contains(&way)), "{words:?}");
        assert_eq!(record["status"], "done", "{record} {output:?}");
        assert!(file(&test_dir, id, "result.json")["recorded_files"].as_u64() > Some(0));
        assert!(!test_dir.at("out/small/runs").join(id).join("recorded").exists());
    }
    assert_eq!(file(&test_dir, "00-all-plain-r0", "run.json")["command"], json!(["loops", "address2", "loop"]));
}
