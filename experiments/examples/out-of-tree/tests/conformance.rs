//! VramLab's conformance suite for these backends: `cargo test`.

use libtest_mimic::{Arguments, Trial};
use vramlab::testing::{Check, Device, conformance};

fn trial(check: Check) -> Trial {
    let (name, missing) = (check.name().to_owned(), check.missing());
    let trial = Trial::test(name, move || {
        check.run();
        Ok(())
    });
    // Reported as ignored on a machine without a GPU.
    match missing {
        Some(why) => trial.with_kind(why).with_ignored_flag(true),
        None => trial,
    }
}

fn main() -> std::process::ExitCode {
    let checks = bump_allocator::ALL.into_iter().flat_map(|backend| conformance(backend, &Device::ALL));
    libtest_mimic::run(&Arguments::from_args(), checks.map(trial).collect()).exit_code()
}
