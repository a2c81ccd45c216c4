//! A block's memory as other processes can map it.

use crate::contract::AllocError;
use std::sync::Arc;
use vramlab_device::Shareable;

/// The pages around a block, with a handle each.
#[derive(Clone, Debug)]
pub struct Exported {
    /// First address of the first page.
    pub addr: u64,
    /// Bytes of each page.
    pub page_bytes: u64,
    /// The pages in the order of their addresses.
    pub pages: Vec<Arc<Shareable>>,
}

/// The answer of allocators whose memory is not mapped in pages.
pub(crate) fn no_pages(allocator: &'static str) -> AllocError {
    AllocError::Incapable { allocator, capability: "pages of memory that others can map or register by themselves" }
}
