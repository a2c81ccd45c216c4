//! `vramlab oom` on messages of inference engines and other programs, and on logs that change a message. The comment above each text
//! names where it was published.

use crate::oom::{GIB, MIB, check, modern, near, vramlab};
use serde_json::{Value, json};

#[track_caller]
fn has(answer: &Value, words: &str) {
    let lines = answer["lines"].to_string();
    assert!(lines.contains(words), "{words} is missing in {lines}");
}

#[track_caller]
fn unknown(text: &str) {
    let output = vramlab(&["oom"], Some(text));
    assert_eq!(output.status.code(), Some(2), "{text}: {}", String::from_utf8_lossy(&output.stdout));
}

const WORDS: [&str; 3] = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
    "capacity of 23.69 GiB of which 1.06 GiB is free. Of the allocated memory 18.50 GiB is allocated by PyTorch,",
    "and 3.70 GiB is reserved by PyTorch but unallocated.",
];

#[track_caller]
fn all_sizes(text: &str) {
    let found = check(text, "pytorch", &["fragmentation"]);
    near(&found, "requested_bytes", 2.0 * GIB);
    near(&found, "total_bytes", (23.69 * GIB).round());
    near(&found, "free_bytes", (1.06 * GIB).round());
    near(&found, "allocated_bytes", 18.5 * GIB);
}

/// The prefix of a line has a time, which differs from that of the next line.
#[test]
fn prefixes_with_a_time_are_left_out() {
    let framed = |prefix: &dyn Fn(usize) -> String| {
        let lines: Vec<String> = WORDS.iter().enumerate().map(|(at, line)| prefix(at) + line).collect();
        lines.join("\n")
    };
    // GitHub Actions, Python's logging, syslog, kubectl logs --prefix --timestamps, vLLM, PyTorch's own log
    all_sizes(&framed(&|at| format!("2025-11-14T08:52:38.37{at}6210Z ")));
    all_sizes(&framed(&|at| format!("2025-11-14 08:52:38,37{at} ")));
    all_sizes(&framed(&|at| format!("[2025-11-14 08:52:3{at}] [ERROR] ")));
    all_sizes(&framed(&|at| format!("Nov 14 08:52:3{at} node7 python[4711]: ")));
    all_sizes(&framed(&|at| format!("[pod/trainer-0/main] 2025-11-14T08:52:38.37{at}621003Z ")));
    all_sizes(&framed(&|at| format!("(EngineCore_DP0 pid=2238) ERROR 10-25 13:08:4{at} [core.py:708] ")));
    all_sizes(&framed(&|at| format!("W1114 08:52:38.00000{at} 140 torch/x.py:1] ")));
}

#[test]
fn lines_of_several_ranks_do_not_mix() {
    let other = [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a total",
        "capacity of 23.69 GiB of which 512.00 MiB is free. Of the allocated memory 22.50 GiB is allocated by PyTorch,",
        "and 100.00 MiB is reserved by PyTorch but unallocated.",
    ];
    for (first, second) in
        [("[rank0]: ", "[rank3]: "), ("[1,0]<stderr>: ", "[1,3]<stderr>: "), ("(f pid=7) ", "(f pid=8) ")]
    {
        let lines: Vec<String> = WORDS.iter().zip(other).map(|(a, b)| format!("{first}{a}\n{second}{b}")).collect();
        let found = check(&lines.join("\n"), "pytorch", &["too-little"]);
        near(&found, "free_bytes", 512.0 * MIB);
        near(&found, "allocated_bytes", 22.5 * GIB);
        assert_eq!((&found["gpu"], &found["failures"]), (&json!(3), &json!(2)));
    }
}

#[test]
fn escapes_of_json_are_read() {
    all_sizes(&format!("{{\"log\":\"Traceback\\nRuntimeError\\n{}\\n\",\"stream\":\"stderr\"}}", WORDS.join("\\n")));
    all_sizes(
        &WORDS.join(" ").replace("2.00", "\\u001b[31m2.00\\u001b[0m").replace("18.50", "\\\\x1b[1m18.50\\\\x1b[0m"),
    );
    // Docker's log has one object for each line.
    let lines = [
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "Currently allocated     : 22.10 GiB",
        "Requested               : 3.00 GiB",
        "Device limit            : 23.99 GiB",
        "Free (according to CUDA): 0 bytes",
    ];
    let objects = lines.map(|line| format!("{{\"log\":\"{line}\\n\",\"stream\":\"stderr\"}}"));
    let found = check(&objects.join("\n"), "pytorch-malloc-async", &["undecided"]);
    near(&found, "requested_bytes", 3.0 * GIB);
    near(&found, "allocated_bytes", (22.1 * GIB).round());
}

/// PyTorch's message on other GPUs than NVIDIA's: other settings and tools.
#[test]
fn pytorch_on_other_gpus() {
    // xingchensong/TouchNet#100, torch_npu
    let text = "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already allocated; 49.47 GiB current active; 1.32 GiB free; 57.55 GiB reserved in total by PyTorch)";
    let found = check(text, "pytorch", &["fragmentation", "unseen"]);
    assert_eq!((&found["gpu"], &found["next"]), (&json!(3), &json!("npu-smi info")));
    assert!(!found["lines"].to_string().contains("Update PyTorch"), "later releases print this form, too: {found:#}");
    // kyuz0/amd-strix-halo-image-video-toolboxes#3, and with more that is unallocated
    let text = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB of which 780.24 MiB is free. Of the allocated memory 57.70 GiB is allocated by PyTorch, and 75.82 MiB is reserved by PyTorch but unallocated.";
    assert_eq!(check(text, "pytorch", &["too-little", "unseen"])["next"], "rocm-smi --showpids");
    let found = check(&text.replace("75.82 MiB", "5.82 GiB"), "pytorch", &["fragmentation", "unseen"]);
    assert_eq!(found["setting"], "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True");
    assert!(!found["lines"].to_string().contains("nearly all of the GPU"), "others hold half of it: {found:#}");
    // intel/intel-extension-for-pytorch#863
    let text = "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 GiB.";
    assert_eq!(check(text, "pytorch", &["undecided"])["next"], "xpu-smi ps");
    // pinokiocomputer/pinokio#941
    let text = "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: 18.13 GB). Tried to allocate 256 bytes on shared pool.";
    assert_eq!(check(text, "pytorch-mps", &["limit", "other-processes"])["next"], "top -o mem");
    assert_eq!(check("RuntimeError: HIP error: out of memory", "cuda", &["undecided"])["next"], "rocm-smi --showpids");
    // Comfy-Org/ComfyUI#6176, which shows no more of the message
    let text = "- **Exception Type:** torch.OutOfMemoryError\n- **Exception Message:** Allocation on device \n";
    has(&check(text, "pytorch-malloc-async", &["undecided"]), "--disable-cuda-malloc");
}

#[test]
fn vllm_and_sglang() {
    // vllm-project/vllm#2248 and #2418
    for text in [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664). Try increasing `gpu_memory_utilization`",
    ] {
        has(&check(text, "vllm-cache", &["undecided"]), "aise --gpu-memory-utilization");
    }
    // SergiioB/intel-arc-pro-b70-inference-cookbook#4, where the terminal broke a word
    let text = "ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cach\ne is needed, which is larger than the available KV cache memory (4.25 GiB).";
    let found = check(text, "vllm-cache", &["undecided"]);
    near(&found, "requested_bytes", (4.26 * GIB).round());
    near(&found, "free_bytes", 4.25 * GIB);
    // A check at the start, repaired, and a later failure of PyTorch
    let start = "Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB).";
    all_sizes(&format!("{start}\n{}", WORDS.join(" ")));
    // sgl-project/sglang#4330
    let text = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.";
    has(&check(text, "sglang", &["undecided"]), "Raise --mem-fraction-static");
    let text = "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 32 tokens.\n";
    has(&check(text, "sglang", &["undecided"]), "Lower --max-running-requests");
}

#[test]
fn ggml_in_its_variants() {
    // ollama/ollama#10920 and #12634: host memory
    let found = check(
        "Error: model requires more system memory (164.8 GiB) than is available (13.4 GiB)",
        "ggml-cpu",
        &["undecided"],
    );
    near(&found, "free_bytes", (13.4 * GIB).round());
    assert_eq!(found["next"], "free -h");
    let text = "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 437944320\nalloc_tensor_range: failed to allocate CPU buffer of size 437944320\n";
    has(&check(text, "ggml-cpu", &["undecided"]), "not GPU memory");
    // The sizes and the device are those of the last buffer.
    let text = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9866.00 MiB on device 1: cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 10345253120\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 800.00 MiB on device 0: cudaMalloc failed: out of memory";
    let found = check(text, "ggml", &["undecided"]);
    near(&found, "requested_bytes", 800.0 * MIB);
    assert_eq!(found["gpu"], 0);
    // ggml-org/llama.cpp#15256
    let text = "ggml_vulkan: Device memory allocation of size 118497280 failed.\nggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory";
    assert_eq!(check(text, "ggml", &["undecided"])["requested_bytes"], 118_497_280);
    // ollama/ollama#3765
    let text = "CUDA error: out of memory\n  current device: 0, in function alloc at llama.cpp/ggml-cuda.cu:233";
    assert_eq!(check(text, "ggml", &["undecided"])["gpu"], 0);
    // Not a failure: ggml uses memory that is not pinned.
    let text = "ggml_cuda_host_malloc: failed to allocate 2048.00 MiB of pinned memory: out of memory";
    has(&check(text, "pinning", &["undecided"]), "Nothing failed");
    // lmstudio-ai/lmstudio-bug-tracker#2240
    let text = "RuntimeError: [metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed buffer size of 30150672384 bytes.";
    let found = check(text, "metal", &["limit"]);
    assert_eq!((&found["limit_bytes"], &found["next"]), (&json!(30_150_672_384_u64), &json!("top -o mem")));
}

#[test]
fn julias_pool() {
    // The sizes are of JuliaGPU/CUDA.jl#2197.
    let text = |asked: &str| {
        format!(
            "ERROR: Out of GPU memory trying to allocate {asked}\nEffective GPU memory usage: 99.55% (11.688 GiB/11.741 GiB)\nMemory pool usage: 8.505 GiB (10.406 GiB reserved)\n"
        )
    };
    let found = check(&text("1.500 GiB"), "julia", &["fragmentation", "unseen"]);
    near(&found, "unallocated_bytes", (1.901 * GIB).round());
    near(&found, "total_bytes", (11.741 * GIB).round());
    assert_eq!(found["setting"], "JULIA_CUDA_MEMORY_POOL=none");
    check(&text("5.000 GiB"), "julia", &["too-little", "unseen"]);
    // JuliaGPU/CUDA.jl#579
    let text = "Out of GPU memory trying to allocate 8.016 MiB\nEffective GPU memory usage: 91.54% (14.446 GiB/15.782 GiB)\nCUDA allocator usage: 13.984 GiB (capped at 14.000 GiB)\n";
    check(&text.replace("8.016 MiB", "28.016 MiB"), "julia", &["limit"]);
}

#[test]
fn kernels_and_engines_of_nvidia() {
    // triton-lang/triton#8182
    let text = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.";
    let found = check(text, "triton", &["limit"]);
    assert_eq!((&found["requested_bytes"], &found["limit_bytes"]), (&json!(131_072), &json!(101_376)));
    has(&found, "not device memory");
    // marcoslucianops/DeepStream-Yolo#366: a warning
    let text = "WARNING: [TRT]: Requested amount of GPU memory (4294967296 bytes) could not be allocated.\nWARNING: [TRT]: Skipping tactic 3 due to insufficient memory on requested size of 4294967296";
    let found = check(text, "tensorrt", &["undecided"]);
    near(&found, "requested_bytes", 4.0 * GIB);
    has(&found, "Nothing failed");
    // NVIDIA-AI-IOT/torch2trt#661
    let text = "[TensorRT] ERROR: Requested amount of memory (150994944 bytes) could not be allocated. There may not be enough free memory";
    assert_eq!(check(text, "tensorrt", &["undecided"])["failures"], 1);
    // dmlc/xgboost#7140: much more is free than was requested
    let text = "Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n- Free memory: 11310923776\n- Requested memory: 47996\n";
    check(text, "xgboost", &["not-device-memory"]);
    // chrischoy/3D-R2N2#25
    let text = "Error allocating 33554432 bytes of device memory (out of memory). Driver report 21364736 bytes free and 11715084288 bytes total";
    assert_eq!(check(text, "cuda", &["undecided"])["free_bytes"], 21_364_736);
    // huggingface/peft#1703
    let text = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'";
    check(text, "nccl", &["undecided"]);
}

#[test]
fn memory_of_other_programs_is_not_cudas() {
    unknown("FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory");
    unknown("fatal error: runtime: out of memory");
    unknown("DataLoader(pin_memory=True)\nValueError: invalid argument");
    // The arguments of a program are not the failure.
    check("Namespace(pin_memory=True)\nRuntimeError: CUDA error: out of memory", "cuda", &["undecided"]);
    let text = "Last State:     Terminated\n  Reason:       OOMKilled\n  Exit Code:    137";
    has(&check(text, "kernel-oom", &["undecided"]), "not GPU memory");
}

#[test]
fn vllm_without_room_for_its_cache() {
    let failure = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when \
                   initializing the engine.";
    // QwenLM/Qwen3#12
    let found = check(failure, "vllm-cache", &["undecided"]);
    has(&found, "take all that vLLM is set to use");
    // vllm-project/vllm#13882
    let log = "INFO 02-26 09:54:05 worker.py:267] the current vLLM instance can use total_gpu_memory (8.00GiB) x \
               gpu_memory_utilization (0.70) = 5.60GiB\nINFO 02-26 09:54:05 worker.py:267] model weights take 5.20GiB; \
               non_torch_memory takes 0.03GiB; PyTorch activation peak memory takes 1.42GiB; the rest of the memory reserved \
               for KV Cache is -1.05GiB.\n[rank0]: ";
    let found = check(&format!("{log}{failure}"), "vllm-cache", &["undecided"]);
    near(&found, "total_bytes", 8.0 * GIB);
    near(&found, "limit_bytes", 5.6 * GIB);
    near(&found, "allocated_bytes", 6.65 * GIB);
    // The last message counts.
    let pytorch = modern("2.00 GiB", "8.00 GiB", "1.00 GiB", "");
    check(&format!("{failure}\n{pytorch}"), "pytorch", &["undecided"]);
}

#[test]
fn julia_has_the_state_of_its_pool() {
    let status = |limit: &str| {
        format!(
            "Effective GPU memory usage: 99.85% (15.758 GiB/15.782 GiB)\nMemory pool usage: 13.411 GiB (15.281 GiB reserved){limit}\n"
        )
    };
    // A program of Flux.
    let text = format!("ERROR: LoadError: Out of GPU memory trying to allocate 11.921 GiB\n{}", status(""));
    let found = check(&text, "julia", &["too-little"]);
    near(&found, "total_bytes", (15.782 * GIB).round());
    near(&found, "unallocated_bytes", (15.281 * GIB).round() - (13.411 * GIB).round());
    assert!(!found["lines"].to_string().contains("PyTorch"), "{found:#}");
    let text = format!("Out of GPU memory trying to allocate 1.000 GiB\n{}", status(""));
    let found = check(&text, "julia", &["fragmentation"]);
    assert!(!found["lines"].to_string().contains("PYTORCH"), "{found:#}");
    // Of the two limits only the hard one refuses.
    let limits = "\nMemory limit: soft = 14.000 GiB, hard = 16.000 GiB";
    let found =
        check(&format!("Out of GPU memory trying to allocate 1.000 GiB\n{}", status(limits)), "julia", &["limit"]);
    near(&found, "limit_bytes", 16.0 * GIB);
    // Others may use the words.
    check("CUDA_ERROR_OUT_OF_MEMORY: Out of GPU memory", "cuda", &["undecided"]);
}

#[test]
fn ggmls_host_memory_is_not_the_gpus() {
    let text = "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 137438953504";
    let found = check(text, "ggml-cpu", &["undecided"]);
    near(&found, "requested_bytes", 137_438_953_504.0);
    assert_eq!(found["next"], "free -h");
    let text = "Error: model requires more system memory (18.5 GiB) than is available (7.9 GiB)";
    let found = check(text, "ggml-cpu", &["undecided"]);
    near(&found, "free_bytes", (7.9 * GIB).round());
    let text = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 17378.00 MiB on device 1: cudaMalloc failed: out of memory";
    let found = check(text, "ggml", &["undecided"]);
    near(&found, "requested_bytes", 17378.0 * MIB);
    assert_eq!(found["gpu"], 1);
}

#[test]
fn gpus_of_others_have_their_own_tools() {
    let rest = "Of the allocated memory 10.00 GiB is allocated by PyTorch, and 4.00 GiB is reserved by PyTorch but unallocated.";
    let cuda = modern("2.00 GiB", "15.98 GiB", "1.20 GiB", rest);
    let setting = |text: &str| check(text, "pytorch", &["fragmentation"])["setting"].clone();
    assert_eq!(setting(&cuda), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    assert_eq!(setting(&cuda.replace("CUDA", "HIP")), "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True");
    assert_eq!(check(&cuda.replace("CUDA", "HIP"), "pytorch", &["fragmentation"])["next"], "rocm-smi --showpids");
    let found = check(&cuda.replace("CUDA", "XPU"), "pytorch", &["fragmentation"]);
    assert!(found["setting"].is_null() && found["next"] == "xpu-smi ps", "{found:#}");
}

#[test]
fn memory_of_others_is_not_known() {
    for text in [
        "FATAL ERROR: Ineffective mark-compacts near heap limit Allocation failed - JavaScript heap out of memory",
        "ERROR: out of memory\nDETAIL: Failed on request of size 1048576 in memory context \"ExecutorState\".",
        "java.lang.OutOfMemoryError: GC overhead limit exceeded",
    ] {
        assert_eq!(vramlab(&["oom"], Some(text)).status.code(), Some(2), "{text}");
    }
    // Beside a word of a GPU the same words are CUDA's.
    let text = "Error out of memory at line 380 in file /home/user/bitsandbytes/csrc/pythonInterface.c";
    check(text, "cuda", &["undecided"]);
}

#[test]
fn memory_of_the_host_is_no_memory_of_the_gpu() {
    // numpy/numpy#13306, MIC-DKFZ/nnUNet#2213
    let array = "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 1.61 GiB for an array with shape (753, 536, 536) and data type float64";
    let found = check(array, "host-memory", &["undecided"]);
    near(&found, "requested_bytes", (1.61 * GIB).round());
    has(&found, "host memory (RAM), not GPU memory");
    assert_eq!(found["next"], "free -h");
    for text in [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nAborted (core dumped)",
        "OSError: [Errno 12] Cannot allocate memory",
        "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nMemoryError",
        "RuntimeError: unable to mmap 4096 bytes from file </torch_1234_5>: Cannot allocate memory (12)",
    ] {
        check(text, "host-memory", &["undecided"]);
    }
    // pytorch/pytorch#108861
    let worker = "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Killed. ";
    has(&check(worker, "kernel-oom", &["undecided"]), "not GPU memory");
    unknown("Redis: Can't save in background: fork: Cannot allocate memory");
    // The GPU's own message counts, whatever else the log has.
    let both = format!("{}\n{array}", modern("2.00 GiB", "8.00 GiB", "1.00 GiB", ""));
    assert_eq!(crate::oom::answer(&both)["source"], "pytorch");
}

#[test]
fn a_full_dev_shm_is_named() {
    for text in [
        // pytorch/pytorch#108861
        "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of \
         shared memory. Please try to raise your shared memory limit.",
        // facebookresearch/mmf#441
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: unable to write to file </torch_4711_1>: No space left on device (28)",
    ] {
        let found = check(text, "shared-memory", &["undecided"]);
        has(&found, "/dev/shm");
        has(&found, "--shm-size");
        assert_eq!(found["next"], "df -h /dev/shm");
    }
    // NVIDIA/nccl-tests#166, NVIDIA/nccl#525
    for text in [
        "misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes\n\n\
         misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-fjwOOB (size 5967872)",
        "include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n\
         include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1462445a6f01cbfc-1-2-3 (size 5967872)",
    ] {
        assert_eq!(check(text, "shared-memory", &["undecided"])["requested_bytes"], 5_967_872);
    }
    // NVIDIA/nccl#1518: another fault of the same segment.
    unknown(
        "[1] misc/shmutils.cc:114 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888)",
    );
}

#[test]
fn ray_ends_tasks_for_memory_of_the_node() {
    // real-stanford/flingbot#11
    let text = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n\
                Memory on the node (IP: 192.168.0.107, ID: fc2befb2) where the task (actor ID: f9cc, name=SimEnv.__init__, pid=4331, \
                memory used=2.22GB) was running was 59.49GB / 62.58GB (0.950744), which exceeds the memory usage threshold of 0.95. \
                Ray killed this worker";
    let found = check(text, "ray", &["undecided"]);
    near(&found, "total_bytes", (62.58 * GIB).round());
    near(&found, "free_bytes", ((62.58 - 59.49) * GIB).round());
    has(&found, "not GPU memory");
    // WM-PO/WMPO#3
    let log = "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed";
    check(log, "ray", &["undecided"]);
}
