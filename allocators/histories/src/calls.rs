//! Memory calls of a CUDA program, as the library between it and the driver writes them (`app/inject`): a file of records of 64 bytes.
//!
//! The file is shared memory of the program, so that it is complete up to the moment at which the program ends, however that
//! happens. It begins with a header of one page, all in the machine's byte order:
//!
//! | word | content |
//! |---|---|
//! | 0 | [`MAGIC`] |
//! | 1 | process number |
//! | 2 | nanoseconds since 1970 at the clock's zero |
//! | 3 | records that were begun |
//! | 4 and on | [`Counter`]s |
//!
//! A record whose first byte is 0 was begun and not completed.
//!
//! Beside it lie [`Notes`], a text: call stacks and names that records refer to by their numbers.

use std::collections::BTreeMap;
use std::io::{BufRead, Read};

/// The first word of a file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"vrlcall2");
/// Bytes of the header.
pub const HEADER: usize = 4096;
/// Words of a record.
pub const WORDS: usize = 8;
/// The word that counts records.
pub const COUNT: usize = 3;
/// The first word of the [`Counter`]s.
pub const COUNTERS: usize = 4;

vramlab_device::named! {
    /// A kind of memory call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub enum Call {
        /// `cuMemAlloc`, so `cudaMalloc`.
        Alloc "cuMemAlloc",
        /// `cuMemAllocPitch`.
        Pitch "cuMemAllocPitch",
        /// `cuMemFree`, so `cudaFree`.
        Free "cuMemFree",
        /// `cuMemAllocAsync`.
        AllocAsync "cuMemAllocAsync",
        /// `cuMemAllocFromPoolAsync`.
        FromPool "cuMemAllocFromPoolAsync",
        /// `cuMemFreeAsync`.
        FreeAsync "cuMemFreeAsync",
        /// `cuMemAllocManaged`.
        Managed "cuMemAllocManaged",
        /// `cuMemHostAlloc` and `cuMemAllocHost`, so `cudaMallocHost`.
        HostAlloc "cuMemHostAlloc",
        /// `cuMemFreeHost`.
        HostFree "cuMemFreeHost",
        /// `cuMemHostRegister`.
        HostRegister "cuMemHostRegister",
        /// `cuMemHostUnregister`.
        HostUnregister "cuMemHostUnregister",
        /// `cuMemCreate`.
        Create "cuMemCreate",
        /// `cuMemRelease`.
        Release "cuMemRelease",
        /// `cuMemMap`.
        Map "cuMemMap",
        /// `cuMemUnmap`.
        Unmap "cuMemUnmap",
        /// `cuArrayCreate` and `cuArray3DCreate`.
        ArrayCreate "cuArrayCreate",
        /// `cuArrayDestroy`.
        ArrayDestroy "cuArrayDestroy",
        /// `cuMipmappedArrayCreate`.
        MipmapCreate "cuMipmappedArrayCreate",
        /// `cuMipmappedArrayDestroy`.
        MipmapDestroy "cuMipmappedArrayDestroy",
        /// `cuGraphAddMemAllocNode`: its memory is taken when the graph runs.
        GraphAlloc "cuGraphAddMemAllocNode",
        /// `cuGraphAddMemFreeNode`.
        GraphFree "cuGraphAddMemFreeNode",
        /// `cuMemAddressReserve`.
        Reserve "cuMemAddressReserve",
        /// `cuMemAddressFree`.
        Unreserve "cuMemAddressFree",
        /// `cuMemPoolCreate`.
        PoolCreate "cuMemPoolCreate",
        /// `cuMemPoolDestroy`.
        PoolDestroy "cuMemPoolDestroy",
        /// `cuMemPoolTrimTo`.
        PoolTrim "cuMemPoolTrimTo",
    }
}

/// Who had the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The driver.
    Driver,
    /// An allocator, between the program and the driver.
    Allocator,
}

vramlab_device::named! {
    /// A number in the header, which the program raises while it runs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(usize)]
    pub enum Counter {
        /// Calls of the driver that the allocator made for memory.
        DriverCalls "driver_calls",
        /// Nanoseconds in them.
        DriverNs "driver_ns",
        /// Bytes that the allocator has reserved.
        Reserved "reserved_bytes",
        /// Most bytes that it had reserved.
        ReservedPeak "reserved_peak_bytes",
        /// Records that had no room.
        Dropped "dropped_records",
        /// Requests of another kind than an allocator serves, or at a moment at which it serves none, that the driver served.
        Passed "passed_requests",
        /// 1 once work was put on another stream than the legacy default stream.
        Streams "several_streams",
        /// Refused calls that would have given other processes more than the program's own memory.
        Refused "refused_exports",
        /// Bytes of pinned host memory that its allocator has reserved.
        HostReserved "host_reserved_bytes",
        /// Most bytes that it had reserved.
        HostReservedPeak "host_reserved_peak_bytes",
        /// Calls of the driver that it made.
        HostDriverCalls "host_driver_calls",
        /// Nanoseconds in them.
        HostDriverNs "host_driver_ns",
    }
}

/// A memory call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// Which call.
    pub call: Call,
    /// Who served it.
    pub served: Served,
    /// Device, counted from 0.
    pub device: u8,
    /// The system's number of the thread.
    pub thread: u32,
    /// Address that the call returned or took.
    pub addr: u64,
    /// Bytes that were requested; of a free, those of the allocation where they are known, else 0.
    pub bytes: u64,
    /// Stream handle; 0 for calls without one. Of `cuMemCreate` the kind of memory, as its type of location has it: [`MEMORY_OF_GPU`], or
    /// memory of the host.
    pub stream: u64,
    /// Start in nanoseconds since the clock's zero.
    pub start_ns: u64,
    /// Host time in the call, in nanoseconds.
    pub total_ns: u64,
    /// The part of it that waited for work of the device.
    pub blocked_ns: u64,
    /// The call's result, 0 for success.
    pub code: u16,
    /// Number of what was queued last before a call that waited, in the [`Notes`]; 0 if that is unknown.
    pub behind: u16,
    /// Number of the call stack in the [`Notes`], or [`NO_STACK`].
    pub stack: u32,
}

impl CallRecord {
    /// The record as the file has it. The first word is written last.
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        // CAST: discriminants.
        let kind = self.call as u64 + 1;
        let served = u64::from(self.served == Served::Allocator);
        let first = kind | served << 8 | u64::from(self.device) << 16 | u64::from(self.thread) << 32;
        let last = u64::from(self.code) | u64::from(self.behind) << 16 | u64::from(self.stack) << 32;
        [first, self.addr, self.bytes, self.stream, self.start_ns, self.total_ns, self.blocked_ns, last]
    }

    /// The record of these words; `None` if it was not completed, or is of a kind that is not known.
    #[must_use]
    pub fn from_words(words: [u64; WORDS]) -> Option<Self> {
        let [first, addr, bytes, stream, start_ns, total_ns, blocked_ns, last] = words;
        let [kind, served, device, ..] = first.to_le_bytes();
        let call = *Call::ALL.get(usize::from(kind.checked_sub(1)?))?;
        let served = if served == 0 { Served::Driver } else { Served::Allocator };
        // CAST: parts of words.
        let (thread, code, behind, stack) =
            ((first >> 32) as u32, last as u16, (last >> 16) as u16, (last >> 32) as u32);
        Some(Self {
            call,
            served,
            device,
            thread,
            addr,
            bytes,
            stream,
            start_ns,
            total_ns,
            blocked_ns,
            code,
            behind,
            stack,
        })
    }
}

/// The kind of memory of a `cuMemCreate` on a GPU.
pub const MEMORY_OF_GPU: u64 = 1;

/// The number of no stack.
pub const NO_STACK: u32 = 0;

/// A line of the notes for what calls waited behind: a kernel or a function of the driver.
#[must_use]
pub fn behind_line(number: u16, name: &str) -> String {
    format!("B\t{number}\t{}\n", one_line(name))
}

/// A line of the notes for a frame: the call's address in the module's file. The module is empty for code of no file.
#[must_use]
pub fn frame_line(number: u32, address: u64, module: &str) -> String {
    format!("F\t{number}\t{address:x}\t{}\n", one_line(module))
}

/// A line of the notes for a stack: numbers of its frames, the innermost first.
#[must_use]
pub fn stack_line(number: u32, frames: &[u32]) -> String {
    let frames: Vec<String> = frames.iter().map(u32::to_string).collect();
    format!("S\t{number}\t{}\n", frames.join(","))
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\t'], " ")
}

/// A return address of a program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotedFrame {
    /// The file that the code is from; empty if it is from none.
    pub module: String,
    /// Address of the call in that file.
    pub address: u64,
}

/// A value that records refer to by number. A process writes each line when its number is first used.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    behind: BTreeMap<u16, String>,
    frames: BTreeMap<u32, NotedFrame>,
    stacks: BTreeMap<u32, Vec<u32>>,
}

impl Notes {
    /// Reads notes. Lines that are damaged, such as the last one of a process that was killed, are left out.
    ///
    /// # Errors
    /// Those of reading.
    pub fn read(mut from: impl BufRead) -> std::io::Result<Self> {
        let mut out = Self::default();
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line)? > 0 {
            if line.ends_with(b"\n") {
                let _ = out.take(String::from_utf8_lossy(&line).trim_end_matches('\n'));
            }
            line.clear();
        }
        Ok(out)
    }

    /// `None` for a line that is damaged.
    fn take(&mut self, line: &str) -> Option<()> {
        let mut parts = line.splitn(4, '\t');
        let (kind, number) = (parts.next()?, parts.next()?);
        match kind {
            "B" => _ = self.behind.insert(number.parse().ok()?, parts.next()?.to_owned()),
            "F" => {
                let address = u64::from_str_radix(parts.next()?, 16).ok()?;
                self.frames.insert(number.parse().ok()?, NotedFrame { module: parts.next()?.to_owned(), address });
            }
            "S" => {
                let frames = parts.next()?.split(',').map(|frame| frame.parse().ok()).collect::<Option<_>>()?;
                self.stacks.insert(number.parse().ok()?, frames);
            }
            _ => {}
        }
        Some(())
    }

    /// The kernel or function of the driver that a call waited behind.
    #[must_use]
    pub fn behind(&self, number: u16) -> Option<&str> {
        self.behind.get(&number).map(String::as_str)
    }

    /// The frames of a stack, the innermost first, with their numbers.
    pub fn stack(&self, number: u32) -> impl Iterator<Item = (u32, &NotedFrame)> {
        let frames = self.stacks.get(&number).into_iter().flatten();
        frames.filter_map(|frame| Some((*frame, self.frames.get(frame)?)))
    }

    /// All frames with their numbers.
    pub fn frames(&self) -> impl Iterator<Item = (u32, &NotedFrame)> {
        self.frames.iter().map(|(number, frame)| (*number, frame))
    }
}

/// A file of memory calls.
#[derive(Clone, Debug)]
pub struct Calls {
    /// Process that wrote it.
    pub pid: u32,
    /// Nanoseconds since 1970 at the clock's zero.
    pub epoch_ns: u64,
    /// Calls in the order in which they took effect.
    pub records: Vec<CallRecord>,
    /// Records that were begun and not completed, because the program ended in between.
    pub incomplete: u64,
    counters: Vec<u64>,
}

impl Calls {
    /// Reads a file.
    ///
    /// # Errors
    /// Those of reading; `InvalidData` for a file that is of another kind.
    pub fn read(mut from: impl Read) -> std::io::Result<Self> {
        let mut header = [0; HEADER];
        from.read_exact(&mut header)?;
        let word = |bytes: &[u8], at: usize| {
            let bytes = bytes.get(at * 8..at * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_ne_bytes)
        };
        if word(&header, 0) != MAGIC {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "the file does not hold memory calls"));
        }
        let counters = (0..Counter::ALL.len()).map(|at| word(&header, COUNTERS + at)).collect();
        // CAST: a process number.
        let pid = word(&header, 1) as u32;
        let mut out = Self { pid, epoch_ns: word(&header, 2), records: Vec::new(), incomplete: 0, counters };
        let mut record = [0; WORDS * 8];
        for _ in 0..word(&header, COUNT) {
            if let Err(error) = from.read_exact(&mut record) {
                // The file ends where its last page was made.
                if error.kind() == std::io::ErrorKind::UnexpectedEof {
                    break;
                }
                return Err(error);
            }
            match CallRecord::from_words(std::array::from_fn(|at| word(&record, at))) {
                Some(record) => out.records.push(record),
                None => out.incomplete += 1,
            }
        }
        Ok(out)
    }

    /// A number of the header.
    #[must_use]
    pub fn counter(&self, counter: Counter) -> u64 {
        // CAST: the discriminant.
        self.counters.get(counter as usize).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> CallRecord {
        CallRecord {
            call: Call::FreeAsync,
            served: Served::Allocator,
            device: 3,
            thread: 0x8000_0001,
            addr: 0x7f00_0000_0200,
            bytes: 1 << 33,
            stream: 7,
            start_ns: 11,
            total_ns: 12,
            blocked_ns: 5,
            code: 999,
            behind: 0xfffe,
            stack: 0x8000_0002,
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        assert_eq!(CallRecord::from_words(record().words()), Some(record()));
        assert_eq!(CallRecord::from_words([0; WORDS]), None);
    }

    #[test]
    fn a_file_is_read_up_to_its_end() {
        let mut words = [0_u64; HEADER / 8];
        (words[0], words[1], words[2], words[COUNT]) = (MAGIC, 42, 1_000, 3);
        words[COUNTERS + Counter::Passed as usize] = 9;
        let mut file: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        file.extend([0; WORDS * 8]);
        file.extend(record().words().into_iter().flat_map(u64::to_ne_bytes));
        let calls = Calls::read(&file[..]).unwrap();
        assert_eq!((calls.pid, calls.epoch_ns, calls.incomplete), (42, 1_000, 1));
        assert_eq!(calls.records, [record()]);
        assert_eq!(calls.counter(Counter::Passed), 9);
    }

    #[test]
    fn notes_are_read_up_to_a_line_that_is_cut() {
        let text = behind_line(1, "gemm\tkernel") + &frame_line(1, 0x12ab, "/bin/a b") + &frame_line(2, 7, "");
        let text = text + &stack_line(9, &[2, 1]) + "X\t1\nF\tx\ny\nS\t10\t1,2";
        let notes = Notes::read(text.as_bytes()).unwrap();
        assert_eq!((notes.behind(1), notes.behind(2)), (Some("gemm kernel"), None));
        let frames: Vec<_> =
            notes.stack(9).map(|(number, frame)| (number, frame.module.as_str(), frame.address)).collect();
        assert_eq!(frames, [(2, "", 7), (1, "/bin/a b", 0x12ab)]);
        assert_eq!((notes.stack(10).count(), notes.frames().count()), (0, 2));
    }

    #[test]
    fn another_file_is_refused() {
        Calls::read(&[0; HEADER][..]).unwrap_err();
        Calls::read(&b"short"[..]).unwrap_err();
    }
}
