//! One function for each entry point of the driver, which jumps to the real one.
//!
//! A trampoline reads the real function's address from its slot and jumps there: no argument is touched, so it needs no type. The
//! first call of a name looks the address up ([`bind`](crate::real::bind)).
//!
//! Entry points that put work on a stream also count it ([`QUEUED`](crate::streams::QUEUED)), note what it is
//! ([`LAST`](crate::streams::LAST)) and look at the stream. The count is not atomic: it only has to change. A program whose work is all on the legacy default stream needs
//! no events before memory is used again. The first work on any other stream calls [`note`](crate::streams::note) first;
//! [`WORKED`](crate::streams::WORKED) has the streams for which that was done.

use std::sync::atomic::AtomicPtr;

/// A function of which only the address counts.
pub(crate) type Entry = unsafe extern "C" fn();

#[cfg(target_arch = "x86_64")]
mod machine {
    /// Saves the registers of arguments, calls `$call` with the entry's number, and jumps to the address that it returns.
    macro_rules! detour {
        ($name:ident, $call:path) => {
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "push rbp", "mov rbp, rsp",
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax", "push r10",
                    "sub rsp, 128",
                    "movups [rsp], xmm0", "movups [rsp+16], xmm1", "movups [rsp+32], xmm2", "movups [rsp+48], xmm3",
                    "movups [rsp+64], xmm4", "movups [rsp+80], xmm5", "movups [rsp+96], xmm6", "movups [rsp+112], xmm7",
                    "mov edi, r11d", "mov rsi, r10",
                    "call {call}",
                    "mov r11, rax",
                    "movups xmm0, [rsp]", "movups xmm1, [rsp+16]", "movups xmm2, [rsp+32]", "movups xmm3, [rsp+48]",
                    "movups xmm4, [rsp+64]", "movups xmm5, [rsp+80]", "movups xmm6, [rsp+96]", "movups xmm7, [rsp+112]",
                    "add rsp, 128",
                    "pop r10", "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "pop rbp",
                    "jmp r11",
                    call = sym $call,
                )
            }
        };
    }

    macro_rules! plain {
        ($number:literal $name:ident) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "mov r11, [rip + {slots} + {at}]",
                    "test r11, r11",
                    "jz 4f",
                    "jmp r11",
                    "4:", "mov r11d, {number}", "jmp {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work without a stream argument, on the legacy stream. `$kernel` is what [`LAST`](crate::streams::LAST) receives.
    macro_rules! legacy {
        ($number:literal $name:ident $kernel:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "inc dword ptr [rip + {queued}]",
                    concat!("mov qword ptr [rip + {last}], ", $kernel),
                    "mov byte ptr [rip + {legacy}], 1",
                    "mov r11, [rip + {slots} + {at}]",
                    "test r11, r11",
                    "jz 4f",
                    "jmp r11",
                    "4:", "mov r11d, {number}", "jmp {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work on the calling thread's default stream. Only an event on the legacy stream reaches it from other threads.
    macro_rules! per_thread {
        ($number:literal $name:ident $kernel:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "inc dword ptr [rip + {queued}]",
                    concat!("mov qword ptr [rip + {last}], ", $kernel),
                    "mov byte ptr [rip + {legacy}], 1",
                    "cmp byte ptr [rip + {multi}], 2",
                    "jne 3f",
                    "mov r11, [rip + {slots} + {at}]",
                    "test r11, r11",
                    "jz 4f",
                    "jmp r11",
                    "3:", "mov r10d, 2", "mov r11d, {number}", "jmp {note}",
                    "4:", "mov r11d, {number}", "jmp {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    multi = sym crate::streams::MULTI, note = sym crate::forward::machine::note, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work on the stream `$stream`, an operand. The legacy stream is 0 or 1, and 2 is the thread's own.
    macro_rules! stream {
        ($number:literal $name:ident $kernel:literal $stream:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "inc dword ptr [rip + {queued}]",
                    concat!("mov qword ptr [rip + {last}], ", $kernel),
                    concat!("cmp ", $stream, ", 2"),
                    "ja 5f",
                    "mov byte ptr [rip + {legacy}], 1",
                    // Nothing below is above 1.
                    "5:", concat!("cmp ", $stream, ", 1"),
                    "ja 3f",
                    "2:", "mov r11, [rip + {slots} + {at}]",
                    "test r11, r11",
                    "jz 4f",
                    "jmp r11",
                    "3:", concat!("mov r11, ", $stream),
                    "shr r11d, 6", "and r11d, 255",
                    "lea r10, [rip + {worked}]",
                    "mov r10, [r10 + r11 * 8]",
                    concat!("cmp r10, ", $stream),
                    "je 2b",
                    concat!("mov r10, ", $stream), "mov r11d, {number}", "jmp {note}",
                    "4:", "mov r11d, {number}", "jmp {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    worked = sym crate::streams::WORKED, note = sym crate::forward::machine::note, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    macro_rules! entry {
        ($number:literal $name:ident own) => {};
        ($number:literal $name:ident plain) => { plain!($number $name); };
        ($number:literal $name:ident legacy) => { legacy!($number $name "{number}"); };
        ($number:literal $name:ident per_thread) => { per_thread!($number $name "{number}"); };
        ($number:literal $name:ident per_thread kernel 0) => { per_thread!($number $name "rdi"); };
        ($number:literal $name:ident per_thread kernel 1) => { per_thread!($number $name "rsi"); };
        ($number:literal $name:ident config) => { stream!($number $name "rsi" "qword ptr [rdi + 32]"); };
        ($number:literal $name:ident kernel 8) => { stream!($number $name "rdi" "qword ptr [rsp + 24]"); };
        ($number:literal $name:ident stream 0) => { stream!($number $name "{number}" "rdi"); };
        ($number:literal $name:ident stream 1) => { stream!($number $name "{number}" "rsi"); };
        ($number:literal $name:ident stream 2) => { stream!($number $name "{number}" "rdx"); };
        ($number:literal $name:ident stream 3) => { stream!($number $name "{number}" "rcx"); };
        ($number:literal $name:ident stream 4) => { stream!($number $name "{number}" "r8"); };
        ($number:literal $name:ident stream 5) => { stream!($number $name "{number}" "r9"); };
        ($number:literal $name:ident stream 6) => { stream!($number $name "{number}" "qword ptr [rsp + 8]"); };
        ($number:literal $name:ident stream 7) => { stream!($number $name "{number}" "qword ptr [rsp + 16]"); };
        ($number:literal $name:ident stream 8) => { stream!($number $name "{number}" "qword ptr [rsp + 24]"); };
        ($number:literal $name:ident stream 9) => { stream!($number $name "{number}" "qword ptr [rsp + 32]"); };
    }

    detour!(bind, crate::real::bind);
    detour!(note, crate::streams::note);
    pub(super) use {entry, legacy, per_thread, plain, stream};
}

#[cfg(target_arch = "aarch64")]
mod machine {
    /// Saves the registers of arguments, calls `$call` with the entry's number, and jumps to the address that it returns.
    macro_rules! detour {
        ($name:ident, $call:path) => {
            #[unsafe(naked)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "stp x29, x30, [sp, #-208]!", "mov x29, sp",
                    "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                    "str x8, [sp, #80]",
                    "stp d0, d1, [sp, #96]", "stp d2, d3, [sp, #112]", "stp d4, d5, [sp, #128]", "stp d6, d7, [sp, #144]",
                    "mov w0, w17", "mov x1, x16",
                    "bl {call}",
                    "mov x16, x0",
                    "ldp d0, d1, [sp, #96]", "ldp d2, d3, [sp, #112]", "ldp d4, d5, [sp, #128]", "ldp d6, d7, [sp, #144]",
                    "ldr x8, [sp, #80]",
                    "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                    "ldp x29, x30, [sp], #208",
                    "br x16",
                    call = sym $call,
                )
            }
        };
    }

    macro_rules! plain {
        ($number:literal $name:ident) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "adrp x16, {slots} + {at}",
                    "ldr x16, [x16, :lo12:{slots} + {at}]",
                    "cbz x16, 4f",
                    "br x16",
                    "4:", "mov w17, #{number}", "b {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work without a stream argument, on the legacy stream. `$kernel` is what [`LAST`](crate::streams::LAST) receives.
    macro_rules! legacy {
        ($number:literal $name:ident $kernel:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "adrp x16, {queued}", "ldr w17, [x16, :lo12:{queued}]", "add w17, w17, #1", "str w17, [x16, :lo12:{queued}]",
                    "adrp x16, {last}", concat!("mov x17, ", $kernel), "str x17, [x16, :lo12:{last}]",
                    "adrp x16, {legacy}", "mov w17, #1", "strb w17, [x16, :lo12:{legacy}]",
                    "adrp x16, {slots} + {at}",
                    "ldr x16, [x16, :lo12:{slots} + {at}]",
                    "cbz x16, 4f",
                    "br x16",
                    "4:", "mov w17, #{number}", "b {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work on the calling thread's default stream. Only an event on the legacy stream reaches it from other threads.
    macro_rules! per_thread {
        ($number:literal $name:ident $kernel:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "adrp x16, {queued}", "ldr w17, [x16, :lo12:{queued}]", "add w17, w17, #1", "str w17, [x16, :lo12:{queued}]",
                    "adrp x16, {last}", concat!("mov x17, ", $kernel), "str x17, [x16, :lo12:{last}]",
                    "adrp x16, {legacy}", "mov w17, #1", "strb w17, [x16, :lo12:{legacy}]",
                    "adrp x16, {multi}", "ldrb w17, [x16, :lo12:{multi}]",
                    "cmp w17, #2",
                    "b.ne 3f",
                    "adrp x16, {slots} + {at}",
                    "ldr x16, [x16, :lo12:{slots} + {at}]",
                    "cbz x16, 4f",
                    "br x16",
                    "3:", "mov x16, #2", "mov w17, #{number}", "b {note}",
                    "4:", "mov w17, #{number}", "b {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    multi = sym crate::streams::MULTI, note = sym crate::forward::machine::note, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    /// Work on the stream that `$load` moves into `x16`. The legacy stream is 0 or 1, and 2 is the thread's own. Of the registers that a
    /// caller does not keep, `x9` and `x10` hold no argument.
    macro_rules! stream {
        ($number:literal $name:ident $kernel:literal $load:literal) => {
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                std::arch::naked_asm!(
                    "adrp x16, {queued}", "ldr w17, [x16, :lo12:{queued}]", "add w17, w17, #1", "str w17, [x16, :lo12:{queued}]",
                    "adrp x16, {last}", concat!("mov x17, ", $kernel), "str x17, [x16, :lo12:{last}]",
                    $load,
                    "cmp x16, #2",
                    "b.hi 3f",
                    "adrp x17, {legacy}", "mov w9, #1", "strb w9, [x17, :lo12:{legacy}]",
                    "cmp x16, #1",
                    "b.hi 3f",
                    "2:", "adrp x16, {slots} + {at}",
                    "ldr x16, [x16, :lo12:{slots} + {at}]",
                    "cbz x16, 4f",
                    "br x16",
                    "3:", "ubfx x17, x16, #6, #8",
                    "adrp x9, {worked}", "add x9, x9, :lo12:{worked}",
                    "ldr x10, [x9, x17, lsl #3]",
                    "cmp x10, x16",
                    "b.eq 2b",
                    "mov w17, #{number}", "b {note}",
                    "4:", "mov w17, #{number}", "b {bind}",
                    slots = sym crate::forward::SLOTS, at = const 8 * $number, number = const $number,
                    queued = sym crate::streams::QUEUED, last = sym crate::streams::LAST, legacy = sym crate::streams::LEGACY_WORK,
                    worked = sym crate::streams::WORKED, note = sym crate::forward::machine::note, bind = sym crate::forward::machine::bind,
                )
            }
        };
    }

    macro_rules! entry {
        ($number:literal $name:ident own) => {};
        ($number:literal $name:ident plain) => { plain!($number $name); };
        ($number:literal $name:ident legacy) => { legacy!($number $name "#{number}"); };
        ($number:literal $name:ident per_thread) => { per_thread!($number $name "#{number}"); };
        ($number:literal $name:ident per_thread kernel 0) => { per_thread!($number $name "x0"); };
        ($number:literal $name:ident per_thread kernel 1) => { per_thread!($number $name "x1"); };
        ($number:literal $name:ident config) => { stream!($number $name "x1" "ldr x16, [x0, #32]"); };
        ($number:literal $name:ident kernel 8) => { stream!($number $name "x0" "ldr x16, [sp]"); };
        ($number:literal $name:ident stream 0) => { stream!($number $name "#{number}" "mov x16, x0"); };
        ($number:literal $name:ident stream 1) => { stream!($number $name "#{number}" "mov x16, x1"); };
        ($number:literal $name:ident stream 2) => { stream!($number $name "#{number}" "mov x16, x2"); };
        ($number:literal $name:ident stream 3) => { stream!($number $name "#{number}" "mov x16, x3"); };
        ($number:literal $name:ident stream 4) => { stream!($number $name "#{number}" "mov x16, x4"); };
        ($number:literal $name:ident stream 5) => { stream!($number $name "#{number}" "mov x16, x5"); };
        ($number:literal $name:ident stream 6) => { stream!($number $name "#{number}" "mov x16, x6"); };
        ($number:literal $name:ident stream 7) => { stream!($number $name "#{number}" "mov x16, x7"); };
        ($number:literal $name:ident stream 8) => { stream!($number $name "#{number}" "ldr x16, [sp]"); };
        ($number:literal $name:ident stream 9) => { stream!($number $name "#{number}" "ldr x16, [sp, #8]"); };
    }

    detour!(bind, crate::real::bind);
    detour!(note, crate::streams::note);
    pub(super) use {entry, legacy, per_thread, plain, stream};
}

#[allow(unused_imports, reason = "which of them depends on the list")]
use machine::{entry, legacy, per_thread, plain, stream};

macro_rules! entry_points {
    ($($number:tt $name:ident [$($kind:tt)+];)*) => {
        $(entry!($number $name $($kind)+);)*

        /// Numbers of the entry points.
        #[allow(non_upper_case_globals, dead_code, reason = "they are CUDA's names")]
        pub(crate) mod at {
            $(pub(crate) const $name: usize = $number;)*
        }

        /// Names in the order of their numbers, each as C has it.
        pub(crate) static NAMES: &[&std::ffi::CStr] = &[$(
            // The name of a function has no zero byte.
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("the name of a function has no zero byte"),
            },
        )*];

        /// Whether the function of a number is written by hand.
        pub(crate) fn is_written(number: usize) -> bool {
            const WRITTEN: &[bool] = &[$(written!($($kind)+),)*];
            WRITTEN[number]
        }

        /// The functions here in place of the driver's, by number. `None`: what the driver has is as good.
        pub(crate) static HERE: &[Option<Entry>] = &[$(here!($name $($kind)+),)*];
    };
}

macro_rules! written {
    (own) => {
        true
    };
    ($($kind:tt)+) => {
        false
    };
}

macro_rules! here {
    ($name:ident plain) => {
        None
    };
    ($name:ident own) => {{
        // SAFETY: only the address is used, to be called under the function's own type.
        let entry = unsafe { std::mem::transmute::<*const (), Entry>(crate::entries::$name as *const ()) };
        Some(entry)
    }};
    ($name:ident $($kind:tt)+) => {
        Some($name as Entry)
    };
}

/// How many entry points there are.
const COUNT: usize = NAMES.len();

/// The real functions; null until one is first called.
pub(crate) static SLOTS: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

include!("entry_points.rs");
