//! Paths of batches to the device: copied, copied from page-locked memory, or gathered from a resident data set.

use crate::arithmetic::Arithmetic;
use crate::data::{Features, Split};
use crate::device::{OwnedEvent, Role};
use crate::error::Result;
use crate::mlp::Batch;
use crate::pinned::HostBuffer;
use crate::settings::{LoaderMode, PinMode};
use crate::tensor::{Context, Matrix};
use chacha20::ChaCha8Rng;
use kernels::{Element, GatherLabels, GatherRows, SourceElement};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use std::ops::Range;
use vramlab::DeviceBuffer;

/// Page-locked buffers in rotation: while one is being copied, the next is filled. A pool needs no rotation.
const RING: usize = 4;

/// Writes the order of the training rows in one epoch (numbered from 1) to `order`, whose length is their number. The same
/// seed and epoch give the same order.
pub fn shuffled(seed: u64, epoch: u32, order: &mut [u32]) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Weights use the low random streams; each epoch has its own.
    rng.set_stream((1 << 32) + u64::from(epoch));
    for (row, slot) in (0..).zip(order.iter_mut()) {
        *slot = row;
    }
    order.shuffle(&mut rng);
}

/// Yields the batches of one part of the data set.
#[derive(Debug)]
pub struct Loader {
    rows: usize,
    features: usize,
    batch: u32,
    layout: Layout,
    source: Source,
    /// Address of the number of the step on the device, if that decides which batch is next.
    cursor: Option<u64>,
}

/// Storage layout of a batch's inputs.
#[derive(Clone, Copy, Debug)]
struct Layout {
    element: Element,
    pitch: u32,
}

impl Layout {
    /// Bytes from one row to the next.
    fn row_bytes(self) -> usize {
        // CAST: below 2^34.
        (u64::from(self.pitch) * self.element.bytes()) as usize
    }
}

#[derive(Debug)]
enum Source {
    /// Rows are assembled in these vectors; the inputs' bytes lie in words, so that they are aligned.
    Copy {
        inputs: Vec<u32>,
        labels: Vec<u32>,
    },
    Pinned {
        ring: Vec<Slot>,
        next: usize,
    },
    /// A block of pinned memory for each batch.
    Pooled,
    Resident {
        features: DeviceBuffer,
        labels: DeviceBuffer,
        order: Option<DeviceBuffer>,
    },
}

/// A page-locked buffer for one batch: inputs, then labels.
#[derive(Debug)]
struct Slot {
    buffer: HostBuffer,
    /// Recorded behind the copies that read the buffer.
    copied: OwnedEvent,
}

impl Loader {
    /// A loader for `split`, which stays on the host. A resident data set is uploaded here, through the allocator.
    ///
    /// # Errors
    /// Errors of the allocator, of copies and of page-locking memory.
    pub fn new(
        context: &Context,
        split: &Split,
        features: usize,
        batch: u32,
        mode: LoaderMode,
        arithmetic: &Arithmetic,
    ) -> Result<Self> {
        // CAST: features are bounded by the readers, data sets have fewer than 2^32 rows.
        let (pitch, batch) = (arithmetic.pitch(features as u32), batch.min(split.rows as u32));
        let layout = Layout { element: arithmetic.element(), pitch };
        let (rows, row_bytes) = (batch as usize, layout.row_bytes());
        let source = match mode {
            LoaderMode::Copy => Source::Copy { inputs: vec![0; (rows * row_bytes).div_ceil(4)], labels: vec![0; rows] },
            LoaderMode::Pinned if context.device.host_memory().mode() == PinMode::Pooled => Source::Pooled,
            LoaderMode::Pinned => {
                let driver = context.device.driver();
                let slot = || -> Result<Slot> {
                    let buffer = context.device.host_memory().allocate(rows * (row_bytes + 4))?;
                    Ok(Slot { buffer, copied: OwnedEvent::new(&driver, false)? })
                };
                Source::Pinned { ring: (0..RING).map(|_| slot()).collect::<Result<_>>()?, next: 0 }
            }
            LoaderMode::Resident => Source::Resident {
                features: match &split.features {
                    Features::U8 { bytes, .. } => context.upload(bytes)?,
                    Features::F32(values) => context.upload(values)?,
                },
                labels: context.upload(&split.labels)?,
                order: None,
            },
        };
        Ok(Self { rows: split.rows, features, batch, layout, source, cursor: None })
    }

    /// Selects later batches by the device's step number, the u32 at this address. Only for a resident data set.
    pub fn follow(&mut self, cursor: u64) {
        self.cursor = Some(cursor);
    }

    /// Announces the order of the rows for the next pass.
    ///
    /// # Errors
    /// Errors of the allocator and of the copy.
    pub fn begin_pass(&mut self, context: &Context, order: &[u32]) -> Result<()> {
        if let Source::Resident { order: on_device, .. } = &mut self.source {
            // Graphs contain its address, so the buffer is reused.
            if let Some(held) =
                on_device.as_ref().filter(|held| self.cursor.is_some() && held.bytes() >= 4 * order.len() as u64)
            {
                context.write(held, order)?;
                return Ok(());
            }
            // The old buffer is freed first, so that a caching allocator can reuse its block.
            *on_device = None;
            *on_device = Some(context.upload(order)?);
        }
        Ok(())
    }

    /// The rows `order[range]` as a batch.
    ///
    /// # Errors
    /// Errors of the allocator, of copies and of launches.
    ///
    /// # Panics
    /// When `order` differs from the order passed to [`begin_pass`](Self::begin_pass), or contains rows that do not
    /// exist.
    pub fn batch(&mut self, context: &Context, split: &Split, order: &[u32], range: Range<usize>) -> Result<Batch> {
        let _range = context.device.range(format_args!("load"));
        let user = context.device.stream();
        // A graph orders its captured work itself.
        let apart = self.cursor.is_none() && context.device.stream_of(Role::Load) != user;
        let batch = {
            let _on = apart.then(|| context.device.on(Role::Load));
            self.queue(context, split, order, range)?
        };
        if apart {
            context.device.order_streams(context.device.stream_of(Role::Load), user)?;
            // Freed on the stream of the loader, used on another.
            batch.inputs.buffer.record_use(user)?;
            batch.labels.record_use(user)?;
        }
        Ok(batch)
    }

    fn queue(&mut self, context: &Context, split: &Split, order: &[u32], range: Range<usize>) -> Result<Batch> {
        assert!(range.end <= order.len() && order.len() <= self.rows, "a batch should lie inside the pass");
        // CAST: a batch has at most u32::MAX rows by the type of its setting; features are bounded by the readers.
        let (rows, cols) = (range.len() as u32, self.features as u32);
        let Layout { element, pitch } = self.layout;
        let inputs = context.pitched(element, rows, cols, pitch)?;
        let input_bytes = range.len() * self.layout.row_bytes();
        let labels = context.allocate::<u32>(range.len())?;
        let picked = &order[range.clone()];
        match &mut self.source {
            Source::Copy { inputs: host_inputs, labels: host_labels } => {
                let host_inputs = &mut bytemuck::cast_slice_mut(host_inputs)[..input_bytes];
                let host_labels = &mut host_labels[..range.len()];
                fill_rows(split, picked, host_inputs, host_labels, self.features, self.layout);
                context.write::<u8>(&inputs.buffer, host_inputs)?;
                context.write(&labels, host_labels)?;
            }
            Source::Pinned { ring, next } => {
                let slot = &mut ring[*next];
                *next = (*next + 1) % RING;
                let (driver, clock) = (context.device.driver(), context.device.clock());
                let start_ns = clock.now_ns();
                driver.event_synchronize(slot.copied.id)?;
                context.device.host_memory().note_wait(clock.now_ns().saturating_sub(start_ns));
                let rows = Rows { split, picked, features: self.features, layout: self.layout };
                // SAFETY: the buffer is not touched again before `event_synchronize` has seen the event that is recorded behind
                // these copies.
                unsafe { rows.stage(context, &mut slot.buffer, &inputs, &labels)? };
                driver.event_record(slot.copied.id, context.device.stream())?;
            }
            Source::Pooled => {
                let mut buffer = context.device.host_memory().allocate(input_bytes + picked.len() * 4)?;
                let rows = Rows { split, picked, features: self.features, layout: self.layout };
                // SAFETY: the buffer is dropped here, and the pool reuses its block behind these copies.
                unsafe { rows.stage(context, &mut buffer, &inputs, &labels)? };
            }
            Source::Resident { features, labels: all_labels, order: on_device } => {
                let order = on_device.as_ref().expect("a pass should have begun");
                // With a cursor, the device counts its steps, and the range lies in the first batch.
                let cursor = self.cursor;
                let indices = order.addr().get() + 4 * range.start as u64;
                // CAST: data sets have fewer than 2^32 rows, as `order` says.
                let source_rows = self.rows as u32;
                let (source_element, scale, shift) = match split.features {
                    Features::U8 { scale, shift, .. } => (SourceElement::U8, scale, shift),
                    // Adding -0.0 changes no bit of any number; adding 0.0 would make 0.0 of -0.0.
                    Features::F32(_) => (SourceElement::F32, 1.0, -0.0),
                };
                let gather = GatherRows {
                    source_element,
                    element,
                    rows,
                    cols,
                    pitch,
                    source: features.addr().get(),
                    source_rows,
                    indices,
                    batch: self.batch,
                    cursor,
                    scale,
                    shift,
                    out: inputs.addr(),
                };
                let pick = GatherLabels {
                    rows,
                    source: all_labels.addr().get(),
                    source_rows,
                    indices,
                    batch: self.batch,
                    cursor,
                    out: labels.addr().get(),
                };
                // In a graph, labels are gathered in parallel with the rows if another stream is available.
                let device = &context.device;
                let (here, beside) = (device.stream(), device.stream_of(Role::Update));
                if cursor.is_some() && beside != here {
                    device.order_streams(here, beside)?;
                    {
                        let _on = device.on(Role::Update);
                        // SAFETY: data, order and target are live and of these shapes; they are freed on the stream later,
                        // after the other has been waited for.
                        unsafe { device.run(&pick)? };
                    }
                    // SAFETY: as above.
                    unsafe { device.run(&gather)? };
                    device.order_streams(beside, here)?;
                } else {
                    // SAFETY: as above.
                    unsafe { device.run(&gather)? };
                    // SAFETY: as above.
                    unsafe { device.run(&pick)? };
                }
            }
        }
        Ok(Batch { inputs, labels })
    }
}

/// Rows of a batch.
struct Rows<'a> {
    split: &'a Split,
    picked: &'a [u32],
    features: usize,
    layout: Layout,
}

impl Rows<'_> {
    /// Assembles the rows in pinned memory and queues their copies.
    ///
    /// # Safety
    /// The buffer does not change until the stream has passed the copies.
    unsafe fn stage(
        &self,
        context: &Context,
        buffer: &mut HostBuffer,
        inputs: &Matrix,
        labels: &DeviceBuffer,
    ) -> Result<()> {
        let (input_bytes, label_bytes) = (self.picked.len() * self.layout.row_bytes(), self.picked.len() * 4);
        let bytes = &mut buffer.as_mut_slice()[..input_bytes + label_bytes];
        // A row is a multiple of four bytes, so the labels are aligned.
        let (host_inputs, host_labels) = bytes.split_at_mut(input_bytes);
        let host_labels = bytemuck::cast_slice_mut(host_labels);
        fill_rows(self.split, self.picked, host_inputs, host_labels, self.features, self.layout);
        let stream = context.device.stream();
        // SAFETY: the target is live and large enough; the caller vouches for the buffer.
        unsafe { buffer.copy_to(0, inputs.buffer.addr(), input_bytes, stream)? };
        // SAFETY: as above.
        unsafe { buffer.copy_to(input_bytes, labels.addr(), label_bytes, stream) }
    }
}

/// Writes the picked rows to `inputs`, which is aligned to their elements, and their classes to `labels`. Values are
/// rounded as the kernels that gather rows round them; padding becomes zero.
fn fill_rows(split: &Split, picked: &[u32], inputs: &mut [u8], labels: &mut [u32], features: usize, layout: Layout) {
    let source = split.features.rows();
    let mut values = vec![0f32; layout.pitch as usize];
    for (&row, out) in picked.iter().zip(inputs.chunks_exact_mut(layout.row_bytes())) {
        source.copy(row as usize, &mut values[..features]);
        layout.element.write(&values, out);
    }
    for (&row, label) in picked.iter().zip(labels) {
        *label = u32::from(split.labels[row as usize]);
    }
}
