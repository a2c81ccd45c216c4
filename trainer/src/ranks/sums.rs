//! Agreement between simulated ranks: virtual times and sums of gradients.

use super::Group;
use crate::error::Result;
use std::sync::Arc;
use vramlab::device::DriverResult;
use vramlab::device::sim::Ranks;
use vramlab::{CallKind, DriverError};

/// The clocks of simulated ranks, which agree on the start of each collective.
#[derive(Debug)]
pub(crate) struct Clocks(pub(crate) Arc<Group>);

impl Ranks for Clocks {
    fn count(&self) -> u64 {
        self.0.size().into()
    }

    fn last_start(&self, ready_ns: u64) -> DriverResult<u64> {
        let last = self.0.exchange(ready_ns.to_le_bytes().to_vec(), |parts| {
            let last = parts.iter().map(|part| number(part)).max().unwrap_or_default();
            Ok(last.to_le_bytes().to_vec())
        });
        // The run ends with the error of the rank that failed; this one is only how it gets there.
        let failed = |error: crate::TrainError| {
            DriverError::new(CallKind::KernelLaunch, DriverError::OPERATING_SYSTEM, error.to_string())
        };
        last.map(|last| number(&last)).map_err(failed)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Group {
    /// Replaces each value by its sum over all ranks, added in the order of the ranks.
    ///
    /// # Errors
    /// The failure of a rank.
    pub(crate) fn sum(&self, values: &mut [f32]) -> Result<()> {
        let summed = self.exchange(bytemuck::cast_slice(values).to_vec(), |parts| {
            let mut sums = floats(&parts[0]);
            for part in &parts[1..] {
                sums.iter_mut().zip(floats(part)).for_each(|(sum, value)| *sum += value);
            }
            Ok(bytemuck::cast_slice(&sums).to_vec())
        })?;
        values.copy_from_slice(&floats(&summed));
        Ok(())
    }

    /// Mean losses of whole batches from those of the ranks' parts, each weighted with its rows. `rows` are those of the whole
    /// batches.
    ///
    /// # Errors
    /// The failure of a rank.
    pub(crate) fn mean_losses(&self, losses: &[f32], rows: &[u32]) -> Result<Vec<f32>> {
        let size = self.size();
        let combined = self.exchange(bytemuck::cast_slice(losses).to_vec(), |parts| {
            let parts: Vec<Vec<f32>> = parts.iter().map(|part| floats(part)).collect();
            let mean = |(step, rows): (usize, &u32)| {
                let weighted = (0..size).zip(&parts).map(|(rank, losses)| {
                    let share = super::share(0..*rows as usize, rank, size).len();
                    // CAST: rows of a batch are exact in an f64.
                    f64::from(losses[step]) * share as f64
                });
                // CAST: losses are kept in f32.
                (weighted.sum::<f64>() / f64::from(*rows)) as f32
            };
            let means: Vec<f32> = rows.iter().enumerate().map(mean).collect();
            Ok(bytemuck::cast_slice(&means).to_vec())
        })?;
        Ok(floats(&combined))
    }
}

/// The values in bytes that need not be aligned.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}
