//! The steps of a run that a profiler captures.

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
    /// Errors of waiting for the device.
    pub(super) fn training_begins(&mut self, device: &Device) -> Result<()> {
        match self.steps {
            None => self.start(device),
            Some(_) => device.synchronize(),
        }
    }

    /// Steps from the next one on that are all in the capture, or all outside of it.
    pub(super) fn steps_alike(&self) -> u64 {
        let next = self.begun + 1;
        match self.steps {
            Some(ProfileSteps { first, .. }) if next < first => first - next,
            Some(ProfileSteps { last, .. }) if next <= last => last - next + 1,
            _ => u64::MAX,
        }
    }

    /// Call before each step, or before several that are queued together and [alike](Self::steps_alike). `range` is that of the epoch: a profiler shows no range that was open when its capture
    /// began, so it is opened anew.
    ///
    /// # Errors
    /// Errors of waiting for the device.
    pub(super) fn steps_begin(&mut self, device: &Device, epoch: u32, range: &mut Option<DeviceRange>) -> Result<()> {
        self.begun += 1;
        if self.steps.is_some_and(|steps| steps.first == self.begun) {
            drop(range.take());
            self.start(device)?;
            *range = Some(device.range(format_args!("epoch {epoch}")));
        }
        Ok(())
    }

    /// Call after each step, or after `count` that were queued together.
    ///
    /// # Errors
    /// Errors of waiting for the device.
    pub(super) fn steps_ended(
        &mut self,
        device: &Device,
        epoch: u32,
        range: &mut Option<DeviceRange>,
        count: u64,
    ) -> Result<()> {
        self.begun += count - 1;
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
    /// Errors of waiting for the device.
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

    #[test]
    fn queued_steps_stop_at_the_ends_of_a_capture() {
        let mut capture = Capture::new(Some(ProfileSteps { first: 4, last: 9 }), 20).unwrap();
        let alike = [0, 2, 3, 5, 8, 9].map(|begun| {
            capture.begun = begun;
            capture.steps_alike()
        });
        assert_eq!(alike, [3, 1, 6, 4, 1, u64::MAX]);
        assert_eq!(Capture::new(None, 20).unwrap().steps_alike(), u64::MAX);
    }
}
