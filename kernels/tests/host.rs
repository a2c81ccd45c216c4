//! The CPU reference against models in `f64`, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use std::cell::RefCell;
use std::process::Command;
use std::ptr::NonNull;

use common::{Arena, BASE, cases};
use kernels::{
    Argmax, CountCorrect, CrossEntropyLoss, Fill, GatherLabels, GatherRowsU8, Gemm, GemmAlgorithm, GemmLayout,
    HostMemory, KernelError, Operation, Relu, Sgd, SoftmaxCrossEntropy, kernel_names,
};
use proptest::prelude::*;

#[test]
fn every_operation_computes_what_it_says() {
    for case in cases::all() {
        let (offsets, _) = case.region(0);
        case.verify(&offsets, &case.run_on_host(0));
    }
}

#[test]
fn addresses_need_only_an_elements_alignment() {
    for case in cases::all() {
        let (offsets, _) = case.region(4);
        case.verify(&offsets, &case.run_on_host(4));
    }
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

/// Notes what an operation asks for.
struct Noted<'a>(&'a Arena, RefCell<Vec<(u64, u64)>>);

impl HostMemory for Noted<'_> {
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.1.borrow_mut().push((addr, bytes));
        self.0.translate(addr, bytes)
    }
}

#[test]
fn an_operation_names_the_buffers_that_it_works_on() {
    for case in cases::all() {
        let (offsets, image) = case.region(0);
        let arena = Arena::new(&image);
        let noted = Noted(&arena, RefCell::default());
        let operation = (case.build)(&offsets.iter().map(|&offset| BASE + offset as u64).collect::<Vec<u64>>());
        // SAFETY: the arena is this test's own and outlives the call.
        unsafe { operation.run_on_host(&noted) }.unwrap();
        let mut used = noted.1.into_inner();
        if operation.name().starts_with("gather") {
            // The data set, of which rows are picked, comes first.
            used.remove(0);
        }
        assert_eq!(operation.buffers(), used, "{}", case.label);
    }
}

#[test]
fn the_cases_cover_every_kernel() {
    let covered: Vec<&str> =
        cases::all().iter().map(|case| (case.build)(&vec![0; case.buffers.len()]).name()).collect();
    for name in kernel_names() {
        assert!(covered.contains(&name), "no case runs {name}");
    }
}

/// The number of threads of the matrix product is read once a process: the product is made in two fresh ones.
#[test]
fn products_do_not_depend_on_the_number_of_threads() {
    if std::env::var_os("KERNELS_TEST_PRINT_PRODUCT").is_some() {
        let case = cases::gemm(GemmLayout::NT, GemmAlgorithm::Tiled, [128, 500, 784], 1);
        let sum = case.run_on_host(0).iter().fold(0_u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        println!("product {sum}");
        return;
    }
    let product = |threads: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "products_do_not_depend_on_the_number_of_threads", "--nocapture"])
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
    // SAFETY: the arena is this test's own and outlives the call.
    let outcome = unsafe { operation.run_on_host(&arena) };
    if outcome.is_err() {
        assert!(arena.contents() == image, "a refused operation has written");
    }
    outcome
}

fn product() -> Gemm {
    let (layout, algorithm) = (GemmLayout::NN, GemmAlgorithm::Tiled);
    Gemm { layout, algorithm, m: 4, n: 4, k: 4, a: BASE, b: BASE + 64, c: BASE + 128 }
}

#[test]
fn sizes_of_zero_are_refused() {
    let message = run(Gemm { k: 0, ..product() }).unwrap_err().to_string();
    assert_eq!(message, "gemm_nn_sliced: k is zero");
    for empty in [Gemm { m: 0, ..product() }, Gemm { n: 0, ..product() }] {
        assert!(matches!(run(empty), Err(KernelError::Shape { .. })));
    }
    assert!(matches!(run(Fill { len: 0, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    let argmax = Argmax { rows: 1, classes: 0, logits: BASE, predictions: BASE + 64 };
    assert!(matches!(run(argmax), Err(KernelError::Shape { .. })));
}

#[test]
fn sizes_that_overflow_are_refused() {
    assert!(matches!(run(Gemm { m: u32::MAX, ..product() }), Err(KernelError::Shape { .. })));
    assert!(matches!(run(Fill { len: u64::MAX, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    assert!(matches!(run(Fill { len: 1 << 62, value: 1.0, out: BASE }), Err(KernelError::Shape { .. })));
    let everything = Argmax { rows: u32::MAX, classes: u32::MAX, logits: BASE, predictions: BASE };
    assert_eq!(everything.work().bytes, u64::MAX);
    assert!(matches!(run(everything), Err(KernelError::Shape { .. })));
}

#[test]
fn unmapped_memory_is_refused() {
    let past_the_end = BASE + 4096 - 60;
    assert_eq!(
        run(Gemm { c: past_the_end, ..product() }),
        Err(KernelError::NotMapped { operation: "gemm_nn_sliced", addr: past_the_end, bytes: 64 })
    );
    assert!(matches!(run(Gemm { a: 0, ..product() }), Err(KernelError::NotMapped { addr: 0, .. })));
    assert!(matches!(run(Relu { len: 4, x: BASE - 4, y: BASE + 64 }), Err(KernelError::NotMapped { .. })));
}

#[test]
fn misaligned_addresses_are_refused() {
    let error = run(Fill { len: 1, value: 1.0, out: BASE + 2 }).unwrap_err();
    assert_eq!(error, KernelError::Misaligned { operation: "fill", addr: BASE + 2, alignment: 4 });
}

#[test]
fn an_output_may_not_overlap_another_buffer() {
    let error = run(Relu { len: 16, x: BASE, y: BASE + 60 }).unwrap_err();
    assert_eq!(error, KernelError::Overlap { operation: "relu", output: BASE + 60, other: BASE });
    assert!(matches!(run(Relu { len: 16, x: BASE, y: BASE }), Err(KernelError::Overlap { .. })));
    assert!(matches!(run(Gemm { c: BASE, ..product() }), Err(KernelError::Overlap { .. })));
    assert_eq!(run(Relu { len: 16, x: BASE, y: BASE + 64 }), Ok(()));
    // Inputs may share memory: X·X is a product too.
    assert_eq!(run(Gemm { b: BASE, ..product() }), Ok(()));
    let weights = Sgd { len: 16, learning_rate: 0.1, gradient: BASE, weights: BASE + 32 };
    assert!(matches!(run(weights), Err(KernelError::Overlap { .. })));
}

#[test]
fn labels_and_indices_out_of_range_are_refused() {
    // Position 1 of the labels or indices, which lie at 64, holds a 5.
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
                dlogits: fourth,
                scale: 1.0,
            },
        ),
        run_on(&image, CrossEntropyLoss { rows: 2, classes: 5, logits: first, labels: second, losses: third }),
        run_on(&image, CountCorrect { rows: 2, classes: 5, logits: first, labels: second, out: third }),
        run_on(
            &image,
            GatherRowsU8 {
                rows: 2,
                cols: 3,
                source: first,
                source_rows: 5,
                indices: second,
                scale: 1.0,
                shift: 0.0,
                out: third,
            },
        ),
        run_on(&image, GatherLabels { rows: 2, source: first, source_rows: 5, indices: second, out: third }),
    ];
    for outcome in outcomes {
        assert!(matches!(outcome, Err(KernelError::OutOfRange { position: 1, value: 5, limit: 5, .. })), "{outcome:?}");
    }
}

#[test]
fn nan_survives_the_rectifier() {
    let mut image = vec![0; 64];
    image[..4].copy_from_slice(&f32::NAN.to_ne_bytes());
    let arena = Arena::new(&image);
    // SAFETY: the arena is this test's own and outlives the call.
    unsafe { Relu { len: 1, x: BASE, y: BASE + 32 }.run_on_host(&arena) }.unwrap();
    assert!(f32::from_ne_bytes(arena.contents()[32..36].try_into().unwrap()).is_nan());
}

fn any_small_case() -> impl Strategy<Value = common::Case> {
    (0..16_usize, 1..40_u32, 1..40_u32, 1..40_u32, any::<u64>()).prop_map(|(operation, m, n, k, seed)| {
        let len = u64::from(m) * u64::from(n);
        match operation {
            0..3 => cases::gemm(cases::LAYOUTS[operation], GemmAlgorithm::Tiled, [m, n, k], seed),
            3 => cases::add_bias(m, n, seed),
            4 => cases::bias_gradient(m, n, seed),
            5 => cases::relu(len, seed),
            6 => cases::relu_backward(len, seed),
            7 => cases::softmax_cross_entropy(m, n, k as f32, seed),
            8 => cases::cross_entropy_loss(m, n, k as f32, seed),
            9 => cases::mean_loss(m, seed),
            10 => cases::argmax(m, n, seed),
            11 => cases::count_correct(m, n, seed),
            12 => cases::sgd(len, seed),
            13 => cases::gather_rows_u8(m, n, k, seed),
            14 => cases::gather_rows_f32(m, n, k, seed),
            _ => cases::gather_labels(m, k, seed),
        }
    })
}

proptest! {
    #[test]
    fn any_small_shape_is_computed_right(case in any_small_case()) {
        let (offsets, _) = case.region(0);
        case.verify(&offsets, &case.run_on_host(0));
    }
}
