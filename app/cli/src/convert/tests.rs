//! Converted files can be replayed: mutated recordings in every format.

#[path = "../../../../allocators/histories/tests/common/mutate.rs"]
mod mutate;

use super::*;
use crate::history::load;
use mutate::{mutations, seeds};
use tempfile::TempDir;
use vramlab::histories::formats::Event;

const READ_BACK: [Export; 4] = [Export::Snapshot, Export::SnapshotJson, Export::Rmm, Export::Minimalloc];

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Counts of the results.
#[derive(Debug, Default)]
struct Outcomes {
    converted: u32,
    refused: u32,
    of_several_gpus: u32,
    /// Refused because events contradict each other.
    contradictions: u32,
}

impl Outcomes {
    /// Converts into every format that can be read back, and loads the result for a replay.
    fn convert(&mut self, directory: &Path, bytes: &[u8]) {
        for to in READ_BACK {
            let (from, out) = ("seed".into(), directory.join(to.file_name()));
            let args = ConvertArgs { from, to, out, gpu: None, read: ReadArgs::default(), force: true };
            let mut tally = Tally::default();
            let out = begin(&args).unwrap();
            match write(&args, out, bytes, &mut tally) {
                Err(error) => {
                    let text = format!("{error:#}");
                    assert!(!text.contains('\n'), "{text}");
                    assert!(std::fs::read_dir(directory).unwrap().next().is_none(), "unfinished file: {text}");
                    self.refused += 1;
                    self.contradictions += u32::from(text.contains(": event ") && !text.contains("' "));
                }
                // A snapshot without events cannot be replayed.
                Ok(_) if tally.events() == 0 => {}
                Ok(summary) => {
                    let gpus: Vec<u16> =
                        (0..).zip(&summary.events).filter(|(_, events)| **events > 0).map(|(gpu, _)| gpu).collect();
                    for gpu in &gpus {
                        let gpu = (gpus.len() > 1).then_some(*gpu);
                        if let Err(error) = load(&args.out, gpu, None, &args.read) {
                            let copy = std::env::temp_dir().join("refused-by-replay");
                            std::fs::write(&copy, bytes).unwrap();
                            panic!("{} of {}: {error:#}", to.name(), copy.display());
                        }
                    }
                    self.converted += 1;
                    self.of_several_gpus += u32::from(gpus.len() > 1);
                }
            }
            let _ = std::fs::remove_file(&args.out);
        }
    }
}

#[test]
fn mutated_files_can_be_replayed_after_conversion() {
    let directory = TempDir::new().unwrap();
    let mut outcomes = Outcomes::default();
    for target in ["pickle", "json", "csv"] {
        for mutation in mutations(&seeds(target), 200) {
            outcomes.convert(directory.path(), &mutation);
        }
    }
    assert!(outcomes.converted > 500 && outcomes.contradictions > 40, "{outcomes:?}");
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

/// Removes, duplicates, swaps and changes events.
fn mutate_events(events: &mut Vec<Event>, random: &mut Random) {
    let at = random.below(events.len());
    let other = random.below(events.len());
    match random.below(9) {
        0 => drop(events.remove(at)),
        1 => events.insert(other, events[at]),
        2 => events.swap(at, other),
        3 => events[at].addr = events[other].addr,
        4 => events[at].bytes = [0, 1, events[other].bytes, 1 << 20, 1 << 48, 1 << 62][random.below(6)],
        5 => events[at].action = Action::ALL[random.below(Action::ALL.len())],
        6 => events[at].stream = events[other].stream ^ 1 << random.below(64),
        // As if recording had started late.
        7 => drop(events.drain(..at)),
        _ => events.truncate(at + 1),
    }
    if events.is_empty() {
        events.push(Event { action: Action::Snapshot, device: 0, addr: 0, bytes: 0, stream: 0, time_ns: 0 });
    }
}

#[test]
fn mutated_events_can_be_replayed_after_conversion() {
    let directory = TempDir::new().unwrap();
    let mut outcomes = Outcomes::default();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for name in ["mlp", "gpt2", "resnet50", "streams"] {
        let mut events = Vec::new();
        let path = in_repository("experiments/histories").join(format!("{name}.pickle.xz"));
        vramlab::histories::formats::read(&path, &vramlab::histories::formats::ReadOptions::default(), &mut |event| {
            events.push(event);
            Ok(())
        })
        .unwrap();
        for round in 0..150 {
            // Short pieces from any position; most start late.
            let from = if round % 3 == 0 { 0 } else { random.below(events.len()) };
            let mut piece = events[from..(from + 300).min(events.len())].to_vec();
            for _ in 0..random.below(4) {
                mutate_events(&mut piece, &mut random);
            }
            let source = directory.path().join("source");
            let form = if round % 2 == 0 { Export::Snapshot } else { Export::SnapshotJson };
            let mut writer = form.create(&source).unwrap();
            if piece.iter().try_for_each(|event| writer.event(event)).is_err() {
                continue;
            }
            writer.finish(&Ending::default()).unwrap();
            let bytes = std::fs::read(&source).unwrap();
            std::fs::remove_file(&source).unwrap();
            outcomes.convert(directory.path(), &bytes);
        }
    }
    assert!(outcomes.converted > 800 && outcomes.contradictions > 300, "{outcomes:?}");
}
