//! Performance of kernels: device time, bytes and operations a second at the shapes of a training step and beyond the
//! cache.

use super::Bench;
use anyhow::Result;
use kernels::{AddBias, BiasGradient, Element, Fill, Gemm, GemmLayout, Operation, Relu, ReluBackward, Sgd};
use serde::Serialize;

const BATCH: u32 = 64;
const WIDTHS: [u32; 3] = [128, 784, 2048];
/// Values that exceed every cache: these measure the memory's bandwidth.
const STREAMED: u64 = 1 << 26;
/// Launches between two events, and of kernels that take longer than `LONG_NS`.
const LAUNCHES: u64 = 50;
const LAUNCHES_OF_LONG: u64 = 5;
const LONG_NS: u64 = 100_000;
const REPEATS: usize = 7;

/// Device time of one kernel at one shape. The keys up to `median_ns` are those that `fit-kernels` reads.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KernelRate {
    pub(crate) kernel: &'static str,
    /// Its shape in words.
    pub(crate) shape: String,
    /// Blocks of threads.
    pub(crate) blocks: u64,
    /// Work of a block, in the simulated device's unit.
    pub(crate) iterations: u64,
    /// Bytes that the kernel must move.
    pub(crate) bytes: u64,
    /// Median device time of one launch among others, queued behind a long kernel.
    pub(crate) median_ns: f64,
    pub(crate) min_ns: f64,
    /// `bytes` over `median_ns`.
    pub(crate) gb_per_s: f64,
    /// Additions and multiplications over `median_ns`, for matrix products.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gflop_per_s: Option<f64>,
}

/// An operation, its shape in words, and its additions and multiplications if it is a matrix product.
type Shape = (String, Option<f64>, Box<dyn Operation>);

fn shapes(bench: &Bench) -> Vec<Shape> {
    // Four areas of the buffer, written by long fills; each is larger than any shape here.
    let part = bench.large.1 / 4;
    let area = |number: u64| bench.large.0.get() + 4 * number * (part & !127);
    let (a, b, c) = (area(0), area(1), area(2));
    let mut out: Vec<Shape> = vec![("1".to_owned(), None, Box::new(Fill { len: 1, value: 0.0, out: a }))];
    for width in WIDTHS {
        for (layout, name, m, n, k) in [
            (GemmLayout::NT, "NT", BATCH, width, width),
            (GemmLayout::NN, "NN", BATCH, width, width),
            (GemmLayout::TN, "TN", width, width, BATCH),
        ] {
            let flops = 2.0 * f64::from(m) * f64::from(n) * f64::from(k);
            let gemm = Gemm { layout, m, n, k, a, b, c };
            out.push((format!("{name} {m} x {n} x {k}"), Some(flops), Box::new(gemm)));
        }
        let (rows, cols) = (BATCH, width);
        let shape = format!("{rows} x {cols}");
        out.push((
            shape.clone(),
            None,
            Box::new(AddBias { element: Element::F32, rows, cols, pitch: cols, x: a, bias: b, y: c }),
        ));
        out.push((
            shape,
            None,
            Box::new(BiasGradient { element: Element::F32, rows, cols, pitch: cols, dy: a, db: b }),
        ));
    }
    let streamed = STREAMED.min(part);
    for len in [u64::from(BATCH) * 784, 784 * 784, streamed] {
        let shape = len.to_string();
        out.push((shape.clone(), None, Box::new(Fill { len, value: 0.0, out: a })));
        out.push((shape.clone(), None, Box::new(Relu { element: Element::F32, len, x: a, y: b })));
        out.push((shape.clone(), None, Box::new(ReluBackward { element: Element::F32, len, y: a, dy: b, dx: c })));
        out.push((
            shape,
            None,
            Box::new(Sgd { element: Element::F32, len, learning_rate: 0.01, gradient: a, weights: b, master: None }),
        ));
    }
    out
}

/// Nanoseconds per launch, of `launches` between two events behind a long kernel.
fn train(bench: &Bench, operation: &dyn Operation, launches: u64) -> Result<f64> {
    let ns = bench.queued_ns(|| (0..launches).try_for_each(|_| bench.launch(operation)))?;
    // CAST: far below 2^53.
    Ok(ns as f64 / launches as f64)
}

/// Times the shapes.
pub(crate) fn rates(bench: &Bench) -> Result<Vec<KernelRate>> {
    let mut out = Vec::new();
    for (shape, flops, operation) in shapes(bench) {
        // The first launch of a kernel loads it.
        let once = train(bench, operation.as_ref(), LAUNCHES_OF_LONG)?;
        // CAST: a threshold of that size is exact.
        let launches = if once > LONG_NS as f64 { LAUNCHES_OF_LONG } else { LAUNCHES };
        let mut times =
            (0..REPEATS).map(|_| train(bench, operation.as_ref(), launches)).collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        let (median_ns, work) = (times[REPEATS / 2], operation.work());
        out.push(KernelRate {
            kernel: operation.name(),
            shape,
            blocks: work.blocks,
            iterations: work.iterations,
            bytes: work.bytes,
            median_ns,
            min_ns: times[0],
            // CAST: bytes of a device. Bytes a nanosecond are gigabytes a second.
            gb_per_s: work.bytes as f64 / median_ns,
            gflop_per_s: flops.map(|flops| flops / median_ns),
        });
    }
    Ok(out)
}
