//! How batches reach the device: copied, copied from page-locked memory, or gathered from a resident data set.

use crate::data::{Features, Split};
use crate::error::Result;
use crate::mlp::Batch;
use crate::settings::LoaderMode;
use crate::tensor::Context;
use allocators::{DeviceBuffer, Driver, EventId, PinnedBuffer};
use kernels::{Element, GatherLabels, GatherRowsF32, GatherRowsU8};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::ops::Range;
use std::sync::Arc;

/// Page-locked buffers in turn: while one is being copied the next is filled.
const RING: usize = 4;

/// Writes the order of the training rows in one epoch (numbered from 1) to `order`, whose length is their number. The same
/// seed and epoch give the same order.
pub fn shuffled(seed: u64, epoch: u32, order: &mut [u32]) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Weights take the low streams; each epoch has one of its own.
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
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Rows are assembled in these vectors.
    Copy {
        inputs: Vec<f32>,
        labels: Vec<u32>,
    },
    Pinned {
        ring: Vec<Slot>,
        next: usize,
    },
    Resident {
        features: DeviceBuffer,
        labels: DeviceBuffer,
        order: Option<DeviceBuffer>,
    },
}

/// A page-locked buffer for one batch: inputs, then labels.
#[derive(Debug)]
struct Slot {
    buffer: PinnedBuffer,
    /// Recorded behind the copies that read the buffer.
    copied: EventId,
    driver: Arc<dyn Driver>,
}

impl Drop for Slot {
    /// Waits for the copies that still read the buffer, which is given back after this. Errors have nobody to go to.
    fn drop(&mut self) {
        let _ = self.driver.event_synchronize(self.copied);
        // SAFETY: the event belongs to this slot alone.
        let _ = unsafe { self.driver.event_destroy(self.copied) };
    }
}

impl Loader {
    /// A loader for `split`, which stays on the host. A resident data set is uploaded here, through the allocator.
    ///
    /// # Errors
    /// Those of the allocator, of copies and of page-locking memory.
    pub fn new(context: &Context, split: &Split, features: usize, batch: u32, mode: LoaderMode) -> Result<Self> {
        let batch = (batch as usize).min(split.rows);
        let source = match mode {
            LoaderMode::Copy => Source::Copy { inputs: vec![0.0; batch * features], labels: vec![0; batch] },
            LoaderMode::Pinned => {
                let driver = context.device.driver();
                let slot = || -> Result<Slot> {
                    let buffer = PinnedBuffer::new(&driver, batch * (features + 1) * 4)?;
                    Ok(Slot { buffer, copied: driver.event_create(false)?, driver: Arc::clone(&driver) })
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
        Ok(Self { rows: split.rows, features, source })
    }

    /// Announces the order of the rows for the next pass.
    ///
    /// # Errors
    /// Those of the allocator and of the copy.
    pub fn begin_pass(&mut self, context: &Context, order: &[u32]) -> Result<()> {
        if let Source::Resident { order: on_device, .. } = &mut self.source {
            // The old one goes first, so that a caching allocator can use its block again.
            *on_device = None;
            *on_device = Some(context.upload(order)?);
        }
        Ok(())
    }

    /// The rows `order[range]` as a batch.
    ///
    /// # Errors
    /// Those of the allocator, of copies and of launches.
    ///
    /// # Panics
    /// When `order` is not what [`begin_pass`](Self::begin_pass) was told, or holds rows that do not exist.
    pub fn batch(&mut self, context: &Context, split: &Split, order: &[u32], range: Range<usize>) -> Result<Batch> {
        let _range = context.device.range(format_args!("load"));
        assert!(range.end <= order.len() && order.len() <= self.rows, "a batch should lie inside the pass");
        // CAST: a batch has at most u32::MAX rows by the type of its setting; features are bounded by the readers.
        let (rows, cols) = (range.len() as u32, self.features as u32);
        let inputs = context.matrix(rows, cols)?;
        let labels = context.allocate::<u32>(range.len())?;
        let picked = &order[range.clone()];
        match &mut self.source {
            Source::Copy { inputs: host_inputs, labels: host_labels } => {
                let count = range.len() * self.features;
                fill_rows(split, picked, &mut host_inputs[..count], &mut host_labels[..range.len()], self.features);
                context.write(&inputs.buffer, &host_inputs[..count])?;
                context.write(&labels, &host_labels[..range.len()])?;
            }
            Source::Pinned { ring, next } => {
                let slot = &mut ring[*next];
                *next = (*next + 1) % RING;
                let driver = context.device.driver();
                driver.event_synchronize(slot.copied)?;
                let (input_bytes, label_bytes) = (picked.len() * self.features * 4, picked.len() * 4);
                let bytes = &mut slot.buffer.as_mut_slice()[..input_bytes + label_bytes];
                let words: &mut [f32] = bytemuck::cast_slice_mut(bytes);
                let (host_inputs, host_labels) = words.split_at_mut(picked.len() * self.features);
                fill_rows(split, picked, host_inputs, bytemuck::cast_slice_mut(host_labels), self.features);
                let stream = context.device.stream();
                // SAFETY: both targets are live and large enough; the buffer is not touched again before
                // `event_synchronize` has seen the event that is recorded behind these copies.
                unsafe {
                    slot.buffer.copy_to(0, inputs.buffer.addr(), input_bytes, stream)?;
                }
                // SAFETY: as above.
                unsafe {
                    slot.buffer.copy_to(input_bytes, labels.addr(), label_bytes, stream)?;
                }
                driver.event_record(slot.copied, stream)?;
            }
            Source::Resident { features, labels: all_labels, order: on_device } => {
                let order = on_device.as_ref().expect("a pass should have begun");
                let indices = order.addr().get() + 4 * range.start as u64;
                let (source, out) = (features.addr().get(), inputs.addr());
                // CAST: data sets have fewer than 2^32 rows, as `order` says.
                let source_rows = self.rows as u32;
                let gather: Box<dyn kernels::Operation> = match &split.features {
                    Features::U8 { scale, shift, .. } => Box::new(GatherRowsU8 {
                        element: Element::F32,
                        rows,
                        cols,
                        pitch: cols,
                        batch: rows,
                        source,
                        source_rows,
                        indices,
                        cursor: None,
                        scale: *scale,
                        shift: *shift,
                        out,
                    }),
                    Features::F32(_) => Box::new(GatherRowsF32 {
                        element: Element::F32,
                        rows,
                        cols,
                        pitch: cols,
                        batch: rows,
                        source,
                        source_rows,
                        indices,
                        cursor: None,
                        scale: 1.0,
                        // Adding -0.0 changes no bit of any number; adding 0.0 would make 0.0 of -0.0.
                        shift: -0.0,
                        out,
                    }),
                };
                // SAFETY: data, order and target are live and of these shapes; they are freed on the stream later.
                unsafe { context.device.run(gather.as_ref())? };
                let pick = GatherLabels {
                    rows,
                    batch: rows,
                    source: all_labels.addr().get(),
                    source_rows,
                    indices,
                    cursor: None,
                    out: labels.addr().get(),
                };
                // SAFETY: as above.
                unsafe { context.device.run(&pick)? };
            }
        }
        Ok(Batch { inputs, labels })
    }
}

fn fill_rows(split: &Split, picked: &[u32], inputs: &mut [f32], labels: &mut [u32], features: usize) {
    for ((&row, out), label) in picked.iter().zip(inputs.chunks_exact_mut(features)).zip(labels) {
        split.features.copy_row(row as usize, out);
        *label = u32::from(split.labels[row as usize]);
    }
}
