//! Memory in pages is exported to other processes, and stays where something outside of the allocator holds it.

use super::Bench;
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

/// Maps exported pages side by side, as another process does.
fn import(vmm: &dyn VmmDriver, exported: &Exported) -> DeviceAddr {
    let bytes = exported.page_bytes * exported.pages.len() as u64;
    let start = vmm.address_reserve(bytes).unwrap();
    for (page, number) in exported.pages.iter().zip(0..) {
        let handle = vmm.import(page).unwrap();
        // SAFETY: a part of the range, of which nothing is mapped; the page has this size. The handle is released once.
        unsafe {
            vmm.map(start.offset(number * exported.page_bytes), exported.page_bytes, handle).unwrap();
            vmm.release(handle).unwrap();
        }
    }
    // SAFETY: all of it is mapped.
    unsafe { vmm.set_access(start, bytes) }.unwrap();
    start
}

fn close(vmm: &dyn VmmDriver, start: DeviceAddr, exported: &Exported) {
    let bytes = exported.page_bytes * exported.pages.len() as u64;
    // SAFETY: a whole range that was mapped, and that no work uses any more.
    unsafe {
        vmm.unmap(start, bytes).unwrap();
        vmm.address_free(start, bytes).unwrap();
    }
}

/// Where a block lies, and a pattern at both of its ends.
fn marked(allocator: &Subject, mark: &[u8; 8], bytes: u64) -> (Block, vramlab_device::StreamId) {
    let stream = allocator.bench.stream();
    let block = allocator.take(bytes, stream);
    let driver = allocator.bench.driver.as_ref();
    for offset in [0, bytes - 8].into_iter().filter(|_| allocator.bench.has_memory()) {
        write(driver, block.addr().offset(offset), mark, stream);
    }
    driver.device_synchronize().unwrap();
    (block, stream)
}

pub(super) fn every_page_of_a_block_is_exported(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let vmm = driver.vmm().unwrap();
    let allocator = bench.build();
    for bytes in [1000, 2 * MIB, 3 * MIB + 8, 50 * MIB] {
        let (block, stream) = marked(&allocator, b"exported", bytes);
        let exported = match allocator.export(&block) {
            Err(AllocError::Unsupported { .. }) => {
                assert_eq!(vmm.memory_properties().handle(), None);
                allocator.give(block, stream);
                return;
            }
            exported => exported.unwrap(),
        };
        let offset = block.addr().get() - exported.addr;
        assert!(offset < exported.page_bytes, "no page in front");
        let end = exported.page_bytes * exported.pages.len() as u64;
        assert!((end - exported.page_bytes..end).contains(&(offset + block.bytes() - 1)), "none behind");
        let opened = numbers(&exported);
        assert_eq!(numbers(&allocator.export(&block).unwrap()), opened, "the same handles while it is held");
        let there = import(vmm, &exported);
        if bench.has_memory() {
            for at in [offset, offset + bytes - 8] {
                assert_eq!(read(driver, there.offset(at), 8, stream), b"exported");
            }
        }
        assert!(opened.iter().all(|number| *number < 0 || allocator.exported_descriptor(*number).is_some()));
        close(vmm, there, &exported);
        drop(exported);
        allocator.give(block, stream);
        assert!(opened.iter().all(|number| allocator.exported_descriptor(*number).is_none()), "closed with the block");
    }
    allocator.check_all_returns();
}

pub(super) fn pinned_pages_are_neither_moved_nor_unmapped(bench: &Bench) {
    let driver = bench.driver.as_ref();
    let allocator = bench.build();
    assert!(allocator.set_memory_limit(Some(60 * MIB)));
    let (block, stream) = marked(&allocator, b"a pinned", 20 * MIB);
    let (addr, bytes) = (block.addr(), block.requested());
    allocator.pin(addr, bytes).unwrap();
    allocator.give(block, stream);
    let still_there = |when: &str| {
        for offset in [0, bytes - 8].into_iter().filter(|_| bench.has_memory()) {
            assert_eq!(read(driver, addr.offset(offset), 8, stream), b"a pinned", "{when}");
        }
    };
    // Another stream needs all that there is.
    let other = bench.stream();
    let (blocks, _) = allocator.take_until_full(4 * MIB, other);
    for block in &blocks {
        fill(driver, block.addr(), 7, block.requested(), other);
    }
    driver.device_synchronize().unwrap();
    still_there("when memory is short");
    allocator.give_all(blocks, other);
    driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    assert!(allocator.reserved() >= bytes);
    still_there("when the cache is emptied");
    allocator.unpin(addr, bytes).unwrap();
    allocator.check_all_returns();
}

pub(super) fn pins_are_counted_and_an_allocator_that_ends_gives_them_up(bench: &Bench) {
    let allocator = bench.build();
    let (block, stream) = marked(&allocator, b"a pinned", 8 * MIB);
    let (addr, bytes) = (block.addr(), block.requested());
    allocator.give(block, stream);
    for _ in 0..2 {
        allocator.pin(addr, bytes).unwrap();
    }
    allocator.unpin(addr, bytes).unwrap();
    bench.driver.device_synchronize().unwrap();
    allocator.trim(0).unwrap();
    assert!(allocator.reserved() >= bytes, "one is left");
    allocator.check_drop_returns_all();
}

pub(super) fn memory_that_is_not_in_pages_is_neither_exported_nor_pinned(bench: &Bench) {
    let stream = bench.stream();
    let allocator = bench.build();
    let block = allocator.take(MIB, stream);
    assert!(matches!(allocator.export(&block), Err(AllocError::Incapable { .. })));
    assert!(matches!(allocator.pin(block.addr(), MIB), Err(AllocError::Incapable { .. })));
    assert!(matches!(allocator.unpin(block.addr(), MIB), Err(AllocError::Incapable { .. })));
    allocator.give(block, stream);
}
