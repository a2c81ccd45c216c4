//! Refused input: one line with the fix, the documented exit code, nothing on stdout.

use super::*;

#[test]
fn numbers_that_cannot_work_are_refused() {
    let test_dir = TestDir::new();
    for (arguments, words) in [
        (["--hidden", "0"], "--hidden must be at least 1"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--lr", "nan"], "--lr must be a positive number"),
        (["--lr", "inf"], "--lr must be a positive number"),
        (["--lr", "0"], "--lr must be a positive number"),
        (["--lr", "-1"], "--lr must be a positive number, found -1"),
        (["--memory-limit", "1K"], "--memory-limit 1 KiB is less than the model's weights"),
        (["--memory-limit", "0"], "--memory-limit 0 B is less than the model's weights"),
        (
            ["--alloc", "caching:garbage_collection_threshold=0.5"],
            "garbage_collection_threshold is a fraction of memory_limit, which is not given; set memory_limit, too",
        ),
        (
            ["--alloc", "bfc:allow_growth=off"],
            "--alloc bfc: allow_growth=off takes the whole memory_limit at the start; set memory_limit, too",
        ),
        (["--alloc", "caching:memory_limit=1K"], "--memory-limit 1 KiB is less than the model's weights"),
        (["--nvtx-memory", "on"], "no memory checker is attached to this process"),
    ] {
        test_dir.iris(&arguments).refused(&[words]);
    }
    assert!(!test_dir.at("runs").exists(), "nothing ran, so there is nothing to record");
}

#[test]
fn allocators_that_mean_nothing_are_refused() {
    let test_dir = TestDir::new();
    for (alloc, words) in [
        ("cachin", "no allocator is called 'cachin'; did you mean 'caching'? There are naive, "),
        (
            "caching:max_split=32M",
            "caching: there is no setting 'max_split'; did you mean 'max_split_size'? There are ",
        ),
        ("caching:max_split_size=1M", "'max_split_size' takes bytes, such as 512M, at least 20M, or none; found '1M'"),
        ("caching:garbage_collection_threshold=-0.5", "takes a number from 0 to 1; found '-0.5'"),
        ("caching:garbage_collection_threshold=nan", "takes a number from 0 to 1; found 'nan'"),
        ("caching:memory_limit=1G,memory_limit=1G", "caching: 'memory_limit' is given twice"),
        ("caching,naive", "write NAME or NAME:key=value,key=value"),
        ("naive:x=1", "naive: there is no setting 'x'; there are none"),
    ] {
        let output = test_dir.iris(&["--alloc", alloc]);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:#?}");
        let first = output.stderr.lines().next().unwrap_or_default();
        assert!(first.contains(words), "{words}: {first}");
    }
    // Each message has its own fix, once, and no other fix.
    let text = test_dir.write("no-plan", "plain text");
    for (alloc, line) in [
        (
            "lab:source=expandable,stream=steal",
            "--alloc lab: source=expandable requires stream=own, join=at-free and grow=torch or grow=exact; write source=plain",
        ),
        (
            "plan:file=nope",
            "--alloc plan: cannot use nope: No such file or directory (os error 2); `vramlab plan HISTORY --out FILE` \
             writes plans",
        ),
        (
            &format!("plan:file={text}"),
            &format!(
                "--alloc plan: cannot use {text}: it is not a plan (expected value at line 1 column 1); `vramlab plan HISTORY \
                 --out FILE` writes plans"
            ),
        ),
    ] {
        let output = test_dir.iris(&["--alloc", alloc]);
        output.refused(&[]);
        assert_eq!(output.stderr.trim_end(), format!("error: {line}"));
    }
    let both = ["--alloc", "caching:memory_limit=1G", "--memory-limit", "2G"];
    test_dir
        .iris(&both)
        .refused(&["--memory-limit is given, and --alloc caching:memory_limit=1G has a limit of 1 GiB too"]);
    assert!(!test_dir.at("runs").exists(), "nothing ran, so there is nothing to record");
}

#[test]
fn arithmetic_that_does_not_go_together_is_refused() {
    let test_dir = TestDir::new();
    for (arguments, words) in [
        ("--weights half", "--weights half needs --dtype bf16 or f16, found f32"),
        ("--weights half --dtype tf32", "--weights half needs --dtype bf16 or f16, found tf32"),
        ("--gemm tiled --dtype f16", "--gemm tiled is for --dtype f32; f16 needs tensor"),
        ("--gemm tensor", "--gemm tensor needs --dtype tf32, bf16 or f16; f32 needs tiled"),
        ("--gemm tensor --dtype f32 --fuse update", "--gemm tensor needs --dtype tf32, bf16 or f16; f32 needs tiled"),
        ("--loss-scale 0", "--loss-scale must be a positive number, found 0"),
        ("--loss-scale -2 --dtype f16", "--loss-scale must be a positive number, found -2"),
        ("--loss-scale nan", "--loss-scale must be a positive number"),
        ("--loss-scale 1e-40", "--loss-scale 1e-40 is too small: updates divide --lr 0.1 by it"),
        ("--loss-scale inf --dtype bf16", "--loss-scale must be a positive number"),
    ] {
        test_dir.iris(&arguments.split(' ').collect::<Vec<_>>()).refused(&[words]);
    }
    assert!(!test_dir.at("runs").exists(), "nothing ran, so there is nothing to record");
}

#[test]
fn words_that_mean_nothing_are_refused() {
    let test_dir = TestDir::new();
    for arguments in [
        ["--device", "nonsense"],
        ["--device", "cuda:x"],
        ["--device", "sim:"],
        ["--alloc", "nonsense"],
        ["--dataset", "nonsense"],
        ["--alloc", "stream-ordered:release_threshold=nonsense"],
        ["--alloc", "stream-ordered:release_threshold=99999999999T"],
        ["--memory-limit", "1e400"],
        ["--memory-limit", "lots"],
        ["--alloc", "stream-ordered:reuse_allow_opportunistic=maybe"],
        ["--sync", "nonsense"],
        ["--loader", "nonsense"],
        ["--init", "nonsense"],
        ["--gemm", "nonsense"],
        ["--dtype", "f64"],
        ["--weights", "nonsense"],
        ["--fuse", "everything"],
        ["--loss-scale", "much"],
        ["--nvtx", "nonsense"],
        ["--nvtx-memory", "nonsense"],
        ["--export", "nonsense"],
        ["--latency", "nonsense"],
        ["--hidden", "4294967296"],
        ["--seed", "1.5"],
        ["--lr", "fast"],
        ["--nonsense", "1"],
    ] {
        test_dir.iris(&arguments).unparsable(&[arguments[0]]);
    }
    test_dir.run(&["nonsense"]).unparsable(&["nonsense"]);
}

#[test]
#[cfg(target_os = "linux")]
fn sizes_beyond_reason_take_no_memory() {
    let test_dir = TestDir::new();
    let base = ["--device", "sim", "--dataset", "iris"];
    for (arguments, words) in [
        (&["--hidden", "4000000000"][..], "lower --hidden or --batch"),
        (&["--hidden", "4294967295", "--layers", "2"], "lower --hidden or --batch"),
        (&["--batch", "4000000000"], "lower --hidden or --batch"),
        (&["--layers", "4000000000"], "--layers must be at most"),
        (&["--hidden", "46000", "--layers", "65536"], "more than the memory of"),
    ] {
        test_dir.run_within(2 << 20, &[&base[..], arguments].concat()).refused(&[words]);
    }
    // A batch of more rows than there are is the whole set.
    let json =
        test_dir.run(&[&base[..], &["--batch", "8000000", "--hidden", "16", "--epochs", "1", "--json"]].concat());
    assert_eq!(json.ok().json()["epochs"][0]["steps"], 1);
}

#[test]
fn places_that_cannot_be_written_are_refused() {
    let test_dir = TestDir::new();
    let file = test_dir.write("file", "");
    test_dir.iris(&["--out", &format!("{file}/record")]).refused(&["cannot write a run record", "--out"]);
    test_dir.iris(&["--out", &file]).refused(&["exists already", "--out"]);
    test_dir.write("record/mine", "");
    test_dir.iris(&["--out", "record"]).refused(&["record exists already", "--out"]);
    assert_eq!(std::fs::read_dir(test_dir.at("record")).unwrap().count(), 1, "what was there stays as it was");
    // The default place.
    test_dir.write("runs", "");
    test_dir.iris(&[]).refused(&["cannot write a run record to runs"]);
}

#[test]
fn profiles_that_cannot_work_are_refused() {
    let test_dir = TestDir::new();
    let good = serde_json::to_value(Profile::h200()).unwrap();
    let with = |pointer: &str, key: &str, value: Value| {
        let mut changed = good.clone();
        changed.pointer_mut(pointer).unwrap()[key] = value;
        changed.to_string()
    };
    let refused = |name: &str, text: &str, words: &[&str]| {
        let path = test_dir.write(name, text);
        test_dir.iris(&["--device", &format!("sim:{path}")]).refused(&[&[name], words].concat());
    };
    refused("broken.json", "{ \"name\": ", &["not a device profile", "line 1"]);
    refused("empty.json", "", &["not a device profile"]);
    refused("unknown.json", &with("", "colour", "green".into()), &["unknown field", "colour"]);
    refused("nested.json", &with("/queues", "colour", "green".into()), &["unknown field", "colour"]);
    refused("depth.json", &with("/queues", "depth", 0.into()), &["queues.depth"]);
    refused("type.json", &with("/queues", "depth", "deep".into()), &["not a device profile"]);
    refused("wave.json", &with("/default_kernel", "blocks_per_wave", 0.into()), &["default_kernel"]);
    test_dir.iris(&["--device", "sim:missing.json"]).refused(&["missing.json", "cannot read"]);
    test_dir.iris(&["--device", "sim:."]).refused(&["cannot read"]);
    #[cfg(unix)]
    test_dir.iris(&["--device", "sim:/dev/zero"]).refused(&["/dev/zero", "cannot read", "it is a device"]);
    std::fs::write(test_dir.at("bytes.json"), [0xff, 0xfe, 0]).unwrap();
    test_dir.iris(&["--device", "sim:bytes.json"]).refused(&["bytes.json", "cannot read"]);

    let whole = test_dir.write("whole.json", good.to_string());
    let json = test_dir.iris(&["--device", &format!("sim:{whole}"), "--json"]).ok().json();
    assert_eq!(json["settings"]["device"], format!("sim:{whole}"));

    // A device without pools cannot run the allocator that needs them; the others can.
    let mut without = good.clone();
    without.as_object_mut().unwrap().remove("pool");
    let without = format!("sim:{}", test_dir.write("without.json", without.to_string()));
    test_dir.iris(&["--device", &without, "--alloc", "stream-ordered"]).refused(&["stream-ordered", "does not have"]);
    test_dir.iris(&["--device", &without, "--alloc", "naive"]).ok();
}

#[test]
fn a_gpu_that_is_not_there_is_bad_input() {
    let test_dir = TestDir::new();
    // The driver hides any GPU.
    let run = |arguments: &[&str]| {
        let mut command = test_dir.process(arguments);
        command.env("CUDA_VISIBLE_DEVICES", "-1");
        ProgramOutput::of(Command::from_std(command))
    };
    run(&["--device", "cuda", "--dataset", "iris"]).refused(&[]);
    run(&["--device", "cuda:99", "--dataset", "iris"]).refused(&[]);
    // `auto` reports the reason for the simulated device.
    let output = run(&["--dataset", "iris", "--epochs", "1"]).ok();
    let device = output.stderr.lines().next().unwrap();
    assert!(device.contains("(simulated)") && device.ends_with(')') && device.matches('(').count() > 1, "{device}");
}

#[test]
fn small_idx_files_are_trained_on() {
    let test_dir = TestDir::new();
    mnist(&test_dir, "data");
    let arguments = ["--device", "sim", "--dataset", "mnist", "--data-dir", "data", "--epochs", "1", "--json"];
    let output = test_dir.run(&arguments).ok();
    assert!(output.stderr.contains("note     data does not hold the standard MNIST"), "{output:#?}");
    let json = output.json();
    assert_eq!((&json["dataset"]["train_rows"], &json["dataset"]["features"]), (&20.into(), &12.into()));
    assert_eq!(json["dataset"]["files"].as_array().unwrap().len(), 4);
    // The variable names the same place.
    let mut command = test_dir.process(&arguments[..4]);
    let output = ProgramOutput::of(Command::from_std({
        command.env("MNIST_DIR", test_dir.at("data")).args(["--epochs", "1"]);
        command
    }));
    assert!(output.ok().stderr.contains("(MNIST_DIR)"));
}

#[test]
fn broken_data_is_refused() {
    let test_dir = TestDir::new();
    let refused = |directory: &str, words: &[&str]| {
        for dataset in ["mnist", "auto"] {
            let arguments = ["--device", "sim", "--dataset", dataset, "--data-dir", directory];
            test_dir.run(&arguments).refused(&[&[directory], words].concat());
        }
    };
    refused("nowhere", &["--data-dir", "not a directory"]);
    std::fs::create_dir(test_dir.at("empty")).unwrap();
    refused("empty", &["has no train-images-idx3-ubyte"]);

    let damaged = |directory: &str, file: usize, change: &dyn Fn(&mut Vec<u8>)| {
        mnist(&test_dir, directory);
        let path = test_dir.at(directory).join(FILES[file]);
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
    };
    damaged("cut", 0, &|bytes| bytes.truncate(100));
    refused("cut", &[FILES[0], "ends after 100 of 256 bytes"]);
    damaged("none", 3, &|bytes| bytes.clear());
    refused("none", &[FILES[3], "ends after 0"]);
    damaged("magic", 2, &|bytes| bytes[3] = 7);
    refused("magic", &[FILES[2], "magic number"]);
    damaged("swapped", 0, &|bytes| bytes[3] = 1);
    refused("swapped", &[FILES[0], "labels file"]);
    damaged("long", 1, &|bytes| bytes.push(0));
    refused("long", &[FILES[1], "more bytes"]);
    damaged("fewer", 1, &|bytes| {
        bytes[7] = 19;
        bytes.pop();
    });
    refused("fewer", &["20 images", "19 labels"]);
    damaged("label", 1, &|bytes| bytes[8] = 10);
    refused("label", &[FILES[1], "label is 10"]);
    damaged("vast", 0, &|bytes| bytes[4..16].fill(0xff));
    refused("vast", &[FILES[0], "an item has"]);
    damaged("many", 0, &|bytes| bytes[4..8].fill(0xff));
    refused("many", &[FILES[0], "header announces"]);

    // 64 MiB of zeros behind an honest header, in a few dozen KiB.
    damaged("bomb", 0, &|bytes| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes).unwrap();
        for _ in 0..64 {
            encoder.write_all(&vec![0; 1 << 20]).unwrap();
        }
        *bytes = encoder.finish().unwrap();
        assert!(bytes.len() < 100_000);
    });
    refused("bomb", &[FILES[0], "more bytes than the 256"]);
    damaged("torn", 0, &|bytes| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        *bytes = encoder.finish().unwrap();
        bytes.truncate(bytes.len() - 20);
    });
    refused("torn", &[FILES[0]]);
    assert!(!test_dir.at("runs").exists());
}

#[test]
fn offline_never_waits_for_a_network() {
    let test_dir = TestDir::new();
    test_dir.run(&["--device", "sim", "--dataset", "mnist", "--offline"]).refused(&["offline", "--data-dir"]);
    let output = test_dir.run(&["--device", "sim", "--offline", "--steps", "1"]).ok();
    assert!(output.stderr.contains("note     generated digits stand in for MNIST"), "{output:#?}");
}
