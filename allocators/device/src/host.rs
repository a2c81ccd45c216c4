//! Pinned host memory as a device: a driver whose segments are page-locked memory of the host.

mod pages;
mod refusal;

pub use pages::HostPages;

use crate::hooked::{CallArguments, Hook, HookedDriver};
use crate::{Bytes, CallKind, DeviceAddr, Driver, DriverError, DriverResult, HostRoom, MemInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const GIB: u64 = 1 << 30;
/// Host memory is pinned in whole pages.
pub const HOST_PAGE: u64 = 4096;

/// How a segment is pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pinning {
    /// `cudaHostAlloc`.
    #[default]
    Alloc,
    /// Ordinary memory, touched page by page by this number of threads, then `cudaHostRegister`.
    Register {
        /// Threads that touch it.
        threads: u32,
    },
}

impl fmt::Display for Pinning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc => f.write_str("cudaHostAlloc"),
            Self::Register { threads: 1 } => f.write_str("cudaHostRegister with 1 thread"),
            Self::Register { threads } => write!(f, "cudaHostRegister with {threads} threads"),
        }
    }
}

/// What pinning costs on one machine, from a published measurement. The measured times are proportional to the bytes; the fixed part
/// of a call and the cost of freeing are not published, so they are not modelled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCosts {
    /// Name of the machine.
    pub name: String,
    /// The measurement.
    pub source: String,
    /// Nanoseconds per GiB of `cudaHostAlloc`.
    pub alloc_ns_per_gib: u64,
    /// Nanoseconds per GiB of touching and registering, by the number of threads.
    pub register_ns_per_gib: BTreeMap<u32, u64>,
}

/// Why costs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("costs of pinned memory: {0}; allocators/device/src/profiles/hosts.json has complete examples")]
pub struct HostCostsError(String);

impl HostCosts {
    /// The built-in costs, each of one machine.
    ///
    /// # Panics
    /// Never: a test parses the embedded file.
    #[must_use]
    pub fn built_in() -> Vec<Self> {
        serde_json::from_str(include_str!("profiles/hosts.json")).expect("the built-in costs should be valid")
    }

    /// The built-in costs of a host with eight H100s.
    ///
    /// # Panics
    /// Never: the file has at least one entry.
    #[must_use]
    pub fn h100x8() -> Self {
        Self::built_in().into_iter().next().expect("the built-in costs should have an entry")
    }

    /// Costs from JSON, in the form of one entry of the built-in file.
    ///
    /// # Errors
    /// [`HostCostsError`] that names the field or the line.
    pub fn from_json(text: &str) -> Result<Self, HostCostsError> {
        let costs: Self = serde_json::from_str(text).map_err(|error| HostCostsError(error.to_string()))?;
        let zero_threads = costs.register_ns_per_gib.contains_key(&0);
        if zero_threads {
            return Err(HostCostsError("'register_ns_per_gib' has an entry for 0 threads".into()));
        }
        Ok(costs)
    }

    /// Nanoseconds that pinning `bytes` takes; `None` where nothing was measured for so few threads. With more threads than were
    /// measured the time is that of the largest measured number.
    #[must_use]
    pub fn pin_ns(&self, bytes: u64, pinning: Pinning) -> Option<u64> {
        let per_gib = match pinning {
            Pinning::Alloc => self.alloc_ns_per_gib,
            Pinning::Register { threads } => *self.register_ns_per_gib.range(..=threads).next_back()?.1,
        };
        let ns = u128::from(bytes) * u128::from(per_gib) / u128::from(GIB);
        u64::try_from(ns).ok()
    }
}

/// Calls that pinned and released host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostAccount {
    /// Successful calls that pinned memory.
    pub pins: u64,
    /// Successful calls that released it.
    pub releases: u64,
    /// Bytes that were pinned in all.
    pub pinned_bytes: u64,
    /// Bytes that are pinned now, in whole pages.
    pub current_bytes: u64,
    /// Most bytes that were pinned at once, in whole pages.
    pub peak_bytes: u64,
    /// Nanoseconds that pinning took: on a simulated host by the costs, and `None` where these do not say; else on the device's
    /// clock.
    pub pin_ns: Option<u64>,
}

/// Where segments are.
#[derive(Debug)]
enum Source {
    /// Addresses of the wrapped device stand for host memory.
    Simulated { costs: HostCosts, pinning: Pinning },
    /// Page-locked memory of the wrapped device's host ([`Driver::host_alloc`]).
    Real,
    /// Ordinary memory, touched by this number of threads and registered ([`Driver::host_register`]).
    Registered { threads: u32, huge: bool },
}

impl Source {
    fn pinning(&self) -> Pinning {
        match self {
            Self::Simulated { pinning, .. } => *pinning,
            Self::Real => Pinning::Alloc,
            Self::Registered { threads, .. } => Pinning::Register { threads: *threads },
        }
    }
}

/// The hook of a [`HostDriver`].
#[derive(Debug)]
pub struct PinnedMemory {
    source: Source,
    /// What the system may still grant.
    room: fn() -> Option<HostRoom>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    account: HostAccount,
    /// Bytes of each live segment.
    segments: BTreeMap<DeviceAddr, u64>,
    /// The memory of each registered segment.
    pages: BTreeMap<DeviceAddr, HostPages>,
}

/// A driver whose segments are pinned host memory. Policies allocate a segment with [`Driver::mem_alloc`]; each is a call that pins
/// memory. Streams and events are the wrapped device's, so a policy waits for copies as it does for GPU memory. The host itself is one
/// more stream: make one for the program's requests, and announce the streams that copy. Other calls are those of the wrapped driver.
pub type HostDriver = HookedDriver<PinnedMemory>;

impl HostDriver {
    /// A simulated host. `inner` is the device whose streams copy; its plain memory stands for the host's, so its size is the
    /// host's.
    #[must_use]
    pub fn simulated(inner: Arc<dyn Driver>, costs: HostCosts, pinning: Pinning) -> Self {
        Self::over(inner, Source::Simulated { costs, pinning })
    }

    /// Pinned memory of this machine, by the device's driver (`cuMemHostAlloc`).
    #[must_use]
    pub fn real(inner: Arc<dyn Driver>) -> Self {
        Self::over(inner, Source::Real)
    }

    /// Pinned memory of this machine: ordinary memory that is touched by this number of threads and registered with the device's
    /// driver (`cuMemHostRegister`). `huge` asks the system for huge pages.
    #[must_use]
    pub fn registered(inner: Arc<dyn Driver>, threads: u32, huge: bool) -> Self {
        Self::over(inner, Source::Registered { threads, huge })
    }

    fn over(inner: Arc<dyn Driver>, source: Source) -> Self {
        let account = HostAccount { pin_ns: Some(0), ..HostAccount::default() };
        let state = Mutex::new(State { account, ..State::default() });
        Self { inner, hook: PinnedMemory { source, room: HostRoom::now, state } }
    }

    /// How segments are pinned.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        self.hook.source.pinning()
    }

    /// The calls so far.
    #[must_use]
    pub fn account(&self) -> HostAccount {
        self.hook.lock().account
    }
}

impl PinnedMemory {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn too_large(call: CallKind, bytes: u64) -> DriverError {
    DriverError::new(call, DriverError::OUT_OF_MEMORY, format!("{} of pinned memory", Bytes(bytes)))
}

impl PinnedMemory {
    /// Pins memory of this machine: its address, the pages of what was registered, and the time that it took.
    fn pin(&self, inner: &dyn Driver, bytes: u64) -> DriverResult<(DeviceAddr, Option<HostPages>, u64)> {
        let pinning = self.source.pinning();
        let call = if pinning == Pinning::Alloc { CallKind::HostAlloc } else { CallKind::HostRegister };
        refusal::check(call, bytes, (self.room)())?;
        let length = usize::try_from(bytes).map_err(|_| too_large(call, bytes))?;
        let clock = inner.clock();
        let start_ns = clock.now_ns();
        let explained = |error| refusal::explained(error, bytes, pinning, refusal::read);
        let (addr, pages) = match self.source {
            Source::Registered { threads, huge } => {
                let mut pages = HostPages::new(length, huge).ok_or_else(|| too_large(call, bytes))?;
                pages.touch(threads);
                // SAFETY: the pages are this driver's and stay allocated until they are unregistered, in `mem_free`.
                unsafe { inner.host_register(pages.addr(), length) }.map_err(explained)?;
                (pages.addr(), Some(pages))
            }
            _ => (inner.host_alloc(length).map_err(explained)?, None),
        };
        // CAST: the address of host memory.
        let addr = DeviceAddr::handed_out(addr.as_ptr() as u64);
        Ok((addr, pages, clock.now_ns().saturating_sub(start_ns)))
    }
}

// SAFETY: a segment is either the inner driver's plain memory, or page-locked memory of `bytes` bytes that the inner driver or the
// system gives to no other caller until it is freed. Each is freed once, with its size, after the device has become idle.
unsafe impl Hook for PinnedMemory {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    /// The host's: what it may still allocate, and that with what is pinned here.
    fn mem_info(&self, inner: &dyn Driver) -> DriverResult<MemInfo> {
        match &self.source {
            Source::Simulated { .. } => inner.mem_info(),
            Source::Real | Source::Registered { .. } => {
                let text = "the system does not report its memory";
                let unknown = || DriverError::new(CallKind::MemGetInfo, DriverError::NOT_SUPPORTED, text);
                let free = (self.room)().ok_or_else(unknown)?.bytes;
                Ok(MemInfo { free, total: free.saturating_add(self.lock().account.current_bytes) })
            }
        }
    }

    fn mem_alloc(&self, inner: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        let (addr, pages, cost) = match &self.source {
            Source::Simulated { costs, pinning } => (inner.mem_alloc(bytes)?, None, costs.pin_ns(bytes, *pinning)),
            Source::Real | Source::Registered { .. } => {
                let (addr, pages, ns) = self.pin(inner, bytes)?;
                (addr, pages, Some(ns))
            }
        };
        let state = &mut *self.lock();
        state.segments.insert(addr, bytes);
        state.pages.extend(pages.map(|pages| (addr, pages)));
        let account = &mut state.account;
        account.pins += 1;
        account.pinned_bytes += bytes;
        account.current_bytes += bytes.next_multiple_of(HOST_PAGE);
        account.peak_bytes = account.peak_bytes.max(account.current_bytes);
        account.pin_ns = account.pin_ns.zip(cost).map(|(sum, cost)| sum.saturating_add(cost));
        Ok(addr)
    }

    unsafe fn mem_free(&self, inner: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        let call = CallKind::HostFree;
        let known = self.lock().segments.get(&addr).copied();
        let bytes = known.ok_or_else(|| DriverError::no_block(call, addr))?;
        match &self.source {
            // SAFETY: passed on.
            Source::Simulated { .. } => unsafe { inner.mem_free(addr) }?,
            Source::Real => {
                // Copies that are still queued use it: `mem_free` promises to wait for them, and `host_free` requires it.
                inner.device_synchronize()?;
                let (memory, length) = (NonNull::new(addr.get() as *mut u8), usize::try_from(bytes));
                let (Some(memory), Ok(length)) = (memory, length) else {
                    return Err(DriverError::no_block(call, addr));
                };
                // SAFETY: `mem_alloc` above got this memory with this size from this driver, the caller frees it once, and the
                // device is idle.
                unsafe { inner.host_free(memory, length) }?;
            }
            Source::Registered { .. } => {
                inner.device_synchronize()?;
                let memory = NonNull::new(addr.get() as *mut u8).ok_or_else(|| DriverError::no_block(call, addr))?;
                // SAFETY: the device is idle, so no copy uses the memory.
                unsafe { inner.host_unregister(memory) }?;
            }
        }
        let state = &mut *self.lock();
        state.segments.remove(&addr);
        // Released after it was unregistered.
        state.pages.remove(&addr);
        state.account.releases += 1;
        state.account.current_bytes -= bytes.next_multiple_of(HOST_PAGE);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NullDriver;

    fn driver(pinning: Pinning) -> HostDriver {
        HostDriver::simulated(Arc::new(NullDriver::new(64 * GIB)), HostCosts::h100x8(), pinning)
    }

    #[test]
    fn built_in_costs_are_the_published_times() {
        let [h100, g6] = <[HostCosts; 2]>::try_from(HostCosts::built_in()).unwrap();
        let seconds = |costs: &HostCosts, gib: u64, pinning| {
            costs.pin_ns(gib * GIB, pinning).map(|ns| (ns + 5_000_000) / 10_000_000)
        };
        let register = |threads| Pinning::Register { threads };
        // In hundredths of a second.
        assert_eq!(seconds(&h100, 8, Pinning::Alloc), Some(279));
        assert_eq!([4, 8, 32].map(|threads| seconds(&h100, 8, register(threads))), [155, 109, 92].map(Some));
        assert_eq!(seconds(&g6, 16, Pinning::Alloc), Some(787));
        assert_eq!(seconds(&g6, 16, register(4)), Some(155));
        // Between two measurements the smaller number of threads counts; below the smallest nothing is known.
        assert_eq!(seconds(&h100, 8, register(7)), Some(155));
        assert_eq!((seconds(&h100, 8, register(128)), seconds(&h100, 8, register(1))), (Some(92), None));
    }

    #[test]
    fn calls_and_their_time_are_counted() {
        let driver = driver(Pinning::Alloc);
        let a = driver.mem_alloc(4 * GIB).unwrap();
        driver.mem_alloc(100).unwrap();
        // SAFETY: allocated above and freed once.
        unsafe { driver.mem_free(a) }.unwrap();
        // SAFETY: the address is refused.
        let again = unsafe { driver.mem_free(a) }.unwrap_err();
        assert_eq!(again.code, DriverError::INVALID_VALUE, "{again}");
        let account = driver.account();
        assert_eq!((account.pins, account.releases, account.pinned_bytes), (2, 1, 4 * GIB + 100));
        assert_eq!((account.current_bytes, account.peak_bytes), (HOST_PAGE, 4 * GIB + HOST_PAGE));
        let expected = [4 * GIB, 100].map(|bytes| HostCosts::h100x8().pin_ns(bytes, Pinning::Alloc).unwrap());
        assert_eq!(account.pin_ns, Some(expected.iter().sum()));
        let refused = driver.mem_alloc(65 * GIB).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(driver.account(), account, "a refused call pins nothing");
    }

    #[test]
    fn real_segments_are_memory_of_the_host() {
        use crate::{Profile, SimDriver, sim::SimMemory};
        let driver = HostDriver::real(Arc::new(SimDriver::new(Profile::h200(), SimMemory::None)));
        let addr = driver.mem_alloc(10_000).unwrap();
        assert!(addr.get().is_multiple_of(256), "{addr:?}");
        let byte = addr.get() as *mut u8;
        // SAFETY: the segment is memory of the host of 10,000 bytes that belongs to this test.
        unsafe { byte.add(9_999).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { byte.add(9_999).read() }, 7);
        let cost = Profile::h200().copies.host_alloc_ns.at(10_000);
        assert_eq!((driver.account().pin_ns, driver.account().current_bytes), (Some(cost), 12_288));
        let info = driver.mem_info().unwrap();
        assert!(info.free <= info.total, "{info:?}");
        // SAFETY: allocated above, freed once, and no copy uses it.
        unsafe { driver.mem_free(addr) }.unwrap();
        assert_eq!(driver.account().current_bytes, 0);
        // More than any machine has is refused and not killed.
        assert!(driver.mem_alloc(1 << 50).is_err());
    }

    #[test]
    fn registered_segments_are_memory_of_the_process() {
        use crate::{Profile, SimDriver, sim::SimMemory};
        let device = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let inner = Arc::clone(&device) as Arc<dyn Driver>;
        let driver = HostDriver::registered(Arc::clone(&inner), 3, false);
        let addr = driver.mem_alloc(10_000).unwrap();
        let memory = NonNull::new(addr.get() as *mut u8).unwrap();
        // SAFETY: the segment is memory of the host of 10,000 bytes that belongs to this test.
        unsafe { memory.add(9_999).write(7) };
        assert_eq!(driver.account().pin_ns, HostCosts::h100x8().pin_ns(10_000, Pinning::Register { threads: 4 }));
        // SAFETY: the memory is the driver's; a part of it is registered already.
        let again = unsafe { inner.host_register(memory.add(4096), 1) }.unwrap_err();
        assert_eq!(again.code, DriverError::HOST_MEMORY_ALREADY_REGISTERED, "{again}");
        // SAFETY: allocated above, freed once, and no copy uses it.
        unsafe { driver.mem_free(addr) }.unwrap();
        assert_eq!((driver.account().current_bytes, driver.account().releases), (0, 1));
        // SAFETY: nothing is registered there.
        let gone = unsafe { inner.host_unregister(memory) }.unwrap_err();
        assert_eq!(gone.code, DriverError::HOST_MEMORY_NOT_REGISTERED, "{gone}");
        // SAFETY: zero bytes are refused.
        let none = unsafe { inner.host_register(memory, 0) }.unwrap_err();
        assert_eq!(none.code, DriverError::INVALID_VALUE, "{none}");
    }

    #[test]
    fn a_machine_with_less_than_the_request_is_not_asked() {
        use crate::sim::{HostBound, SimMemory};
        use crate::{Profile, SimDriver};
        let inner: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        for make in [HostDriver::real, |inner| HostDriver::registered(inner, 1, false)] {
            let mut driver = make(Arc::clone(&inner));
            driver.hook.room = || Some(HostRoom { bytes: 1 << 20, bound: HostBound::ControlGroup });
            let error = driver.mem_alloc(2 << 20).unwrap_err();
            assert!(error.is_out_of_memory() && error.to_string().contains("control group"), "{error}");
            let zero = driver.mem_alloc(0).unwrap_err();
            assert_eq!(zero.code, DriverError::INVALID_VALUE, "{zero}");
            assert_eq!(driver.account().pins, 0);
        }
    }

    #[test]
    fn time_that_was_not_measured_is_absent() {
        let driver = driver(Pinning::Register { threads: 1 });
        driver.mem_alloc(GIB).unwrap();
        assert_eq!(driver.account().pin_ns, None);
    }

    #[test]
    fn wrong_costs_are_one_line() {
        let text = serde_json::to_string(&HostCosts::h100x8()).unwrap();
        assert_eq!(HostCosts::from_json(&text).unwrap(), HostCosts::h100x8());
        for wrong in [text.replace("\"4\"", "\"0\""), text.replace("alloc_ns_per_gib", "alloc"), "[]".into()] {
            let error = HostCosts::from_json(&wrong).unwrap_err().to_string();
            assert!(error.starts_with("costs of pinned memory: ") && !error.contains('\n'), "{error}");
        }
    }
}
