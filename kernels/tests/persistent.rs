//! Many steps in one launch against the same operations one by one. The parts that need a GPU say so if there is none.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/net.rs"]
mod net;
#[path = "../../allocators/tests/common/trials.rs"]
mod trials;

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use gpu::Gpu;
use kernels::{
    AdvanceCursor, Cooperation, Element, HostMemory, KernelError, Operation, PersistentSteps, Precision, Relu,
};
use net::{Net, Shape};
use std::process::ExitCode;
use trials::trials;

const STEPS: u32 = 7;

/// Nets whose plans have every tile that the kernel has, splits, several blocks of a loss and both kinds of data among them.
fn shapes() -> Vec<Shape> {
    let shape = |rows, widths: &[u32]| Shape { rows, widths: widths.to_vec(), bytes: true, master: true };
    vec![
        shape(32, &[784, 128, 128, 128, 10]),
        Shape { bytes: false, master: false, ..shape(25, &[61, 24, 3]) },
        shape(150, &[200, 40, 10]),
        Shape { bytes: false, ..shape(32, &[784, 512, 10]) },
        shape(64, &[784, 256, 256, 10]),
        shape(1, &[8, 10]),
    ]
}

/// Device memory of the host.
struct Arena(UnsafeCell<Vec<u64>>, u64);

const BASE: u64 = 1 << 40;

impl Arena {
    fn new(image: &[u8]) -> Self {
        let words = image.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        Self(UnsafeCell::new(words.collect()), image.len() as u64)
    }

    fn into_bytes(self) -> Vec<u8> {
        bytemuck::cast_slice(&self.0.into_inner()).to_vec()
    }
}

impl HostMemory for Arena {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        let offset = addr.checked_sub(BASE).filter(|offset| offset + bytes <= self.1)?;
        // SAFETY: inside the vector, as just checked; nobody holds a reference to it.
        NonNull::new(unsafe { (*self.0.get()).as_mut_ptr().cast::<u8>().add(offset as usize) })
    }
}

/// The precisions that have a kernel for many steps.
fn persistent() -> impl Iterator<Item = Precision> {
    Precision::ALL.into_iter().filter(|precision| precision.is_persistent())
}

fn on_the_host_each_step_runs_each_operation() {
    for precision in persistent() {
        for shape in shapes() {
            let net = Net::new(precision, &shape, STEPS);
            let one_by_one = Arena::new(&net.image);
            for _ in 0..STEPS {
                for operation in net.operations(BASE) {
                    // SAFETY: the arena is this test's own.
                    unsafe { operation.run_on_host(&one_by_one) }.unwrap();
                }
            }
            let together = Arena::new(&net.image);
            let steps = PersistentSteps::new(precision, net.operations(BASE), 3, net.memory(BASE)).unwrap();
            for launch in [steps.with_steps(4), steps] {
                // SAFETY: as above.
                unsafe { launch.run_on_host(&together) }.unwrap();
            }
            let (one_by_one, together) = (one_by_one.into_bytes(), together.into_bytes());
            assert!(one_by_one == together, "{precision:?} {shape:?}");
            let losses = net.losses(&together);
            assert!(losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{precision:?} {shape:?}: {losses:?}");
            assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{precision:?} {shape:?}: {losses:?}");
        }
    }
}

fn on_a_gpu_the_bits_are_those_of_the_operations_one_by_one() {
    // The kernel of many steps has none of those tiles.
    let gpu = Gpu::without_warpgroups();
    let kernels = gpu.kernels.as_ref().unwrap();
    for precision in persistent() {
        for shape in shapes() {
            let net = Net::new(precision, &shape, STEPS);
            let expected = gpu.with_region(&net.image, |base| {
                for _ in 0..STEPS {
                    for operation in net.operations(base) {
                        gpu.launch(operation.as_ref()).unwrap();
                    }
                }
            });
            let losses = net.losses(&expected);
            assert!(losses.iter().all(|loss| loss.is_finite()), "{precision:?} {shape:?}: {losses:?}");
            for how in [None, Some(Cooperation::Grid), Some(Cooperation::Cluster)] {
                let mut absent = false;
                let found = gpu.with_region(&net.image, |base| {
                    let steps = PersistentSteps::new(precision, net.operations(base), 1, net.memory(base)).unwrap();
                    for count in [1, STEPS - 1] {
                        // SAFETY: the context is current, and the region is live.
                        let outcome = unsafe { steps.with_steps(count).launch_as(how, kernels, gpu.stream) };
                        match outcome {
                            Err(KernelError::NotPersistent { .. }) if how == Some(Cooperation::Cluster) => {
                                absent = true
                            }
                            outcome => {
                                outcome.unwrap_or_else(|error| panic!("{precision:?} {shape:?} {how:?}: {error}"))
                            }
                        }
                    }
                });
                if absent {
                    continue;
                }
                let label = format!("{precision:?} {shape:?} {how:?}");
                assert_eq!(net.losses(&found), losses, "{label}");
                let differs = net.differs(&expected, &found);
                assert!(differs.is_none(), "{label}: {differs:?}");
            }
        }
    }
}

fn on_a_gpu_many_steps_come_to_their_end() {
    let gpu = Gpu::new();
    let steps = 500;
    let net = Net::new(Precision::F16, &shapes()[0], steps);
    let run = |how| {
        gpu.with_region(&net.image, |base| {
            let all = PersistentSteps::new(Precision::F16, net.operations(base), steps, net.memory(base)).unwrap();
            // SAFETY: the context is current, and the region is live.
            unsafe { all.launch_as(how, gpu.kernels.as_ref().unwrap(), gpu.stream) }.unwrap();
        })
    };
    let (first, second) = (run(Some(Cooperation::Grid)), run(None));
    assert!(net.losses(&first).iter().all(|loss| loss.is_finite()));
    assert_eq!(net.differs(&first, &second), None);
}

fn what_has_no_place_in_the_kernel_is_refused() {
    let net = Net::new(Precision::F16, &shapes()[0], 1);
    let refused = |precision, operations, steps| {
        let error = PersistentSteps::new(precision, operations, steps, net.memory(BASE)).unwrap_err();
        assert!(matches!(error, KernelError::NotPersistent { .. }));
        error.to_string()
    };
    let with = |operation: Box<dyn Operation>| {
        let mut operations = net.operations(BASE);
        operations.push(operation);
        operations
    };
    let relu = Relu { element: Element::F16, len: 8, x: BASE, y: BASE + 256 };
    assert_eq!(refused(Precision::F16, with(Box::new(relu)), 1), "relu_f16: is no part of persistent_steps_f16");
    let cursor = AdvanceCursor { cursor: BASE };
    assert!(refused(Precision::F16, with(Box::new(cursor)), 1).starts_with("advance_cursor"));
    // Of another precision, though stored alike.
    assert!(refused(Precision::F16Accumulate, net.operations(BASE), 1).starts_with("linear_forward_f16_"));
    assert!(refused(Precision::F32, net.operations(BASE), 1).starts_with("gather_rows_u8_f16"));
    assert!(refused(Precision::F16, net.operations(BASE), 0).contains("nothing to do"));
    assert!(refused(Precision::F16, Vec::new(), 1).contains("nothing to do"));
    let three = Net::new(Precision::F32x3, &shapes()[0], 1);
    assert_eq!(refused(Precision::F32x3, three.operations(BASE), 1), "persistent_steps: has no kernel for f32x3");
    let deep = Net::new(Precision::F16, &Shape { widths: vec![16; 11], ..shapes()[0].clone() }, 1);
    assert!(refused(Precision::F16, deep.operations(BASE), 1).contains("too many layers"));
    let wide = Net::new(Precision::F16, &Shape { widths: vec![64, 8192, 8192, 10], ..shapes()[0].clone() }, 0);
    assert!(refused(Precision::F16, wide.operations(BASE), 1).contains("is no part of"));
}

fn work_is_that_of_all_steps() {
    let net = Net::new(Precision::F16, &shapes()[0], 1);
    let operations = net.operations(BASE);
    let one = PersistentSteps::new(Precision::F16, operations.clone(), 1, net.memory(BASE)).unwrap();
    let (of_one, of_ten) = (one.work(), one.with_steps(10).work());
    assert_eq!(of_one.flops, operations.iter().map(|operation| operation.work().flops).sum::<u64>());
    assert_eq!((of_ten.flops, of_ten.bytes), (10 * of_one.flops, 10 * of_one.bytes));
    assert_eq!((of_ten.blocks, of_ten.iterations), (of_one.blocks, 10 * of_one.iterations));
    // Gathers; four layers; the loss' rows; then its mean beside the gradient of the last layer's input; each further
    // gradient beside the update of the layer above; the updates of the first two layers.
    assert_eq!(one.meetings(), 1 + 4 + 1 + 1 + 2 + 1);
    let mut buffers = one.buffers();
    buffers.sort_unstable();
    buffers.dedup();
    assert_eq!(buffers.len(), one.buffers().len(), "each buffer once");
}

fn main() -> ExitCode {
    let gpu = Gpu::missing();
    trials::run(trials! {
        gpu.as_deref() =>
            on_a_gpu_the_bits_are_those_of_the_operations_one_by_one
            on_a_gpu_many_steps_come_to_their_end;
        None =>
            on_the_host_each_step_runs_each_operation
            what_has_no_place_in_the_kernel_is_refused
            work_is_that_of_all_steps;
    })
}
