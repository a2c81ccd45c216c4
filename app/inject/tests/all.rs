//! The library between a program in C and a stand-in for CUDA's driver, both of which the machine's C compiler builds.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod hostile;
mod programs;
mod records;
#[path = "../../terminal/tests/common/signals.rs"]
mod signals;
