//! The numbers in an error text, and which library wrote it.

use super::engines;
use super::lines::{joined, of_one_process, plain, unframed, window};
use serde::Serialize;

/// The library whose message it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reporter {
    /// PyTorch's caching allocator, on CUDA, ROCm or XPU.
    Pytorch,
    /// PyTorch over `cudaMallocAsync`.
    PytorchMallocAsync,
    /// PyTorch on Apple's GPUs.
    PytorchMps,
    /// PyTorch's allocator of host memory.
    PytorchCpu,
    /// PyTorch's check of NVML after a failed allocation.
    PytorchNvml,
    /// `torch.cuda.memory_summary()`.
    PytorchSummary,
    /// vLLM, before it loads the model.
    VllmStart,
    /// vLLM's cache of keys and values.
    VllmCache,
    /// TensorFlow's BFC allocator.
    Tensorflow,
    /// TensorFlow's allocator of host memory.
    TensorflowCpu,
    /// XLA, under JAX or TensorFlow.
    Xla,
    /// XLA on a TPU.
    XlaTpu,
    /// RMM.
    Rmm,
    /// CuPy.
    Cupy,
    /// ggml: llama.cpp, whisper.cpp and Ollama.
    Ggml,
    /// ggml in host memory.
    GgmlCpu,
    /// SGLang.
    Sglang,
    /// CUDA.jl.
    Julia,
    /// MLX or ggml on Apple's GPUs.
    Metal,
    /// Triton, for shared memory of a multiprocessor.
    Triton,
    /// TensorRT.
    Tensorrt,
    /// XGBoost.
    Xgboost,
    /// ONNX Runtime.
    OnnxRuntime,
    /// PaddlePaddle.
    Paddle,
    /// NCCL.
    Nccl,
    /// cuBLAS or cuDNN.
    CudaLibrary,
    /// `nvidia-smi`.
    NvidiaSmi,
    /// The kernel, which ended the program.
    KernelOom,
    /// PyTorch or CUDA, which could not pin host memory.
    Pinning,
    /// PyTorch's loader workers or NCCL, which share memory of the host.
    SharedMemory,
    /// Python, NumPy or C++, for memory of the host.
    HostMemory,
    /// Ray, which ended a task for want of the node's memory.
    Ray,
    /// CUDA itself.
    Cuda,
}

/// A process on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Holder {
    pub(crate) pid: u64,
    pub(crate) bytes: u64,
}

/// The numbers of a text; what it does not contain is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Facts {
    pub(crate) gpu: Option<u64>,
    /// The request that failed: of PyTorch the segment, not the tensor.
    pub(crate) requested_bytes: Option<u64>,
    /// Size of the device.
    pub(crate) total_bytes: Option<u64>,
    /// Free on the device.
    pub(crate) free_bytes: Option<u64>,
    /// Memory limit of the process.
    pub(crate) limit_bytes: Option<u64>,
    /// In tensors; of RMM the pool's size, of XLA the compiled function's total need.
    pub(crate) allocated_bytes: Option<u64>,
    /// Reserved by the library's allocator and not in tensors.
    pub(crate) unallocated_bytes: Option<u64>,
    /// Free inside private pools.
    pub(crate) pools_bytes: Option<u64>,
    /// In use by this process, with everything outside of the library's allocator.
    pub(crate) process_bytes: Option<u64>,
    /// Part of that which is shared memory of the host, such as pinned memory.
    pub(crate) shared_bytes: Option<u64>,
    /// Other processes that the text names.
    pub(crate) other_processes: Vec<Holder>,
    /// In use by others, where the text gives only a sum.
    pub(crate) others_bytes: Option<u64>,
    /// Failed requests in the text.
    pub(crate) failures: u64,
    /// PyTorch's releases that write so, where they are older than expandable segments.
    #[serde(skip)]
    pub(crate) releases: Option<&'static str>,
    /// Whether the text says that a pool has its maximum size, or that a share of the GPU is used up.
    #[serde(skip)]
    pub(crate) is_pool_full: bool,
    /// Whose GPU PyTorch's message names.
    #[serde(skip)]
    pub(crate) platform: Platform,
}

/// Whose GPUs: tools and settings have other names on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Platform {
    #[default]
    Cuda,
    /// AMD's.
    Hip,
    /// Intel's.
    Xpu,
    /// Huawei's.
    Npu,
}

impl Platform {
    fn new(text: &str) -> Self {
        let words = [
            ("HIP out of memory", Self::Hip),
            ("HIP error: out of memory", Self::Hip),
            ("hipErrorOutOfMemory", Self::Hip),
            ("hipMalloc", Self::Hip),
            ("XPU out of memory", Self::Xpu),
            ("NPU out of memory", Self::Npu),
        ];
        words.iter().find(|(words, _)| text.contains(words)).map_or(Self::Cuda, |(_, platform)| *platform)
    }

    /// The program that lists who holds memory.
    pub(crate) fn tool(self) -> &'static str {
        match self {
            Self::Cuda => "nvidia-smi",
            Self::Hip => "rocm-smi --showpids",
            Self::Xpu => "xpu-smi ps",
            Self::Npu => "npu-smi info",
        }
    }
}

impl Facts {
    /// One failure and no numbers.
    pub(super) fn failure() -> Self {
        Self { failures: 1, ..Self::default() }
    }

    /// Reserved by the library's allocator.
    pub(crate) fn reserved(&self) -> Option<u64> {
        Some(self.allocated_bytes?.saturating_add(self.unallocated_bytes?))
    }

    /// Held by other processes, as far as the text says.
    pub(crate) fn others(&self) -> u64 {
        let named = self.other_processes.iter().map(|process| process.bytes).fold(0, u64::saturating_add);
        named.saturating_add(self.others_bytes.unwrap_or(0))
    }
}

/// Whose text it is, and its numbers: of several messages the last. `None` where it is no message about memory.
pub(crate) fn read(text: &str) -> Option<(Reporter, Facts)> {
    let text = plain(text);
    let (text, warning) = &super::xla::without_warnings(&text);
    // The kernel's line may be of another program, and stand before this one's message.
    let behind =
        super::host::behind_kernel(text).and_then(library).filter(|(_, facts)| facts.requested_bytes.is_some());
    let found = behind.or_else(|| super::host::kernel(text)).or_else(|| library(text));
    found.or_else(|| warning.clone().map(|facts| (Reporter::Tensorflow, facts)))
}

/// The message of a library, of the driver or of a table.
fn library(text: &str) -> Option<(Reporter, Facts)> {
    let found = engines::vllm(text)
        .or_else(|| engines::sglang(text))
        .or_else(|| mps(text))
        .or_else(|| pytorch(text))
        .or_else(|| malloc_async(text))
        .or_else(|| summary(text))
        .or_else(|| super::xla::tensorflow(text))
        .or_else(|| super::xla::xla(text))
        .or_else(|| onnx_runtime(text))
        .or_else(|| paddle(text))
        .or_else(|| cupy(text))
        .or_else(|| rmm(text))
        .or_else(|| engines::julia(text))
        .or_else(|| engines::metal(text))
        .or_else(|| engines::ggml(text))
        .or_else(|| engines::tensorrt(text))
        .or_else(|| engines::with_driver_report(text))
        .or_else(|| host(text))
        .or_else(|| engines::triton(text))
        .or_else(|| nvidia_smi(text));
    found
        .or_else(|| super::host::shared(text))
        .or_else(|| super::host::ray(text))
        .or_else(|| super::host::pinned(text))
        .or_else(|| disguised(text))
        .or_else(|| super::host::refused(text))
        .or_else(|| super::host::ended(text))
}

/// PyTorch's message from 1.0 on.
fn pytorch(text: &str) -> Option<(Reporter, Facts)> {
    let all = joined(&unframed(text)).matches("Tried to allocate ").count() as u64;
    let text = &joined(&unframed(&of_one_process(text, "Tried to allocate ")));
    let message = &text[text.rfind("Tried to allocate ")?..];
    let mut facts =
        Facts { failures: all, requested_bytes: size_after(message, "Tried to allocate "), ..Facts::default() };
    facts.platform = Platform::new(text);
    facts.gpu = number_after(message, "GPU ").or_else(|| number_after(message, "(NPU "));
    // Until 2.0 all numbers stand in brackets.
    if let Some(total) = size_before(message, " total capacity;") {
        facts.total_bytes = Some(total);
        facts.allocated_bytes = size_before(message, " already allocated");
        facts.free_bytes = size_before(message, " free;");
        let reserved = size_before(message, " reserved in total by PyTorch");
        let cached = size_before(message, " cached)");
        // Until 1.3 the last is what is cached beyond what is allocated; some builds printed all that is reserved.
        facts.unallocated_bytes = match (reserved, facts.allocated_bytes) {
            (Some(reserved), Some(allocated)) => Some(reserved.saturating_sub(allocated)),
            _ => cached,
        };
        // Huawei's builds of later releases print this form, too.
        let releases = if reserved.is_some() { "1.4 to 2.0" } else { "1.0 to 1.3" };
        facts.releases = (facts.platform != Platform::Npu).then_some(releases);
        return Some((Reporter::Pytorch, facts));
    }
    facts.total_bytes = ["total capacity of ", "total capacty of "].iter().find_map(|front| size_after(message, front));
    facts.free_bytes = size_after(message, "of which ");
    facts.limit_bytes = size_before(message, " allowed;").or_else(|| size_before(message, " allowed."));
    facts.allocated_bytes = size_before(message, " is allocated by PyTorch");
    facts.unallocated_bytes = size_before(message, " is reserved by PyTorch but unallocated");
    facts.pools_bytes = size_before(message, " allocated in private pools");
    facts.process_bytes = size_after(message, "this process has ");
    for part in message.split("Process ").skip(1) {
        let pid = part.split(' ').next().and_then(|pid| pid.parse().ok());
        if let (Some(pid), Some(bytes)) = (pid, size_after(part, " has ")) {
            facts.other_processes.push(Holder { pid, bytes });
        }
    }
    recognize_own_process(&mut facts);
    Some((Reporter::Pytorch, facts))
}

/// In a container PyTorch lists its own process among the others. That process holds what PyTorch reserved: it is found if only
/// one process holds that much, and less than that is in use outside of the list.
fn recognize_own_process(facts: &mut Facts) {
    let (Some(total), Some(free), Some(reserved), None) =
        (facts.total_bytes, facts.free_bytes, facts.reserved(), facts.process_bytes)
    else {
        return;
    };
    let unlisted = total.saturating_sub(free).saturating_sub(facts.others());
    let mut able = (0..facts.other_processes.len()).filter(|at| facts.other_processes[*at].bytes >= reserved);
    if let (Some(own), None) = (able.next(), able.next())
        && unlisted < reserved
    {
        facts.process_bytes = Some(facts.other_processes.remove(own).bytes);
    }
}

fn malloc_async(text: &str) -> Option<(Reporter, Facts)> {
    let text = &unframed(text);
    let Some(at) = text.rfind("would exceed allowed memory") else {
        // ComfyUI shows no more of it.
        let is_cut = text.contains("Allocation on device") && text.contains("OutOfMemoryError");
        return is_cut.then(|| (Reporter::PytorchMallocAsync, Facts { failures: 1, ..Facts::default() }));
    };
    let message = &text[at..];
    // Docker's log puts each line into an object of its own.
    let value = |key: &str| {
        let (_, rest) = message.lines().find_map(|line| line.split_once(key))?;
        size(rest.split_once(':')?.1)
    };
    let limit =
        message.split_once("user-supplied memory fraction)").and_then(|(_, rest)| size(rest.split_once(':')?.1));
    let facts = Facts {
        failures: text.matches("would exceed allowed memory").count() as u64,
        gpu: number_before(&text[..at], "device "),
        requested_bytes: value("Requested"),
        total_bytes: value("Device limit"),
        free_bytes: value("Free (according to CUDA)"),
        allocated_bytes: value("Currently allocated"),
        limit_bytes: limit,
        ..Facts::default()
    };
    Some((Reporter::PytorchMallocAsync, facts))
}

fn mps(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("MPS backend out of memory")?..]);
    let facts = Facts {
        failures: text.matches("MPS backend out of memory").count() as u64,
        requested_bytes: size_after(&message, "Tried to allocate "),
        allocated_bytes: size_after(&message, "MPS allocated: "),
        others_bytes: size_after(&message, "other allocations: "),
        limit_bytes: size_after(&message, "max allowed: "),
        ..Facts::default()
    };
    Some((Reporter::PytorchMps, facts))
}

fn host(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("DefaultCPUAllocator")?..]);
    let requested_bytes = size_after(&message, "tried to allocate ");
    Some((Reporter::PytorchCpu, Facts { failures: 1, requested_bytes, ..Facts::default() }))
}

/// The table of `torch.cuda.memory_summary()`, with the columns of current and peak usage.
fn summary(text: &str) -> Option<(Reporter, Facts)> {
    let table = &text[text.find("PyTorch CUDA memory summary")?..];
    let row = |name: &str| {
        let line = table.lines().find(|line| line.trim_start_matches(['|', ' ']).starts_with(name))?;
        size(line.split('|').nth(2)?)
    };
    let (allocated, reserved) = (row("Allocated memory"), row("GPU reserved memory"));
    let failures = table.split_once("CUDA OOMs:").and_then(|(_, rest)| leading_number(rest.trim_start())).unwrap_or(0);
    let facts = Facts {
        failures,
        gpu: number_after(table, "device ID "),
        allocated_bytes: allocated,
        unallocated_bytes: reserved.zip(allocated).map(|(reserved, allocated)| reserved.saturating_sub(allocated)),
        ..Facts::default()
    };
    Some((Reporter::PytorchSummary, facts))
}

fn rmm(text: &str) -> Option<(Reporter, Facts)> {
    let pool = text.rfind("Maximum pool size exceeded").or_else(|| text.rfind("Exceeded memory limit"));
    let at = pool.or_else(|| text.rfind("std::bad_alloc: out_of_memory"))?;
    let message = joined(window(text, at, 600));
    let (current, maximum) = message.split_once("current/max/try size = ").map_or((None, None), |(_, sizes)| {
        let mut sizes = sizes.split(", ").map(size);
        (sizes.next().flatten(), sizes.next().flatten())
    });
    // RMM prints the largest number, which is not a size, for a pool without a maximum.
    let is_unlimited = current.is_some() && maximum.is_none();
    // The pool reports its upstream's failure with the same first words.
    let is_refused_by_cuda = message.contains("CUDA error") || message.contains("cudaErrorMemoryAllocation");
    let facts = Facts {
        failures: 1,
        requested_bytes: size_after(&message, "failed to allocate "),
        allocated_bytes: current,
        limit_bytes: maximum.or_else(|| {
            pool.and_then(|_| size_after(&message, "max=").or_else(|| size_after(&message, "maximum pool size ")))
        }),
        is_pool_full: pool.is_some() && !is_unlimited && !is_refused_by_cuda,
        ..Facts::default()
    };
    Some((Reporter::Rmm, facts))
}

/// Its numbers are the device's, or those of the limit that it names: what is allocated may be of other processes.
fn paddle(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("Out of memory error on GPU ")?..]);
    let free_bytes = size_after(&message, "available memory is only ");
    let used = size_before(&message, " memory has been allocated and available");
    let limit = number_after(&message, "Currently `FLAGS_gpu_memory_limit_mb` is ");
    let sum = used.zip(free_bytes).map(|(used, free)| used.saturating_add(free));
    let facts = Facts {
        failures: text.matches("Out of memory error on GPU ").count() as u64,
        gpu: number_after(&message, "Out of memory error on GPU "),
        requested_bytes: size_after(&message, "Cannot allocate "),
        total_bytes: sum.filter(|_| limit.is_none()),
        limit_bytes: limit.map(|mib| mib.saturating_mul(1 << 20)),
        allocated_bytes: used.filter(|_| limit.is_some()),
        free_bytes: free_bytes.filter(|_| limit.is_none()),
        ..Facts::default()
    };
    Some((Reporter::Paddle, facts))
}

fn cupy(text: &str) -> Option<(Reporter, Facts)> {
    let message =
        joined(&text[text.rfind("Out of memory allocating ").or_else(|| text.rfind("out of memory to allocate "))?..]);
    let asked = size_after(&message, "allocating ").or_else(|| size_after(&message, "to allocate "));
    let facts = Facts {
        failures: 1,
        requested_bytes: asked,
        allocated_bytes: size_after(&message, "allocated so far: "),
        limit_bytes: size_after(&message, "limit set to: "),
        ..Facts::default()
    };
    Some((Reporter::Cupy, facts))
}

fn onnx_runtime(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("onnxruntime").or_else(|| text.rfind("ONNXRuntime"))?..]);
    // The arena's limit less what it has: memory of the device does not count.
    let free_bytes = number_after(&message, "Available memory of ");
    let fronts = ["requested buffer of size ", "is smaller than requested bytes of "];
    let requested = fronts.iter().find_map(|front| number_after(&message, front))?;
    let facts = Facts { failures: 1, requested_bytes: Some(requested), free_bytes, ..Facts::default() };
    Some((Reporter::OnnxRuntime, facts))
}

/// The tables of `nvidia-smi`, and lines of `--query-compute-apps`.
fn nvidia_smi(text: &str) -> Option<(Reporter, Facts)> {
    if !text.contains("MiB")
        || !(text.contains("NVIDIA-SMI") || text.contains("used_gpu_memory") || text.contains("Memory-Usage"))
    {
        return None;
    }
    let mut facts = Facts::default();
    for line in text.lines() {
        let columns = line.trim_matches(['|', ' ']);
        if let Some((used, total)) = columns.split_once("MiB /").filter(|_| facts.total_bytes.is_none()) {
            let used = used.rsplit(' ').next().and_then(|used| size(&format!("{used} MiB")));
            let total = total.trim_start().split("MiB").next().and_then(|total| size(&format!("{} MiB", total.trim())));
            facts.total_bytes = total;
            facts.free_bytes = total.zip(used).map(|(total, used)| total.saturating_sub(used));
            continue;
        }
        let words: Vec<&str> = columns.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let megabytes = words.last().and_then(|last| {
            last.strip_suffix("MiB").or_else(|| (*last == "MiB").then(|| words[words.len().saturating_sub(2)]))
        });
        let Some(bytes) = megabytes.and_then(|number| size(&format!("{number} MiB"))) else { continue };
        // Of the table `GPU GI CI PID Type name`; of a query the process comes first.
        let pid = words.iter().take(5).filter_map(|word| word.parse::<u64>().ok()).max();
        if let Some(pid) = pid.filter(|pid| *pid > 15) {
            facts.other_processes.push(Holder { pid, bytes });
        }
    }
    Some((Reporter::NvidiaSmi, facts))
}

/// Failures whose text does not say that memory ran out, or not how much was wanted.
fn disguised(text: &str) -> Option<(Reporter, Facts)> {
    let mut facts = Facts { failures: 1, ..Facts::default() };
    let has = |word: &str| text.contains(word);
    let nccl = ["NCCL WARN Cuda failure", "ncclUnhandledCudaError"];
    if has("Failed to CUDA calloc") || nccl.iter().any(|word| has(word)) && has("out of memory") {
        facts.requested_bytes = size_after(&joined(text), "Failed to CUDA calloc ");
        return Some((Reporter::Nccl, facts));
    }
    if has("NVML_SUCCESS == r") {
        return Some((Reporter::PytorchNvml, facts));
    }
    let libraries = [
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "CUSOLVER_STATUS_ALLOC_FAILED",
        "CUFFT_ALLOC_FAILED",
    ];
    if libraries.iter().any(|word| has(word)) {
        return Some((Reporter::CudaLibrary, facts));
    }
    let cuda = [
        "cudaErrorMemoryAllocation",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA error: out of memory",
        "CUDA error: Out of memory",
        "CUDA out of memory",
        "HIP error: out of memory",
        "hipErrorOutOfMemory",
    ];
    // Databases, JavaScript and Go run out of memory, too: bare words are CUDA's only beside a word of a GPU.
    let lower = text.to_lowercase();
    let of_gpu =
        ["cuda", "gpu", "hip", "device", "thrust", "nvenc", "nvidia", "bitsandbytes", "bad_alloc: out of memory"];
    let bare = lower.contains("out of memory")
        && !lower.contains("heap out of memory")
        && of_gpu.iter().any(|word| lower.contains(word));
    facts.platform = Platform::new(text);
    // `failed to allocate 7.50GiB (8053063680 bytes) from device` is a line of TensorFlow's and XLA's driver.
    let line = text.lines().rfind(|line| line.contains("failed to allocate ") && line.contains("from device"));
    facts.requested_bytes = line.and_then(|line| {
        let (_, rest) = line.rsplit_once("failed to allocate ")?;
        number_after(rest, "(").or_else(|| size(rest))
    });
    (bare || cuda.iter().any(|word| has(word))).then_some((Reporter::Cuda, facts))
}

/// The size at the beginning of a text: `672.00 MiB`, `2.00GiB`, `0 bytes`, `1,073,741,824 bytes`.
pub(super) fn size(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let end = text
        .find(|character: char| !(character.is_ascii_digit() || matches!(character, '.' | ',')))
        .unwrap_or(text.len());
    let value = decimal(&text[..end])?;
    let unit = text[end..].trim_start();
    let shift = match unit.chars().next() {
        Some('K' | 'k') => 10,
        Some('M') => 20,
        Some('G') => 30,
        Some('T') => 40,
        Some('P') => 50,
        Some('E') => 60,
        Some('b' | 'B') => 0,
        _ => return None,
    };
    // CAST: a size that was printed with at most five digits, or whole bytes of a device. 2^64 stands for what the
    // writer does not know, and for no limit.
    let bytes = value * (1_u64 << shift) as f64;
    (bytes < (1_u64 << 62) as f64).then_some(bytes.round() as u64)
}

/// A number with a point or a comma before its fraction, or with commas between thousands.
fn decimal(digits: &str) -> Option<f64> {
    match digits.split_once(',') {
        Some((whole, fraction)) if fraction.len() != 3 && !fraction.contains([',', '.']) => {
            format!("{whole}.{fraction}").parse().ok()
        }
        _ => digits.replace(',', "").parse().ok(),
    }
}

pub(super) fn size_after(text: &str, front: &str) -> Option<u64> {
    size(text.split_once(front)?.1)
}

pub(super) fn size_before(text: &str, back: &str) -> Option<u64> {
    size_at_end(text.split_once(back)?.0)
}

/// The size that a text ends with.
pub(super) fn size_at_end(text: &str) -> Option<u64> {
    let text = text.trim_end();
    let unit = text.rfind(|character: char| character.is_ascii_digit())?;
    let start = text[..unit]
        .rfind(|character: char| !(character.is_ascii_digit() || matches!(character, '.' | ',')))
        .map_or(0, |at| at + 1);
    // `(1.5` begins behind the bracket, whose size is one byte.
    size(text.get(start..)?)
}

pub(super) fn leading_number(text: &str) -> Option<u64> {
    let end = text.find(|character: char| !(character.is_ascii_digit() || character == ',')).unwrap_or(text.len());
    text[..end].replace(',', "").parse().ok()
}

pub(super) fn number_after(text: &str, front: &str) -> Option<u64> {
    leading_number(text.split_once(front)?.1)
}

fn number_before(text: &str, front: &str) -> Option<u64> {
    leading_number(text.rsplit_once(front)?.1)
}
