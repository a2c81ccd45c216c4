//! Gives the library the SONAME of CUDA's driver, so that the dynamic linker takes it for every `libcuda.so.1`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
        // The program keeps pointers to functions in it.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
