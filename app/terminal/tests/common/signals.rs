//! Signals as a shell leaves them, for a test program and its children.
//!
//! Dispositions and masks are inherited. Under `nohup`, in the background of a script or under a supervisor, a test would otherwise find
//! some signals ignored or blocked: a child that nobody collects, a program that cannot be interrupted, a wait that never ends. What
//! the programs do then has tests that set it.

/// Runs before `main`, when the program has one thread.
#[used]
#[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
#[cfg_attr(not(target_os = "macos"), unsafe(link_section = ".init_array"))]
static AS_A_SHELL_LEAVES_THEM: extern "C" fn() = reset;

extern "C" fn reset() {
    // The system refuses SIGKILL and SIGSTOP.
    for signal in 1..32 {
        // SAFETY: `signal` sets a disposition and takes no pointer; no other thread exists.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` writes a complete set to this function's own place.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: `sigemptyset` initialised the set; a null pointer requests no previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) };
}

/// Makes a command start with signals blocked, and others ignored, as a careless supervisor starts it.
#[allow(dead_code, reason = "not every test program starts a command so")]
pub(crate) fn withhold(
    command: &mut std::process::Command,
    blocked: std::ops::Range<i32>,
    ignored: std::ops::Range<i32>,
) {
    use std::os::unix::process::CommandExt;
    let set = move || {
        // The system refuses some: SIGKILL, SIGSTOP and those of the C library.
        for signal in ignored.clone() {
            // SAFETY: `signal` sets a disposition and takes no pointer.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        let mut mask = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` writes a complete set to this closure's own place.
        unsafe { libc::sigemptyset(mask.as_mut_ptr()) };
        for signal in blocked.clone() {
            // SAFETY: `sigemptyset` initialised the set.
            unsafe { libc::sigaddset(mask.as_mut_ptr(), signal) };
        }
        // SAFETY: `sigemptyset` initialised the set; a null pointer requests no previous mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), std::ptr::null_mut()) };
        Ok(())
    };
    // SAFETY: code between fork and exec must be async-signal-safe; the closure's calls are, and nothing is allocated.
    unsafe { command.pre_exec(set) };
}
