//! Tells the program which commit and profile it is built from.

/// Files and directories that this program is built from, beside those of all programs.
const SOURCES: [&str; 2] = ["app/cli/Cargo.toml", "app/cli/src"];

fn main() {
    vramlab_build::emit("app/cli", &[&vramlab_build::SHARED[..], &SOURCES].concat());
}
