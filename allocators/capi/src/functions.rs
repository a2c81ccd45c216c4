//! The functions of the library. Their comments are those of the header, at the top of which are the program's promises.

// The header lists the functions in this order.
mod allocators;
mod blocks;
mod pools;
mod reserved;
mod watching;

pub use allocators::*;
pub use blocks::*;
pub use pools::*;
pub use reserved::*;
pub use watching::*;
