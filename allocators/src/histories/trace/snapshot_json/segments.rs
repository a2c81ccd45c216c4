//! What was held when the snapshot was taken.

use super::{Handle, State};
use crate::contract::BlockState;
use crate::histories::trace::{Segment, SegmentBlock, SegmentType};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The list of segments, which are kept.
pub(super) struct Segments<'a, 'r, 's>(pub(super) &'a mut State<'r, 's>);

impl<'de> DeserializeSeed<'de> for Segments<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Segments<'_, '_, '_> {
    type Value = ();

    expecting!("a list of segments");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(segment) = seq.next_element_seed(One(self.0))? {
            let kept = self.0.claim.push(&mut self.0.summary.segments, segment);
            self.0.within(kept)?;
        }
        Ok(())
    }
}

/// One segment.
struct One<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> DeserializeSeed<'de> for One<'_, '_, '_> {
    type Value = Segment;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Segment, D::Error> {
        deserializer.deserialize_map(self)
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Device,
    Address,
    TotalSize,
    Stream,
    SegmentType,
    IsExpandable,
    Blocks,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for One<'_, '_, '_> {
    type Value = Segment;

    expecting!("a segment's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Segment, A::Error> {
        let (mut address, mut total_size, mut blocks) = (None, None, None);
        let mut segment = Segment::default();
        while let Some(key) = map.next_key()? {
            match key {
                Key::Device => segment.device = map.next_value()?,
                Key::Address => address = Some(map.next_value()?),
                Key::TotalSize => total_size = Some(map.next_value()?),
                Key::Stream => segment.stream = map.next_value::<Handle>()?.0,
                Key::SegmentType => segment.segment_type = map.next_value::<Pool>()?.into(),
                Key::IsExpandable => segment.is_expandable = map.next_value()?,
                Key::Blocks if blocks.is_some() => return Err(A::Error::duplicate_field("blocks")),
                Key::Blocks => blocks = Some(map.next_value_seed(Blocks(self.0))?),
                Key::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        segment.address = address.ok_or_else(|| A::Error::missing_field("address"))?;
        segment.total_size = total_size.ok_or_else(|| A::Error::missing_field("total_size"))?;
        segment.blocks = blocks.ok_or_else(|| A::Error::missing_field("blocks"))?;
        segment.place_blocks();
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

/// The blocks of a segment.
struct Blocks<'a, 'r, 's>(&'a mut State<'r, 's>);

impl<'de> DeserializeSeed<'de> for Blocks<'_, '_, '_> {
    type Value = Vec<SegmentBlock>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Blocks<'_, '_, '_> {
    type Value = Vec<SegmentBlock>;

    expecting!("a list of blocks");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut blocks = Vec::new();
        while let Some(fields) = seq.next_element::<BlockFields>()? {
            let kept = self.0.claim.push(&mut blocks, fields.block());
            self.0.within(kept)?;
        }
        Ok(blocks)
    }
}

#[derive(Deserialize)]
struct BlockFields {
    #[serde(default)]
    address: u64,
    size: u64,
    #[serde(default)]
    requested_size: u64,
    state: InBlock,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InBlock {
    ActiveAllocated,
    #[serde(alias = "active_awaiting_free")]
    ActivePendingFree,
    Inactive,
}

impl BlockFields {
    fn block(self) -> SegmentBlock {
        let state = match self.state {
            InBlock::ActiveAllocated => BlockState::Allocated,
            InBlock::ActivePendingFree => BlockState::PendingFree,
            InBlock::Inactive => BlockState::Free,
        };
        SegmentBlock { address: self.address, size: self.size, requested_size: self.requested_size, state }
    }
}
