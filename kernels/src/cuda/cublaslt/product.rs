//! What cuBLASLt is asked for.

use cudarc::cublaslt::sys::{self, cublasLtEpilogue_t, cudaDataType};

use crate::plan::Product;
use crate::precision::{Element, Precision};

use cublasLtEpilogue_t::{
    CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU_BIAS,
};
use sys::cublasComputeType_t as Compute;

/// A product with what the library does right behind it: `out = alpha · a·b + beta · out`, then the bias and the ReLU.
/// Shapes and pitches are those of [`LinearArguments`](crate::cuda::LinearArguments), row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LibraryProduct {
    pub(crate) product: Product,
    pub(crate) precision: Precision,
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) a_pitch: u32,
    pub(crate) b_pitch: u32,
    pub(crate) out_pitch: u32,
    /// Type of the output, and of its bias.
    pub(crate) out: Element,
    /// Whether a bias is added, one value for each column.
    pub(crate) bias: bool,
    /// Whether negative results become zero.
    pub(crate) relu: bool,
}

pub(super) const fn data_type(element: Element) -> cudaDataType {
    match element {
        Element::F32 => cudaDataType::CUDA_R_32F,
        Element::Bf16 => cudaDataType::CUDA_R_16BF,
        Element::F16 => cudaDataType::CUDA_R_16F,
    }
}

impl LibraryProduct {
    /// Whether sums are in f16: the library does so only where its output is f16 too. What is added to weights stays in f32.
    pub(super) fn sums_in_f16(&self) -> bool {
        let half = self.precision == Precision::F16Accumulate && self.out == Element::F16;
        half && self.product != Product::Gradient
    }

    /// How it computes, and the type of alpha and beta.
    pub(super) fn compute(&self) -> (Compute, cudaDataType) {
        match self.precision {
            _ if self.sums_in_f16() => (Compute::CUBLAS_COMPUTE_16F, cudaDataType::CUDA_R_16F),
            Precision::Tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, cudaDataType::CUDA_R_32F),
            _ => (Compute::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
        }
    }

    pub(super) fn epilogue(&self) -> cublasLtEpilogue_t {
        match (self.bias, self.relu) {
            (false, false) => CUBLASLT_EPILOGUE_DEFAULT,
            (false, true) => CUBLASLT_EPILOGUE_RELU,
            (true, false) => CUBLASLT_EPILOGUE_BIAS,
            (true, true) => CUBLASLT_EPILOGUE_RELU_BIAS,
        }
    }

    /// Rows, columns and pitch of the library's A, B and D, and which of A and B it transposes.
    ///
    /// The library counts column by column, so every matrix is to it the transpose of ours, and it is asked for
    /// `outᵀ = bᵀ·aᵀ`: its A is our b.
    pub(super) fn layouts(&self) -> ([(u32, u32, u32); 3], [bool; 2]) {
        let Self { m, n, k, a_pitch, b_pitch, out_pitch, .. } = *self;
        let out = (n, m, out_pitch);
        match self.product {
            // x [m, k] and the weights [n, k].
            Product::Forward => ([(k, n, b_pitch), (k, m, a_pitch), out], [true, false]),
            // dy [m, k] and the weights [k, n].
            Product::Input => ([(n, k, b_pitch), (k, m, a_pitch), out], [false, false]),
            // dy [k, m] and x [k, n].
            Product::Gradient | Product::Update => ([(n, k, b_pitch), (m, k, a_pitch), out], [false, true]),
        }
    }

    /// Where a thread looks for it first: below 64.
    pub(super) fn slot(&self) -> usize {
        let kind = (self.product as u32) | (self.precision as u32) << 2 | u32::from(self.relu) << 5;
        let kind = kind | (self.out as u32) << 6 | u32::from(self.bias) << 8;
        let mixed = kind ^ self.m.rotate_left(9) ^ self.n.rotate_left(15) ^ self.k.rotate_left(22);
        // CAST: six bits.
        (mixed.wrapping_mul(0x9e37_79b1) >> 26) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(product: Product, precision: Precision, out: Element) -> LibraryProduct {
        let (m, n, k) = (5, 7, 11);
        let (a_pitch, b_pitch) = match product {
            Product::Forward => (k, k),
            Product::Input => (k, n),
            Product::Gradient | Product::Update => (m, n),
        };
        let [a_pitch, b_pitch] = [a_pitch, b_pitch].map(|cols| cols + 9);
        let out_pitch = n + 1;
        LibraryProduct { product, precision, m, n, k, a_pitch, b_pitch, out_pitch, out, bias: false, relu: false }
    }

    #[test]
    fn the_librarys_matrices_are_the_transposes_of_ours() {
        for of in Product::ALL {
            let product = product(of, Precision::F16, Element::F16);
            let ([a, b, out], transposed) = product.layouts();
            let shape =
                |(rows, cols, _): (u32, u32, u32), transposed| if transposed { (cols, rows) } else { (rows, cols) };
            assert_eq!(shape(a, transposed[0]), (product.n, product.k), "{of:?}");
            assert_eq!(shape(b, transposed[1]), (product.k, product.m), "{of:?}");
            assert_eq!(out, (product.n, product.m, product.out_pitch));
            // The library's columns are our rows, so that a pitch has room for what lies between the two.
            assert_eq!((a.2 - a.0, b.2 - b.0), (9, 9), "{of:?}");
        }
    }

    #[test]
    fn sums_are_in_f16_where_the_output_is_and_weights_are_not_stepped() {
        for of in Product::ALL {
            for precision in Precision::ALL {
                for out in [precision.element(), Element::F32] {
                    let product = product(of, precision, out);
                    let expected =
                        precision == Precision::F16Accumulate && out == Element::F16 && of != Product::Gradient;
                    assert_eq!(product.sums_in_f16(), expected, "{product:?}");
                    let (compute, scale) = product.compute();
                    assert_eq!(compute == Compute::CUBLAS_COMPUTE_16F, expected);
                    assert_eq!(scale == cudaDataType::CUDA_R_16F, expected, "alpha and beta are of the type of sums");
                    assert_eq!(compute == Compute::CUBLAS_COMPUTE_32F_FAST_TF32, precision == Precision::Tf32);
                }
            }
        }
    }

    #[test]
    fn the_epilogue_is_what_is_behind_the_product() {
        let plain = product(Product::Forward, Precision::F32, Element::F32);
        let with = |bias, relu| LibraryProduct { bias, relu, ..plain }.epilogue();
        assert_eq!(with(false, false), CUBLASLT_EPILOGUE_DEFAULT);
        assert_eq!(with(true, false), CUBLASLT_EPILOGUE_BIAS);
        assert_eq!(with(false, true), CUBLASLT_EPILOGUE_RELU);
        assert_eq!(with(true, true), CUBLASLT_EPILOGUE_RELU_BIAS);
    }

    #[test]
    fn the_products_of_a_network_are_looked_for_in_different_places() {
        // Three layers of the study in one type: what is launched in turn should not push each other out.
        let mut slots = std::collections::BTreeSet::new();
        let mut count = 0;
        for (inputs, outputs) in [(784, 784), (784, 784), (784, 10)] {
            for of in [Product::Forward, Product::Input, Product::Gradient] {
                let (m, n, k) = match of {
                    Product::Forward => (64, outputs, inputs),
                    Product::Input => (64, inputs, outputs),
                    Product::Gradient | Product::Update => (outputs, inputs, 64),
                };
                slots.insert(LibraryProduct { m, n, k, ..product(of, Precision::F16, Element::F16) }.slot());
                count += 1;
            }
        }
        // Two layers are alike.
        assert!(slots.len() >= count - 3 - 1, "{slots:?}");
        assert!(slots.iter().all(|slot| *slot < 64));
    }
}
