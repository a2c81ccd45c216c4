//! Shared by the tests on the host and on a GPU: cases with their expected results, and their layout in memory.

pub(crate) mod cases;

use std::ptr::NonNull;

use half::{bf16, f16};
use kernels::{Element, HostMemory, Operation};

/// Expected contents of a buffer after the operation.
#[derive(Clone, Debug)]
pub(crate) enum Expected {
    /// Its bytes of before.
    Unchanged,
    /// Exactly these bytes.
    Exact(Vec<u8>),
    /// Rows of `cols` elements, each within the second number of the first: if that is zero the same bits, and any NaN
    /// for a NaN. What lies between a row and the next may be anything.
    Rows { element: Element, cols: usize, pitch: usize, values: Vec<(f64, f64)> },
    /// Its bytes of before but for one f32, at this place, within the second number of the first.
    Slot(usize, (f64, f64)),
    /// Anything: room to work in.
    Anything,
}

/// A buffer of a case.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) before: Vec<u8>,
    pub(crate) after: Expected,
}

/// Makes the operation, given the addresses of its buffers.
pub(crate) type Build = Box<dyn Fn(&[u64]) -> Box<dyn Operation> + Send + Sync>;

/// An operation on given data, with the result it must have.
pub(crate) struct Case {
    pub(crate) label: String,
    pub(crate) buffers: Vec<Buffer>,
    /// Numbers of the buffers of which the operation takes a part that other buffers say.
    #[allow(dead_code, reason = "asked only where a simulated device hears of buffers")]
    pub(crate) picked: Vec<usize>,
    pub(crate) build: Build,
}

/// Distance between buffers; what lies between them must stay as it is.
const GUARD: usize = 256;
/// As bytes of an `f32` this is NaN, as a label no class: reading what was never written shows.
pub(crate) const POISON: u8 = 0xff;

impl Case {
    /// True for launches of linear layers, which read 16 bytes at a time.
    pub(crate) fn is_linear(&self) -> bool {
        self.label.starts_with("linear_")
    }

    /// Offsets of the buffers in one region, and the region's contents before the operation. Each buffer begins `skew`
    /// bytes after a multiple of 256.
    pub(crate) fn region(&self, skew: usize) -> (Vec<usize>, Vec<u8>) {
        let mut offsets = Vec::new();
        let mut image = vec![POISON; GUARD];
        for buffer in &self.buffers {
            image.resize(image.len().next_multiple_of(GUARD) + skew, POISON);
            offsets.push(image.len());
            image.extend_from_slice(&buffer.before);
            image.resize(image.len() + GUARD, POISON);
        }
        (offsets, image)
    }

    /// Panics unless `image` is what the region must hold after the operation.
    pub(crate) fn verify(&self, offsets: &[usize], image: &[u8]) {
        let label = &self.label;
        let mut gap = 0;
        for (number, (buffer, &offset)) in self.buffers.iter().zip(offsets).enumerate() {
            let end = offset + buffer.before.len();
            assert!(image[gap..offset].iter().all(|&byte| byte == POISON), "{label}: wrote before buffer {number}");
            gap = end;
            let found = &image[offset..end];
            match &buffer.after {
                Expected::Unchanged => assert!(found == buffer.before, "{label}: input {number} was changed"),
                Expected::Exact(wanted) => {
                    for (at, (found, wanted)) in found.chunks(4).zip(wanted.chunks(4)).enumerate() {
                        assert!(found == wanted, "{label}: buffer {number}[{at}] is {found:?}, not {wanted:?}");
                    }
                }
                Expected::Rows { element, cols, pitch, values } => {
                    let found = rows(*element, *cols, *pitch, found);
                    assert_eq!(found.len(), values.len());
                    for (at, (&found, &wanted)) in found.iter().zip(values).enumerate() {
                        check(found, wanted, || format!("{label}: buffer {number}[{at}]"));
                    }
                }
                Expected::Slot(slot, wanted) => {
                    let place = slot * size_of::<f32>()..(slot + 1) * size_of::<f32>();
                    let value = bytemuck::pod_read_unaligned::<f32>(&found[place.clone()]);
                    check(value, *wanted, || format!("{label}: buffer {number}[{slot}]"));
                    let others = |bytes: &[u8]| [&bytes[..place.start], &bytes[place.end..]].concat();
                    assert!(others(found) == others(&buffer.before), "{label}: other slots of {number} were changed");
                }
                Expected::Anything => {}
            }
        }
        assert!(image[gap..].iter().all(|&byte| byte == POISON), "{label}: wrote after the last buffer");
    }

    /// Panics unless two images that both pass [`Case::verify`] agree: the same bits where the result is exact,
    /// elsewhere within the tolerances of both.
    pub(crate) fn compare(&self, offsets: &[usize], one: &[u8], other: &[u8]) {
        for (buffer, &offset) in self.buffers.iter().zip(offsets) {
            let range = offset..offset + buffer.before.len();
            match &buffer.after {
                Expected::Rows { element, cols, pitch, values } => {
                    let floats = |image: &[u8]| rows(*element, *cols, *pitch, &image[range.clone()]);
                    for ((one, other), &(wanted, allowed)) in floats(one).into_iter().zip(floats(other)).zip(values) {
                        agree(one, other, wanted, allowed, &self.label);
                    }
                }
                Expected::Slot(slot, (wanted, allowed)) => {
                    let float = |image: &[u8]| rows(Element::F32, 1, 1, &image[range.clone()])[*slot];
                    agree(float(one), float(other), *wanted, *allowed, &self.label);
                }
                Expected::Anything => {}
                _ => assert!(one[range.clone()] == other[range], "{}: bits differ", self.label),
            }
        }
    }

    /// Runs the CPU reference and gives the region's contents afterwards.
    pub(crate) fn run_on_host(&self, skew: usize) -> Vec<u8> {
        let (offsets, image) = self.region(skew);
        let arena = Arena::new(&image);
        let addresses: Vec<u64> = offsets.iter().map(|&offset| BASE + offset as u64).collect();
        // SAFETY: the arena is this test's own and outlives the call.
        unsafe { (self.build)(&addresses).run_on_host(&arena) }
            .unwrap_or_else(|error| panic!("{}: {error}", self.label));
        arena.contents()
    }
}

/// One more value as it is stored.
pub(crate) fn encode(element: Element, value: f32, to: &mut Vec<u8>) {
    match element {
        Element::F32 => to.extend(value.to_ne_bytes()),
        Element::Bf16 => to.extend(bf16::from_f32(value).to_ne_bytes()),
        Element::F16 => to.extend(f16::from_f32(value).to_ne_bytes()),
    }
}

fn decode(element: Element, bytes: &[u8]) -> f32 {
    match element {
        Element::F32 => bytemuck::pod_read_unaligned(bytes),
        Element::Bf16 => bytemuck::pod_read_unaligned::<bf16>(bytes).to_f32(),
        Element::F16 => bytemuck::pod_read_unaligned::<f16>(bytes).to_f32(),
    }
}

/// The elements of rows, without what lies between them.
fn rows(element: Element, cols: usize, pitch: usize, bytes: &[u8]) -> Vec<f32> {
    let size = element.bytes() as usize;
    let elements = |row| <[u8]>::chunks_exact(row, size).take(cols);
    bytes.chunks(pitch * size).flat_map(elements).map(|bytes| decode(element, bytes)).collect()
}

/// Panics unless a value is what it has to be. The place is put into words only then.
fn check(found: f32, (wanted, allowed): (f64, f64), place: impl Fn() -> String) {
    if wanted.is_nan() {
        assert!(found.is_nan(), "{} is {found}, not NaN", place());
    } else if allowed == 0.0 || wanted.is_infinite() {
        assert!(found.to_bits() == (wanted as f32).to_bits(), "{} is {found}, not {wanted}", place());
    } else {
        let off = (f64::from(found) - wanted).abs();
        // Written so that NaN fails.
        assert!(off <= allowed, "{} is {found}, not {wanted}: off by {off:e}, allowed {allowed:e}", place());
    }
}

/// Panics unless two values that both pass [`check`] agree.
fn agree(one: f32, other: f32, wanted: f64, allowed: f64, label: &str) {
    let off = (f64::from(one) - f64::from(other)).abs();
    let same = one.to_bits() == other.to_bits() || (wanted.is_nan() && one.is_nan() && other.is_nan());
    assert!(same || (allowed > 0.0 && off <= 2.0 * allowed), "{label}: {one} and {other}");
}

/// Nominal address of the arena.
pub(crate) const BASE: u64 = 0x7000_0000_0000;

/// Host memory under made-up device addresses.
pub(crate) struct Arena {
    /// `u128` for alignment.
    memory: NonNull<u128>,
    words: usize,
    bytes: usize,
}

impl Arena {
    pub(crate) fn new(image: &[u8]) -> Self {
        let mut words = vec![0_u128; image.len().div_ceil(size_of::<u128>())];
        bytemuck::cast_slice_mut(&mut words)[..image.len()].copy_from_slice(image);
        let words = Box::leak(words.into_boxed_slice());
        Self { words: words.len(), memory: NonNull::from(words).cast(), bytes: image.len() }
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        // SAFETY: `bytes` bytes of the box are initialised, and no operation is running.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<u8>(), self.bytes) }.to_vec()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak` in `new`, with this length.
        drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(self.memory, self.words).as_ptr()) });
    }
}

impl HostMemory for Arena {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        let start = addr.checked_sub(BASE)?;
        let end = start.checked_add(bytes)?;
        // SAFETY: the range is inside the allocation.
        (end <= self.bytes as u64).then(|| unsafe { self.memory.cast::<u8>().add(start as usize) })
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.label)
    }
}
