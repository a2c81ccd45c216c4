//! The parts of a persistent kernel: pieces of work, and which of them have to wait for which.

use crate::cuda::{GatherArguments, LinearArguments, LossArguments, PhaseArguments};
use crate::operation::Work;
use crate::plan::{Plan, Product, Tile};
use crate::precision::{Element, Precision};

/// What a phase computes: the enum of the same name in `cuda/persistent.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum PhaseKind {
    GatherU8 = 0,
    GatherF32,
    GatherLabels,
    LossRows,
    LossMean,
    ForwardThin16,
    ForwardThin32,
    InputThin16,
    InputThin32,
    GradientFine,
    GradientFlat,
    GradientSlim,
}

impl PhaseKind {
    /// Tiles that are left out would make the kernel larger, and are for nets that gain nothing from it.
    fn of(product: Product, tile: Tile) -> Option<Self> {
        match (product, tile) {
            (Product::Forward, Tile::Thin16) => Some(Self::ForwardThin16),
            (Product::Forward, Tile::Thin32) => Some(Self::ForwardThin32),
            (Product::Input, Tile::Thin16) => Some(Self::InputThin16),
            (Product::Input, Tile::Thin32) => Some(Self::InputThin32),
            (Product::Gradient | Product::Update, Tile::Fine) => Some(Self::GradientFine),
            (Product::Gradient | Product::Update, Tile::Flat) => Some(Self::GradientFlat),
            (Product::Gradient | Product::Update, Tile::Slim) => Some(Self::GradientSlim),
            _ => None,
        }
    }
}

/// Bytes of memory, as address and length.
type Range = (u64, u64);

/// A piece of the work of [`PersistentSteps`](crate::PersistentSteps): blocks share out its items.
#[derive(Clone)]
pub struct Phase {
    pub(crate) kind: PhaseKind,
    /// Pieces of work that blocks share out.
    pub(crate) items: u32,
    /// Dynamic shared memory that an item needs.
    pub(crate) shared_bytes: u32,
    /// Trips of an item's main loop.
    pub(crate) iterations: u64,
    pub(crate) arguments: PhaseArguments,
    /// Storage that the kernel must be for, if the phase asks for one.
    element: Option<Element>,
    /// The same for how products are computed.
    precision: Option<Precision>,
    reads: Vec<Range>,
    writes: Vec<Range>,
}

/// Items of a phase of the loss for each block of the launch by itself: a quarter of its warps.
const ITEMS_OF_LOSS_BLOCK: u64 = 4;

impl Phase {
    /// `buffers` are written where their address is among `written`, else read.
    fn new(
        kind: PhaseKind,
        items: u64,
        arguments: PhaseArguments,
        buffers: Vec<Range>,
        written: &[u64],
    ) -> Option<Self> {
        let (writes, reads) = buffers.into_iter().partition(|(addr, _)| written.contains(addr));
        let items = u32::try_from(items).ok()?;
        let (element, precision) = (None, None);
        Some(Self { kind, items, shared_bytes: 0, iterations: 1, arguments, element, precision, reads, writes })
    }

    pub(crate) fn linear(plan: &Plan, linear: LinearArguments, buffers: Vec<Range>, written: &[u64]) -> Option<Self> {
        let linear = LinearArguments { splits: plan.splits, ..linear };
        let kind = PhaseKind::of(plan.product, plan.tile)?;
        let phase = Self::new(kind, plan.blocks, PhaseArguments { linear }, buffers, written)?;
        let (shared_bytes, iterations, precision) = (plan.shared_bytes, plan.iterations, Some(plan.precision));
        Some(Self { shared_bytes, iterations, precision, ..phase })
    }

    pub(crate) fn gather(
        kind: PhaseKind,
        work: &Work,
        gather: GatherArguments,
        buffers: Vec<Range>,
        written: &[u64],
    ) -> Option<Self> {
        Self::new(kind, work.blocks, PhaseArguments { gather }, buffers, written)
    }

    pub(crate) fn loss(
        kind: PhaseKind,
        blocks: u64,
        loss: LossArguments,
        buffers: Vec<Range>,
        written: &[u64],
    ) -> Option<Self> {
        let items = if kind == PhaseKind::LossRows { blocks.checked_mul(ITEMS_OF_LOSS_BLOCK)? } else { 1 };
        Self::new(kind, items, PhaseArguments { loss }, buffers, written)
    }

    /// The same for values that are stored so.
    pub(crate) fn stored_as(self, element: Element) -> Self {
        Self { element: Some(element), ..self }
    }

    /// Whether the kernel of a precision can do it.
    pub(crate) fn suits(&self, precision: Precision) -> bool {
        self.precision.is_none_or(|own| own == precision) && self.element.is_none_or(|own| own == precision.element())
    }

    /// Whether the two must not run at the same time.
    fn conflicts(&self, other: &Self) -> bool {
        let meet = |a: &[Range], b: &[Range]| a.iter().any(|a| b.iter().any(|b| overlap(*a, *b)));
        meet(&self.writes, &other.writes) || meet(&self.writes, &other.reads) || meet(&self.reads, &other.writes)
    }
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

impl std::fmt::Debug for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Phase").field("kind", &self.kind).field("items", &self.items).finish_non_exhaustive()
    }
}

/// The phases in an order in which those of a group can run side by side, each in the first group that follows all that it
/// has to wait for.
pub(crate) fn groups(phases: Vec<Phase>) -> Vec<Vec<Phase>> {
    let mut groups: Vec<Vec<Phase>> = Vec::new();
    for phase in phases {
        let after = groups.iter().rposition(|group| group.iter().any(|earlier| earlier.conflicts(&phase)));
        let place = after.map_or(0, |place| place + 1);
        if place == groups.len() {
            groups.push(Vec::new());
        }
        groups[place].push(phase);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(items: u64, reads: &[u64], writes: &[u64]) -> Phase {
        let gather = GatherArguments::default();
        let buffers = reads.iter().chain(writes).map(|addr| (*addr, 16)).collect();
        Phase::new(PhaseKind::GatherU8, items, PhaseArguments { gather }, buffers, writes).unwrap()
    }

    #[test]
    fn a_phase_waits_for_what_it_needs_and_for_nothing_else() {
        let phases = vec![
            phase(0, &[], &[16]),
            phase(1, &[16], &[32]),
            // Writes what phase 1 reads.
            phase(2, &[64], &[16]),
            // Reads beside phase 1.
            phase(3, &[17], &[48]),
            // Needs nothing.
            phase(4, &[64], &[80]),
            // Overlaps the end of what phase 1 writes.
            phase(5, &[], &[47]),
        ];
        let found: Vec<Vec<u32>> =
            groups(phases).iter().map(|group| group.iter().map(|phase| phase.items).collect()).collect();
        assert_eq!(found, [vec![0, 4], vec![1], vec![2], vec![3], vec![5]]);
    }

    #[test]
    fn only_tiles_that_the_kernel_has_are_taken() {
        for product in Product::ALL {
            for &tile in product.tiles() {
                let taken = matches!(tile, Tile::Thin16 | Tile::Thin32 | Tile::Fine | Tile::Flat | Tile::Slim);
                assert_eq!(PhaseKind::of(product, tile).is_some(), taken, "{product:?} {tile:?}");
            }
        }
    }
}
