//! Conclusions from the numbers of an error text alone.
//!
//! | condition | conclusion |
//! |---|---|
//! | reserved and requested exceed the limit of the process | the limit; of PyTorch also fragmentation, by the rule below |
//! | requested exceeds the device | the request alone is too large |
//! | reserved exceeds the device | the driver pages to host memory (Windows) |
//! | free on the device covers the request | not device memory: host memory, a container's limit, the driver |
//! | reserved but unallocated covers the request | fragmentation |
//! | that and what is free on the device cover it together | fragmentation, in two places |
//! | none of these | too little memory, by the rest |
//!
//! Beside the cause stand holders that matter: other processes, this process outside of its allocator, free memory in private pools.

use super::text::{Facts, Reporter};
use serde::Serialize;

/// A conclusion from a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "bytes")]
pub(crate) enum Finding {
    /// The limit of the process refused the request.
    Limit(u64),
    /// The request alone exceeds the device, by this much.
    RequestTooLarge(u64),
    /// More is reserved than the device has, by this much.
    Paging(u64),
    /// This much was free on the device, which is enough.
    NotDeviceMemory(u64),
    /// This much is reserved but unallocated, which is enough in sum.
    Fragmentation(u64),
    /// The memory that is free in two places together, which is enough in sum.
    FragmentationInTwoPlaces(u64),
    /// This much is missing, even if everything that is free could be used.
    TooLittle(u64),
    /// Other processes hold this much.
    OtherProcesses(u64),
    /// This process holds this much outside of its allocator: context, NCCL, libraries, graphs.
    OutsideAllocator(u64),
    /// This much of the device is held by nobody whom the text names. Where it does not say what this process holds, the CUDA context
    /// is part of it.
    Unseen(u64),
    /// This much is free inside private pools, where other requests cannot use it.
    PrivatePools(u64),
    /// The text does not decide.
    Undecided,
}

const GIB: u64 = 1 << 30;

impl Finding {
    /// Whether it is the cause, and not a holder beside it.
    pub(crate) fn is_cause(&self) -> bool {
        !matches!(self, Self::OtherProcesses(_) | Self::OutsideAllocator(_) | Self::Unseen(_) | Self::PrivatePools(_))
    }
}

/// The cause first, then the largest holders.
pub(crate) fn findings(source: Reporter, facts: &Facts) -> Vec<Finding> {
    let mut out = Vec::new();
    out.extend(cause(source, facts));
    if source == Reporter::Pytorch && matches!(out[..], [Finding::Limit(_)]) {
        out.extend(fragmentation(facts));
    }
    let mut holders = holders(source, facts);
    holders.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    out.extend(holders.into_iter().map(|(_, finding)| finding));
    if !out.iter().any(Finding::is_cause) {
        out.insert(0, Finding::Undecided);
    }
    out
}

fn cause(source: Reporter, facts: &Facts) -> Option<Finding> {
    // Of a check of host memory the numbers are not the device's.
    let of_host = [Reporter::GgmlCpu, Reporter::HostMemory, Reporter::SharedMemory, Reporter::Ray];
    if source == Reporter::NvidiaSmi || of_host.contains(&source) {
        return None;
    }
    let requested = facts.requested_bytes?;
    if matches!(source, Reporter::Triton | Reporter::Metal) {
        return facts.limit_bytes.filter(|limit| requested > *limit).map(Finding::Limit);
    }
    let reserved = facts.reserved().or(facts.allocated_bytes);
    if let Some(limit) = facts.limit_bytes {
        let held = match source {
            Reporter::PytorchMps => reserved.unwrap_or(0).saturating_add(facts.others()),
            // Of TensorFlow the limit is the pool itself.
            Reporter::Tensorflow => facts.allocated_bytes.unwrap_or(0),
            _ => reserved.unwrap_or(0),
        };
        // Numbers of a message are rounded to a hundredth of their unit.
        let exceeds = held.saturating_add(requested).saturating_add(rounding(limit)) >= limit;
        if exceeds && (reserved.is_some() || source == Reporter::Rmm) {
            return Some(Finding::Limit(limit));
        }
    }
    if let Some(total) = facts.total_bytes {
        if requested > total {
            return Some(Finding::RequestTooLarge(requested - total));
        }
        if let Some(reserved) = reserved.filter(|reserved| *reserved > total.saturating_add(rounding(total))) {
            return Some(Finding::Paging(reserved - total));
        }
    }
    if let Some(free) = facts.free_bytes.filter(|free| *free >= requested) {
        return Some(Finding::NotDeviceMemory(free));
    }
    if matches!(source, Reporter::Xla | Reporter::PytorchMps) {
        return None;
    }
    if source == Reporter::XlaTpu {
        return facts.free_bytes.map(|free| Finding::TooLittle(requested - free));
    }
    let pools = facts.pools_bytes.unwrap_or(0);
    let unallocated = facts.unallocated_bytes?.saturating_sub(if source == Reporter::Pytorch { 0 } else { pools });
    let free = facts.free_bytes.unwrap_or(0);
    if unallocated >= requested {
        return Some(Finding::Fragmentation(unallocated));
    }
    let together = unallocated.saturating_add(free);
    if together >= requested {
        return Some(Finding::FragmentationInTwoPlaces(together));
    }
    facts.free_bytes.map(|_| Finding::TooLittle(requested - together))
}

/// Fragmentation under a limit that refused another segment. `unallocated_bytes` is without the memory of private pools.
fn fragmentation(facts: &Facts) -> Option<Finding> {
    let (requested, unallocated) = facts.requested_bytes.zip(facts.unallocated_bytes)?;
    (unallocated >= requested).then_some(Finding::Fragmentation(unallocated))
}

/// Holders that matter: each with a tenth of the device, a GiB, or as much as the request.
fn holders(source: Reporter, facts: &Facts) -> Vec<(u64, Finding)> {
    let total = facts.total_bytes.or(facts.limit_bytes);
    let notable = |bytes: u64| bytes >= GIB || total.is_some_and(|total| bytes >= total / 10);
    let mut out = Vec::new();
    let others = facts.others();
    if notable(others) {
        out.push((others, Finding::OtherProcesses(others)));
    }
    let outside = facts.process_bytes.zip(facts.reserved()).map(|(process, reserved)| process.saturating_sub(reserved));
    if let Some(outside) = outside.filter(|outside| notable(*outside)) {
        out.push((outside, Finding::OutsideAllocator(outside)));
    }
    // vLLM looks before it allocates. An older PyTorch says what it reserved, and not what its process holds: the rest has the context.
    let own = match source {
        Reporter::VllmStart => Some(0),
        _ => facts.process_bytes.or(facts.reserved().filter(|_| facts.other_processes.is_empty())),
    };
    let context = facts.process_bytes.is_none() && source != Reporter::VllmStart;
    if let (Some(total), Some(free), Some(own)) = (facts.total_bytes, facts.free_bytes, own) {
        let unseen = total.saturating_sub(free).saturating_sub(own).saturating_sub(others);
        if unseen >= total / 10 || unseen >= if context { 2 * GIB } else { GIB } {
            out.push((unseen, Finding::Unseen(unseen)));
        }
    }
    if let Some(pools) =
        facts.pools_bytes.filter(|pools| notable(*pools) || facts.requested_bytes.is_some_and(|asked| *pools >= asked))
    {
        out.push((pools, Finding::PrivatePools(pools)));
    }
    out
}

/// Half of the last digit of a size that was printed with two decimals.
fn rounding(bytes: u64) -> u64 {
    let unit = match bytes {
        0..0x400 => return 0,
        0x400..0x10_0000 => 1 << 10,
        0x10_0000..0x4000_0000 => 1 << 20,
        _ => GIB,
    };
    unit / 100
}
