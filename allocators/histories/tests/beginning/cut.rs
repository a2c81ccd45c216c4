//! Recordings to truncate.

use crate::facts::{facts, limit};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use vramlab_histories::formats::{Action, Event, ReadOptions, Segment, read};
use vramlab_histories::replay::{History, HistoryBuilder, recorded_settings};
use vramlab_policies::backends::CachingSettings;

/// A complete recording.
pub(crate) struct Complete {
    pub(crate) events: Vec<Event>,
    /// Segments at its end.
    pub(crate) segments: Vec<Segment>,
    pub(crate) settings: CachingSettings,
}

impl Complete {
    /// The recording without its first `skip` events.
    pub(crate) fn cut(&self, skip: usize) -> History {
        let mut builder = HistoryBuilder::new(None);
        for event in &self.events[skip..] {
            builder.push(event).unwrap();
        }
        builder.ends_with(&self.segments).unwrap();
        builder.finish(&self.settings).unwrap()
    }

    /// Peak reserved bytes from there on.
    pub(crate) fn peak(&self, skip: usize) -> u64 {
        let (mut reserved, mut peak) = (0, 0);
        for (at, event) in self.events.iter().enumerate() {
            if at >= skip {
                peak = reserved.max(peak);
            }
            match event.action {
                Action::SegmentAlloc => reserved += event.bytes,
                Action::SegmentFree => reserved -= event.bytes,
                _ => {}
            }
        }
        reserved.max(peak)
    }

    /// Live blocks there, and their requested bytes.
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

/// The repository's recordings, and those that may be next to the checkout.
pub(crate) fn recordings() -> Vec<(String, Complete)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut recordings = Vec::new();
    for folder in ["experiments/histories", "../shared/traces", "../shared/traces/configs"] {
        let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
            eprintln!("without {folder}, which is not there");
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        recordings.extend(paths.iter().filter_map(|path| Some((path.display().to_string(), load(path)?))));
    }
    assert!(recordings.len() >= 4, "the repository has four recordings");
    recordings
}

/// Programs that capture graphs in their first third.
pub(crate) fn graphs() -> Vec<(String, Complete)> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let names = ["graph_step", "graphed_callables"].map(|name| format!("{name}.default"));
    names.into_iter().map(|name| (name.clone(), complete(&fixtures.join(format!("{name}.pickle.xz"))))).collect()
}

fn load(path: &Path) -> Option<Complete> {
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    let stem = name.strip_suffix(".pickle.xz")?;
    // Logs of expandable segments and, truncated anywhere, of CUDA graphs' private pools are not complete enough.
    if ["expandable", "graph_step", "graphed_callables"].iter().any(|word| stem.contains(word)) {
        return None;
    }
    Some(complete(path))
}

fn complete(path: &Path) -> Complete {
    let facts = facts(path).unwrap();
    let limit = limit(&facts);
    // A rank of several has the GPUs of all.
    let gpu = facts["rank"].as_u64().map(|rank| u16::try_from(rank).unwrap());
    let mut events = Vec::new();
    let mut keep = |event: Event| {
        events.extend(Some(event).filter(|event| gpu.is_none_or(|gpu| gpu == event.device)));
        Ok(())
    };
    let summary = read(path, &ReadOptions::default(), &mut keep).unwrap();
    let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
    settings.memory_limit = limit;
    Complete { events, segments: summary.segments, settings }
}
