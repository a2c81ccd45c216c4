//! Memory that PyTorch's allocator does not count: other memory used on the GPU, sampled by `vramlab run`, and pinned host memory.

use super::explanation::{DeviceUse, Moment, PinnedHost, Point};
use crate::curves::{Curve, curve};
use crate::recording::Recording;
use std::path::Path;
use vramlab::histories::formats::HostMemory;

/// Memory used on the GPU at a moment in addition to PyTorch's reserved memory; `None` without samples, or if reserved memory
/// is unknown.
pub(super) fn device_use(file: &Path, recording: &Recording, at: &Moment, timeline: &mut [Point]) -> Option<DeviceUse> {
    let curve = curve(file, recording.device)?;
    for point in timeline.iter_mut() {
        let index = usize::try_from(point.event).ok()?.saturating_sub(1);
        point.device_used_bytes = sample(&curve, recording, index).map(|at| curve.used_bytes[at]);
    }
    let index = usize::try_from(at.event).ok()?.saturating_sub(1);
    let sample = sample(&curve, recording, index)?;
    let (used, reserved) = (curve.used_bytes[sample], at.reserved_bytes?);
    let nccl = curve.nccl_bytes.as_ref().and_then(|nccl| nccl.get(sample)).copied();
    let process = curve.process_bytes.as_ref().and_then(|process| process.get(sample)).copied();
    Some(DeviceUse {
        total_bytes: curve.total_bytes,
        peak_used_bytes: curve.used_bytes.iter().copied().max()?,
        used_bytes: used,
        not_pytorch_bytes: used.saturating_sub(reserved),
        own_bytes: process.map(|process| process.saturating_sub(reserved)),
        nccl_bytes: nccl,
        others_bytes: process.map(|process| used.saturating_sub(process)),
    })
}

/// The sample nearest to an event; `None` in logs without times.
fn sample(curve: &Curve, recording: &Recording, index: usize) -> Option<usize> {
    recording.since_start(index)?;
    let time = recording.events.get(index)?.time_ns;
    let nearest = curve.time_ns.iter().enumerate().min_by_key(|(_, at)| at.abs_diff(time))?.0;
    (nearest < curve.used_bytes.len()).then_some(nearest)
}

/// Pinned host memory; `None` if the snapshot has none.
pub(super) fn pinned_host(recording: &Recording) -> Option<PinnedHost> {
    let host @ HostMemory { segments, bytes, active_bytes, rounded_bytes, .. } = recording.summary.host;
    let peak_bytes = host.peak_bytes();
    (peak_bytes > 0).then_some(PinnedHost {
        segments,
        bytes,
        active_bytes,
        peak_bytes,
        // A request is larger than half the power of two to which it is rounded.
        rounding_most_bytes: rounded_bytes / 2,
    })
}
