//! Pools as the order tells in which memory went back, numbered.

use super::evidence::{Evidence, Region, Returned};
use std::collections::{BTreeMap, BTreeSet};

/// Which pool each segment is of.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// Number of private pools.
    pub(super) count: u32,
    /// The pool of each segment: 0 for the default pool.
    pub(super) of: Vec<u32>,
    /// Whether it could be of another one as well.
    pub(super) undetermined: Vec<bool>,
    /// Operations before which a pool was released, by pool.
    pub(super) released: Vec<(u32, u32)>,
    /// Operations in which a released pool's idle memory went by itself, and the pool, in order.
    pub(super) trims: Vec<(u32, u32)>,
    /// Those in which nothing else went.
    pub(super) partial: Vec<u32>,
}

/// What went back of a segment, or of all segments of a pool, and when.
#[derive(Clone, Debug, Default)]
struct Returns {
    /// Releases in which something of it went, and its place there.
    gone: BTreeMap<u32, usize>,
    /// Those in which it was idle and stayed; true where all that was released and idle went.
    stayed: BTreeMap<u32, bool>,
    /// First and last request.
    first: u32,
    last: u32,
}

impl Returns {
    /// Whether a private pool's could go in operation `op`: it is asked for no memory from then on, and nothing of it stays.
    fn may_go(&self, op: u32) -> bool {
        self.last < op && self.stayed.range(op..).all(|(at, full)| *at != op && !full)
    }

    fn and(mut self, other: &Self) -> Self {
        self.gone.extend(other.gone.iter().map(|(op, place)| (*op, *place)));
        self.stayed.extend(other.stayed.iter().map(|(op, may)| (*op, *may)));
        (self.first, self.last) = (self.first.min(other.first), self.last.max(other.last));
        self
    }

    /// Steps that it takes to go through it.
    fn len(&self) -> usize {
        1 + self.gone.len() + self.stayed.len()
    }
}

/// Segments by pool.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    evidence: &'a Evidence<'a>,
    /// The default pool's first.
    members: Vec<Vec<u32>>,
    /// The pool of each segment.
    of: Vec<u32>,
    /// Calls of `empty_cache` that were for one released pool.
    partial: BTreeSet<u32>,
    /// Operations in which a private pool's idle memory went by itself, and the pool's, in order.
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
            for (place, gone) in release.gone.iter().enumerate() {
                returns[gone.region as usize].gone.entry(release.op).or_insert(place);
            }
            for region in &release.stayed {
                returns[*region as usize].stayed.insert(release.op, !partial.contains(&release.op));
            }
        }
        Self { evidence, members, of, partial, trimmed: Vec::new(), returns }
    }

    fn returns(&self, regions: &[u32]) -> Returns {
        let returns = regions.iter().map(|region| &self.returns[*region as usize]);
        let returns = returns.take_while(|returns| self.evidence.effort.take(returns.len()));
        returns.fold(Returns { first: u32::MAX, ..Returns::default() }, |all, returns| all.and(returns))
    }

    /// Takes segments out of a pool that went back other than what is of one pool does: before the default pool's, apart from the
    /// pool's others, or while the pool was still asked for memory. What goes in one run is taken for a pool by itself.
    pub(super) fn refine(&mut self) {
        let evidence = self.evidence;
        let releases = evidence.releases.iter().filter(|release| release.ordered);
        releases.take_while(|_| !evidence.effort.is_spent()).for_each(|release| self.refine_by(release));
    }

    fn refine_by(&mut self, release: &Returned) {
        let first = self.take_trimmed(release);
        let mut private = self.partial.contains(&release.op);
        // The part that is under way, by pool and run, and the pools whose parts have ended.
        let mut under_way = (u32::MAX, 0);
        let mut ended: BTreeSet<u32> = BTreeSet::new();
        let mut may_go: BTreeMap<u32, bool> = BTreeMap::new();
        let mut made: BTreeMap<(u32, u32), u32> = BTreeMap::new();
        for (place, gone) in release.gone.iter().enumerate() {
            let mut pool = self.of[gone.region as usize];
            let returns = || self.returns(&self.members[pool as usize]);
            let wrong = match pool {
                0 => private && self.returns[gone.region as usize].last < release.op,
                _ if ended.contains(&pool) || under_way.0 == pool && under_way.1 != gone.run => true,
                _ => !*may_go.entry(pool).or_insert_with(|| returns().may_go(release.op)),
            };
            if wrong {
                // CAST: no more than segments.
                let next = self.members.len() as u32;
                let new = *made.entry((pool, gone.run)).or_insert(next);
                if new == next {
                    self.members.push(Vec::new());
                    may_go.insert(new, true);
                }
                if !self.evidence.effort.take(self.members[pool as usize].len()) {
                    return;
                }
                self.members[pool as usize].retain(|region| *region != gone.region);
                self.members[new as usize].push(gone.region);
                self.of[gone.region as usize] = new;
                pool = new;
            }
            if under_way.0 != pool {
                ended.insert(under_way.0);
            }
            under_way = (pool, gone.run);
            private |= pool != 0 && place >= first;
        }
        let trimmed = release.gone[..first].iter().map(|gone| (release.op, self.of[gone.region as usize]));
        self.trimmed.extend(trimmed);
    }

    /// How much of a release is private pools' that the client gave back one by one: all that went before the default pool's, or
    /// everything where nothing of that did.
    fn take_trimmed(&self, release: &Returned) -> usize {
        if self.partial.contains(&release.op) {
            return release.gone.len();
        }
        let first = release.gone.iter().position(|gone| self.of[gone.region as usize] == 0);
        first.filter(|_| release.trim).unwrap_or(0)
    }

    /// The private pools in an order in which each release went through them, those first that went first.
    fn in_order(&self) -> Vec<(u32, Returns)> {
        let private = (1u32..).zip(&self.members[1..]).filter(|(_, regions)| !regions.is_empty());
        let mut private: Vec<(u32, Returns)> = private.map(|(pool, regions)| (pool, self.returns(regions))).collect();
        private.sort_by_key(|(_, returns)| {
            let first = returns.gone.first_key_value();
            (first.is_none(), first.map(|(op, place)| (*op, *place)), returns.first)
        });
        let rank: BTreeMap<u32, usize> = private.iter().enumerate().map(|(rank, (pool, _))| (*pool, rank)).collect();
        let (mut behind, mut before) = (vec![BTreeSet::new(); private.len()], vec![0u32; private.len()]);
        for release in self.evidence.releases.iter().filter(|release| release.ordered) {
            let pools = release.gone.iter().filter_map(|gone| rank.get(&self.of[gone.region as usize]).copied());
            let pools: Vec<usize> = pools.skip(self.take_trimmed(release)).collect();
            for pair in pools.windows(2).filter(|pair| pair[0] != pair[1]) {
                before[pair[1]] += u32::from(behind[pair[0]].insert(pair[1]));
            }
        }
        let mut left: BTreeSet<usize> = (0..private.len()).collect();
        let mut order = Vec::with_capacity(private.len());
        let mut ready: BTreeSet<usize> = left.iter().copied().filter(|rank| before[*rank] == 0).collect();
        // Where they contradict each other, the first that is left.
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

    /// Numbers the private pools. An allocator that gives back several at once does so by number.
    pub(super) fn number(self) -> Labels {
        let private = self.in_order();
        let mut labels = Labels { of: vec![0; self.evidence.regions.len()], ..Labels::default() };
        for (pool, returns) in &private {
            labels.count += 1;
            self.members[*pool as usize].iter().for_each(|region| labels.of[*region as usize] = labels.count);
            let released = returns.gone.keys().next().copied().filter(|op| returns.may_go(*op));
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

    /// Which segments without a name fit another pool of their stream, too.
    fn undetermined(&self, labels: &Labels, pools: &[Returns]) -> Vec<bool> {
        let mut of_stream: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for (region, label) in self.evidence.regions.iter().zip(&labels.of) {
            of_stream.entry(region.stream).or_insert_with(|| BTreeSet::from([0])).insert(*label);
        }
        let mut apart: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); self.evidence.regions.len()];
        for &(first, second) in &self.evidence.apart {
            apart[first as usize].insert(labels.of[second as usize]);
            apart[second as usize].insert(labels.of[first as usize]);
        }
        let last = |release: &Returned| {
            release.gone.iter().filter(|gone| gone.private).map(|gone| gone.region).collect::<Vec<_>>()
        };
        let not_default: BTreeSet<u32> = self.evidence.releases.iter().flat_map(last).collect();
        let fits = |region: usize, label: u32| {
            let (own, pool) = (&self.returns[region], &pools[label as usize]);
            if !self.evidence.effort.take(own.len() + pool.len()) {
                return false;
            }
            let both = own.clone().and(pool);
            // CAST: a number of segments.
            let lives = match label {
                0 => !own.stayed.values().any(|full| *full) && !not_default.contains(&(region as u32)),
                _ => both.gone.keys().next().is_none_or(|op| both.may_go(*op)),
            };
            lives && !apart[region].contains(&label) && both.gone.keys().all(|op| !both.stayed.contains_key(op))
        };
        let several = |(number, region): (usize, &Region)| {
            let mut others = of_stream[&region.stream].iter().filter(|label| **label != labels.of[number]);
            region.name.is_none() && others.any(|label| fits(number, *label))
        };
        self.evidence.regions.iter().enumerate().map(several).collect()
    }
}
