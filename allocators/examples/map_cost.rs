//! The cost of mapped memory by its properties: what it takes to create, map, open, export, unmap and release pages.
//!
//!     cargo run --release -p vramlab --example map_cost [PAGES [TURNS]]
//!
//! Runs on the first GPU, with PAGES pages of 2 MiB (100) opened ten at a time, as the allocators do it. The sets of properties
//! take TURNS turns (20) in an order that changes. Prints medians in microseconds, and a line of JSON for each set.
//! Exit code 1 where there is no GPU.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use vramlab::device::{MemoryProperties, PhysicalHandle};
use vramlab::{CudaDriver, Driver as _, DriverResult, VmmDriver as _};

/// Pages that are opened by one call.
const RUN: u64 = 10;
const PAGE: u64 = 2 << 20;
const STEPS: [&str; 6] = ["create", "map", "set_access", "export", "unmap", "release"];

/// Nanoseconds of each step for all pages.
fn measure(driver: &CudaDriver, pages: u64) -> DriverResult<[u64; STEPS.len()]> {
    let clock = driver.clock();
    let mut times = [0; STEPS.len()];
    let mut last = clock.now_ns();
    let mut lap = |step: usize| {
        let now = clock.now_ns();
        times[step] = now - std::mem::replace(&mut last, now);
    };
    let start = driver.address_reserve(pages * PAGE)?;
    lap(0);
    let made: Vec<PhysicalHandle> = (0..pages).map(|_| driver.create(PAGE)).collect::<DriverResult<_>>()?;
    lap(0);
    for (number, handle) in (0..).zip(&made) {
        // SAFETY: a page of the range that is not mapped yet; the handle has its size.
        unsafe { driver.map(start.offset(number * PAGE), PAGE, *handle) }?;
    }
    lap(1);
    for run in 0..pages / RUN {
        // SAFETY: all of the range is mapped.
        unsafe { driver.set_access(start.offset(run * RUN * PAGE), RUN * PAGE) }?;
    }
    lap(2);
    if let Some(kind) = driver.memory_properties().handle() {
        for handle in &made {
            driver.export(*handle, kind)?;
        }
    }
    lap(3);
    for number in 0..pages {
        // SAFETY: one whole mapping, which no work uses.
        unsafe { driver.unmap(start.offset(number * PAGE), PAGE) }?;
    }
    lap(4);
    for handle in made {
        // SAFETY: made above, and released once.
        unsafe { driver.release(handle) }?;
    }
    lap(5);
    // SAFETY: the whole range, in which nothing is mapped any more.
    unsafe { driver.address_free(start, pages * PAGE) }?;
    Ok(times)
}

fn median(mut values: Vec<u64>) -> f64 {
    values.sort_unstable();
    values.get(values.len() / 2).map_or(0.0, |middle| *middle as f64 / 1e3)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let pages = arguments.next().transpose()?.unwrap_or(100).next_multiple_of(RUN);
    let turns = arguments.next().transpose()?.unwrap_or(20).max(1);
    let driver = CudaDriver::new(0)?;
    let claimed = driver.info().memory;
    let none = MemoryProperties::NONE;
    let asked = [
        ("none", none),
        ("rdma", MemoryProperties { rdma: true, ..none }),
        ("file_descriptors", MemoryProperties { file_descriptors: true, ..none }),
        ("file_descriptors+rdma", MemoryProperties { file_descriptors: true, rdma: true, fabric: false }),
        ("all", MemoryProperties { file_descriptors: true, rdma: true, fabric: true }),
    ];
    println!(
        "{}: it claims {claimed:?}; {pages} pages of 2 MiB, {RUN} opened at a time, {turns} turns",
        driver.info().name
    );
    let mut granted = [none; 5];
    let mut times: [Vec<[u64; STEPS.len()]>; 5] = Default::default();
    // The first one of a process takes longer.
    measure(&driver, RUN)?;
    for turn in 0..turns as usize {
        for at in (0..asked.len()).map(|at| (at + turn) % asked.len()) {
            driver.request_memory(asked[at].1);
            times[at].push(measure(&driver, pages)?);
            granted[at] = driver.memory_properties();
        }
    }
    println!("us a page (set_access: for {RUN} pages)");
    println!("{:<22}{}", "requested", STEPS.map(|step| format!("{step:>12}")).concat());
    for ((name, _), (times, granted)) in asked.iter().zip(times.iter().zip(granted)) {
        let each = |step: usize| {
            let calls = if STEPS[step] == "set_access" { pages / RUN } else { pages };
            median(times.iter().map(|times| times[step]).collect()) / calls as f64
        };
        let row: Vec<f64> = (0..STEPS.len()).map(each).collect();
        println!("{name:<22}{}", row.iter().map(|us| format!("{us:>12.2}")).collect::<String>());
        let json: serde_json::Map<String, serde_json::Value> =
            STEPS.iter().zip(&row).map(|(step, us)| ((*step).to_owned(), (*us).into())).collect();
        println!("{}", serde_json::json!({ "requested": name, "granted": granted, "us": json }));
    }
    Ok(())
}
