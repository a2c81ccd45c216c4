//! Where each block of a history lies.

use super::lifetime::{CrossStream, Lifetime};
use super::overlap::{self, Overlap};
use std::fmt;
use vramlab_policies::backends::plan::PlanTable;

/// Where each block of a history lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Offset of each block in bytes, in the order of the allocations; multiples of [`UNIT`](super::UNIT).
    pub offsets: Vec<u64>,
    /// Bytes that the plan needs.
    pub bytes: u64,
    /// Bytes below which there is no plan.
    pub lower_bound: u64,
    /// Steps that the search made.
    pub steps: u64,
}

impl Plan {
    /// What the plan needs above the bound, as a fraction of the bound.
    #[must_use]
    pub fn gap(&self) -> f64 {
        // CAST: bytes of a device, below 2^53.
        if self.lower_bound == 0 { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }

    /// The plan as the backend [`plan`](mod@vramlab_policies::backends::plan) follows it.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
    #[must_use]
    pub fn table(&self, lifetimes: &[Lifetime]) -> PlanTable {
        assert_eq!(lifetimes.len(), self.offsets.len(), "an offset for each block");
        let blocks = lifetimes.iter().zip(&self.offsets).map(|(one, offset)| (one.requested, one.stream, *offset));
        PlanTable::new(self.bytes, blocks.collect())
    }

    /// Two blocks that conflict and overlap, if there are such: then it is no plan for these lifetimes. O(n · b), where b is
    /// the most blocks that have one byte one after another.
    ///
    /// # Panics
    /// When there are not as many lifetimes as offsets.
    #[must_use]
    pub fn overlap(&self, lifetimes: &[Lifetime], cross: CrossStream) -> Option<Overlap> {
        overlap::find(lifetimes, &self.offsets, cross)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, lower_bound, .. } = self;
        write!(f, "{} bytes, {:.2} % above the bound of {lower_bound}", bytes, 100.0 * self.gap())
    }
}
