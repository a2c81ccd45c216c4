//! Causes that `explain` infers, and lines inferred from stack frames.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, script};
use crate::common::story::{agrees, explain, explain_json, part};
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn frees_that_complete_during_a_miss_are_not_a_private_pool() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 20 * MIB, 0, json!([]));
    story.event("free_requested", BASE, 20 * MIB, 0, json!([]));
    story.segment(1 << 30, 12 * MIB, 3);
    story.alloc(1 << 30, 12 * MIB, 3, json!([]));
    // No block fits and the device is full: the allocator waits for the frees, releases segments and retries.
    story.event("free_completed", BASE, 20 * MIB, 0, json!([]));
    story.segment(2 << 30, 20 * MIB, 0);
    story.alloc(2 << 30, 16 * MIB, 0, json!([script(3, "step")]));
    let explanation = explain_json(&dir, &[&dir.write("waited.json", story.text())]);
    let shape =
        &explanation["shapes"].as_array().unwrap().iter().find(|shape| shape["requested_bytes"] == 16 * MIB).unwrap();
    assert_eq!(shape["cause"], "pending");
    // The same for a refused request.
    let last = story.events.len() - 2;
    story.events.truncate(last);
    story.event("oom", 0, 16 * MIB, 0, json!([script(3, "step")]));
    let explanation = explain_json(&dir, &[&dir.write("refused.json", story.text())]);
    assert_eq!(explanation["out_of_memory"][0]["cause"], "pending");
    let screen = explain(&dir, &["refused.json"]).ok().stdout;
    assert!(!screen.contains("private pool"), "{screen}");
}

#[test]
fn a_private_pool_is_named_if_the_recording_shows_one() {
    let dir = TestDir::new();
    for (pool, cause) in [(None, "untold"), (Some(json!([0, 0])), "untold"), (Some(json!([0, 1])), "elsewhere")] {
        let mut story = Story::default();
        story.segment(0, 20 * MIB, 0);
        story.alloc(0, 20 * MIB, 0, json!([]));
        story.free(0, 20 * MIB, 0);
        story.segment(1 << 30, 20 * MIB, 0);
        story.alloc(1 << 30, 16 * MIB, 0, json!([]));
        if let Some(pool) = pool {
            story.held(2 << 30, 2 * MIB, pool);
        }
        let file = dir.write("pools.json", story.text());
        let shapes = explain_json(&dir, &[&file])["shapes"].clone();
        assert_eq!(
            shapes.as_array().unwrap().iter().find(|shape| shape["requested_bytes"] == 16 * MIB).unwrap()["cause"],
            cause
        );
        let screen = explain(&dir, &[&file]).ok().stdout;
        assert_eq!(screen.contains("private pool"), cause == "elsewhere", "{screen}");
    }
}

#[test]
fn nothing_is_stranded_shortly_before_the_end() {
    let dir = TestDir::new();
    let stranded = |requests: u64| {
        let mut story = Story::default();
        story.held(1 << 30, 20 * MIB, json!([0, 0]));
        story.segments[0]["stream"] = json!(7);
        story.segment(0, 20 * MIB, 0);
        for _ in 0..requests {
            story.alloc(0, 4 * MIB, 0, json!([]));
            story.free(0, 4 * MIB, 0);
        }
        // The peak is at the last event.
        story.segment(2 << 30, 40 * MIB, 0);
        story.alloc(2 << 30, 40 * MIB, 0, json!([]));
        explain_json(&dir, &[&dir.write("stranded.json", story.text())])["reserved"]["stranded"].clone()
    };
    assert_eq!(stranded(0), json!([]));
    assert_eq!(stranded(8), json!([]));
    assert_eq!(stranded(9)[0]["requests_since"], 10);
    // One event.
    let mut story = Story::default();
    story.held(1 << 30, 20 * MIB, json!([0, 0]));
    story.segments[0]["stream"] = json!(7);
    story.alloc(0, 4 * MIB, 0, json!([]));
    let file = dir.write("one.json", story.text());
    assert_eq!(explain_json(&dir, &[&file])["reserved"]["stranded"], json!([]));
    let screen = explain(&dir, &[&file]).ok().stdout;
    for never in ["no longer used", "could not serve", "Active memory at peak reserved"] {
        assert!(!screen.contains(never), "{never}: {screen}");
    }
}

#[test]
fn other_streams_are_named_only_if_recorded() {
    let dir = TestDir::new();
    for stream in [0, 5] {
        let mut story = Story::default();
        story.segment(0, 20 * MIB, 0);
        story.alloc(0, 8 * MIB, 0, json!([]));
        story.event("free_requested", BASE, 8 * MIB, 0, json!([]));
        story.alloc(8 * MIB, 4 * MIB, 0, json!([]));
        story.segment(1 << 30, 20 * MIB, stream);
        story.alloc(1 << 30, 8 * MIB, stream, json!([]));
        story.event("free_completed", BASE, 8 * MIB, 0, json!([]));
        let file = dir.write("streams.json", story.text());
        assert_eq!(explain_json(&dir, &[&file])["streams"], if stream == 0 { 1 } else { 2 });
        let screen = explain(&dir, &[&file]).ok().stdout;
        assert_eq!(screen.contains("record_stream"), stream == 5, "{screen}");
        assert!(screen.contains("1 free"), "{screen}");
    }
}

#[test]
fn the_breakdown_is_of_the_busiest_moment_near_the_peak() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 1000 * MIB, 0);
    story.alloc(0, 1000 * MIB, 0, json!([script(4, "forward")]));
    story.free(0, 1000 * MIB, 0);
    // Little is active when the last 2 MiB are allocated.
    story.segment(1 << 40, 2 * MIB, 0);
    story.alloc(1 << 40, 512, 0, json!([script(9, "log")]));
    let near = explain_json(&dir, &[&dir.write("near.json", story.text())]);
    assert_eq!(near["peak_reserved"]["event"], 6);
    assert_eq!(
        (&near["reserved"]["at"], &near["reserved"]["moment"]["event"]),
        (&json!("near_peak_reserved"), &json!(2))
    );
    assert_eq!(part(&near, "requested"), 1000 * MIB);
    assert!(!explain(&dir, &["near.json"]).ok().stdout.contains("could not serve"));
    // More than half a percent lower is not near the peak.
    story.segment(2 << 40, 20 * MIB, 0);
    story.alloc(2 << 40, 20 * MIB, 0, json!([]));
    let peak = explain_json(&dir, &[&dir.write("peak.json", story.text())]);
    assert_eq!((&peak["reserved"]["at"], &peak["reserved"]["moment"]["event"]), (&json!("peak_reserved"), &json!(8)));
}

// `explain` on recordings of real programs, and on a large file.
/// A snapshot as Python's pickler writes it (protocol 4): strings, containers and frames are memoized; each event has its own list
/// of frames.
fn pickled(events: u32) -> Vec<u8> {
    let mut out = b"\x80\x04\x95\0\0\0\0\0\0\0\0}\x94(".to_vec();
    let mut entered = 1_u32;
    let mut texts: Vec<(&str, u32)> = Vec::new();
    let mut text =
        |out: &mut Vec<u8>, entered: &mut u32, text: &'static str| match texts.iter().find(|(known, _)| *known == text)
        {
            Some((_, number)) => out.extend([&b"j"[..], &number.to_le_bytes()].concat()),
            None => {
                out.extend([&[0x8c, text.len() as u8][..], text.as_bytes(), &[0x94]].concat());
                texts.push((text, *entered));
                *entered += 1;
            }
        };
    let open = |out: &mut Vec<u8>, entered: &mut u32, what: u8| {
        out.extend([what, 0x94, b'(']);
        *entered += 1;
    };
    text(&mut out, &mut entered, "segments");
    out.extend(b"]\x94");
    entered += 1;
    text(&mut out, &mut entered, "device_traces");
    open(&mut out, &mut entered, b']');
    open(&mut out, &mut entered, b']');
    let mut frame = None;
    for number in 0..events {
        let action =
            if number % 3 == 0 { "alloc" } else { ["free_requested", "free_completed"][number as usize % 3 - 1] };
        open(&mut out, &mut entered, b'}');
        text(&mut out, &mut entered, "action");
        text(&mut out, &mut entered, action);
        let long = |value: u64| [&[0x8a, 8][..], &value.to_le_bytes()].concat();
        let values = [
            ("addr", long(BASE)),
            ("size", b"J\0\0\x20\0".to_vec()),
            ("stream", b"K\0".to_vec()),
            ("time_us", long(number.into())),
        ];
        for (key, value) in values {
            text(&mut out, &mut entered, key);
            out.extend(value);
        }
        text(&mut out, &mut entered, "frames");
        open(&mut out, &mut entered, b']');
        if let Some(frame) = frame {
            out.extend([&b"j"[..], &u32::to_le_bytes(frame)].concat());
        } else {
            frame = Some(entered);
            open(&mut out, &mut entered, b'}');
            for (key, value) in [("name", "step"), ("filename", "/home/me/train.py")] {
                text(&mut out, &mut entered, key);
                text(&mut out, &mut entered, value);
            }
            text(&mut out, &mut entered, "line");
            out.extend(b"K\x07u");
        }
        out.extend(b"eu");
        // The pickler writes lists in batches.
        if number % 1000 == 999 {
            out.extend(b"e(");
        }
    }
    out.extend(b"eeu.");
    out
}

#[test]
fn reading_uses_less_memory_than_the_file_size() {
    let dir = TestDir::new();
    let snapshot = pickled(300_000);
    let file = dir.at("large.pickle");
    std::fs::write(&file, &snapshot).unwrap();
    let file = file.to_str().unwrap();
    let within = |bytes: usize| explain(&dir, &[file, "--json", "--read-memory", &format!("{bytes}B")]);
    let explanation: Value = serde_json::from_str(&within(snapshot.len()).ok().stdout).unwrap();
    assert_eq!(
        (&explanation["events"], &explanation["who"][0]["lines"][0]["line"]),
        (&json!(300_000), &json!("me/train.py:7 step"))
    );
    within(snapshot.len() / 4).refused(2, &["large.pickle", "of memory to read, and the limit is", "--read-memory"]);
}

#[test]
fn the_breakdown_of_recorded_programs_equals_the_replays() {
    let dir = TestDir::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/histories/tests/fixtures");
    for name in ["resnet50.roundup8", "resnet50.split32"] {
        agrees(&dir, fixtures.join(format!("{name}.pickle.xz")).to_str().unwrap());
    }
}

/// A recording outside of the repository.
fn recorded(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces/configs");
    let path = folder.join(format!("{name}.pickle.xz"));
    assert!(path.exists(), "{} is not here", path.display());
    path.to_str().unwrap().to_owned()
}

#[test]
#[ignore = "needs recordings next to the checkout, in ../shared"]
fn recordings_outside_of_the_repository_are_explained() {
    let dir = TestDir::new();
    let path = recorded("gpt2.frames");
    agrees(&dir, &path);
    let explanation = explain_json(&dir, &[&path]);
    let lines = explanation["who"][0]["lines"].as_array().unwrap();
    assert!(lines.iter().take(5).all(|row| row["line"].as_str().unwrap().starts_with("train.py:")), "{lines:?}");
    assert!(explanation["annotations"].as_u64() > Some(0));
    let screen = explain(&dir, &[&path]).ok().stdout;
    assert!(screen.contains("eager_attention_forward"), "{screen}");
    for name in ["gpt2_fsdp1.rank0", "gpt2_ddp.rank0", "streams.split32"] {
        agrees(&dir, &recorded(name));
    }
}

#[test]
fn a_recorded_program_that_ran_out_of_memory_is_explained() {
    let dir = TestDir::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/histories/tests/fixtures");
    let explanation = explain_json(&dir, &[fixtures.join("resnet50.gcsplit.pickle.xz").to_str().unwrap()]);
    let last = explanation["out_of_memory"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["asked_bytes"], &last["reserved_bytes"]), (&json!(28 * MIB), &json!(6_283_067_392_u64)));
    assert_eq!(last["cause"], "pieces");
    // PyTorch counted five garbage collections.
    let kinds: Vec<&Value> = explanation["retries"].as_array().unwrap().iter().map(|retry| &retry["kind"]).collect();
    assert_eq!(kinds, ["garbage_collection"; 5]);
}

// Lines and purposes of blocks, from frames as PyTorch writes them.

/// A frame of a file.
fn frame(file: &str, line: u64, name: &str) -> Value {
    json!({"filename": file, "line": line, "name": name})
}

/// A C++ frame, as the unwinder writes it without a file.
fn native(name: &str) -> Value {
    frame("??", 0, name)
}

/// The innermost frames of every stack recorded with C++.
fn recorder() -> Vec<Value> {
    vec![
        native("torch::unwind::unwind()"),
        native("torch::CapturedTraceback::gather(bool, bool, bool)"),
        frame("memory_snapshot.cpp", 0, "torch::cuda::(anonymous namespace)::gather_with_cpp()"),
        frame(
            "CUDACachingAllocator.cpp",
            0,
            "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long)",
        ),
        native("at::detail::empty_cuda(c10::ArrayRef<long>, c10::ScalarType)"),
    ]
}

/// A C++ stack: the allocating frames between the recorder's and the calling ones.
fn stack(inner: &[Value], outer: &[Value]) -> Value {
    Value::from([&recorder()[..], inner, outer].concat())
}

/// The frames that run an autograd node on its thread.
fn engine() -> Vec<Value> {
    vec![
        native("torch::autograd::Node::operator()(std::vector<at::Tensor, std::allocator<at::Tensor> >&&)"),
        native("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
        native("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
        frame("thread48.o", 0, "execute_native_thread_routine"),
        native("__clone"),
    ]
}

fn node(name: &str) -> Vec<Value> {
    let apply = native(&format!("torch::autograd::generated::{name}::apply(std::vector<at::Tensor>&&)"));
    [vec![native("at::_ops::div_Tensor::call(at::Tensor const&, at::Tensor const&)"), apply], engine()].concat()
}

/// A block of 2 MiB for each stack.
fn held(stacks: &[Value]) -> Story {
    let mut story = Story::default();
    story.segment(0, 2 * MIB * stacks.len() as u64 + 20 * MIB, 0);
    for (at, frames) in stacks.iter().enumerate() {
        story.alloc(2 * MIB * at as u64, 2 * MIB, 0, frames.clone());
    }
    story
}

/// The lines of an explanation with their numbers of blocks.
fn lines(explanation: &Value) -> Vec<(String, u64)> {
    let words = |row: &Value| match row["inside"].as_str() {
        Some(inside) => format!("{} > {inside}", row["line"].as_str().unwrap()),
        None => row["line"].as_str().unwrap().to_owned(),
    };
    let mut rows: Vec<(String, u64)> = explanation["who"][0]["lines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (words(row), row["blocks"].as_u64().unwrap()))
        .collect();
    rows.sort();
    rows
}

#[test]
fn cpp_is_named_by_node_operator_and_workspace() {
    let dir = TestDir::new();
    let linear = frame("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134, "forward");
    let addmm = native("at::_ops::addmm::call(at::Tensor const&, at::Tensor const&)");
    let python = [native("_PyEval_EvalFrameDefault"), native("Py_BytesMain"), native("_start")];
    let own = |line| [&[script(line, "forward")][..], &python].concat();
    let workspace = native("at::cuda::getCUDABlasLtWorkspace()");
    let story = held(&[
        stack(&[], &node("DivBackward0")),
        stack(&[], &node("DivBackward0")),
        stack(std::slice::from_ref(&workspace), &node("AddmmBackward0")),
        // The engine's own work, such as accumulating a gradient.
        stack(&[native("at::_ops::sum_dim_IntList::call(at::Tensor const&)")], &engine()),
        stack(&[addmm.clone(), linear.clone()], &own(8)),
        stack(&[workspace, addmm.clone(), linear], &own(8)),
        stack(&[addmm], &own(9)),
        // A Python function called by the backward pass.
        stack(
            &[native("at::_ops::mul_Tensor::call(at::Tensor const&)"), script(30, "backward")],
            &[vec![native("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)")], engine()].concat(),
        ),
        // Only recorder frames.
        Value::from(recorder()),
    ]);
    let file = dir.write("cpp.json", story.text());
    let explanation = explain_json(&dir, &[&file]);
    let expected = [
        ("AddmmBackward0 > cuBLASLt workspace", 1),
        ("DivBackward0", 2),
        ("backward pass > aten::sum_dim_IntList", 1),
        ("frames without a program line", 1),
        ("proj/train.py:30 backward > aten::mul_Tensor", 1),
        ("proj/train.py:8 forward > cuBLASLt workspace", 1),
        ("proj/train.py:8 forward > modules/linear.py:134 forward", 1),
        ("proj/train.py:9 forward > aten::addmm", 1),
    ];
    assert_eq!(lines(&explanation), expected.map(|(line, blocks)| (line.to_owned(), blocks)));
    // The backward pass is one branch.
    let tree = &explanation["who"][0]["tree"]["children"];
    let backward = tree.as_array().unwrap().iter().find(|node| node["name"] == "backward pass").unwrap();
    assert_eq!(backward["bytes"], json!(10 * MIB));
    for arguments in [&[file.as_str()][..], &[&file, "--frames"]] {
        let screen = explain(&dir, arguments).ok().stdout;
        for never in ["unwind", "gather", "CachingAllocator"] {
            assert!(!screen.contains(never), "{never}: {screen}");
        }
    }
}

#[test]
fn the_backward_pass_gets_the_line_of_the_forward_pass() {
    let dir = TestDir::new();
    // As PyTorch records it under torch.autograd.set_detect_anomaly: as text, outermost first.
    let printed =
        |line: u64, name: &str| format!("  File \"/home/me/proj/train.py\", line {line}, in {name}\n    h = h / 3\n");
    let forward = json!([
        printed(50, "<module>"),
        "  File \"/venv/site-packages/torch/nn/modules/module.py\", line 1790, in _call_impl\n    return f()\n",
        printed(27, "forward")
    ]);
    let mut story = held(&[stack(&[], &node("DivBackward0")), json!([])]);
    for event in &mut story.events[1..] {
        event["forward_frames"] = forward.clone();
    }
    let json_form = dir.write("forward.json", story.text());
    let expected = [("proj/train.py:27 forward > DivBackward0", 1), ("proj/train.py:27 forward > backward pass", 1)];
    let expected = expected.map(|(line, blocks)| (line.to_owned(), blocks));
    let in_json = explain_json(&dir, &[&json_form]);
    assert_eq!(lines(&in_json), expected);
    assert_eq!(in_json["who"][0]["purposes"], json!([{"purpose": "gradients", "bytes": 4 * MIB, "blocks": 2}]));
    assert_eq!(in_json["who"][0]["tree"]["children"][0]["name"], "proj/train.py:50 <module>");
    // The same after a round trip through a pickle.
    let to = dir.at("forward.pickle");
    dir.run(&["convert", &json_form, "--to", "snapshot", "-o", to.to_str().unwrap()]).ok();
    assert_eq!(lines(&explain_json(&dir, &[to.to_str().unwrap()])), expected);
}

#[test]
fn generated_names_are_readable_and_equal_rows_are_merged() {
    let dir = TestDir::new();
    let compiled = |user: &str| frame(&format!("/tmp/torchinductor_{user}/ab/cabcdefghijklmnop.py"), 123, "call");
    let windows = r"C:\Users\me\miniconda3\Lib\site-packages\torch\nn\modules\linear.py";
    let story = held(&[
        json!([compiled("me"), script(20, "step")]),
        // Another rank's cache with the same names.
        json!([compiled("you"), script(20, "step")]),
        json!([compiled("me")]),
        json!([frame("/tmp/ipykernel_12/3456.py", 7, "train")]),
        json!([frame("<ipython-input-3-0123abcd>", 7, "train")]),
        json!([frame(windows, 134, "forward"), frame(r"C:\Users\me\proj\train.py", 9, "main")]),
        json!([frame("/home/me/proj/train.py", 9, "main")]),
        json!([frame("/home/you/proj/train.py", 9, "main")]),
    ]);
    let explanation = explain_json(&dir, &[&dir.write("names.json", story.text())]);
    let expected = [
        ("notebook cell 3456:7 train", 1),
        ("notebook cell 3:7 train", 1),
        ("proj/train.py:20 step > torch.compile's cabcdefg….py:123 call", 2),
        ("proj/train.py:9 main", 2),
        ("proj/train.py:9 main > modules/linear.py:134 forward", 1),
        ("torch.compile's cabcdefg….py:123 call", 1),
    ];
    assert_eq!(lines(&explanation), expected.map(|(line, blocks)| (line.to_owned(), blocks)));
}

/// A frame of PyTorch's Python.
fn of_torch(file: &str, name: &str) -> Value {
    frame(&format!("/venv/lib/python3.12/site-packages/torch/{file}"), 1, name)
}

#[test]
fn purposes_are_inferred_from_frames() {
    let dir = TestDir::new();
    let module = |name: &str| of_torch("nn/modules/module.py", name);
    let step = [of_torch("optim/optimizer.py", "wrapper"), script(5, "main")];
    let optimizer = |file: &str, name: &str| Value::from([&[of_torch(file, name)][..], &step].concat());
    let mut story = held(&[
        json!([module("_apply"), module("to"), script(1, "main")]),
        json!([of_torch("nn/init.py", "normal_"), script(1, "main")]),
        json!([of_torch("nn/modules/linear.py", "forward"), module("_call_impl"), script(2, "main")]),
        stack(&[native("at::cuda::getCUDABlasLtWorkspace()"), module("_call_impl")], &[script(2, "main")]),
        stack(&[], &node("DivBackward0")),
        json!([of_torch("autograd/__init__.py", "_make_grads"), of_torch("_tensor.py", "backward"), script(3, "main")]),
        // The backward pass runs without Python frames right after its call.
        json!([]),
        optimizer("optim/adam.py", "_init_group"),
        optimizer("optim/sgd.py", "_multi_tensor_sgd"),
        json!([script(9, "load")]),
        // Allocated by the step that has not ended.
        optimizer("optim/sgd.py", "_multi_tensor_sgd"),
    ]);
    let purposes = |story: &Story, name: &str| -> Vec<(String, u64)> {
        let explanation = explain_json(&dir, &[&dir.write(name, story.text())]);
        let rows = explanation["who"][0]["purposes"].as_array().unwrap();
        rows.iter().map(|row| (row["purpose"].as_str().unwrap().to_owned(), row["blocks"].as_u64().unwrap())).collect()
    };
    let expected =
        |rows: &[(&str, u64)]| rows.iter().map(|(name, blocks)| ((*name).to_owned(), *blocks)).collect::<Vec<_>>();
    assert_eq!(
        purposes(&story, "purposes.json"),
        expected(&[
            ("gradients", 3),
            ("parameters", 2),
            ("optimizer_state", 2),
            ("activations", 1),
            ("optimizer_temporaries", 1),
            ("workspace", 1),
            ("unknown", 1),
        ])
    );
    let screen = explain(&dir, &[&dir.at("purposes.json").display().to_string()]).ok().stdout;
    for words in ["By purpose", "optimizer state", "allocated in a module's forward", "no evidence in the recording"] {
        assert!(screen.contains(words), "{screen}");
    }
    // PyTorch's category takes precedence over frames.
    story.events[1]["category"] = json!("OPTIMIZER_STATE");
    assert_eq!(purposes(&story, "category.json")[0], ("gradients".to_owned(), 3));
    assert_eq!(purposes(&story, "category.json")[1], ("optimizer_state".to_owned(), 3));
    // Without frames an annotation shows the optimizer's step.
    let mut story = held(&[json!([]), json!([]), json!([])]);
    story.annotate("Optimizer.step#AdamW.step", "START", 2);
    story.annotate("Optimizer.step#AdamW.step", "END", 3);
    assert_eq!(purposes(&story, "annotated.json"), expected(&[("unknown", 2), ("optimizer_state", 1)]));
    // Casts of autocast are copies if they are live after the operator, whose result is allocated once.
    let cast = stack(&[native("at::autocast::cached_cast(c10::ScalarType, at::Tensor const&)")], &[script(2, "main")]);
    let result = json!([module("_call_impl"), script(2, "main")]);
    let story = held(&[cast.clone(), cast.clone(), result.clone(), result.clone(), cast, result]);
    let rows = expected(&[("activations", 4), ("autocast_copies", 2)]);
    assert_eq!(purposes(&story, "autocast.json"), rows);
    // Without evidence there are no rows.
    let story = held(&[json!([]), json!([script(1, "main")])]);
    assert_eq!(purposes(&story, "untold.json"), []);
}

/// A recording of `fixtures/train.py`.
fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}.pickle.xz", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn recordings_of_pytorch() {
    let dir = TestDir::new();
    let of = |name: &str| explain_json(&dir, &[&fixture(name)]);
    let has = |explanation: &Value, words: &str| {
        assert!(lines(explanation).iter().any(|(line, _)| line == words), "{words}: {explanation:#}")
    };
    let (cpp, anomaly, compiled) = (of("cpp"), of("anomaly"), of("compiled"));
    for words in ["AddmmBackward0 > cuBLAS workspace", "ConvolutionBackward0 > cuDNN workspace", "ConvolutionBackward0"]
    {
        has(&cpp, words);
    }
    has(&cpp, "proj/train.py:36 forward > aten::gelu");
    has(&anomaly, "proj/train.py:37 forward > backward pass");
    has(&compiled, "proj/train.py:37 forward > torch.compile's cfu33xt5….py:1085 call");
    // Parameters and optimizer state are the same in every recording.
    let bytes = |explanation: &Value, purpose: &str| {
        let rows = explanation["who"][0]["purposes"].as_array().unwrap();
        rows.iter().find(|row| row["purpose"] == purpose).map_or(0, |row| row["bytes"].as_u64().unwrap() / MIB)
    };
    for explanation in [&cpp, &anomaly, &compiled] {
        assert_eq!((bytes(explanation, "parameters"), bytes(explanation, "optimizer_state")), (20, 41));
        assert_eq!(bytes(explanation, "unknown"), 0);
    }
    // Only C++ frames show workspaces; otherwise they count as memory of the pass that allocated them.
    assert_eq!((bytes(&cpp, "workspace"), bytes(&anomaly, "workspace")), (100, 0));
    let passes = |explanation: &Value| bytes(explanation, "activations") + bytes(explanation, "gradients");
    assert_eq!(passes(&anomaly), passes(&cpp) + 100);
    for name in ["cpp", "anomaly", "compiled"] {
        let screen = explain(&dir, &[&fixture(name), "--top", "99"]).ok().stdout;
        for never in ["unwind", "CapturedTraceback", "torchinductor", "thread_main", "std::"] {
            assert!(!screen.contains(never), "{never}: {screen}");
        }
    }
}

#[test]
#[ignore = "needs recordings next to the checkout, in ../shared"]
fn a_recorded_program_has_twice_as_much_state_as_parameters() {
    let dir = TestDir::new();
    let path = recorded("gpt2.frames");
    let explanation = explain_json(&dir, &[&path]);
    let rows = explanation["who"][0]["purposes"].as_array().unwrap();
    let bytes = |purpose: &str| {
        rows.iter().find(|row| row["purpose"] == purpose).map_or(0, |row| row["bytes"].as_u64().unwrap())
    };
    // 124 million parameters of four bytes; AdamW keeps two numbers for each.
    assert_eq!(bytes("parameters") / MIB, 475);
    assert_eq!(bytes("optimizer_state") / MIB, 958);
    assert!(bytes("activations") > 7 << 30 && bytes("unknown") < MIB, "{rows:?}");
}
