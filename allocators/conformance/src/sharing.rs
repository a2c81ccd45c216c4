//! Memory in pages is exported to other processes, and stays while it is shared or pinned.

use super::Bench;
use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::Subject;
use super::support::{MIB, fill, read, write};
use std::os::fd::AsRawFd;
use vramlab_device::{DeviceAddr, Shareable, VmmDriver};
use vramlab_policies::contract::{AllocError, Block, Exported};

fn numbers(exported: &Exported) -> Vec<i32> {
    let number = |page: &Shareable| match page {
        Shareable::Descriptor(descriptor) => descriptor.as_raw_fd(),
        Shareable::Fabric(_) => -1,
    };
    exported.pages.iter().map(|page| number(page)).collect()
}

/// Maps exported pages next to each other, as another process does.
fn import(vmm: &dyn VmmDriver, exported: &Exported) -> DeviceAddr {
    let bytes = exported.page_bytes * exported.pages.len() as u64;
    let start = vmm.address_reserve(bytes).granted();
    for (page, number) in exported.pages.iter().zip(0..) {
        let handle = vmm.import(page).granted();
        // SAFETY: a part of the range, in which nothing is mapped; the page has this size. The handle is released once.
        unsafe {
            vmm.map(start.offset(number * exported.page_bytes), exported.page_bytes, handle).granted();
            vmm.release(handle).granted();
        }
    }
    // SAFETY: all of it is mapped.
    unsafe { vmm.set_access(start, bytes) }.granted();
    start
}

fn close(vmm: &dyn VmmDriver, start: DeviceAddr, exported: &Exported) {
    let bytes = exported.page_bytes * exported.pages.len() as u64;
    // SAFETY: a whole range that was mapped, and that no work uses any more.
    unsafe {
        vmm.unmap(start, bytes).granted();
        vmm.address_free(start, bytes).granted();
    }
}

/// The range of a block, and a pattern at both of its ends.
fn marked(allocator: &Subject, mark: &[u8; 8], bytes: u64) -> (Block, vramlab_device::StreamId) {
    let stream = allocator.bench.stream();
    let block = allocator.take(bytes, stream);
    let driver = allocator.bench.driver.as_ref();
    for offset in [0, bytes - 8].into_iter().filter(|_| allocator.bench.has_memory()) {
        write(driver, block.addr().offset(offset), mark, stream);
    }
    driver.device_synchronize().granted();
    (block, stream)
}

pub(super) fn every_page_of_a_block_is_exported(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let vmm = driver.vmm().granted();
    let allocator = bench.build();
    for bytes in [1000, 2 * MIB, 3 * MIB + 8, 50 * MIB] {
        let (block, stream) = marked(&allocator, b"exported", bytes);
        let exported = match allocator.export(&block) {
            Err(AllocError::Unsupported { .. }) => {
                demand_eq!(vmm.memory_properties().handle(), None, "pages are exported where the device has handles");
                allocator.give(block, stream);
                return;
            }
            exported => exported.granted(),
        };
        let offset = block.addr().get() - exported.addr;
        demand!(offset < exported.page_bytes, "the first page is the first that the block touches");
        let end = exported.page_bytes * exported.pages.len() as u64;
        demand!(
            (end - exported.page_bytes..end).contains(&(offset + block.bytes() - 1)),
            "the last page is the last that the block touches"
        );
        let opened = numbers(&exported);
        demand_eq!(numbers(&allocator.export(&block).granted()), opened, "a held block has the same handles");
        let there = import(vmm, &exported);
        if bench.has_memory() {
            for at in [offset, offset + bytes - 8] {
                demand_eq!(read(driver, there.offset(at), 8, stream), b"exported", "another mapping has the contents");
            }
        }
        demand!(
            opened.iter().all(|number| *number < 0 || allocator.exported_descriptor(*number).is_some()),
            "a descriptor is found by its number"
        );
        close(vmm, there, &exported);
        drop(exported);
        allocator.give(block, stream);
        demand!(
            opened.iter().all(|number| allocator.exported_descriptor(*number).is_none()),
            "descriptors close with the block"
        );
    }
    allocator.check_all_returns();
}

pub(super) fn pinned_pages_are_neither_moved_nor_unmapped(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let allocator = bench.build();
    demand!(allocator.limit_to(Some(bench.scaled(60 * MIB))), "an allocator with pages has a limit");
    let (block, stream) = marked(&allocator, b"a pinned", bench.scaled(20 * MIB));
    let (addr, bytes) = (block.addr(), block.requested());
    allocator.pin(addr, bytes).granted();
    allocator.give(block, stream);
    let still_there = |when: &str| {
        for offset in [0, bytes - 8].into_iter().filter(|_| bench.has_memory()) {
            demand_eq!(read(driver, addr.offset(offset), 8, stream), b"a pinned", "pinned pages stay {when}");
        }
    };
    // Another stream needs all the memory.
    let other = bench.stream();
    let (blocks, _) = allocator.take_until_full(bench.scaled(4 * MIB), other);
    for block in &blocks {
        fill(driver, block.addr(), 7, block.requested(), other);
    }
    driver.device_synchronize().granted();
    still_there("when memory is short");
    allocator.give_all(blocks, other);
    driver.device_synchronize().granted();
    allocator.trim(0).granted();
    demand!(allocator.reserved() >= bytes, "pinned pages stay reserved");
    still_there("when the cache is emptied");
    allocator.unpin(addr, bytes).granted();
    allocator.check_all_returns();
}

pub(super) fn pins_are_counted_and_an_allocator_that_ends_gives_them_up(bench: &Bench) {
    let allocator = bench.build();
    let (block, stream) = marked(&allocator, b"a pinned", 8 * MIB);
    let (addr, bytes) = (block.addr(), block.requested());
    allocator.give(block, stream);
    for _ in 0..2 {
        allocator.pin(addr, bytes).granted();
    }
    allocator.unpin(addr, bytes).granted();
    bench.driver.device_synchronize().granted();
    allocator.trim(0).granted();
    demand!(allocator.reserved() >= bytes, "pages stay until the last unpin");
    allocator.check_drop_returns_all();
}

pub(super) fn memory_that_is_not_in_pages_is_neither_exported_nor_pinned(bench: &Bench) {
    let stream = bench.stream();
    let allocator = bench.build();
    let block = allocator.take(MIB, stream);
    demand!(
        matches!(allocator.export(&block), Err(AllocError::Incapable { .. })),
        "memory without pages is neither exported nor pinned"
    );
    demand!(
        matches!(allocator.pin(block.addr(), MIB), Err(AllocError::Incapable { .. })),
        "memory without pages is neither exported nor pinned"
    );
    demand!(
        matches!(allocator.unpin(block.addr(), MIB), Err(AllocError::Incapable { .. })),
        "memory without pages is neither exported nor pinned"
    );
    allocator.give(block, stream);
}
