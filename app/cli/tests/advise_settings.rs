//! Which settings `advise` names: those that the version has and the program allows.

use crate::advise::event;
use crate::common::{TestDir, story::MIB};
use serde_json::{Value, json};

/// Growing sizes: each allocates a segment of its own, where expandable segments use one. `fields` are keys that PyTorch 2.10
/// adds, `frames` is the stack of each event.
fn growing(test_dir: &TestDir, fields: Value, frames: Value) -> String {
    let mut events = Vec::new();
    for (at, mib) in (1..).zip([30, 40, 50, 60]) {
        for action in ["segment_alloc", "alloc", "free_requested", "free_completed"] {
            let mut event = event(action, at << 30, mib * MIB);
            fields.as_object().unwrap().iter().for_each(|(key, value)| event[key] = value.clone());
            event["frames"] = frames.clone();
            events.push(event);
        }
    }
    let segment = |(at, mib): (u64, u64)| {
        let block = json!({"address": at << 30, "size": mib * MIB, "requested_size": 0, "state": "inactive"});
        json!({"device": 0, "address": at << 30, "total_size": mib * MIB, "stream": 0, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": false, "blocks": [block]})
    };
    let segments: Vec<Value> = (1..).zip([30, 40, 50, 60]).map(segment).collect();
    let settings = json!({"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": false});
    let snapshot = json!({"segments": segments, "device_traces": [events], "external_annotations": [],
        "allocator_settings": settings});
    test_dir.write("growing.json", snapshot.to_string())
}

/// All settings in an answer.
fn named(advice: &Value) -> Vec<&str> {
    let lists = ["settings", "also_tried"].map(|key| advice[key].as_array().unwrap());
    lists.into_iter().flatten().map(|setting| setting["conf"].as_str().unwrap()).collect()
}

#[test]
fn settings_that_the_version_lacks_are_not_advised() {
    let test_dir = TestDir::new();
    let (old, new) = (json!({}), json!({"compile_context": "N/A", "user_metadata": ""}));
    for (fields, version, rounds) in [(old, "2.5 to 2.7", false), (new, "2.10 or 2.11", true)] {
        let file = growing(&test_dir, fields, json!([]));
        let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
        assert_eq!(advice["torch"], version, "{advice}");
        let first = &advice["settings"][0];
        assert_eq!(first["export"], "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
        let named = named(&advice);
        assert_eq!(named.iter().any(|conf| conf.contains("max_non_split_rounding_mb")), rounds, "{named:?}");
        let screen = test_dir.run(&["advise", &file]).ok().stdout;
        assert!(screen.contains(&format!("PyTorch {version}")) && screen.contains(first["export"].as_str().unwrap()));
        // No version before 2.1 has expandable segments.
        let advice = test_dir.run(&["advise", &file, "--torch", "2.0.1", "--json"]).ok().json();
        assert_eq!((&advice["torch"], &advice["without_expandable_segments"]), (&json!("before 2.1"), &Value::Null));
        let before: Vec<&str> = self::named(&advice);
        assert!(before.iter().all(|conf| !conf.contains("expandable") && !conf.contains("non_split")), "{before:?}");
        assert!(before.iter().any(|conf| conf.contains("max_split_size_mb")), "{before:?}");
    }
    let file = growing(&test_dir, json!({}), json!([]));
    let conf = ["--conf", "pinned_free_catch_all:True"];
    let refusal = "pinned_free_catch_all requires PyTorch 2.12 and is not available in PyTorch 2.5 to 2.7; use --torch";
    test_dir.run(&[&["advise", &file], &conf[..]].concat()).refused(2, &[refusal]);
    test_dir.run(&[&["advise", &file, "--torch", "2.12"], &conf[..]].concat()).ok();
    test_dir.run(&["advise", &file, "--torch", "nine"]).refused(2, &["'nine' is not a version of PyTorch"]);
}

/// A snapshot without settings, as of old versions of PyTorch.
#[test]
fn expandable_segments_show_their_setting() {
    let test_dir = TestDir::new();
    let mut snapshot: Value =
        serde_json::from_str(&std::fs::read_to_string(growing(&test_dir, json!({}), json!([]))).unwrap()).unwrap();
    snapshot.as_object_mut().unwrap().remove("allocator_settings");
    let file = test_dir.write("old.json", snapshot.to_string());
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("The file lacks the settings; PyTorch's defaults assumed."), "{screen}");
    for segment in snapshot["segments"].as_array_mut().unwrap() {
        segment["is_expandable"] = json!(true);
    }
    for event in snapshot["device_traces"][0].as_array_mut().unwrap() {
        if event["action"] == "segment_alloc" {
            event["action"] = json!("segment_map");
        }
    }
    let file = test_dir.write("mapped.json", snapshot.to_string());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!(advice["recorded"]["conf"], "expandable_segments:True");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("The file lacks the settings; expandable_segments:True assumed."), "{screen}");
}

#[test]
fn advise_adds_an_answer_without_expandable_segments() {
    let test_dir = TestDir::new();
    let file = growing(&test_dir, json!({"compile_context": "N/A", "user_metadata": ""}), json!([]));
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let settings = advice["settings"].as_array().unwrap();
    assert_eq!((&settings[0]["conf"], &advice["obstacle"]), (&json!("expandable_segments:True"), &Value::Null));
    let second = &advice["without_expandable_segments"];
    let is_without = |setting: &&Value| !setting["conf"].as_str().unwrap().contains("expandable_segments");
    assert_eq!(Some(second), settings.iter().find(is_without), "{advice}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let part = screen.split("\nWithout expandable segments\n").nth(1).unwrap_or_else(|| panic!("{screen}"));
    let part = part.split("\nLower bound\n").next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["unavailable on Windows, before PyTorch 2.1, in a MemPool", "CUDA IPC", "DataLoader workers"] {
        assert!(part.contains(words), "{words}: {screen}");
    }
    if second["conf"] != "" {
        assert!(part.starts_with(second["export"].as_str().unwrap()), "{screen}");
        assert_eq!(screen.matches(second["export"].as_str().unwrap()).count(), 1, "{screen}");
    }
    // The same as a search without them.
    let without = ["advise", &file, "--without", "expandable_segments", "--json"];
    let advice = test_dir.run(&without).ok().json();
    assert!(named(&advice).iter().all(|conf| !conf.contains("expandable_segments")), "{advice}");
    assert_eq!(advice["settings"][0]["peak_reserved_bytes"], second["peak_reserved_bytes"]);
    assert_eq!(advice["without_expandable_segments"], Value::Null);
    let both = [&without[..], &["--without", "roundup_power2_divisions"]].concat();
    let advice = test_dir.run(&both).ok().json();
    assert!(named(&advice).iter().all(|conf| !conf.contains("roundup")), "{advice}");
    test_dir
        .run(&["advise", &file, "--without", "expandable"])
        .refused(2, &["'expandable' is not a setting of PyTorch's"]);
}

#[test]
fn advise_names_the_frame_that_rules_out_expandable() {
    let test_dir = TestDir::new();
    let frame = |name: &str, file: &str| json!({"name": name, "filename": file, "line": 86});
    let main = frame("main", "/home/me/serve.py");
    let reduces = frame("__init__", "/env/vllm/distributed/device_communicators/custom_all_reduce.py");
    let file = growing(&test_dir, json!({}), json!([reduces, main]));
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let shares = "The program shares GPU memory by CUDA IPC (device_communicators/custom_all_reduce.py:86 __init__)";
    assert_eq!(advice["obstacle"], shares);
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let first = screen.split("What would help").nth(1).unwrap().split("Without expandable segments").next().unwrap();
    assert!(first.contains("The program shares GPU memory by CUDA IPC"), "{screen}");
    let file = growing(&test_dir, json!({}), json!([main]));
    assert_eq!(test_dir.run(&["advise", &file, "--json"]).ok().json()["obstacle"], Value::Null);
}

#[test]
fn garbage_collection_comes_with_its_python_line() {
    let test_dir = TestDir::new();
    let file = growing(&test_dir, json!({}), json!([]));
    let arguments = ["advise", &file, "--conf", "garbage_collection_threshold:0.6", "--limit", "170MiB"];
    let line = format!("torch.cuda.set_per_process_memory_fraction({} / torch.cuda.mem_get_info()[1])", 170 * MIB);
    let advice = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    // The current settings reserve no more under that limit.
    assert_eq!((&advice["verdict"], &advice["settings"][0]["python"]), (&json!("keep"), &json!(line)), "{advice}");
    let screen = test_dir.run(&arguments).ok().stdout;
    let screen = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(screen.contains(&format!("Other tested settings garbage_collection_threshold:0.6 {line}")), "{screen}");
    let split = test_dir.run(&["advise", &file, "--conf", "max_split_size_mb:32", "--json"]).ok().json();
    assert_eq!(split["settings"][0]["python"], Value::Null);
}
