//! The launches of linear layers.

use cudarc::driver::sys::CUstream;
use kernels::{
    Choice, CudaKernels, Element, HostMemory, KernelError, LinearBackwardInput, LinearForward, LinearUpdate,
    LinearWeightGradient, Operation, Precision, Product, Tile, Work,
};

use super::{Data, area, case, input, input_rows, rounded, stored_tolerance, sum_tolerance, within, within_rows};
use crate::common::{Buffer, Case, Expected, POISON};

pub(super) const SEED: u64 = 18;

/// An operand as stored, and its values in the GEMM.
pub(super) struct Operand {
    pub(super) stored: Vec<f32>,
    cols: u32,
    pub(super) pitch: u32,
    element: Element,
    /// Row after row.
    pub(super) values: Vec<f64>,
}

/// Rounding to 11 bits of significand, ties away from zero.
fn tf32(value: f32) -> f64 {
    let value = f64::from(value);
    let (_, exponent) = exponent(value);
    let unit = 2.0_f64.powi(exponent - 10);
    // `round` takes ties away from zero.
    (value / unit).round() * unit
}

/// `value = fraction · 2^exponent` with 1 ≤ |fraction| < 2; any exponent for zero.
fn exponent(value: f64) -> (f64, i32) {
    let mut exponent = 0;
    let mut fraction = value.abs();
    while fraction >= 2.0 {
        (fraction, exponent) = (fraction / 2.0, exponent + 1);
    }
    while fraction != 0.0 && fraction < 1.0 {
        (fraction, exponent) = (fraction * 2.0, exponent - 1);
    }
    (fraction, exponent)
}

/// The pitch of the element type plus `more` times 16 bytes.
pub(super) fn pitch(element: Element, cols: u32, more: u32) -> u32 {
    element.pitch(cols) + more * element.pitch(1)
}

impl Operand {
    pub(super) fn new(precision: Precision, data: &mut Data, rows: u32, cols: u32, more: u32) -> Self {
        let element = precision.element();
        let stored = rounded(element, data.floats(area(rows, cols), 1.0));
        let operand = |&value: &f32| if precision == Precision::Tf32 { tf32(value) } else { value.into() };
        let values = stored.iter().map(operand).collect();
        Self { stored, cols, pitch: pitch(element, cols, more), element, values }
    }

    pub(super) fn buffer(&self) -> Buffer {
        input_rows(self.element, &self.stored, self.cols, self.pitch)
    }

    /// Columns as rows.
    pub(super) fn transposed(&self) -> Vec<f64> {
        let (cols, rows) = (self.cols as usize, self.values.len() / self.cols as usize);
        (0..cols).flat_map(|col| (0..rows).map(move |row| row * cols + col)).map(|at| self.values[at]).collect()
    }

    /// Sums of the stored columns, each with its tolerance.
    pub(super) fn column_sums(&self) -> Vec<(f64, f64)> {
        let rows = (self.stored.len() / self.cols as usize) as u32;
        let sum = |col: usize| {
            let column = || self.stored.iter().skip(col).step_by(self.cols as usize).map(|&value| f64::from(value));
            (column().sum(), sum_tolerance(rows, column().map(f64::abs).sum()))
        };
        (0..self.cols as usize).map(sum).collect()
    }
}

/// `a·bᵀ` of rows of `k`, each with its tolerance.
pub(super) fn product(a: &[f64], b: &[f64], k: u32) -> Vec<(f64, f64)> {
    let mut out = Vec::with_capacity(a.len() / k as usize * (b.len() / k as usize));
    for a in a.chunks_exact(k as usize) {
        for b in b.chunks_exact(k as usize) {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (a, b) in a.iter().zip(b) {
                sum += a * b;
                magnitude += (a * b).abs();
            }
            out.push((sum, sum_tolerance(k, magnitude)));
        }
    }
    out
}

/// One operation in f32, then rounding to the type of the output.
pub(super) fn stored(element: Element, (value, allowed): (f64, f64)) -> (f64, f64) {
    (value, allowed + f64::from(f32::EPSILON) * value.abs() + stored_tolerance(element, value))
}

/// A layer's launch, and the requirements of a choice of its kernel.
trait Layer: Operation + Copy {
    /// Bytes of workspace, and tickets, for the planned kernel.
    fn needs(&self) -> (u64, u64);
    /// Requirements of a launch with this choice.
    fn needs_with(&self, choice: Choice) -> (u64, u64);
    /// The kernel's name with this choice.
    fn name_with(&self, choice: Choice) -> String;
    /// Like [`Operation::launch`], with this choice.
    unsafe fn launch_with(&self, choice: Choice, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError>;
}

macro_rules! layer {
    ($operation:ident, $product:expr) => {
        impl Layer for $operation {
            fn needs(&self) -> (u64, u64) {
                (self.workspace_bytes(), self.tickets())
            }

            fn needs_with(&self, choice: Choice) -> (u64, u64) {
                $operation::needs_with(self, choice)
            }

            fn name_with(&self, choice: Choice) -> String {
                // An update has its own kernel only if it streams.
                let is_gradient = $product == Product::Update && choice.tile != Tile::Streamed;
                let product = if is_gradient { Product::Gradient } else { $product };
                format!("linear_{}_{}_{}", product.name(), self.precision.name(), choice.tile.name())
            }

            unsafe fn launch_with(
                &self,
                choice: Choice,
                cuda: &CudaKernels,
                stream: CUstream,
            ) -> Result<(), KernelError> {
                // SAFETY: the caller guarantees the addresses.
                unsafe { $operation::launch_with(self, choice, cuda, stream) }
            }
        }
    };
}

layer!(LinearForward, Product::Forward);
layer!(LinearBackwardInput, Product::Input);
layer!(LinearWeightGradient, Product::Gradient);
layer!(LinearUpdate, Product::Update);

/// A launch with a given kernel. The host's computation is the same for all choices.
#[derive(Clone, Debug)]
struct WithChoice<O> {
    operation: O,
    choice: Choice,
    name: &'static str,
}

impl<O: Layer + Clone + 'static> Operation for WithChoice<O> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn work(&self) -> Work {
        self.operation.work()
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        self.operation.buffers()
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller guarantees the addresses.
        unsafe { self.operation.launch_with(self.choice, cuda, stream) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        // SAFETY: the caller guarantees the addresses.
        unsafe { self.operation.run_on_host(memory) }
    }
}

/// A case for the planned kernel, or for the kernel of a choice. The operation is built from the addresses of
/// `buffers`, workspace and tickets.
fn finish<O: Layer + 'static>(
    shape: &str,
    choice: Option<Choice>,
    mut buffers: Vec<Buffer>,
    build: impl Fn(&[u64]) -> O + Send + Sync + 'static,
) -> Case {
    let template = build(&vec![0; buffers.len() + 2]);
    let (planned, Some(choice)) = (template.needs(), choice) else {
        let (workspace_bytes, tickets) = template.needs();
        buffers.extend(shared(workspace_bytes, tickets));
        return case(shape, buffers, build);
    };
    let required = template.needs_with(choice);
    buffers.extend(shared(planned.0.max(required.0), planned.1.max(required.1)));
    // The name lives until the program exits; there are only a few dozen.
    let name: &'static str = template.name_with(choice).leak();
    case(&format!("{shape}, {choice}"), buffers, move |at| WithChoice { operation: build(at), choice, name })
}

/// Every tile of a GEMM, with one block per tile and with split-k.
pub(crate) fn choices(product: Product, precision: Precision) -> Vec<Choice> {
    let tiles = product.tiles().iter().chain(product.warpgroup_tiles(precision));
    tiles.flat_map(|&tile| [1, 3].map(|splits| Choice { tile, splits })).collect()
}

/// Workspace and tickets of an operation.
pub(super) fn shared(workspace_bytes: u64, tickets: u64) -> [Buffer; 2] {
    let workspace = Buffer { before: vec![POISON; workspace_bytes as usize], after: Expected::Anything };
    [workspace, input(&vec![0_u32; tickets as usize])]
}

pub(super) fn label([rows, inputs, outputs]: [u32; 3], more: u32) -> String {
    format!("{rows} rows, {inputs} to {outputs}, variant {more}")
}

/// With bias and ReLU; or, as variant 1, only the GEMM, in f32 and with a wider pitch.
pub(crate) fn forward(precision: Precision, shape: [u32; 3], more: u32, choice: Option<Choice>) -> Case {
    let [rows, inputs, outputs] = shape;
    let (mut data, only_gemm) = (Data::new(SEED), more == 1);
    let x = Operand::new(precision, &mut data, rows, inputs, more);
    let weight = Operand::new(precision, &mut data, outputs, inputs, more);
    let bias = data.floats(outputs.into(), 1.0);
    let y_element = if only_gemm { Element::F32 } else { precision.element() };
    let y_pitch = pitch(y_element, outputs, more);
    let y = product(&x.values, &weight.values, inputs).into_iter().enumerate().map(|(at, (sum, allowed))| {
        if only_gemm {
            return (sum, allowed);
        }
        let bias = bias[at % outputs as usize];
        let (sum, allowed) = (sum + f64::from(bias), allowed);
        stored(y_element, (sum.max(0.0), allowed + f64::from(f32::EPSILON) * sum.abs()))
    });
    let mut buffers = vec![x.buffer(), weight.buffer(), input(&bias)];
    buffers.push(within_rows(y_element, y.collect(), outputs, y_pitch));
    let (x_pitch, weight_pitch) = (x.pitch, weight.pitch);
    let build = move |at: &[u64]| LinearForward {
        precision,
        rows,
        inputs,
        outputs,
        x: at[0],
        x_pitch,
        weight: at[1],
        weight_pitch,
        bias: (!only_gemm).then(|| at[2]),
        relu: !only_gemm,
        y: at[3],
        y_pitch,
        y_f32: only_gemm,
        workspace: at[4],
        tickets: at[5],
    };
    finish(&label(shape, more), choice, buffers, build)
}

/// With a mask; or, as variant 1, without one and with a wider pitch.
pub(crate) fn backward_input(precision: Precision, shape: [u32; 3], more: u32, choice: Option<Choice>) -> Case {
    let [rows, inputs, outputs] = shape;
    let (mut data, with_mask, element) = (Data::new(SEED), more == 0, precision.element());
    let dy = Operand::new(precision, &mut data, rows, outputs, more);
    let weight = Operand::new(precision, &mut data, outputs, inputs, more);
    let mask = rounded(element, data.floats(area(rows, inputs), 1.0).into_iter().map(|x| x.max(0.0)).collect());
    let dx_pitch = pitch(element, inputs, more);
    let sums = product(&dy.values, &weight.transposed(), outputs);
    let dx = sums.into_iter().zip(&mask).map(
        |(sum, &mask)| {
            if with_mask && mask <= 0.0 { (0.0, 0.0) } else { stored(element, sum) }
        },
    );
    let mut buffers = vec![dy.buffer(), weight.buffer(), input_rows(element, &mask, inputs, dx_pitch)];
    buffers.push(within_rows(element, dx.collect(), inputs, dx_pitch));
    let (dy_pitch, weight_pitch) = (dy.pitch, weight.pitch);
    let build = move |at: &[u64]| LinearBackwardInput {
        precision,
        rows,
        inputs,
        outputs,
        dy: at[0],
        dy_pitch,
        weight: at[1],
        weight_pitch,
        mask: with_mask.then(|| at[2]),
        dx: at[3],
        dx_pitch,
        workspace: at[4],
        tickets: at[5],
    };
    finish(&label(shape, more), choice, buffers, build)
}

/// With the bias gradient; or, as variant 1, without it and with a wider pitch.
pub(crate) fn weight_gradient(precision: Precision, shape: [u32; 3], more: u32, choice: Option<Choice>) -> Case {
    let [rows, inputs, outputs] = shape;
    let (mut data, with_bias, scale) = (Data::new(SEED), more == 0, 0.37_f32);
    let dy = Operand::new(precision, &mut data, rows, outputs, more);
    let x = Operand::new(precision, &mut data, rows, inputs, more);
    let scaled =
        |(sum, allowed): (f64, f64)| stored(Element::F32, (sum * f64::from(scale), allowed * f64::from(scale)));
    let sums = product(&dy.transposed(), &x.transposed(), rows).into_iter().map(scaled);
    let dweight_pitch = pitch(Element::F32, inputs, more);
    let dbias = within(dy.column_sums().into_iter().map(scaled).collect());
    let mut buffers = vec![dy.buffer(), x.buffer(), within_rows(Element::F32, sums.collect(), inputs, dweight_pitch)];
    buffers.push(if with_bias { dbias } else { input(&dbias.before) });
    let (dy_pitch, x_pitch) = (dy.pitch, x.pitch);
    let build = move |at: &[u64]| LinearWeightGradient {
        precision,
        rows,
        inputs,
        outputs,
        dy: at[0],
        dy_pitch,
        x: at[1],
        x_pitch,
        scale,
        dweight: at[2],
        dweight_pitch,
        dbias: with_bias.then(|| at[3]),
        workspace: at[4],
        tickets: at[5],
    };
    finish(&label(shape, more), choice, buffers, build)
}

/// Without master weights; or, as variant 1, with them for 16-bit types, and with a wider pitch.
pub(crate) fn update(precision: Precision, shape: [u32; 3], more: u32, choice: Option<Choice>) -> Case {
    let [rows, inputs, outputs] = shape;
    let (mut data, element, rate) = (Data::new(SEED), precision.element(), 0.037_f32);
    let with_master = more == 1 && element != Element::F32;
    let dy = Operand::new(precision, &mut data, rows, outputs, more);
    let x = Operand::new(precision, &mut data, rows, inputs, more);
    let master_weights = data.floats(area(outputs, inputs), 1.0);
    let weights = rounded(element, master_weights.clone());
    let biases = data.floats(outputs.into(), 1.0);
    let stepped = |from: &[f32], sums: Vec<(f64, f64)>| -> Vec<(f64, f64)> {
        let step = |(&from, (sum, allowed)): (&f32, (f64, f64))| {
            let rate = f64::from(rate);
            stored(Element::F32, (f64::from(from) - rate * sum, rate * allowed))
        };
        from.iter().zip(sums).map(step).collect()
    };
    let sums = product(&dy.transposed(), &x.transposed(), rows);
    let after = stepped(if with_master { &master_weights } else { &weights }, sums);
    let rounded_weights =
        after.iter().map(|&(value, allowed)| (value, allowed + stored_tolerance(element, value))).collect();
    let weight_pitch = pitch(element, inputs, more);
    let in_place = |element: Element, before: &[f32], after: Vec<(f64, f64)>| Buffer {
        before: input_rows(element, before, inputs, weight_pitch).before,
        ..within_rows(element, after, inputs, weight_pitch)
    };
    let bias = within(stepped(&biases, dy.column_sums()));
    let master = in_place(Element::F32, &master_weights, after);
    let buffers = vec![
        dy.buffer(),
        x.buffer(),
        in_place(element, &weights, rounded_weights),
        if with_master { master } else { input(&master.before) },
        Buffer { before: input(&biases).before, ..bias },
    ];
    let (dy_pitch, x_pitch) = (dy.pitch, x.pitch);
    let build = move |at: &[u64]| LinearUpdate {
        precision,
        rows,
        inputs,
        outputs,
        dy: at[0],
        dy_pitch,
        x: at[1],
        x_pitch,
        rate,
        weight: at[2],
        weight_pitch,
        master: with_master.then(|| at[3]),
        bias: at[4],
        workspace: at[5],
        tickets: at[6],
    };
    finish(&label(shape, more), choice, buffers, build)
}
