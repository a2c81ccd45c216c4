//! Call stacks of memory calls: return addresses, each distinct stack once.
//!
//! Frame pointers are rare in CUDA programs, so that stacks are walked by their unwind tables, which costs microseconds. Programs mostly
//! call from the same places: each thread remembers some stacks with the places of their return addresses, and compares those words
//! first. A stack gets a number; its addresses are written once, as modules and offsets, into the notes beside the record. `vramlab run` finds functions and
//! lines for them when the program has ended.

use crate::{record, settings};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Mutex, OnceLock, PoisonError};
use vramlab_histories::calls::{NO_STACK, frame_line, stack_line};

/// Frames of a stack, this library's included.
const DEPTH: usize = 32;
/// Frames that are kept.
const KEPT: usize = 24;
/// Stacks that a thread remembers without a lock: the number of classes of stack depths, and the stacks of each class. A program
/// such as PyTorch calls from hundreds of places, and a forgotten stack costs microseconds.
const CLASSES: usize = 64;
const REMEMBERED: usize = 8;
/// Most distinct stacks of a process.
const MOST: usize = 1 << 16;

/// A stack that this thread had: where it was, and its number.
#[derive(Clone, Copy)]
struct Last {
    /// Address of a variable of this library's innermost frame.
    here: usize,
    number: u32,
    count: usize,
    /// Return addresses, the innermost first, and where they lie.
    frames: [(usize, usize); KEPT],
}

impl Last {
    const NONE: Self = Self { here: 0, number: NO_STACK, count: 0, frames: [(0, 0); KEPT] };

    /// Whether the stack is the same. A frame's place follows from the return address and place of the frame inside of it, so that as
    /// many words are compared as are equal, and each lies in a frame that is there.
    fn is_same(&self, here: usize) -> bool {
        self.here == here
            && self.count > 0
            // SAFETY: the first lies in the caller's frame, and each further one in the caller of a frame that is the same.
            && self.frames[..self.count].iter().all(|(address, at)| unsafe { *(*at as *const usize) == *address })
    }
}

/// The stacks of one class that a thread had last.
struct Remembered {
    stacks: [Last; REMEMBERED],
    /// The next to be replaced.
    next: usize,
}

/// The class of a stack with this innermost variable. Stacks of one place in the program have one depth.
fn class(here: usize) -> usize {
    // 2^64 divided by the golden ratio; frames are multiples of 16 bytes. CAST: below `CLASSES`.
    (((here as u64) >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % CLASSES
}

/// The stacks that a thread had last.
struct Stacks {
    /// The process that they have numbers of.
    process: u32,
    /// By class. A class takes memory once it has a stack.
    classes: [Option<Box<Remembered>>; CLASSES],
}

impl Stacks {
    fn find(&self, here: usize) -> Option<u32> {
        if self.process != record::process() {
            return None;
        }
        // Two calls of one function differ in the return address only, so that all are looked at.
        let of_class = self.classes[class(here)].as_ref()?;
        of_class.stacks.iter().find(|one| one.is_same(here)).map(|one| one.number)
    }

    fn remember(&mut self, last: Last) {
        if self.process != record::process() {
            self.process = record::process();
            self.classes.iter_mut().flatten().for_each(|of_class| of_class.stacks.fill(Last::NONE));
        }
        let new = || Box::new(Remembered { stacks: [Last::NONE; REMEMBERED], next: 0 });
        let of_class = self.classes[class(last.here)].get_or_insert_with(new);
        of_class.stacks[of_class.next % REMEMBERED] = last;
        of_class.next = of_class.next.wrapping_add(1);
    }
}

thread_local! {
    static LAST: RefCell<Stacks> = const { RefCell::new(Stacks { process: 0, classes: [const { None }; CLASSES] }) };
}

/// A walk along the stack.
struct Walk {
    frames: [(usize, usize); DEPTH],
    count: usize,
}

unsafe extern "C" {
    fn _Unwind_Backtrace(
        step: extern "C" fn(*mut c_void, *mut c_void) -> libc::c_int,
        walk: *mut c_void,
    ) -> libc::c_int;
    fn _Unwind_GetIP(frame: *mut c_void) -> usize;
    fn _Unwind_GetCFA(frame: *mut c_void) -> usize;
}

extern "C" fn step(frame: *mut c_void, walk: *mut c_void) -> libc::c_int {
    const GO_ON: libc::c_int = 0;
    const END: libc::c_int = 5;
    // SAFETY: the unwinder passes a live frame, and `walk` is ours.
    let (walk, address, end) = unsafe { (&mut *walk.cast::<Walk>(), _Unwind_GetIP(frame), _Unwind_GetCFA(frame)) };
    if walk.count == DEPTH || address == 0 {
        return END;
    }
    walk.frames[walk.count] = (address, end);
    walk.count += 1;
    GO_ON
}

#[derive(Default)]
struct Known {
    stacks: HashMap<Box<[usize]>, u32>,
    frames: HashMap<usize, u32>,
}

/// The stacks and frames of this process; null before the first.
static KNOWN: AtomicPtr<Mutex<Known>> = AtomicPtr::new(ptr::null_mut());

fn known() -> &'static Mutex<Known> {
    let mut known = KNOWN.load(Acquire);
    if known.is_null() {
        let new = Box::into_raw(Box::default());
        // Of two threads, one makes it in vain.
        known = match KNOWN.compare_exchange(known, new, AcqRel, Acquire) {
            Ok(_) => new,
            Err(other) => other,
        };
    }
    // SAFETY: made above and never dropped.
    unsafe { &*known }
}

/// The number of the calling program's stack; [`NO_STACK`] if none is recorded.
#[inline(never)]
pub(crate) fn current() -> u32 {
    if !settings::get().stacks {
        return NO_STACK;
    }
    let here = 0_usize;
    // CAST: an address.
    let here = std::hint::black_box(&raw const here) as usize;
    let known = |last: &RefCell<Stacks>| last.try_borrow().ok()?.find(here);
    if let Ok(Some(number)) = LAST.try_with(known) {
        return number;
    }
    let mut walk = Walk { frames: [(0, 0); DEPTH], count: 0 };
    // SAFETY: the function matches, and the walk lives until the call returns.
    unsafe { _Unwind_Backtrace(step, (&raw mut walk).cast()) };
    let own = own_range();
    let all = &walk.frames[..walk.count];
    let first = all.iter().position(|(address, _)| !own.contains(address)).unwrap_or(all.len());
    let frames = &all[first..all.len().min(first + KEPT)];
    if frames.is_empty() {
        return NO_STACK;
    }
    let addresses: Vec<usize> = frames.iter().map(|(address, _)| *address).collect();
    let number = number(&addresses);
    // The unwinder gives the stack pointer after the return; on x86-64 the return address lies below it.
    if cfg!(target_arch = "x86_64") {
        let mut new = Last { here, number, count: frames.len(), frames: [(0, 0); KEPT] };
        for (place, (address, end)) in new.frames.iter_mut().zip(frames) {
            *place = (*address, end.wrapping_sub(size_of::<usize>()));
        }
        if new.is_same(here) {
            let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| last.remember(new)));
        }
    }
    number
}

/// Forgets all stacks: a child process writes notes of its own. Only stores into an atomic, since the lock may be held by a thread that
/// the child does not have.
pub(crate) fn forget() {
    KNOWN.store(ptr::null_mut(), Release);
}

/// The number of a stack, which is written if it is new.
fn number(frames: &[usize]) -> u32 {
    let known = &mut *known().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(number) = known.stacks.get(frames) {
        return *number;
    }
    if known.stacks.len() >= MOST {
        return NO_STACK;
    }
    // Written in one piece, as the file is opened for each.
    let mut lines = String::new();
    let numbers: Vec<u32> = frames.iter().map(|address| frame(&mut known.frames, *address, &mut lines)).collect();
    let number = u32::try_from(known.stacks.len() + 1).unwrap_or(NO_STACK);
    known.stacks.insert(frames.into(), number);
    lines += &stack_line(number, &numbers);
    record::note(&lines);
    number
}

/// The number of a return address, whose line is added if it is new.
fn frame(frames: &mut HashMap<usize, u32>, address: usize, lines: &mut String) -> u32 {
    let next = u32::try_from(frames.len() + 1).unwrap_or(0);
    *frames.entry(address).or_insert_with(|| {
        let (module, bias) = module_of(address);
        // The call is before the address at which it returns.
        *lines += &frame_line(next, address.wrapping_sub(bias).wrapping_sub(1) as u64, &module);
        next
    })
}

/// A loaded module in a search for an address.
struct Search {
    address: usize,
    found: Option<(String, usize, std::ops::Range<usize>)>,
}

unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> libc::c_int {
    // SAFETY: the dynamic linker passes a live structure with as many headers as it says, and `search` is ours.
    unsafe {
        let (info, search) = (&*info, &mut *search.cast::<Search>());
        // CAST: addresses of this 64-bit machine.
        let bias = info.dlpi_addr as usize;
        for at in 0..usize::from(info.dlpi_phnum) {
            let header = &*info.dlpi_phdr.add(at);
            let from = bias.wrapping_add(header.p_vaddr as usize);
            let range = from..from.wrapping_add(header.p_memsz as usize);
            if header.p_type == libc::PT_LOAD && range.contains(&search.address) {
                let name = match info.dlpi_name.is_null() {
                    true => String::new(),
                    false => String::from_utf8_lossy(CStr::from_ptr(info.dlpi_name).to_bytes()).into_owned(),
                };
                search.found = Some((name, bias, range));
                return 1;
            }
        }
    }
    0
}

fn find(address: usize) -> Option<(String, usize, std::ops::Range<usize>)> {
    let mut search = Search { address, found: None };
    // SAFETY: the function matches, and the search lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// The file that an address was loaded from, and what was added to its addresses.
fn module_of(address: usize) -> (String, usize) {
    match find(address) {
        // The program itself has no name.
        Some((name, bias, _)) if name.is_empty() => {
            let exe = std::fs::read_link("/proc/self/exe").unwrap_or_default();
            (String::from_utf8_lossy(exe.as_os_str().as_bytes()).into_owned(), bias)
        }
        Some((name, bias, _)) => (name, bias),
        None => (String::new(), 0),
    }
}

/// The code of this library.
fn own_range() -> &'static std::ops::Range<usize> {
    static RANGE: OnceLock<std::ops::Range<usize>> = OnceLock::new();
    // CAST: a function's address.
    RANGE.get_or_init(|| find(own_range as *const () as usize).map_or(0..0, |(.., range)| range))
}
