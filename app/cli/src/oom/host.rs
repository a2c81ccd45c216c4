//! Messages about the host's memory: of the kernel or Ray, which end a program, of PyTorch and CUDA that could not pin any, of a full
//! `/dev/shm`, and of Python, NumPy and C++.

use super::lines::joined;
use super::text::{Facts, Reporter, number_after, size, size_after};
use vramlab::Bytes;

/// The kernel's line about a process that it ended, in `dmesg` or a container's log.
pub(super) fn kernel(text: &str) -> Option<(Reporter, Facts)> {
    let at = text.rfind("Killed process ").filter(|at| text[*at..].contains("-rss:"))?;
    let line = text[at..].lines().next()?;
    let of = |key: &str| size(line.split_once(key)?.1);
    let [anonymous, file, shared] = ["anon-rss:", "file-rss:", "shmem-rss:"].map(of);
    let sum = [anonymous, file, shared].into_iter().flatten().fold(0, u64::saturating_add);
    // `memory: usage 67108864kB, limit 67108864kB, failcnt 12` stands above it for a control group.
    let limit = text[..at].rsplit_once("memory: usage ").and_then(|(_, rest)| size(rest.split_once(", limit ")?.1));
    let facts = Facts {
        failures: text.matches("Killed process ").count() as u64,
        process_bytes: Some(sum),
        shared_bytes: shared,
        limit_bytes: limit.filter(|limit| *limit < 1 << 62),
        ..Facts::default()
    };
    Some((Reporter::KernelOom, facts))
}

/// What a scheduler says of a process that the kernel ended, without its numbers.
pub(super) fn ended(text: &str) -> Option<(Reporter, Facts)> {
    let words = [
        "OOMKilled",
        "oom-kill event",
        "oom_kill event",
        "cgroup out-of-memory handler",
        // PyTorch's loader: a worker that got SIGKILL.
        "is killed by signal: Killed",
    ];
    let is_ended = words.iter().any(|words| text.contains(words));
    is_ended.then(|| (Reporter::KernelOom, Facts::failure()))
}

/// The text behind the kernel's last line.
pub(super) fn behind_kernel(text: &str) -> Option<&str> {
    text[text.rfind("Killed process ")?..].split_once('\n').map(|(_, behind)| behind)
}

/// Words that show that memory of the host was to be pinned.
const PINNING: [&str; 8] = [
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaHostRegister",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "CachingHostAllocator",
    "pin_memory",
    "pinned memory",
];

/// A failure to pin memory: CUDA reports it with the words of a full GPU.
pub(super) fn pinned(text: &str) -> Option<(Reporter, Facts)> {
    let failures = ["out of memory", "cudaErrorMemoryAllocation", "invalid argument", "operation not permitted"];
    let lower = text.to_lowercase();
    let failed = lower.contains("cuda") && failures.iter().any(|word| lower.contains(&word.to_lowercase()));
    // With a size of the GPU it is the GPU's memory.
    let of_gpu = text.contains("total capacity of") || text.contains("total capacity;");
    // A log lists the program's arguments, `pin_memory=True` among them.
    let is_argument = |rest: &str| rest.trim_start_matches(['"', '\'', ' ']).starts_with(['=', ':', ',']);
    let pins =
        PINNING.iter().any(|word| text.match_indices(word).any(|(at, _)| !is_argument(&text[at + word.len()..])));
    (failed && pins && !of_gpu).then(|| (Reporter::Pinning, Facts::failure()))
}

/// `/dev/shm` is full, where loader workers and NCCL share memory.
pub(super) fn shared(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(text);
    let of_loader = [
        "workers are out of shared memory",
        "insufficient shared memory (shm)",
        "unable to allocate shared memory(shm)",
        "unable to write to file </torch_",
    ];
    let of_nccl = ["creating shared memory segment", "failed to extend /dev/shm/nccl"];
    let segment = of_nccl.iter().find_map(|words| message.rfind(words)).map(|at| &message[at..]);
    let is_full =
        ["No space left on device", "failed to extend /dev/shm/nccl"].iter().any(|words| message.contains(words));
    let found = of_loader.iter().any(|words| message.contains(words)) || segment.is_some() && is_full;
    let requested_bytes = segment.and_then(|segment| number_after(segment, "(size "));
    found.then(|| (Reporter::SharedMemory, Facts { requested_bytes, ..Facts::failure() }))
}

/// Ray, which ends a task before the node's memory is full.
pub(super) fn ray(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(text);
    let mut facts = Facts::failure();
    let node = message.rsplit_once(" was running was ").and_then(|(_, rest)| rest.split_once(" / "));
    if let Some((used, total)) = node.filter(|_| message.contains("exceeds the memory usage threshold")) {
        facts.total_bytes = size(total);
        facts.free_bytes = facts.total_bytes.zip(size(used)).map(|(total, used)| total.saturating_sub(used));
        return Some((Reporter::Ray, facts));
    }
    let words = ["Task was killed due to the node running low on memory", "killed due to memory pressure (OOM)"];
    words.iter().any(|words| message.contains(words)).then_some((Reporter::Ray, facts))
}

/// Python, NumPy or C++, which the system refused memory.
pub(super) fn refused(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(text);
    let array =
        message.rfind("Unable to allocate ").map(|at| &message[at..]).filter(|text| text.contains(" for an array"));
    let words = ["std::bad_alloc", "[Errno 12] Cannot allocate memory", "Cannot allocate memory (12)"];
    let is_python = |line: &str| line.trim() == "MemoryError" || line.trim_start().starts_with("MemoryError: ");
    let found = array.is_some() || words.iter().any(|words| message.contains(words)) || text.lines().any(is_python);
    let requested_bytes = array.and_then(|array| size_after(array, "Unable to allocate "));
    found.then(|| (Reporter::HostMemory, Facts { requested_bytes, ..Facts::failure() }))
}

/// What the kernel ended, with the numbers of its line.
pub(super) fn message(facts: &Facts) -> String {
    let resident = facts.process_bytes.map_or_else(|| "an unknown size".to_owned(), |bytes| Bytes(bytes).to_string());
    let shared = facts.shared_bytes.filter(|bytes| *bytes > 0);
    let shared = shared.map_or(String::new(), |bytes| format!(", {} of it shared memory", Bytes(bytes)));
    let limit =
        facts.limit_bytes.map_or(String::new(), |limit| format!("; the control group's limit is {}", Bytes(limit)));
    let times = if facts.failures > 1 { format!(" (last of {} processes)", facts.failures) } else { String::new() };
    format!("The kernel ended a process{times}: {resident} resident{shared}{limit}.")
}

/// Whether pinned memory is most of what the process had: memory of `cudaHostAlloc` counts as shared.
fn is_pinned(facts: &Facts) -> bool {
    facts.shared_bytes.zip(facts.process_bytes).is_some_and(|(shared, resident)| shared > resident / 2)
}

pub(super) fn cause(source: Reporter, facts: &Facts) -> Option<&'static str> {
    Some(match source {
        Reporter::KernelOom if is_pinned(facts) => {
            "Cause: host memory (RAM). Most of it is shared memory: cudaHostAlloc's pinned memory counts as shared, and so does \
             /dev/shm of loader workers."
        }
        Reporter::KernelOom => "Cause: host memory (RAM), not GPU memory.",
        Reporter::Pinning if facts.failures == 0 => {
            "Nothing failed: ggml continues with host memory that is not pinned, from which copies are slower."
        }
        Reporter::GgmlCpu if facts.free_bytes.is_some() => {
            "Cause: host memory (RAM), not GPU memory: less is free than the model needs."
        }
        Reporter::GgmlCpu | Reporter::HostMemory => "Cause: host memory (RAM), not GPU memory.",
        Reporter::Ray => {
            "Cause: host memory (RAM) of the node, not GPU memory. Ray ends a task when less than a share of it is free."
        }
        Reporter::SharedMemory => {
            "Cause: shared memory of the host (/dev/shm), not GPU memory. A container has little of it unless it is started with more."
        }
        Reporter::Pinning => {
            "Cause: host memory could not be pinned. CUDA reports that with the words of a full GPU; the limit is free RAM, the \
             container's limit, or on WSL about 1 GiB of pinned memory in all."
        }
        _ => return None,
    })
}

pub(super) fn remedy(source: Reporter, facts: &Facts) -> Option<&'static str> {
    const PIN_LESS: &str = "Pin less: PyTorch rounds each pinned tensor up to a power of two and keeps it. `vramlab run` records \
                            what is pinned, `vramlab replay --host` shows what is rounding.";
    Some(match source {
        Reporter::KernelOom if is_pinned(facts) => PIN_LESS,
        Reporter::KernelOom => "Use fewer loader workers, a smaller batch, or raise the container's limit.",
        Reporter::Pinning if facts.failures == 0 => "Nothing has to change; more free RAM may end the warning.",
        Reporter::GgmlCpu => "Free RAM or add swap, or use a smaller model, quantization or context.",
        Reporter::Pinning => PIN_LESS,
        Reporter::HostMemory => {
            "Use a smaller array or batch or fewer processes, or a machine or container with more RAM."
        }
        Reporter::Ray => "Run fewer tasks at once (num_cpus of each task), or use a node with more RAM.",
        Reporter::SharedMemory => {
            "Start the container with more (docker run --shm-size, or --ipc=host), remove files in /dev/shm that ended programs left, \
             or use fewer loader workers."
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read_with_its_limit() {
        let text = "[1.5] memory: usage 67108864kB, limit 67108864kB, failcnt 12\n\
                    [1.6] Memory cgroup out of memory: Killed process 4242 (python3) total-vm:99999999kB, anon-rss:1048576kB, \
                    file-rss:0kB, shmem-rss:62914560kB, UID:0 pgtables:1kB oom_score_adj:0";
        let (source, facts) = kernel(text).unwrap();
        assert_eq!(source, Reporter::KernelOom);
        assert_eq!((facts.process_bytes, facts.shared_bytes), (Some(61 << 30), Some(60 << 30)));
        assert_eq!((facts.limit_bytes, facts.failures), (Some(64 << 30), 1));
        assert!(message(&facts).contains("61 GiB resident, 60 GiB of it shared memory"), "{}", message(&facts));
        assert!(cause(source, &facts).unwrap().contains("cudaHostAlloc"));
        let plain =
            kernel("Out of memory: Killed process 1 (a) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB");
        let (source, facts) = plain.unwrap();
        assert!(!cause(source, &facts).unwrap().contains("shared") && facts.limit_bytes.is_none());
        assert_eq!(kernel("Killed process 7"), None);
    }

    #[test]
    fn a_message_behind_the_kernels_line_counts() {
        let line = "Out of memory: Killed process 1 (a) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB\n";
        let message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.\n";
        let source = |text: String| super::super::text::read(&text).map(|(source, _)| source);
        assert_eq!(source(format!("{line}{message}")), Some(Reporter::Pytorch));
        assert_eq!(source(format!("{message}{line}Killed\n")), Some(Reporter::KernelOom));
    }

    #[test]
    fn a_failure_to_pin_is_told_from_a_full_gpu() {
        let text =
            "RuntimeError: CUDA error: out of memory\nat::cuda::CUDACachingHostAllocatorImpl::allocate_host_memory";
        assert_eq!(pinned(text).map(|(source, _)| source), Some(Reporter::Pinning));
        assert!(pinned("RuntimeError: CUDA error: out of memory").is_none());
        let of_gpu = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 8 GiB (in pin_memory)";
        assert!(pinned(of_gpu).is_none());
        assert!(pinned("pin_memory thread exited").is_none());
    }
}
