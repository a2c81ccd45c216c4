//! Element types, and how products are computed.

/// How a matrix is stored.
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
    /// bytes at a time. What lies between `cols` and the pitch is undefined and never used.
    #[must_use]
    pub const fn pitch(self, cols: u32) -> u32 {
        // CAST: 16 / bytes is 4 or 8.
        cols.next_multiple_of((16 / self.bytes()) as u32)
    }
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Precision {
    /// f32 storage, f32 multiply-adds: each product and sum rounded once.
    #[default]
    F32,
    /// f32 storage, tensor cores: operands rounded to 11 bits of significand, sums in f32.
    Tf32,
    /// bf16 storage, tensor cores, sums in f32.
    Bf16,
    /// f16 storage, tensor cores, sums in f32.
    F16,
    /// f32 storage, tensor cores, sums in f32: each operand is split into two of 11 bits of significand, and the product is
    /// made of three, which keeps the accuracy of f32. A magnitude that rounds to 2¹²⁸ in 11 bits counts as infinite. The
    /// host multiplies in f32.
    ///
    /// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
    /// theoretical peak performance" (2022), arXiv 2203.03341; CUTLASS calls it 3xTF32.
    F32x3,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Precision; 5] =
        [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16, Precision::F32x3];

    /// How the operands are stored.
    #[must_use]
    pub const fn element(self) -> Element {
        match self {
            Precision::F32 | Precision::Tf32 | Precision::F32x3 => Element::F32,
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
            Precision::F32x3 => "f32x3",
        }
    }
}
