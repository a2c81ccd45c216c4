//! Whether the runs of a command have the results of its unchanged runs.

use super::commands;
use super::figures::read_document;
use super::plan::Run;
use super::printed::difference;
use super::programs::RESULT;
use super::record::{Planned, RunStatus};
use super::spec::Program;
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeMap;

/// For each program with results one line: equal, or the runs that differ by more than the program's tolerance and
/// twice the difference of its unchanged runs.
pub(super) fn lines(planned: &Planned) -> Result<Vec<String>> {
    let mut programs: BTreeMap<(String, String), Vec<(&Run, Value)>> = BTreeMap::new();
    for run in planned.runs.iter().filter(|run| run.program == Program::Command) {
        if planned.status_of(run)? == Some(RunStatus::Done) {
            let result = read_document(&planned.run_folder(run), RESULT)?;
            let of = run.option("of").map(ToString::to_string).unwrap_or_default();
            if result["results"].as_object().is_some_and(|results| !results.is_empty()) {
                programs.entry((commands::name(run), of)).or_default().push((run, result));
            }
        }
    }
    let named = !planned.source.spec.arms.is_empty();
    let mut equal = Vec::new();
    let mut out = Vec::new();
    for ((name, of), runs) in programs {
        let title = format!("{name} {of}").trim_end().to_owned();
        let plain: Vec<&Value> =
            runs.iter().filter(|(run, _)| commands::is_plain(run)).map(|(_, result)| &result["results"]).collect();
        let base = if plain.is_empty() { vec![&runs[0].1["results"]] } else { plain };
        let spread = base.iter().map(|one| difference(one, base[0])).fold(0.0, f64::max);
        let tolerance = runs.iter().filter_map(|(_, result)| result["tolerance"].as_f64()).fold(0.0, f64::max);
        let allowed = tolerance.max(2.0 * spread);
        let least =
            |result: &Value| base.iter().map(|one| difference(&result["results"], one)).fold(f64::INFINITY, f64::min);
        let differing: Vec<String> = runs
            .iter()
            .map(|(run, result)| (run, least(result)))
            .filter(|(_, difference)| *difference > allowed)
            .map(|(run, difference)| format!("{} r{} by {difference:.1e}", run.label(named), run.repeat))
            .collect();
        if differing.is_empty() {
            equal.push(if spread > 0.0 { format!("{title} (its own runs differ by {spread:.1e})") } else { title });
        } else {
            out.push(format!("note: results of {title} differ from its unchanged runs': {}", differing.join(", ")));
        }
    }
    if !equal.is_empty() {
        out.insert(0, format!("results  {} of equal results: {}", planned.source.spec.name, equal.join(", ")));
    }
    Ok(out)
}
