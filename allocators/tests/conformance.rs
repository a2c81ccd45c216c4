//! The conformance suite ([`vramlab::testing`]) for every backend of the library on every device.
//!
//! A CUDA device is used when there is one; without, its tests are ignored.

#[path = "common/trials.rs"]
mod trials;

use std::process::ExitCode;
use vramlab::backends;
use vramlab::testing::{Device, conformance};

fn main() -> ExitCode {
    let checks = backends::all().into_iter().flat_map(|backend| conformance(backend, &Device::ALL));
    trials::run(
        checks.map(|check| trials::trial(check.name().to_owned(), check.missing(), move || check.run())).collect(),
    )
}
