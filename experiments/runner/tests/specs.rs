//! Specs as a user writes them: refused ones, and the repository's own.

use crate::common::{SMALL, TestDir, run};

#[test]
fn what_cannot_work_is_refused_before_anything_runs() {
    let test_dir = TestDir::new();
    for (from, to, words) in [
        // Faults in the file.
        ("question", "qestion", ["small.toml:3", "unknown field `qestion`"]),
        ("repeats = 2", "repeats = 0", ["small.toml:4", "repeats lie between"]),
        ("repeats = 2", "repeats = ", ["small.toml:4", "small.toml"]),
        ("\"small\"", "\"other\"", ["small.toml:2", "the name is 'other' and the file is 'small'"]),
        ("\"cuda\", ", "\"tpu\", ", ["small.toml:5", "unknown variant `tpu`"]),
        ("steps.csv", "stops.csv", ["small.toml:6", "no run writes 'stops.csv'"]),
        ("\"summary.json\", ", "", ["small.toml:6", "'summary.json' is missing"]),
        ("question = \"Is it there?\"", "question = \"\"", ["small.toml:3", "write it down"]),
        // Faults in the options.
        ("hidden = ", "hiden = ", ["small.toml:15", "a similar argument exists: '--hidden'"]),
        ("\"cuda\", ", "\"null\", ", ["small.toml:5", "name at least one of \"cuda\" and \"sim\""]),
        ("[5, 9]", "[5, 0]", ["small.toml:15", "--hidden must be at least 1"]),
        ("[5, 9]", "[5, 40000000]", ["small.toml:1", "more than 2^31 values: lower --hidden"]),
        ("[5, 9]", "[5, \"nine\"]", ["small.toml:15", "invalid value 'nine'"]),
        ("[5, 9]", "[5, 5]", ["small.toml:15", "has the value 5 twice"]),
        ("[5, 9]", "[]", ["small.toml:15", "has no value"]),
        ("[5, 9]", "5", ["small.toml:15", "an axis is a list"]),
        ("\"naive\", ", "\"naiv\", ", ["small.toml:14", "invalid value 'naiv'"]),
        ("layers = 2", "layers = [2]", ["small.toml:10", "an option has one value"]),
        ("layers = 2", "hidden = 2", ["small.toml:15", "'hidden' is an option and an axis"]),
        ("layers = 2", "out = \"here\"", ["small.toml:10", "the runner sets --out itself"]),
        (
            "layers = 2",
            "garbage-collection-threshold = 0.5",
            ["small.toml:1", "garbage_collection_threshold is a fraction of memory_limit, which is not given"],
        ),
        (
            "layers = 2",
            "garbage_collection_threshold = 2",
            ["small.toml:10", "'garbage_collection_threshold' takes a number from 0 to 1; found '2'"],
        ),
        (
            "layers = 2",
            "release_threshold = 0",
            ["small.toml:10", "no allocator of the arm has a setting 'release_threshold'"],
        ),
        (
            "[\"naive\", ",
            "[\"stream-ordered:release_threshold=x\", ",
            ["small.toml:14", "'release_threshold' takes bytes"],
        ),
        ("layers = 2", "trace = 1", ["small.toml:10", "write trace = true"]),
        ("layers = 2", "weights = \"half\"", ["small.toml:1:", "--weights half needs --dtype bf16 or f16, found f32"]),
        ("layers = 2", "weights = \"hlaf\"", ["small.toml:10", "invalid value 'hlaf'"]),
        // Options of the runner, and words that a command line would accept as one of them.
        ("layers = 2", "\"save-start\" = \"/x\"", ["small.toml:10", "the runner sets --save-start itself"]),
        ("layers = 2", "\"save-start=/x\" = 2", ["small.toml:10", "'save-start=/x' is not the name of an option"]),
        ("layers = 2", "\"data-dir=\" = \"/x\"", ["small.toml:10", "'data-dir=' is not the name of an option"]),
        ("layers = 2", "\"--out\" = \"/x\"", ["small.toml:10", "'--out' is not the name of an option"]),
        ("layers = 2", "\"-o\" = \"/x\"", ["small.toml:10", "'-o' is not the name of an option"]),
        ("layers = 2", "o = \"/x\"", ["small.toml:10", "unexpected argument '--o'"]),
        ("layers = 2", "sav = \"/x\"", ["small.toml:10", "unexpected argument '--sav'"]),
        ("layers = 2", "save_start = \"/x\"", ["small.toml:10", "'save_start' is not the name of an option"]),
        ("layers = 2", "OUT = \"/x\"", ["small.toml:10", "'OUT' is not the name of an option"]),
        ("layers = 2", "\"\" = \"/x\"", ["small.toml:10", "'' is not the name of an option"]),
        ("layers = 2", "\"layers 2\" = 2", ["small.toml:10", "'layers 2' is not the name of an option"]),
        ("layers = 2", "\"layers\\u0000\" = 2", ["small.toml:10", "is not the name of an option"]),
        ("repeats = 2", "sim.options = 3", ["small.toml:4", "expected a table of options"]),
        ("layers = 2", "layers = \"--out=/x\"", ["small.toml:", "invalid value '--out=/x'"]),
        ("layers = 2", "dataset = \"iris\\u0000\"", ["small.toml:", "small.toml"]),
    ] {
        assert!(SMALL.contains(from), "{from}");
        test_dir.write("small.toml", SMALL.replacen(from, to, 1));
        run(&test_dir, &[]).refused(2, &words[1..]);
        let stderr = run(&test_dir, &["--dry-run"]).stderr;
        assert!(stderr.contains(words[0]), "{} is missing: {stderr}", words[0]);
        assert!(!test_dir.at("out").exists(), "{to}");
    }
    test_dir.write("small.toml", SMALL);
    test_dir.run(&["run", "missing.toml"]).refused(2, &["cannot read missing.toml"]);
    test_dir.run(&["run", "no-such-spec"]).refused(2, &["there is no spec 'no-such-spec'", "width"]);
    test_dir.run(&["run", "widht"]).refused(2, &["there is no spec 'widht'", "; did you mean 'width'? There are "]);
    for arguments in [&["--shard", "3/2"][..], &["--device", "tpu"], &["--nonsense"]] {
        let ran = test_dir.run(&[&["run", "small.toml"], arguments].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:#?}");
    }
    // The second of two arms of one name, although the question contains it too.
    let spec = "name = \"small\"\nquestion = \"Is \\\"b\\\" it?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"b\"\n\
                [[arms]]\nname = \"a\"\n[[arms]]\nname = \"b\"\n";
    test_dir.write("small.toml", spec);
    run(&test_dir, &[]).refused(2, &["small.toml:9", "the arm's name 'b' must be its own"]);
    // A directory without MNIST, by its path.
    std::fs::create_dir(test_dir.at("elsewhere")).unwrap();
    test_dir.write("small.toml", SMALL);
    run(&test_dir, &["--data-dir", "elsewhere"]).refused(2, &["/elsewhere has no train-images-idx3-ubyte"]);
    // Missing recordings.
    let spec = "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"replay\"\n\
                [arms.options]\nhistory = \"gone.pickle\"\n";
    test_dir.write("small.toml", spec);
    run(&test_dir, &["--histories", "."]).refused(2, &["small.toml:8", "gone.pickle", "--histories"]);
    test_dir.run(&["run", "small.toml", "--device", "cuda"]).refused(2, &["small is not for cuda", "--device sim"]);
}

#[test]
fn what_a_spec_names_lies_in_the_folder_of_the_histories() {
    let test_dir = TestDir::new();
    test_dir.write("secret", "{}");
    std::fs::create_dir(test_dir.at("histories")).unwrap();
    test_dir.write("histories/--json", "");
    let absolute = test_dir.at("secret").to_str().unwrap().to_owned();
    for name in ["../secret", absolute.as_str(), "--json", "-h", "--out=/x", ".", ""] {
        let spec = format!(
            "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"replay\"\n\
             [arms.options]\nhistory = \"{name}\"\n"
        );
        test_dir.write("small.toml", spec);
        run(&test_dir, &["--histories", "histories"]).refused(2, &["small.toml:8", "in the directory of recordings"]);
    }
    // The directory from which `bench` starts programs is not an option either.
    let spec = "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"bench\"\n\
                [arms.options]\nbaselines = true\nbaselines-dir = \".\"\n";
    test_dir.write("small.toml", spec);
    run(&test_dir, &[]).refused(2, &["small.toml:9", "the runner sets --baselines-dir itself"]);
}

#[test]
fn a_matrix_that_is_too_large_is_refused_before_it_is_built() {
    let test_dir = TestDir::new();
    let spec = |axes: &str, arms: &str| {
        format!("name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\n[matrix]\n{axes}{arms}")
    };
    // 64 axes of two values are 2^64 cells, which overflows a 64-bit product to 0; the keys are not checked before.
    let wraps: String = (0..64).map(|axis| format!("axis-{axis} = [1, 2]\n")).collect();
    // 17 * 600 runs; each variant by itself is far below the limit.
    let seeds = format!("seed = {:?}\n", (0..600).collect::<Vec<u32>>());
    let arms: String = (0..17).map(|arm| format!("[[arms]]\nname = \"a{arm}\"\n")).collect();
    let repeated = "[sim]\nrepeats = 1000\n";
    for text in [spec(&wraps, ""), spec(&seeds, &arms), spec(&seeds, repeated)] {
        test_dir.write("small.toml", text);
        run(&test_dir, &[]).refused(2, &["small.toml: more than 10000 runs on sim; shorten the matrix"]);
    }
    test_dir.write("small.toml", spec("seed = [1]\n", "[[arms]]\nname = \"a\"\n[arms.sim]\nrepeats = 1001\n"));
    run(&test_dir, &[]).refused(2, &["small.toml:", "repeats lie between 1 and 1000"]);
    // An endless file is not read to its end.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("/dev/zero", test_dir.at("endless.toml")).unwrap();
        test_dir
            .run(&["run", "endless.toml"])
            .refused(2, &["cannot read endless.toml", "it is a device; name a regular file"]);
    }
}

#[test]
fn the_specs_of_the_study_are_listed_and_can_be_planned() {
    let test_dir = TestDir::new();
    let rows = test_dir.run(&["list", "--json"]).rows();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    for name in [
        "where-time-goes",
        "when-allocations-stop",
        "caching-vs-stream-ordered",
        "release-threshold",
        "reuse-policies",
        "synchronise",
        "loader",
        "initialisation",
        "loss-against-pytorch",
        "width",
        "memory",
        "iris",
        "pytorch-histories",
        "capacity",
        "pytorch-loaders",
        "latency",
        "fidelity",
        "agreement-fit",
        "agreement",
        "agreement-again",
        "addresses",
        "fast-training",
        "graph-allocators",
        "fusion-load",
        "streams",
        "full-batch",
        "half-losses",
        "family",
        "rules",
        "stories",
        "inside-histories",
        "inside-start",
        "inside-calls",
        "inside-steps",
        "inside-limits",
        "inside-memory",
        "inside-recording",
        "expandable-steps",
    ] {
        assert!(names.contains(&name), "{name} is missing: {names:?}");
    }
    let text = test_dir.run(&["list"]).ok().stdout;
    assert!(text.contains("sim runs") && text.contains("where-time-goes"), "{text}");
    std::fs::create_dir_all(test_dir.at("histories/ranks")).unwrap();
    for history in [
        "mlp",
        "gpt2",
        "resnet50",
        "streams",
        "ranks/gpt2_ddp.rank0",
        "ranks/gpt2_fsdp1.rank0",
        "ranks/gpt2_fsdp1.rank1",
    ] {
        std::fs::write(test_dir.at("histories").join(format!("{history}.pickle.xz")), "").unwrap();
    }
    for row in &rows {
        assert!(row["question"].as_str().unwrap().ends_with('?'), "{row}");
        for device in row["devices"].as_array().unwrap() {
            let device = device.as_str().unwrap();
            let name = row["name"].as_str().unwrap();
            let plan =
                test_dir.run(&["run", name, "--device", device, "--dry-run", "--histories", "histories"]).ok().stdout;
            let runs = row[format!("runs_{device}")].as_u64().unwrap();
            assert_eq!(plan.lines().filter(|line| line.contains(" to do ")).count() as u64, runs, "{plan}");
        }
    }
}
