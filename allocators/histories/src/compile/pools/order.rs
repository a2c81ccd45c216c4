//! Numbers the pools by the order of releases.

use super::evidence::{Evidence, Region, Returned};
use std::collections::{BTreeMap, BTreeSet};

/// The pool of each segment.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// Number of private pools.
    pub(super) count: u32,
    /// The pool of each segment: 0 for the default pool.
    pub(super) of: Vec<u32>,
    /// Whether each segment could also be of another pool.
    pub(super) undetermined: Vec<bool>,
    /// Operations before which each pool was released.
    pub(super) released: Vec<(u32, u32)>,
    /// Operations that released only a released pool's free memory, with the pool, in order.
    pub(super) trims: Vec<(u32, u32)>,
    /// Operations that released nothing else.
    pub(super) partial: Vec<u32>,
}

/// Releases of a segment, or of all segments of a pool.
#[derive(Clone, Debug, Default)]
struct Returns {
    /// Releases of its segments, with their position.
    released: BTreeMap<u32, usize>,
    /// Releases that retained its free segments; true if all free and released segments were released.
    retained: BTreeMap<u32, bool>,
    /// First and last request.
    first: u32,
    last: u32,
}

impl Returns {
    /// Whether a private pool can have been released in operation `op`: it serves no request from then on, and none of it is
    /// retained later.
    fn may_go(&self, op: u32) -> bool {
        self.last < op && self.retained.range(op..).all(|(at, full)| *at != op && !full)
    }

    fn and(mut self, other: &Self) -> Self {
        self.released.extend(other.released.iter().map(|(op, place)| (*op, *place)));
        self.retained.extend(other.retained.iter().map(|(op, may)| (*op, *may)));
        (self.first, self.last) = (self.first.min(other.first), self.last.max(other.last));
        self
    }

    /// Number of steps to traverse it.
    fn len(&self) -> usize {
        1 + self.released.len() + self.retained.len()
    }
}

/// Segments by pool.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    evidence: &'a Evidence<'a>,
    /// The default pool's segments first.
    members: Vec<Vec<u32>>,
    /// The pool of each segment.
    of: Vec<u32>,
    /// Calls of `empty_cache` for one released pool.
    partial: BTreeSet<u32>,
    /// Operations that released only a private pool's free memory, and the pool's memory, in order.
    trimmed: Vec<(u32, u32)>,
    returns: Vec<Returns>,
}

impl<'a> Pools<'a> {
    pub(super) fn new(evidence: &'a Evidence<'a>, members: Vec<Vec<u32>>, partial: BTreeSet<u32>) -> Self {
        let mut of = vec![0; evidence.regions.len()];
        for (pool, regions) in (0u32..).zip(&members) {
            regions.iter().for_each(|region| of[*region as usize] = pool);
        }
        let returns = |region: &Region| Returns { first: region.first, last: region.last, ..Returns::default() };
        let mut returns: Vec<Returns> = evidence.regions.iter().map(returns).collect();
        for release in &evidence.releases {
            for (place, released) in release.released.iter().enumerate() {
                returns[released.region as usize].released.entry(release.op).or_insert(place);
            }
            for region in &release.retained {
                returns[*region as usize].retained.insert(release.op, !partial.contains(&release.op));
            }
        }
        Self { evidence, members, of, partial, trimmed: Vec::new(), returns }
    }

    fn returns(&self, regions: &[u32]) -> Returns {
        let returns = regions.iter().map(|region| &self.returns[*region as usize]);
        let returns = returns.take_while(|returns| self.evidence.effort.take(returns.len()));
        returns.fold(Returns { first: u32::MAX, ..Returns::default() }, |all, returns| all.and(returns))
    }

    /// Removes segments from a pool whose releases are not those of one pool: before the default pool's, separately from the
    /// pool's others, or while the pool still served requests. Memory of one run is taken for a separate pool.
    pub(super) fn refine(&mut self) {
        let evidence = self.evidence;
        let releases = evidence.releases.iter().filter(|release| release.ordered);
        releases.take_while(|_| !evidence.effort.is_spent()).for_each(|release| self.refine_by(release));
    }

    fn refine_by(&mut self, release: &Returned) {
        let is_named = self.evidence.is_named();
        let first = self.take_trimmed(release);
        let mut private = self.partial.contains(&release.op);
        // The current run, by pool and run, and the pools whose runs have ended.
        let mut under_way = (u32::MAX, 0);
        let mut ended: BTreeSet<u32> = BTreeSet::new();
        let mut may_go: BTreeMap<u32, bool> = BTreeMap::new();
        let mut made: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        for (place, released) in release.released.iter().enumerate() {
            let mut pool = self.of[released.region as usize];
            let returns = || self.returns(&self.members[pool as usize]);
            let wrong = match pool {
                _ if is_named => false,
                0 => private && self.returns[released.region as usize].last < release.op,
                _ if ended.contains(&pool) || under_way.0 == pool && under_way.1 != released.run => true,
                _ => !*may_go.entry(pool).or_insert_with(|| returns().may_go(release.op)),
            };
            if wrong {
                // CAST: no more than segments.
                let next = self.members.len() as u32;
                let new = *made.entry((pool, released.run)).or_insert(next);
                if new == next {
                    self.members.push(Vec::new());
                    may_go.insert(new, true);
                }
                if !self.evidence.effort.take(self.members[pool as usize].len()) {
                    return;
                }
                self.members[pool as usize].retain(|region| *region != released.region);
                self.members[new as usize].push(released.region);
                self.of[released.region as usize] = new;
                pool = new;
            }
            if under_way.0 != pool {
                ended.insert(under_way.0);
            }
            under_way = (pool, released.run);
            private |= pool != 0 && place >= first;
        }
        let trimmed = release.released[..first].iter().map(|released| (release.op, self.of[released.region as usize]));
        self.trimmed.extend(trimmed);
    }

    /// Length of the part of a release that belongs to private pools released one by one: everything before the default pool's,
    /// or all of it if the default pool has no part.
    fn take_trimmed(&self, release: &Returned) -> usize {
        if self.partial.contains(&release.op) {
            return release.released.len();
        }
        let first = release.released.iter().position(|released| self.of[released.region as usize] == 0);
        first.filter(|_| release.trim).unwrap_or(0)
    }

    /// The private pools in an order that is consistent with each release, the earliest first.
    fn in_order(&self) -> Vec<(u32, Returns)> {
        let private = (1u32..).zip(&self.members[1..]).filter(|(_, regions)| !regions.is_empty());
        let mut private: Vec<(u32, Returns)> = private.map(|(pool, regions)| (pool, self.returns(regions))).collect();
        private.sort_by_key(|(_, returns)| {
            let first = returns.released.first_key_value();
            (first.is_none(), first.map(|(op, place)| (*op, *place)), returns.first)
        });
        let rank: BTreeMap<u32, usize> = private.iter().enumerate().map(|(rank, (pool, _))| (*pool, rank)).collect();
        let (mut behind, mut before) = (vec![BTreeSet::new(); private.len()], vec![0u32; private.len()]);
        for release in self.evidence.releases.iter().filter(|release| release.ordered) {
            let pools =
                release.released.iter().filter_map(|released| rank.get(&self.of[released.region as usize]).copied());
            let pools: Vec<usize> = pools.skip(self.take_trimmed(release)).collect();
            for pair in pools.windows(2).filter(|pair| pair[0] != pair[1]) {
                before[pair[1]] += u32::from(behind[pair[0]].insert(pair[1]));
            }
        }
        let mut left: BTreeSet<usize> = (0..private.len()).collect();
        let mut order = Vec::with_capacity(private.len());
        let mut ready: BTreeSet<usize> = left.iter().copied().filter(|rank| before[*rank] == 0).collect();
        // If they contradict each other, the first remaining one.
        while let Some(next) = ready.pop_first().or_else(|| left.first().copied()) {
            ready.remove(&next);
            if !left.remove(&next) {
                continue;
            }
            order.push(private[next].clone());
            for &other in &behind[next] {
                before[other] = before[other].saturating_sub(1);
                if before[other] == 0 && left.contains(&other) {
                    ready.insert(other);
                }
            }
        }
        order
    }

    /// Numbers the private pools. An allocator that releases several together does so by number.
    pub(super) fn number(self) -> Labels {
        let private = self.in_order();
        let mut labels = Labels { of: vec![0; self.evidence.regions.len()], ..Labels::default() };
        for (pool, returns) in &private {
            labels.count += 1;
            self.members[*pool as usize].iter().for_each(|region| labels.of[*region as usize] = labels.count);
            let released = returns.released.keys().next().copied().filter(|op| returns.may_go(*op));
            labels.released.extend(released.map(|op| (op, labels.count)));
        }
        labels.released.sort_unstable();
        let number: BTreeMap<u32, u32> = private.iter().map(|(pool, _)| *pool).zip(1..).collect();
        // A pool is released once.
        let released: BTreeMap<u32, u32> = labels.released.iter().map(|(op, pool)| (*pool, *op)).collect();
        let released = |op: u32, pool: u32| released.get(&pool).is_some_and(|at| *at <= op);
        let trims = self.trimmed.iter().filter_map(|(op, pool)| Some((*op, *number.get(pool)?)));
        labels.trims = trims.filter(|(op, pool)| released(*op, *pool)).collect();
        labels.trims.dedup();
        labels.partial = self.partial.iter().copied().collect();
        let returns: Vec<Returns> = std::iter::once(self.returns(&self.members[0]))
            .chain(private.into_iter().map(|(_, returns)| returns))
            .collect();
        labels.undetermined = self.undetermined(&labels, &returns);
        labels
    }

    /// Which unnamed segments also fit another pool of their stream.
    fn undetermined(&self, labels: &Labels, pools: &[Returns]) -> Vec<bool> {
        let mut of_stream: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for (region, label) in self.evidence.regions.iter().zip(&labels.of) {
            of_stream.entry(region.stream).or_insert_with(|| BTreeSet::from([0])).insert(*label);
        }
        let mut different: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); self.evidence.regions.len()];
        for &(first, second) in &self.evidence.different {
            different[first as usize].insert(labels.of[second as usize]);
            different[second as usize].insert(labels.of[first as usize]);
        }
        let last = |release: &Returned| {
            release
                .released
                .iter()
                .filter(|released| released.private)
                .map(|released| released.region)
                .collect::<Vec<_>>()
        };
        let not_default: BTreeSet<u32> = self.evidence.releases.iter().flat_map(last).collect();
        let fits = |region: usize, label: u32| {
            let (region_returns, pool) = (&self.returns[region], &pools[label as usize]);
            if !self.evidence.effort.take(region_returns.len() + pool.len()) {
                return false;
            }
            let both = region_returns.clone().and(pool);
            // CAST: a number of segments.
            let lives = match label {
                0 => !region_returns.retained.values().any(|full| *full) && !not_default.contains(&(region as u32)),
                _ => both.released.keys().next().is_none_or(|op| both.may_go(*op)),
            };
            lives
                && !different[region].contains(&label)
                && both.released.keys().all(|op| !both.retained.contains_key(op))
        };
        let several = |(number, region): (usize, &Region)| {
            let mut others = of_stream[&region.stream].iter().filter(|label| **label != labels.of[number]);
            region.name.is_none() && others.any(|label| fits(number, *label))
        };
        self.evidence.regions.iter().enumerate().map(several).collect()
    }
}
