//! Gradients in buckets, each summed over all ranks in one piece while the backward pass continues.

use super::layer::GradientSlot;
use super::{Batch, LossSlot, Mlp};
use crate::device::{KeptBuffer, OwnedEvent, SumCosts};
use crate::error::Result;
use crate::ranks::BufferRule;
use crate::settings::Settings;
use crate::tensor::{Context, Matrix};
use kernels::Element;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab::{Bytes, DeviceAddr, DeviceBuffer};

/// Size of a bucket where none is given, as DDP's.
pub(crate) const USUAL_BUCKET: u64 = 25 << 20;
/// The first bucket is smaller, so that the first sum begins early, as DDP's.
const FIRST_BUCKET: u64 = 1 << 20;
/// Gradients begin at multiples of this, as what an allocator gives.
const ALIGN: u64 = 256;

/// A bucket: consecutive layers, from the last to the first.
#[derive(Debug)]
struct Bucket {
    /// Each layer's number, and offsets of its gradients.
    layers: Vec<(usize, GradientSlot)>,
    bytes: u64,
    /// Recorded behind the sum.
    summed: OwnedEvent,
    /// The buffer, where it lives as long as this.
    buffer: Option<KeptBuffer>,
    /// Number of its communication stream.
    stream: usize,
}

/// The buckets of a network.
#[derive(Debug)]
pub(crate) struct Buckets {
    buckets: Vec<Bucket>,
    rule: BufferRule,
    overlap: bool,
    waits: Mutex<Waits>,
}

/// Waits of the compute stream for sums, in sampled steps.
#[derive(Debug, Default)]
struct Waits {
    /// Whether the current step is sampled.
    sampled: bool,
    steps: u64,
    /// Events before and after each wait.
    events: Vec<[OwnedEvent; 2]>,
}

/// Layers by bucket, from the last layer to the first: a bucket ends with the layer that fills it. `bytes` are those of each layer's
/// gradients.
fn layers_by_bucket(bytes: &[u64], most: u64) -> Vec<Vec<usize>> {
    let mut out: Vec<Vec<usize>> = Vec::new();
    let mut filled = u64::MAX;
    for (layer, bytes) in bytes.iter().enumerate().rev() {
        let limit = if out.len() <= 1 { most.min(FIRST_BUCKET) } else { most };
        if filled >= limit {
            out.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(bucket) = out.last_mut() {
            bucket.push(layer);
        }
    }
    out
}

fn bytes_of(matrix: &Matrix) -> u64 {
    (matrix.elements() * Element::F32.bytes()).next_multiple_of(ALIGN)
}

impl Buckets {
    /// The buckets for a network. Their buffers are allocated here if they are kept.
    ///
    /// # Errors
    /// Errors of the allocator and of the driver.
    pub(crate) fn new(context: &Context, model: &Mlp, settings: &Settings) -> Result<Self> {
        let rule = settings.buffers.unwrap_or_default();
        let sizes: Vec<[u64; 2]> =
            model.layers.iter().map(|layer| [bytes_of(&layer.weight), bytes_of(&layer.bias)]).collect();
        let of_layers: Vec<u64> = sizes.iter().map(|sizes| sizes.iter().sum()).collect();
        let (source, registers) = (settings.bucket_source.unwrap_or_default(), settings.register == Some(true));
        // CAST: the command line allows few streams.
        let streams = settings.comm_streams.unwrap_or(1) as usize;
        let mut buckets: Vec<Bucket> = Vec::new();
        for numbers in layers_by_bucket(&of_layers, settings.bucket.unwrap_or(USUAL_BUCKET)) {
            let (mut layers, mut bytes) = (Vec::with_capacity(numbers.len()), 0);
            for number in numbers {
                let [weight, bias] = sizes[number];
                layers.push((number, GradientSlot { weight: bytes, bias: bytes + weight }));
                bytes += weight + bias;
            }
            let summed = OwnedEvent::new(&context.device.driver(), false)?;
            let buffer = match rule {
                BufferRule::Kept => Some(KeptBuffer::new(context, bytes, source, registers)?),
                BufferRule::RecordStream | BufferRule::Events => None,
            };
            let stream = buckets.len() % streams;
            buckets.push(Bucket { layers, bytes, summed, buffer, stream });
        }
        Ok(Self { buckets, rule, overlap: settings.overlap.unwrap_or(true), waits: Mutex::default() })
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether the waits of the next step are timed.
    pub(crate) fn sample(&self, sampled: bool) {
        let mut waits = self.waits();
        waits.sampled = sampled;
        waits.steps += u64::from(sampled);
    }

    /// Number of steps that were sampled since the last call, and for how long the compute stream waited for sums in them. The
    /// device has completed these steps.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn take_waits(&self, context: &Context) -> Result<(u64, u64)> {
        let waits = std::mem::take(&mut *self.waits());
        let driver = context.device.driver();
        let elapsed = waits.events.iter().map(|[before, after]| driver.event_elapsed_ns(before.id, after.id));
        Ok((waits.steps, elapsed.sum::<std::result::Result<u64, _>>()?))
    }

    /// Makes the compute stream wait for the sum of a bucket.
    fn wait_for_sum(&self, context: &Context, number: usize) -> Result<()> {
        let (device, driver) = (&context.device, context.device.driver());
        let _range = device.range(format_args!("wait for bucket {}", number + 1));
        let events = if self.waits().sampled {
            Some([OwnedEvent::new(&driver, true)?, OwnedEvent::new(&driver, true)?])
        } else {
            None
        };
        if let Some([before, _]) = &events {
            driver.event_record(before.id, device.stream())?;
        }
        driver.stream_wait_event(device.stream(), self.buckets[number].summed.id)?;
        if let Some([_, after]) = &events {
            driver.event_record(after.id, device.stream())?;
        }
        self.waits().events.extend(events);
        Ok(())
    }

    /// Bytes of each bucket, in the order in which they are summed.
    pub(crate) fn bytes(&self) -> Vec<u64> {
        self.buckets.iter().map(|bucket| bucket.bytes).collect()
    }

    /// Number of buckets whose buffers NCCL has registered.
    pub(crate) fn registered(&self) -> usize {
        let buffers = self.buckets.iter().filter_map(|bucket| bucket.buffer.as_ref());
        buffers.filter(|buffer| buffer.is_registered()).count()
    }

    /// NCCL's reason for the first buffer that it refused to register.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.buckets.iter().filter_map(|bucket| bucket.buffer.as_ref()).find_map(KeptBuffer::refusal)
    }

    /// Connects the ranks for sums of these sizes; what that took and how long they take.
    ///
    /// # Errors
    /// Errors of the sums.
    pub(crate) fn warm_up(&self, context: &Context) -> Result<Option<SumCosts>> {
        let values: Vec<u64> = self.buckets.iter().map(|bucket| bucket.bytes / Element::F32.bytes()).collect();
        context.device.warm_up_sums(&values)
    }

    /// Queues the sum of a bucket behind the work queued so far.
    fn sum(&self, context: &Context, number: usize, buffer: DeviceAddr) -> Result<()> {
        let Bucket { bytes, summed, stream: on, .. } = &self.buckets[number];
        let device = &context.device;
        let _range = device.range(format_args!("all-reduce bucket {}, {}", number + 1, Bytes(*bytes)));
        let stream = device.communication(*on);
        device.order_streams(device.stream(), stream)?;
        // SAFETY: the buffer is live and of this size; what frees it waits for the event, or announces the use.
        unsafe { device.all_reduce(buffer, bytes / Element::F32.bytes(), *on)? };
        device.driver().event_record(summed.id, stream)?;
        Ok(())
    }
}

fn allocate(context: &Context, bytes: u64) -> Result<DeviceBuffer> {
    // CAST: far below the address space.
    context.allocate::<u8>(bytes as usize)
}

impl Bucket {
    /// Where the gradients are: in the buffer of this step, else in the kept one.
    fn addr(&self, of_step: Option<&DeviceBuffer>) -> Option<DeviceAddr> {
        of_step.map(DeviceBuffer::addr).or_else(|| self.buffer.as_ref().map(KeptBuffer::addr))
    }
}

/// A slot in a buffer from its offsets.
fn slot(buffer: DeviceAddr, offsets: GradientSlot) -> GradientSlot {
    let base = buffer.get();
    GradientSlot { weight: base + offsets.weight, bias: base + offsets.bias }
}

impl Mlp {
    /// One training step of a rank on its part of a batch of `whole_rows` rows: forward pass, loss, backward pass, sums over all
    /// ranks, update. The mean loss of the part goes to `loss_slot`.
    ///
    /// # Errors
    /// Errors of the allocator, of launches and of the sums.
    pub(crate) fn step_of_part(
        &self,
        context: &Context,
        batch: Batch,
        loss_slot: LossSlot,
        learning_rate: f32,
        (buckets, whole_rows): (&Buckets, u32),
    ) -> Result<()> {
        let (inputs, dlogits) = self.forward_and_loss_of_part(context, batch, loss_slot, whole_rows)?;
        let buffers = self.backward_to(context, inputs, dlogits, buckets)?;
        let _range = context.device.range(format_args!("update"));
        for (number, (bucket, buffer)) in buckets.buckets.iter().zip(buffers).enumerate() {
            let device = &context.device;
            buckets.wait_for_sum(context, number)?;
            let Some(held) = bucket.addr(buffer.as_ref()) else { continue };
            for (layer, offsets) in &bucket.layers {
                // SAFETY: the buffer holds the gradients of these layers and is freed on the stream after these launches.
                unsafe { self.update_from(context, &self.layers[*layer], slot(held, *offsets), learning_rate)? };
            }
            if let Some(buffer) = buffer {
                let _range = device.range(format_args!("free bucket {} ({})", number + 1, buckets.rule.name()));
                if buckets.rule == BufferRule::RecordStream {
                    buffer.record_use(device.communication(bucket.stream))?;
                }
                drop(buffer);
            }
        }
        Ok(())
    }

    /// The backward pass into buckets; the buffers of those that have none of their own.
    fn backward_to(
        &self,
        context: &Context,
        mut inputs: Vec<Matrix>,
        dlogits: Matrix,
        buckets: &Buckets,
    ) -> Result<Vec<Option<DeviceBuffer>>> {
        let _range = context.device.range(format_args!("backward"));
        let mut buffers = Vec::with_capacity(buckets.buckets.len());
        let mut dy = dlogits;
        for (number, bucket) in buckets.buckets.iter().enumerate() {
            let own = if bucket.buffer.is_none() { Some(allocate(context, bucket.bytes)?) } else { None };
            let Some(buffer) = bucket.addr(own.as_ref()) else { continue };
            let last = bucket.layers.last().map(|(layer, _)| *layer);
            for (layer, offsets) in &bucket.layers {
                let _range = context.device.range(format_args!("layer {}", layer + 1));
                let (of_layer, x) = (&self.layers[*layer], inputs.pop().expect("each layer kept its input"));
                // SAFETY: the bucket has room for these gradients; it is freed on the stream after the update.
                unsafe { self.gradient_to(context, of_layer, &dy, &x, slot(buffer, *offsets))? };
                if buckets.overlap && Some(*layer) == last {
                    buckets.sum(context, number, buffer)?;
                }
                if *layer > 0 {
                    dy = self.input_gradient(context, of_layer, dy, &x)?;
                }
            }
            buffers.push(own);
        }
        if !buckets.overlap {
            for (number, (bucket, own)) in buckets.buckets.iter().zip(&buffers).enumerate() {
                let Some(buffer) = bucket.addr(own.as_ref()) else { continue };
                buckets.sum(context, number, buffer)?;
            }
        }
        Ok(buffers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_with_the_layer_that_fills_it() {
        const MIB: u64 = 1 << 20;
        // The first bucket takes at most 1 MiB, so the last layers are summed early.
        assert_eq!(layers_by_bucket(&[10 * MIB, 20 * MIB, 4 * MIB, MIB], 25 * MIB), [vec![3], vec![2, 1, 0]]);
        assert_eq!(layers_by_bucket(&[10 * MIB, 30 * MIB, MIB / 2, MIB / 4], 25 * MIB), [vec![3, 2, 1], vec![0]]);
        // With a bucket of one byte each layer is its own; with a large one the first still ends at 1 MiB.
        assert_eq!(layers_by_bucket(&[5, 5, 5], 1), [vec![2], vec![1], vec![0]]);
        assert_eq!(layers_by_bucket(&[MIB, MIB, MIB], 1 << 40), [vec![2], vec![1, 0]]);
        assert_eq!(layers_by_bucket(&[5], 1), [vec![0]]);
    }
}
