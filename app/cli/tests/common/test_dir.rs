//! Shared code of the tests of `vramlab` and `experiments`: a temporary directory, and the output of a process.

use assert_cmd::Command;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time after which a program counts as hung; a busy machine may need a hundredth of it.
pub(crate) const HANGS: Duration = Duration::from_secs(900);

/// Time after which an expected condition counts as missing.
pub(crate) const LATE: Duration = Duration::from_secs(120);

/// Waits for a condition; fails the test if it does not become true.
pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < LATE {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

/// The program of the package under test.
pub(crate) const PROGRAM: &str = match (option_env!("CARGO_BIN_EXE_vramlab"), option_env!("CARGO_BIN_EXE_experiments"))
{
    (Some(path), _) | (None, Some(path)) => path,
    (None, None) => panic!("neither program is built"),
};

/// A temporary directory.
pub(crate) struct TestDir(pub(crate) TempDir);

/// The output of a process.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl TestDir {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns its path.
    pub(crate) fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.at(name), contents).unwrap();
        self.at(name)
    }

    /// Writes a file and returns its path as text.
    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        self.file(name, contents).to_str().unwrap().to_owned()
    }

    /// Writes an executable program.
    #[cfg(unix)]
    pub(crate) fn program(&self, name: &str, text: &str) {
        // Another process copies it: a concurrent test may fork while the file is open for writing here, its child then has the
        // file open until it execs, and a file open for writing cannot be executed.
        let source = format!("{name}.text");
        self.file(&source, text);
        let mut copy = std::process::Command::new("sh");
        copy.args(["-c", &format!("cp {source} {name} && chmod 755 {name}")]);
        assert!(copy.current_dir(self.at(".")).status().unwrap().success());
    }

    /// Names of the files, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        names(&self.at("."))
    }

    /// A command that runs the program in this directory, without settings from the environment.
    pub(crate) fn process(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(PROGRAM);
        command.args(arguments).current_dir(self.0.path()).env("VRAMLAB_CACHE", self.at("cache"));
        // Keeps every sentence on one line.
        command.env("NO_COLOR", "1").env("COLUMNS", "1000");
        for variable in ["SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"] {
            command.env_remove(variable);
        }
        for variable in
            ["MNIST_DIR", "MNIST_MIRROR", "HISTORIES", "PYTHON", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"]
        {
            command.env_remove(variable);
        }
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = Command::from_std(self.process(arguments));
        Ran::of(command.timeout(HANGS).output().unwrap())
    }
}

impl TestDir {
    /// Runs the printed next command in a shell, repeatedly.
    pub(crate) fn pasted(&self, mut text: String, steps: u32) {
        for _ in 0..steps {
            let next = end(&text).1;
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-c", next]).current_dir(self.at(".")).env_remove("CARGO").output().unwrap();
            assert!(output.status.success(), "{next}: {}", String::from_utf8_lossy(&output.stderr));
            text = String::from_utf8(output.stdout).unwrap();
        }
    }
}

/// Names of a directory's entries, sorted.
pub(crate) fn names(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The stdout of the program, started by its path.
pub(crate) fn by_path(test_dir: &TestDir, arguments: &[&str]) -> String {
    Ran::of(test_dir.process(arguments).env_remove("CARGO").output().unwrap()).ok().stdout
}

/// The last two lines of a pipe's output: the result, and the next command.
pub(crate) fn end(stdout: &str) -> (&str, &str) {
    let mut lines = stdout.trim_end().lines().rev();
    let next = lines.next().and_then(|line| line.strip_prefix("Next: "));
    (lines.next().unwrap_or_default(), next.unwrap_or_else(|| panic!("no next command: {stdout}")))
}

/// The name of the JSON row with the lowest value of a key.
pub(crate) fn least<'a>(rows: &'a [Value], figure: &str, name: &str) -> &'a str {
    let of = |row: &Value| row[figure].as_f64().unwrap();
    rows.iter().min_by(|a, b| of(a).total_cmp(&of(b))).unwrap()[name].as_str().unwrap()
}

impl Ran {
    pub(crate) fn of(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let output = Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(!output.stderr.contains("panicked") && !output.stderr.contains("internal fault"), "{output:#?}");
        output
    }

    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// The array printed by a successful process.
    pub(crate) fn rows(self) -> Vec<Value> {
        let output = self.ok();
        output.json().as_array().unwrap_or_else(|| panic!("no array: {output:#?}")).clone()
    }

    /// The only line printed by a successful process, apart from the next command.
    pub(crate) fn line(self) -> String {
        let output = self.ok();
        let (line, next) = output.stdout.split_once('\n').unwrap();
        let nothing_else = next.is_empty() || next.starts_with("Next: ") && next.lines().count() == 1;
        assert!(output.stderr.is_empty() && nothing_else, "{output:#?}");
        format!("{line}\n")
    }

    /// Asserts an exit code, one line on stderr that contains each of `words` once, and an empty stdout.
    pub(crate) fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(code), ""), "{self:#?}");
        let lines: Vec<&str> = self.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{self:#?}");
        for word in words {
            assert_eq!(lines[0].matches(word).count(), 1, "'{word}' should be there once: {}", lines[0]);
        }
        assert_eq!(lines[0].matches("error:").count(), 1, "{}", lines[0]);
    }
}
