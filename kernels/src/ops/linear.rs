//! A linear layer's three products with what comes before and after them; kernels in `cuda/linear.cuh`.
//!
//! Matrices have a pitch ([`Element::pitch`](crate::Element::pitch)): elements from one row to the next. Biases,
//! gradients and master weights are f32 whatever the precision. What lies between the columns and the pitch is never read as
//! a number, and a launch may leave anything there.

use cudarc::driver::sys::CUstream;

use super::bias::sum_rows;
use super::sgd::{check_master, step_weights};
use super::{F32, U32, area, check_room, check_sizes, grid, or_null, span, total};
use crate::cuda::{CudaKernels, argument};
use crate::error::KernelError;
use crate::fused::descend;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};
use crate::plan::{Plan, Product};
use crate::precision::{Element, Precision};
use crate::storage::{Stored, operands, with_stored};

/// The tile arithmetic of the kernels is in 32 bits.
const LARGEST: u32 = i32::MAX as u32;

/// `y = x·weightᵀ (+ bias) (then ReLU)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearForward {
    /// Storage of x and weight, and how products are computed.
    pub precision: Precision,
    /// Rows of x and y: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Rows of weight, columns of y.
    pub outputs: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the bias, `f32[outputs]`, if it is to be added.
    pub bias: Option<u64>,
    /// Whether negative results become zero.
    pub relu: bool,
    /// Address of y, `[rows, outputs]`, written.
    pub y: u64,
    /// Elements from one row of y to the next.
    pub y_pitch: u32,
    /// Whether y is f32 whatever the precision: logits.
    pub y_f32: bool,
    /// Address of [`workspace_bytes`](Self::workspace_bytes) bytes for sums that blocks share; any value if that is zero.
    pub workspace: u64,
    /// Address of [`tickets`](Self::tickets) u32 that are zero, and are zero again when the launch is done.
    pub tickets: u64,
}

/// `dx = dy·weight`, zero where the layer's input was not positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearBackwardInput {
    /// Storage of dy, weight, mask and dx, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and dx: examples.
    pub rows: u32,
    /// Columns of weight and dx.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the output of the ReLU before this layer, `[rows, inputs]` with dx's pitch: where it is not positive dx
    /// is zero.
    pub mask: Option<u64>,
    /// Address of dx, `[rows, inputs]`, written.
    pub dx: u64,
    /// Elements from one row of dx to the next.
    pub dx_pitch: u32,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}

/// `dweight = dyᵀ·x · scale` and `dbias = Σ_rows dy · scale`, both f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearWeightGradient {
    /// Storage of dy and x, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and dweight.
    pub inputs: u32,
    /// Columns of dy, rows of dweight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Factor of both results: one over the loss scale.
    pub scale: f32,
    /// Address of the weights' gradient, `f32[outputs, inputs]`, written.
    pub dweight: u64,
    /// Elements from one row of the gradient to the next.
    pub dweight_pitch: u32,
    /// Address of the bias' gradient, `f32[outputs]`, written, if it is wanted.
    pub dbias: Option<u64>,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}

/// `weight -= rate · dyᵀ·x` and `bias -= rate · Σ_rows dy`: a gradient that is never written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearUpdate {
    /// Storage of dy, x and weight, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Learning rate over loss scale.
    pub rate: f32,
    /// Address of the weights, `[outputs, inputs]`, read (without a master) and written.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the master weights, `f32[outputs, inputs]` with the weights' pitch, read and written: the weights become
    /// their rounding. Only for halves.
    pub master: Option<u64>,
    /// Address of the bias, `f32[outputs]`, read and written.
    pub bias: u64,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}

/// What the four have in common: their plan, and the checks of their sizes.
macro_rules! linear {
    ($operation:ident, $product:expr, |$self:ident| ($m:expr, $n:expr, $k:expr)) => {
        impl $operation {
            fn plan(&$self) -> Plan {
                Plan::of($product, $self.precision, $m, $n, $k)
            }

            /// Bytes of memory that the blocks of the launch need to add up their sums; zero if none share a sum.
            #[must_use]
            pub fn workspace_bytes(&self) -> u64 {
                self.plan().workspace_bytes
            }

            /// Counters that the launch needs to find out which of its blocks is the last to add to a tile.
            #[must_use]
            pub fn tickets(&self) -> u64 {
                self.plan().tickets
            }

            fn element(&self) -> Element {
                self.precision.element()
            }

            fn check_shape(&self) -> Result<(), KernelError> {
                let operation = self.name();
                let sizes = [("rows", self.rows), ("inputs", self.inputs), ("outputs", self.outputs)];
                check_sizes(operation, sizes.map(|(name, size)| (name, size.into())))?;
                match sizes.iter().find(|(_, size)| *size > LARGEST) {
                    None => Ok(()),
                    Some((name, size)) => {
                        let what = format!("{name} is {size}, above {LARGEST}");
                        Err(KernelError::Shape { operation, what })
                    }
                }
            }

            /// Bytes of a matrix of stored elements, from its first to its last.
            fn stored_bytes(&self, rows: u32, cols: u32, pitch: u32) -> u64 {
                total([(span(rows, cols, pitch), self.element().bytes())])
            }

            /// Workspace and tickets, as far as there are any.
            fn shared_buffers(&self) -> impl Iterator<Item = (u64, u64)> {
                let plan = self.plan();
                let both = [(self.workspace, plan.workspace_bytes), (self.tickets, plan.tickets * U32)];
                both.into_iter().filter(|(_, bytes)| *bytes > 0)
            }

            /// Claims workspace and tickets: the host needs neither, but an overlap has to come out.
            ///
            /// # Safety
            ///
            /// As for [`HostBuffers::write`].
            unsafe fn claim_shared(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
                for (addr, bytes) in self.shared_buffers() {
                    // SAFETY: the caller vouches for the memory.
                    unsafe { buffers.write::<u32>(addr, bytes / U32) }?;
                }
                Ok(())
            }
        }
    };
}

linear!(LinearForward, Product::Forward, |self| (self.rows, self.outputs, self.inputs));
linear!(LinearBackwardInput, Product::Input, |self| (self.rows, self.inputs, self.outputs));
linear!(LinearWeightGradient, Product::Gradient, |self| (self.outputs, self.inputs, self.rows));
linear!(LinearUpdate, Product::Update, |self| (self.outputs, self.inputs, self.rows));

/// A dense matrix, or one that is to be seen transposed: values, and elements from one row and from one column to the next.
struct Operand<'a>(&'a [f32], usize, usize);

/// `op(a)·op(b)`, dense `[m, n]`: what the host computes for every precision, with sums in f32.
fn product(m: usize, n: usize, k: usize, a: Operand<'_>, b: Operand<'_>) -> Vec<f32> {
    let last = |rows: usize, cols: usize, by: &Operand<'_>| (rows - 1) * by.1 + (cols - 1) * by.2;
    assert!(last(m, k, &a) < a.0.len() && last(k, n, &b) < b.0.len(), "operands are as large as their shapes say");
    let mut c = vec![0.0; m * n];
    // CAST: all below the lengths of slices, so below `isize::MAX`.
    let stride = |size: usize| size as isize;
    // Threads share out rows and columns of C, never the sum over k: their number does not change the result.
    // SAFETY: the strides stay within the slices, as asserted, and C's within m·n elements; C is new memory.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.0.as_ptr(),
            stride(a.1),
            stride(a.2),
            b.0.as_ptr(),
            stride(b.1),
            stride(b.2),
            0.0,
            c.as_mut_ptr(),
            stride(n),
            1,
        );
    }
    c
}

impl LinearForward {
    fn y_element(&self) -> Element {
        if self.y_f32 { Element::F32 } else { self.element() }
    }

    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("x_pitch", self.x_pitch, self.inputs),
                ("weight_pitch", self.weight_pitch, self.inputs),
                ("y_pitch", self.y_pitch, self.outputs),
            ],
        )
    }

    /// # Safety
    ///
    /// As for [`Operation::run_on_host`].
    unsafe fn run_typed<T: Stored, Y: Stored>(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (x, weight) = unsafe {
            (
                buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?,
                buffers.read::<T>(self.weight, span(self.outputs, self.inputs, self.weight_pitch))?,
            )
        };
        let bias: &[f32] = match self.bias {
            None => &[],
            // SAFETY: as above.
            Some(bias) => unsafe { buffers.read(bias, self.outputs.into()) }?,
        };
        // SAFETY: as above.
        let y = unsafe { buffers.write::<Y>(self.y, span(self.rows, self.outputs, self.y_pitch)) }?;
        // SAFETY: as above.
        unsafe { self.claim_shared(&mut buffers) }?;
        let [rows, inputs, outputs] = [self.rows, self.inputs, self.outputs].map(|size| size as usize);
        let x = operands(x, inputs, self.x_pitch as usize, self.precision);
        let weight = operands(weight, inputs, self.weight_pitch as usize, self.precision);
        let mut sums = product(rows, outputs, inputs, Operand(&x, inputs, 1), Operand(&weight, 1, inputs));
        for (y, sums) in y.chunks_mut(self.y_pitch as usize).zip(sums.chunks_exact_mut(outputs)) {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias;
            }
            if self.relu {
                // NaN stays NaN.
                sums.iter_mut().filter(|sum| **sum <= 0.0).for_each(|sum| *sum = 0.0);
            }
            Y::store_all(sums, &mut y[..outputs]);
        }
        Ok(())
    }
}

impl Operation for LinearForward {
    fn name(&self) -> &'static str {
        self.plan().kernel
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let outputs = area(self.rows, self.outputs);
        let bias = if self.bias.is_some() { self.outputs } else { 0 };
        Work {
            kernel: plan.kernel,
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.inputs), each),
                (area(self.outputs, self.inputs), each),
                (bias.into(), F32),
                (outputs, self.y_element().bytes()),
            ]),
            flops: total([
                (outputs, 2 * u64::from(self.inputs)),
                (outputs, u64::from(self.bias.is_some()) + u64::from(self.relu)),
            ]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut buffers = vec![
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.weight, self.stored_bytes(self.outputs, self.inputs, self.weight_pitch)),
        ];
        buffers.extend(self.bias.map(|bias| (bias, total([(self.outputs.into(), F32)]))));
        let elements = span(self.rows, self.outputs, self.y_pitch);
        buffers.push((self.y, total([(elements, self.y_element().bytes())])));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let plan = self.plan();
        grid(plan.kernel, plan.blocks)?;
        let bias = or_null(self.bias);
        let (relu, y_f32) = (u32::from(self.relu), u32::from(self.y_f32));
        let arguments = [
            argument(&self.x),
            argument(&self.weight),
            argument(&bias),
            argument(&self.y),
            argument(&self.workspace),
            argument(&self.tickets),
            argument(&self.rows),
            argument(&self.inputs),
            argument(&self.outputs),
            argument(&self.x_pitch),
            argument(&self.weight_pitch),
            argument(&self.y_pitch),
            argument(&relu),
            argument(&y_f32),
        ];
        // SAFETY: six addresses and eight u32, as the kernel declares; the caller vouches for the addresses.
        unsafe { plan.launch(cuda, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        with_stored!(self.element(), T => unsafe {
            if self.y_f32 { self.run_typed::<T, f32>(memory) } else { self.run_typed::<T, T>(memory) }
        })
    }
}

impl LinearBackwardInput {
    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("dy_pitch", self.dy_pitch, self.outputs),
                ("weight_pitch", self.weight_pitch, self.inputs),
                ("dx_pitch", self.dx_pitch, self.inputs),
            ],
        )
    }

    /// # Safety
    ///
    /// As for [`Operation::run_on_host`].
    unsafe fn run_typed<T: Stored>(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        let mut buffers = HostBuffers::new(memory, self.name());
        let elements = span(self.rows, self.inputs, self.dx_pitch);
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (dy, weight) = unsafe {
            (
                buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?,
                buffers.read::<T>(self.weight, span(self.outputs, self.inputs, self.weight_pitch))?,
            )
        };
        let mask: Option<&[T]> = match self.mask {
            None => None,
            // SAFETY: as above.
            Some(mask) => Some(unsafe { buffers.read(mask, elements) }?),
        };
        // SAFETY: as above.
        let dx = unsafe { buffers.write::<T>(self.dx, elements) }?;
        // SAFETY: as above.
        unsafe { self.claim_shared(&mut buffers) }?;
        let [rows, inputs, outputs] = [self.rows, self.inputs, self.outputs].map(|size| size as usize);
        let pitch = self.dx_pitch as usize;
        let dy = operands(dy, outputs, self.dy_pitch as usize, self.precision);
        let weight = operands(weight, inputs, self.weight_pitch as usize, self.precision);
        let mut sums = product(rows, inputs, outputs, Operand(&dy, outputs, 1), Operand(&weight, inputs, 1));
        if let Some(mask) = mask {
            for (sums, mask) in sums.chunks_exact_mut(inputs).zip(mask.chunks(pitch)) {
                for (sum, mask) in sums.iter_mut().zip(mask) {
                    *sum = if mask.load() > 0.0 { *sum } else { 0.0 };
                }
            }
        }
        for (dx, sums) in dx.chunks_mut(pitch).zip(sums.chunks_exact(inputs)) {
            T::store_all(sums, &mut dx[..inputs]);
        }
        Ok(())
    }
}

impl Operation for LinearBackwardInput {
    fn name(&self) -> &'static str {
        self.plan().kernel
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let masks = u64::from(self.mask.is_some());
        let inputs = area(self.rows, self.inputs);
        Work {
            kernel: plan.kernel,
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.outputs, self.inputs), each),
                (inputs, (1 + masks) * each),
            ]),
            flops: total([(inputs, 2 * u64::from(self.outputs) + masks)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.weight, self.stored_bytes(self.outputs, self.inputs, self.weight_pitch)),
        ];
        let bytes = self.stored_bytes(self.rows, self.inputs, self.dx_pitch);
        buffers.extend(self.mask.map(|mask| (mask, bytes)));
        buffers.push((self.dx, bytes));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let plan = self.plan();
        grid(plan.kernel, plan.blocks)?;
        let mask = or_null(self.mask);
        let arguments = [
            argument(&self.dy),
            argument(&self.weight),
            argument(&mask),
            argument(&self.dx),
            argument(&self.workspace),
            argument(&self.tickets),
            argument(&self.rows),
            argument(&self.inputs),
            argument(&self.outputs),
            argument(&self.dy_pitch),
            argument(&self.weight_pitch),
            argument(&self.dx_pitch),
        ];
        // SAFETY: six addresses and six u32, as the kernel declares; the caller vouches for the addresses.
        unsafe { plan.launch(cuda, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        with_stored!(self.element(), T => unsafe { self.run_typed::<T>(memory) })
    }
}

/// `dyᵀ·x`, dense `[outputs, inputs]`, and the sums of dy's columns.
struct Gradient {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Gradient {
    /// Of dy and x with their pitches.
    fn of<T: Stored>(
        precision: Precision,
        [rows, inputs, outputs]: [u32; 3],
        (dy, dy_pitch): (&[T], u32),
        (x, x_pitch): (&[T], u32),
    ) -> Self {
        // The bias takes no part in the product, so its terms are not rounded as operands are.
        let mut bias = vec![0.0; outputs as usize];
        sum_rows(dy, dy_pitch, &mut bias);
        let [rows, inputs, outputs] = [rows, inputs, outputs].map(|size| size as usize);
        let dy = operands(dy, outputs, dy_pitch as usize, precision);
        let x = operands(x, inputs, x_pitch as usize, precision);
        let weight = product(outputs, inputs, rows, Operand(&dy, 1, outputs), Operand(&x, inputs, 1));
        Self { weight, bias }
    }
}

impl LinearWeightGradient {
    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("dy_pitch", self.dy_pitch, self.outputs),
                ("x_pitch", self.x_pitch, self.inputs),
                ("dweight_pitch", self.dweight_pitch, self.inputs),
            ],
        )
    }

    /// # Safety
    ///
    /// As for [`Operation::run_on_host`].
    unsafe fn run_typed<T: Stored>(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (dy, x, dweight) = unsafe {
            (
                buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?,
                buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?,
                buffers.write::<f32>(self.dweight, span(self.outputs, self.inputs, self.dweight_pitch))?,
            )
        };
        let dbias: &mut [f32] = match self.dbias {
            None => &mut [],
            // SAFETY: as above.
            Some(dbias) => unsafe { buffers.write(dbias, self.outputs.into()) }?,
        };
        // SAFETY: as above.
        unsafe { self.claim_shared(&mut buffers) }?;
        let sizes = [self.rows, self.inputs, self.outputs];
        let gradient = Gradient::of(self.precision, sizes, (dy, self.dy_pitch), (x, self.x_pitch));
        let rows = gradient.weight.chunks_exact(self.inputs as usize);
        for (to, from) in dweight.chunks_mut(self.dweight_pitch as usize).zip(rows) {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from * self.scale;
            }
        }
        for (to, from) in dbias.iter_mut().zip(gradient.bias) {
            *to = from * self.scale;
        }
        Ok(())
    }
}

impl Operation for LinearWeightGradient {
    fn name(&self) -> &'static str {
        self.plan().kernel
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let weights = area(self.outputs, self.inputs);
        let biases = if self.dbias.is_some() { self.outputs } else { 0 };
        Work {
            kernel: plan.kernel,
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.rows, self.inputs), each),
                (weights, F32),
                (biases.into(), F32),
            ]),
            flops: total([(weights, 2 * u64::from(self.rows) + 1), (biases.into(), u64::from(self.rows) + 1)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = span(self.outputs, self.inputs, self.dweight_pitch);
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.dweight, total([(elements, F32)])),
        ];
        buffers.extend(self.dbias.map(|dbias| (dbias, total([(self.outputs.into(), F32)]))));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let plan = self.plan();
        grid(plan.kernel, plan.blocks)?;
        let dbias = or_null(self.dbias);
        let arguments = [
            argument(&self.dy),
            argument(&self.x),
            argument(&self.dweight),
            argument(&dbias),
            argument(&self.workspace),
            argument(&self.tickets),
            argument(&self.rows),
            argument(&self.inputs),
            argument(&self.outputs),
            argument(&self.dy_pitch),
            argument(&self.x_pitch),
            argument(&self.dweight_pitch),
            argument(&self.scale),
        ];
        // SAFETY: six addresses, six u32 and an f32, as the kernel declares; the caller vouches for the addresses.
        unsafe { plan.launch(cuda, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        with_stored!(self.element(), T => unsafe { self.run_typed::<T>(memory) })
    }
}

impl LinearUpdate {
    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("dy_pitch", self.dy_pitch, self.outputs),
                ("x_pitch", self.x_pitch, self.inputs),
                ("weight_pitch", self.weight_pitch, self.inputs),
            ],
        )?;
        check_master(self.name(), self.element(), self.master)
    }

    /// # Safety
    ///
    /// As for [`Operation::run_on_host`].
    unsafe fn run_typed<T: Stored>(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        let mut buffers = HostBuffers::new(memory, self.name());
        let weights = span(self.outputs, self.inputs, self.weight_pitch);
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (dy, x, weight) = unsafe {
            (
                buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?,
                buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?,
                buffers.write::<T>(self.weight, weights)?,
            )
        };
        let mut master: Option<&mut [f32]> = match self.master {
            None => None,
            // SAFETY: as above.
            Some(master) => Some(unsafe { buffers.write(master, weights) }?),
        };
        // SAFETY: as above.
        let bias = unsafe { buffers.write::<f32>(self.bias, self.outputs.into()) }?;
        // SAFETY: as above.
        unsafe { self.claim_shared(&mut buffers) }?;
        let sizes = [self.rows, self.inputs, self.outputs];
        let gradient = Gradient::of(self.precision, sizes, (dy, self.dy_pitch), (x, self.x_pitch));
        let (inputs, pitch) = (self.inputs as usize, self.weight_pitch as usize);
        for (row, gradient) in gradient.weight.chunks_exact(inputs).enumerate() {
            let here = row * pitch..row * pitch + inputs;
            let master = master.as_deref_mut().map(|master| &mut master[here.clone()]);
            step_weights(&mut weight[here], master, gradient, self.rate);
        }
        descend(bias, &gradient.bias, self.rate);
        Ok(())
    }
}

impl Operation for LinearUpdate {
    fn name(&self) -> &'static str {
        self.plan().kernel
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let weights = area(self.outputs, self.inputs);
        // Weights are read and written; or masters are, and weights are written.
        let step = if self.master.is_some() { 2 * F32 + each } else { 2 * each };
        Work {
            kernel: plan.kernel,
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.rows, self.inputs), each),
                (weights, step),
                (self.outputs.into(), 2 * F32),
            ]),
            flops: total([(weights, 2 * u64::from(self.rows) + 2), (self.outputs.into(), u64::from(self.rows) + 2)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let weights = span(self.outputs, self.inputs, self.weight_pitch);
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.weight, total([(weights, self.element().bytes())])),
        ];
        buffers.extend(self.master.map(|master| (master, total([(weights, F32)]))));
        buffers.push((self.bias, total([(self.outputs.into(), F32)])));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let plan = self.plan();
        grid(plan.kernel, plan.blocks)?;
        let master = or_null(self.master);
        let arguments = [
            argument(&self.dy),
            argument(&self.x),
            argument(&self.weight),
            argument(&master),
            argument(&self.bias),
            argument(&self.workspace),
            argument(&self.tickets),
            argument(&self.rows),
            argument(&self.inputs),
            argument(&self.outputs),
            argument(&self.dy_pitch),
            argument(&self.x_pitch),
            argument(&self.weight_pitch),
            argument(&self.rate),
        ];
        // SAFETY: seven addresses, six u32 and an f32, as the kernel declares; the caller vouches for the addresses.
        unsafe { plan.launch(cuda, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        with_stored!(self.element(), T => unsafe { self.run_typed::<T>(memory) })
    }
}
