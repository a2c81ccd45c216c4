//! What was held when the snapshot was taken, on the device and of the host.

use super::origins::Stack;
use super::state::{Handle, Name, Seed, State};
use crate::formats::words::Word;
use crate::formats::{HostMemory, Origin, Segment, SegmentBlock, StackId};
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

impl<'de> Visitor<'de> for One<'_, '_, '_> {
    type Value = Segment;

    expecting!("a segment's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Segment, A::Error> {
        let (mut address, mut total_size, mut blocks) = (None, None, None);
        let (mut segment, mut origin) = (Segment::default(), Origin::default());
        let wanted = self.0.receiver.wants_origins;
        let mut origins = Vec::new();
        while let Some(Name(key)) = map.next_key()? {
            self.0.found(key);
            match key {
                Some(Word::Device) => segment.device = map.next_value()?,
                Some(Word::Address) => address = Some(map.next_value()?),
                Some(Word::TotalSize) => total_size = Some(map.next_value()?),
                Some(Word::Stream) => segment.stream = map.next_value::<Handle>()?.0,
                Some(Word::SegmentType) => segment.segment_type = Word::pool(map.next_value::<Name>()?.0),
                Some(Word::SegmentPoolId) => segment.pool_id = Some(map.next_value()?),
                Some(Word::IsExpandable) => segment.is_expandable = map.next_value()?,
                Some(Word::Blocks) if blocks.is_some() => return Err(A::Error::duplicate_field("blocks")),
                Some(Word::Blocks) => blocks = Some(map.next_value_seed(Seed::List(Blocks(self.0, &mut origins)))?),
                Some(Word::Frames) if wanted => origin.stack = map.next_value_seed(Seed::List(Stack(self.0)))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
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

impl<'de> Visitor<'de> for BlockFields<'_, '_, '_> {
    type Value = (SegmentBlock, StackId);

    expecting!("a block's dictionary");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut block = SegmentBlock { address: 0, size: 0, requested_size: 0, state: BlockState::Free };
        let (mut size, mut state, mut stack) = (None, None, StackId::default());
        while let Some(Name(key)) = map.next_key()? {
            match key {
                Some(Word::Address) => block.address = map.next_value()?,
                Some(Word::Size) => size = Some(map.next_value()?),
                Some(Word::RequestedSize) => block.requested_size = map.next_value()?,
                Some(Word::State) => state = Some(map.next_value::<Name>()?.0.and_then(Word::block_state)),
                Some(Word::Frames) if self.0.receiver.wants_origins => {
                    stack = map.next_value_seed(Seed::List(Stack(self.0)))?
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        block.size = size.ok_or_else(|| A::Error::missing_field("size"))?;
        let state = state.ok_or_else(|| A::Error::missing_field("state"))?;
        block.state = state.ok_or_else(|| A::Error::custom("a block's 'state' is not one of PyTorch's"))?;
        Ok((block, stack))
    }
}

/// The segments at the end, or the events: both are lists of dictionaries.
pub(super) struct Host<'a, 'r, 's> {
    pub(super) state: &'a mut State<'r, 's>,
    pub(super) events: bool,
}

impl<'de> Visitor<'de> for Host<'_, '_, '_> {
    type Value = ();

    expecting!("a list of host memory");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Seed::Map(OneOfHost { state: self.state, events: self.events }))?.is_some() {}
        Ok(())
    }
}

struct OneOfHost<'a, 'r, 's> {
    state: &'a mut State<'r, 's>,
    events: bool,
}

impl<'de> Visitor<'de> for OneOfHost<'_, '_, '_> {
    type Value = ();

    expecting!("a dictionary of host memory");

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut total, mut size, mut allocated, mut active) = (None, None, None, None);
        let (mut action, mut state) = (None, None);
        while let Some(Name(key)) = map.next_key()? {
            self.state.found(key);
            match key {
                Some(Word::TotalSize) => total = Some(map.next_value()?),
                Some(Word::Size) => size = Some(map.next_value()?),
                Some(Word::AllocatedSize) => allocated = Some(map.next_value()?),
                Some(Word::ActiveSize) => active = Some(map.next_value()?),
                Some(Word::Action) => action = map.next_value::<Name>()?.0.and_then(Word::action),
                Some(Word::State) => state = map.next_value::<Name>()?.0.and_then(Word::block_state),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        let host = &mut self.state.summary.host;
        if self.events {
            host.event(action, size.unwrap_or(0));
        } else {
            let size = total.or(size).ok_or_else(|| A::Error::missing_field("total_size"))?;
            host.segment(size, HostMemory::is_active(active, allocated, state));
        }
        Ok(())
    }
}
