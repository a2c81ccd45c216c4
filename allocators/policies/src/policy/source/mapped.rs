//! Which page is mapped at which address.
//!
//! A page is a handle of the device. It may be mapped at several addresses, and *belongs* to one of them: there its bytes are a
//! part of a block. Its mappings at the others are *kept*, so that it can move back without a driver call.
#![forbid(unsafe_code)]

use slab::Slab;
use std::collections::BTreeMap;
use vramlab_device::PhysicalHandle;

/// A page.
#[derive(Clone, Copy, Debug)]
struct Page {
    handle: PhysicalHandle,
    /// The address that it belongs to.
    place: u64,
    /// Number of the last free on the address's stream whose work may use the page at another address; 0 when there is none.
    used_until: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    /// The page at each address, by its number.
    at: BTreeMap<u64, usize>,
    pages: Slab<Page>,
}

impl Mapped {
    /// Adds a page that belongs to an address.
    pub(super) fn add(&mut self, place: u64, handle: PhysicalHandle) {
        self.at.insert(place, self.pages.insert(Page { handle, place, used_until: 0 }));
    }

    /// Removes a page that is mapped only at the address that it belongs to.
    pub(super) fn remove(&mut self, place: u64) -> PhysicalHandle {
        let number = self.at.remove(&place).expect("an unmapped address should have been mapped");
        self.pages.remove(number).handle
    }

    /// The handle of the page at an address.
    pub(crate) fn handle(&self, addr: u64) -> Option<PhysicalHandle> {
        self.at.get(&addr).map(|number| self.pages[*number].handle)
    }

    /// Keeps a mapping of the page that belongs to `place`.
    pub(super) fn keep(&mut self, addr: u64, place: u64) {
        let number = self.at[&place];
        debug_assert_eq!(self.pages[number].place, place, "a page should be mapped again from where it belongs");
        self.at.insert(addr, number);
    }

    /// Removes a kept mapping.
    pub(super) fn drop_kept(&mut self, addr: u64) {
        debug_assert!(self.place(addr).is_some_and(|place| place != addr), "only kept mappings should be dropped");
        self.at.remove(&addr);
    }

    /// The address that the page at `addr` belongs to; `None` where nothing is mapped.
    pub(crate) fn place(&self, addr: u64) -> Option<u64> {
        self.at.get(&addr).map(|number| self.pages[*number].place)
    }

    /// Lets the page at an address belong to that address from now on.
    pub(crate) fn move_to(&mut self, addr: u64, used_until: u64) {
        let number = self.at[&addr];
        let page = &mut self.pages[number];
        (page.place, page.used_until) = (addr, used_until);
    }

    /// Number of the last free up to which the page may still be used at another address.
    pub(crate) fn used_until(&self, addr: u64) -> u64 {
        self.at.get(&addr).map_or(0, |number| self.pages[*number].used_until)
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Number of kept mappings.
    pub(crate) fn kept(&self) -> usize {
        self.at.len() - self.pages()
    }

    /// Mapped addresses in a range.
    pub(crate) fn kept_within(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        self.at.range(start..end).map(|(addr, _)| *addr)
    }

    /// Addresses of kept mappings whose page belongs to an address that `filter` selects, in order.
    pub(crate) fn kept_of(&self, filter: impl Fn(u64) -> bool) -> Vec<u64> {
        let is_kept = |addr: u64, place: u64| place != addr && filter(place);
        let addresses = self.at.iter().filter(|(addr, number)| is_kept(**addr, self.pages[**number].place));
        addresses.map(|(addr, _)| *addr).collect()
    }
}
