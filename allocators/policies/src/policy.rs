//! The parts of allocators: each file decides one thing.
//!
//! | part | decides |
//! |---|---|
//! | [`size`] | how a request is rounded, which pool serves it, how large its segment is |
//! | [`fit`] | which free block serves it |
//! | [`split`] | whether a free block may serve it, and whether it is split |
//! | [`join`] | when free neighbours coalesce |
//! | [`stream`] | which streams' free blocks a stream may take, and what that costs |
//! | [`grow`] | what happens when no free block fits |
//! | [`source`] | where segments come from |
//!
//! Another crate adds kinds of its own: [`Fit::by`](fit::Fit::by) takes an index of free blocks,
//! [`Size::Custom`](size::Size::Custom) and [`Split::Custom`](split::Split::Custom) a rule.
//!
//! They work on a [`Heap`]: the [space](crate::space) of an allocator, an index of its free blocks, its source of segments and the
//! [deferred frees](pending).

pub(crate) mod arena;
mod captured;
pub mod events;
pub mod fit;
pub mod grow;
mod heap;
pub mod join;
mod pages;
pub mod pending;
mod places;
pub mod size;
pub mod source;
pub mod split;
pub mod stream;

pub use heap::Heap;
