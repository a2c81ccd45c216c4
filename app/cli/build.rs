//! Tells the program which commit and profile it is built from.

/// Files and directories that the program is built from.
const SOURCES: [&str; 10] = [
    "Cargo.toml",
    "Cargo.lock",
    "allocators/Cargo.toml",
    "allocators/src",
    "allocators/device",
    "allocators/policies",
    "allocators/histories",
    "app/terminal/src",
    "app/cli/Cargo.toml",
    "app/cli/src",
];

fn main() {
    vramlab_build::emit("app/cli", &SOURCES);
}
