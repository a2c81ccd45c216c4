//! Tells the program which commit and profile it is built from.

/// Files and directories that the program is built from.
const SOURCES: [&str; 17] = [
    "Cargo.toml",
    "Cargo.lock",
    "allocators/Cargo.toml",
    "allocators/src",
    "allocators/device",
    "allocators/policies",
    "allocators/histories",
    "app/terminal/src",
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
    vramlab_build::emit("experiments/runner", &SOURCES);
}
