//! Memory of the device under other addresses than the device's own.

use std::collections::BTreeMap;
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverError, DriverResult};

/// By the address that was handed out: bytes and the device's own address.
#[derive(Debug, Default)]
pub(super) struct HandedOut(BTreeMap<u64, (u64, DeviceAddr)>);

impl HandedOut {
    pub(super) fn add(&mut self, addr: u64, bytes: u64, own: DeviceAddr) {
        self.0.insert(addr, (bytes, own));
    }

    pub(super) fn remove(&mut self, addr: DeviceAddr) {
        self.0.remove(&addr.get());
    }

    /// Size and own address of what was handed out at an address.
    pub(super) fn get(&self, addr: u64) -> Option<(u64, DeviceAddr)> {
        self.0.get(&addr).copied()
    }

    /// Whether nothing is out in a range of addresses.
    pub(super) fn is_free(&self, addr: u64, bytes: u64) -> bool {
        let below = self.0.range(..addr.saturating_add(bytes)).next_back();
        below.is_none_or(|(start, (held, _))| start + held <= addr)
    }

    /// The device's own address for one inside of what was handed out.
    pub(super) fn own(&self, addr: DeviceAddr) -> Option<DeviceAddr> {
        let (start, (bytes, own)) = self.0.range(..=addr.get()).next_back()?;
        (addr.get() < start + bytes).then(|| own.offset(addr.get() - start))
    }

    /// Gives a segment back to the device.
    pub(super) fn mem_free(&mut self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        let Some((_, own)) = self.get(addr.get()) else {
            let text = format!("no segment at {:#x}", addr.get());
            return Err(DriverError::new(CallKind::MemFree, DriverError::INVALID_VALUE, text));
        };
        // SAFETY: the device handed this address out for the segment, which is freed once: it is removed below.
        unsafe { inner.mem_free(own) }?;
        self.remove(addr);
        Ok(())
    }
}
