//! `libvramlab_inject`, which `vramlab run` puts between a CUDA program and CUDA's driver (`LD_PRELOAD`).
//!
//! Its SONAME is the driver's, `libcuda.so.1`. The dynamic linker loads it first, and then takes it for every `libcuda.so.1` that the
//! program, or a library of it, links or opens. It exports every function of the driver: nearly all are trampolines
//! ([`forward`]) to the real one ([`real`]). Those that concern memory are written here ([`entries`]): they record
//! what was called and how long it took ([`record`]), and serve memory from an allocator ([`serve`]). Streams are followed as far as reuse
//! of memory needs it ([`streams`]).
//!
//! The library never starts CUDA by itself, and no panic leaves it. Calls that its allocator makes come back here, as cudarc also finds
//! this library under the driver's name; a [`Guard`](guard::Guard) of the thread lets them pass.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod entries;
mod forward;
mod guard;
mod host;
mod pool;
mod real;
mod record;
mod serve;
mod settings;
mod stacks;
mod streams;
