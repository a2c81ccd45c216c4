//! What the machine has understood so far.

use crate::formats::receiver::Receiver;
use crate::formats::settings::Room;
use crate::formats::{Format, Origin, Summary};
use vramlab_device::budget::{Budget, Claim};

/// What was understood, and the receiver of the events.
pub(super) struct Outcome<'r, 's> {
    pub(super) receiver: &'r mut Receiver<'s>,
    pub(super) summary: Summary,
    /// For the summary.
    pub(super) claim: Claim,
    /// What the settings may still take.
    pub(super) room: Room,
    /// Where the blocks of the segment under way came from, by address. No more than its list of blocks has.
    pub(super) block_origins: Vec<(u64, Origin)>,
}

impl<'r, 's> Outcome<'r, 's> {
    pub(super) fn new(receiver: &'r mut Receiver<'s>, budget: &Budget) -> Self {
        let summary = Summary::new(Format::SnapshotPickle);
        Self { receiver, summary, claim: budget.claim(), room: Room::default(), block_origins: Vec::new() }
    }

    /// The summary, which stays claimed.
    pub(super) fn into_summary(self) -> Summary {
        self.claim.keep();
        self.summary
    }
}
