//! Messages of inference engines and of programs beside PyTorch: vLLM, SGLang, llama.cpp, TensorRT, Triton, CUDA.jl.

use super::lines::joined;
use super::text::{Facts, Reporter, leading_number, number_after, size, size_after, size_at_end, size_before};

pub(super) fn vllm(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(text);
    let begins = [
        "Free memory on device",
        "To serve at least one request",
        "KV cache is needed",
        "No available memory for the cache blocks",
        "maximum number of tokens that can be stored in KV cache",
    ];
    let at = begins.iter().filter_map(|words| message.rfind(words)).max()?;
    // PyTorch's message behind it has numbers of a later failure.
    if message[at..].contains("Tried to allocate ") {
        return None;
    }
    if let Some(rest) = message[at..].strip_prefix("Free memory on device") {
        let (free, total) = rest.split_once('(')?.1.split_once('/')?;
        // The unit stands behind the second number only.
        let facts = Facts {
            free_bytes: size(&format!("{free} GiB")),
            total_bytes: size(total),
            requested_bytes: rest.split_once("utilization (").and_then(|(_, rest)| size(rest.split_once(", ")?.1)),
            ..Facts::failure()
        };
        return Some((Reporter::VllmStart, facts));
    }
    if message[at..].starts_with("No available memory") {
        return Some((Reporter::VllmCache, without_cache(&message[..at])));
    }
    let mut facts = Facts::failure();
    // A terminal breaks a long line inside of a word, so the words around the sizes are not all looked for.
    if let Some((_, rest)) = message.rsplit_once("To serve at least one request").or(message.rsplit_once("max seq len"))
    {
        facts.requested_bytes = size_before(rest, " KV cach");
        facts.free_bytes = size_after(rest, "available KV cache memory (");
    } else if let Some((front, rest)) = message.rsplit_once("KV cache is needed") {
        facts.requested_bytes = size_at_end(front);
        facts.free_bytes = size_after(rest, "available KV cache memory (");
    }
    Some((Reporter::VllmCache, facts))
}

/// The sizes in the log of a start that left nothing for the cache, as older releases print them.
fn without_cache(log: &str) -> Facts {
    let taken = ["model weights take ", "non_torch_memory takes ", "activation peak memory takes "];
    let last = |front: &str| size(log.rsplit_once(front)?.1);
    Facts {
        total_bytes: last("total_gpu_memory ("),
        limit_bytes: log.rsplit_once("gpu_memory_utilization (").and_then(|(_, rest)| size_after(rest, ") = ")),
        allocated_bytes: taken.into_iter().try_fold(0, |sum: u64, front| Some(sum.saturating_add(last(front)?))),
        is_pool_full: true,
        ..Facts::failure()
    }
}

/// SGLang, before its cache of keys and values has memory, or when that cache has no free tokens.
pub(super) fn sglang(text: &str) -> Option<(Reporter, Facts)> {
    if text.contains("Tried to allocate ") {
        return None;
    }
    let starts = text.contains("Not enough memory. Please try to increase --mem-fraction-static");
    let full = ["Decode out of memory. Try to lower", "Prefill out of memory. Try to lower"];
    let is_pool_full = full.iter().any(|words| text.contains(words));
    (starts || is_pool_full).then(|| (Reporter::Sglang, Facts { is_pool_full, ..Facts::failure() }))
}

/// CUDA.jl's message, and the state of its pool below it.
pub(super) fn julia(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("Out of GPU memory")?..]);
    let requested_bytes = size_after(&message, "Out of GPU memory trying to allocate ");
    if requested_bytes.is_none() && !text.contains("CUDA.cudaError_enum") {
        return None;
    }
    let device = message.split_once("Effective GPU memory usage: ").and_then(|(_, rest)| rest.split_once('('));
    let (used, total) = device
        .and_then(|(_, sizes)| sizes.split_once('/'))
        .map_or((None, None), |(used, total)| (size(used), size(total)));
    let mut facts = Facts {
        failures: text.matches("Out of GPU memory").count() as u64,
        requested_bytes,
        total_bytes: total,
        free_bytes: total.zip(used).map(|(total, used)| total.saturating_sub(used)),
        // The soft limit only collects garbage earlier.
        limit_bytes: size_after(&message, "hard = "),
        ..Facts::default()
    };
    if let Some((_, pool)) = message.split_once("Memory pool usage: ") {
        // The bracket of older releases has both numbers, later the reserved size.
        if let Some(cached) = size_before(pool, " cached)") {
            facts.allocated_bytes = size_before(pool, " allocated,");
            facts.unallocated_bytes = Some(cached);
        } else {
            facts.allocated_bytes = size(pool);
            let reserved = size_before(pool, " reserved)");
            facts.unallocated_bytes = reserved.zip(size(pool)).map(|(reserved, used)| reserved.saturating_sub(used));
        }
    } else if let Some((_, cuda)) = message.split_once("CUDA allocator usage: ") {
        facts.allocated_bytes = size(cuda);
        facts.limit_bytes = size_after(cuda, "(capped at ");
    }
    Some((Reporter::Julia, facts))
}

/// ggml, under llama.cpp, whisper.cpp and Ollama: the last buffer that was refused, and where.
pub(super) fn ggml(text: &str) -> Option<(Reporter, Facts)> {
    if let Some(host) = ollama(text) {
        return Some(host);
    }
    if !["ggml", "llama_", "llama.cpp", "buffer of size"].iter().any(|word| text.contains(word)) {
        return None;
    }
    if let Some(facts) = refused_buffer(text) {
        return Some(facts);
    }
    if let Some((_, rest)) = text.rsplit_once("ggml_cuda_host_malloc: failed to allocate ") {
        // ggml continues with memory that is not pinned.
        return Some((Reporter::Pinning, Facts { requested_bytes: size(rest), ..Facts::default() }));
    }
    let at = ["CUDA error: out of memory", "ROCm error: out of memory"].iter().find_map(|words| text.rfind(words))?;
    Some((Reporter::Ggml, Facts { gpu: number_after(&text[at..], "current device: "), ..Facts::failure() }))
}

/// The last line of ggml's that names a size.
fn refused_buffer(text: &str) -> Option<(Reporter, Facts)> {
    let mut last: Option<(Reporter, Facts)> = None;
    for line in text.lines() {
        let (name, bytes) = if let Some((_, rest)) = line.split_once("failed to allocate buffer of size ") {
            (if line.contains("_cpu_") { "CPU" } else { "" }, leading_number(rest))
        } else if let Some((front, rest)) = line.split_once(" buffer of size ") {
            (front.rsplit(' ').next().unwrap_or_default(), leading_number(rest))
        } else if let Some((_, rest)) = line.split_once("Device memory allocation of size ") {
            ("Vulkan", leading_number(rest))
        } else if let Some((_, rest)) = line.split_once(": allocating ").filter(|_| line.contains("failed")) {
            ("", size(rest))
        } else {
            continue;
        };
        if bytes.is_none() {
            continue;
        }
        let is_host = name == "CPU" || name.ends_with("_Host");
        let source = if is_host { Reporter::GgmlCpu } else { Reporter::Ggml };
        let digits = name.trim_start_matches(|character: char| !character.is_ascii_digit());
        let gpu = number_after(line, "on device ").or_else(|| leading_number(digits));
        last = Some((source, Facts { gpu, requested_bytes: bytes, ..Facts::failure() }));
    }
    last
}

/// Ollama's check of host memory, before it loads a model.
fn ollama(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("model requires more system memory (")?..]);
    let facts = Facts {
        requested_bytes: size_after(&message, "system memory ("),
        free_bytes: size_after(&message, "than is available ("),
        ..Facts::failure()
    };
    Some((Reporter::GgmlCpu, facts))
}

/// Apple's GPUs without PyTorch: MLX and ggml.
pub(super) fn metal(text: &str) -> Option<(Reporter, Facts)> {
    if let Some((_, rest)) = text.rsplit_once("[metal::malloc] Attempting to allocate ") {
        let limit_bytes = size_after(&joined(rest), "maximum allowed buffer size of ");
        return Some((Reporter::Metal, Facts { requested_bytes: size(rest), limit_bytes, ..Facts::failure() }));
    }
    let words = [
        "ggml_metal_buffer_type_alloc_buffer: error: failed to allocate buffer, size = ",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    ];
    let at = words.iter().find_map(|words| text.rfind(words))?;
    Some((Reporter::Metal, Facts { requested_bytes: size_after(&text[at..], "size = "), ..Facts::failure() }))
}

/// Triton's kernel needs more shared memory of a multiprocessor than the GPU has. A message about memory behind it is another's.
pub(super) fn triton(text: &str) -> Option<(Reporter, Facts)> {
    let message = joined(&text[text.rfind("out of resource: shared memory")?..]);
    if message.contains("out of memory") {
        return None;
    }
    let facts = Facts {
        requested_bytes: number_after(&message, "Required: "),
        limit_bytes: number_after(&message, "Hardware limit: "),
        ..Facts::failure()
    };
    Some((Reporter::Triton, facts))
}

/// TensorRT. While it builds an engine it skips a tactic whose memory is refused, and continues.
pub(super) fn tensorrt(text: &str) -> Option<(Reporter, Facts)> {
    let amounts = ["Requested amount of GPU memory (", "Requested amount of memory ("];
    let amount = amounts.iter().find_map(|words| text.rsplit_once(words)).map(|(_, rest)| rest);
    let sized = text.rsplit_once("(Requested size was ").map(|(_, rest)| rest);
    let lower = text.to_lowercase();
    let is_named = ["[trt]", "tensorrt", "defaultallocator.cpp", "virtualmemorybuffer.cpp"]
        .iter()
        .any(|word| lower.contains(word));
    let failed = ["OutOfMemory", "(out of memory)"].iter().any(|words| text.contains(words));
    if amount.is_none() && !(is_named && failed) {
        return None;
    }
    let skips = amount.is_some_and(|rest| rest.contains("kipping tactic"))
        && !text.contains("Could not find any implementation");
    let requested_bytes = amount.or(sized).and_then(leading_number);
    Some((Reporter::Tensorrt, Facts { failures: u64::from(!skips), requested_bytes, ..Facts::default() }))
}

/// XGBoost, and Theano with its backend: the driver's numbers stand in the message.
pub(super) fn with_driver_report(text: &str) -> Option<(Reporter, Facts)> {
    if let Some((_, rest)) = text.rsplit_once("Memory allocation error on worker") {
        let rest = joined(rest);
        let facts = Facts {
            free_bytes: number_after(&rest, "Free memory: "),
            requested_bytes: number_after(&rest, "Requested memory: "),
            ..Facts::failure()
        };
        return facts.requested_bytes.map(|_| (Reporter::Xgboost, facts));
    }
    let (front, rest) = text.rsplit_once(" bytes of device memory (out of memory). Driver report ")?;
    let facts = Facts {
        requested_bytes: front.rsplit_once(' ').and_then(|(_, bytes)| leading_number(bytes)),
        free_bytes: leading_number(rest),
        total_bytes: number_after(rest, "free and "),
        ..Facts::failure()
    };
    Some((Reporter::Cuda, facts))
}
