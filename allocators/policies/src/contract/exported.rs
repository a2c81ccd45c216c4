//! A block's memory, for other processes to map.

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
