//! Arithmetic of the network: types of values, matrix products, and fusion into one launch.

use crate::error::{Result, TrainError};
use clap::ValueEnum;
use kernels::{Element, Precision};
use serde::Serialize;
use terminal::arguments::name;

/// Type of activations, of their gradients and of the weights that products read. Biases, logits, sums and the gradients
/// of weights are f32 whatever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary32, by multiply-adds.
    #[default]
    F32,
    /// f32 that tensor cores read with 11 bits of significand.
    Tf32,
    /// The upper half of an f32, on tensor cores.
    Bf16,
    /// IEEE binary16, on tensor cores.
    F16,
}

/// The weights that an update changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsMode {
    /// f32 weights, beside which bf16 and f16 keep their roundings for the products.
    #[default]
    Master,
    /// The bf16 or f16 weights themselves; a step below their rounding is lost.
    Half,
}

/// Matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmMode {
    /// Tiles in shared memory.
    Tiled,
    /// Tensor cores, for every type but f32.
    Tensor,
}

/// Operations that one launch fuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FuseMode {
    /// Nothing: products, biases, ReLU, losses and updates are launches of their own.
    #[default]
    None,
    /// Bias and ReLU with their product, the bias' gradient with the weights', the whole loss in one launch.
    Epilogue,
    /// The same, and the update with the product that gives the gradient.
    Update,
}

/// Arithmetic of a network, every setting in effect and the combination valid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// Type of the values.
    pub dtype: Dtype,
    /// The weights that an update changes.
    pub weights: WeightsMode,
    /// Factor of the logits' gradient, and so of every gradient until the update divides by it. Small gradients are thus
    /// kept from vanishing in f16.
    pub loss_scale: f32,
    /// Matrix product.
    pub gemm: GemmMode,
    /// The fused operations.
    pub fuse: FuseMode,
}

impl Default for Arithmetic {
    /// f32, nothing fused.
    fn default() -> Self {
        Self {
            dtype: Dtype::F32,
            weights: WeightsMode::Master,
            loss_scale: 1.0,
            gemm: GemmMode::Tiled,
            fuse: FuseMode::None,
        }
    }
}

impl Arithmetic {
    /// Default arithmetic of a type: tiles in shared memory for f32, tensor cores for the others,
    /// and a loss scale of 1,024 for f16.
    #[must_use]
    pub fn of(dtype: Dtype) -> Self {
        Self {
            dtype,
            loss_scale: if dtype == Dtype::F16 { 1024.0 } else { 1.0 },
            gemm: if dtype == Dtype::F32 { GemmMode::Tiled } else { GemmMode::Tensor },
            ..Self::default()
        }
    }

    /// Itself, if its parts go together.
    ///
    /// # Errors
    /// [`TrainError::Input`] that names the options which do not, and what to write instead.
    pub fn checked(self) -> Result<Self> {
        let half = matches!(self.dtype, Dtype::Bf16 | Dtype::F16);
        let problem = if self.weights == WeightsMode::Half && !half {
            format!("--weights half needs --dtype bf16 or f16, found {}", name(self.dtype))
        } else if self.gemm == GemmMode::Tiled && self.dtype != Dtype::F32 {
            format!("--gemm tiled is for --dtype f32; {} needs tensor", name(self.dtype))
        } else if self.gemm == GemmMode::Tensor && self.dtype == Dtype::F32 {
            "--gemm tensor needs --dtype tf32, bf16 or f16; f32 needs tiled".to_owned()
        } else if !self.loss_scale.is_finite() || self.loss_scale <= 0.0 {
            format!("--loss-scale must be a positive number, found {}", self.loss_scale)
        } else {
            return Ok(self);
        };
        Err(TrainError::Input(problem))
    }

    /// Precision of the kernels' matrix products.
    #[must_use]
    pub fn precision(&self) -> Precision {
        match self.dtype {
            Dtype::F32 => Precision::F32,
            Dtype::Tf32 => Precision::Tf32,
            Dtype::Bf16 => Precision::Bf16,
            Dtype::F16 => Precision::F16,
        }
    }

    /// Element type of activations and of the weights that matrix products read.
    #[must_use]
    pub fn element(&self) -> Element {
        self.precision().element()
    }

    /// Elements from one row of such a matrix to the next. Plain f32 products read matrices without padding.
    #[must_use]
    pub fn pitch(&self, cols: u32) -> u32 {
        if self.is_plain() { cols } else { self.element().pitch(cols) }
    }

    /// Returns true if matrix products are separate launches: f32 with nothing fused. All others are launches of linear
    /// layers.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        (self.dtype, self.fuse) == (Dtype::F32, FuseMode::None)
    }

    /// Returns true if f32 weights are kept in addition to the weights that matrix products read.
    #[must_use]
    pub fn has_master(&self) -> bool {
        self.weights == WeightsMode::Master && self.element() != Element::F32
    }

    /// The setting to change when the loss becomes NaN or infinite.
    pub(crate) fn advice(&self, learning_rate: f32) -> String {
        let scaled = self.dtype == Dtype::F16 || self.loss_scale != 1.0;
        let scale = if scaled { format!(", lower --loss-scale (now {})", self.loss_scale) } else { String::new() };
        format!("lower --lr (now {learning_rate}){scale} or change --init")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn defaults_go_together() {
        for dtype in Dtype::value_variants() {
            let arithmetic = Arithmetic::of(*dtype);
            assert_eq!(arithmetic.checked().unwrap(), arithmetic);
            for fuse in FuseMode::value_variants() {
                let arithmetic = Arithmetic { fuse: *fuse, ..arithmetic }.checked().unwrap();
                assert_eq!(arithmetic.is_plain(), *dtype == Dtype::F32 && *fuse == FuseMode::None);
            }
        }
    }

    #[test]
    fn tensor_cores_multiply_every_type_but_f32() {
        let usual = Arithmetic::of(Dtype::F32);
        assert_eq!((usual.gemm, usual.precision()), (GemmMode::Tiled, Precision::F32));
        for (gemm, works) in [(GemmMode::Tiled, false), (GemmMode::Tensor, true)] {
            for dtype in [Dtype::Tf32, Dtype::Bf16, Dtype::F16] {
                assert_eq!(Arithmetic { gemm, ..Arithmetic::of(dtype) }.checked().is_ok(), works, "{dtype:?} {gemm:?}");
            }
            for fuse in FuseMode::value_variants() {
                let arithmetic = Arithmetic { gemm, fuse: *fuse, ..usual };
                assert_eq!(arithmetic.checked().is_ok(), !works, "{fuse:?} {gemm:?}");
            }
        }
    }

    #[test]
    fn rows_start_where_sixteen_bytes_can_be_read() {
        assert_eq!(Arithmetic::default().pitch(61), 61);
        assert_eq!(Arithmetic { fuse: FuseMode::Epilogue, ..Arithmetic::default() }.pitch(61), 64);
        assert_eq!(Arithmetic::of(Dtype::Tf32).pitch(61), 64);
        assert_eq!(Arithmetic::of(Dtype::Bf16).pitch(65), 72);
    }

    #[test]
    fn names_are_those_of_the_record() {
        for dtype in Dtype::value_variants() {
            assert_eq!(serde_json::json!(dtype), name(*dtype));
        }
    }
}
