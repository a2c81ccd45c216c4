//! Pools as the order tells in which memory went back, numbered.

use super::evidence::{Returned, Walk};
use super::labels::Labels;
use crate::ordered::{OrderedMap, OrderedSet};
use crate::steps;
use std::collections::BTreeSet;

/// What became of a segment, or of all segments of a pool.
#[derive(Clone, Debug, Default)]
struct Course {
    /// Releases in which something of it went, and its place there.
    gone: OrderedMap<u32, usize>,
    /// Those in which it was idle and stayed; true where all that was released and idle went.
    stayed: OrderedMap<u32, bool>,
    /// First and last request.
    first: u32,
    last: u32,
}

impl Course {
    /// Whether a private pool's could go in operation `op`: nobody asks it for memory from then on, and nothing of it stays.
    fn may_go(&self, op: u32) -> bool {
        self.last < op && self.stayed.range(op..).all(|(at, full)| *at != op && !full)
    }

    fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.gone.extend(other.gone.iter().map(|(op, place)| (*op, *place)));
        both.stayed.extend(other.stayed.iter().map(|(op, may)| (*op, *may)));
        (both.first, both.last) = (both.first.min(other.first), both.last.max(other.last));
        both
    }
}

/// Segments by pool.
#[derive(Debug)]
pub(super) struct Pools<'a> {
    walk: &'a Walk<'a>,
    /// The default pool's first.
    members: Vec<Vec<u32>>,
    /// The pool of each segment.
    of: Vec<u32>,
    /// Calls of `empty_cache` that were for one released pool.
    partial: OrderedSet<u32>,
    /// Operations in which a private pool's idle memory went by itself, and the pool's, in order.
    trimmed: Vec<(u32, u32)>,
    courses: Vec<Course>,
}

impl<'a> Pools<'a> {
    pub(super) fn new(walk: &'a Walk<'a>, members: Vec<Vec<u32>>, partial: OrderedSet<u32>) -> Self {
        let mut of = vec![0; walk.units.len()];
        for (pool, units) in (0u32..).zip(&members) {
            units.iter().for_each(|unit| of[*unit as usize] = pool);
        }
        let course = |unit: &super::evidence::Unit| Course { first: unit.first, last: unit.last, ..Course::default() };
        let mut courses: Vec<Course> = walk.units.iter().map(course).collect();
        for release in &walk.releases {
            for (place, gone) in release.gone.iter().enumerate() {
                courses[gone.unit as usize].gone.or_insert_with(release.op, || place);
            }
            for unit in &release.stayed {
                courses[*unit as usize].stayed.insert(release.op, !partial.contains(&release.op));
            }
        }
        Self { walk, members, of, partial, trimmed: Vec::new(), courses }
    }

    fn course(&self, units: &[u32]) -> Course {
        steps::count(units.len());
        let courses = units.iter().map(|unit| &self.courses[*unit as usize]);
        courses.fold(Course { first: u32::MAX, ..Course::default() }, |all, course| all.and(course))
    }

    /// Takes segments out of a pool that went back other than what is of one pool does: before the default pool's, apart from the
    /// pool's others, or while the pool was still asked for memory. What goes in one run is taken for a pool by itself.
    pub(super) fn refine(&mut self) {
        let walk = self.walk;
        walk.releases.iter().filter(|release| release.ordered).for_each(|release| self.refine_by(release));
    }

    fn refine_by(&mut self, release: &Returned) {
        let first = self.take_trimmed(release);
        let mut private = self.partial.contains(&release.op);
        // The part that is under way, by pool and run, and the pools whose parts have ended.
        let mut under_way = (u32::MAX, 0);
        let mut ended: OrderedSet<u32> = OrderedSet::new();
        let mut may_go: OrderedMap<u32, bool> = OrderedMap::new();
        let mut made: OrderedMap<(u32, u32), u32> = OrderedMap::new();
        for (place, gone) in release.gone.iter().enumerate() {
            let mut pool = self.of[gone.unit as usize];
            let course = || self.course(&self.members[pool as usize]);
            let wrong = match pool {
                0 => private && self.courses[gone.unit as usize].last < release.op,
                _ if ended.contains(&pool) || under_way.0 == pool && under_way.1 != gone.run => true,
                _ => !*may_go.or_insert_with(pool, || course().may_go(release.op)),
            };
            if wrong {
                // CAST: no more than segments.
                let next = self.members.len() as u32;
                let new = *made.or_insert_with((pool, gone.run), || next);
                if new == next {
                    self.members.push(Vec::new());
                    may_go.insert(new, true);
                }
                self.members[pool as usize].retain(|unit| *unit != gone.unit);
                self.members[new as usize].push(gone.unit);
                self.of[gone.unit as usize] = new;
                pool = new;
            }
            if under_way.0 != pool {
                ended.insert(under_way.0);
            }
            under_way = (pool, gone.run);
            private |= pool != 0 && place >= first;
        }
        let trimmed = release.gone[..first].iter().map(|gone| (release.op, self.of[gone.unit as usize]));
        self.trimmed.extend(trimmed);
    }

    /// How much of a release is private pools' that the client gave back one by one: all that went before the default pool's, or
    /// everything where nothing of that did.
    fn take_trimmed(&self, release: &Returned) -> usize {
        if self.partial.contains(&release.op) {
            return release.gone.len();
        }
        let first = release.gone.iter().position(|gone| self.of[gone.unit as usize] == 0);
        first.filter(|_| release.trim).unwrap_or(0)
    }

    /// The private pools in an order in which each release went through them, those first that went first.
    fn in_order(&self) -> Vec<(u32, Course)> {
        let private = (1u32..).zip(&self.members[1..]).filter(|(_, units)| !units.is_empty());
        let mut private: Vec<(u32, Course)> = private.map(|(pool, units)| (pool, self.course(units))).collect();
        private.sort_by_key(|(_, course)| {
            let first = course.gone.first();
            (first.is_none(), first.map(|(op, place)| (*op, *place)), course.first)
        });
        let rank: OrderedMap<u32, usize> = private.iter().enumerate().map(|(rank, (pool, _))| (*pool, rank)).collect();
        let (mut behind, mut before) = (vec![BTreeSet::new(); private.len()], vec![0u32; private.len()]);
        for release in self.walk.releases.iter().filter(|release| release.ordered) {
            let pools = release.gone.iter().filter_map(|gone| rank.get(&self.of[gone.unit as usize]).copied());
            let pools: Vec<usize> = pools.skip(self.take_trimmed(release)).collect();
            for pair in pools.windows(2).filter(|pair| pair[0] != pair[1]) {
                before[pair[1]] += u32::from(behind[pair[0]].insert(pair[1]));
            }
        }
        let mut left: OrderedSet<usize> = (0..private.len()).collect();
        let mut order = Vec::with_capacity(private.len());
        let mut ready: OrderedSet<usize> = left.iter().copied().filter(|rank| before[*rank] == 0).collect();
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
        let mut labels = Labels { of: vec![0; self.walk.units.len()], ..Labels::default() };
        for (pool, course) in &private {
            labels.count += 1;
            self.members[*pool as usize].iter().for_each(|unit| labels.of[*unit as usize] = labels.count);
            let released = course.gone.keys().next().copied().filter(|op| course.may_go(*op));
            labels.released.extend(released.map(|op| (op, labels.count)));
        }
        labels.released.sort_unstable();
        let number: OrderedMap<u32, u32> = private.iter().map(|(pool, _)| *pool).zip(1..).collect();
        let released = |op: u32, pool: u32| labels.released.iter().any(|(at, of)| *of == pool && *at <= op);
        let trims = self.trimmed.iter().filter_map(|(op, pool)| Some((*op, *number.get(pool)?)));
        labels.trims = trims.filter(|(op, pool)| released(*op, *pool)).collect();
        labels.trims.dedup();
        labels.partial = self.partial.iter().copied().collect();
        let courses: Vec<Course> = std::iter::once(self.course(&self.members[0]))
            .chain(private.into_iter().map(|(_, course)| course))
            .collect();
        labels.undetermined = self.undetermined(&labels, &courses);
        labels
    }

    /// Which segments without a name fit another pool of their stream, too.
    fn undetermined(&self, labels: &Labels, pools: &[Course]) -> Vec<bool> {
        let mut of_stream: OrderedMap<u64, OrderedSet<u32>> = OrderedMap::new();
        for (unit, label) in self.walk.units.iter().zip(&labels.of) {
            of_stream.or_insert_with(unit.stream, || OrderedSet::from_iter([0])).insert(*label);
        }
        let mut apart: Vec<OrderedSet<u32>> = vec![OrderedSet::new(); self.walk.units.len()];
        for &(first, second) in &self.walk.apart {
            apart[first as usize].insert(labels.of[second as usize]);
            apart[second as usize].insert(labels.of[first as usize]);
        }
        let last = |release: &Returned| {
            release.gone.iter().filter(|gone| gone.private).map(|gone| gone.unit).collect::<Vec<_>>()
        };
        let not_default: OrderedSet<u32> = self.walk.releases.iter().flat_map(last).collect();
        let fits = |unit: usize, label: u32| {
            let (own, pool) = (&self.courses[unit], &pools[label as usize]);
            let both = own.and(pool);
            // CAST: a number of segments.
            let lives = match label {
                0 => !own.stayed.values().any(|full| *full) && !not_default.contains(&(unit as u32)),
                _ => both.gone.keys().next().is_none_or(|op| both.may_go(*op)),
            };
            lives && !apart[unit].contains(&label) && both.gone.keys().all(|op| !both.stayed.contains_key(op))
        };
        let several = |(number, unit): (usize, &super::evidence::Unit)| {
            let mut others = of_stream[&unit.stream].iter().filter(|label| **label != labels.of[number]);
            unit.name.is_none() && others.any(|label| fits(number, *label))
        };
        self.walk.units.iter().enumerate().map(several).collect()
    }
}
