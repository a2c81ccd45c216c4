//! Times every kernel at the shapes of the steps of an MLP, and prints a JSON line for each: what calibrates the
//! simulated device. Needs a GPU and a driver of CUDA 12.8 or newer (for `cuEventElapsedTime_v2`).
//!
//! ```text
//! cargo run --release -p kernels --example time_kernels > kernels.jsonl
//! ```
//!
//! `median_ns` and `min_ns`: device time of one launch in a train (of 50, or 5 if it is long) that was queued while
//! the stream was held up by another kernel, so the host's launches do not limit it. `single_median_ns`: the same for
//! one launch between two events. All launches of a train work on the same buffers, so small ones are in the L2 cache,
//! as they mostly are in training. `cold_median_ns`: the same as `median_ns`, but each launch of the train has buffers of
//! its own, which the kernel that held up the stream has pushed out of the cache.

use std::collections::HashSet;
use std::error::Error;

use cudarc::driver::{result, sys};
use kernels::{
    AddBias, AdvanceCursor, BiasGradient, ConvertElements, CountCorrect, CrossEntropyLoss, CudaKernels, Element, Fill,
    GatherLabels, GatherRows, Gemm, GemmLayout, MeanLoss, Operation, Relu, ReluBackward, Sgd, SoftmaxCrossEntropy,
    SoftmaxLoss, SourceElement,
};
use serde_json::{Value, json};

const INPUT: u32 = 784;
const CLASSES: u32 = 10;
const BATCHES: [u32; 2] = [32, 64];
const HIDDEN: [u32; 4] = [128, 256, 784, 2048];
/// Larger than the L2 cache: these show the memory's bandwidth.
const STREAMED: u64 = 1 << 26;

/// Launches in a train, and trains.
const LAUNCHES: usize = 50;
const REPEATS: usize = 10;
/// A kernel that takes longer than this needs no long train.
const LONG_NS: f64 = 100_000.0;
const LAUNCHES_OF_LONG: usize = 5;
/// The host takes some 3 µs a launch; the fills that hold up the stream take about 0.25 ms each.
const PLUG_FILLS: usize = 2;
const PLUG_ELEMENTS: u64 = 1 << 28;
/// Launches of a cold train, and how far apart their buffers lie: as many as there is room for. A launch whose largest
/// buffer is beyond all of these is larger than the cache, so cold by itself.
const COLD: [(usize, u64); 2] = [(50, 2 << 20), (8, 32 << 20)];

/// Zeroed device memory: zeros are valid labels and indices.
struct Memory {
    first: u64,
    second: u64,
    third: u64,
    fourth: u64,
    plug: u64,
}

impl Memory {
    /// The operation, further along in each buffer.
    fn moved(&self, bytes: u64) -> Self {
        let &Self { first, second, third, fourth, plug } = self;
        Self { first: first + bytes, second: second + bytes, third: third + bytes, fourth: fourth + bytes, plug }
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
    /// Nanoseconds a launch, of these launches between two events.
    fn train(&self, operations: &[&dyn Operation]) -> Result<f64, Box<dyn Error>> {
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

    /// Sorted times of some trains, the first of which only warms up.
    fn trains(&self, operations: &[&dyn Operation]) -> Result<Vec<f64>, Box<dyn Error>> {
        self.train(operations)?;
        let mut times = (0..REPEATS).map(|_| self.train(operations)).collect::<Result<Vec<_>, _>>()?;
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

const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

/// f32 lies dense, halves with their pitch, as in training.
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
        // Halves have masters, as in training.
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
    let picked = json!({"rows": rows, "cols": cols});
    let judged = json!({"rows": rows, "classes": classes});
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
        shapes.push((picked.clone(), Box::new(bytes)));
        let floats = GatherRows { source_element: SourceElement::F32, ..bytes };
        shapes.push((picked.clone(), Box::new(floats)));
        let dlogits_pitch = self::pitch(element, classes);
        let loss =
            SoftmaxCrossEntropy { rows, classes, logits, labels, losses, element, dlogits, dlogits_pitch, scale };
        shapes.push((judged.clone(), Box::new(loss)));
        let whole = SoftmaxLoss {
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
            // Behind the gradient, which is smaller, and nothing else writes there: tickets have to be zero.
            workspace: fourth + (1 << 20),
            tickets: fourth + (3 << 19),
        };
        shapes.push((judged.clone(), Box::new(whole)));
    }
    let pick = GatherLabels { rows, batch, source, source_rows, indices, cursor, out };
    shapes.push((json!({"rows": rows}), Box::new(pick)));
    shapes.push((judged.clone(), Box::new(CrossEntropyLoss { rows, classes, logits, labels, losses })));
    shapes.push((judged, Box::new(CountCorrect { rows, classes, logits, labels, out })));
    shapes.push((json!({"rows": rows}), Box::new(MeanLoss { rows, losses: first, out: second, cursor })));
}

/// Every launch to time, with its shape in words.
fn launches(memory: &Memory) -> Vec<(Value, Box<dyn Operation>)> {
    let mut shapes = Vec::new();
    // As good as empty: what a launch costs in itself.
    shapes.push((json!({"len": 1}), Box::new(Fill { len: 1, value: 0.0, out: memory.first }) as Box<dyn Operation>));
    shapes.push((json!({}), Box::new(AdvanceCursor { cursor: memory.fourth })));
    for batch in BATCHES {
        for hidden in HIDDEN {
            products(memory, &mut shapes, batch, hidden);
            matrices(memory, &mut shapes, batch, hidden);
            vectors(memory, &mut shapes, (batch * hidden).into());
            for weights in [INPUT * hidden, hidden * hidden, hidden * CLASSES, hidden] {
                steps(memory, &mut shapes, weights.into());
            }
        }
        matrices(memory, &mut shapes, batch, CLASSES);
        batches(memory, &mut shapes, batch);
    }
    // Evaluation takes larger batches.
    for rows in [1000, 10_000] {
        batches(memory, &mut shapes, rows);
        products(memory, &mut shapes, rows, 784);
    }
    vectors(memory, &mut shapes, STREAMED);
    let mut seen = HashSet::new();
    shapes.retain(|(shape, operation)| seen.insert(format!("{} {shape}", operation.name())));
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
    // SAFETY: the device exists. The process ends with the context; nothing is given back before.
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
        plug: zeroed(4 * PLUG_ELEMENTS)?,
    };
    let timer = Timer {
        kernels: CudaKernels::load()?,
        stream: result::stream::create(result::stream::StreamKind::NonBlocking)?,
        start: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        end: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        plug: Fill { len: PLUG_ELEMENTS, value: 0.0, out: memory.plug },
    };
    // Every launch on buffers of its own, for each distance.
    let apart = COLD.map(|(copies, bytes)| -> Vec<Vec<(Value, Box<dyn Operation>)>> {
        (0..copies as u64).map(|copy| launches(&memory.moved(copy * bytes))).collect()
    });
    for (number, (shape, operation)) in launches(&memory).into_iter().enumerate() {
        let work = operation.work();
        let single = timer.trains(&[&*operation])?;
        let launches = if single[0] > LONG_NS { LAUNCHES_OF_LONG } else { LAUNCHES };
        let many = timer.trains(&vec![&*operation; launches])?;
        let largest = operation.buffers().iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let distance = COLD.iter().position(|(_, bytes)| largest <= *bytes);
        let cold = match distance {
            None => many.clone(),
            Some(distance) => {
                let copies: Vec<&dyn Operation> =
                    apart[distance].iter().take(launches).map(|copy| &*copy[number].1).collect();
                timer.trains(&copies)?
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
