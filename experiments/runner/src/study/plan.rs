//! The runs of a spec on a device: cells of the matrix, repeats, their names and their order.

use super::spec::{OptionValue, Program, Source};
use anyhow::{Result, bail};
use chacha20::ChaCha8Rng;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use serde_json::{Map, Value};
use terminal::Shard;
use vramlab::DeviceKind;

/// The option with a memory limit as a multiple of another run's active memory (`Spec::limits_of`).
pub(crate) const LIMIT: &str = "limit-over-active";

/// Options with their values, in the order in which the spec names them.
pub(crate) type Options = Vec<(String, OptionValue)>;

/// A run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    /// Number in the plan, variant and values of the axes, repeat: `03-naive-784-r1`. Without the variant if the spec
    /// names none.
    pub(crate) id: String,
    /// Number of the combination of variant and options, shared by its repeats.
    pub(crate) cell: usize,
    pub(crate) arm: String,
    pub(crate) program: Program,
    /// The program's long options and its allocator's settings, axes included, with their values for the device.
    #[serde(serialize_with = "as_map")]
    pub(crate) options: Options,
    /// Number of the repeat, from 0.
    pub(crate) repeat: u32,
    /// Position in the seeded order of all runs, from 0, across all shards. Each repeat is a pass over all cells in a
    /// different order.
    pub(crate) position: usize,
    /// Names of the options that are axes.
    #[serde(skip)]
    pub(crate) axes: Vec<String>,
    /// Whether its process is forked ([`super::spec::Spec::fork`]).
    #[serde(skip)]
    pub(crate) fork: bool,
}

fn as_map<S: serde::Serializer>(options: &Options, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(options.iter().map(|(name, value)| (name, value)))
}

impl Run {
    /// Name of its cell, unique within the spec.
    pub(crate) fn label(&self, named: bool) -> String {
        let values = self.axes.iter().filter_map(|axis| self.option(axis));
        let mut parts: Vec<String> = named.then(|| self.arm.clone()).into_iter().collect();
        parts.extend(values.map(ToString::to_string));
        if parts.is_empty() { self.arm.clone() } else { parts.join(" ") }
    }

    /// The value of an option.
    pub(crate) fn option(&self, name: &str) -> Option<&OptionValue> {
        self.options.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// The run's options as JSON.
    pub(crate) fn options_json(&self) -> Map<String, Value> {
        self.options.iter().map(|(name, value)| (name.clone(), serde_json::json!(value))).collect()
    }
}

/// The runs of a spec on a kind of device, in the order of the spec.
pub(crate) fn plan(source: &Source, kind: DeviceKind) -> Result<Vec<Run>> {
    let spec = &source.spec;
    let mut runs: Vec<Run> = Vec::new();
    let mut cells = 0;
    for arm in spec.arms_on(kind) {
        let settings = source.settings(&arm, kind)?;
        let axes: Vec<String> =
            settings.iter().filter(|setting| setting.axis).map(|setting| setting.name.clone()).collect();
        let mut combinations: Vec<Options> = vec![Vec::new()];
        for setting in &settings {
            let with = |options: &Options, value: &OptionValue| {
                let mut options = options.clone();
                options.push((setting.name.clone(), value.clone()));
                options
            };
            combinations = combinations
                .iter()
                .flat_map(|options| setting.values.iter().map(move |value| with(options, value)))
                .collect();
        }
        for options in combinations {
            for repeat in 0..spec.repeats_on(&arm, kind) {
                runs.push(Run {
                    id: String::new(),
                    cell: cells,
                    arm: arm.name.clone(),
                    program: arm.program,
                    options: options.clone(),
                    repeat,
                    position: 0,
                    axes: axes.clone(),
                    fork: spec.fork,
                });
            }
            cells += 1;
        }
    }
    let digits = runs.len().saturating_sub(1).to_string().len().max(2);
    let named = !spec.arms.is_empty();
    for (index, run) in runs.iter_mut().enumerate() {
        run.id = format!("{index:0digits$}-{}-r{}", slug(&run.label(named)), run.repeat);
    }
    for (position, index) in order(&runs, spec.seed).into_iter().enumerate() {
        runs[index].position = position;
    }
    Ok(runs)
}

/// Each repeat is a pass over the cells in a different order, so that a drift of the machine affects all cells
/// equally.
fn order(runs: &[Run], seed: u64) -> Vec<usize> {
    let passes = runs.iter().map(|run| run.repeat + 1).max().unwrap_or(0);
    let mut out = Vec::new();
    for pass in 0..passes {
        let mut indices: Vec<usize> = (0..runs.len()).filter(|index| runs[*index].repeat == pass).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(u64::from(pass));
        indices.shuffle(&mut rng);
        // Limits follow from runs without one.
        indices.sort_by_key(|index| runs[*index].option(LIMIT).is_some());
        out.extend(indices);
    }
    out
}

/// Text as part of a file name.
fn slug(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c.to_ascii_lowercase() {
            c @ ('a'..='z' | '0'..='9' | '.' | '_') => out.push(c),
            _ if !out.ends_with('-') => out.push('-'),
            _ => {}
        }
    }
    const LONGEST: usize = 80;
    out.truncate(LONGEST);
    out.trim_matches(['-', '.']).to_owned()
}

/// The runs of a shard, in the order in which they run.
pub(crate) fn share(runs: &[Run], shard: Option<Shard>) -> Vec<&Run> {
    let mine = |index: usize| shard.is_none_or(|shard| shard.holds(index));
    let mut out: Vec<&Run> = runs.iter().enumerate().filter(|(index, _)| mine(*index)).map(|(_, run)| run).collect();
    out.sort_by_key(|run| run.position);
    out
}

/// The runs of the spec on a device that the spec allows.
pub(crate) fn plan_on(source: &Source, kind: DeviceKind) -> Result<Vec<Run>> {
    let spec = &source.spec;
    if !spec.devices.contains(&kind) {
        let names: Vec<String> = spec.devices.iter().map(ToString::to_string).collect();
        bail!("{} is not for {kind}; run it with --device {}", spec.name, names.join(" or --device "));
    }
    let runs = plan(source, kind)?;
    if runs.is_empty() {
        bail!("{} has no arm for {kind}", spec.name);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    fn source(text: &str) -> Source {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.toml");
        std::fs::write(&path, format!("name = \"t\"\nquestion = \"?\"\ndevices = [\"cuda\", \"sim\"]\n{text}"))
            .unwrap();
        Source::read(&path).unwrap()
    }

    fn ids(runs: &[&Run]) -> Vec<String> {
        runs.iter().map(|run| run.id.clone()).collect()
    }

    #[test]
    fn cells_are_crossed_and_named_in_the_order_of_the_spec() {
        let spec = source("repeats = 2\n[matrix]\nalloc = [\"naive\", \"caching\"]\nhidden = [784, 2048]\n");
        let runs = plan(&spec, DeviceKind::Sim).unwrap();
        let ids: Vec<&str> = runs.iter().map(|run| run.id.as_str()).collect();
        assert_eq!(
            ids,
            [
                "00-naive-784-r0",
                "01-naive-784-r1",
                "02-naive-2048-r0",
                "03-naive-2048-r1",
                "04-caching-784-r0",
                "05-caching-784-r1",
                "06-caching-2048-r0",
                "07-caching-2048-r1",
            ]
        );
        assert_eq!(runs.iter().map(|run| run.cell).collect::<Vec<usize>>(), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn the_order_is_seeded_and_repeats_follow_all_cells() {
        let text = |seed: u64| format!("repeats = 3\nseed = {seed}\n[matrix]\nhidden = [1, 2, 3, 4, 5, 6, 7, 8]\n");
        let order = |seed| {
            let runs = plan(&source(&text(seed)), DeviceKind::Sim).unwrap();
            ids(&share(&runs, None))
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        let first = order(1);
        for (pass, ids) in first.chunks(8).enumerate() {
            assert!(ids.iter().all(|id| id.ends_with(&format!("-r{pass}"))), "{ids:?}");
        }
        let cells = |ids: &[String]| ids.iter().map(|id| id[3..4].to_owned()).collect::<Vec<String>>();
        assert_ne!(cells(&first[..8]), cells(&first[8..16]), "each pass has an order of its own");
    }

    #[test]
    fn shards_share_the_plan() {
        let spec = source("repeats = 2\n[matrix]\nhidden = [1, 2, 3, 4, 5]\n");
        let runs = plan(&spec, DeviceKind::Sim).unwrap();
        let parts = ["1/3", "2/3", "3/3"].map(|text| ids(&share(&runs, Some(text.parse().unwrap()))));
        let mut all = parts.concat();
        all.sort();
        assert_eq!(all, runs.iter().map(|run| run.id.clone()).collect::<Vec<String>>());
        let whole = ids(&share(&runs, None));
        let in_order = |part: &[String]| part.iter().map(|id| whole.iter().position(|other| other == id)).is_sorted();
        assert!(parts.iter().all(|part| in_order(part)), "a shard keeps the order");
        for text in ["0/2", "3/2", "1", "a/b", "1/0", ""] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_said_for_a_device_counts_over_the_rest() {
        let spec = source(
            "repeats = 3\n[options]\nsteps = 300\n[matrix]\nhidden = [1, 2]\n[sim]\nrepeats = 1\n\
             [sim.options]\nsteps = 10\n[sim.matrix]\nhidden = [1]\n\
             [[arms]]\nname = \"a\"\n[[arms]]\nname = \"p\"\nprogram = \"pytorch\"\n[arms.cuda]\nrepeats = 1\n",
        );
        let sim = plan(&spec, DeviceKind::Sim).unwrap();
        assert_eq!(sim.iter().map(|run| run.id.as_str()).collect::<Vec<&str>>(), ["00-a-1-r0"]);
        assert_eq!(sim[0].option("steps"), Some(&OptionValue::Integer(10)));
        let cuda = plan(&spec, DeviceKind::Cuda).unwrap();
        assert_eq!(cuda.iter().filter(|run| run.arm == "a").count(), 6);
        assert_eq!(cuda.iter().filter(|run| run.arm == "p").count(), 2);
        assert_eq!(cuda[0].option("steps"), Some(&OptionValue::Integer(300)));
    }

    #[test]
    fn names_of_folders_are_plain() {
        assert_eq!(slug("stream-ordered 1 MiB/../x"), "stream-ordered-1-mib-..-x");
        assert_eq!(slug(".."), "");
        assert_eq!(slug("a  b"), "a-b");
    }
}
