//! Files with RMM's address of each block of a recording, to compare a replay with.
//!
//! ```text
//! # RMM 26.10 pool, NVIDIA H200; upstream blocks, bytes@address: 268435456@268435456 536870912@0
//! # a SLOT BYTES STREAM UPSTREAM_BLOCK OFFSET | f SLOT
//! a 0 154389504 0 0 0
//! f 0
//! ```
//!
//! The header has the blocks that RMM allocated from the device, in order. Only differences between addresses matter: they decide
//! between blocks of one size. Each line is an allocation or a free. A slot names a block until it is freed; streams are
//! numbered.

use super::input::Input;
use super::lines::{Lines, clip};
use super::{Place, Problem, ReadError, read};
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use vramlab_device::Bytes;
use vramlab_device::budget::Budget;
use vramlab_policies::contract::Path as Served;

/// Address of the file's lowest block, because no segment is at zero. A multiple of every relevant alignment.
const BASE: u64 = 1 << 30;

/// Beyond any device.
const MOST: u64 = 1 << 48;

/// Addresses of all blocks of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements {
    /// RMM's allocator: `pool` or `arena`.
    allocator: &'static str,
    /// The backend's setting for the size of the first block from the device.
    setting: &'static str,
    /// Whether that block is the default stream's.
    pub(crate) default_comes_first: bool,
    /// Blocks from the device in order: address and bytes.
    pub(crate) upstream: Vec<(u64, u64)>,
    /// Calls in order.
    pub(crate) calls: Vec<Placed>,
}

/// Placement of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    /// First address; 0 if the request failed.
    pub addr: u64,
    /// Size of the block, after rounding; 0 if the request failed.
    pub bytes: u64,
    /// How the request was served. `None` for a block from before recording started.
    pub path: Option<Served>,
}

/// A call with its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    /// An allocation.
    Alloc {
        /// Requested bytes.
        bytes: u64,
        /// Number of the stream.
        stream: u32,
        /// Address of the block.
        addr: u64,
    },
    /// The free of an allocation, by its number from 0.
    Free(u32),
}

impl Placements {
    /// Reads a file, plain or compressed with gzip or xz, within a budget of memory.
    ///
    /// # Errors
    /// [`ReadError`] for a file that cannot be opened, is of another kind, or contradicts itself.
    pub fn read(path: &Path, budget: &Budget) -> Result<Self, ReadError> {
        read::named(path, || Self::read_from(Box::new(read::open(path)?), budget))
    }

    /// As [`read`](Self::read), from any source; the error names no file.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn read_from(source: Box<dyn Read + '_>, budget: &Budget) -> Result<Self, ReadError> {
        let (mut input, mut claim) = (Input::new(source, budget)?, budget.claim());
        let mut lines = Lines::new(&mut input);
        let Some(header) = lines.next()? else { return Err(ReadError::at(Place::Whole, Problem::Empty)) };
        let header = read_header(header);
        let mut out = header.map_err(|text| lines.content(text))?;
        // The allocation in each slot.
        let (mut slots, mut allocations) = (HashMap::new(), 0);
        while let Some(line) = lines.next()? {
            if line.starts_with('#') {
                continue;
            }
            let call = out.read_call(line, &mut slots, &mut allocations);
            let call = call.map_err(|text| lines.content(text))?;
            // Claims the slot, a list and a table that grow by doubling.
            claim.add(2 * size_of::<(Placed, u64, u32)>()).map_err(|over| ReadError::over(lines.place(), over))?;
            out.calls.push(call);
        }
        if allocations == 0 {
            return Err(lines.content("there is no allocation in it; it was truncated"));
        }
        Ok(out)
    }

    /// Name of the allocator.
    #[must_use]
    pub fn allocator(&self) -> String {
        format!("RMM's {}", self.allocator)
    }

    /// A setting and its value in bytes from the file's header. The backend with this setting should reproduce every address.
    #[must_use]
    pub fn setting(&self) -> (&'static str, u64) {
        (self.setting, self.upstream.first().map_or(0, |(_, bytes)| *bytes))
    }

    fn read_call(&self, line: &str, slots: &mut HashMap<u64, u32>, allocations: &mut u32) -> Result<Placed, String> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let form = || format!("'{}' is neither 'a SLOT BYTES STREAM UPSTREAM_BLOCK OFFSET' nor 'f SLOT'", clip(line));
        let numbers = words.iter().skip(1).map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>();
        match (words.first(), numbers.as_deref()) {
            (Some(&"a"), Some(&[slot, bytes, stream, number, offset])) => {
                let block = usize::try_from(number).ok().and_then(|number| self.upstream.get(number));
                let (addr, room) = *block.ok_or_else(|| {
                    format!("upstream block {number} is not in the header, which has {}", self.upstream.len())
                })?;
                if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > room) {
                    return Err(format!(
                        "{bytes} bytes at offset {offset} are not in upstream block {number}, which has {room} by the \
                         header"
                    ));
                }
                if slots.insert(slot, *allocations).is_some() {
                    return Err(format!("slot {slot} is taken before it is freed"));
                }
                *allocations = allocations.checked_add(1).ok_or("there are more than 2^32 allocations")?;
                let stream = u32::try_from(stream).map_err(|_| format!("stream {stream} is not a small number"))?;
                Ok(Placed::Alloc { bytes, stream, addr: addr + offset })
            }
            (Some(&"f"), Some(&[slot])) => {
                slots.remove(&slot).map(Placed::Free).ok_or_else(|| format!("slot {slot} is freed but not taken"))
            }
            _ => Err(form()),
        }
    }
}

/// The first line.
fn read_header(line: &str) -> Result<Placements, String> {
    let wrong = || {
        format!(
            "'{}' does not begin a file of placements: expected '# RMM VERSION pool, DEVICE; upstream blocks, \
             bytes@address: ...', or arena",
            clip(line)
        )
    };
    let (heading, blocks) = line.split_once("bytes@address:").ok_or_else(wrong)?;
    let heading = heading.strip_prefix("# RMM ").and_then(|heading| heading.split_once(',')).ok_or_else(wrong)?;
    let (allocator, setting, default_comes_first) = match heading.0.split_ascii_whitespace().last() {
        Some("pool") => ("pool", "initial_pool_size", true),
        Some("arena") => ("arena", "arena_size", false),
        _ => return Err(wrong()),
    };
    let mut upstream = Vec::new();
    for word in blocks.split_ascii_whitespace() {
        let block = word.split_once('@').and_then(|(bytes, addr)| Some((addr.parse().ok()?, bytes.parse().ok()?)));
        let (addr, bytes): (u64, u64) = block.ok_or_else(|| format!("'{}' is not bytes@address", clip(word)))?;
        if bytes == 0 || bytes > MOST || addr > MOST || !addr.is_multiple_of(256) {
            return Err(format!("no device has a block {word}"));
        }
        upstream.push((BASE + addr, bytes));
    }
    if upstream.is_empty() {
        return Err("the header names no upstream block".to_owned());
    }
    let mut sorted = upstream.clone();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
        let [first, second] = [pair[0], pair[1]].map(|(addr, bytes)| format!("{}@{}", Bytes(bytes), addr - BASE));
        return Err(format!("the header's upstream blocks {first} and {second} overlap"));
    }
    Ok(Placements { allocator, setting, default_comes_first, upstream, calls: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "# RMM 26.10 pool, a device; upstream blocks, bytes@address: 1024@4096 512@0\n# a SLOT ...\n";

    fn read(text: &str) -> Result<Placements, String> {
        Placements::read_from(Box::new(text.as_bytes()), &Budget::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn calls_and_blocks_are_read() {
        let pool = read(&format!("{HEADER}a 3 100 0 0 256\na 4 512 1 1 0\nf 3\na 3 1 0 0 0\n")).unwrap();
        assert_eq!((pool.allocator(), pool.setting()), ("RMM's pool".to_owned(), ("initial_pool_size", 1024)));
        assert_eq!(pool.upstream, [(BASE + 4096, 1024), (BASE, 512)]);
        let alloc = |bytes, stream, addr| Placed::Alloc { bytes, stream, addr: BASE + addr };
        assert_eq!(pool.calls, [alloc(100, 0, 4352), alloc(512, 1, 0), Placed::Free(0), alloc(1, 0, 4096)]);
        let arena = read("# RMM 1 arena, x; upstream blocks, bytes@address: 512@0\na 0 1 0 0 0\n").unwrap();
        assert_eq!((arena.allocator(), arena.setting()), ("RMM's arena".to_owned(), ("arena_size", 512)));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        for (text, words) in [
            ("", "is empty"),
            ("hello\n", "does not begin a file of placements"),
            ("# RMM 1 bin, x; bytes@address: 512@0\n", "does not begin a file of placements"),
            ("# RMM 1 pool, x; bytes@address:\n", "names no upstream block"),
            ("# RMM 1 pool, x; bytes@address: 512\n", "'512' is not bytes@address"),
            ("# RMM 1 pool, x; bytes@address: 0@0\n", "no device has a block 0@0"),
            ("# RMM 1 pool, x; bytes@address: 1024@0 512@512\n", "1 KiB@0 and 512 B@512 overlap"),
            (HEADER, "no allocation in it"),
            ("a 0 1 0 2 0", ":3: upstream block 2 is not in the header, which has 2"),
            ("a 0 513 0 1 0", ":3: 513 bytes at offset 0 are not in upstream block 1"),
            ("a 0 1 0 1 18446744073709551615", "are not in upstream block 1"),
            ("a 0 1 0 0 0\na 0 1 0 0 0", ":4: slot 0 is taken before it is freed"),
            ("f 0", ":3: slot 0 is freed but not taken"),
            ("a 0 1", ":3: 'a 0 1' is neither"),
            ("x 0 1", ":3: 'x 0 1' is neither"),
        ] {
            let call = text.starts_with(['a', 'f', 'x']);
            let text = if call { format!("{HEADER}{text}") } else { text.to_owned() };
            let error = read(&text).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{text:?}: {error}");
        }
    }
}
