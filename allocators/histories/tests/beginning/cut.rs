//! Histories to be cut.

use crate::facts::{facts, limit};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use vramlab_histories::formats::{Action, Event, ReadOptions, Segment, read};
use vramlab_histories::replay::{History, HistoryBuilder, recorded_settings};
use vramlab_policies::backends::CachingSettings;

/// A whole history.
pub(crate) struct Whole {
    pub(crate) events: Vec<Event>,
    /// What was held at its end.
    pub(crate) segments: Vec<Segment>,
    pub(crate) settings: CachingSettings,
}

impl Whole {
    /// The history without its first `skip` events.
    pub(crate) fn cut(&self, skip: usize) -> History {
        let mut builder = HistoryBuilder::new(None);
        for event in &self.events[skip..] {
            builder.push(event).unwrap();
        }
        builder.ends_with(&self.segments).unwrap();
        builder.finish(&self.settings).unwrap()
    }

    /// The highest number of bytes reserved from there on.
    pub(crate) fn peak(&self, skip: usize) -> u64 {
        let (mut held, mut peak) = (0, 0);
        for (at, event) in self.events.iter().enumerate() {
            if at >= skip {
                peak = held.max(peak);
            }
            match event.action {
                Action::SegmentAlloc => held += event.bytes,
                Action::SegmentFree => held -= event.bytes,
                _ => {}
            }
        }
        held.max(peak)
    }

    /// Blocks that are live there, and the bytes asked for in them.
    pub(crate) fn live(&self, skip: usize) -> (u64, u64) {
        let mut live = HashMap::new();
        for event in &self.events[..skip] {
            match event.action {
                Action::Alloc => drop(live.insert(event.addr, event.bytes)),
                Action::FreeRequested => drop(live.remove(&event.addr)),
                _ => {}
            }
        }
        (live.len() as u64, live.values().sum())
    }
}

/// The repository's histories, and those that may lie beside the checkout.
pub(crate) fn recordings() -> Vec<(String, Whole)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    for folder in ["experiments/histories", "../shared/traces", "../shared/traces/configs"] {
        let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
            eprintln!("without {folder}, which is not there");
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        found.extend(paths.iter().filter_map(|path| Some((path.display().to_string(), load(path)?))));
    }
    assert!(found.len() >= 4, "the repository has four recordings");
    found
}

/// Programs that capture graphs in their first third.
pub(crate) fn graphs() -> Vec<(String, Whole)> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let names = ["graph_step", "graphed_callables"].map(|name| format!("{name}.default"));
    names.into_iter().map(|name| (name.clone(), whole(&fixtures.join(format!("{name}.pickle.xz"))))).collect()
}

fn load(path: &Path) -> Option<Whole> {
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    let stem = name.strip_suffix(".pickle.xz")?;
    // Of expandable segments and, cut anywhere, of the private pools of CUDA graphs a log does not tell enough.
    if ["expandable", "graph_step", "graphed_callables"].iter().any(|word| stem.contains(word)) {
        return None;
    }
    Some(whole(path))
}

fn whole(path: &Path) -> Whole {
    let facts = facts(path).unwrap();
    let limit = limit(&facts);
    // A rank of several sees the GPUs of all.
    let gpu = facts["rank"].as_u64().map(|rank| u16::try_from(rank).unwrap());
    let mut events = Vec::new();
    let mut keep = |event: Event| {
        events.extend(Some(event).filter(|event| gpu.is_none_or(|gpu| gpu == event.device)));
        Ok(())
    };
    let summary = read(path, &ReadOptions::default(), &mut keep).unwrap();
    let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
    settings.memory_limit = limit;
    Whole { events, segments: summary.segments, settings }
}
