//! Which page lies behind which address.
//!
//! A page is a handle of the device. It may be mapped at several addresses, and *belongs* to one of them: there its bytes are a
//! part of a block. Its mappings at the others are *kept*, so that it can go back there without a call of the driver.
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
    /// Number of the last free of the place's stream whose work may use the page by another address; 0 when there is none.
    used_until: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    /// The page behind each address, by its number.
    at: BTreeMap<u64, usize>,
    pages: Slab<Page>,
}

impl Mapped {
    /// Adds a page that belongs to an address.
    pub(super) fn add(&mut self, place: u64, handle: PhysicalHandle) {
        self.at.insert(place, self.pages.insert(Page { handle, place, used_until: 0 }));
    }

    /// Forgets a page that is mapped where it belongs and nowhere else.
    pub(super) fn remove(&mut self, place: u64) -> PhysicalHandle {
        let number = self.at.remove(&place).expect("what is unmapped should have been mapped");
        self.pages.remove(number).handle
    }

    /// The handle of the page behind an address.
    pub(crate) fn handle(&self, addr: u64) -> Option<PhysicalHandle> {
        self.at.get(&addr).map(|number| self.pages[*number].handle)
    }

    /// Keeps a mapping of the page that belongs to `place`.
    pub(super) fn keep(&mut self, addr: u64, place: u64) {
        let number = self.at[&place];
        debug_assert_eq!(self.pages[number].place, place, "a page should be mapped again from where it belongs");
        self.at.insert(addr, number);
    }

    /// Forgets a mapping that was kept.
    pub(super) fn drop_kept(&mut self, addr: u64) {
        debug_assert!(self.place(addr).is_some_and(|place| place != addr), "only kept mappings should be dropped");
        self.at.remove(&addr);
    }

    /// Where the page behind an address belongs; `None` where nothing is mapped.
    pub(crate) fn place(&self, addr: u64) -> Option<u64> {
        self.at.get(&addr).map(|number| self.pages[*number].place)
    }

    /// Lets the page behind an address belong there from now on.
    pub(crate) fn move_to(&mut self, addr: u64, used_until: u64) {
        let number = self.at[&addr];
        let page = &mut self.pages[number];
        (page.place, page.used_until) = (addr, used_until);
    }

    /// Up to which free the page behind an address may be in use by another one.
    pub(crate) fn used_until(&self, addr: u64) -> u64 {
        self.at.get(&addr).map_or(0, |number| self.pages[*number].used_until)
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Number of mappings that are kept.
    pub(crate) fn kept(&self) -> usize {
        self.at.len() - self.pages()
    }

    /// Addresses in a range behind which anything is mapped.
    pub(crate) fn kept_within(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        self.at.range(start..end).map(|(addr, _)| *addr)
    }

    /// Addresses of mappings that are kept of pages whose place is `wanted`, in order.
    pub(crate) fn kept_of(&self, wanted: impl Fn(u64) -> bool) -> Vec<u64> {
        let is_kept = |addr: u64, place: u64| place != addr && wanted(place);
        let kept = self.at.iter().filter(|(addr, number)| is_kept(**addr, self.pages[**number].place));
        kept.map(|(addr, _)| *addr).collect()
    }
}
