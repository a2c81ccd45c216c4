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

/// Settings that change the capabilities of their backends, or make rare calls frequent.
const VARIED: [&str; 6] = [
    "lab:source=expandable",
    "lab:stream=steal",
    "lab:join=on-miss",
    "lab:grow=doubling",
    "bfc:garbage_collection=on",
    "gmlake:frag_limit=2M,auto_gc=64M",
];

/// Settings of backends of host memory that change where their blocks are from, or when they return.
const HOST_VARIED: &str = "host-pytorch:release=2.7,pinned_use_background_threads=on,host-pytorch:pinned_max_cached_size_mb=1,\
                           host-exact:keep_idle=on";

fn main() -> ExitCode {
    let of_backends = backends::all().into_iter().chain(backends::hosts()).map(Selection::of);
    let varied = VARIED.map(|text| text.parse().unwrap()).into_iter();
    let varied = varied.chain(backends::parse_host_list(HOST_VARIED).unwrap());
    let checks = of_backends.chain(varied).flat_map(|of| conformance(of, &Device::ALL));
    let trial = |check: Check| trials::trial(check.name().to_owned(), check.missing(), move || check.run());
    trials::run(checks.map(trial).collect())
}
