//! What the tests of `explain` share.

use super::{Place, Ran};
use serde_json::{Value, json};

pub(crate) fn explain(place: &Place, arguments: &[&str]) -> Ran {
    place.run(&[&["explain"], arguments].concat())
}

pub(crate) fn found(place: &Place, arguments: &[&str]) -> Value {
    let ran = explain(place, &[arguments, &["--json"]].concat()).ok();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

pub(crate) fn part(found: &Value, name: &str) -> u64 {
    let parts = found["reserved"]["parts"].as_array().unwrap();
    parts.iter().find(|part| part["name"] == name).unwrap()["bytes"].as_u64().unwrap()
}

/// The ledger is that of a replay which put every block and segment where it was recorded.
pub(crate) fn agrees(place: &Place, file: &str) {
    let found = found(place, &[file]);
    let arguments =
        ["replay", file, "--addresses", "recorded", "--alloc", "caching", "--device", "null", "--plan", "off"];
    let rows = place.run(&[&arguments[..], &["--json"]].concat()).rows();
    assert_eq!((&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]), (&json!(0), &json!(0)), "{file}");
    assert_eq!(found["peak_reserved"]["reserved_bytes"], rows[0]["peak_reserved_bytes"], "{file}");
    assert_eq!(found["peak_active"]["active_bytes"], rows[0]["peak_active_bytes"], "{file}");
    if found["reserved"]["at"] == "peak_reserved" {
        for name in ["requested", "internal", "soft", "hard", "stream", "pending"] {
            assert_eq!(json!(part(&found, name)), rows[0]["ledger"][name], "{file}: {name}");
        }
    }
    let parts: u64 =
        found["reserved"]["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json!(parts), found["reserved"]["moment"]["reserved_bytes"], "{file}");
}
