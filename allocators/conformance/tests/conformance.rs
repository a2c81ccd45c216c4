//! The conformance suite ([`vramlab_conformance`]) for every backend of the library on every device, and with the settings that
//! change what a backend can do.
//!
//! A CUDA device is used when there is one; without, its tests are ignored.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../device/tests/common/trials.rs"]
mod trials;

use std::process::ExitCode;
use vramlab_conformance::{Check, Device, conformance};
use vramlab_policies::Selection;
use vramlab_policies::backends;

/// Settings that change the capabilities of their backends.
const VARIED: [&str; 5] =
    ["lab:source=expandable", "lab:stream=steal", "lab:join=on-miss", "lab:grow=doubling", "bfc:garbage_collection=on"];

fn main() -> ExitCode {
    let of_backends = backends::all().into_iter().map(Selection::of);
    let checks =
        of_backends.chain(VARIED.map(|text| text.parse().unwrap())).flat_map(|of| conformance(of, &Device::ALL));
    let trial = |check: Check| trials::trial(check.name().to_owned(), check.missing(), move || check.run());
    trials::run(checks.map(trial).collect())
}
