//! Reads and writes the element types on the host. Arithmetic is in f32; storing rounds to nearest, ties to even.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::borrow::Cow;

/// An element type on the host.
pub(crate) trait Stored: Pod {
    fn load(self) -> f32;
    fn store(value: f32) -> Self;
    /// Converts all of `from`, which has the length of `to`.
    fn load_all(from: &[Self], to: &mut [f32]);
    /// Converts all of `from` to `to`, which has its length.
    fn store_all(from: &[f32], to: &mut [Self]);
    /// The values unchanged, if this type is f32.
    fn as_f32(values: &[Self]) -> Option<&[f32]>;
}

impl Stored for f32 {
    fn load(self) -> f32 {
        self
    }

    fn store(value: f32) -> Self {
        value
    }

    fn load_all(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn store_all(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn as_f32(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }
}

macro_rules! stored_half {
    ($half:ty) => {
        impl Stored for $half {
            fn load(self) -> f32 {
                self.to_f32()
            }

            fn store(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn load_all(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn store_all(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }

            fn as_f32(_: &[Self]) -> Option<&[f32]> {
                None
            }
        }
    };
}

stored_half!(bf16);
stored_half!(f16);

/// Evaluates an expression with `$type` standing for the Rust type of an element.
macro_rules! with_stored {
    ($element:expr, $type:ident => $body:expr) => {
        match $element {
            $crate::storage::Element::F32 => {
                type $type = f32;
                $body
            }
            $crate::storage::Element::Bf16 => {
                type $type = half::bf16;
                $body
            }
            $crate::storage::Element::F16 => {
                type $type = half::f16;
                $body
            }
        }
    };
}
pub(crate) use with_stored;

impl Element {
    /// The value of this type nearest to `value`; ties to even.
    ///
    /// ```
    /// use kernels::Element;
    ///
    /// assert_eq!(Element::Bf16.round(1.0 + 1.0 / 256.0), 1.0);
    /// assert_eq!(Element::F16.round(70_000.0), f32::INFINITY);
    /// ```
    #[must_use]
    pub fn round(self, value: f32) -> f32 {
        with_stored!(self, T => T::store(value).load())
    }

    /// Rows of `cols` values as bytes of this type, with `pitch` elements from one row to the next, for the upload of a
    /// matrix. The padding between rows is zero; there is none after the last row.
    ///
    /// # Panics
    ///
    /// If `cols` is zero, does not divide the number of values, or is above `pitch`.
    #[must_use]
    pub fn pack(self, values: &[f32], cols: u32, pitch: u32) -> Vec<u8> {
        let (cols, pitch) = (cols as usize, pitch as usize);
        assert!(cols > 0 && cols <= pitch && values.len().is_multiple_of(cols), "rows of {cols}, pitch {pitch}");
        let Some(last) = (values.len() / cols).checked_sub(1) else { return Vec::new() };
        with_stored!(self, T => {
            let mut packed = vec![T::store(0.0); last * pitch + cols];
            for (to, from) in packed.chunks_mut(pitch).zip(values.chunks_exact(cols)) {
                T::store_all(from, &mut to[..cols]);
            }
            bytemuck::cast_slice(&packed).to_vec()
        })
    }

    /// Writes all of `values` to `out`, rounded to this type.
    ///
    /// # Panics
    ///
    /// If the length of `out` does not match the number of elements, or `out` is not aligned to them.
    pub fn write(self, values: &[f32], out: &mut [u8]) {
        with_stored!(self, T => T::store_all(values, bytemuck::cast_slice_mut(out)));
    }

    /// The values of a matrix from bytes of this type in the layout of [`pack`](Self::pack); bytes after the last row
    /// are ignored.
    ///
    /// # Panics
    ///
    /// If `cols` is zero or above `pitch`, or there are too few bytes for this many rows.
    #[must_use]
    pub fn unpack(self, bytes: &[u8], rows: u32, cols: u32, pitch: u32) -> Vec<f32> {
        let (rows, cols, pitch) = (rows as usize, cols as usize, pitch as usize);
        assert!(cols > 0 && cols <= pitch, "rows of {cols}, pitch {pitch}");
        // Values are read one by one, because the bytes may be unaligned.
        with_stored!(self, T => {
            let element = |at: usize| bytemuck::pod_read_unaligned::<T>(&bytes[at * size_of::<T>()..][..size_of::<T>()]).load();
            (0..rows).flat_map(|row| (0..cols).map(move |col| row * pitch + col)).map(element).collect()
        })
    }
}

impl Precision {
    /// The value of a stored operand in a GEMM: unchanged, or for [`Precision::Tf32`] rounded to 11 bits of significand
    /// (nearest, ties away from zero, as `cvt.rna.tf32.f32` does).
    #[must_use]
    pub fn operand(self, value: f32) -> f32 {
        if self == Precision::Tf32 { round_to_tf32(value) } else { value }
    }
}

fn round_to_tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    // Half of the last retained bit is added to the magnitude; a carry into the exponent gives the correct result, too.
    f32::from_bits((value.to_bits() + 0x1000) & !0x1fff)
}

/// A GEMM operand: f32 values, and the elements from one row to the next.
pub(crate) struct Operand<'a> {
    pub(crate) values: Cow<'a, [f32]>,
    pub(crate) pitch: usize,
}

impl<'a> Operand<'a> {
    /// The stored operand if the GEMM uses it unchanged, otherwise a dense copy.
    pub(crate) fn new<T: Stored>(matrix: &'a [T], cols: u32, pitch: u32, precision: Precision) -> Self {
        let (cols, pitch) = (cols as usize, pitch as usize);
        if let (Precision::F32, Some(values)) = (precision, T::as_f32(matrix)) {
            return Self { values: values.into(), pitch };
        }
        let mut dense = vec![0.0; matrix.len().div_ceil(pitch) * cols];
        for (to, from) in dense.chunks_exact_mut(cols).zip(matrix.chunks(pitch)) {
            T::load_all(&from[..cols], to);
            if precision == Precision::Tf32 {
                to.iter_mut().for_each(|value| *value = round_to_tf32(*value));
            }
        }
        Self { values: dense.into(), pitch: cols }
    }
}

// Element types, and precisions of GEMMs.

/// Storage of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// IEEE 754 binary32.
    #[default]
    F32,
    /// The upper half of a binary32: 8 bits of exponent, 8 of significand.
    Bf16,
    /// IEEE 754 binary16: 5 bits of exponent, 11 of significand.
    F16,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }

    /// Elements from one row of a matrix to the next: `cols` rounded up to 16 bytes, so that each row can be read 16
    /// bytes at a time. The padding between `cols` and the pitch is undefined and never used.
    #[must_use]
    pub const fn pitch(self, cols: u32) -> u32 {
        // CAST: 16 / bytes is 4 or 8.
        cols.next_multiple_of((16 / self.bytes()) as u32)
    }
}

/// Precision of a GEMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Precision {
    /// f32 storage, f32 multiply-adds; each is rounded once.
    #[default]
    F32,
    /// f32 storage, tensor cores: operands rounded to 11 bits of significand, sums in f32.
    Tf32,
    /// bf16 storage, tensor cores, sums in f32.
    Bf16,
    /// f16 storage, tensor cores, sums in f32.
    F16,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16];

    /// Element type of the operands.
    #[must_use]
    pub const fn element(self) -> Element {
        match self {
            Precision::F32 | Precision::Tf32 => Element::F32,
            Precision::Bf16 => Element::Bf16,
            Precision::F16 => Element::F16,
        }
    }

    /// Part of kernel names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_rounds_to_nearest_even() {
        let step = |bits: i32| 2.0_f32.powi(-bits);
        for (element, bits) in [(Element::Bf16, 7), (Element::F16, 10)] {
            assert_eq!(element.round(1.0 + step(bits + 1)), 1.0);
            assert_eq!(element.round(1.0 + 3.0 * step(bits + 1)), 1.0 + 2.0 * step(bits));
            assert_eq!(element.round(1.0 + step(bits + 1) + step(bits + 4)), 1.0 + step(bits));
            assert!(element.round(f32::NAN).is_nan());
            assert_eq!(element.round(f32::NEG_INFINITY), f32::NEG_INFINITY);
        }
        assert_eq!(Element::F32.round(0.1), 0.1);
        // The smallest subnormal of f16, and half of it.
        assert_eq!(Element::F16.round(step(24)), step(24));
        assert_eq!(Element::F16.round(step(25)), 0.0);
        assert_eq!(Element::F16.round(65_520.0), f32::INFINITY);
        assert_eq!(Element::Bf16.round(f32::MAX), f32::INFINITY);
    }

    #[test]
    fn tf32_rounds_ties_away_from_zero() {
        let step = |bits: i32| 2.0_f32.powi(-bits);
        let round = |value| Precision::Tf32.operand(value);
        assert_eq!(round(1.0 + step(11)), 1.0 + step(10));
        assert_eq!(round(-1.0 - step(11)), -1.0 - step(10));
        assert_eq!(round(1.0 + step(12)), 1.0);
        assert_eq!(round(2.0 - step(20)), 2.0);
        assert_eq!(round(f32::MAX), f32::INFINITY);
        assert_eq!(round(f32::INFINITY), f32::INFINITY);
        assert!(round(f32::NAN).is_nan());
        assert_eq!(Precision::Bf16.operand(1.0 + step(20)), 1.0 + step(20));
    }

    #[test]
    fn pack_unpack_round_trip() {
        let values = [1.0, -2.5, 3.0, 0.5, 6.0, -7.0];
        for element in [Element::F32, Element::Bf16, Element::F16] {
            let packed = element.pack(&values, 3, 8);
            assert_eq!(packed.len() as u64, 11 * element.bytes());
            assert_eq!(element.unpack(&packed, 2, 3, 8), values);
            assert_eq!(element.unpack(&element.pack(&values, 2, 2), 3, 2, 2), values);
            assert!(element.pack(&[], 3, 8).is_empty());
        }
    }
}
