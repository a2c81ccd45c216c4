//! Times the steps of small nets as launches one by one and as one kernel, whose blocks meet in either way, and prints a
//! JSON line for each net. Needs a GPU and a driver of CUDA 12.8 or newer (for `cuEventElapsedTime_v2`).
//!
//! ```text
//! cargo run --release -p kernels --example time_persistent
//! ```
//!
//! Device time of a step in µs, the median of some trains of steps: `one_by_one_us`, `grid_us`, `cluster_us` (absent where a
//! cluster has no room), `chosen_us` (what `launch` chooses). `meetings`: times that the blocks meet in a step.

#[path = "../tests/common/net.rs"]
mod net;

use std::error::Error;

use cudarc::driver::{result, sys};
use kernels::{Cooperation, CudaKernels, KernelError, Operation, PersistentSteps, Precision};
use net::{Net, Shape};
use serde_json::json;

const STEPS: u32 = 200;
const TRAINS: usize = 9;
const INPUT: u32 = 784;
const CLASSES: u32 = 10;
const HIDDEN: [u32; 5] = [32, 64, 128, 256, 512];
const ROWS: [u32; 3] = [32, 64, 128];

struct Timer {
    kernels: CudaKernels,
    stream: sys::CUstream,
    start: sys::CUevent,
    end: sys::CUevent,
}

impl Timer {
    /// Median of µs a step, of trains that start anew from the image.
    fn of(&self, net: &Net, base: u64, queue: &dyn Fn() -> Result<(), KernelError>) -> Result<f64, Box<dyn Error>> {
        let mut times = Vec::with_capacity(TRAINS);
        for _ in 0..TRAINS {
            // SAFETY: the region is as long as the image, and nothing that uses it is under way.
            unsafe {
                result::memcpy_htod_sync(base, &net.image)?;
                result::ctx::synchronize()?;
                result::event::record(self.start, self.stream)?;
            }
            queue()?;
            // SAFETY: both events belong to the context that is current.
            let took = unsafe {
                result::event::record(self.end, self.stream)?;
                result::stream::synchronize(self.stream)?;
                result::event::elapsed(self.start, self.end)?
            };
            times.push(f64::from(took) * 1000.0 / f64::from(STEPS));
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[TRAINS / 2])
    }

    fn net(&self, precision: Precision, rows: u32, hidden: u32) -> Result<(), Box<dyn Error>> {
        let widths = vec![INPUT, hidden, hidden, hidden, CLASSES];
        let net = Net::new(precision, &Shape { rows, widths, bytes: true, master: true }, STEPS);
        // SAFETY: freed below.
        let base = unsafe { result::malloc_sync(net.image.len()) }?;
        let operations = net.operations(base);
        let one_by_one = self.of(&net, base, &|| {
            for _ in 0..STEPS {
                for operation in &operations {
                    // SAFETY: the context is current, and the region is live.
                    unsafe { operation.launch(&self.kernels, self.stream) }?;
                }
            }
            Ok(())
        })?;
        let mut line = json!({
            "precision": format!("{precision:?}"), "rows": rows, "hidden": hidden, "one_by_one_us": one_by_one,
        });
        match PersistentSteps::new(precision, net.operations(base), STEPS, net.memory(base)) {
            Err(error) => line["refused"] = error.to_string().into(),
            Ok(steps) => {
                line["meetings"] = steps.meetings().into();
                line["blocks"] = steps.work().blocks.into();
                let ways = [
                    ("grid_us", Some(Cooperation::Grid)),
                    ("cluster_us", Some(Cooperation::Cluster)),
                    ("chosen_us", None),
                ];
                for (name, how) in ways {
                    // SAFETY: as above.
                    let queue = || unsafe { steps.launch_as(how, &self.kernels, self.stream) };
                    match self.of(&net, base, &queue) {
                        Ok(us) => line[name] = us.into(),
                        Err(error) if error.downcast_ref::<KernelError>().is_some_and(is_refusal) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        println!("{line}");
        // SAFETY: allocated above; its work is done.
        unsafe { result::free_sync(base)? };
        Ok(())
    }
}

fn is_refusal(error: &KernelError) -> bool {
    matches!(error, KernelError::NotPersistent { .. })
}

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: only tries to open the library; cudarc panics when there is none.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver".into());
    }
    result::init()?;
    let device = result::device::get(0)?;
    // SAFETY: the device exists; the context lives to the end of the process.
    unsafe { result::ctx::set_current(result::primary_ctx::retain(device)?) }?;
    let timer = Timer {
        kernels: CudaKernels::load()?,
        stream: result::stream::create(result::stream::StreamKind::NonBlocking)?,
        start: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
        end: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
    };
    for precision in [Precision::F16, Precision::Tf32, Precision::F32] {
        for rows in ROWS {
            for hidden in HIDDEN {
                timer.net(precision, rows, hidden)?;
            }
        }
    }
    Ok(())
}
