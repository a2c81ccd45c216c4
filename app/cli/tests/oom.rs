//! `vramlab oom` on messages that people published; the comment above each names where.

use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Output, Stdio};

pub(crate) const MIB: f64 = 1048576.0;
pub(crate) const GIB: f64 = 1073741824.0;

pub(crate) fn vramlab(arguments: &[&str], stdin: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramlab"));
    command.args(arguments).env("NO_COLOR", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(stdin.unwrap_or_default().as_bytes()).unwrap();
    drop(pipe);
    child.wait_with_output().unwrap()
}

pub(crate) fn answer(text: &str) -> Value {
    let output = vramlab(&["oom", "--json"], Some(text));
    assert_eq!(output.status.code(), Some(0), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The kinds of the findings, the cause first.
pub(crate) fn kinds(answer: &Value) -> Vec<&str> {
    answer["findings"].as_array().unwrap().iter().map(|finding| finding["kind"].as_str().unwrap()).collect()
}

#[track_caller]
pub(crate) fn check(text: &str, source: &str, expected: &[&str]) -> Value {
    let answer = answer(text);
    assert_eq!(answer["source"], source, "{text}");
    assert_eq!(kinds(&answer), expected, "{text}\n{:#}", answer["lines"]);
    let lines = answer["lines"].as_array().unwrap();
    assert!((2..=5).contains(&lines.len()), "{lines:#?}");
    answer
}

#[track_caller]
pub(crate) fn near(answer: &Value, key: &str, expected: f64) {
    let actual = answer[key].as_f64().unwrap_or_else(|| panic!("{key} is missing in {answer:#}"));
    assert!((actual - expected).abs() <= 1.0, "{key}: {actual}, expected {expected}");
}

/// PyTorch from 2.1 on.
pub(crate) fn modern(requested: &str, total: &str, free: &str, rest: &str) -> String {
    format!(
        "CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total capacity of {total} of which {free} is free. {rest}"
    )
}

#[test]
fn pytorch_until_2_0() {
    let old = |numbers: &str| format!("RuntimeError: CUDA out of memory. Tried to allocate {numbers}");
    // rshaojimmy/MADDoG#11
    let found = check(
        &old(
            "2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB already allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)",
        ),
        "pytorch",
        &["fragmentation"],
    );
    near(&found, "requested_bytes", 2.87 * GIB);
    near(&found, "free_bytes", 19.75 * MIB);
    assert_eq!(found["setting"], Value::Null, "these releases do not have the setting");
    // 2KangHo/vdsr_pytorch#2
    check(
        &old(
            "512.00 MiB (GPU 0; 15.90 GiB total capacity; 13.13 GiB already allocated; 415.88 MiB free; 14.80 GiB reserved in total by PyTorch)",
        ),
        "pytorch",
        &["fragmentation"],
    );
    // pytorch/pytorch#16417
    check(
        &old("12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)"),
        "pytorch",
        &["not-device-memory", "unseen"],
    );
    // RenYurui/StructureFlow#35
    check(
        &old(
            "8.13 GiB (GPU 0; 10.76 GiB total capacity; 643.57 MiB already allocated; 8.20 GiB free; 32.43 MiB cached)",
        ),
        "pytorch",
        &["not-device-memory", "unseen"],
    );
    // singhsourabh/Resume-NER#4, whose bracket was not copied
    check(
        &old(
            "92.00 MiB (GPU 0; 1.96 GiB total capacity; 1.46 GiB already allocated; 16.38 MiB free; 1.51 GiB reserved in total by PyTorch",
        ),
        "pytorch",
        &["too-little", "unseen"],
    );
    // open-mmlab/mmsegmentation#944
    check(
        &old(
            "1006.00 MiB (GPU 0; 10.91 GiB total capacity; 9.18 GiB already allocated; 569.81 MiB free; 9.49 GiB reserved in total by PyTorch)",
        ),
        "pytorch",
        &["too-little"],
    );
    // pytorch/examples#621
    check(
        &old(
            "26.00 MiB (GPU 0; 1024.00 MiB total capacity; 435.61 MiB already allocated; 24.17 MiB free; 26.39 MiB cached)",
        ),
        "pytorch",
        &["fragmentation", "unseen"],
    );
    // chnsh/DCRNN_PyTorch#6
    let found = check(
        &old(
            "20.00 MiB (GPU 0; 5.80 GiB total capacity; 4.36 GiB already allocated; 6.69 MiB free; 4.63 GiB reserved in total by PyTorch)",
        ),
        "pytorch",
        &["fragmentation", "unseen"],
    );
    assert!(found["lines"][0].as_str().unwrap().contains("the tensor has at most 10 MiB"));
    // RistoranteRist/FastFlow#4
    check(
        &(old(
            "74.00 MiB (GPU 0; 11.91 GiB total capacity; 10.79 GiB already allocated; 12.94 MiB free; 11.21 GiB reserved in total by PyTorch)",
        ) + " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."),
        "pytorch",
        &["fragmentation"],
    );
    // ryujaehun/pytorch-gpu-benchmark#1
    check(
        &old(
            "32.00 MiB (GPU 0; 7.79 GiB total capacity; 6.64 GiB already allocated; 21.00 MiB free; 150.86 MiB cached)",
        ),
        "pytorch",
        &["fragmentation", "unseen"],
    );
    // YingqianWang/iPASSR#9
    let found = check(
        &old(
            "10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)",
        ),
        "pytorch",
        &["request-too-large"],
    );
    assert_eq!(found["free_bytes"], 0);
    // pytorch/pytorch#59778
    check(
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)",
        "pytorch",
        &["not-device-memory", "unseen"],
    );
    // ShannonAI/Self_Explaining_Structures_Improve_NLP_Models#6
    check(
        "Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; 2.88 MiB free; 1.25 GiB reserved in total by PyTorch)",
        "pytorch",
        &["too-little", "unseen"],
    );
}

#[test]
fn pytorch_from_2_1() {
    // wxian3/NeuroLens#2, with 2.1's spelling
    check(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of 12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is reserved by PyTorch but unallocated.",
        "pytorch",
        &["request-too-large", "unseen"],
    );
    // kerrj/lerf#73
    let found = check(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
        "pytorch",
        &["fragmentation", "outside-allocator", "unseen"],
    );
    near(&found, "process_bytes", 20.81 * GIB);
    // murong-xu/CADS#4
    let rest = "Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated.";
    let found = check(&modern("22.78 GiB", "31.47 GiB", "12.73 GiB", rest), "pytorch", &["too-little"]);
    let short = found["findings"][0]["bytes"].as_f64().unwrap();
    assert!((short - 0.70 * GIB).abs() < 0.01 * GIB, "{short}");
    // pytorch/pytorch#16417, a later comment
    let rest = "Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated.";
    let found = check(&modern("22.00 MiB", "23.65 GiB", "11.06 MiB", rest), "pytorch", &["fragmentation"]);
    assert!(found["lines"][1].as_str().unwrap().contains("nearly all of the GPU"));
    // Synthintel0/MyGirlGPT#11
    let rest = "Including non-PyTorch memory, this process has 3.44 GiB memory in use. Of the allocated memory 2.58 GiB is allocated by PyTorch, and 1.90 MiB is reserved by PyTorch but unallocated.";
    check(
        &modern("32.00 MiB", "4.00 GiB", "41.56 MiB", rest),
        "pytorch",
        &["not-device-memory", "outside-allocator", "unseen"],
    );
    // carolchenyx/MGFN.#35
    let rest = "Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.";
    check(&modern("1.70 GiB", "6.00 GiB", "0 bytes", rest), "pytorch", &["fragmentation", "unseen"]);
    // levihsu/OOTDiffusion#167
    let rest =
        "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.";
    check(&modern("2.00 GiB", "4.00 GiB", "2.80 GiB", rest), "pytorch", &["not-device-memory", "unseen"]);
    // light-and-ray/sd-webui-replacer#74
    let rest = "Of the allocated memory 16.16 GiB is allocated by PyTorch, and 144.59 MiB is reserved by PyTorch but unallocated.";
    check(&modern("27.12 GiB", "11.99 GiB", "0 bytes", rest), "pytorch", &["request-too-large"]);
    // lllyasviel/FramePack#369
    let rest = "Including non-PyTorch memory, this process has 6.68 GiB memory in use. Of the allocated memory 6.10 GiB is allocated by PyTorch, and 396.58 MiB is reserved by PyTorch but unallocated.";
    check(&modern("30.29 GiB", "10.74 GiB", "3.69 GiB", rest), "pytorch", &["request-too-large"]);
    // Numbers of reports of SGLang and vLLM on one GPU of 140 GiB
    let rest = "Including non-PyTorch memory, this process has 139.86 GiB memory in use. Of the allocated memory 128.50 GiB is allocated by PyTorch, with 3.23 GiB allocated in private pools (e.g., CUDA Graphs), and 1.01 GiB is reserved by PyTorch but unallocated.";
    let found = check(
        &format!("Exception: Capture cuda graph failed: {}", modern("672.00 MiB", "140.06 GiB", "200.75 MiB", rest)),
        "pytorch",
        &["fragmentation", "outside-allocator", "private-pools"],
    );
    near(&found, "pools_bytes", 3.23 * GIB);
    assert!((found["findings"][1]["bytes"].as_f64().unwrap() - 10.35 * GIB).abs() < 0.01 * GIB);
    let rest = "Including non-PyTorch memory, this process has 132.50 GiB memory in use. Of the allocated memory 115.89 GiB is allocated by PyTorch, with 2.01 GiB allocated in private pools (e.g., CUDA Graphs), and 10.53 GiB is reserved by PyTorch but unallocated.";
    check(
        &modern("9.28 GiB", "139.81 GiB", "7.30 GiB", rest),
        "pytorch",
        &["fragmentation", "outside-allocator", "private-pools"],
    );
    // An audio application beside another process
    let rest = "Process 4711 has 5.38 GiB memory in use. Including non-PyTorch memory, this process has 2.19 GiB memory in use. Of the allocated memory 217.80 MiB is allocated by PyTorch, and 50.20 MiB is reserved by PyTorch but unallocated.";
    let found = check(
        &modern("24.00 MiB", "7.60 GiB", "15.38 MiB", rest),
        "pytorch",
        &["fragmentation", "other-processes", "outside-allocator"],
    );
    assert_eq!(found["other_processes"][0]["pid"], 4711);
    assert!(found["next"].as_str().unwrap().ends_with("run -- python YOUR_PROGRAM.py"));
    // ROCm/TheRock#2118, with a limit
    let rest = "1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.";
    let text = modern("2.00 MiB", "255.98 GiB", "244.65 GiB", rest).replace("CUDA", "HIP");
    check(&text, "pytorch", &["limit", "fragmentation", "unseen", "private-pools"]);
    // The limit refused a segment, while memory within it was free.
    let limited = |unallocated: &str, allocated: &str| {
        let rest = format!(
            "Including non-PyTorch memory, this process has 10.54 GiB memory in use. 10.00 GiB allowed; Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by PyTorch but unallocated."
        );
        modern("1.00 GiB", "79.15 GiB", "68.60 GiB", &rest)
    };
    let found = check(&limited("5.88 GiB", "4.10 GiB"), "pytorch", &["limit", "fragmentation"]);
    assert!(found["lines"][2].as_str().unwrap().starts_with("Within the limit: fragmentation. 5.88 GiB"), "{found:#}");
    assert_eq!(found["setting"], "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let found = check(&limited("900.00 MiB", "9.10 GiB"), "pytorch", &["limit"]);
    assert_eq!(found["setting"], Value::Null);
    // pytorch/pytorch#175431, ROCm
    let rest = "Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is reserved by PyTorch but unallocated.";
    check(
        &modern("2.00 MiB", "287.98 GiB", "203.49 GiB", rest).replace("CUDA", "HIP"),
        "pytorch",
        &["not-device-memory"],
    );
}

/// A container hides process ids, so PyTorch lists its own process as another.
#[test]
fn a_container_lists_its_own_process() {
    let rest = |processes: &str, allocated: &str| {
        format!(
            "{processes} Of the allocated memory {allocated} is allocated by PyTorch, and 184.30 MiB is reserved by PyTorch but unallocated."
        )
    };
    let listed = "Process 2318177 has 78.88 GiB memory in use.";
    let text = modern("512.00 MiB", "79.15 GiB", "270.94 MiB", &rest(listed, "77.90 GiB"));
    let found = check(&text, "pytorch", &["too-little"]);
    near(&found, "process_bytes", (78.88 * GIB).round());
    assert_eq!(found["other_processes"].as_array().unwrap().len(), 0);
    assert!(!found["lines"].to_string().contains("other processes"), "{found:#}");
    // One of two: the other is too small.
    let listed = "Process 11 has 8.00 GiB memory in use. Process 12 has 70.88 GiB memory in use.";
    let text = modern("512.00 MiB", "79.15 GiB", "270.94 MiB", &rest(listed, "69.90 GiB"));
    let found = check(&text, "pytorch", &["too-little", "other-processes"]);
    assert_eq!(found["other_processes"][0]["pid"], 11);
    // Two processes have enough, or the memory outside of the list is enough: not decided.
    let listed = "Process 11 has 39.40 GiB memory in use. Process 12 has 39.48 GiB memory in use.";
    let text = modern("512.00 MiB", "79.15 GiB", "270.94 MiB", &rest(listed, "38.00 GiB"));
    assert_eq!(answer(&text)["process_bytes"], Value::Null);
    let listed = "Process 11 has 39.40 GiB memory in use.";
    let text = modern("512.00 MiB", "79.15 GiB", "270.94 MiB", &rest(listed, "38.00 GiB"));
    assert_eq!(answer(&text)["process_bytes"], Value::Null);
}

#[test]
fn messages_that_name_no_sizes_of_the_device() {
    let text = "ResourceExhaustedError: OOM when allocating tensor with shape[256,1024,1024] and type float on \
                /job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc [Op:Mul]";
    let found = check(text, "tensorflow", &["undecided"]);
    near(&found, "requested_bytes", GIB);
    assert_eq!(found["gpu"], 1);
    let found = check(
        &text.replace("GPU:1 by allocator GPU_1_bfc", "CPU:0 by allocator cpu"),
        "tensorflow-cpu",
        &["undecided"],
    );
    assert_eq!((&found["setting"], &found["next"]), (&Value::Null, &Value::from("free -h")));
    for text in [
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes.",
        "RuntimeError: Resource exhausted: Out of memory allocating 4294967296 bytes.",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device ordinal 0",
    ] {
        near(&check(text, "xla", &["undecided"]), "requested_bytes", 4.0 * GIB);
    }
    let text = "[ONNXRuntimeError] : 6 : onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for \
                requested buffer of size 1073741824";
    near(&check(text, "onnx-runtime", &["undecided"]), "requested_bytes", GIB);
    let found = check("std::bad_alloc: out_of_memory: Maximum pool size exceeded", "rmm", &["undecided"]);
    assert!(found["lines"].to_string().contains("Cause: the pool has its maximum size"), "{found:#}");
    let text = "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 10.00 GiB\n\
                Requested               : 2.00 GiB\nDevice limit            : 15.90 GiB\nFree (according to CUDA): 25.00 MiB";
    let found = check(text, "pytorch-malloc-async", &["undecided"]);
    assert!(!found["lines"].to_string().contains("how much was free"), "{found:#}");
}

#[test]
fn pytorch_elsewhere() {
    // A batch of ComfyUI over cudaMallocAsync
    let text = "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 9.43 GiB\nRequested               : 640.00 MiB\nDevice limit            : 11.59 GiB\nFree (according to CUDA): 7.12 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB";
    let found = check(text, "pytorch-malloc-async", &["undecided"]);
    near(&found, "requested_bytes", 640.0 * MIB);
    assert_eq!(found["limit_bytes"], Value::Null);
    assert!(found["setting"].as_str().unwrap().contains("backend:native"));
    // ComfyUI#7440
    let text = "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GB, other allocations: 17.35 GB, max allowed: 27.20 GB). Tried to allocate 292.50 MB on private pool.";
    check(text, "pytorch-mps", &["limit", "other-processes"]);
    let text = "RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)";
    let found = check(text, "pytorch-cpu", &["undecided"]);
    near(&found, "requested_bytes", 64.0 * GIB);
    // pytorch/pytorch#112377
    let text = "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":1154, please report a bug to PyTorch.";
    check(text, "pytorch-nvml", &["undecided"]);
    let table = "|===========================================================================|\n|                  PyTorch CUDA memory summary, device ID 0                 |\n|---------------------------------------------------------------------------|\n|            CUDA OOMs: 1            |        cudaMalloc retries: 2         |\n|===========================================================================|\n|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n|---------------------------------------------------------------------------|\n| Allocated memory      |  10240 MiB |  11264 MiB |    200 GiB |    190 GiB |\n|       from large pool |  10230 MiB |  11250 MiB |    199 GiB |    189 GiB |\n|---------------------------------------------------------------------------|\n| GPU reserved memory   |  15360 MiB |  15360 MiB |  15360 MiB |      0 B   |\n";
    let found = check(table, "pytorch-summary", &["undecided"]);
    near(&found, "allocated_bytes", 10240.0 * MIB);
    near(&found, "unallocated_bytes", 5120.0 * MIB);
}

#[test]
fn paddlepaddle() {
    // A Chinese reproduction of Informer
    let text = "Out of memory error on GPU 0. Cannot allocate 15.503906GB memory on GPU 0, 28.770508GB memory has been allocated and available memory is only 2.815613GB.\n";
    let found = check(text, "paddle", &["undecided"]);
    near(&found, "free_bytes", 2.815_613 * GIB);
    near(&found, "total_bytes", 31.586_121 * GIB);
    let limited = format!(
        "{text}3) Currently `FLAGS_gpu_memory_limit_mb` is 32344, so the maximum GPU memory usage is limited to 32344 MB."
    );
    let found = check(&limited, "paddle", &["limit"]);
    assert_eq!((&found["limit_bytes"], &found["free_bytes"]), (&json!(32344_u64 << 20), &Value::Null));
}

#[test]
fn other_libraries() {
    // jax-ml/jax#13428
    let text = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\nBufferAssignment OOM Debugging.\nBufferAssignment stats:\n             parameter allocation:    6.00MiB\n                 total allocation:   12.00MiB\n              total fragmentation:         0B (0.00%)\nPeak buffers:\n";
    let found = check(text, "xla", &["undecided"]);
    assert_eq!(found["requested_bytes"], 6_291_456);
    near(&found, "allocated_bytes", 12.0 * MIB);
    // patrickbryant1/AFProfile#8
    let text = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.\nBufferAssignment stats:\n                 total allocation:   14.44GiB\n              total fragmentation:  680.30MiB (4.60%)\n";
    let found = check(text, "xla", &["undecided"]);
    near(&found, "unallocated_bytes", 680.30 * MIB);
    let line = found["lines"][0].as_str().unwrap();
    assert!(line.ends_with("the compiled function needs 14.4 GiB in all, 680.3 MiB of it fragmentation."), "{line}");
    // jax-ml/jax#22755
    check(
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3743729664 bytes.",
        "xla",
        &["undecided"],
    );
    let text = "2023-01-01 W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483648)requested by op model/conv\nI bfc_allocator.cc:1103] Sum Total of in-use chunks: 8.50GiB\nI bfc_allocator.cc:1107] Stats: \nLimit:                     10200547328\nInUse:                      9126805504\nMaxInUse:                   9500000000\nNumAllocs:                        4711\n";
    let found = check(text, "tensorflow", &["limit"]);
    assert_eq!(
        (&found["requested_bytes"], &found["limit_bytes"]),
        (&Value::from(2_147_483_648_u64), &Value::from(10_200_547_328_u64))
    );
    // NVIDIA/nccl#1235, #962 and #1485
    for bytes in [6_291_456, 10_485_760] {
        let text = format!(
            "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\nng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc {bytes} bytes\n"
        );
        assert_eq!(check(&text, "nccl", &["undecided"])["requested_bytes"], bytes);
    }
    check("VM-0-16-ubuntu:392:494 [2] enqueue.cc:43 NCCL WARN Cuda failure 2 'out of memory'", "nccl", &["undecided"]);
    for code in [
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ] {
        check(&format!("RuntimeError: CUDA error: {code}"), "cuda-library", &["undecided"]);
    }
    // ggml-org/llama.cpp#20431
    let text = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144817.04 MiB on device 0: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 151851674624\nllama_model_load: error loading model: unable to allocate CUDA0 buffer";
    assert_eq!(check(text, "ggml", &["undecided"])["requested_bytes"], 151_851_674_624_u64);
    let text = "MemoryError: std::bad_alloc: out_of_memory: CUDA error (failed to allocate 17179869184 bytes) at: /opt/rmm/include/rmm/mr/device/cuda_memory_resource.hpp:62: cudaErrorMemoryAllocation out of memory";
    near(&check(text, "rmm", &["undecided"]), "requested_bytes", 16.0 * GIB);
    check(
        "MemoryError: std::bad_alloc: out_of_memory: RMM failure at:pool_memory_resource.hpp:276: Maximum pool size exceeded",
        "rmm",
        &["undecided"],
    );
    let text = "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 3,221,225,472 bytes, limit set to: 4,000,000,000 bytes).";
    let found = check(text, "cupy", &["limit"]);
    near(&found, "requested_bytes", GIB);
    check(
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes (allocated so far: 16,000 bytes).",
        "cupy",
        &["undecided"],
    );
    // vllm-project/vllm#20305 and #34076
    let text = "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.";
    let found = check(text, "vllm-start", &["undecided", "unseen"]);
    near(&found, "free_bytes", 31.44 * GIB);
    near(&found, "requested_bytes", 45.01 * GIB);
    let text = "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model length is 34736.";
    let found = check(text, "vllm-cache", &["undecided"]);
    near(&found, "requested_bytes", 24.0 * GIB);
    check(
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "cuda",
        &["undecided"],
    );
    let table = "+-----------------------------------------------------------------------------------------+\n| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |\n|  0  NVIDIA GeForce RTX 3090        Off |   00000000:01:00.0 Off |                  N/A |\n| 30%   45C    P2            120W /  350W |   20480MiB /  24576MiB |      0%      Default |\n| Processes:                                                                              |\n|    0   N/A  N/A      4711      C   python                                      20000MiB |\n|    0   N/A  N/A      1234      G   /usr/lib/xorg/Xorg                            300MiB |\n";
    let found = check(table, "nvidia-smi", &["undecided", "other-processes"]);
    near(&found, "free_bytes", 4096.0 * MIB);
    assert_eq!(found["other_processes"].as_array().unwrap().len(), 2);
}

#[test]
fn sizes_of_other_libraries_are_read() {
    let text = "E cuda_driver.cc:1032] failed to allocate 7.50GiB (8053063680 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory";
    near(&check(text, "cuda", &["undecided"]), "requested_bytes", 7.5 * GIB);
    let text = "onnxruntime::BFCArena::Extend Available memory of 0 is smaller than requested bytes of 33554432";
    let found = check(text, "onnx-runtime", &["undecided"]);
    near(&found, "requested_bytes", 32.0 * MIB);
    assert!(found["lines"].to_string().contains("Raise gpu_mem_limit"), "{found:#}");
    let status = "XlaRuntimeError: RESOURCE_EXHAUSTED: ";
    for (text, cause) in [
        ("Attempting to reserve 9.54G at the bottom of memory. There are 7.48G free, 0B reserved.", "too-little"),
        ("TPU backend error: Ran out of memory in memory space hbm. Used 17.25G of 15.48G hbm.", "request-too-large"),
    ] {
        let found = check(&format!("{status}{text}"), "xla-tpu", &[cause]);
        assert_eq!((&found["setting"], &found["next"]), (&Value::Null, &Value::from("tpu-info")));
    }
}

/// "Maximum pool size exceeded" begins three messages of RMM: of a full pool, of a full GPU, and of a pool without a maximum.
#[test]
fn rmm_names_the_pool_or_the_gpu() {
    let pool = |rest: &str| {
        format!(
            "MemoryError: std::bad_alloc: out_of_memory: RMM failure at:pool_memory_resource.hpp:265: Maximum pool size exceeded (failed to allocate 2.000000 GiB): {rest}"
        )
    };
    let grow = |maximum: &str| {
        pool(&format!("Not enough room to grow, current/max/try size = 8.000000 GiB, {maximum}, 2.000000 GiB"))
    };
    let found = check(&grow("8.000000 GiB"), "rmm", &["limit"]);
    near(&found, "allocated_bytes", 8.0 * GIB);
    near(&found, "limit_bytes", 8.0 * GIB);
    near(&found, "requested_bytes", 2.0 * GIB);
    assert!(found["lines"].to_string().contains("Raise the pool's maximum size"), "{found:#}");
    let upstream = "std::bad_alloc: out_of_memory: CUDA error (failed to allocate 2147483648 bytes) at: cuda_memory_resource.hpp:62: cudaErrorMemoryAllocation out of memory";
    for text in [pool(upstream), grow("16.000000 EiB")] {
        let found = check(&text, "rmm", &["undecided"]);
        let lines = found["lines"].to_string();
        assert!(lines.contains("Cause: the GPU") && !lines.contains("Raise the pool's maximum"), "{found:#}");
        assert_eq!(found["limit_bytes"], Value::Null);
    }
}

/// A log's prefix stands before each line that a terminal broke.
#[test]
fn prefixes_and_borders_of_lines_are_left_out() {
    let words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00\nGiB. GPU 0 has a total capacity of 23.69 GiB of which\n\
                 1.06 GiB is free. Of the allocated memory 18.50\nGiB is allocated by PyTorch, and 3.70 GiB is reserved by PyTorch but\nunallocated.";
    let frames = [
        ("", ""),
        ("[rank2]: ", ""),
        ("> ", ""),
        ("| ", "   |"),
        ("│ ", "   │"),
        ("trainer-0  | ", ""),
        ("(train_fn pid=1234, ip=10.0.0.1) ", ""),
        ("2026-01-02T03:04:05.678901234Z stderr F ", ""),
        ("2026-01-02 03:04:05,678 ERROR worker.py:77 | ", "\r"),
    ];
    for (before, behind) in frames {
        let text: Vec<String> = words.lines().map(|line| format!("{before}{line}{behind}")).collect();
        let found = check(&text.join("\n"), "pytorch", &["fragmentation"]);
        near(&found, "requested_bytes", 2.0 * GIB);
        near(&found, "total_bytes", (23.69 * GIB).round());
        near(&found, "unallocated_bytes", (3.7 * GIB).round());
    }
    // Two ranks that fail alike have a common beginning, which is the message.
    let line = words.replace('\n', " ");
    let found = check(&format!("{line}\n{line}"), "pytorch", &["fragmentation"]);
    assert_eq!(found["failures"], 2);
}

#[test]
fn numbers_are_read_as_they_were_meant() {
    let rest = "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated memory 6.80 GiB is \
                allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.";
    let found = check(&modern("2.00 GiB", "8.00 GiB", "0 bytes", rest), "pytorch", &["too-little", "unseen"]);
    assert!(found.get("process_bytes").is_none_or(Value::is_null), "2^64 bytes are not known: {found:#}");
    let found = answer(&modern("2,00 GiB", "23,69 GiB", "1,06 GiB", ""));
    near(&found, "requested_bytes", 2.0 * GIB);
    near(&found, "total_bytes", (23.69 * GIB).round());
    near(&answer("tried to allocate 1,073,741,824 bytes. DefaultCPUAllocator"), "failures", 1.0);
    let units: Vec<u8> =
        "CUDA out of memory. Tried to allocate 2.00 GiB".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oom.txt");
    std::fs::write(&file, [&[0xff, 0xfe][..], &units].concat()).unwrap();
    let output = vramlab(&["oom", file.to_str().unwrap()], None);
    assert!(String::from_utf8_lossy(&output.stdout).contains("2 GiB requested"), "{output:?}");
}

/// PyTorch before 2.1 does not start with the setting.
#[test]
fn a_setting_is_advised_only_where_it_exists() {
    let text = |last: &str| {
        format!(
            "CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 23.69 GiB total capacity; 15.31 GiB already allocated; 1.02 GiB free; {last}"
        )
    };
    for (last, releases) in
        [("21.50 GiB reserved in total by PyTorch)", "1.4 to 2.0"), ("3.50 GiB cached)", "1.0 to 1.3")]
    {
        let found = answer(&text(last));
        assert_eq!(found["setting"], Value::Null, "{found:#}");
        assert!(found["lines"].to_string().contains(&format!("this text is of {releases}")), "{found:#}");
    }
}

#[test]
fn the_last_of_several_messages_answers() {
    let first = modern(
        "2.00 MiB",
        "8.00 GiB",
        "1.00 MiB",
        "Of the allocated memory 7.00 GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated.",
    );
    let last = "CUDA out of memory. Tried to allocate\n  9.00 GiB. GPU 1 has a total capacity of 8.00\n GiB of which 4.00 GiB is free.";
    let found = check(&format!("\u{1b}[31m{first}\u{1b}[0m\r\n… ü {last}"), "pytorch", &["request-too-large"]);
    assert_eq!((&found["failures"], &found["gpu"]), (&Value::from(2), &Value::from(1)));
}

#[test]
fn a_text_a_file_and_a_pipe_give_the_same_lines() {
    let text = modern(
        "3.00 GiB",
        "23.65 GiB",
        "1.66 GiB",
        "Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.",
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oom.txt");
    std::fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let outputs = [vramlab(&["oom", &text], None), vramlab(&["oom", file], None), vramlab(&["oom"], Some(&text))];
    for output in &outputs {
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(output.stdout, outputs[0].stdout);
    }
    let lines = String::from_utf8(outputs[0].stdout.clone()).unwrap();
    assert!(lines.contains("Cause: fragmentation. 4.84 GiB are reserved but unallocated"), "{lines}");
    let lead = vramlab(&["advise", file], None);
    let error = String::from_utf8(lead.stderr).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(lead.status.code(), Some(2));
    assert!(error.contains("an error text and not a recording"), "{error}");
}

#[test]
fn what_is_no_message_is_refused_in_one_line() {
    for arguments in [vec!["oom", "hello world"], vec!["oom", "missing.txt"], vec!["oom", "/"]] {
        let output = vramlab(&arguments, None);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
    for text in [
        "",
        "Tried to allocate",
        "Tried to allocate 99999999999999999999 GiB (GPU 0; x",
        "\u{1b}[",
        "KV cache is needed",
        "GPU_",
        "Process Process 1 has",
    ] {
        let output = vramlab(&["oom", "--json"], Some(&format!("{text} ü")));
        assert!(matches!(output.status.code(), Some(0 | 2)), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
