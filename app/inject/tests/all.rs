//! The tests of the library.
