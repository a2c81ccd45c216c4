//! What was held when the snapshot was taken.

use super::origins::Stack;
use super::state::{Handle, Seed, State};
use crate::formats::{Origin, Segment, SegmentBlock, SegmentType, StackId};
use serde::Deserialize;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use vramlab_policies::contract::BlockState;

/// The list of segments, which are kept.
pub(super) struct Segments<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl<'de> Visitor<'de> for Segments<'_, '_, '_> {
    type Value = ();

    expecting!("a list of segments");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(segment) = seq.next_element_seed(Seed::Map(One(self.0)))? {
            let kept = self.0.claim.push(&mut self.0.summary.segments, segment);
            self.0.within(kept)?;
        }
        Ok(())
    }
}

/// One segment.
struct One<'a, 'r, 's>(&'a mut State<'r, 's>);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Device,
    Address,
    TotalSize,
    Stream,
    SegmentType,
    SegmentPoolId,
    IsExpandable,
    Blocks,
    Frames,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for One<'_, '_, '_> {
    type Value = Segment;

    expecting!("a segment's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Segment, A::Error> {
        let (mut address, mut total_size, mut blocks) = (None, None, None);
        let (mut segment, mut origin) = (Segment::default(), Origin::default());
        let wanted = self.0.receiver.wants_origins;
        let mut origins = Vec::new();
        while let Some(key) = map.next_key()? {
            match key {
                Key::Device => segment.device = map.next_value()?,
                Key::Address => address = Some(map.next_value()?),
                Key::TotalSize => total_size = Some(map.next_value()?),
                Key::Stream => segment.stream = map.next_value::<Handle>()?.0,
                Key::SegmentType => segment.segment_type = map.next_value::<Pool>()?.into(),
                Key::SegmentPoolId => segment.pool_id = Some(map.next_value()?),
                Key::IsExpandable => segment.is_expandable = map.next_value()?,
                Key::Blocks if blocks.is_some() => return Err(A::Error::duplicate_field("blocks")),
                Key::Blocks => blocks = Some(map.next_value_seed(Seed::List(Blocks(self.0, &mut origins)))?),
                Key::Frames if wanted => origin.stack = map.next_value_seed(Seed::List(Stack(self.0)))?,
                Key::Frames | Key::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        segment.address = address.ok_or_else(|| A::Error::missing_field("address"))?;
        segment.total_size = total_size.ok_or_else(|| A::Error::missing_field("total_size"))?;
        segment.blocks = blocks.ok_or_else(|| A::Error::missing_field("blocks"))?;
        segment.place_blocks();
        let mut kept = self.0.receiver.origins.set_segment(segment.device, segment.address, origin);
        for (block, origin) in segment.blocks.iter().zip(&origins).filter(|(block, _)| block.state != BlockState::Free)
        {
            kept = kept.and_then(|()| self.0.receiver.origins.set_block(segment.device, block.address, *origin));
        }
        self.0.claim.free(origins);
        self.0.within(kept)?;
        Ok(segment)
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pool {
    Small,
    #[serde(other)]
    Large,
}

impl From<Pool> for SegmentType {
    fn from(pool: Pool) -> Self {
        match pool {
            Pool::Small => SegmentType::Small,
            Pool::Large => SegmentType::Large,
        }
    }
}

/// The blocks of a segment, and where each came from if that is wanted.
struct Blocks<'a, 'r, 's>(&'a mut State<'r, 's>, &'a mut Vec<Origin>);

impl<'de> Visitor<'de> for Blocks<'_, '_, '_> {
    type Value = Vec<SegmentBlock>;

    expecting!("a list of blocks");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut blocks = Vec::new();
        while let Some((block, stack)) = seq.next_element_seed(Seed::Map(BlockFields(self.0)))? {
            let mut kept = self.0.claim.push(&mut blocks, block);
            if self.0.receiver.wants_origins {
                let origin = Origin { stack, ..Origin::default() };
                kept = kept.and_then(|()| self.0.claim.push(self.1, origin));
            }
            self.0.within(kept)?;
        }
        Ok(blocks)
    }
}

/// A block.
struct BlockFields<'a, 'r, 's>(&'a mut State<'r, 's>);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum BlockKey {
    Address,
    Size,
    RequestedSize,
    State,
    Frames,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for BlockFields<'_, '_, '_> {
    type Value = (SegmentBlock, StackId);

    expecting!("a block's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut block = SegmentBlock { address: 0, size: 0, requested_size: 0, state: BlockState::Free };
        let (mut size, mut state, mut stack) = (None, None, StackId::default());
        while let Some(key) = map.next_key()? {
            match key {
                BlockKey::Address => block.address = map.next_value()?,
                BlockKey::Size => size = Some(map.next_value()?),
                BlockKey::RequestedSize => block.requested_size = map.next_value()?,
                BlockKey::State => state = Some(map.next_value::<InBlock>()?),
                BlockKey::Frames if self.0.receiver.wants_origins => {
                    stack = map.next_value_seed(Seed::List(Stack(self.0)))?
                }
                BlockKey::Frames | BlockKey::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        block.size = size.ok_or_else(|| A::Error::missing_field("size"))?;
        block.state = match state.ok_or_else(|| A::Error::missing_field("state"))? {
            InBlock::ActiveAllocated => BlockState::Allocated,
            InBlock::ActivePendingFree => BlockState::PendingFree,
            InBlock::Inactive => BlockState::Free,
        };
        Ok((block, stack))
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InBlock {
    ActiveAllocated,
    #[serde(alias = "active_awaiting_free")]
    ActivePendingFree,
    Inactive,
}
