//! Maps and sets in the order of their keys, as `BTreeMap` and `BTreeSet`, of which the compiler makes one tree for all.
//!
//! A `BTreeMap` is compiled anew for each kind of key and of value, which is some 8,000 lines for the code generator each time.
//! Here the tree holds numbers alone, the keys' and where in a vector the entry lies, and a further kind costs a tenth of that.
//! Finding an entry takes one step more. Where a policy is to be read, or its speed rests on a tree, the standard library's own
//! are used.

use std::collections::{BTreeMap, btree_map};
use std::ops::{Bound, Index, RangeBounds};

/// A key that is ordered as a number is.
pub(crate) trait Key: Copy {
    /// The number. It is smaller for a smaller key, and no two keys share one.
    fn number(self) -> u64;
}

impl Key for u64 {
    fn number(self) -> u64 {
        self
    }
}

impl Key for u32 {
    fn number(self) -> u64 {
        self.into()
    }
}

impl Key for usize {
    fn number(self) -> u64 {
        self as u64
    }
}

impl Key for (u32, u32) {
    fn number(self) -> u64 {
        u64::from(self.0) << 32 | u64::from(self.1)
    }
}

/// Where the entry of each key lies.
#[derive(Clone, Debug, Default)]
struct Places {
    tree: BTreeMap<u64, u32>,
    /// Places whose entries are gone.
    unused: Vec<u32>,
}

impl Places {
    fn get(&self, number: u64) -> Option<usize> {
        self.tree.get(&number).map(|place| *place as usize)
    }

    /// The place of a number that may be new.
    #[inline(never)]
    fn add(&mut self, number: u64) -> usize {
        // Every place is either in the tree or unused.
        let next = self.unused.last().copied();
        let len = self.tree.len() + self.unused.len();
        match self.tree.entry(number) {
            btree_map::Entry::Occupied(entry) => *entry.get() as usize,
            btree_map::Entry::Vacant(entry) => {
                let place =
                    next.unwrap_or_else(|| u32::try_from(len).expect("a map should have less than 2^32 entries"));
                if next.is_some() {
                    self.unused.pop();
                }
                *entry.insert(place) as usize
            }
        }
    }

    #[inline(never)]
    fn remove(&mut self, number: u64) -> Option<usize> {
        let place = self.tree.remove(&number)?;
        self.unused.push(place);
        Some(place as usize)
    }

    fn at_most(&self, number: u64) -> Option<usize> {
        self.range(Bound::Unbounded, Bound::Included(number)).next_back().map(|(_, place)| *place as usize)
    }

    #[inline(never)]
    fn range(&self, from: Bound<u64>, to: Bound<u64>) -> btree_map::Range<'_, u64, u32> {
        self.tree.range((from, to))
    }
}

/// A map in the order of its keys. Finding, adding and removing are O(log n).
#[derive(Clone)]
pub(crate) struct OrderedMap<K, V> {
    places: Places,
    entries: Vec<Option<(K, V)>>,
}

impl<K, V> Default for OrderedMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> OrderedMap<K, V> {
    /// A map without entries.
    pub(crate) const fn new() -> Self {
        Self { places: Places { tree: BTreeMap::new(), unused: Vec::new() }, entries: Vec::new() }
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.places.tree.len()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.tree.is_empty()
    }

    /// All entries in order.
    pub(crate) fn iter(&self) -> Iter<'_, K, V> {
        Iter { places: self.places.tree.values(), entries: &self.entries }
    }

    /// All keys in order.
    pub(crate) fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values in the order of their keys.
    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// All entries in order, with values that may be changed. O(n), and as much memory, before the first.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        let mut entries: Vec<Option<&mut (K, V)>> = self.entries.iter_mut().map(Option::as_mut).collect();
        let in_order = self.places.tree.values().filter_map(move |place| entries[*place as usize].take());
        in_order.map(|(key, value)| (&*key, value))
    }

    /// All values in the order of their keys, to be changed. O(n), and as much memory, before the first.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.iter_mut().map(|(_, value)| value)
    }

    /// Takes everything away.
    pub(crate) fn clear(&mut self) {
        *self = Self::new();
    }

    /// The entry with the least key.
    pub(crate) fn first(&self) -> Option<(&K, &V)> {
        let (_, place) = self.places.tree.first_key_value()?;
        at(&self.entries, *place)
    }
}

impl<K: Key, V> OrderedMap<K, V> {
    /// The value of a key.
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let place = self.places.get(key.number())?;
        self.entries[place].as_ref().map(|(_, value)| value)
    }

    /// The value of a key, to be changed.
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = self.places.get(key.number())?;
        self.entries[place].as_mut().map(|(_, value)| value)
    }

    /// Whether a key has a value.
    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.places.get(key.number()).is_some()
    }

    /// Gives a key a value. Returns the one that it had.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.slot(key).replace((key, value)).map(|(_, value)| value)
    }

    /// The value of a key, which is made if it has none.
    pub(crate) fn or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        &mut self.slot(key).get_or_insert_with(|| (key, make())).1
    }

    /// The value of a key, which is the default if it has none.
    pub(crate) fn or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.or_insert_with(key, V::default)
    }

    /// Takes a key's value away.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.places.remove(key.number())?;
        self.entries[place].take().map(|(_, value)| value)
    }

    /// Takes the entry with the least key away.
    pub(crate) fn pop_first(&mut self) -> Option<(K, V)> {
        let key = *self.first()?.0;
        self.remove(&key).map(|value| (key, value))
    }

    /// Takes the entry with the least key away, if that is at most this one.
    pub(crate) fn pop_through(&mut self, greatest: &K) -> Option<(K, V)> {
        let key = *self.first()?.0;
        if key.number() > greatest.number() {
            return None;
        }
        self.remove(&key).map(|value| (key, value))
    }

    /// The entry with the greatest key that is at most this one. Its value may be changed.
    pub(crate) fn at_most_mut(&mut self, greatest: &K) -> Option<(&K, &mut V)> {
        let place = self.places.at_most(greatest.number())?;
        self.entries[place].as_mut().map(|(key, value)| (&*key, value))
    }

    /// The entries within a range of keys, in order.
    pub(crate) fn range(&self, range: impl RangeBounds<K>) -> Range<'_, K, V> {
        let places = self.places.range(number(range.start_bound()), number(range.end_bound()));
        Range { places, entries: &self.entries }
    }

    fn slot(&mut self, key: K) -> &mut Option<(K, V)> {
        let place = self.places.add(key.number());
        if place == self.entries.len() {
            self.entries.push(None);
        }
        &mut self.entries[place]
    }
}

fn number<K: Key>(bound: Bound<&K>) -> Bound<u64> {
    match bound {
        Bound::Included(key) => Bound::Included(key.number()),
        Bound::Excluded(key) => Bound::Excluded(key.number()),
        Bound::Unbounded => Bound::Unbounded,
    }
}

impl<K: Key, V> Index<&K> for OrderedMap<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        self.get(key).expect("a key that is looked up so should have a value")
    }
}

impl<K: std::fmt::Debug, V: std::fmt::Debug> std::fmt::Debug for OrderedMap<K, V> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Through what is compiled once.
        let mut map = out.debug_map();
        for (key, value) in self {
            map.entry(key, value);
        }
        map.finish()
    }
}

impl<K: Key, V> Extend<(K, V)> for OrderedMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        entries.into_iter().for_each(|(key, value)| {
            self.insert(key, value);
        });
    }
}

impl<K: Key, V> FromIterator<(K, V)> for OrderedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::new();
        map.extend(entries);
        map
    }
}

impl<'a, K, V> IntoIterator for &'a OrderedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<K, V> IntoIterator for OrderedMap<K, V> {
    type Item = (K, V);
    type IntoIter = IntoIter<K, V>;

    fn into_iter(self) -> IntoIter<K, V> {
        IntoIter { places: self.places.tree.into_values(), entries: self.entries }
    }
}

fn at<K, V>(entries: &[Option<(K, V)>], place: u32) -> Option<(&K, &V)> {
    entries[place as usize].as_ref().map(|(key, value)| (key, value))
}

/// All entries in the order of their keys.
#[derive(Debug)]
pub(crate) struct Iter<'a, K, V> {
    places: btree_map::Values<'a, u64, u32>,
    entries: &'a [Option<(K, V)>],
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        at(self.entries, *self.places.next()?)
    }
}

impl<K, V> DoubleEndedIterator for Iter<'_, K, V> {
    fn next_back(&mut self) -> Option<Self::Item> {
        at(self.entries, *self.places.next_back()?)
    }
}

/// Entries of some of the keys, in order.
#[derive(Debug)]
pub(crate) struct Range<'a, K, V> {
    places: btree_map::Range<'a, u64, u32>,
    entries: &'a [Option<(K, V)>],
}

impl<'a, K, V> Iterator for Range<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        at(self.entries, *self.places.next()?.1)
    }
}

impl<K, V> DoubleEndedIterator for Range<'_, K, V> {
    fn next_back(&mut self) -> Option<Self::Item> {
        at(self.entries, *self.places.next_back()?.1)
    }
}

/// Entries in the order of their keys, taken out of the map.
#[derive(Debug)]
pub(crate) struct IntoIter<K, V> {
    places: btree_map::IntoValues<u64, u32>,
    entries: Vec<Option<(K, V)>>,
}

impl<K, V> Iterator for IntoIter<K, V> {
    type Item = (K, V);

    fn next(&mut self) -> Option<(K, V)> {
        self.entries[self.places.next()? as usize].take()
    }
}

/// A set in order. Finding, adding and removing are O(log n).
#[derive(Clone)]
pub(crate) struct OrderedSet<K>(OrderedMap<K, ()>);

impl<K> Default for OrderedSet<K> {
    fn default() -> Self {
        Self(OrderedMap::new())
    }
}

impl<K> OrderedSet<K> {
    /// A set of nothing.
    pub(crate) const fn new() -> Self {
        Self(OrderedMap::new())
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All in order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.0.keys()
    }

    /// The least.
    pub(crate) fn first(&self) -> Option<&K> {
        self.0.first().map(|(key, ())| key)
    }
}

impl<K: Key> OrderedSet<K> {
    /// Whether the set has this.
    pub(crate) fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// What the set has within a range, in order.
    pub(crate) fn range(&self, range: impl RangeBounds<K>) -> impl DoubleEndedIterator<Item = &K> {
        self.0.range(range).map(|(key, ())| key)
    }

    /// Adds to the set. Returns whether it is new there.
    pub(crate) fn insert(&mut self, key: K) -> bool {
        self.0.insert(key, ()).is_none()
    }

    /// Takes everything out.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes the least out of the set.
    pub(crate) fn pop_first(&mut self) -> Option<K> {
        self.0.pop_first().map(|(key, ())| key)
    }

    /// Takes out of the set. Returns whether it was there.
    pub(crate) fn remove(&mut self, key: &K) -> bool {
        self.0.remove(key).is_some()
    }
}

impl<K: std::fmt::Debug> std::fmt::Debug for OrderedSet<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut set = out.debug_set();
        for (key, ()) in &self.0 {
            set.entry(key);
        }
        set.finish()
    }
}

impl<'a, K> IntoIterator for &'a OrderedSet<K> {
    type Item = &'a K;
    type IntoIter = std::iter::Map<Iter<'a, K, ()>, fn((&'a K, &'a ())) -> &'a K>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(|(key, ())| key)
    }
}

impl<K: Key> FromIterator<K> for OrderedSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut set = Self::new();
        set.extend(keys);
        set
    }
}

impl<K: Key> Extend<K> for OrderedSet<K> {
    fn extend<I: IntoIterator<Item = K>>(&mut self, keys: I) {
        keys.into_iter().for_each(|key| {
            self.insert(key);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_map_does_what_the_standard_one_does(steps in prop::collection::vec((0..64u8, 0..24u32, any::<u16>()), 0..200)) {
            let (mut map, mut model) = (OrderedMap::new(), BTreeMap::new());
            for (kind, key, value) in steps {
                match kind {
                    0..30 => prop_assert_eq!(map.insert(key, value), model.insert(key, value)),
                    30..48 => prop_assert_eq!(map.remove(&key), model.remove(&key)),
                    48..55 => prop_assert_eq!(map.or_insert_with(key, || value), model.entry(key).or_insert(value)),
                    55..63 if value % 2 == 0 => prop_assert_eq!(map.pop_first(), model.pop_first()),
                    55..63 => {
                        let first = model.first_entry().filter(|entry| *entry.key() <= key);
                        prop_assert_eq!(map.pop_through(&key), first.map(|entry| entry.remove_entry()));
                    }
                    _ => {
                        map.clear();
                        model.clear();
                    }
                }
                prop_assert_eq!(map.len(), model.len());
                prop_assert_eq!(map.is_empty(), model.is_empty());
                prop_assert_eq!(map.get(&key), model.get(&key));
                prop_assert_eq!(map.get_mut(&key), model.get_mut(&key));
                prop_assert_eq!(map.contains_key(&key), model.contains_key(&key));
                prop_assert_eq!(map.first(), model.first_key_value());
                prop_assert!(map.iter().eq(&model) && map.iter().rev().eq(model.iter().rev()));
                prop_assert!(map.range(key..).eq(model.range(key..)) && map.range(..=key).eq(model.range(..=key)));
                prop_assert!(map.keys().eq(model.keys()) && map.values().eq(model.values()));
                prop_assert!(map.iter_mut().eq(model.iter_mut()));
                prop_assert_eq!(map.at_most_mut(&key), model.range_mut(..=key).next_back());
                prop_assert!(map.entries.len() <= 24, "places are used again");
            }
            prop_assert_eq!(format!("{map:?}"), format!("{model:?}"));
            prop_assert!(map.clone().into_iter().eq(model));
        }

        #[test]
        fn a_set_does_what_the_standard_one_does(steps in prop::collection::vec((any::<bool>(), 0..3u32, 0..4u32), 0..60)) {
            let (mut set, mut model) = (OrderedSet::new(), BTreeSet::new());
            for (add, first, second) in steps {
                let key = (first, second);
                if add {
                    prop_assert_eq!(set.insert(key), model.insert(key));
                } else {
                    prop_assert_eq!(set.remove(&key), model.remove(&key));
                }
                prop_assert_eq!(set.contains(&key), model.contains(&key));
                prop_assert_eq!((set.len(), set.is_empty(), set.first()), (model.len(), model.is_empty(), model.first()));
                prop_assert!(set.iter().eq(&model));
            }
            prop_assert_eq!(format!("{set:?}"), format!("{model:?}"));
            prop_assert!(set.iter().copied().collect::<OrderedSet<_>>().iter().eq(&model));
        }
    }
}
