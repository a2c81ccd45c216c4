//! The parts that allocators are put together from: each file decides one thing.
//!
//! | part | decides |
//! |---|---|
//! | [`size`] | how a request is rounded, which pool serves it, how large its segment is |
//! | [`fit`] | which free block serves it |
//! | [`split`] | whether a free block may serve it, and whether the rest is cut off |
//! | [`join`] | when free neighbours become one block |
//! | [`stream`] | which streams' free blocks a stream may take, and what that costs |
//! | [`grow`] | what happens when no free block fits |
//! | [`source`] | where segments come from |
//!
//! A crate outside adds kinds of its own: [`Fit::by`](fit::Fit::by) takes an index of free blocks,
//! [`Size::Custom`](size::Size::Custom) and [`Split::Custom`](split::Split::Custom) a rule.
//!
//! A [`Heap`] is what they work on: the [space](crate::space) of an allocator, an index of its free blocks, its source of
//! segments and the frees that [wait](pending) for other streams.

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
