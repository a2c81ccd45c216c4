//! Memory that PyTorch's allocator does not count: what else is used on the GPU, as `vramlab run` sampled it, and pinned memory of
//! the host.

use super::explanation::{Beside, Moment, Pinning, Point};
use crate::curves::{Curve, curve};
use crate::recording::Recording;
use std::path::Path;
use vramlab::histories::formats::HostMemory;

/// What is used on the GPU beside what PyTorch reserved at a moment; `None` where nothing was sampled.
pub(super) fn beside(file: &Path, recording: &Recording, at: &Moment, timeline: &mut [Point]) -> Option<Beside> {
    let curve = curve(file, recording.device)?;
    for point in timeline.iter_mut() {
        let index = usize::try_from(point.event).ok()?.saturating_sub(1);
        point.device_used_bytes = sample(&curve, recording, index).map(|at| curve.used_bytes[at]);
    }
    let index = usize::try_from(at.event).ok()?.saturating_sub(1);
    let sample = sample(&curve, recording, index)?;
    let used = curve.used_bytes[sample];
    let process = curve.process_bytes.as_ref().and_then(|process| process.get(sample)).copied();
    Some(Beside {
        total_bytes: curve.total_bytes,
        peak_used_bytes: curve.used_bytes.iter().copied().max()?,
        used_bytes: used,
        not_pytorch_bytes: used.saturating_sub(at.reserved_bytes),
        own_bytes: process.map(|process| process.saturating_sub(at.reserved_bytes)),
        others_bytes: process.map(|process| used.saturating_sub(process)),
    })
}

/// The sample that is nearest to an event; none in logs without times.
fn sample(curve: &Curve, recording: &Recording, index: usize) -> Option<usize> {
    recording.since_start(index)?;
    let time = recording.events.get(index)?.time_ns;
    let nearest = curve.time_ns.iter().enumerate().min_by_key(|(_, at)| at.abs_diff(time))?.0;
    (nearest < curve.used_bytes.len()).then_some(nearest)
}

/// Pinned memory of the host; `None` where the snapshot has none.
pub(super) fn pinning(recording: &Recording) -> Option<Pinning> {
    let host @ HostMemory { segments, bytes, active_bytes, rounded_bytes, .. } = recording.summary.host;
    let peak_bytes = host.peak_bytes();
    (peak_bytes > 0).then_some(Pinning {
        segments,
        bytes,
        active_bytes,
        peak_bytes,
        // What was asked for is more than half of a power of two.
        rounding_most_bytes: rounded_bytes / 2,
    })
}
