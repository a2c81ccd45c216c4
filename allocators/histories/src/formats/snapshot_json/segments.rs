//! What was held when the snapshot was taken, on the device and of the host.

use super::origins::{Handle, Name, Seed, Stack, State};
use crate::formats::summary::{DEEPEST, Room, entry_cost};
use crate::formats::words::Word;
use crate::formats::{HostMemory, Origin, Segment, SegmentBlock, StackId};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use vramlab_device::budget::{Claim, OverBudget};
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

// The allocator's settings, which are kept as they are.

/// What the settings of a file may take, and what refused it.
pub(super) struct Keep<'a> {
    pub(super) room: &'a mut Room,
    pub(super) claim: &'a mut Claim,
    pub(super) over: &'a mut Option<OverBudget>,
}

impl Keep<'_> {
    fn within<T, E: Error>(&mut self, claimed: Result<T, OverBudget>) -> Result<T, E> {
        claimed.map_err(|over| {
            *self.over = Some(over);
            E::custom("too large")
        })
    }

    fn text<E: Error>(&mut self, text: &str) -> Result<Option<String>, E> {
        let kept = self.room.take_text(text, self.claim);
        self.within(kept)
    }
}

/// A value at a depth. What there is no room for is `null`.
pub(super) struct Node<'k, 'a> {
    keep: &'k mut Keep<'a>,
    depth: usize,
}

impl<'k, 'a> Node<'k, 'a> {
    pub(super) fn outermost(keep: &'k mut Keep<'a>) -> Self {
        Self { keep, depth: DEEPEST }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if !self.keep.room.take_node() || self.depth == 0 {
            return IgnoredAny::deserialize(deserializer).map(|_| Value::Null);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Value;

    expecting!("a setting");

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(self.keep.text(text)?.map_or(Value::Null, Value::String))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Node { keep: self.keep, depth: self.depth - 1 })? {
            let grown = self.keep.claim.push(&mut items, item);
            self.keep.within(grown)?;
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = map.next_key_seed(Seed::Any(Key(self.keep)))? {
            let Some(key) = key else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let claimed = self.keep.claim.add(entry_cost(out.len()));
            self.keep.within(claimed)?;
            out.insert(key, map.next_value_seed(Node { keep: self.keep, depth: self.depth - 1 })?);
        }
        Ok(Value::Object(out))
    }
}

/// A key, if there is room for it.
struct Key<'k, 'a>(&'k mut Keep<'a>);

impl Visitor<'_> for Key<'_, '_> {
    type Value = Option<String>;

    expecting!("a setting's name");

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.0.text(text)
    }
}
