//! Trains a multilayer perceptron under a chosen GPU memory allocator.

pub mod data;
