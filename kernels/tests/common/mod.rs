//! Shared by the tests on the host and on a GPU: cases with their expected results, and their layout in memory.

pub(crate) mod cases;

use std::ptr::NonNull;

use half::{bf16, f16};
use kernels::{Element, HostMemory, Operation};

/// Expected contents of a buffer after the operation.
#[derive(Clone, Debug)]
pub(crate) enum Expected {
    /// The same bytes as before.
    Unchanged,
    /// Exactly these bytes.
    Exact(Vec<u8>),
    /// Rows of `cols` elements. Each value must be within the second number of the first; if the second is zero, the
    /// bits must be equal, and any NaN matches a NaN. The padding between rows may have any value.
    Rows { element: Element, cols: usize, pitch: usize, values: Vec<(f64, f64)> },
    /// The same bytes as before except one f32 at this index, within the second number of the first.
    Slot(usize, (f64, f64)),
    /// Any bytes: a workspace.
    Anything,
}

/// A buffer of a case.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) before: Vec<u8>,
    pub(crate) after: Expected,
}

/// Builds the operation from the addresses of its buffers.
pub(crate) type Build = Box<dyn Fn(&[u64]) -> Box<dyn Operation> + Send + Sync>;

/// An operation on given data, with its expected result.
pub(crate) struct Case {
    pub(crate) label: String,
    pub(crate) buffers: Vec<Buffer>,
    /// Indices of the buffers of which the operation reads a part that other buffers select.
    #[allow(dead_code, reason = "used only by the tests on the host")]
    pub(crate) selected: Vec<usize>,
    pub(crate) build: Build,
}

/// Distance between buffers; the bytes between them must not change.
const GUARD: usize = 256;
/// As bytes of an `f32` this is NaN, and as a label it is not a class, so reads of uninitialised memory are visible.
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

    /// Panics unless `image` has the region's expected contents after the operation.
    pub(crate) fn verify(&self, offsets: &[usize], image: &[u8]) {
        let label = &self.label;
        let mut gap = 0;
        for (number, (buffer, &offset)) in self.buffers.iter().zip(offsets).enumerate() {
            let end = offset + buffer.before.len();
            assert!(image[gap..offset].iter().all(|&byte| byte == POISON), "{label}: wrote before buffer {number}");
            gap = end;
            let actual = &image[offset..end];
            match &buffer.after {
                Expected::Unchanged => assert!(actual == buffer.before, "{label}: input {number} was changed"),
                Expected::Exact(expected) => {
                    for (at, (actual, expected)) in actual.chunks(4).zip(expected.chunks(4)).enumerate() {
                        assert!(actual == expected, "{label}: buffer {number}[{at}] is {actual:?}, not {expected:?}");
                    }
                }
                Expected::Rows { element, cols, pitch, values } => {
                    let actual = rows(*element, *cols, *pitch, actual);
                    assert_eq!(actual.len(), values.len());
                    for (at, (&actual, &expected)) in actual.iter().zip(values).enumerate() {
                        check(actual, expected, || format!("{label}: buffer {number}[{at}]"));
                    }
                }
                Expected::Slot(slot, expected) => {
                    let range = slot * size_of::<f32>()..(slot + 1) * size_of::<f32>();
                    let value = bytemuck::pod_read_unaligned::<f32>(&actual[range.clone()]);
                    check(value, *expected, || format!("{label}: buffer {number}[{slot}]"));
                    let others = |bytes: &[u8]| [&bytes[..range.start], &bytes[range.end..]].concat();
                    assert!(others(actual) == others(&buffer.before), "{label}: other slots of {number} were changed");
                }
                Expected::Anything => {}
            }
        }
        assert!(image[gap..].iter().all(|&byte| byte == POISON), "{label}: wrote after the last buffer");
    }

    /// Panics unless two images that both pass [`Case::verify`] agree: equal bits where the result is exact, otherwise
    /// within the tolerances of both.
    pub(crate) fn compare(&self, offsets: &[usize], left: &[u8], right: &[u8]) {
        for (buffer, &offset) in self.buffers.iter().zip(offsets) {
            let range = offset..offset + buffer.before.len();
            match &buffer.after {
                Expected::Rows { element, cols, pitch, values } => {
                    let floats = |image: &[u8]| rows(*element, *cols, *pitch, &image[range.clone()]);
                    for ((left, right), &(expected, allowed)) in floats(left).into_iter().zip(floats(right)).zip(values)
                    {
                        agree(left, right, expected, allowed, &self.label);
                    }
                }
                Expected::Slot(slot, (expected, allowed)) => {
                    let float = |image: &[u8]| rows(Element::F32, 1, 1, &image[range.clone()])[*slot];
                    agree(float(left), float(right), *expected, *allowed, &self.label);
                }
                Expected::Anything => {}
                _ => assert!(left[range.clone()] == right[range], "{}: bits differ", self.label),
            }
        }
    }

    /// Runs the CPU reference and returns the region's contents afterwards.
    pub(crate) fn run_on_host(&self, skew: usize) -> Vec<u8> {
        let (offsets, image) = self.region(skew);
        let arena = Arena::new(&image);
        let addresses: Vec<u64> = offsets.iter().map(|&offset| BASE + offset as u64).collect();
        // SAFETY: only this test uses the arena, which outlives the call.
        unsafe { (self.build)(&addresses).run_on_host(&arena) }
            .unwrap_or_else(|error| panic!("{}: {error}", self.label));
        arena.contents()
    }
}

/// Appends a value in the element's format.
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

/// The elements of the rows, without the padding.
fn rows(element: Element, cols: usize, pitch: usize, bytes: &[u8]) -> Vec<f32> {
    let size = element.bytes() as usize;
    let elements = |row| <[u8]>::chunks_exact(row, size).take(cols);
    bytes.chunks(pitch * size).flat_map(elements).map(|bytes| decode(element, bytes)).collect()
}

/// Panics unless a value is as expected. `location` is only called then.
fn check(actual: f32, (expected, allowed): (f64, f64), location: impl Fn() -> String) {
    if expected.is_nan() {
        assert!(actual.is_nan(), "{} is {actual}, not NaN", location());
    } else if allowed == 0.0 || expected.is_infinite() {
        assert!(actual.to_bits() == (expected as f32).to_bits(), "{} is {actual}, not {expected}", location());
    } else {
        let error = (f64::from(actual) - expected).abs();
        // This comparison fails for NaN.
        assert!(error <= allowed, "{} is {actual}, not {expected}: error {error:e}, allowed {allowed:e}", location());
    }
}

/// Panics unless two values that both pass [`check`] agree.
fn agree(left: f32, right: f32, expected: f64, allowed: f64, label: &str) {
    let difference = (f64::from(left) - f64::from(right)).abs();
    let same = left.to_bits() == right.to_bits() || (expected.is_nan() && left.is_nan() && right.is_nan());
    assert!(same || (allowed > 0.0 && difference <= 2.0 * allowed), "{label}: {left} and {right}");
}

/// Nominal address of the arena.
pub(crate) const BASE: u64 = 0x7000_0000_0000;

/// Host memory with nominal device addresses.
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
        // SAFETY: created by `Box::leak` in `new`, with this length.
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
