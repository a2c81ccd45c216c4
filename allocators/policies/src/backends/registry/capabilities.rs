//! What a backend says it can do, so that commands and tests ask for that and not for a name.

use crate::contract::Path;
use crate::policy::size::torch::LARGE_SEGMENT;
use serde::{Serialize, Serializer};

/// What a backend can do. Tests demand what it says it can, and do not demand what it says it cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// How it serves requests while work is captured into a graph.
    pub graph_capture: GraphCapture,
    /// Which free memory can serve a stream.
    pub streams: StreamUse,
    /// How blocks lie in segments.
    pub segments: SegmentUse,
    /// What a device must have.
    pub needs: Needs,
    /// Whether it keeps memory that is freed, so that a repeated request makes no call that takes memory from the device.
    pub caches: bool,
    /// Whether each request and each free is a driver call of tens of microseconds. Benchmarks make fewer of them.
    pub slow_calls: bool,
    /// Whether a free joins a block with its free neighbours at once, whichever stream those are of.
    pub coalesces: bool,
    /// Whether it tries again when the device has no memory left: after it has given back what it holds, or for less.
    pub retries: bool,
    /// Whether it refuses a request without giving idle segments back first, so that a larger piece than it has cannot be had
    /// when all is free. A trim gives them back.
    pub keeps_segments: bool,
    /// Whether it sets a block aside when it cannot tell that a stream is done with it, because the stream is gone: it says so once,
    /// goes on, and counts the block among the stranded ones until the whole device has been waited for.
    pub sets_aside: bool,
    /// Whether it knows where its blocks lie, so that there are snapshots.
    pub snapshot: bool,
    /// Whether it can begin with the segments and blocks of a snapshot.
    pub restores: bool,
    /// Whether a program can keep some of its memory apart, in [private pools](crate::DeviceAllocator#private-pools).
    pub private_pools: bool,
    /// Whether such a pool can go back to a checkpoint.
    pub checkpoints: bool,
    /// Whether it does what PyTorch's native allocator does, to the address.
    pub follows_pytorch: bool,
    /// How the free of a block goes that another stream was announced to use.
    #[serde(serialize_with = "by_name")]
    pub used_elsewhere: Path,
}

fn by_name<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(path.name())
}

impl Capabilities {
    /// What is demanded of every backend. Entries say what theirs can do beyond it.
    pub const LEAST: Self = Self {
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
    /// What it can do, in a few words each; what it cannot is left out.
    #[must_use]
    pub fn describe(&self) -> Vec<&'static str> {
        let said = [
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
                SegmentUse::Hidden => "",
            },
            if self.caches { "keeps freed memory" } else { "" },
            if self.coalesces { "coalesces at once" } else { "" },
            if self.retries { "tries again when memory is short" } else { "" },
            if self.keeps_segments { "keeps its segments until it is trimmed" } else { "" },
            if self.snapshot { "snapshots" } else { "" },
            if self.restores { "begins with a snapshot's blocks" } else { "" },
            if self.private_pools { "private pools" } else { "" },
            if self.checkpoints { "checkpoints of them" } else { "" },
            if self.follows_pytorch { "PyTorch's addresses" } else { "" },
        ];
        said.into_iter().filter(|words| !words.is_empty()).collect()
    }
}

impl SegmentUse {
    /// Whether several blocks can share a segment.
    #[must_use]
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Many | Self::Expandable)
    }

    /// By how many bytes a memory limit may be passed: PyTorch compares it before it knows how many whole handles it maps.
    #[must_use]
    pub fn over_limit(self) -> u64 {
        if self == Self::Expandable { LARGE_SEGMENT - 1 } else { 0 }
    }
}

/// How a backend serves requests while work is captured into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GraphCapture {
    /// It does not: a capture cannot begin.
    Refused,
    /// From memory that it keeps for the graph until the capture is released.
    Pinned,
    /// The driver takes the memory, as nodes of the graph.
    DriverNodes,
}

/// Which free memory can serve a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamUse {
    /// What was last used on it.
    Own,
    /// Also what was last used on another, as soon as that work is done or ordered before.
    Any,
}

/// How blocks lie in segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SegmentUse {
    /// Each block is a segment.
    One,
    /// Several blocks can share a segment.
    Many,
    /// Several blocks can share a segment, and segments are ranges of addresses whose memory comes and goes in parts. They are
    /// not counted.
    Expandable,
    /// The driver does not tell.
    Hidden,
}

/// What a device must have for a backend.
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
