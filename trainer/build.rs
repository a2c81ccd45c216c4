//! Tells the program which commit and profile it is built from.

/// Files and directories that this program is built from, beside those of all programs.
const SOURCES: [&str; 5] = ["kernels/Cargo.toml", "kernels/src", "kernels/ptx", "trainer/Cargo.toml", "trainer/src"];

fn main() {
    vramlab_build::emit("trainer", &[&vramlab_build::SHARED[..], &SOURCES].concat());
}
