//! Processes of a command that do not end: their stacks, and those that a command left running.

use std::path::Path;
use std::time::Duration;

/// Time between the request for stacks and the end of a process, and for processes that end shortly after their parent.
pub(super) const PATIENCE: Duration = Duration::from_secs(6);

/// Appends to a file what the threads of a group's processes wait for, and asks its Python processes for their stacks:
/// with PYTHONFAULTHANDLER they print them on SIGABRT. A debugger, if there is one, adds the stacks of C++.
pub(super) fn report(group: Option<u32>, file: &Path) {
    #[cfg(target_os = "linux")]
    if let Some(group) = group {
        let members = linux::members(group);
        let mut text: String = members.iter().map(|process| linux::threads(*process)).collect();
        members.iter().filter(|process| linux::is_python(**process)).for_each(|process| {
            text.push_str(&linux::native_stacks(*process));
        });
        let opened = std::fs::OpenOptions::new().append(true).open(file);
        // Without it the run's failure has fewer details.
        let _ = opened.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
        members.into_iter().filter(|process| linux::is_python(*process)).for_each(linux::abort);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (group, file);
}

/// The command of a process that is still running some seconds after the first of its group has ended.
pub(super) fn left(group: Option<u32>) -> Option<String> {
    #[cfg(target_os = "linux")]
    {
        let group = group?;
        let began = std::time::Instant::now();
        loop {
            let process = *linux::members(group).first()?;
            if began.elapsed() >= PATIENCE {
                return Some(linux::command(process));
            }
            std::thread::sleep(super::process::POLL);
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = group;
        None
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;
    use std::process::{Command, Stdio};

    /// Longest part of a command, and of a debugger's output.
    const LONGEST: usize = 160;
    const MOST_LINES: usize = 400;
    /// Debuggers with the arguments before and after a process's number.
    const DEBUGGERS: [(&str, &[&str], &[&str]); 2] = [
        ("py-spy", &["dump", "--native", "--pid"], &[]),
        ("gdb", &["-p"], &["-batch", "-ex", "thread apply all bt 14"]),
    ];

    /// The words of a process's or thread's `stat` after its name, which may contain any character: state, parent, group.
    fn stat(folder: &str) -> Option<Vec<String>> {
        let text = fs::read_to_string(format!("{folder}/stat")).ok()?;
        Some(text.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
    }

    /// Running processes of a group.
    pub(super) fn members(group: u32) -> Vec<u32> {
        let group = group.to_string();
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_member = |number: &u32| {
            stat(&format!("/proc/{number}")).is_some_and(|words| words[0] != "Z" && words.get(2) == Some(&group))
        };
        numbers.filter(is_member).collect()
    }

    pub(super) fn command(process: u32) -> String {
        let bytes = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
        let skipped = text.chars().count().saturating_sub(LONGEST);
        text.trim().chars().skip(skipped).collect()
    }

    /// A process's command, and the name, state and wait channel of each of its threads.
    pub(super) fn threads(process: u32) -> String {
        let mut text = format!("{process}: {}\n", command(process));
        for task in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let folder = task.path().to_string_lossy().into_owned();
            let read = |name: &str| fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
            let state = stat(&folder).map(|mut words| words.swap_remove(0)).unwrap_or_default();
            text.push_str(&format!("  {} {state} {}\n", read("comm").trim(), read("wchan").trim()));
        }
        text
    }

    pub(super) fn is_python(process: u32) -> bool {
        let file = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
        file.file_name().is_some_and(|name| name.to_string_lossy().contains("python"))
    }

    /// Stacks of C++ and Python by the first debugger that is installed.
    pub(super) fn native_stacks(process: u32) -> String {
        for (debugger, before, after) in DEBUGGERS {
            let mut command = Command::new("timeout");
            command.args(["30", debugger]).args(before).arg(process.to_string()).args(after).stdin(Stdio::null());
            let Ok(output) = command.stderr(Stdio::null()).output() else { continue };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let is_frame = |line: &&str| line.starts_with(['#', ' ']) || line.starts_with("Thread");
            let lines: Vec<&str> = text.lines().filter(is_frame).take(MOST_LINES).collect();
            if !lines.is_empty() {
                return lines.join("\n") + "\n";
            }
        }
        String::new()
    }

    pub(super) fn abort(process: u32) {
        let number = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(number) = number {
            // It may have ended meanwhile.
            let _ = rustix::process::kill_process(number, rustix::process::Signal::ABORT);
        }
    }
}
