//! Memory that other processes can map.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// The uses of [created](crate::VmmDriver::create) memory beyond its own process and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryProperties {
    /// Processes of this machine can map it, given a file descriptor.
    pub file_descriptors: bool,
    /// Processes of this machine, and of others in the same NVLink domain, can map it, given a fabric handle.
    pub fabric: bool,
    /// Network adapters can read and write it (GPUDirect RDMA).
    pub rdma: bool,
}

impl MemoryProperties {
    /// Memory for its own process and device only.
    pub const NONE: Self = Self { file_descriptors: false, fabric: false, rdma: false };

    /// The common properties of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            file_descriptors: self.file_descriptors && other.file_descriptors,
            fabric: self.fabric && other.fabric,
            rdma: self.rdma && other.rdma,
        }
    }

    /// The properties to request when a device refuses these: those that fewer programs need are dropped first. `None` when there
    /// are none to drop.
    #[must_use]
    pub fn next_best(self) -> Option<Self> {
        match self {
            Self { fabric: true, .. } => Some(Self { fabric: false, ..self }),
            Self { rdma: true, .. } => Some(Self { rdma: false, ..self }),
            Self { file_descriptors: true, .. } => Some(Self::NONE),
            Self::NONE => None,
        }
    }

    /// The handle by which other processes of this machine map it, if there is one.
    #[must_use]
    pub fn handle(self) -> Option<ShareKind> {
        if self.file_descriptors {
            return Some(ShareKind::Descriptor);
        }
        self.fabric.then_some(ShareKind::Fabric)
    }
}

/// The kind of a handle that another process can import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareKind {
    /// A file descriptor.
    Descriptor,
    /// A fabric handle.
    Fabric,
}

/// A handle that another process can import. The memory stays until all handles and mappings are released and all of these are
/// dropped.
#[derive(Debug)]
pub enum Shareable {
    /// A file descriptor, which closes when this is dropped.
    Descriptor(OwnedFd),
    /// A fabric handle: bytes that can be sent unchanged.
    Fabric([u8; 64]),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_drops_one_property_and_the_descriptor_last() {
        let all = MemoryProperties { file_descriptors: true, fabric: true, rdma: true };
        let tried: Vec<MemoryProperties> = std::iter::successors(Some(all), |last| last.next_best()).collect();
        let in_bits = |tried: &MemoryProperties| [tried.file_descriptors, tried.fabric, tried.rdma];
        let expected = [[true, true, true], [true, false, true], [true, false, false], [false, false, false]];
        assert_eq!(tried.iter().map(in_bits).collect::<Vec<_>>(), expected);
        assert_eq!(all.handle(), Some(ShareKind::Descriptor));
        assert_eq!(MemoryProperties { fabric: true, ..MemoryProperties::NONE }.handle(), Some(ShareKind::Fabric));
        assert_eq!(MemoryProperties { rdma: true, ..MemoryProperties::NONE }.handle(), None);
    }
}
