//! The sentences of an answer: the message, its cause, who holds memory, what to change, and the next command.

use super::text::{Facts, Platform, Reporter};
use super::verdict::Finding;
use terminal::command;
use vramlab::Bytes;

/// PyTorch's setting against fragmentation.
const EXPANDABLE: &str = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
/// At most this many lines; the rest is in `--json`.
const MOST_HOLDERS: usize = 2;

/// An answer in words.
pub(crate) struct Advice {
    pub(crate) lines: Vec<String>,
    pub(crate) setting: Option<String>,
    pub(crate) next: String,
}

impl Advice {
    pub(crate) fn new(source: Reporter, facts: &Facts, findings: &[Finding]) -> Self {
        let mut lines = vec![message(source, facts)];
        let causes = findings.iter().filter(|finding| finding.is_cause());
        lines.extend(causes.map(|finding| cause(source, facts, findings, *finding)));
        let holders: Vec<String> =
            findings.iter().filter_map(|finding| holder(source, facts, *finding)).take(MOST_HOLDERS).collect();
        if !holders.is_empty() {
            lines.push(holders.join(" "));
        }
        let (remedy, setting) = match super::host::remedy(source, facts) {
            Some(remedy) => (remedy.to_owned(), None),
            None => remedy(source, facts, findings),
        };
        lines.push(remedy);
        Self { lines, setting: setting.map(str::to_owned), next: next(source, facts.platform, findings) }
    }
}

/// Who failed, with the numbers of the text.
fn message(source: Reporter, facts: &Facts) -> String {
    let size = |bytes: u64| Bytes(bytes).to_string();
    let name = match source {
        Reporter::Pytorch => "PyTorch's allocator",
        Reporter::PytorchMallocAsync => "PyTorch over cudaMallocAsync",
        Reporter::PytorchMps => "PyTorch on an Apple GPU",
        Reporter::PytorchCpu => "PyTorch's allocator of host memory",
        Reporter::PytorchNvml => "PyTorch",
        Reporter::PytorchSummary => "PyTorch's memory summary",
        Reporter::VllmStart | Reporter::VllmCache => "vLLM",
        Reporter::Tensorflow => "TensorFlow's allocator",
        Reporter::TensorflowCpu => "TensorFlow's allocator of host memory",
        Reporter::Xla => "XLA (JAX or TensorFlow)",
        Reporter::XlaTpu => "XLA on a TPU",
        Reporter::Rmm => "RMM",
        Reporter::Cupy => "CuPy's pool",
        Reporter::Ggml | Reporter::GgmlCpu => "ggml (llama.cpp, Ollama)",
        Reporter::Sglang => "SGLang",
        Reporter::Julia => "Julia's CUDA.jl",
        Reporter::Metal => "Metal on an Apple GPU",
        Reporter::Triton => "Triton",
        Reporter::Tensorrt => "TensorRT",
        Reporter::Xgboost => "XGBoost",
        Reporter::OnnxRuntime => "ONNX Runtime",
        Reporter::Paddle => "PaddlePaddle",
        Reporter::Nccl => "NCCL",
        Reporter::CudaLibrary => "A CUDA library",
        Reporter::NvidiaSmi => "nvidia-smi",
        Reporter::KernelOom => return super::host::message(facts),
        Reporter::Cuda if facts.platform == Platform::Hip => "HIP",
        Reporter::Pinning | Reporter::Cuda => "CUDA",
        Reporter::SharedMemory => "Shared memory",
        Reporter::HostMemory => "The program",
        Reporter::Ray => "Ray",
    };
    let gpu = facts.gpu.map_or(String::new(), |gpu| format!(" on GPU {gpu}"));
    let mut parts = Vec::new();
    if let Some(requested) = facts.requested_bytes {
        // PyTorch asks the driver for segments of 2 MiB and 20 MiB for smaller tensors.
        let segment = match requested {
            0x20_0000 if source == Reporter::Pytorch => " (a segment; the tensor has at most 1 MiB)",
            0x140_0000 if source == Reporter::Pytorch => " (a segment; the tensor has at most 10 MiB)",
            _ => "",
        };
        parts.push(format!("{} requested{segment}", size(requested)));
    }
    match (facts.free_bytes, facts.total_bytes) {
        (Some(free), Some(total)) => parts.push(format!("{} of {} free", size(free), size(total))),
        (Some(free), None) => parts.push(format!("{} free", size(free))),
        (None, Some(total)) => parts.push(format!("the device has {}", size(total))),
        (None, None) => {}
    }
    if let Some(allocated) = facts.allocated_bytes {
        parts.push(match source {
            Reporter::Rmm => format!("the pool has {}", size(allocated)),
            Reporter::Xla => format!("the compiled function needs {} in all", size(allocated)),
            _ => format!("{} allocated", size(allocated)),
        });
    }
    if let Some(unallocated) = facts.unallocated_bytes {
        parts.push(match source {
            Reporter::Xla => format!("{} of it fragmentation", size(unallocated)),
            _ => format!("{} reserved but unallocated", size(unallocated)),
        });
    }
    if let Some(limit) = facts.limit_bytes {
        parts.push(format!("limit {}", size(limit)));
    }
    let numbers = if parts.is_empty() { "the text has no sizes".to_owned() } else { parts.join(", ") };
    let times = if facts.failures > 1 { format!(" (last of {} failures)", facts.failures) } else { String::new() };
    format!("{name}{gpu}{times}: {numbers}.")
}

fn cause(source: Reporter, facts: &Facts, findings: &[Finding], finding: Finding) -> String {
    let size = |bytes: u64| Bytes(bytes).to_string();
    match finding {
        Finding::Limit(limit) if source == Reporter::Triton => format!(
            "Cause: not device memory. A block of this kernel needs more shared memory, which is on each multiprocessor, than the {} that \
             this GPU allows.",
            size(limit)
        ),
        Finding::Limit(limit) if source == Reporter::Metal => {
            format!("Cause: one array exceeds the largest buffer that Metal allows on this machine, {}.", size(limit))
        }
        Finding::Limit(limit) => {
            let owner = match source {
                Reporter::Tensorflow => "TensorFlow's share of the GPU",
                Reporter::Rmm | Reporter::Cupy => "the pool's maximum size",
                Reporter::PytorchMps => "the limit that PyTorch sets on this machine",
                _ => "the limit of this process",
            };
            format!("Cause: {owner}, {}. The GPU itself did not refuse the request.", size(limit))
        }
        Finding::RequestTooLarge(beyond) if source == Reporter::XlaTpu => {
            format!("Cause: the compiled program needs {} more than the TPU has.", size(beyond))
        }
        Finding::RequestTooLarge(beyond) => {
            format!("Cause: the request alone exceeds the GPU by {}. No setting can serve it.", size(beyond))
        }
        Finding::Paging(beyond) => format!(
            "Cause: {} more is reserved than the GPU has, so the driver (Windows) pages GPU memory to host memory, which is slow; the \
             program needs a smaller working set.",
            size(beyond)
        ),
        Finding::NotDeviceMemory(free) => format!(
            "Cause: not device memory. {} were free, more than the request; another limit refused it: host memory or address space, \
             a container, WSL, or the driver.",
            size(free)
        ),
        Finding::Fragmentation(unallocated) if findings.iter().any(|finding| matches!(finding, Finding::Limit(_))) => {
            format!(
                "Within the limit: fragmentation. {} are reserved but unallocated, more than the request, in pieces that are too small.",
                size(unallocated)
            )
        }
        Finding::Fragmentation(unallocated) => {
            // What others hold is not the program's need.
            let full = facts.total_bytes.is_some_and(|total| {
                unallocated < total / 20 && facts.allocated_bytes.is_some_and(|used| used > total / 5 * 4)
            });
            let full = if full {
                " That is all that a setting can gain: the program needs nearly all of the GPU."
            } else {
                ""
            };
            format!(
                "Cause: fragmentation. {} are reserved but unallocated, more than the request, in pieces that are too small.{full}",
                size(unallocated)
            )
        }
        Finding::FragmentationInTwoPlaces(together) => format!(
            "Cause: fragmentation. {} are free, in two places: {} in {}, {} on the GPU. Neither is enough alone.",
            size(together),
            size(facts.unallocated_bytes.unwrap_or(0)),
            if source == Reporter::Julia { "CUDA.jl's pool" } else { "PyTorch's segments" },
            size(facts.free_bytes.unwrap_or(0))
        ),
        Finding::TooLittle(short) => {
            format!("Cause: too little memory. {} are missing, even if every free byte could be used.", size(short))
        }
        _ => undecided(source, facts),
    }
}

/// Where the numbers do not decide: what the text leaves open.
fn undecided(source: Reporter, facts: &Facts) -> String {
    if let Some(cause) = super::host::cause(source, facts) {
        return cause.to_owned();
    }
    match source {
        Reporter::PytorchNvml => {
            "Cause: a request ran out of memory, and PyTorch's query of NVML for the message failed (some containers and Jetson \
             have no NVML). The text does not say how much was missing."
        }
        Reporter::PytorchCpu | Reporter::TensorflowCpu => "Cause: host memory (RAM), not GPU memory.",
        Reporter::Tensorflow if facts.failures == 0 => {
            "Memory did not run out: the text has only warnings that more memory could make the program faster."
        }
        Reporter::Nccl => {
            "Cause: NCCL allocates its buffers outside of the framework's allocator, which had left too little memory on the GPU. \
             The text does not say who holds it."
        }
        Reporter::CudaLibrary => {
            "Cause: most likely out of memory. These libraries allocate a workspace with each handle, outside of the framework's \
             allocator, and report a failure in this way."
        }
        Reporter::PytorchSummary if facts.failures == 0 => "Memory did not run out: the summary counts no failed request.",
        Reporter::PytorchSummary => "The summary does not say what was requested, or what other processes hold.",
        Reporter::VllmCache if facts.is_pool_full => {
            "Cause: the model, its activations and the CUDA context take all that vLLM is set to use (--gpu-memory-utilization), so \
             nothing is left for its cache of keys and values. Some releases count other programs on the GPU, too."
        }
        Reporter::VllmCache => "Cause: the cache of keys and values for one request does not fit into what vLLM has left for it.",
        Reporter::VllmStart => "Cause: less memory is free at the start than vLLM is set to use.",
        Reporter::NvidiaSmi => "The table shows who holds memory, not why a request failed.",
        Reporter::Ggml => "Cause: one buffer does not fit. The text does not say how much is free.",
        Reporter::Sglang if facts.is_pool_full => {
            "Cause: SGLang's cache of keys and values has too few free tokens for the batch. The GPU itself did not refuse a request."
        }
        Reporter::Sglang => "Cause: the model leaves nothing for the cache of keys and values within SGLang's share of the GPU.",
        Reporter::Tensorrt if facts.failures == 0 => {
            "Nothing failed: TensorRT skips the tactic that needed this memory, and continues; the engine may be slower."
        }
        Reporter::Xla => "The text does not say how much memory the GPU has, or who holds it.",
        Reporter::Rmm if facts.is_pool_full => "Cause: the pool has its maximum size, which the text does not tell.",
        Reporter::OnnxRuntime if facts.free_bytes.is_some() => {
            "Cause: the limit of ONNX Runtime's arena (gpu_mem_limit), which leaves less than the request."
        }
        Reporter::Rmm => {
            "Cause: the GPU and not the pool's maximum size. CUDA refused the request; the text does not say who holds the memory."
        }
        _ if facts.free_bytes.is_some() && facts.requested_bytes.is_some() => {
            "The text does not say how much of what is reserved is unallocated, so the cause is open."
        }
        _ if facts.free_bytes.is_some() => "The text does not say what was requested, so the cause is open.",
        _ => "The text does not say how much was free, or who holds the memory.",
    }
    .to_owned()
}

/// Holders beside the cause.
fn holder(source: Reporter, facts: &Facts, finding: Finding) -> Option<String> {
    let allocator = if source == Reporter::Julia { "CUDA.jl's pool" } else { "PyTorch's allocator" };
    let context = if facts.platform == Platform::Cuda { "CUDA context" } else { "context" };
    let size = |bytes: u64| Bytes(bytes).to_string();
    Some(match finding {
        Finding::OtherProcesses(bytes) => match facts.other_processes.as_slice() {
            [] => format!("{} are held by others on this machine.", size(bytes)),
            [one] if facts.process_bytes.is_none() => {
                format!("Process {} holds {}; in a container that may be this process.", one.pid, size(bytes))
            }
            [one] => format!("Process {} holds {}.", one.pid, size(bytes)),
            several => format!("{} processes hold {}.", several.len(), size(bytes)),
        },
        Finding::OutsideAllocator(bytes) => format!(
            "This process holds {} outside of {allocator}: the {context}, NCCL, graphs, other libraries.",
            size(bytes)
        ),
        Finding::Unseen(bytes) if facts.process_bytes.is_none() && facts.allocated_bytes.is_some() => format!(
            "{} of the GPU are held outside of {allocator}: by other processes, and by this one's {context} and libraries.",
            size(bytes)
        ),
        Finding::Unseen(bytes) => {
            format!("{} of the GPU are held by processes that the text does not name.", size(bytes))
        }
        Finding::PrivatePools(bytes) => {
            format!(
                "{} are free inside private pools (CUDA graphs, MemPool), which only their own requests can use.",
                size(bytes)
            )
        }
        _ => return None,
    })
}

/// A change, and a setting for it.
fn remedy(source: Reporter, facts: &Facts, findings: &[Finding]) -> (String, Option<&'static str>) {
    let cause = findings.iter().find(|finding| finding.is_cause()).copied().unwrap_or(Finding::Undecided);
    let others = findings.iter().any(is_elsewhere);
    match (source, cause) {
        (Reporter::Pytorch, Finding::Fragmentation(_) | Finding::FragmentationInTwoPlaces(_))
            if let Some(releases) = facts.releases =>
        {
            let text = format!(
                "Update PyTorch: this text is of {releases}, and {EXPANDABLE}, which may serve the request, needs 2.1. Before 2.1 \
                 PyTorch does not start with that setting."
            );
            (text, None)
        }
        (Reporter::Pytorch, Finding::Fragmentation(_) | Finding::FragmentationInTwoPlaces(_)) if facts.platform != Platform::Cuda => {
            elsewhere(facts.platform)
        }
        (Reporter::Julia, Finding::Fragmentation(_) | Finding::FragmentationInTwoPlaces(_)) => (
            "Try: GC.gc(); CUDA.reclaim() before the request; or JULIA_CUDA_MEMORY_POOL=none, which has no pool and is slower.".into(),
            Some("JULIA_CUDA_MEMORY_POOL=none"),
        ),
        (Reporter::Julia, Finding::Limit(_)) => ("Raise JULIA_CUDA_HARD_MEMORY_LIMIT, or use less memory.".into(), None),
        (Reporter::Julia, _) => (
            "Free arrays that are still referenced (CUDA.unsafe_free!, or set them to nothing, then GC.gc()), or use smaller arrays; \
             nvidia-smi shows what other processes hold."
                .into(),
            None,
        ),
        (Reporter::Sglang, _) if facts.is_pool_full => (
            "Lower --max-running-requests or the length of requests, or raise --mem-fraction-static, which makes this cache larger.".into(),
            None,
        ),
        (Reporter::Sglang, _) => (
            "Raise --mem-fraction-static, use more GPUs (--tp), or a smaller or quantized model.".into(),
            None,
        ),
        (Reporter::Metal, Finding::Limit(_)) => ("Split the array: a shorter prompt, a smaller batch or a smaller step of prefill.".into(), None),
        (Reporter::Metal, _) => ("Close what holds the rest of the memory, or use a smaller model, batch or context.".into(), None),
        (Reporter::Triton, _) => (
            "Use smaller blocks (BLOCK_*) or fewer stages (num_stages) in the kernel; freeing device memory does not help.".into(),
            None,
        ),
        (Reporter::Tensorrt, _) if facts.failures == 0 => {
            ("Nothing has to change; a smaller workspace (setMemoryPoolLimit) ends the warnings.".into(), None)
        }
        (Reporter::Tensorrt, _) => (
            "Use a smaller workspace (setMemoryPoolLimit, --memPoolSize), smaller shapes of the profile, or lower precision; end what else \
             uses the GPU."
                .into(),
            None,
        ),
        (Reporter::Pytorch, Finding::Fragmentation(_) | Finding::FragmentationInTwoPlaces(_)) => (
            format!("Try: {EXPANDABLE} (before Python starts; not on Windows, not under cudaMallocAsync)."),
            Some(EXPANDABLE),
        ),
        (Reporter::Pytorch, Finding::Limit(_)) if findings.iter().any(|finding| matches!(finding, Finding::Fragmentation(_))) => (
            format!("Try: {EXPANDABLE} (before Python starts; not on Windows, not under cudaMallocAsync), or raise the limit."),
            Some(EXPANDABLE),
        ),
        (Reporter::PytorchMallocAsync, _) => (
            "Try PyTorch's own allocator with expandable segments: PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:True (in \
             ComfyUI with --disable-cuda-malloc; on Windows without expandable_segments); or a smaller batch or image."
                .into(),
            Some("PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:True"),
        ),
        (Reporter::Tensorflow, _) if facts.failures == 0 => ("Nothing has to change; a smaller batch ends the warnings.".into(), None),
        (Reporter::Tensorflow, _) => (
            "Try: TF_GPU_ALLOCATOR=cuda_malloc_async, which fragments less; a smaller batch where the pool is full.".into(),
            Some("TF_GPU_ALLOCATOR=cuda_malloc_async"),
        ),
        (Reporter::Xla, _) => (
            "Try: XLA_PYTHON_CLIENT_MEM_FRACTION=.95 where this process has the GPU for itself; XLA_PYTHON_CLIENT_PREALLOCATE=false \
             where it shares it; else a smaller batch."
                .into(),
            Some("XLA_PYTHON_CLIENT_MEM_FRACTION=.95"),
        ),
        (Reporter::XlaTpu, _) => (
            "Use a smaller batch, recompute activations (jax.checkpoint), or shard the arrays over more chips.".into(),
            None,
        ),
        (Reporter::OnnxRuntime, _) if facts.free_bytes.is_some() => ("Raise gpu_mem_limit of the CUDA provider, or use a smaller batch.".into(), None),
        (Reporter::PytorchMps, Finding::Limit(_)) => (
            "Close what holds the rest of the memory, or use a smaller batch; PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit \
             and may stop the machine."
                .into(),
            None,
        ),
        (Reporter::VllmStart, _) => ("Lower --gpu-memory-utilization to what is free, or end the processes that hold the rest.".into(), None),
        (Reporter::VllmCache, _) if facts.is_pool_full => (
            "Raise --gpu-memory-utilization if the GPU has more free, lower --max-num-batched-tokens, which shrinks the activations, \
             or use a smaller quantization or more GPUs."
                .into(),
            None,
        ),
        (Reporter::VllmCache, _) => ("Lower --max-model-len, raise --gpu-memory-utilization, or use more GPUs.".into(), None),
        (Reporter::Ggml, _) => ("Put fewer layers on the GPU (-ngl; Ollama: num_gpu), use a shorter context (-c; Ollama: num_ctx), or a smaller quantization.".into(), None),
        (Reporter::Rmm, _) if facts.is_pool_full => ("Raise the pool's maximum size.".into(), None),
        (Reporter::Paddle, Finding::Limit(_)) => ("Raise FLAGS_gpu_memory_limit_mb, or use a smaller batch.".into(), None),
        (Reporter::Cupy, Finding::Limit(_)) => ("Raise the pool's maximum size.".into(), None),
        (Reporter::Nccl, _) => (
            "Leave memory for NCCL: a smaller batch, or torch.cuda.set_per_process_memory_fraction(0.9) in each rank.".into(),
            None,
        ),
        (Reporter::CudaLibrary, _) => ("Leave memory for the library: a smaller batch, or handles that are created early.".into(), None),
        (Reporter::PytorchCpu | Reporter::TensorflowCpu, _) => ("Use fewer loader workers, a smaller batch, or a machine with more RAM.".into(), None),
        (_, Finding::Limit(_)) => (
            "Raise the limit (torch.cuda.set_per_process_memory_fraction, per_process_memory_fraction), or use less memory.".into(),
            None,
        ),
        (_, Finding::NotDeviceMemory(_)) => (
            "Look at the host: free RAM, the container's limit, ulimit -v, WSL's limit on pinned memory; then at the driver's log \
             (dmesg)."
                .into(),
            None,
        ),
        (_, Finding::RequestTooLarge(_)) => ("Split the operation that makes this tensor, or shrink its shape.".into(), None),
        _ if others => ("End the other processes, or choose another GPU (CUDA_VISIBLE_DEVICES).".into(), None),
        (_, Finding::TooLittle(_) | Finding::Paging(_)) => (
            "A setting cannot serve it. Use a smaller batch, checkpointing, offloading or lower precision; a recording shows what \
             holds the memory."
                .into(),
            None,
        ),
        _ => ("A recording of the program shows who holds the memory when it fails.".into(), None),
    }
}

/// PyTorch's setting against fragmentation on GPUs that are not NVIDIA's.
fn elsewhere(platform: Platform) -> (String, Option<&'static str>) {
    let (text, setting) = match platform {
        Platform::Hip => (
            "Try: PYTORCH_HIP_ALLOC_CONF=expandable_segments:True (before Python starts). PyTorch warns where its build for ROCm does not \
             support it; a smaller batch helps there.",
            Some("PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"),
        ),
        Platform::Npu => (
            "Try: PYTORCH_NPU_ALLOC_CONF=expandable_segments:True (before Python starts), or a smaller batch.",
            Some("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
        ),
        Platform::Xpu | Platform::Cuda => {
            ("Release free segments (torch.xpu.empty_cache()), or use a smaller batch.", None)
        }
    };
    (text.to_owned(), setting)
}

/// Whether memory is held that `nvidia-smi` names and this process does not hold.
fn is_elsewhere(finding: &Finding) -> bool {
    matches!(finding, Finding::OtherProcesses(_) | Finding::Unseen(_))
}

/// The command that goes on from here.
fn next(source: Reporter, platform: Platform, findings: &[Finding]) -> String {
    let pytorch = matches!(
        source,
        Reporter::Pytorch
            | Reporter::PytorchNvml
            | Reporter::PytorchSummary
            | Reporter::VllmStart
            | Reporter::VllmCache
            | Reporter::Nccl
            | Reporter::CudaLibrary
            | Reporter::KernelOom
            | Reporter::Pinning
    );
    // A cause that lies in the program is looked for in the program, whoever else holds memory.
    let own = findings.iter().any(|finding| {
        matches!(
            finding,
            Finding::Fragmentation(_)
                | Finding::FragmentationInTwoPlaces(_)
                | Finding::RequestTooLarge(_)
                | Finding::Paging(_)
        )
    });
    let elsewhere = !own && findings.iter().any(is_elsewhere);
    match source {
        // A Mac's.
        Reporter::PytorchMps | Reporter::Metal => "top -o mem".into(),
        // `vramlab run` records CUDA.
        _ if platform != Platform::Cuda => platform.tool().into(),
        Reporter::Triton => "python YOUR_PROGRAM.py".into(),
        _ if elsewhere && source != Reporter::NvidiaSmi => platform.tool().into(),
        _ if pytorch => command("vramlab", "run -- python YOUR_PROGRAM.py"),
        Reporter::PytorchCpu | Reporter::TensorflowCpu | Reporter::GgmlCpu | Reporter::HostMemory | Reporter::Ray => {
            "free -h".into()
        }
        Reporter::SharedMemory => "df -h /dev/shm".into(),
        Reporter::XlaTpu => "tpu-info".into(),
        _ => platform.tool().into(),
    }
}
