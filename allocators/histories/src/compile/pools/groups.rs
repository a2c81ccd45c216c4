//! Groups segments of one pool, and assigns pools to the groups.

use super::DEFAULT;
use super::evidence::{Evidence, Region, ReleasedPart, Returned};
use super::order::{Labels, Pools};
use std::collections::{BTreeMap, BTreeSet};

/// Segments that are taken for one pool's.
#[derive(Clone, Debug)]
struct Group {
    regions: Vec<u32>,
    name: Option<(u64, u64)>,
    /// Whether it cannot be the default pool.
    private: bool,
    /// Releases of its segments, with the run in each.
    released: BTreeMap<u32, u32>,
    /// Releases that retained a free segment of it; true if all free and released segments were released.
    retained: BTreeMap<u32, bool>,
    first: u32,
    last: u32,
}

impl Group {
    fn is_private(&self) -> bool {
        self.private || self.name.is_some_and(|name| name != DEFAULT)
    }

    fn is_default(&self) -> bool {
        self.name == Some(DEFAULT)
    }
}

/// Groups so far.
struct Grouping<'a> {
    evidence: &'a Evidence<'a>,
    /// For each segment, those of other pools.
    different: Vec<Vec<u32>>,
    groups: Vec<Option<Group>>,
    of: Vec<usize>,
}

/// Groups segments that a stream uses in turn, most often first, unless evidence contradicts it.
pub(super) fn label(evidence: &Evidence<'_>) -> Labels {
    let mut grouping = Grouping::new(evidence);
    let partial = grouping.take_releases();
    grouping.join_named();
    for (_, releases) in &partial {
        grouping.join_all(releases);
    }
    let mut turns: Vec<((u32, u32), u32)> = evidence.in_turn.iter().map(|(pair, count)| (*pair, *count)).collect();
    turns.sort_unstable_by_key(|(pair, count)| (std::cmp::Reverse(*count), *pair));
    for ((first, second), _) in turns {
        grouping.join(first, second);
    }
    grouping.take_default();
    grouping.take_named();
    let mut pools = Pools::new(evidence, grouping.members(), partial.iter().map(|(op, _)| *op).collect());
    pools.refine();
    pools.number()
}

impl<'a> Grouping<'a> {
    fn new(evidence: &'a Evidence<'a>) -> Self {
        let mut different = vec![Vec::new(); evidence.regions.len()];
        for &(first, second) in &evidence.different {
            different[first as usize].push(second);
            different[second as usize].push(first);
        }
        let alone = |(number, region): (u32, &Region)| {
            let (released, retained) = (BTreeMap::new(), BTreeMap::new());
            let Region { name, first, last, .. } = *region;
            Some(Group { regions: vec![number], name, private: false, released, retained, first, last })
        };
        let groups = (0u32..).zip(&evidence.regions).map(alone).collect();
        Self { evidence, different, groups, of: (0..evidence.regions.len()).collect() }
    }

    fn group(&self, region: u32) -> Option<&Group> {
        self.groups[self.of[region as usize]].as_ref()
    }

    fn group_mut(&mut self, region: u32) -> Option<&mut Group> {
        self.groups[self.of[region as usize]].as_mut()
    }

    /// Records the released and retained segments of each release. Returns the operations that released only memory of one
    /// private pool, and that memory: a free segment of the default pool was retained.
    fn take_releases(&mut self) -> Vec<(u32, Vec<u32>)> {
        let evidence = self.evidence;
        let mut partial = Vec::new();
        // A released private pool serves no more requests, so a range that does is the default pool's.
        let asked_again =
            |release: &Returned, released: &ReleasedPart| evidence.regions[released.region as usize].last > release.op;
        let default: BTreeSet<u32> = (evidence.releases.iter())
            .flat_map(|release| {
                release
                    .released
                    .iter()
                    .filter(|released| asked_again(release, released))
                    .map(|released| released.region)
            })
            .collect();
        let is_default =
            |region: &u32| evidence.regions[*region as usize].name == Some(DEFAULT) || default.contains(region);
        for release in &evidence.releases {
            let of_one_pool = release.trim && release.retained.iter().any(is_default);
            for released in &release.released {
                let Some(group) = self.group_mut(released.region) else { continue };
                group.private |= (of_one_pool || released.private) && !is_default(&released.region);
                group.released.insert(release.op, released.run);
            }
            for region in &release.retained {
                let Some(group) = self.group_mut(*region) else { continue };
                // A release of the default pool retains none of its free segments.
                group.private |= release.trim && !of_one_pool;
                group.retained.insert(release.op, release.trim && !of_one_pool);
            }
            if of_one_pool {
                partial.push((release.op, release.released.iter().map(|released| released.region).collect()));
            }
        }
        partial
    }

    fn join_named(&mut self) {
        let mut known: BTreeMap<(u64, u64), u32> = BTreeMap::new();
        for (number, region) in (0u32..).zip(&self.evidence.regions) {
            let Some(name) = region.name else { continue };
            match known.get(&name) {
                Some(&first) => self.merge(first, number),
                None => {
                    known.insert(name, number);
                }
            }
        }
    }

    fn join_all(&mut self, regions: &[u32]) {
        for pair in regions.windows(2) {
            self.join(pair[0], pair[1]);
        }
    }

    /// Merges the groups of two segments, unless evidence contradicts it.
    fn join(&mut self, first: u32, second: u32) {
        if self.of[first as usize] != self.of[second as usize] && self.fits(first, second) {
            self.merge(first, second);
        }
    }

    fn fits(&self, first: u32, second: u32) -> bool {
        let (Some(a), Some(b)) = (self.group(first), self.group(second)) else { return false };
        let same_name = a.name.is_none() || b.name.is_none() || a.name == b.name;
        let clash = a.is_private() && b.is_default() || b.is_private() && a.is_default();
        let stays = |first: &Group, other: &Group| first.released.keys().any(|op| other.retained.contains_key(op));
        let works =
            self.evidence.effort.take(1 + a.released.len() + a.retained.len() + b.released.len() + b.retained.len());
        if !works || !same_name || clash || stays(a, b) || stays(b, a) {
            return false;
        }
        // A released private pool serves no more requests, and is released in one run.
        if !a.is_default() && !b.is_default() {
            let released = a.released.keys().next().into_iter().chain(b.released.keys().next()).min();
            let full = a.retained.iter().chain(&b.retained).filter(|(_, full)| **full).map(|(op, _)| *op).max();
            let together = a.released.iter().all(|(op, run)| b.released.get(op).is_none_or(|other| other == run));
            if !together || released.is_some_and(|released| *released <= a.last.max(b.last).max(full.unwrap_or(0))) {
                return false;
            }
        }
        let (few, other) = if a.regions.len() < b.regions.len() { (a, second) } else { (b, first) };
        let other = self.of[other as usize];
        few.regions.iter().all(|region| {
            let others = &self.different[*region as usize];
            self.evidence.effort.take(1 + others.len())
                && others.iter().all(|region| self.of[*region as usize] != other)
        })
    }

    fn merge(&mut self, first: u32, second: u32) {
        let (mut into, mut from) = (self.of[first as usize], self.of[second as usize]);
        if into == from {
            return;
        }
        let regions = |at: usize| self.groups[at].as_ref().map_or(0, |group| group.regions.len());
        if regions(into) < regions(from) {
            (into, from) = (from, into);
        }
        let Some(merged) = self.groups[from].take() else { return };
        merged.regions.iter().for_each(|region| self.of[*region as usize] = into);
        if let Some(group) = &mut self.groups[into] {
            group.regions.extend(merged.regions);
            group.name = group.name.or(merged.name);
            group.private |= merged.private;
            group.released.extend(merged.released);
            group.retained.extend(merged.retained);
            (group.first, group.last) = (group.first.min(merged.first), group.last.max(merged.last));
        }
    }

    /// Assigns to the default pool every unnamed group that it may contain, in the order of first use.
    fn take_default(&mut self) {
        let mut nameless: Vec<(u32, u32)> = self
            .groups
            .iter()
            .flatten()
            .filter(|group| group.name.is_none())
            .map(|group| (group.first, group.regions[0]))
            .collect();
        nameless.sort_unstable();
        let default = self.groups.iter().flatten().find(|group| group.is_default());
        let mut default = default.map(|group| group.regions[0]);
        for (_, region) in nameless {
            match default {
                Some(default) => self.join(region, default),
                None => {
                    if let Some(group) = self.group_mut(region).filter(|group| !group.is_private()) {
                        group.name = Some(DEFAULT);
                        default = Some(region);
                    }
                }
            }
        }
    }

    /// Assigns to each named private pool the unnamed groups that it may contain. A program has no more pools than necessary.
    fn take_named(&mut self) {
        let mut named: Vec<((u64, u64), u32)> =
            self.groups.iter().flatten().filter_map(|group| Some((group.name?, group.regions[0]))).collect();
        named.sort_unstable();
        let nameless = self.groups.iter().flatten().filter(|group| group.name.is_none());
        let mut nameless: Vec<(u32, u32)> = nameless.map(|group| (group.first, group.regions[0])).collect();
        nameless.sort_unstable();
        let effort = &self.evidence.effort;
        for (_, region) in nameless.into_iter().take_while(|_| !effort.is_spent()) {
            for (_, pool) in named.iter().filter(|(name, _)| *name != DEFAULT) {
                self.join(region, *pool);
            }
        }
    }

    /// Segments of each pool, by number: the default pool is 0.
    fn members(&self) -> Vec<Vec<u32>> {
        let default = self.groups.iter().flatten().filter(|group| group.is_default());
        let private = self.groups.iter().flatten().filter(|group| !group.is_default());
        let default = default.flat_map(|group| group.regions.iter().copied()).collect();
        std::iter::once(default).chain(private.map(|group| group.regions.clone())).collect()
    }
}
