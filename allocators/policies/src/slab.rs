//! Values with numbers, of which those that are gone are given out again.
#![forbid(unsafe_code)]

use std::ops::{Index, IndexMut};

const GONE: &str = "a value that is gone should not be asked for";

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    values: Vec<Option<T>>,
    /// Numbers of values that are gone.
    vacant: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { values: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    /// # Panics
    /// When there is no such value any more.
    fn index(&self, number: u32) -> &T {
        self.get(number).expect(GONE)
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        self.values[number as usize].as_mut().expect(GONE)
    }
}

impl<T> Slab<T> {
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.values.get(number as usize)?.as_ref()
    }

    /// The number of a new value: that of the value which went last, if any went.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.values.push(None);
            u32::try_from(self.values.len() - 1).expect("there should be fewer than 2^32 values")
        });
        self.values[number as usize] = Some(value);
        number
    }

    pub(crate) fn remove(&mut self, number: u32) -> T {
        self.vacant.push(number);
        self.values[number as usize].take().expect(GONE)
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() - self.vacant.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.values).filter_map(|(number, value)| Some((number, value.as_ref()?)))
    }
}
