//! Pinned memory of the host.

use super::state::{Name, Seed, State};
use crate::formats::HostMemory;
use crate::formats::words::Word;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The segments at the end, or the events: both are lists of dictionaries.
pub(super) struct Host<'a, 'r, 's> {
    pub(super) state: &'a mut State<'r, 's>,
    pub(super) events: bool,
}

impl<'de> Visitor<'de> for Host<'_, '_, '_> {
    type Value = ();

    expecting!("a list of host memory");

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(Seed::Map(One { state: self.state, events: self.events }))?.is_some() {}
        Ok(())
    }
}

struct One<'a, 'r, 's> {
    state: &'a mut State<'r, 's>,
    events: bool,
}

impl<'de> Visitor<'de> for One<'_, '_, '_> {
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
