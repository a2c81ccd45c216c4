//! Call stacks of memory calls: return addresses, each distinct stack once.
//!
//! Frame pointers are rare in CUDA programs, so that stacks are walked by their unwind tables (glibc's `backtrace`). A stack gets a
//! number; its addresses are written once, as modules and offsets, into the notes beside the record. `vramlab run` finds functions and
//! lines for them when the program has ended.

use crate::{record, settings};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, OnceLock, PoisonError};
use vramlab_histories::calls::{NO_STACK, frame_line, stack_line};

/// Frames of a stack, this library's included.
const DEPTH: usize = 32;
/// Frames that are kept.
const KEPT: usize = 24;
/// Stacks that a thread remembers without a lock.
const REMEMBERED: usize = 64;
/// Most distinct stacks of a process.
const MOST: usize = 1 << 16;

thread_local! {
    /// Hashes of stacks that this thread had, with their numbers.
    static LAST: [Cell<(u64, u32)>; REMEMBERED] = const { [const { Cell::new((0, NO_STACK)) }; REMEMBERED] };
}

#[derive(Default)]
struct Known {
    stacks: HashMap<Box<[usize]>, u32>,
    frames: HashMap<usize, u32>,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// The number of the calling program's stack; [`NO_STACK`] if none is recorded.
pub(crate) fn current() -> u32 {
    if !settings::get().stacks {
        return NO_STACK;
    }
    let mut addresses = [std::ptr::null_mut::<c_void>(); DEPTH];
    // CAST: a small number. SAFETY: the array has as many entries.
    let count = unsafe { libc::backtrace(addresses.as_mut_ptr(), DEPTH as libc::c_int) };
    let count = usize::try_from(count).unwrap_or(0).min(DEPTH);
    // CAST: addresses as numbers.
    let addresses = addresses.map(|address| address as usize);
    let own = own_range();
    let frames = &addresses[..count];
    let first = frames.iter().position(|address| !own.contains(address)).unwrap_or(count);
    let frames = &frames[first..count.min(first + KEPT)];
    if frames.is_empty() {
        return NO_STACK;
    }
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(frames);
    // CAST: an index below REMEMBERED.
    let slot = (hash % REMEMBERED as u64) as usize;
    let remembered = LAST.try_with(|last| last[slot].get()).unwrap_or((0, NO_STACK));
    if remembered.0 == hash && remembered.1 != NO_STACK {
        return remembered.1;
    }
    let number = number(frames);
    let _ = LAST.try_with(|last| last[slot].set((hash, number)));
    number
}

/// Forgets all stacks: a child process writes notes of its own.
pub(crate) fn forget() {
    // The lock may have been held by a thread that the child does not have.
    if let Ok(mut known) = KNOWN.try_lock() {
        *known = None;
    }
    let _ = LAST.try_with(|last| last.iter().for_each(|one| one.set((0, NO_STACK))));
}

/// The number of a stack, which is written if it is new.
fn number(frames: &[usize]) -> u32 {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(number) = known.stacks.get(frames) {
        return *number;
    }
    if known.stacks.len() >= MOST {
        return NO_STACK;
    }
    let numbers: Vec<u32> = frames.iter().map(|address| frame(&mut known.frames, *address)).collect();
    let number = u32::try_from(known.stacks.len() + 1).unwrap_or(NO_STACK);
    known.stacks.insert(frames.into(), number);
    record::note(&stack_line(number, &numbers));
    number
}

/// The number of a return address, which is written if it is new.
fn frame(frames: &mut HashMap<usize, u32>, address: usize) -> u32 {
    let next = u32::try_from(frames.len() + 1).unwrap_or(0);
    *frames.entry(address).or_insert_with(|| {
        let (module, bias) = module_of(address);
        // The call is before the address at which it returns.
        record::note(&frame_line(next, address.wrapping_sub(bias).wrapping_sub(1) as u64, &module));
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
