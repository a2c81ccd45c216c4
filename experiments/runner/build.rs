//! Embeds the commit and profile that this program is built from.

/// Files and directories that this program is built from, in addition to those of all programs.
const SOURCES: [&str; 9] = [
    "kernels/Cargo.toml",
    "kernels/src",
    "kernels/ptx",
    "trainer/Cargo.toml",
    "trainer/src",
    "app/cli/Cargo.toml",
    "app/cli/src",
    "experiments/runner/Cargo.toml",
    "experiments/runner/src",
];

fn main() {
    vramlab_build::emit("experiments/runner", &[&vramlab_build::SHARED[..], &SOURCES].concat());
}
