//! Meaning of the machine's containers in a snapshot.
//!
//! The position of a container on the stack shows the current part of the snapshot: a pickle is built from the outside in, so the
//! outermost dictionary is at the bottom, above it a key, above that the current value.

use super::store::{Object, Pairs, Value, last_of};
use super::{Assembly, Part};
use crate::formats::foreign::timeline;
use crate::formats::words::{RawEvent, Word};
use crate::formats::{
    Action, HostEvent, HostMemory, HostSegment, Origin, ReadError, Segment, SegmentBlock, SegmentPool, StackId,
};
use crate::steps;
use vramlab_policies::contract::BlockState;

/// Takes one item of a list of the outermost dictionary.
type Taker<'a, 'b> = fn(&mut Assembly<'a, 'b>, Value) -> Result<(), ReadError>;

impl<'a, 'b> Assembly<'a, 'b> {
    /// Records that the next container is the value of a key of the outermost dictionary.
    ///
    /// # Errors
    /// The key is that of a timeline, which may be large.
    pub(in crate::formats) fn enter_part(&mut self) -> Result<(), ReadError> {
        let at = self.stack.len();
        let outermost = self.marks.len() <= 1 && at >= 2 && at.is_multiple_of(2);
        if !outermost || self.marks.first().is_some_and(|mark| *mark != 1) {
            return Ok(());
        }
        let Value::Word(key) = self.stack[at - 1] else { return Ok(()) };
        let known = matches!(key, Word::DeviceTraces | Word::AllocatorSettings) || Self::taker(key).is_some();
        if known && self.is_key_position(at - 1) {
            self.part = Some(Part { key, at, keys_until: at + 1 });
        }
        if key == Word::TraceEvents && self.part.is_none() { Err(timeline()) } else { Ok(()) }
    }

    /// Whether only complete pairs are between the current part, if there is one, and the key at `key`.
    ///
    /// A value that was identified as a key is not examined again until it leaves the stack, so all calls together cost no more
    /// than the pushes.
    fn is_key_position(&mut self, key: usize) -> bool {
        let Some(part) = &mut self.part else { return true };
        if self.marks.len() != 1 || part.at >= key {
            return false;
        }
        while part.keys_until < key && matches!(self.stack[part.keys_until], Value::Word(_) | Value::Text(_)) {
            steps::count(1);
            part.keys_until += 2;
        }
        part.keys_until >= key
    }

    /// Whether the next container is skipped.
    pub(in crate::formats) fn is_opaque_here(&self) -> bool {
        let Some(last) = self.stack.last() else { return false };
        let inside = |key: Word| self.part.is_some_and(|part| part.key == key && part.at < self.stack.len());
        match last {
            Value::Word(word) if word.is_opaque() || word.is_pool_key() => true,
            Value::Opaque => true,
            Value::Text(_) | Value::LostText => {
                let key = self.part.filter(|part| part.at < self.stack.len()).map(|part| part.key);
                key.is_some_and(|key| key == Word::DeviceTraces || Self::taker(key).is_some())
            }
            // An annotation follows the list or another annotation.
            Value::Object(_) if self.receiver.wants_origins => false,
            _ => inside(Word::ExternalAnnotations),
        }
    }

    /// The function for items of a list of the outermost dictionary, if items are processed one by one.
    pub(in crate::formats) fn taker(list: Word) -> Option<Taker<'a, 'b>> {
        Some(match list {
            Word::Segments => Self::take_segment,
            Word::HostSegments => Self::take_host_segment,
            Word::HostTraces => Self::take_host_event,
            Word::ExternalAnnotations => Self::take_annotation,
            _ => return None,
        })
    }

    /// Appends the values above `from` to the list below them, or processes them if that list is known.
    pub(in crate::formats) fn append(&mut self, from: usize) -> Result<(), ReadError> {
        let target = self.container_below(from)?;
        let list = self.stack[target];
        match list {
            Value::Opaque => {
                // Python writes a pair from JSON as a list.
                if let Some(name) = self.pool_name(target, from) {
                    self.stack[target] = name;
                }
                self.cut(from);
                return Ok(());
            }
            Value::Stack(stack) => {
                self.append_frames(stack, from)?;
                self.cut(from);
                return Ok(());
            }
            _ => {}
        }
        if self.store.as_list(list).is_none() {
            return Err(self.content("items are appended to a value that is not a list; the file is damaged"));
        }
        match self.part {
            Some(part) if part.at == target => match (part.key, Self::taker(part.key)) {
                (_, Some(take)) => {
                    for at in from..self.stack.len() {
                        take(self, self.stack[at])?;
                    }
                    self.count_passed(list, from);
                }
                (Word::DeviceTraces, _) => {
                    let first = self.passed(list);
                    for (number, at) in (first..).zip(from..self.stack.len()) {
                        self.take_kept_events(self.stack[at], number)?;
                    }
                    self.count_passed(list, from);
                }
                _ => self.keep(from, list)?,
            },
            Some(part) if part.key == Word::DeviceTraces && self.is_trace(part.at, target) => {
                // CAST: a height of the stack.
                let device = self.passed(self.stack[part.at]) + (target - part.at - 1) as u64;
                let device = self.device(device)?;
                for at in from..self.stack.len() {
                    let number = self.passed(list) + (at - from) as u64;
                    self.take_event(self.stack[at], device, number)?;
                }
                self.count_passed(list, from);
            }
            Some(part) if part.key == Word::Segments && self.stack[target - 1] == Value::Word(Word::Blocks) => {
                for at in from..self.stack.len() {
                    let block = self.take_block(self.stack[at])?;
                    let stored = self.store.push_block(list, block);
                    self.within(stored)?;
                }
            }
            _ => self.keep(from, list)?,
        }
        self.cut(from);
        Ok(())
    }

    /// Whether the list at `target` is a device's own within the list at `outer`.
    pub(in crate::formats) fn is_trace(&self, outer: usize, target: usize) -> bool {
        let marked_above = self.marks.last().is_some_and(|mark| *mark > outer + 1);
        !marked_above && (target == outer + 1 || self.store.as_list(self.stack[target - 1]).is_some())
    }

    fn passed(&self, list: Value) -> u64 {
        self.store.as_list(list).map_or(0, |list| list.passed)
    }

    fn count_passed(&mut self, list: Value, from: usize) {
        // CAST: a height of the stack.
        let count = (self.stack.len() - from) as u64;
        if let Some(list) = self.store.as_list_mut(list) {
            list.passed += count;
        }
    }

    fn keep(&mut self, from: usize, list: Value) -> Result<(), ReadError> {
        let stored = self.store.extend(list, &self.stack[from..]);
        self.within(stored)
    }

    fn device(&self, number: u64) -> Result<u16, ReadError> {
        u16::try_from(number).map_err(|_| self.content("there are traces of more than 65,536 devices"))
    }

    /// The pairs of a dictionary, which is dropped.
    fn take_pairs(&mut self, value: Value, part: &str) -> Result<Pairs, ReadError> {
        match self.store.take(value) {
            Some(Object::Dict(pairs)) => {
                steps::count(pairs.len());
                return Ok(pairs);
            }
            None if matches!(value, Value::Object(_)) => {
                return Err(self.content(format!("{part} is a dictionary that occurs twice; write it out each time")));
            }
            _ => {}
        }
        Err(self.content(format!("{part} should be a dictionary, found {}", value.kind())))
    }

    fn take_event(&mut self, value: Value, device: u16, number: u64) -> Result<(), ReadError> {
        let Some(pairs) = self.store.take_dict(value) else {
            return Err(self.content(format!(
                "event {number} of device {device} should be a dictionary of its own, found {}",
                value.kind()
            )));
        };
        let mut raw = RawEvent::default();
        steps::count(pairs.len());
        let is_of_unknown_action = match last_of(&pairs, Word::Action) {
            Some(Value::Word(word)) => word.action().is_none(),
            Some(Value::Text(_) | Value::LostText) => true,
            _ => false,
        };
        if is_of_unknown_action {
            // Of a later version of PyTorch, which alone knows its fields.
            self.origin(&pairs)?;
            let name = last_of(&pairs, Word::Action).and_then(|action| self.store.spelling(action));
            let named = self.summary.count_unknown(name.unwrap_or_default(), &mut self.retained);
            self.store.recycle(pairs);
            return self.within(named);
        }
        let is_oom = last_of(&pairs, Word::Action) == Some(Value::Word(Word::Oom));
        for (key, value) in &pairs {
            let Value::Word(key) = key else { continue };
            let wrong = match key {
                Word::Action => {
                    raw.action = if let Value::Word(word) = value { word.action() } else { None };
                    raw.action.is_none()
                }
                // Absent or None where the device did not tell.
                Word::DeviceFree | Word::Addr if *value == Value::None && is_oom => false,
                Word::DeviceFree => set(&mut raw.device_free, *value),
                Word::Addr => set(&mut raw.addr, *value),
                // A failed request may be of any number, which PyTorch writes as a signed or an unsigned one.
                Word::Size if is_oom => {
                    raw.size = any_size(*value);
                    raw.size.is_none()
                }
                Word::Size => set(&mut raw.size, *value),
                Word::Stream => stream(*value).map(|stream| raw.stream = stream).is_none(),
                Word::TimeUs => time_us(*value).map(|time| raw.time_us = time).is_none(),
                _ => false,
            };
            if wrong {
                return Err(self.content(format!(
                    "'{}' of event {number} of device {device} has an invalid value, {}; the file is damaged",
                    key.name(),
                    value.kind()
                )));
            }
        }
        let pool = last_of(&pairs, Word::PoolId);
        let origin = self.origin(&pairs)?;
        self.store.recycle(pairs);
        match raw.event(device) {
            Ok(event) => {
                self.summary.count(device);
                if let Some(Value::Pair(first, second)) = pool.filter(|_| is_of_segment(event.action)) {
                    let named = SegmentPool {
                        device,
                        event: self.summary.events[usize::from(device)],
                        pool: (u64::from(first), u64::from(second)),
                    };
                    let stored = self.retained.push(&mut self.summary.segment_pools, named);
                    self.within(stored)?;
                }
                self.receiver.take(event, origin)
            }
            Err(field) => {
                Err(self.content(format!("event {number} of device {device} has no '{field}'; the file is damaged")))
            }
        }
    }

    /// A number under a key of a dictionary, if present.
    fn number_in(&self, pairs: &Pairs, key: Word, part: &str) -> Result<Option<u64>, ReadError> {
        let Some(value) = last_of(pairs, key) else { return Ok(None) };
        value.unsigned().map(Some).ok_or_else(|| self.content(format!("'{}' of {part}", key.name())))
    }

    fn take_block(&mut self, value: Value) -> Result<SegmentBlock, ReadError> {
        let pairs = self.take_pairs(value, "a block")?;
        let size_of = |key: Word| self.number_in(&pairs, key, "a block should be a size");
        let (address, size) = (size_of(Word::Address)?.unwrap_or(0), size_of(Word::Size)?);
        let requested_size = size_of(Word::RequestedSize)?.unwrap_or(0);
        let state = last_of(&pairs, Word::State);
        let origin = self.origin(&pairs)?;
        self.store.recycle(pairs);
        let (Some(size), Some(state)) = (size, state) else {
            return Err(self.content("a block has no 'size' or no 'state'"));
        };
        let state = if let Value::Word(word) = state { word.block_state() } else { None };
        let state = state.ok_or_else(|| self.content("a block's 'state' is not one of PyTorch's"))?;
        if state != BlockState::Free && address > 0 && origin != Origin::default() {
            let stored = self.retained.push(&mut self.block_origins, (address, origin));
            self.within(stored)?;
        }
        Ok(SegmentBlock { address, size, requested_size, state })
    }

    fn take_segment(&mut self, value: Value) -> Result<(), ReadError> {
        // PyTorch's profiler exports a timeline of memory as a list of lists.
        if self.is_list && self.store.as_list(value).is_some() {
            return Err(timeline());
        }
        let pairs = self.take_pairs(value, "a segment")?;
        let number = |key: Word| self.number_in(&pairs, key, "a segment should be a number");
        let (device, address, total_size) =
            (number(Word::Device)?.unwrap_or(0), number(Word::Address)?, number(Word::TotalSize)?);
        let stream = last_of(&pairs, Word::Stream).map_or(Some(0), stream);
        let pool_id = match last_of(&pairs, Word::SegmentPoolId) {
            Some(Value::Pair(first, second)) => Some((u64::from(first), u64::from(second))),
            _ => None,
        };
        let segment_type = match last_of(&pairs, Word::SegmentType) {
            Some(Value::Word(word)) => Some(word),
            _ => None,
        };
        let mut segment = Segment {
            device: self.device(device)?,
            stream: stream.ok_or_else(|| self.content("'stream' of a segment is not a stream"))?,
            segment_type: Word::pool(segment_type),
            pool_id,
            is_expandable: last_of(&pairs, Word::IsExpandable) == Some(Value::Bool(true)),
            ..Segment::default()
        };
        if let Some(blocks) = last_of(&pairs, Word::Blocks) {
            segment.blocks = self.take_blocks(blocks)?;
        }
        let origin = self.origin(&pairs)?;
        self.store.recycle(pairs);
        let (Some(address), Some(total_size)) = (address, total_size) else {
            let of_list = if self.is_list { "; a list has to be that of torch.cuda.memory_snapshot()" } else { "" };
            return Err(self.content(format!("a segment has no 'address' or no 'total_size'{of_list}")));
        };
        (segment.address, segment.total_size) = (address, total_size);
        segment.place_blocks();
        let origins = &mut self.receiver.origins;
        let mut stored = origins.set_segment(segment.device, segment.address, origin);
        for (address, origin) in self.block_origins.drain(..) {
            stored = stored.and_then(|()| origins.set_block(segment.device, address, origin));
        }
        self.within(stored)?;
        let stored = self.retained.push(&mut self.summary.segments, segment);
        self.within(stored)
    }

    fn take_host_segment(&mut self, value: Value) -> Result<(), ReadError> {
        let pairs = self.take_pairs(value, "a host segment")?;
        let size_of = |key: Word| self.number_in(&pairs, key, "a host segment should be a size");
        let (total, size) = (size_of(Word::TotalSize)?, size_of(Word::Size)?);
        let (allocated, active) = (size_of(Word::AllocatedSize)?, size_of(Word::ActiveSize)?);
        let state = match last_of(&pairs, Word::State) {
            Some(Value::Word(word)) => word.block_state(),
            _ => None,
        };
        // Its key in Python is not documented; PyTorch's segments of device memory have `address`.
        let addr = [Word::Address, Word::Addr].into_iter().find_map(|key| last_of(&pairs, key)?.unsigned());
        self.store.recycle(pairs);
        let Some(size) = total.or(size) else {
            return Err(self.content("a host segment has no 'total_size'"));
        };
        let active = HostMemory::is_active(active, allocated, state);
        self.summary.host.segment(size, active);
        let segment = HostSegment { addr, bytes: size, active };
        let stored = self.retained.push(&mut self.summary.host_record.segments, segment);
        self.within(stored)
    }

    fn take_host_event(&mut self, value: Value) -> Result<(), ReadError> {
        let pairs = self.take_pairs(value, "an event of host memory")?;
        let size = self.number_in(&pairs, Word::Size, "an event of host memory should be a size")?;
        let action = match last_of(&pairs, Word::Action) {
            Some(Value::Word(word)) => word.action(),
            _ => None,
        };
        let addr = last_of(&pairs, Word::Addr).and_then(|value| value.unsigned());
        let time_us = last_of(&pairs, Word::TimeUs).and_then(|value| value.unsigned());
        let stack = if self.receiver.wants_origins { self.origin(&pairs)?.stack } else { StackId::default() };
        self.store.recycle(pairs);
        self.summary.host.event(action, size.unwrap_or(0));
        // An event without an address tells only the totals.
        let (Some(action), Some(addr), Some(bytes)) = (action, addr, size) else { return Ok(()) };
        let time_ns = time_us.unwrap_or(0).saturating_mul(1000);
        let event = HostEvent { action, addr, bytes, stream: 0, time_ns, stack };
        let stored = self.retained.push(&mut self.summary.host_record.events, event);
        self.within(stored)
    }

    fn take_blocks(&mut self, value: Value) -> Result<Vec<SegmentBlock>, ReadError> {
        let Some(Object::List(list)) = self.store.take(value) else {
            return Err(self.content("'blocks' of a segment should be a list of its own"));
        };
        let mut blocks = list.blocks;
        let mut stored = self.store.hand_over(&blocks, &mut self.retained);
        for item in &list.items {
            let block = self.take_block(*item)?;
            stored = stored.and_then(|()| self.retained.push(&mut blocks, block));
        }
        self.store.release(list.items);
        self.within(stored)?;
        Ok(blocks)
    }

    /// Passes on the events of a list that was built before it was known to be a device's.
    fn take_kept_events(&mut self, list: Value, device: u64) -> Result<(), ReadError> {
        let device = self.device(device)?;
        let Some(items) = self.store.take_items(list) else {
            return Err(self.content(format!("the trace of device {device} should be a list, found {}", list.kind())));
        };
        for (number, item) in (0..).zip(&items) {
            self.take_event(*item, device, number)?;
        }
        self.store.release(items);
        // A device without events counts as a device.
        self.summary.has_device(device);
        Ok(())
    }

    /// Interprets the remaining value when the program ends.
    pub(in crate::formats) fn finish(&mut self, top: Value) -> Result<(), ReadError> {
        if self.is_list && self.store.as_list(top).is_some() {
            return self.finish_list();
        }
        let Some(pairs) = self.store.take_dict(top) else {
            return Err(self.content(format!("the file contains {}, not a snapshot", top.kind())));
        };
        let mut traced = false;
        steps::count(pairs.len());
        for (key, value) in &pairs {
            let Value::Word(key) = key else { continue };
            match key {
                Word::DeviceTraces => {
                    traced = true;
                    let lists = self.take_items(*value, *key)?;
                    for (device, list) in (0..).zip(&lists) {
                        self.take_kept_events(*list, device)?;
                    }
                    self.store.release(lists);
                }
                Word::AllocatorSettings => self.take_settings(*value)?,
                key => {
                    let Some(take) = Self::taker(*key) else { continue };
                    let items = self.take_items(*value, *key)?;
                    for item in &items {
                        take(self, *item)?;
                    }
                    self.store.release(items);
                }
            }
        }
        if !traced && !self.summary.segments.is_empty() {
            return self.finish_list();
        }
        if !traced {
            return Err(self.content("the snapshot has no 'device_traces'; it is not a snapshot, or was edited"));
        }
        Ok(())
    }

    /// A list of segments has no events, but its devices count as devices.
    fn finish_list(&mut self) -> Result<(), ReadError> {
        let Some(last) = self.summary.segments.iter().map(|segment| segment.device).max() else {
            return Err(self.content(
                "the list is empty: dump torch.cuda.memory._snapshot(), or torch.cuda.memory_snapshot() while memory is reserved",
            ));
        };
        self.summary.has_device(last);
        Ok(())
    }

    /// The unprocessed items of a list; to be released.
    fn take_items(&mut self, list: Value, key: Word) -> Result<Vec<Value>, ReadError> {
        let items = self.store.take_items(list);
        let of = if key == Word::DeviceTraces { " with one list of events for each device" } else { "" };
        items.ok_or_else(|| self.content(format!("'{key}' should be a list{of}, found {}", list.kind())))
    }
}

/// Whether the action allocates, maps, unmaps or releases a segment.
fn is_of_segment(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentFree | Action::SegmentMap | Action::SegmentUnmap)
}

/// Sets a field; returns whether the value is invalid.
fn set(field: &mut Option<u64>, value: Value) -> bool {
    *field = value.unsigned();
    field.is_none()
}

/// A time; 0 where it is not recorded. Programs that edit snapshots write numbers as floats.
fn time_us(value: Value) -> Option<u64> {
    match value {
        Value::None | Value::Int(..0) => Some(0),
        // CAST: saturates; microseconds since 1970 are below 2^53.
        Value::Float(time) => Some(time as u64),
        value => value.unsigned(),
    }
}

/// The size of a failed request, which may be negative.
fn any_size(value: Value) -> Option<u64> {
    if value == Value::Huge { Some(u64::MAX) } else { stream(value) }
}

/// Stream handles are pointers, which may be negative as signed integers.
fn stream(value: Value) -> Option<u64> {
    match value {
        // CAST: the same 64 bits.
        Value::Int(value) => Some(value as u64),
        Value::Uint(value) => Some(value),
        _ => None,
    }
}
