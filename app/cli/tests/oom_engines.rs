//! `vramlab oom` on messages of inference engines, of programs beside PyTorch, and of logs around a message.

use crate::oom::{GIB, MIB, check, modern, near, vramlab};

/// The answer's sentences as one text.
fn lines(answer: &serde_json::Value) -> String {
    answer["lines"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn vllm_without_room_for_its_cache() {
    let failure = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when \
                   initializing the engine.";
    // QwenLM/Qwen3#12
    let found = check(failure, "vllm-cache", &["undecided"]);
    assert!(lines(&found).contains("take all that vLLM is set to use"), "{found:#}");
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
fn sglang_names_its_own_option() {
    let text = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.";
    let found = check(text, "sglang", &["undecided"]);
    assert!(lines(&found).contains("--mem-fraction-static"), "{found:#}");
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
    assert!(!lines(&found).contains("PyTorch"), "{found:#}");
    let text = format!("Out of GPU memory trying to allocate 1.000 GiB\n{}", status(""));
    let found = check(&text, "julia", &["fragmentation"]);
    assert!(!lines(&found).contains("PYTORCH"), "{found:#}");
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
fn a_kernels_shared_memory_is_not_the_devices() {
    let text = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 101376. \
                Reducing block sizes or `num_stages` may help.";
    let found = check(text, "triton", &["limit"]);
    assert!(lines(&found).contains("not device memory"), "{found:#}");
}

#[test]
fn tensorrt_tells_a_failure_from_a_skipped_tactic() {
    let amount = "[TRT] Requested amount of GPU memory (34359738368 bytes) could not be allocated. There may not be enough free memory \
                  for allocation to succeed.";
    let found = check(&format!("{amount}\n"), "tensorrt", &["undecided"]);
    near(&found, "requested_bytes", 32.0 * GIB);
    assert_eq!(found["failures"], 1);
    let found =
        check(&format!("{amount}\n[TRT] Skipping tactic 3 due to insufficient memory"), "tensorrt", &["undecided"]);
    assert_eq!(found["failures"], 0);
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
fn schedulers_say_that_the_host_ran_out() {
    for text in [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.batch. Some of the step tasks have been OOM Killed.",
        "    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137",
    ] {
        let found = check(text, "kernel-oom", &["undecided"]);
        assert!(lines(&found).contains("host memory"), "{found:#}");
    }
}

#[test]
fn ranks_that_write_at_once_are_told_apart() {
    let of = |rank: u32, line: &str| format!("[rank{rank}]: {line}\n");
    let text = [
        of(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"),
        of(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 has a total capacity of"),
        of(0, "79.10 GiB of which 1.00 GiB is free."),
        of(1, "39.50 GiB of which 2.00 GiB is free."),
    ]
    .concat();
    let found = check(&text, "pytorch", &["undecided"]);
    assert_eq!((&found["gpu"], &found["failures"]), (&1.into(), &2.into()));
    near(&found, "requested_bytes", 3.0 * GIB);
    near(&found, "total_bytes", 39.5 * GIB);
    near(&found, "free_bytes", 2.0 * GIB);
}

#[test]
fn a_log_of_json_has_its_escapes_read() {
    let text = r#"{"log":"\u001b[31mtorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of\n23.64 GiB of which 100.00 MiB is free.\u001b[0m\n","stream":"stderr"}"#;
    let found = check(text, "pytorch", &["undecided"]);
    near(&found, "requested_bytes", 512.0 * MIB);
    near(&found, "total_bytes", (23.64 * GIB).round());
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
