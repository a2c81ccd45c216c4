//! What a profiler captures of a run.

use crate::device::{Device, DeviceRange};
use crate::error::{Result, TrainError};
use crate::settings::ProfileSteps;

/// Starts and stops a profiler's capture: around the whole training, or around some steps.
///
/// A capture of steps begins and ends with an idle device, so that all the work that a call in it can wait for was
/// queued in it, and is in it to its end.
#[derive(Debug)]
pub(super) struct Capture {
    steps: Option<ProfileSteps>,
    /// Steps that were begun.
    begun: u64,
    open: bool,
}

impl Capture {
    /// A capture of these steps of a run with `in_all` steps.
    ///
    /// # Errors
    /// [`TrainError::Input`] when the run ends before the first of them.
    pub(super) fn new(steps: Option<ProfileSteps>, in_all: u64) -> Result<Self> {
        match steps {
            Some(ProfileSteps { first, last }) if first > in_all => Err(TrainError::Input(format!(
                "--profile-steps {first}..{last} begins after the last step of the run, {in_all}: raise --epochs or \
                 --steps, or profile earlier steps"
            ))),
            _ => Ok(Self { steps, begun: 0, open: false }),
        }
    }

    fn start(&mut self, device: &Device) -> Result<()> {
        device.synchronize()?;
        device.profile(true);
        self.open = true;
        Ok(())
    }

    fn stop(&mut self, device: &Device) {
        device.profile(false);
        self.open = false;
    }

    /// Call before the first epoch.
    ///
    /// # Errors
    /// Those of waiting for the device.
    pub(super) fn training_begins(&mut self, device: &Device) -> Result<()> {
        match self.steps {
            None => self.start(device),
            Some(_) => device.synchronize(),
        }
    }

    /// Call before each step. `range` is that of the epoch: a profiler shows no range that was open when its capture
    /// began, so it is opened anew.
    ///
    /// # Errors
    /// Those of waiting for the device.
    pub(super) fn step_begins(&mut self, device: &Device, epoch: u32, range: &mut Option<DeviceRange>) -> Result<()> {
        self.begun += 1;
        if self.steps.is_some_and(|steps| steps.first == self.begun) {
            drop(range.take());
            self.start(device)?;
            *range = Some(device.range(format_args!("epoch {epoch}")));
        }
        Ok(())
    }

    /// Call after each step.
    ///
    /// # Errors
    /// Those of waiting for the device.
    pub(super) fn step_ended(&mut self, device: &Device, epoch: u32, range: &mut Option<DeviceRange>) -> Result<()> {
        if self.open && self.steps.is_some_and(|steps| steps.last == self.begun) {
            {
                let _range = device.range(format_args!("end of capture"));
                device.synchronize()?;
            }
            // A range that is open when the capture stops has no end in it.
            drop(range.take());
            self.stop(device);
            *range = Some(device.range(format_args!("epoch {epoch}")));
        }
        Ok(())
    }

    /// Call after the last epoch.
    ///
    /// # Errors
    /// Those of waiting for the device.
    pub(super) fn training_ends(&mut self, device: &Device) -> Result<()> {
        if self.open {
            device.synchronize()?;
            self.stop(device);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_that_could_not_begin_is_refused() {
        let steps = Some(ProfileSteps { first: 11, last: 20 });
        assert!(matches!(Capture::new(steps, 10), Err(TrainError::Input(text)) if text.contains("11..20")));
        assert!(Capture::new(steps, 11).is_ok());
        assert!(Capture::new(None, 0).is_ok());
    }
}
