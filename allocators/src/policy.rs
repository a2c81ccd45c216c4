//! The rules that allocators are put together from.
#![forbid(unsafe_code)]

pub mod rounding;
