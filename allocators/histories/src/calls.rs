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

use std::io::Read;

/// The first word of a file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"vrlcall1");
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
    /// Stream handle; 0 for calls without one.
    pub stream: u64,
    /// Start in nanoseconds since the clock's zero.
    pub start_ns: u64,
    /// Host time in the call, in nanoseconds.
    pub total_ns: u64,
    /// The part of it that waited for work of the device.
    pub blocked_ns: u64,
    /// The call's result, 0 for success.
    pub code: u32,
}

impl CallRecord {
    /// The record as the file has it. The first word is written last.
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        // CAST: discriminants.
        let kind = self.call as u64 + 1;
        let served = u64::from(self.served == Served::Allocator);
        let first = kind | served << 8 | u64::from(self.device) << 16 | u64::from(self.thread) << 32;
        [first, self.addr, self.bytes, self.stream, self.start_ns, self.total_ns, self.blocked_ns, u64::from(self.code)]
    }

    /// The record of these words; `None` if it was not completed, or is of a kind that is not known.
    #[must_use]
    pub fn from_words(words: [u64; WORDS]) -> Option<Self> {
        let [first, addr, bytes, stream, start_ns, total_ns, blocked_ns, last] = words;
        let [kind, served, device, ..] = first.to_le_bytes();
        let call = *Call::ALL.get(usize::from(kind.checked_sub(1)?))?;
        let served = if served == 0 { Served::Driver } else { Served::Allocator };
        // CAST: halves of words.
        let (thread, code) = ((first >> 32) as u32, last as u32);
        Some(Self { call, served, device, thread, addr, bytes, stream, start_ns, total_ns, blocked_ns, code })
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
    fn another_file_is_refused() {
        Calls::read(&[0; HEADER][..]).unwrap_err();
        Calls::read(&b"short"[..]).unwrap_err();
    }
}
