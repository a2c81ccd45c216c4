//! The CPU reference, compared with models in `f64`, and its errors.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::cell::RefCell;
use std::process::Command;
use std::ptr::NonNull;

use common::{Arena, BASE, cases};
use kernels::{
    AddBias, ConvertElements, CountCorrect, CrossEntropyLoss, Element, Fill, GatherLabels, GatherRows, Gemm,
    GemmLayout, HostMemory, KernelError, LinearForward, LinearUpdate, Operation, Precision, Relu, Sgd,
    SoftmaxCrossEntropy, SoftmaxLoss, SourceElement, kernel_names,
};
use proptest::prelude::*;

#[test]
fn operations_match_their_models() {
    for case in cases::all() {
        let (offsets, _) = case.region(0);
        case.verify(&offsets, &case.run_on_host(0));
    }
}

#[test]
fn addresses_need_only_element_alignment() {
    for case in cases::all() {
        // Linear layers read 16 bytes at a time.
        let skew = if case.is_linear() { 16 } else { 4 };
        let (offsets, _) = case.region(skew);
        case.verify(&offsets, &case.run_on_host(skew));
    }
}

#[test]
fn linear_layers_refuse_misaligned_operands() {
    let arena = Arena::new(&[0; 1024]);
    let layer = LinearForward {
        precision: Precision::F16,
        rows: 2,
        inputs: 8,
        outputs: 8,
        x: BASE,
        x_pitch: 8,
        weight: BASE + 64,
        weight_pitch: 8,
        bias: None,
        relu: false,
        y: BASE + 256,
        y_pitch: 8,
        y_f32: false,
        workspace: 0,
        tickets: 0,
    };
    // SAFETY: refused before memory is touched.
    let refusal = |layer: LinearForward| unsafe { layer.run_on_host(&arena) }.unwrap_err();
    let skewed = refusal(LinearForward { weight: BASE + 66, ..layer });
    assert!(matches!(skewed, KernelError::Misaligned { alignment: 16, .. }), "{skewed}");
    let pitch = refusal(LinearForward { x_pitch: 9, ..layer });
    assert!(pitch.to_string().contains("a row of 9 elements is not a multiple of 16 bytes"), "{pitch}");
}

#[test]
fn two_runs_give_the_same_bits() {
    for case in cases::all() {
        let (offsets, _) = case.region(0);
        let (first, second) = (case.run_on_host(0), case.run_on_host(0));
        assert!(first == second, "{}", case.label);
        case.compare(&offsets, &first, &second);
    }
}

/// Records the ranges that an operation accesses.
struct RecordingMemory<'a>(&'a Arena, RefCell<Vec<(u64, u64)>>);

impl HostMemory for RecordingMemory<'_> {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.1.borrow_mut().push((addr, bytes));
        self.0.translate(addr, bytes)
    }
}

#[test]
fn operations_report_the_buffers_that_they_access() {
    for case in cases::all() {
        let (offsets, image) = case.region(0);
        let arena = Arena::new(&image);
        let memory = RecordingMemory(&arena, RefCell::default());
        let operation = (case.build)(&offsets.iter().map(|&offset| BASE + offset as u64).collect::<Vec<u64>>());
        // SAFETY: only this test uses the arena, which outlives the call.
        unsafe { operation.run_on_host(&memory) }.unwrap();
        let mut accessed = memory.1.into_inner();
        // The gathered rows depend on data, so the source buffer is not among the buffers known beforehand.
        accessed.retain(|(addr, _)| {
            let begin = |buffer: &usize| BASE + offsets[*buffer] as u64;
            let end = |buffer: &usize| begin(buffer) + case.buffers[*buffer].before.len() as u64;
            !case.selected.iter().any(|buffer| (begin(buffer)..end(buffer)).contains(addr))
        });
        // A launch that consists of two operations on the host accesses some buffers twice, and may need more of a
        // buffer than either.
        accessed.sort_unstable_by_key(|&(addr, bytes)| (addr, std::cmp::Reverse(bytes)));
        accessed.dedup_by_key(|(addr, _)| *addr);
        let mut reported = operation.buffers();
        reported.sort_unstable();
        assert_eq!(reported, accessed, "{}", case.label);
    }
}

#[test]
fn the_cases_cover_every_kernel() {
    let covered: Vec<&str> =
        cases::all().iter().map(|case| (case.build)(&vec![0; case.buffers.len()]).name()).collect();
    // Every kernel needs a case.
    for name in kernel_names() {
        assert!(covered.contains(&name), "{name} has no case");
    }
}

/// The number of threads of a GEMM is read once per process, so each GEMM runs in a new process.
#[test]
fn gemm_does_not_depend_on_the_number_of_threads() {
    if std::env::var_os("KERNELS_TEST_PRINT_PRODUCT").is_some() {
        let case = cases::gemm(GemmLayout::NT, [128, 500, 784], 1);
        let sum = case.run_on_host(0).iter().fold(0_u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        println!("product {sum}");
        return;
    }
    let product = |threads: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "gemm_does_not_depend_on_the_number_of_threads", "--nocapture"])
            .env("KERNELS_TEST_PRINT_PRODUCT", "1")
            .env("MATMUL_NUM_THREADS", threads)
            .output()
            .unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let start = output.find("product ").expect("the product");
        output[start..].lines().next().unwrap().to_owned()
    };
    assert_eq!(product("1"), product("2"));
    assert_eq!(product("1"), product("4"));
}

/// Runs on an arena of 4096 zero bytes.
fn run(operation: impl Operation) -> Result<(), KernelError> {
    run_on(&[0; 4096], operation)
}

fn run_on(image: &[u8], operation: impl Operation) -> Result<(), KernelError> {
    let arena = Arena::new(image);
    // SAFETY: only this test uses the arena, which outlives the call.
    let outcome = unsafe { operation.run_on_host(&arena) };
    if outcome.is_err() {
        assert!(arena.contents() == image, "a refused operation has written");
    }
    outcome
}

fn product() -> Gemm {
    Gemm { layout: GemmLayout::NN, m: 4, n: 4, k: 4, a: BASE, b: BASE + 64, c: BASE + 128 }
}

fn loss() -> SoftmaxLoss {
    SoftmaxLoss {
        element: Element::F32,
        rows: 2,
        classes: 1,
        logits: BASE,
        labels: BASE + 64,
        dlogits: None,
        dlogits_pitch: 0,
        scale: 1.0,
        loss: BASE + 3072,
        correct: None,
        cursor: None,
        advance: false,
        workspace: 0,
        tickets: BASE + 3076,
    }
}

/// A layer of four inputs and four outputs, its matrices 64 bytes apart.
fn layer(precision: Precision) -> LinearForward {
    LinearForward {
        precision,
        rows: 4,
        inputs: 4,
        outputs: 4,
        x: BASE,
        x_pitch: 8,
        weight: BASE + 128,
        weight_pitch: 8,
        bias: Some(BASE + 256),
        relu: true,
        y: BASE + 384,
        y_pitch: 8,
        y_f32: false,
        workspace: BASE + 1024,
        tickets: BASE + 2048,
    }
}

fn update(precision: Precision) -> LinearUpdate {
    LinearUpdate {
        precision,
        rows: 4,
        inputs: 4,
        outputs: 4,
        dy: BASE,
        dy_pitch: 8,
        x: BASE + 128,
        x_pitch: 8,
        rate: 0.1,
        weight: BASE + 256,
        weight_pitch: 8,
        master: None,
        bias: BASE + 384,
        workspace: BASE + 1024,
        tickets: BASE + 2048,
    }
}

#[test]
fn invalid_pitches_batches_and_cursors_are_refused() {
    let refusal = |outcome: Result<(), KernelError>| outcome.unwrap_err().to_string();
    assert_eq!(run(layer(Precision::F32)), Ok(()));
    let narrow = LinearForward { weight_pitch: 3, ..layer(Precision::Bf16) };
    assert_eq!(refusal(run(narrow)), format!("{}: weight_pitch is 3, below 4", narrow.name()));
    assert_eq!(
        run(LinearForward { rows: 0, ..narrow }).unwrap_err().to_string(),
        format!("{}: rows is zero", narrow.name())
    );
    let element = Element::Bf16;
    let bias = AddBias { element, rows: 2, cols: 4, pitch: 3, x: BASE, bias: BASE + 64, y: BASE + 128 };
    assert_eq!(refusal(run(bias)), "add_bias_bf16: pitch is 3, below 4");
    assert_eq!(run(AddBias { pitch: 4, ..bias }), Ok(()));
    let labels = GatherLabels {
        rows: 2,
        batch: 1,
        source: BASE,
        source_rows: 4,
        indices: BASE + 64,
        cursor: Some(BASE + 128),
        out: BASE + 192,
    };
    assert_eq!(refusal(run(labels)), "gather_labels: batch is 1, below 2");
    assert_eq!(run(GatherLabels { batch: 2, ..labels }), Ok(()));
    let without_cursor = SoftmaxLoss { advance: true, ..loss() };
    assert_eq!(refusal(run(without_cursor)), "softmax_loss: advance needs a cursor");
    let dense = SoftmaxLoss { dlogits: Some(BASE + 128), ..loss() };
    assert_eq!(refusal(run(dense)), "softmax_loss: dlogits_pitch is 0, below 1");
}

#[test]
fn a_cursor_beyond_the_memory_is_refused() {
    // Bytes 128..132 contain the number of the step.
    let mut image = vec![0; 4096];
    image[128..132].fill(0xff);
    let labels = GatherLabels {
        rows: 2,
        batch: u32::MAX,
        source: BASE,
        source_rows: 4,
        indices: BASE + 64,
        cursor: Some(BASE + 128),
        out: BASE + 192,
    };
    assert!(matches!(run_on(&image, labels), Err(KernelError::Shape { .. })));
    assert!(matches!(run_on(&image, GatherLabels { batch: 2, ..labels }), Err(KernelError::NotMapped { .. })));
}

#[test]
fn only_16_bit_weights_have_master_weights() {
    let sgd = Sgd {
        element: Element::F32,
        len: 4,
        learning_rate: 0.1,
        gradient: BASE,
        weights: BASE + 64,
        master: Some(BASE + 128),
    };
    assert_eq!(run(sgd).unwrap_err().to_string(), "sgd: f32 weights cannot have master weights");
    assert_eq!(run(Sgd { element: Element::Bf16, ..sgd }), Ok(()));
    for precision in Precision::ALL {
        let outcome = run(LinearUpdate { master: Some(BASE + 512), ..update(precision) });
        assert_eq!(outcome.is_ok(), precision.element() != Element::F32, "{precision:?}: {outcome:?}");
        assert_eq!(run(update(precision)), Ok(()));
    }
}

#[test]
fn conversion_needs_f32_on_one_side() {
    let convert = |from, to| run(ConvertElements { len: 4, from, to, x: BASE, y: BASE + 64 });
    for half in [Element::Bf16, Element::F16] {
        assert_eq!((convert(Element::F32, half), convert(half, Element::F32)), (Ok(()), Ok(())));
        assert!(matches!(convert(half, half), Err(KernelError::Shape { .. })));
    }
    assert!(matches!(convert(Element::F32, Element::F32), Err(KernelError::Shape { .. })));
    let message = convert(Element::Bf16, Element::F16).unwrap_err().to_string();
    assert_eq!(message, "convert: conversion from Bf16 to F16 is not supported; one type must be F32");
}

#[test]
fn work_of_16_bit_types_has_half_the_bytes() {
    let relu = |element| Relu { element, len: 1000, x: 0, y: 0 }.work();
    assert_eq!((relu(Element::F32).bytes, relu(Element::F16).bytes), (8000, 4000));
    // 250 and 125 threads of 16 bytes.
    assert_eq!((relu(Element::F32).blocks, relu(Element::F16).blocks), (1, 1));
    // Weights, bias, input and output of four by four; the pitch is not traffic.
    assert_eq!(layer(Precision::Tf32).work().bytes, 3 * 64 + 16);
    assert_eq!(layer(Precision::F16).work().bytes, 3 * 32 + 16);
    assert_eq!(layer(Precision::F32).work().flops, 2 * 64 + 2 * 16);
    let with_master = LinearUpdate { master: Some(0), ..update(Precision::Bf16) };
    assert_eq!(update(Precision::Bf16).work().bytes, 2 * 32 + 2 * 32 + 2 * 16);
    assert_eq!(with_master.work().bytes, 2 * 32 + (2 * 64 + 32) + 2 * 16);
}

#[test]
fn a_linear_kernel_is_named_after_its_precision() {
    for precision in Precision::ALL {
        let prefix = |product: &str| format!("linear_{product}_{}_", precision.name());
        assert!(layer(precision).name().starts_with(&prefix("forward")));
        // The gradient's kernel updates the weights.
        assert!(update(precision).name().starts_with(&prefix("gradient")));
        assert!(kernel_names().any(|name| name == update(precision).name()));
    }
}

#[test]
fn sizes_of_zero_are_refused() {
    let message = run(Gemm { k: 0, ..product() }).unwrap_err().to_string();
    assert_eq!(message, "gemm_nn_sliced: k is zero");
    for empty in [Gemm { m: 0, ..product() }, Gemm { n: 0, ..product() }] {
        assert!(matches!(run(empty), Err(KernelError::Shape { .. })));
    }
    assert!(matches!(run(Fill { len: 0, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    let count = CountCorrect { rows: 1, classes: 0, logits: BASE, labels: BASE + 64, out: BASE + 128 };
    assert!(matches!(run(count), Err(KernelError::Shape { .. })));
}

#[test]
fn sizes_that_overflow_are_refused() {
    assert!(matches!(run(Gemm { m: u32::MAX, ..product() }), Err(KernelError::Shape { .. })));
    assert!(matches!(run(Fill { len: u64::MAX, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    assert!(matches!(run(Fill { len: 1 << 62, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    let overflowing = CountCorrect { rows: u32::MAX, classes: u32::MAX, logits: BASE, labels: BASE, out: BASE };
    assert_eq!(overflowing.work().bytes, u64::MAX);
    assert!(matches!(run(overflowing), Err(KernelError::Shape { .. })));
}

#[test]
fn unmapped_memory_is_refused() {
    let past_the_end = BASE + 4096 - 60;
    assert_eq!(
        run(Gemm { c: past_the_end, ..product() }),
        Err(KernelError::NotMapped { operation: "gemm_nn_sliced", addr: past_the_end, bytes: 64 })
    );
    assert!(matches!(run(Gemm { a: 0, ..product() }), Err(KernelError::NotMapped { addr: 0, .. })));
    assert!(matches!(
        run(Relu { element: Element::F32, len: 4, x: BASE - 4, y: BASE + 64 }),
        Err(KernelError::NotMapped { .. })
    ));
}

#[test]
fn misaligned_addresses_are_refused() {
    let error = run(Fill { len: 1, value: 1.0, out: BASE + 2 }).unwrap_err();
    assert_eq!(error, KernelError::Misaligned { operation: "fill", addr: BASE + 2, alignment: 4 });
}

#[test]
fn an_output_may_not_overlap_another_buffer() {
    let relu = |y| Relu { element: Element::F32, len: 16, x: BASE, y };
    let error = run(relu(BASE + 60)).unwrap_err();
    assert_eq!(error, KernelError::Overlap { operation: "relu", output: BASE + 60, other: BASE });
    assert!(matches!(run(relu(BASE)), Err(KernelError::Overlap { .. })));
    assert!(matches!(run(Gemm { c: BASE, ..product() }), Err(KernelError::Overlap { .. })));
    assert_eq!(run(relu(BASE + 64)), Ok(()));
    // Sixteen 16-bit elements have half the length.
    assert_eq!(run(Relu { element: Element::F16, ..relu(BASE + 32) }), Ok(()));
    // Inputs may share memory: X·X is a GEMM, too.
    assert_eq!(run(Gemm { b: BASE, ..product() }), Ok(()));
    let element = Element::F32;
    let weights = Sgd { element, len: 16, learning_rate: 0.1, gradient: BASE, weights: BASE + 32, master: None };
    assert!(matches!(run(weights), Err(KernelError::Overlap { .. })));
    // Master weights must not overlap their weights, nor the workspace the tickets.
    let halves = Sgd { element: Element::F16, weights: BASE + 64, master: Some(BASE + 80), ..weights };
    assert!(matches!(run(halves), Err(KernelError::Overlap { .. })));
    let shared = SoftmaxLoss { rows: 129, labels: BASE + 1024, workspace: BASE + 2048, ..loss() };
    assert!(shared.workspace_bytes() > 0 && shared.tickets() == 1);
    assert!(matches!(run(SoftmaxLoss { tickets: BASE + 2048, ..shared }), Err(KernelError::Overlap { .. })));
}

#[test]
fn labels_and_indices_out_of_range_are_refused() {
    // Position 1 of the labels or indices, which are at 64, is 5.
    let mut image = vec![0; 4096];
    image[68] = 5;
    let [first, second, third, fourth] = [BASE, BASE + 64, BASE + 128, BASE + 192];
    let outcomes = [
        run_on(
            &image,
            SoftmaxCrossEntropy {
                rows: 2,
                classes: 5,
                logits: first,
                labels: second,
                losses: third,
                element: Element::F32,
                dlogits: fourth,
                dlogits_pitch: 5,
                scale: 1.0,
            },
        ),
        run_on(&image, SoftmaxLoss { rows: 2, classes: 5, logits: first, labels: second, ..loss() }),
        run_on(&image, CrossEntropyLoss { rows: 2, classes: 5, logits: first, labels: second, losses: third }),
        run_on(&image, CountCorrect { rows: 2, classes: 5, logits: first, labels: second, out: third }),
        run_on(
            &image,
            GatherRows {
                source_element: SourceElement::U8,
                element: Element::F32,
                rows: 2,
                cols: 3,
                pitch: 3,
                batch: 2,
                source: first,
                source_rows: 5,
                indices: second,
                cursor: None,
                scale: 1.0,
                shift: 0.0,
                out: third,
            },
        ),
        run_on(
            &image,
            GatherLabels {
                rows: 2,
                batch: 2,
                source: first,
                source_rows: 5,
                indices: second,
                cursor: None,
                out: third,
            },
        ),
    ];
    for outcome in outcomes {
        assert!(matches!(outcome, Err(KernelError::OutOfRange { position: 1, value: 5, limit: 5, .. })), "{outcome:?}");
    }
}

#[test]
fn relu_preserves_nan() {
    let mut image = vec![0; 64];
    image[..4].copy_from_slice(&f32::NAN.to_ne_bytes());
    let arena = Arena::new(&image);
    // SAFETY: only this test uses the arena, which outlives the call.
    unsafe { Relu { element: Element::F32, len: 1, x: BASE, y: BASE + 32 }.run_on_host(&arena) }.unwrap();
    assert!(f32::from_ne_bytes(arena.contents()[32..36].try_into().unwrap()).is_nan());
}

fn any_element() -> impl Strategy<Value = Element> {
    prop_oneof![Just(Element::F32), Just(Element::Bf16), Just(Element::F16)]
}

fn any_small_case() -> impl Strategy<Value = common::Case> {
    let sizes = (1..40_u32, 1..40_u32, 1..40_u32, 0..9_u32);
    let options = (any_element(), 0..Precision::ALL.len(), any::<bool>());
    (0..21_usize, sizes, options, any::<u64>()).prop_map(|(operation, (m, n, k, more), options, seed)| {
        let (element, precision, flag) = (options.0, Precision::ALL[options.1], options.2);
        let (len, matrix) = (u64::from(m) * u64::from(n), [m, n, n + more]);
        let selection = cases::Selection { rows: m, source_rows: k, cursor: flag };
        let half = if element == Element::F32 { Element::F16 } else { element };
        let (layer, variant) = ([m, n, k], u32::from(flag));
        match operation {
            0..3 => cases::gemm(cases::LAYOUTS[operation], [m, n, k], seed),
            3 => cases::add_bias(element, matrix, seed),
            4 => cases::bias_gradient(element, matrix, seed),
            5 => cases::relu(element, len, seed),
            6 => cases::relu_backward(element, len, seed),
            7 => cases::softmax_cross_entropy(element, matrix, k as f32, seed),
            8 => cases::cross_entropy_loss(m, n, k as f32, seed),
            9 => cases::mean_loss(m, flag, seed),
            10 => cases::count_correct(m, n, seed),
            11 => cases::sgd(half, flag, len, seed),
            12 => cases::gather_rows_u8(element, selection, [n, n + more], seed),
            13 => cases::gather_rows_f32(element, selection, [n, n + more], seed),
            14 => cases::gather_labels(selection, seed),
            15 => cases::softmax_loss(element, matrix, (cases::TRAINING, flag), seed),
            16 => cases::convert(
                if flag { half } else { Element::F32 },
                if flag { Element::F32 } else { half },
                len,
                seed,
            ),
            17 => cases::forward(precision, layer, variant, None),
            18 => cases::backward_input(precision, layer, variant, None),
            19 => cases::weight_gradient(precision, layer, variant, None),
            _ => cases::update(precision, layer, variant, None),
        }
    })
}

proptest! {
    #[test]
    fn small_shapes_match_their_models(case in any_small_case()) {
        let (offsets, _) = case.region(0);
        case.verify(&offsets, &case.run_on_host(0));
    }
}
