//! The CUDA kernels, compared with the same models and tolerances as the CPU reference. Needs a GPU; ignored without
//! one.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

#[path = "common/gpu.rs"]
mod gpu;
#[path = "../../allocators/device/tests/common/trials.rs"]
mod trials;

use common::{Case, cases};
use gpu::Gpu;
use kernels::{
    CountCorrect, CrossEntropyLoss, Element, Fill, GatherLabels, GatherRows, KernelError, MeanLoss,
    SoftmaxCrossEntropy, SoftmaxLoss, SourceElement,
};
use std::process::ExitCode;
use trials::trials;

fn run(gpu: &Gpu, case: &Case, skew: usize) -> Vec<u8> {
    let (offsets, image) = case.region(skew);
    gpu.with_region(&image, |region| {
        let addresses: Vec<u64> = offsets.iter().map(|&offset| region + offset as u64).collect();
        let outcome = gpu.launch(&*(case.build)(&addresses));
        outcome.unwrap_or_else(|error| panic!("{}: {error}", case.label));
    })
}

/// The cases of linear layers, or all others; each has its own test.
fn cases_of(layers: bool) -> impl Iterator<Item = &'static Case> {
    cases::all().iter().filter(move |case| case.is_linear() == layers)
}

fn matches_model_and_host(layers: bool) {
    let gpu = Gpu::new();
    for case in cases_of(layers) {
        let (offsets, _) = case.region(0);
        let (on_gpu, on_host) = (run(&gpu, case, 0), case.run_on_host(0));
        case.verify(&offsets, &on_gpu);
        case.verify(&offsets, &on_host);
        case.compare(&offsets, &on_gpu, &on_host);
    }
}

fn gives_the_same_bits_twice(layers: bool) {
    let gpu = Gpu::new();
    for case in cases_of(layers) {
        assert!(run(&gpu, case, 0) == run(&gpu, case, 0), "{}", case.label);
    }
}

fn every_kernel_computes_what_it_says_and_what_the_host_computes() {
    matches_model_and_host(false);
}

fn every_linear_kernel_computes_what_it_says_and_what_the_host_computes() {
    matches_model_and_host(true);
}

/// Kernels of linear layers read 16 bytes at a time.
fn addresses_need_only_what_is_read_at_once() {
    let gpu = Gpu::new();
    for case in cases::all() {
        let skew = if case.is_linear() { 16 } else { 4 };
        let (offsets, _) = case.region(skew);
        case.verify(&offsets, &run(&gpu, case, skew));
    }
}

fn two_runs_give_the_same_bits() {
    gives_the_same_bits_twice(false);
}

fn two_runs_of_linear_layers_give_the_same_bits() {
    gives_the_same_bits_twice(true);
}

fn bad_labels_and_indices_show_and_touch_nothing_else() {
    let gpu = Gpu::new();
    // At 0: two rows of three logits, or a source of six bytes. At 64: labels or indices, of which the second is out of
    // range.
    let mut image = vec![0_u8; 512];
    image[68] = 3;
    let float = |bytes: &[u8], at: usize| bytemuck::pod_read_unaligned::<f32>(&bytes[at..at + 4]);
    let integer = |bytes: &[u8], at: usize| bytemuck::pod_read_unaligned::<u32>(&bytes[at..at + 4]);

    let after = gpu.with_region(&image, |at| {
        let (logits, labels, losses, dlogits) = (at, at + 64, at + 128, at + 192);
        let (rows, classes, scale, element, dlogits_pitch) = (2, 3, 1.0, Element::F32, 3);
        let with_gradient =
            SoftmaxCrossEntropy { rows, classes, logits, labels, losses, element, dlogits, dlogits_pitch, scale };
        gpu.launch(&with_gradient).unwrap();
        let fused_loss = SoftmaxLoss {
            element: Element::Bf16,
            rows,
            classes,
            logits,
            labels,
            dlogits: Some(at + 448),
            dlogits_pitch: 4,
            scale,
            loss: at + 324,
            correct: Some(at + 388),
            cursor: None,
            advance: false,
            workspace: 0,
            tickets: 0,
        };
        gpu.launch(&fused_loss).unwrap();
        gpu.launch(&CrossEntropyLoss { rows: 2, classes: 3, logits, labels, losses: at + 256 }).unwrap();
        gpu.launch(&MeanLoss { rows: 2, losses, out: at + 320, cursor: None }).unwrap();
        gpu.launch(&CountCorrect { rows: 2, classes: 3, logits, labels, out: at + 384 }).unwrap();
    });
    for losses in [128, 256] {
        assert!(float(&after, losses).is_finite() && float(&after, losses + 4).is_nan());
    }
    assert!((0..3).all(|class| float(&after, 192 + 4 * class).is_finite()));
    assert!((3..6).all(|class| float(&after, 192 + 4 * class).is_nan()));
    assert!(float(&after, 320).is_nan() && float(&after, 324).is_nan());
    assert_eq!((integer(&after, 384), integer(&after, 388)), (1, 1));
    let bf16 = |at: usize| half::bf16::from_ne_bytes([after[at], after[at + 1]]);
    assert!((0..3).all(|class| bf16(448 + 2 * class).is_finite() && bf16(456 + 2 * class).is_nan()));

    let after = gpu.with_region(&image, |at| {
        let (source, source_rows, indices) = (at, 3, at + 64);
        let (scale, shift) = (1.0, 0.0);
        let rows = GatherRows {
            source_element: SourceElement::U8,
            element: Element::F32,
            rows: 2,
            cols: 2,
            pitch: 2,
            batch: 2,
            source,
            source_rows,
            indices,
            cursor: None,
            scale,
            shift,
            out: at + 128,
        };
        gpu.launch(&rows).unwrap();
        gpu.launch(&GatherRows { element: Element::F16, out: at + 256, ..rows }).unwrap();
        let labels = GatherLabels { rows: 2, batch: 2, source, source_rows, indices, cursor: None, out: at + 192 };
        gpu.launch(&labels).unwrap();
    });
    assert_eq!((float(&after, 128), float(&after, 132)), (0.0, 0.0));
    assert!(float(&after, 136).is_nan() && float(&after, 140).is_nan());
    let f16 = |at: usize| half::f16::from_ne_bytes([after[at], after[at + 1]]);
    assert!(f16(256) == half::f16::ZERO && f16(258) == half::f16::ZERO && f16(260).is_nan() && f16(262).is_nan());
    assert_eq!((integer(&after, 192), integer(&after, 196)), (0, u32::MAX));
}

/// In a large launch a thread gathers several groups of a row. The shapes: rows of complete groups, rows that end
/// within a group, one group per row, and unaligned rows.
fn large_batches_are_gathered_as_small_ones_are() {
    let gpu = Gpu::new();
    for (rows, cols, pitch) in [(5_351, 784, 784), (5_400, 785, 788), (1_050_001, 3, 4), (350_003, 10, 10)] {
        for element in [Element::F32, Element::F16] {
            // Twice as many rows of 16-bit elements have as many groups.
            let rows = if element == Element::F16 && cols > 8 { 2 * rows } else { rows };
            let selection = cases::Selection { rows, source_rows: 257, cursor: false };
            let shape = [cols, pitch];
            for case in [
                cases::gather_rows_u8(element, selection, shape, 3),
                cases::gather_rows_f32(element, selection, shape, 3),
            ] {
                for skew in [0, 4] {
                    case.verify(&case.region(skew).0, &run(&gpu, &case, skew));
                }
            }
        }
    }
}

/// Complete groups are read without a branch; the second of three rows is outside the source.
fn a_bad_index_gives_a_row_of_nan_among_whole_groups() {
    let gpu = Gpu::new();
    let mut image = vec![0_u8; 1024];
    image[..48].iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
    image[256..268].copy_from_slice(bytemuck::cast_slice(&[2_u32, 3, 0]));
    for (element, pitch) in [(Element::F32, 16), (Element::Bf16, 16)] {
        let after = gpu.with_region(&image, |at| {
            let rows = GatherRows {
                source_element: SourceElement::U8,
                element,
                rows: 3,
                cols: 16,
                pitch,
                batch: 3,
                source: at,
                source_rows: 3,
                indices: at + 256,
                cursor: None,
                scale: 2.0,
                shift: 1.0,
                out: at + 512,
            };
            gpu.launch(&rows).unwrap();
        });
        let values = element.unpack(&after[512..], 3, 16, pitch);
        let scaled = |first: u32| (first..first + 16).map(|value| 2.0 * value as f32 + 1.0).collect::<Vec<f32>>();
        assert_eq!((&values[..16], &values[32..]), (&scaled(33)[..], &scaled(1)[..]), "{element:?}");
        assert!(values[16..32].iter().all(|value| value.is_nan()), "{element:?}");
    }
}

fn impossible_launches_are_refused_before_the_driver_sees_them() {
    let gpu = Gpu::new();
    assert!(matches!(gpu.launch(&Fill { len: 0, value: 0.0, out: 0 }), Err(KernelError::Shape { .. })));
    assert!(matches!(gpu.launch(&Fill { len: u64::MAX, value: 0.0, out: 0 }), Err(KernelError::Shape { .. })));
}

fn main() -> ExitCode {
    let gpu = Gpu::missing();
    trials::run(trials! {
        gpu.as_deref() =>
            every_kernel_computes_what_it_says_and_what_the_host_computes
            every_linear_kernel_computes_what_it_says_and_what_the_host_computes
            addresses_need_only_what_is_read_at_once
            two_runs_give_the_same_bits
            two_runs_of_linear_layers_give_the_same_bits
            bad_labels_and_indices_show_and_touch_nothing_else
            large_batches_are_gathered_as_small_ones_are
            a_bad_index_gives_a_row_of_nan_among_whole_groups
            impossible_launches_are_refused_before_the_driver_sees_them;
    })
}
