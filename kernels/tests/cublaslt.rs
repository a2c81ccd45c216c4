//! cuBLASLt as the trainer uses it: launches that are captured before they ever ran, and handles that come and go. Needs a GPU
//! and the library; ignored where one is missing.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "common/gpu.rs"]
mod gpu;
#[path = "../../allocators/tests/common/trials.rs"]
mod trials;

use cudarc::driver::{result, sys};
use gpu::Gpu;
use kernels::{Element, Engine, LinearForward, LinearUpdate, Operation, Precision};
use std::process::ExitCode;
use trials::trials;

/// Offsets in one region of zeros and ones.
const X: u64 = 0;
const WEIGHT: u64 = 1 << 20;
const BIAS: u64 = 3 << 20;
const Y: u64 = 4 << 20;
const WORKSPACE: u64 = 5 << 20;
const REGION: usize = 40 << 20;

/// A layer in f16 whose inputs and weights are one, so that each output is the number of inputs and the bias, 0.5.
fn layer(region: u64, rows: u32, inputs: u32, outputs: u32) -> LinearForward {
    let element = Element::F16;
    LinearForward {
        engine: Engine::CublasLt,
        precision: Precision::F16,
        rows,
        inputs,
        outputs,
        x: region + X,
        x_pitch: element.pitch(inputs),
        weight: region + WEIGHT,
        weight_pitch: element.pitch(inputs),
        bias: Some(region + BIAS),
        relu: true,
        y: region + Y,
        y_pitch: element.pitch(outputs),
        y_f32: false,
        workspace: region + WORKSPACE,
        tickets: 0,
    }
}

fn image() -> Vec<u8> {
    let mut image = vec![0_u8; REGION];
    let one = half::f16::ONE.to_ne_bytes();
    image[..BIAS as usize].chunks_exact_mut(2).for_each(|half| half.copy_from_slice(&one));
    image[BIAS as usize..Y as usize].chunks_exact_mut(4).for_each(|one| one.copy_from_slice(&0.5_f32.to_ne_bytes()));
    image
}

/// Panics unless every output of the layer is this.
fn check(after: &[u8], layer: &LinearForward, expected: f32) {
    let row = layer.y_pitch as usize * 2;
    for (number, row) in after[Y as usize..].chunks(row).take(layer.rows as usize).enumerate() {
        for col in 0..layer.outputs as usize {
            let found = half::f16::from_ne_bytes([row[2 * col], row[2 * col + 1]]);
            assert_eq!(found.to_f32(), expected, "row {number}, column {col} of {layer:?}");
        }
    }
}

fn fits(gpu: &Gpu, layer: &LinearForward) {
    let bytes = layer.workspace_bytes_on(gpu.kernels.as_ref()).unwrap();
    assert!(bytes <= (REGION as u64 - WORKSPACE), "{bytes} bytes for {layer:?}");
}

/// Only the first product of all must not be captured, and `with_cublaslt` has made that.
fn shapes_that_never_ran_can_be_captured() {
    let gpu = Gpu::with_cublaslt();
    for (rows, inputs, outputs) in [(64, 784, 784), (61, 33, 17), (1, 1, 1), (128, 784, 10), (200, 512, 512)] {
        let mut captured = None;
        let after = gpu.with_region(&image(), |region| {
            let layer = layer(region, rows, inputs, outputs);
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the stream is live and nobody else uses it; the region is as large as the layer needs.
            unsafe {
                result::stream::begin_capture(gpu.stream, mode).unwrap();
                fits(&gpu, &layer);
                gpu.launch(&layer).unwrap();
                let graph = result::stream::end_capture(gpu.stream).unwrap();
                let launchable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).unwrap();
                for _ in 0..3 {
                    result::graph::launch(launchable, gpu.stream).unwrap();
                }
                result::stream::synchronize(gpu.stream).unwrap();
                result::graph::exec_destroy(launchable).unwrap();
                result::graph::destroy(graph).unwrap();
            }
            captured = Some(layer);
        });
        check(&after, &captured.unwrap(), inputs as f32 + 0.5);
    }
}

/// A plan belongs to its handle: one for a GPU that was let go of is not taken for another.
fn handles_come_and_go() {
    for _ in 0..3 {
        let gpu = Gpu::with_cublaslt();
        let mut launched = None;
        let after = gpu.with_region(&image(), |region| {
            let layer = layer(region, 64, 128, 64);
            fits(&gpu, &layer);
            gpu.launch(&layer).unwrap();
            launched = Some(layer);
        });
        check(&after, &launched.unwrap(), 128.5);
    }
}

/// The address of the bias is part of what is kept about a product, and must not be that of another launch.
fn launches_with_the_same_shape_have_their_own_bias() {
    let gpu = Gpu::with_cublaslt();
    for precision in [Precision::F32, Precision::F16] {
        let mut image = vec![0_u8; REGION];
        for (at, bias) in [(BIAS, 1.0_f32), (BIAS + 4096, 2.0)] {
            let values = &mut image[at as usize..at as usize + 4 * 64];
            values.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&bias.to_ne_bytes()));
        }
        let after = gpu.with_region(&image, |region| {
            for at in [BIAS, BIAS + 4096, BIAS] {
                let layer = layer(region, 64, 64, 64);
                let pitch = 64;
                let layer = LinearForward { precision, x_pitch: pitch, weight_pitch: pitch, y_pitch: pitch, ..layer };
                // Each writes its output beside its bias.
                let layer = LinearForward { bias: Some(region + at), y: region + Y + 64 * (at - BIAS), ..layer };
                fits(&gpu, &layer);
                gpu.launch(&layer).unwrap();
            }
        });
        for (at, bias) in [(0, 1.0), (64 * 4096, 2.0)] {
            let at = Y as usize + at;
            let found = match precision {
                Precision::F32 => f32::from_ne_bytes(after[at..at + 4].try_into().unwrap()),
                _ => half::f16::from_ne_bytes([after[at], after[at + 1]]).to_f32(),
            };
            assert_eq!(found, bias, "{precision:?}");
        }
    }
}

/// Threads share a handle and nothing else.
fn threads_launch_at_the_same_time() {
    let gpu = Gpu::with_cublaslt();
    const LAYERS: usize = 4;
    let kernels = gpu.kernels.as_ref().unwrap();
    let context = result::ctx::get_current().unwrap().unwrap() as usize;
    let biases: Vec<u8> = (0..LAYERS).flat_map(|number| [number as f32 + 1.0; 64]).flat_map(f32::to_ne_bytes).collect();
    let part = 33 << 20;
    let mut image = vec![0_u8; part * LAYERS];
    image[..biases.len()].copy_from_slice(&biases);
    let after = gpu.with_region(&image, |region| {
        std::thread::scope(|scope| {
            for number in 0..LAYERS as u64 {
                scope.spawn(move || {
                    // SAFETY: the context outlives the scope.
                    unsafe { result::ctx::set_current(context as sys::CUcontext) }.unwrap();
                    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
                    // Zeros times zeros, in a part of the region of its own.
                    let at = region + number * part as u64 + 65_536;
                    let layer = LinearForward {
                        precision: Precision::F32,
                        x: at,
                        weight: at + 65_536,
                        bias: Some(region + 256 * number),
                        y: at + 2 * 65_536,
                        workspace: at + 3 * 65_536,
                        ..layer(region, 64, 64, 64)
                    };
                    for _ in 0..200 {
                        // SAFETY: addresses are those of this part, and the stream is this thread's.
                        unsafe { layer.launch(kernels, stream) }.unwrap();
                    }
                    // SAFETY: the stream was made above.
                    unsafe {
                        result::stream::synchronize(stream).unwrap();
                        result::stream::destroy(stream).unwrap();
                    }
                });
            }
        });
    });
    for number in 0..LAYERS {
        let at = number * part + 65_536 + 2 * 65_536;
        let values = after[at..at + 64 * 64 * 4].chunks_exact(4);
        let wrong = values.filter(|value| f32::from_ne_bytes((*value).try_into().unwrap()) != number as f32 + 1.0);
        assert_eq!(wrong.count(), 0, "layer {number}");
    }
}

/// NaN in the operands of a step shows in the weights.
fn what_is_no_number_reaches_the_weights() {
    let gpu = Gpu::with_cublaslt();
    for precision in Precision::ALL {
        let after = gpu.with_region(&vec![0xff_u8; 38 << 20], |region| {
            let update = LinearUpdate {
                engine: Engine::CublasLt,
                precision,
                rows: 8,
                inputs: 8,
                outputs: 8,
                dy: region,
                dy_pitch: 8,
                x: region + 4096,
                x_pitch: 8,
                rate: 0.1,
                weight: region + 8192,
                weight_pitch: 8,
                master: None,
                bias: region + 12_288,
                workspace: region + 16_384,
                tickets: 0,
            };
            assert!(update.workspace_bytes_on(gpu.kernels.as_ref()).unwrap() < 37 << 20);
            gpu.launch(&update).unwrap();
        });
        let each = precision.element().bytes() as usize;
        let weights = precision.element().unpack(&after[8192..8192 + 64 * each], 8, 8, 8);
        assert!(weights.iter().all(|weight| weight.is_nan()), "{precision:?}: {weights:?}");
    }
}

fn main() -> ExitCode {
    let library = Gpu::missing_cublaslt();
    trials::run(trials! {
        library.as_deref() =>
            shapes_that_never_ran_can_be_captured
            handles_come_and_go
            launches_with_the_same_shape_have_their_own_bias
            threads_launch_at_the_same_time
            what_is_no_number_reaches_the_weights;
    })
}
