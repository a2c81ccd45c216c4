//! Where `explain` says that blocks come from, and what they are for, by frames as PyTorch writes them.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::explained::{explain, found};
use common::story::{MIB, Story, script};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A frame of a file.
fn frame(file: &str, line: u64, name: &str) -> Value {
    json!({"filename": file, "line": line, "name": name})
}

/// C++, as the unwinder names it where it finds no file.
fn native(name: &str) -> Value {
    frame("??", 0, name)
}

/// What stands on top of every stack that was recorded with C++.
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

/// A stack with C++: what allocates, between the recorder and what called it.
fn stack(inner: &[Value], outer: &[Value]) -> Value {
    Value::from([&recorder()[..], inner, outer].concat())
}

/// What runs a node of autograd on its thread.
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

/// The lines of a history in words, with blocks.
fn lines(found: &Value) -> Vec<(String, u64)> {
    let words = |row: &Value| match row["inside"].as_str() {
        Some(inside) => format!("{} > {inside}", row["line"].as_str().unwrap()),
        None => row["line"].as_str().unwrap().to_owned(),
    };
    let mut rows: Vec<(String, u64)> = found["who"][0]["lines"]
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
    let place = Place::new();
    let linear = frame("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134, "forward");
    let addmm = native("at::_ops::addmm::call(at::Tensor const&, at::Tensor const&)");
    let python = [native("_PyEval_EvalFrameDefault"), native("Py_BytesMain"), native("_start")];
    let own = |line| [&[script(line, "forward")][..], &python].concat();
    let workspace = native("at::cuda::getCUDABlasLtWorkspace()");
    let story = held(&[
        stack(&[], &node("DivBackward0")),
        stack(&[], &node("DivBackward0")),
        stack(std::slice::from_ref(&workspace), &node("AddmmBackward0")),
        // The engine's own work, such as to sum up a gradient.
        stack(&[native("at::_ops::sum_dim_IntList::call(at::Tensor const&)")], &engine()),
        stack(&[addmm.clone(), linear.clone()], &own(8)),
        stack(&[workspace, addmm.clone(), linear], &own(8)),
        stack(&[addmm], &own(9)),
        // A function in Python that the backward pass calls.
        stack(
            &[native("at::_ops::mul_Tensor::call(at::Tensor const&)"), script(30, "backward")],
            &[vec![native("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)")], engine()].concat(),
        ),
        // Nothing but what records.
        Value::from(recorder()),
    ]);
    let file = place.write("cpp.json", story.text());
    let found = found(&place, &[&file]);
    let expected = [
        ("AddmmBackward0 > cuBLASLt workspace", 1),
        ("DivBackward0", 2),
        ("backward pass > aten::sum_dim_IntList", 1),
        ("frames that name no place in the program", 1),
        ("proj/train.py:30 backward > aten::mul_Tensor", 1),
        ("proj/train.py:8 forward > cuBLASLt workspace", 1),
        ("proj/train.py:8 forward > modules/linear.py:134 forward", 1),
        ("proj/train.py:9 forward > aten::addmm", 1),
    ];
    assert_eq!(lines(&found), expected.map(|(line, blocks)| (line.to_owned(), blocks)));
    // All of the backward pass is one branch.
    let tree = &found["who"][0]["tree"]["children"];
    let backward = tree.as_array().unwrap().iter().find(|node| node["name"] == "backward pass").unwrap();
    assert_eq!(backward["bytes"], json!(10 * MIB));
    for arguments in [&[file.as_str()][..], &[&file, "--frames"]] {
        let screen = explain(&place, arguments).ok().stdout;
        for never in ["unwind", "gather", "CachingAllocator"] {
            assert!(!screen.contains(never), "{never}: {screen}");
        }
    }
}

#[test]
fn the_backward_pass_is_known_by_the_line_of_the_forward_pass() {
    let place = Place::new();
    // As PyTorch records it under torch.autograd.set_detect_anomaly: printed, from the outermost in.
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
    let json_form = place.write("forward.json", story.text());
    let expected = [("proj/train.py:27 forward > DivBackward0", 1), ("proj/train.py:27 forward > backward pass", 1)];
    let expected = expected.map(|(line, blocks)| (line.to_owned(), blocks));
    let in_json = found(&place, &[&json_form]);
    assert_eq!(lines(&in_json), expected);
    assert_eq!(in_json["who"][0]["purposes"], json!([{"purpose": "gradients", "bytes": 4 * MIB, "blocks": 2}]));
    assert_eq!(in_json["who"][0]["tree"]["children"][0]["name"], "proj/train.py:50 <module>");
    // The same when it was written as a pickle and read again.
    let to = place.at("forward.pickle");
    place.run(&["convert", &json_form, "--to", "snapshot", "-o", to.to_str().unwrap()]).ok();
    assert_eq!(lines(&found(&place, &[to.to_str().unwrap()])), expected);
}

#[test]
fn names_by_number_are_readable_and_rows_that_read_alike_are_one() {
    let place = Place::new();
    let compiled = |user: &str| frame(&format!("/tmp/torchinductor_{user}/ab/cabcdefghijklmnop.py"), 123, "call");
    let windows = r"C:\Users\me\miniconda3\Lib\site-packages\torch\nn\modules\linear.py";
    let story = held(&[
        json!([compiled("me"), script(20, "step")]),
        // Another rank's cache, whose names are the same.
        json!([compiled("you"), script(20, "step")]),
        json!([compiled("me")]),
        json!([frame("/tmp/ipykernel_12/3456.py", 7, "train")]),
        json!([frame("<ipython-input-3-0123abcd>", 7, "train")]),
        json!([frame(windows, 134, "forward"), frame(r"C:\Users\me\proj\train.py", 9, "main")]),
        json!([frame("/home/me/proj/train.py", 9, "main")]),
        json!([frame("/home/you/proj/train.py", 9, "main")]),
    ]);
    let found = found(&place, &[&place.write("names.json", story.text())]);
    let expected = [
        ("notebook cell 3456:7 train", 1),
        ("notebook cell 3:7 train", 1),
        ("proj/train.py:20 step > torch.compile's cabcdefg….py:123 call", 2),
        ("proj/train.py:9 main", 2),
        ("proj/train.py:9 main > modules/linear.py:134 forward", 1),
        ("torch.compile's cabcdefg….py:123 call", 1),
    ];
    assert_eq!(lines(&found), expected.map(|(line, blocks)| (line.to_owned(), blocks)));
}

/// A frame of PyTorch's Python.
fn of_torch(file: &str, name: &str) -> Value {
    frame(&format!("/venv/lib/python3.12/site-packages/torch/{file}"), 1, name)
}

#[test]
fn what_memory_is_for() {
    let place = Place::new();
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
        // The backward pass runs without Python right after it was called.
        json!([]),
        optimizer("optim/adam.py", "_init_group"),
        optimizer("optim/sgd.py", "_multi_tensor_sgd"),
        json!([script(9, "load")]),
        // What the step that still runs has made may go with it.
        optimizer("optim/sgd.py", "_multi_tensor_sgd"),
    ]);
    let purposes = |story: &Story, name: &str| -> Vec<(String, u64)> {
        let found = found(&place, &[&place.write(name, story.text())]);
        let rows = found["who"][0]["purposes"].as_array().unwrap();
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
            ("unknown", 2),
            ("activations", 1),
            ("workspace", 1)
        ])
    );
    let screen = explain(&place, &[&place.at("purposes.json").display().to_string()]).ok().stdout;
    for words in ["What it is for", "optimizer state", "made in a module's forward", "the recording does not tell"] {
        assert!(screen.contains(words), "{screen}");
    }
    // PyTorch's own category says more than frames.
    story.events[1]["category"] = json!("OPTIMIZER_STATE");
    assert_eq!(purposes(&story, "category.json")[0], ("gradients".to_owned(), 3));
    assert_eq!(purposes(&story, "category.json")[1], ("optimizer_state".to_owned(), 3));
    // Without frames an annotation tells of the optimizer, and nothing of what went before.
    let mut story = held(&[json!([]), json!([]), json!([])]);
    story.annotate("Optimizer.step#AdamW.step", "START", 2);
    story.annotate("Optimizer.step#AdamW.step", "END", 3);
    assert_eq!(purposes(&story, "annotated.json"), expected(&[("unknown", 2), ("optimizer_state", 1)]));
    // Nothing is said where nothing is told.
    let story = held(&[json!([]), json!([script(1, "main")])]);
    assert_eq!(purposes(&story, "untold.json"), []);
}

/// A recording of `fixtures/train.py`.
fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}.pickle.xz", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn recordings_of_pytorch() {
    let place = Place::new();
    let of = |name: &str| found(&place, &[&fixture(name)]);
    let has =
        |found: &Value, words: &str| assert!(lines(found).iter().any(|(line, _)| line == words), "{words}: {found:#}");
    let (cpp, anomaly, compiled) = (of("cpp"), of("anomaly"), of("compiled"));
    for words in ["AddmmBackward0 > cuBLAS workspace", "ConvolutionBackward0 > cuDNN workspace", "ConvolutionBackward0"]
    {
        has(&cpp, words);
    }
    has(&cpp, "proj/train.py:36 forward > aten::gelu");
    has(&anomaly, "proj/train.py:37 forward > backward pass");
    has(&compiled, "proj/train.py:37 forward > torch.compile's cfu33xt5….py:1085 call");
    // What is there of the network and its optimizer is the same, however it was recorded.
    let bytes = |found: &Value, purpose: &str| {
        let rows = found["who"][0]["purposes"].as_array().unwrap();
        rows.iter().find(|row| row["purpose"] == purpose).map_or(0, |row| row["bytes"].as_u64().unwrap() / MIB)
    };
    for found in [&cpp, &anomaly, &compiled] {
        assert_eq!((bytes(found, "parameters"), bytes(found, "optimizer_state")), (20, 41));
        assert_eq!(bytes(found, "unknown"), 0);
    }
    // Workspaces are told by C++ only, and count as the pass that made them otherwise.
    assert_eq!((bytes(&cpp, "workspace"), bytes(&anomaly, "workspace")), (100, 0));
    let passes = |found: &Value| bytes(found, "activations") + bytes(found, "gradients");
    assert_eq!(passes(&anomaly), passes(&cpp) + 100);
    for name in ["cpp", "anomaly", "compiled"] {
        let screen = explain(&place, &[&fixture(name), "--top", "99"]).ok().stdout;
        for never in ["unwind", "CapturedTraceback", "torchinductor", "thread_main", "std::"] {
            assert!(!screen.contains(never), "{never}: {screen}");
        }
    }
}

/// A recorded history that is not in the repository.
fn recorded(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces/configs").join(name);
    if !path.exists() {
        println!("skipped: {} is not here", path.display());
    }
    path.exists().then_some(path)
}

#[test]
fn a_recorded_program_has_the_parameters_of_its_network_and_twice_as_much_state() {
    let place = Place::new();
    let Some(path) = recorded("gpt2.frames.pickle.xz") else { return };
    let found = found(&place, &[path.to_str().unwrap()]);
    let rows = found["who"][0]["purposes"].as_array().unwrap();
    let bytes = |purpose: &str| {
        rows.iter().find(|row| row["purpose"] == purpose).map_or(0, |row| row["bytes"].as_u64().unwrap())
    };
    // 124 million parameters of four bytes; AdamW keeps two numbers for each.
    assert_eq!(bytes("parameters") / MIB, 475);
    assert_eq!(bytes("optimizer_state") / MIB, 958);
    assert!(bytes("activations") > 7 << 30 && bytes("unknown") < MIB, "{rows:?}");
}
