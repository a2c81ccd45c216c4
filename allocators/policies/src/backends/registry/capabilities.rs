//! The capabilities of a backend, which commands and tests read instead of its name.

use crate::contract::Path;
use crate::policy::size::torch::LARGE_SEGMENT;
use serde::{Serialize, Serializer};

/// The capabilities of a backend. Tests demand exactly these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// The memory that it allocates.
    pub memory: MemoryKind,
    /// How it serves requests during a graph capture.
    pub graph_capture: GraphCapture,
    /// The free memory that can serve a stream.
    pub streams: StreamUse,
    /// The arrangement of blocks in segments.
    pub segments: SegmentUse,
    /// Required features of the device.
    pub needs: Needs,
    /// Whether it caches freed memory, so that a repeated request makes no allocation call to the driver.
    pub caches: bool,
    /// Whether each request and each free is a driver call of tens of microseconds. Benchmarks make fewer of them.
    pub slow_calls: bool,
    /// Whether a free coalesces a block with its free neighbours immediately, whichever stream they belong to.
    pub coalesces: bool,
    /// Whether it tries again when the device has no memory: after releasing its cache, or with a smaller size.
    pub retries: bool,
    /// Whether it refuses a request without releasing idle segments first, so that a larger request can fail although all memory is
    /// free. A trim releases them.
    pub keeps_segments: bool,
    /// Whether it retains a block when it cannot determine that a destroyed stream has finished with it: it reports this once,
    /// continues, and counts the block as stranded until the whole device has been waited for.
    pub sets_aside: bool,
    /// Whether it knows its blocks' addresses, so that there are snapshots.
    pub snapshot: bool,
    /// Whether it can start with the segments and blocks of a snapshot.
    pub restores: bool,
    /// Whether it has [private pools](crate::DeviceAllocator#private-pools).
    pub private_pools: bool,
    /// Whether private pools have checkpoints.
    pub checkpoints: bool,
    /// Whether it follows PyTorch's native allocator, to the address.
    pub follows_pytorch: bool,
    /// The path of a free of a block that another stream was announced to use.
    #[serde(serialize_with = "by_name")]
    pub used_elsewhere: Path,
}

fn by_name<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(path.name())
}

impl Capabilities {
    /// The minimum for every backend. Entries add their capabilities.
    pub const LEAST: Self = Self {
        memory: MemoryKind::Device,
        graph_capture: GraphCapture::Refused,
        streams: StreamUse::Own,
        segments: SegmentUse::Many,
        needs: Needs::Nothing,
        caches: false,
        slow_calls: false,
        coalesces: false,
        retries: false,
        keeps_segments: false,
        sets_aside: false,
        snapshot: false,
        restores: false,
        private_pools: false,
        checkpoints: false,
        follows_pytorch: false,
        used_elsewhere: Path::Deferred,
    };
}

impl Capabilities {
    /// Its capabilities, in a few words each; missing ones are left out.
    #[must_use]
    pub fn describe(&self) -> Vec<&'static str> {
        let words = [
            match self.memory {
                MemoryKind::Device => "",
                MemoryKind::Host => "pinned host memory",
            },
            match self.needs {
                Needs::Nothing => "",
                Needs::Pools => "needs a device with stream-ordered pools",
                Needs::Vmm => "needs a device with virtual memory management",
            },
            match self.graph_capture {
                GraphCapture::Refused => "",
                GraphCapture::Pinned => "graph capture, from memory that it keeps",
                GraphCapture::DriverNodes => "graph capture, by the driver's memory nodes",
            },
            match self.streams {
                StreamUse::Own => "memory stays with its stream",
                StreamUse::Any => "memory serves any stream",
            },
            match self.segments {
                SegmentUse::One => "a segment for each block",
                SegmentUse::Many => "several blocks a segment",
                SegmentUse::Expandable => "segments that grow",
                SegmentUse::Stitched => "blocks over several segments",
                SegmentUse::Hidden => "",
            },
            if self.caches { "keeps freed memory" } else { "" },
            if self.coalesces { "coalesces immediately" } else { "" },
            if self.retries { "tries again when memory is short" } else { "" },
            if self.keeps_segments { "keeps its segments until it is trimmed" } else { "" },
            if self.snapshot { "snapshots" } else { "" },
            if self.restores { "begins with a snapshot's blocks" } else { "" },
            if self.private_pools { "private pools" } else { "" },
            if self.checkpoints { "checkpoints of them" } else { "" },
            if self.follows_pytorch { "PyTorch's addresses" } else { "" },
        ];
        words.into_iter().filter(|words| !words.is_empty()).collect()
    }
}

impl SegmentUse {
    /// Whether several blocks can share a segment.
    #[must_use]
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Many | Self::Expandable | Self::Stitched)
    }

    /// By how many bytes a memory limit may be exceeded: PyTorch compares it before it rounds to whole handles.
    #[must_use]
    pub fn over_limit(self) -> u64 {
        if self == Self::Expandable { LARGE_SEGMENT - 1 } else { 0 }
    }
}

/// The memory that a backend allocates. Its policy speaks to a [`Driver`](vramlab_device::Driver) in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// Memory of a GPU.
    Device,
    /// Pinned memory of the host, from a [`HostDriver`](vramlab_device::HostDriver).
    Host,
}

/// How a backend serves requests during a graph capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GraphCapture {
    /// Not at all: a capture cannot begin.
    Refused,
    /// From memory that it keeps reserved for the graph until the capture is released.
    Pinned,
    /// The driver allocates the memory, as nodes of the graph.
    DriverNodes,
}

/// The free memory that can serve a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamUse {
    /// Memory last used on the stream.
    Own,
    /// Also memory last used on another stream, once that work has completed or is ordered before.
    Any,
}

/// The arrangement of blocks in segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SegmentUse {
    /// Each block is a segment.
    One,
    /// Several blocks can share a segment.
    Many,
    /// Several blocks can share a segment, and segments are ranges of addresses in which memory is mapped and unmapped. They are
    /// not counted.
    Expandable,
    /// Several blocks can share a segment, and a block can be over the memory of several segments. Snapshots contain such a block
    /// as a segment of its own, and the remaining parts of those segments.
    Stitched,
    /// The driver does not report it.
    Hidden,
}

/// Required features of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Needs {
    /// Plain memory, which every device has.
    Nothing,
    /// Stream-ordered pools.
    Pools,
    /// Virtual memory management.
    Vmm,
}
