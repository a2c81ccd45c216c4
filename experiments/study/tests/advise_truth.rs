//! What `vramlab advise` predicts, held to what PyTorch really reserved.

#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The table that is kept.
const TABLE: &str = "results/advise-truth.csv";

#[derive(Clone, Debug, PartialEq)]
struct Pair {
    program: String,
    limit: String,
    /// Whether frees waited for other streams, so that timing counts.
    waits: bool,
    real: u64,
    off: Option<f64>,
    out_of_memory: (bool, bool),
    rank: usize,
}

/// The programs that use private pools of CUDA graphs, of which a history does not tell enough.
const GRAPHS: [&str; 2] = ["graph_step", "graphed_callables"];

fn pairs(text: &str) -> Vec<Pair> {
    let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize();
    let rows: Vec<BTreeMap<String, String>> = rows.collect::<Result<_, _>>().unwrap();
    let pair = |row: &BTreeMap<String, String>| Pair {
        program: row["program"].clone(),
        limit: row["limit_bytes"].clone(),
        waits: row["deferred_frees"] != "0",
        real: row["real_peak_reserved_bytes"].parse().unwrap(),
        off: row["off_percent"].parse().ok(),
        out_of_memory: (row["real_out_of_memory"] == "true", row["predicted_out_of_memory"] == "true"),
        rank: row["rank"].parse().unwrap(),
    };
    let graphs = |pair: &Pair| GRAPHS.iter().any(|graphs| pair.program.starts_with(graphs));
    rows.iter().map(pair).filter(|pair| !graphs(pair)).collect()
}

fn hold(pairs: &[Pair]) {
    let off = |waits: bool| pairs.iter().filter(move |pair| pair.waits == waits).filter_map(|pair| pair.off);
    let (near, all) = (off(false).filter(|off| off.abs() <= 1.0).count(), off(false).count());
    assert!(near * 10 >= all * 9 && all > 20, "{near} of {all} within 1 %");
    assert!(off(true).all(|off| off.abs() <= 5.0), "{:?}", off(true).collect::<Vec<_>>());
    for pair in pairs {
        assert_eq!(pair.out_of_memory.0, pair.out_of_memory.1, "{pair:?}");
    }
    let mut groups: BTreeMap<(String, String), Vec<&Pair>> = BTreeMap::new();
    for pair in pairs {
        groups.entry((pair.program.clone(), pair.limit.clone())).or_default().push(pair);
    }
    for (group, pairs) in groups {
        let best = pairs.iter().filter(|pair| !pair.out_of_memory.0).map(|pair| pair.real).min().unwrap();
        let first = pairs.iter().min_by_key(|pair| pair.rank).unwrap();
        assert!(first.real as f64 <= best as f64 * 1.01, "{group:?}: {} and {best}", first.real);
    }
}

#[test]
fn the_kept_table_is_within_the_bars() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(TABLE);
    hold(&pairs(&std::fs::read_to_string(path).unwrap()));
}

/// Histories that may lie beside the checkout; their table is the kept one.
#[test]
fn the_table_is_made_again_from_the_histories() {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folders: Vec<PathBuf> =
        [beside.clone(), beside.join("configs")].into_iter().filter(|path| path.is_dir()).collect();
    if folders.len() < 2 {
        eprintln!("skipped: {} is not there", beside.display());
        return;
    }
    let place = Place::new();
    let mut arguments = vec!["advise-truth", "-o", "made.csv"];
    arguments.extend(folders.iter().map(|folder| folder.to_str().unwrap()));
    place.run(&arguments).ok();
    let made = std::fs::read_to_string(place.at("made.csv")).unwrap();
    hold(&pairs(&made));
    let kept = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(TABLE)).unwrap();
    let again = "make it again: experiments advise-truth FOLDER... -o experiments/results/advise-truth.csv";
    assert_eq!(pairs(&made), pairs(&kept), "{again}");
}

#[test]
fn folders_without_pairs_are_refused_with_the_mend() {
    let place = Place::new();
    place.run(&["advise-truth", "nowhere"]).refused(2, &["nowhere: No such file", "; name a folder with histories"]);
    for folder in ["empty", "alone"] {
        std::fs::create_dir(place.at(folder)).unwrap();
    }
    // Statistics alone are no pair.
    place.write("a.default.json", r#"{"stats": {"reserved_bytes.all.peak": 1}}"#);
    std::fs::rename(place.at("a.default.json"), place.at("alone/a.default.json")).unwrap();
    for folder in ["empty", "alone"] {
        let words = [folder, "(PROGRAM.pickle.xz)", "(PROGRAM.json)", "record_settings.py records both"];
        place.run(&["advise-truth", folder]).refused(2, &words);
    }
    place.write("b.json", "torn");
    place.run(&["advise-truth", "."]).refused(2, &["b.json: it is no JSON", "record it anew"]);
}
