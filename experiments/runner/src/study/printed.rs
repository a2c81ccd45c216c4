//! The output of a `command` as a result: values in printed lines, objects of JSON, and which of them have to be equal.

use super::commands::Listed;
use serde_json::{Map, Value, json};

/// Microseconds in the units of printed times.
const UNITS: [(&str, f64); 4] = [("ns", 1e-3), ("us", 1.0), ("ms", 1e3), ("s", 1e6)];

/// The result of a run that printed `text`: `us`, microseconds a step; `values`, by name; `results`, those that have to
/// be equal; `lines`, the objects of JSON; `peak_reserved_bytes` and `tolerance` if those have them; `skipped`, the
/// program's reason for not running.
///
/// # Errors
/// A line that the catalogue names is missing.
pub(super) fn read(listed: &Listed, text: &str) -> Result<Value, String> {
    let mut result = Map::new();
    let mut values = Map::new();
    let patterns = listed.prints.iter().map(|pattern| (pattern, true));
    for (pattern, is_needed) in patterns.chain(listed.may_print.iter().map(|pattern| (pattern, false))) {
        let found = match text.lines().rev().find_map(|line| captures(pattern, line)) {
            None if is_needed => return Err(format!("it printed no line like '{pattern}'")),
            found => found.unwrap_or_default(),
        };
        for (name, text) in found {
            let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
            match (UNITS.iter().find(|(unit, _)| *unit == name), number) {
                (Some((_, factor)), Some(number)) => {
                    result.insert("us".to_owned(), json!(number * factor / listed.steps.unwrap_or(1.0)));
                }
                (_, Some(number)) => _ = values.insert(name, json!(number)),
                (_, None) => _ = values.insert(name, json!(text)),
            }
        }
    }
    let mut results = Map::new();
    if let Some(key) = &listed.json {
        let lines = objects(text, key);
        if lines.is_empty() {
            return Err(format!("it printed no JSON object that begins with \"{key}\""));
        }
        let sum = |name: &str| lines.iter().filter_map(|line| line[name].as_u64()).reduce(|all, one| all + one);
        result.extend(sum("peak_reserved").map(|bytes| ("peak_reserved_bytes".to_owned(), json!(bytes))));
        let first = |name: &str| lines.iter().find_map(|line| line.get(name).cloned());
        result.extend(["skipped", "tolerance"].into_iter().filter_map(|name| Some((name.to_owned(), first(name)?))));
        for name in &listed.results {
            results.insert(name.clone(), lines.iter().filter_map(|line| line.get(name).cloned()).collect());
        }
        result.insert("lines".to_owned(), lines.into());
    } else if listed.prints.is_empty() {
        let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        results.insert("output".to_owned(), json!(last));
    }
    for name in &listed.results {
        results.extend(values.get(name).map(|value| (name.clone(), value.clone())));
    }
    result.insert("values".to_owned(), values.into());
    result.insert("results".to_owned(), results.into());
    Ok(result.into())
}

/// The values of a line's names, if the line contains the pattern. A value at the end of the pattern ends at a space or
/// a comma.
fn captures(pattern: &str, line: &str) -> Option<Vec<(String, String)>> {
    let mut parts = pattern.split('{');
    let first = parts.next()?;
    let mut rest = &line[line.find(first)? + first.len()..];
    let mut out = Vec::new();
    for part in parts {
        let (name, literal) = part.split_once('}')?;
        let end = match literal {
            "" => rest.find([' ', ',']).unwrap_or(rest.len()),
            literal => rest.find(literal)?,
        };
        let value = rest[..end].trim();
        if value.is_empty() {
            return None;
        }
        out.push((name.to_owned(), value.to_owned()));
        rest = &rest[end + literal.len()..];
    }
    Some(out)
}

/// The JSON objects with this first key in a text that may have other output before and after each, by their `rank`.
fn objects(text: &str, key: &str) -> Vec<Value> {
    let begin = format!("{{\"{key}\"");
    let read = |(at, _)| serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>().next()?.ok();
    let mut all: Vec<Value> = text.match_indices(&begin).filter_map(read).collect();
    all.sort_by_key(|object| object["rank"].as_u64());
    all
}

/// The largest relative difference of two results: 0 if they are equal, infinite if they cannot be compared. Numbers
/// that are not finite are text.
pub(super) fn difference(one: &Value, other: &Value) -> f64 {
    match (one, other) {
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).map(|(a, b)| difference(a, b)).fold(0.0, f64::max)
        }
        (Value::Object(a), Value::Object(b)) if a.len() == b.len() => {
            a.iter().map(|(name, a)| b.get(name).map_or(f64::INFINITY, |b| difference(a, b))).fold(0.0, f64::max)
        }
        (Value::Number(a), Value::Number(b)) if a != b => {
            let (a, b) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
            let difference = (a - b).abs() / a.abs().max(b.abs());
            if difference.is_nan() { f64::INFINITY } else { difference }
        }
        _ if one == other => 0.0,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    fn listed(text: &str) -> Listed {
        toml::from_str(&format!("command = ['a']\n{text}")).unwrap()
    }

    #[test]
    fn times_are_microseconds_a_step_and_results_are_named() {
        let raw = listed("prints = ['{us} us a step, total {total}']\nresults = ['total']");
        let result = read(&raw, "warm\n112.9 us a step, total -1.456391e+04\n").unwrap();
        assert_eq!((&result["us"], &result["results"]), (&json!(112.9), &json!({"total": -14563.91})));
        let mlp = listed("prints = ['took {ms} ms']\nsteps = 938");
        assert_eq!(read(&mlp, "epoch 1 took 9 ms\nepoch 2 took 938 ms\n").unwrap()["us"], 1000.0);
        let launches = listed("prints = ['{default} ns a launch (default) {other} ns a launch (non']");
        let result = read(&launches, "4134.1 ns a launch (default) 3980.2 ns a launch (non-blocking) \n").unwrap();
        assert_eq!(result["values"], json!({"default": 4134.1, "other": 3980.2}));
        assert_eq!(
            read(&raw, "cudaMalloc: out of memory").unwrap_err(),
            "it printed no line like '{us} us a step, total {total}'"
        );
        let checked = listed("prints = ['{errors} error']\nmay-print = ['Invalid {invalid} at']");
        assert_eq!(read(&checked, "0 errors").unwrap()["values"], json!({"errors": 0.0}));
        let result = read(&checked, "Invalid __global__ write of size 4 bytes at f+1\n1 error\n").unwrap();
        assert_eq!(result["values"]["invalid"], "__global__ write of size 4 bytes");
        assert_eq!(read(&listed(""), "blas 3.2\n\n").unwrap()["results"], json!({"output": "blas 3.2"}));
    }

    #[test]
    fn objects_of_several_processes_may_share_a_line() {
        let job = listed("json = 'acceptance'\nresults = ['losses']");
        let text = "a line without an end{\"acceptance\": 1, \"rank\": 1, \"losses\": [2.0], \"peak_reserved\": 3}\n\
                    {\"acceptance\": 1, \"rank\": 0, \"losses\": [1.0], \"peak_reserved\": 4, \"tolerance\": 0.5}";
        let result = read(&job, text).unwrap();
        assert_eq!(result["results"], json!({"losses": [[1.0], [2.0]]}));
        assert_eq!((&result["peak_reserved_bytes"], &result["tolerance"]), (&json!(7), &json!(0.5)));
        assert!(read(&job, "{\"other\": 1}").unwrap_err().contains("\"acceptance\""));
    }

    #[test]
    fn differences_are_relative() {
        assert_eq!(difference(&json!({"a": [1.0, 2.0]}), &json!({"a": [1.0, 2.0]})), 0.0);
        assert_eq!(difference(&json!([1.0, 4.0]), &json!([1.0, 2.0])), 0.5);
        assert_eq!(difference(&json!("nan"), &json!("nan")), 0.0);
        for (one, other) in
            [(json!([1]), json!([1, 2])), (json!({"a": 1}), json!({"b": 1})), (json!("inf"), json!(1.0))]
        {
            assert_eq!(difference(&one, &other), f64::INFINITY, "{one} {other}");
        }
    }
}
