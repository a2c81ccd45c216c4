//! The rules that allocators are put together from.
#![forbid(unsafe_code)]

mod divisions;
pub mod rounding;
