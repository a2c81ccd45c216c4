//! Times every kernel at the shapes of the steps of an MLP, and prints a JSON line for each, for the calibration of the
//! simulated device. Needs a GPU and a driver of CUDA 12.8 or newer (for `cuEventElapsedTime_v2`).
//!
//! ```text
//! cargo run --release -p kernels --example time_kernels > kernels.jsonl
//! ```
//!
//! `median_ns` and `min_ns`: device time of one launch in a sequence of 50 launches (5 if it is long), which is queued
//! while another kernel occupies the stream, so the host's launch rate does not limit it. `single_median_ns`: the same
//! for one launch between two events. All launches of a sequence use the same buffers, so small buffers are in the L2
//! cache, as they usually are in training. `cold_median_ns`: like `median_ns`, but each launch of the sequence has its
//! own buffers, which the kernel that occupied the stream has evicted from the cache.

use std::collections::HashSet;
use std::error::Error;

use cudarc::driver::{result, sys};
use kernels::{
    AddBias, AdvanceCursor, BiasGradient, ConvertElements, CountCorrect, CrossEntropyLoss, CudaKernels, Element, Fill,
    GatherLabels, GatherRows, Gemm, GemmLayout, LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient,
    MeanLoss, Operation, Precision, Relu, ReluBackward, Sgd, SoftmaxCrossEntropy, SoftmaxLoss, SourceElement,
};
use serde_json::{Value, json};

const INPUT: u32 = 784;
const CLASSES: u32 = 10;
const BATCHES: [u32; 2] = [32, 64];
const HIDDEN: [u32; 4] = [128, 256, 784, 2048];
/// Larger than the L2 cache: these measure the memory's bandwidth.
const STREAMED: u64 = 1 << 26;

/// Launches in a sequence, and number of sequences.
const LAUNCHES: usize = 50;
const REPEATS: usize = 10;
/// A kernel that takes longer than this has a shorter sequence.
const LONG_NS: f64 = 100_000.0;
const LAUNCHES_OF_LONG: usize = 5;
/// The host takes about 3 µs for a launch; the fills that occupy the stream take about 0.25 ms each.
const PLUG_FILLS: usize = 2;
const PLUG_ELEMENTS: u64 = 1 << 28;
/// Launches of a cold sequence, and the distance between their buffers in bytes, within the memory available. A launch
/// with a buffer larger than the largest distance exceeds the cache, so it is cold in any sequence.
const COLD: [(usize, u64); 2] = [(50, 2 << 20), (8, 32 << 20)];

/// Zeroed device memory: zeros are valid labels and indices.
struct Memory {
    first: u64,
    second: u64,
    third: u64,
    fourth: u64,
    fifth: u64,
    workspace: u64,
    plug: u64,
}

impl Memory {
    /// The same memory at higher addresses.
    fn at_offset(&self, bytes: u64) -> Self {
        let &Self { first, second, third, fourth, fifth, workspace, plug } = self;
        let [first, second, third] = [first + bytes, second + bytes, third + bytes];
        let [fourth, fifth, workspace] = [fourth + bytes, fifth + bytes, workspace + bytes];
        Self { first, second, third, fourth, fifth, workspace, plug }
    }

    /// Counters of launches whose blocks share sums: after what else is at `fourth`, because they must be zero.
    fn tickets(&self) -> u64 {
        self.fourth + (3 << 19)
    }
}

struct Timer {
    kernels: CudaKernels,
    stream: sys::CUstream,
    start: sys::CUevent,
    end: sys::CUevent,
    plug: Fill,
}

impl Timer {
    /// Nanoseconds per launch of these launches, between two events.
    fn sequence(&self, operations: &[&dyn Operation]) -> Result<f64, Box<dyn Error>> {
        // SAFETY: the context is current and the buffers are larger than any shape here.
        unsafe {
            for _ in 0..PLUG_FILLS {
                self.plug.launch(&self.kernels, self.stream)?;
            }
            result::event::record(self.start, self.stream)?;
            for operation in operations {
                operation.launch(&self.kernels, self.stream)?;
            }
            result::event::record(self.end, self.stream)?;
            result::stream::synchronize(self.stream)?;
            Ok(f64::from(result::event::elapsed(self.start, self.end)?) * 1e6 / operations.len() as f64)
        }
    }

    /// Sorted times of several sequences; the first is a warm-up and is not included.
    fn sequences(&self, operations: &[&dyn Operation]) -> Result<Vec<f64>, Box<dyn Error>> {
        self.sequence(operations)?;
        let mut times = (0..REPEATS).map(|_| self.sequence(operations)).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}

fn products(memory: &Memory, shapes: &mut Vec<(Value, Box<dyn Operation>)>, batch: u32, hidden: u32) {
    let products = [
        (GemmLayout::NT, batch, hidden, INPUT),
        (GemmLayout::NT, batch, hidden, hidden),
        (GemmLayout::NT, batch, CLASSES, hidden),
        (GemmLayout::NN, batch, hidden, CLASSES),
        (GemmLayout::NN, batch, hidden, hidden),
        (GemmLayout::TN, hidden, INPUT, batch),
        (GemmLayout::TN, hidden, hidden, batch),
        (GemmLayout::TN, CLASSES, hidden, batch),
    ];
    for (layout, m, n, k) in products {
        let (a, b, c) = (memory.first, memory.second, memory.third);
        let gemm = Gemm { layout, m, n, k, a, b, c };
        shapes.push((json!({"m": m, "n": n, "k": k}), Box::new(gemm)));
    }
}

/// The GEMMs of a layer, with the operations that are fused with them; inference has only the first.
fn layer(
    memory: &Memory,
    shapes: &mut Vec<(Value, Box<dyn Operation>)>,
    [rows, inputs, outputs]: [u32; 3],
    train: bool,
) {
    // `first` and `second` are only read: other launches take labels and indices from `second`, which must be zero.
    let &Memory { first: x, second: dy, third: weight, fourth: bias, fifth, workspace, .. } = memory;
    let tickets = memory.tickets();
    let shape = |step: bool| json!({"rows": rows, "inputs": inputs, "outputs": outputs, "step": step});
    for precision in Precision::ALL {
        let element = precision.element();
        let (x_pitch, y_pitch, weight_pitch) = (element.pitch(inputs), element.pitch(outputs), element.pitch(inputs));
        let forward = LinearForward {
            precision,
            rows,
            inputs,
            outputs,
            x,
            x_pitch,
            weight,
            weight_pitch,
            bias: Some(dy),
            relu: true,
            y: fifth,
            y_pitch,
            y_f32: false,
            workspace,
            tickets,
        };
        shapes.push((shape(false), Box::new(forward)));
        if !train {
            continue;
        }
        let input = LinearBackwardInput {
            precision,
            rows,
            inputs,
            outputs,
            dy,
            dy_pitch: y_pitch,
            weight,
            weight_pitch,
            mask: Some(x),
            dx: fifth,
            dx_pitch: x_pitch,
            workspace,
            tickets,
        };
        let gradient = LinearWeightGradient {
            precision,
            rows,
            inputs,
            outputs,
            dy,
            dy_pitch: y_pitch,
            x,
            x_pitch,
            scale: 1.0,
            dweight: fifth,
            dweight_pitch: weight_pitch,
            dbias: Some(bias),
            workspace,
            tickets,
        };
        let update = |master| LinearUpdate {
            precision,
            rows,
            inputs,
            outputs,
            dy,
            dy_pitch: y_pitch,
            x,
            x_pitch,
            rate: 0.0,
            weight,
            weight_pitch,
            master,
            bias,
            workspace,
            tickets,
        };
        shapes.push((shape(false), Box::new(input)));
        shapes.push((shape(false), Box::new(gradient)));
        shapes.push((shape(true), Box::new(update(None))));
        if element != Element::F32 {
            shapes.push((shape(true), Box::new(update(Some(fifth)))));
        }
    }
}

const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

/// f32 is dense and 16-bit types have a pitch, as in training.
fn pitch(element: Element, cols: u32) -> u32 {
    if element == Element::F32 { cols } else { element.pitch(cols) }
}

fn matrices(memory: &Memory, shapes: &mut Vec<(Value, Box<dyn Operation>)>, rows: u32, cols: u32) {
    let &Memory { first, second, third, .. } = memory;
    let shape = json!({"rows": rows, "cols": cols});
    for element in ELEMENTS {
        let pitch = pitch(element, cols);
        let add = AddBias { element, rows, cols, pitch, x: first, bias: second, y: third };
        shapes.push((shape.clone(), Box::new(add)));
        shapes.push((shape.clone(), Box::new(BiasGradient { element, rows, cols, pitch, dy: first, db: second })));
    }
}

fn steps(memory: &Memory, shapes: &mut Vec<(Value, Box<dyn Operation>)>, len: u64) {
    let &Memory { first, second, third, .. } = memory;
    for element in ELEMENTS {
        // 16-bit weights have master weights, as in training.
        let master = (element != Element::F32).then_some(third);
        let sgd = Sgd { element, len, learning_rate: 0.01, gradient: first, weights: second, master };
        shapes.push((json!({"len": len}), Box::new(sgd)));
    }
}

fn vectors(memory: &Memory, shapes: &mut Vec<(Value, Box<dyn Operation>)>, len: u64) {
    let &Memory { first, second, third, .. } = memory;
    let shape = json!({"len": len});
    shapes.push((shape.clone(), Box::new(Fill { len, value: 0.0, out: first })));
    for element in ELEMENTS {
        shapes.push((shape.clone(), Box::new(Relu { element, len, x: first, y: second })));
        shapes.push((shape.clone(), Box::new(ReluBackward { element, len, y: first, dy: second, dx: third })));
    }
    for half in [Element::Bf16, Element::F16] {
        for (from, to) in [(Element::F32, half), (half, Element::F32)] {
            shapes.push((shape.clone(), Box::new(ConvertElements { len, from, to, x: first, y: second })));
        }
    }
    steps(memory, shapes, len);
}

fn batches(memory: &Memory, shapes: &mut Vec<(Value, Box<dyn Operation>)>, rows: u32) {
    let &Memory { first, second, third, fourth, .. } = memory;
    let (classes, cols, source_rows, batch) = (CLASSES, INPUT, 1000, rows);
    let (scale, shift, cursor) = (1.0, 0.0, None);
    let (source, indices, out) = (first, second, third);
    let (logits, labels, losses, dlogits) = (first, second, third, fourth);
    let gather_shape = json!({"rows": rows, "cols": cols});
    let loss_shape = json!({"rows": rows, "classes": classes});
    for element in ELEMENTS {
        let pitch = pitch(element, cols);
        let bytes = GatherRows {
            source_element: SourceElement::U8,
            element,
            rows,
            cols,
            pitch,
            batch,
            source,
            source_rows,
            indices,
            cursor,
            scale,
            shift,
            out,
        };
        shapes.push((gather_shape.clone(), Box::new(bytes)));
        let floats = GatherRows { source_element: SourceElement::F32, ..bytes };
        shapes.push((gather_shape.clone(), Box::new(floats)));
        let dlogits_pitch = self::pitch(element, classes);
        let loss =
            SoftmaxCrossEntropy { rows, classes, logits, labels, losses, element, dlogits, dlogits_pitch, scale };
        shapes.push((loss_shape.clone(), Box::new(loss)));
        let fused_loss = SoftmaxLoss {
            element,
            rows,
            classes,
            logits,
            labels,
            dlogits: Some(dlogits),
            dlogits_pitch,
            scale,
            loss: third,
            correct: None,
            cursor,
            advance: false,
            // After the gradient, which is smaller.
            workspace: fourth + (1 << 20),
            tickets: memory.tickets(),
        };
        shapes.push((loss_shape.clone(), Box::new(fused_loss)));
    }
    let gather_labels = GatherLabels { rows, batch, source, source_rows, indices, cursor, out };
    shapes.push((json!({"rows": rows}), Box::new(gather_labels)));
    shapes.push((loss_shape.clone(), Box::new(CrossEntropyLoss { rows, classes, logits, labels, losses })));
    shapes.push((loss_shape, Box::new(CountCorrect { rows, classes, logits, labels, out })));
    shapes.push((json!({"rows": rows}), Box::new(MeanLoss { rows, losses: first, out: second, cursor })));
}

/// Every launch to time, with its shape.
fn launches(memory: &Memory) -> Vec<(Value, Box<dyn Operation>)> {
    let mut shapes = Vec::new();
    // Almost empty, to measure the overhead of a launch.
    shapes.push((json!({"len": 1}), Box::new(Fill { len: 1, value: 0.0, out: memory.first }) as Box<dyn Operation>));
    shapes.push((json!({}), Box::new(AdvanceCursor { cursor: memory.fourth })));
    for batch in BATCHES {
        for hidden in HIDDEN {
            products(memory, &mut shapes, batch, hidden);
            for [inputs, outputs] in [[INPUT, hidden], [hidden, hidden], [hidden, CLASSES]] {
                layer(memory, &mut shapes, [batch, inputs, outputs], true);
            }
            matrices(memory, &mut shapes, batch, hidden);
            vectors(memory, &mut shapes, (batch * hidden).into());
            for weights in [INPUT * hidden, hidden * hidden, hidden * CLASSES, hidden] {
                steps(memory, &mut shapes, weights.into());
            }
        }
        matrices(memory, &mut shapes, batch, CLASSES);
        batches(memory, &mut shapes, batch);
    }
    // Evaluation uses larger batches.
    for rows in [1000, 10_000] {
        batches(memory, &mut shapes, rows);
        products(memory, &mut shapes, rows, 784);
        for [inputs, outputs] in [[INPUT, 784], [784, CLASSES]] {
            layer(memory, &mut shapes, [rows, inputs, outputs], false);
        }
    }
    vectors(memory, &mut shapes, STREAMED);
    let mut names = HashSet::new();
    shapes.retain(|(shape, operation)| names.insert(format!("{} {shape}", operation.name())));
    shapes
}

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: only tries to open the library; without one, any other call would panic.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver: this example needs a GPU".into());
    }
    result::init()?;
    let device = result::device::get(0)?;
    let device_name = result::device::get_name(device)?;
    // SAFETY: the device exists. The context lives until the process exits; nothing is released before.
    unsafe { result::ctx::set_current(result::primary_ctx::retain(device)?)? };
    let zeroed = |bytes: u64| -> Result<u64, Box<dyn Error>> {
        // SAFETY: the memory was just allocated with this size.
        unsafe {
            let address = result::malloc_sync(bytes as usize)?;
            result::memset_d8_sync(address, 0, bytes as usize)?;
            Ok(address)
        }
    };
    let memory = Memory {
        first: zeroed(4 * STREAMED)?,
        second: zeroed(4 * STREAMED)?,
        third: zeroed(4 * STREAMED)?,
        fourth: zeroed(4 * STREAMED)?,
        fifth: zeroed(4 * STREAMED)?,
        workspace: zeroed(4 * STREAMED)?,
        plug: zeroed(4 * PLUG_ELEMENTS)?,
    };
    let timer = Timer {
        kernels: CudaKernels::load()?,
        stream: result::stream::create(result::stream::StreamKind::NonBlocking)?,
        start: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        end: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        plug: Fill { len: PLUG_ELEMENTS, value: 0.0, out: memory.plug },
    };
    for precision in Precision::ALL {
        timer.kernels.prepare(precision)?;
    }
    // For each distance, every launch with its own buffers.
    let cold_copies = COLD.map(|(copies, bytes)| -> Vec<Vec<(Value, Box<dyn Operation>)>> {
        (0..copies as u64).map(|copy| launches(&memory.at_offset(copy * bytes))).collect()
    });
    for (number, (shape, operation)) in launches(&memory).into_iter().enumerate() {
        let work = operation.work();
        let single = timer.sequences(&[&*operation])?;
        let launches = if single[0] > LONG_NS { LAUNCHES_OF_LONG } else { LAUNCHES };
        let many = timer.sequences(&vec![&*operation; launches])?;
        let largest = operation.buffers().iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let distance = COLD.iter().position(|(_, bytes)| largest <= *bytes);
        let cold = match distance {
            None => many.clone(),
            Some(distance) => {
                let copies: Vec<&dyn Operation> =
                    cold_copies[distance].iter().take(launches).map(|copy| &*copy[number].1).collect();
                timer.sequences(&copies)?
            }
        };
        let line = json!({
            "device": device_name,
            "kernel": operation.name(),
            "shape": shape,
            "blocks": work.blocks,
            "iterations": work.iterations,
            "bytes": work.bytes,
            "flops": work.flops,
            "median_ns": many[many.len() / 2].round(),
            "min_ns": many[0].round(),
            "cold_median_ns": cold[cold.len() / 2].round(),
            "single_median_ns": single[single.len() / 2].round(),
        });
        println!("{line}");
    }
    Ok(())
}
