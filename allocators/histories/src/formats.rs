//! Recordings of allocator events: one representation for every format, read from any log and written to any export.
//!
//! A recording contains one device's requests and the allocator's actions, in order. Readers push events into a closure one at a
//! time, so that a file of any size takes bounded memory.
//!
//! [`read()`] reads every format in [`Format`], plain or compressed, and detects it from the content. [`Export`] lists the
//! formats to write, and [`TraceWriter`] writes each of them.

mod archive;
mod error;
mod foreign;
mod host;
mod input;
mod jsonl;
mod lines;
mod list;
mod minimalloc;
mod origins;
mod pickle;
mod placements;
mod read;
mod rmm;
mod segment;
mod snapshot;
mod snapshot_json;
mod stalloc;
mod summary;
mod words;
mod write;
mod write_perfetto;
mod write_plain;
mod write_snapshot;

pub use error::{Place, Problem, ReadError};
pub use host::{HostEvent, HostMemory, HostRecord, HostSegment};
pub use jsonl::jsonl_placements;
pub use list::{Export, Format};
pub use minimalloc::MinimallocWriter;
pub use origins::{Annotation, FORWARD_PASS, Frame, Origin, Origins, StackId, TextId};
pub(super) use placements::Placed;
pub use placements::{BlockPlace, Placements};
pub use read::{read, read_from, read_origins, read_origins_from};
pub use rmm::RmmWriter;
pub use segment::{Segment, SegmentBlock};
pub use summary::{Cut, OriginSink, ReadOptions, SegmentPool, Sink, Summary};
pub use vramlab_policies::contract::{Action, Event};
pub use words::Keys;
pub use write::{Ending, TraceWriter, WriteError, WriteProblem};
pub use write_perfetto::PerfettoWriter;
pub use write_snapshot::SnapshotWriter;
