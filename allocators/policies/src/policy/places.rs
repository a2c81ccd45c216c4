//! Addresses of earlier requests, in order, so that a program that repeats itself gets the same addresses again.
//!
//! A request is expected to repeat the successor of the request that the last one repeated. Otherwise the search takes the latest
//! request that followed the same sequence, and then the latest request of this size.

use crate::space::FreeList;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

/// Length of the sequence of requests that identifies a position.
const ALIKE: usize = 32;

/// Number of remembered requests: many steps of training.
const MANY: usize = 1 << 16;

/// A request's list, size and address.
#[derive(Clone, Copy, Debug)]
struct Served {
    list: FreeList,
    bytes: u64,
    hash: u64,
    place: u64,
    /// The earlier request that it repeats.
    repeats: Option<usize>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Places {
    served: Vec<Served>,
    /// Index of the next request if the program repeats itself.
    next: usize,
    /// The latest request after the same sequence of requests, and the latest of the same size.
    latest: HashMap<u64, usize, BuildHasherDefault<DefaultHasher>>,
    /// Sum over the last requests, weighted by age.
    row: u64,
}

/// Maximum number of earlier repetitions that a search returns.
const TIMES: usize = 8;

const WEIGHT: u64 = 0x9E37_79B9_7F4A_7C15;

impl Places {
    fn hash(list: FreeList, bytes: u64) -> u64 {
        BuildHasherDefault::<DefaultHasher>::default().hash_one((list, bytes))
    }

    /// The sum with one more request.
    fn row_with(&self, hash: u64) -> u64 {
        let out = self.served.len().checked_sub(ALIKE).map_or(0, |first| self.served[first].hash);
        // CAST: a small number.
        let faded = out.wrapping_mul(WEIGHT.wrapping_pow(ALIKE as u32));
        self.row.wrapping_mul(WEIGHT).wrapping_add(hash).wrapping_sub(faded)
    }

    /// Addresses of such a request when it occurred in the same order, the latest first. A block that lives from one step to the
    /// next alternates between two addresses.
    pub(super) fn before(&mut self, list: FreeList, bytes: u64) -> Vec<u64> {
        let same = |served: &&Served| served.list == list && served.bytes == bytes;
        if self.served.get(self.next).filter(same).is_none() {
            let hash = Self::hash(list, bytes);
            let latest = self.latest.get(&self.row_with(hash)).or_else(|| self.latest.get(&hash));
            self.next = latest.copied().unwrap_or(self.served.len());
        }
        let last = self.served.get(self.next).filter(same);
        let mut places = Vec::new();
        for served in std::iter::successors(last, |served| self.served.get(served.repeats?)).take(TIMES) {
            if !places.contains(&served.place) {
                places.push(served.place);
            }
        }
        places
    }

    /// Notes the address of a request.
    pub(super) fn served(&mut self, list: FreeList, bytes: u64, place: u64) {
        if self.served.len() == MANY {
            // The older half is removed; indices of the newer half are adjusted.
            self.served.drain(..MANY / 2);
            self.next = self.next.saturating_sub(MANY / 2);
            self.served
                .iter_mut()
                .for_each(|request| request.repeats = request.repeats.and_then(|at| at.checked_sub(MANY / 2)));
            self.latest.retain(|_, at| {
                *at = at.wrapping_sub(MANY / 2);
                *at < MANY / 2
            });
        }
        let hash = Self::hash(list, bytes);
        let repeats = self.served.get(self.next).filter(|next| next.hash == hash).map(|_| self.next);
        self.next += usize::from(repeats.is_some());
        self.row = self.row_with(hash);
        self.latest.insert(self.row, self.served.len());
        self.latest.insert(hash, self.served.len());
        self.served.push(Served { list, bytes, hash, place, repeats });
    }

    /// Forgets every address.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Owner;
    use vramlab_device::StreamId;

    fn list() -> FreeList {
        // SAFETY: no driver gets this stream.
        FreeList { owner: Owner::of(unsafe { StreamId::from_raw(1) }), pool: None }
    }

    /// Looks up each request of a step, and notes its new address.
    fn step(places: &mut Places, requests: &[(u64, u64)]) -> Vec<Vec<u64>> {
        let mut before = Vec::new();
        for (bytes, place) in requests {
            before.push(places.before(list(), *bytes));
            places.served(list(), *bytes, *place);
        }
        before
    }

    #[test]
    fn equal_requests_are_told_apart_by_their_order() {
        let mut places = Places::default();
        let program = [(7, 70), (5, 1), (5, 2), (5, 3), (8, 80)];
        assert_eq!(step(&mut places, &program)[0], [0; 0]);
        step(&mut places, &program);
        let first: Vec<u64> = step(&mut places, &program).iter().map(|before| before[0]).collect();
        assert_eq!(first, [70, 1, 2, 3, 80]);
    }

    #[test]
    fn what_lies_in_two_places_in_turn_has_both() {
        let mut places = Places::default();
        for place in [1, 2, 1, 2] {
            step(&mut places, &[(7, 70), (5, place)]);
        }
        assert_eq!(places.before(list(), 7), [70]);
        places.served(list(), 7, 70);
        assert_eq!(places.before(list(), 5), [2, 1]);
    }

    #[test]
    fn a_request_out_of_order_is_found_by_its_size() {
        let mut places = Places::default();
        step(&mut places, &[(7, 70), (5, 1), (9, 90)]);
        assert_eq!(step(&mut places, &[(9, 91), (6, 60), (5, 2)]), [vec![90], vec![], vec![1]]);
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let mut places = Places::default();
        for step_number in 0..MANY as u64 {
            step(&mut places, &[(7, 70), (5, step_number % 3)]);
        }
        assert!(places.served.len() <= MANY && places.latest.len() <= 2 * MANY);
        assert_eq!(places.before(list(), 7), [70]);
    }
}
