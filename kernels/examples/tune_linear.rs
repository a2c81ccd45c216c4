//! Measures every choice of tile and splits for a linear layer's GEMMs at the shapes of training, and prints the table
//! that launches use: the fastest choice for each shape. Needs a GPU and a driver of CUDA 12.8 or newer.
//!
//! ```text
//! cargo run --release -p kernels --example tune_linear > kernels/src/plan/h200.csv
//! ```
//!
//! Names of precisions (`f32 tf32 f16`) restrict the measurement to these; the header is always printed. With `--all`
//! it prints every candidate with its time in nanoseconds instead.
//!
//! A time is the median over sequences of launches that are queued while another kernel occupies the stream. All
//! launches of a sequence use the same buffers, so weights that fit in the L2 cache are there, as they are in training.

use std::error::Error;

use cudarc::driver::{result, sys};
use kernels::{
    Choice, CudaKernels, Fill, KernelError, LinearBackwardInput, LinearForward, LinearUpdate, Operation, Precision,
    Product, Tile,
};

/// Precisions with a table of their own; bf16 uses that of f16.
const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Tf32, Precision::F16];
const INPUTS: u32 = 784;
const CLASSES: u32 = 10;
const ROWS: [u32; 4] = [32, 64, 128, 256];
const HIDDEN: [u32; 8] = [128, 256, 512, 784, 1024, 2048, 4096, 8192];
/// Large batches, with their widths.
const LARGE: [(u32, &[u32]); 3] = [(1024, &[128, 512, 2048]), (8192, &[128, 512]), (60_000, &[128])];

/// Launches of a sequence, number of sequences, and maximum time of a sequence: slow candidates get shorter ones.
const LAUNCHES: usize = 12;
const SEQUENCES: usize = 3;
const SEQUENCE_NS: f64 = 400_000.0;
/// A tile that only some GPUs support is listed if its time is below this fraction of the others'.
const MAX_TIME_FRACTION: f64 = 0.98;
/// A fill of this many f32 occupies the stream while a sequence is queued.
const PLUG: u64 = 1 << 27;

/// One launch.
type Launch<'a> = dyn Fn(&CudaKernels, sys::CUstream) -> Result<(), KernelError> + 'a;

/// One launch with a given choice.
type LaunchWith<'a> = dyn Fn(Choice, &CudaKernels, sys::CUstream) -> Result<(), KernelError> + 'a;

/// Workspace bytes and counters of a launch with a given choice.
type Needs<'a> = dyn Fn(Choice) -> (u64, u64) + 'a;

/// A GEMM, its m, n and k, its choices, and their memory and launches.
type Candidates<'a> = (Product, [u32; 3], Vec<Choice>, &'a Needs<'a>, &'a LaunchWith<'a>);

struct Timer {
    kernels: CudaKernels,
    stream: sys::CUstream,
    start: sys::CUevent,
    end: sys::CUevent,
    plug: Fill,
}

impl Timer {
    fn sequence(&self, launches: usize, launch: &Launch<'_>) -> Result<f64, Box<dyn Error>> {
        // SAFETY: stream and events are live, and the fill has its buffer.
        unsafe {
            self.plug.launch(&self.kernels, self.stream)?;
            result::event::record(self.start, self.stream)?;
            for _ in 0..launches {
                launch(&self.kernels, self.stream)?;
            }
            result::event::record(self.end, self.stream)?;
            result::stream::synchronize(self.stream)?;
            Ok(f64::from(result::event::elapsed(self.start, self.end)?) * 1e6 / launches as f64)
        }
    }

    /// Median nanoseconds of a launch.
    fn time(&self, launch: &Launch<'_>) -> Result<f64, Box<dyn Error>> {
        let first = self.sequence(2, launch)?;
        let launches = ((SEQUENCE_NS / first) as usize).clamp(2, LAUNCHES);
        let mut times = (0..SEQUENCES).map(|_| self.sequence(launches, launch)).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[SEQUENCES / 2])
    }
}

/// Shapes of layers: rows, inputs, outputs.
fn layers() -> Vec<(u32, u32, u32)> {
    let small = ROWS.into_iter().flat_map(|rows| HIDDEN.map(|hidden| (rows, hidden)));
    let large = LARGE.into_iter().flat_map(|(rows, widths)| widths.iter().map(move |hidden| (rows, *hidden)));
    let mut layers = Vec::new();
    for (rows, hidden) in small.chain(large) {
        layers.extend([(rows, INPUTS, hidden), (rows, hidden, hidden), (rows, hidden, CLASSES)]);
    }
    layers.sort_unstable();
    layers.dedup();
    layers
}

fn main() -> Result<(), Box<dyn Error>> {
    let (options, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with('-'));
    let all = !options.is_empty();
    let option = |option: &&String| option.as_str() != "--all";
    let name = |name: &&String| !PRECISIONS.iter().any(|precision| precision.name() == name.as_str());
    if let Some(unknown) = options.iter().find(option).or(names.iter().find(name)) {
        return Err(format!("unknown argument '{unknown}'; use --all, f32, tf32 or f16").into());
    }
    // SAFETY: only tries to open the library; without one, any other call would panic.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver: this example needs a GPU".into());
    }
    result::init()?;
    let device = result::device::get(0)?;
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
    // The largest matrix is 8192 x 8192, or 60,000 x 784, of f32.
    let [x, y, weight, workspace] = [zeroed(1 << 28)?, zeroed(1 << 28)?, zeroed(1 << 28)?, zeroed(1 << 28)?];
    let [bias, tickets] = [zeroed(1 << 20)?, zeroed(1 << 20)?];
    let timer = Timer {
        kernels: CudaKernels::load()?,
        stream: result::stream::create(result::stream::StreamKind::NonBlocking)?,
        start: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        end: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        plug: Fill { len: PLUG, value: 0.0, out: zeroed(4 * PLUG)? },
    };
    println!("product,precision,m,n,k,tile,splits{}", if all { ",ns" } else { "" });
    let is_selected = |precision: &Precision| names.is_empty() || names.iter().any(|name| name == precision.name());
    for precision in PRECISIONS.into_iter().filter(is_selected) {
        timer.kernels.prepare(precision)?;
        let pitch = |cols| precision.element().pitch(cols);
        for (rows, inputs, outputs) in layers() {
            let (x_pitch, y_pitch, weight_pitch) = (pitch(inputs), pitch(outputs), pitch(inputs));
            let forward = LinearForward {
                precision,
                rows,
                inputs,
                outputs,
                x,
                x_pitch,
                weight,
                weight_pitch,
                bias: Some(bias),
                relu: true,
                y,
                y_pitch,
                y_f32: false,
                workspace,
                tickets,
            };
            let input = LinearBackwardInput {
                precision,
                rows,
                inputs,
                outputs,
                dy: y,
                dy_pitch: y_pitch,
                weight,
                weight_pitch,
                mask: None,
                dx: x,
                dx_pitch: x_pitch,
                workspace,
                tickets,
            };
            let update = LinearUpdate {
                precision,
                rows,
                inputs,
                outputs,
                dy: y,
                dy_pitch: y_pitch,
                x,
                x_pitch,
                rate: 0.0,
                weight,
                weight_pitch,
                master: None,
                bias,
                workspace,
                tickets,
            };
            // SAFETY: the buffers are larger than any shape here, and `needs_with` is checked below.
            let launch_forward = |choice, kernels: &_, stream| unsafe { forward.launch_with(choice, kernels, stream) };
            // SAFETY: as above.
            let launch_input = |choice, kernels: &_, stream| unsafe { input.launch_with(choice, kernels, stream) };
            // SAFETY: as above.
            let launch_update = |choice, kernels: &_, stream| unsafe { update.launch_with(choice, kernels, stream) };
            let products: [Candidates<'_>; 3] = [
                (
                    Product::Forward,
                    [rows, outputs, inputs],
                    forward.candidates(),
                    &|c| forward.needs_with(c),
                    &launch_forward,
                ),
                (Product::Input, [rows, inputs, outputs], input.candidates(), &|c| input.needs_with(c), &launch_input),
                (
                    Product::Gradient,
                    [outputs, inputs, rows],
                    update.candidates(),
                    &|c| update.needs_with(c),
                    &launch_update,
                ),
            ];
            for (product, [m, n, k], candidates, needs, launch) in products {
                // The best tile for any GPU, with warpgroups, and streamed.
                let mut best: [Option<(f64, Choice)>; 3] = [None; 3];
                for choice in candidates {
                    let (bytes, counters) = needs(choice);
                    if bytes > 1 << 28 || counters > 1 << 18 || !timer.kernels.has(choice.tile) {
                        continue;
                    }
                    let ns = timer.time(&|kernels, stream| launch(choice, kernels, stream))?;
                    let (tile, splits) = (choice.tile.name(), choice.splits);
                    if all {
                        println!("{},{},{m},{n},{k},{tile},{splits},{ns:.0}", product.name(), precision.name());
                    }
                    let kind =
                        if choice.tile == Tile::Streamed { 2 } else { usize::from(choice.tile.needs_warpgroups()) };
                    if best[kind].is_none_or(|(least, _)| ns < least) {
                        best[kind] = Some((ns, choice));
                    }
                }
                if all {
                    continue;
                }
                // The best tile for every GPU is always listed; the others only if they are faster.
                let mut least = f64::INFINITY;
                let products = [product, product, Product::Update];
                for ((ns, choice), product) in best.into_iter().zip(products).filter_map(|(best, p)| Some((best?, p))) {
                    if ns < least * MAX_TIME_FRACTION {
                        least = ns;
                        let (tile, splits) = (choice.tile.name(), choice.splits);
                        println!("{},{},{m},{n},{k},{tile},{splits}", product.name(), precision.name());
                    }
                }
            }
        }
    }
    Ok(())
}
