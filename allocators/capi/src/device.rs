//! The devices of the process. Allocators on one device share its driver, and its knowledge of the program's streams.

use crate::error::{Failure, Outcome, Status};
use crate::host::Host;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use vramlab_device::sim::SimMemory;
use vramlab_device::{
    CudaDriver, DeviceKind, DeviceName, Driver, DriverResult, HostDriver, Profile, SimDriver, StreamId,
};
use vramlab_policies::DeviceAllocator;

/// An open device.
#[derive(Debug)]
pub(crate) struct Device {
    driver: Arc<dyn Driver>,
    /// Changes when a stream was forgotten. No two devices of a process ever share a value.
    epoch: AtomicU64,
    /// The allocators on it, which must all forget a destroyed stream. Locked while they do.
    allocators: Allocators,
    /// Of pinned memory: the host, and the stream that its requests have.
    host: Option<(Arc<Host>, StreamId)>,
    /// The hosts that have streams of this GPU, and its number there.
    hosts: Mutex<Vec<(u32, Weak<Host>)>>,
}

/// The allocators over a device.
pub(crate) type Allocators = Arc<Mutex<Vec<Weak<dyn DeviceAllocator>>>>;

/// How names of pinned memory begin.
const HOST: &str = "host:";

/// The open devices, by the text of their name.
static OPEN: Mutex<BTreeMap<String, Weak<Device>>> = Mutex::new(BTreeMap::new());

/// Opens a device that is not open yet.
type Opening = Box<dyn FnOnce() -> Outcome<Arc<dyn Driver>>>;

fn next_epoch() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only uniqueness matters.
    NEXT.fetch_add(1, Relaxed)
}

thread_local! {
    /// The epoch of the device and the handle that this thread used last, and its stream.
    static LAST: Cell<Option<(u64, u64, StreamId)>> = const { Cell::new(None) };
}

impl Device {
    /// Opens a device, or returns an open one: `cuda`, `cuda:1`, `sim`, `sim:2`, `sim:FILE`, `host:cuda`.
    pub(crate) fn open(text: &str) -> Outcome<Arc<Self>> {
        if let Some(gpu) = text.strip_prefix(HOST) {
            return Self::open_host(gpu);
        }
        let (driver, key): (Opening, String) = match numbered_simulation(text) {
            Some(number) => (Box::new(|| Ok(simulated(Profile::h200()))), format!("sim:{number}")),
            None => match DeviceName::among(text, &[DeviceKind::Cuda, DeviceKind::Sim])? {
                DeviceName::Cuda(number) => {
                    (Box::new(move || Ok(Arc::new(CudaDriver::as_guest(number)?) as _)), format!("cuda:{number}"))
                }
                DeviceName::Sim(None) => (Box::new(|| Ok(simulated(Profile::h200()))), "sim:0".to_owned()),
                DeviceName::Sim(Some(path)) => {
                    let key = format!("sim:{}", path.display());
                    let profile = move || match Profile::read(&path) {
                        Ok(profile) => Ok(simulated(profile)),
                        Err(error) => Err(Failure::new(Status::Unknown, error.to_string())),
                    };
                    (Box::new(profile), key)
                }
                DeviceName::Null => {
                    return Err(Failure::new(Status::Unknown, "the null device has no memory"));
                }
            },
        };
        let open = &mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Self::over(driver()?, Allocators::default(), None));
        open.insert(key, Arc::downgrade(&device));
        Ok(device)
    }

    /// Pinned memory. Each has streams of its own, so that it is not shared.
    fn open_host(gpu: &str) -> Outcome<Arc<Self>> {
        let allocators = Allocators::default();
        let host = Arc::new(Host::open(gpu, Arc::clone(&allocators))?);
        host.follow();
        let stream = host.stream_create()?;
        let driver = Arc::new(HostDriver::real(Arc::clone(&host) as _));
        Ok(Arc::new(Self::over(driver, allocators, Some((host, stream)))))
    }

    fn over(driver: Arc<dyn Driver>, allocators: Allocators, host: Option<(Arc<Host>, StreamId)>) -> Self {
        Self { driver, epoch: AtomicU64::new(next_epoch()), allocators, host, hosts: Mutex::default() }
    }

    /// Whether a name is of pinned memory.
    pub(crate) fn is_host(text: &str) -> bool {
        text.starts_with(HOST)
    }

    /// The host, of pinned memory.
    pub(crate) fn host(&self) -> Option<&Arc<Host>> {
        self.host.as_ref().map(|(host, _)| host)
    }

    /// The stream of a request: of pinned memory the host's, whichever is named.
    #[inline]
    pub(crate) fn request_stream(&self, handle: u64) -> DriverResult<StreamId> {
        match &self.host {
            Some((_, stream)) => Ok(*stream),
            None => self.stream(handle),
        }
    }

    /// Notifies a host when a stream of this GPU is destroyed.
    pub(crate) fn add_host(&self, number: u32, host: Weak<Host>) {
        let hosts = &mut *self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.retain(|(_, other)| other.strong_count() > 0);
        hosts.push((number, host));
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The program's stream with this handle. One comparison for the stream that the thread used last.
    #[inline]
    pub(crate) fn stream(&self, handle: u64) -> DriverResult<StreamId> {
        let epoch = self.epoch.load(Acquire);
        if let Some((_, _, stream)) = LAST.get().filter(|last| (last.0, last.1) == (epoch, handle)) {
            return Ok(stream);
        }
        // SAFETY: the program promises a live stream until it announces its destruction, see `vramlab_stream_gone`.
        let stream = unsafe { self.driver.stream_adopt(handle) }?;
        LAST.set(Some((epoch, handle, stream)));
        Ok(stream)
    }

    fn allocators(&self) -> MutexGuard<'_, Vec<Weak<dyn DeviceAllocator>>> {
        self.allocators.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an allocator to this device.
    pub(crate) fn add(&self, allocator: &Arc<dyn DeviceAllocator>) {
        self.allocators().push(Arc::downgrade(allocator));
    }

    /// Removes an allocator. No other thread has it afterwards.
    pub(crate) fn remove(&self, allocator: &Arc<dyn DeviceAllocator>) {
        // The metadata of two pointers to one allocator may differ.
        self.allocators().retain(|other| !std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(allocator)));
    }

    /// Forgets a stream of the program, once the work on the device has completed, so that no block of any allocator waits for it.
    ///
    /// The allocators forget it first, so that no free waits for a stream that the driver does not know. Then the driver forgets
    /// it, and refuses it to calls that begin later. A call that found it before may still be running, for a block of the stream
    /// itself: it has returned when its allocator has been notified a second time. Then the program may destroy the stream.
    pub(crate) fn forget(&self, handle: u64) -> Outcome<()> {
        if let Some(host) = self.host() {
            return host.gpu(host.primary())?.forget(handle);
        }
        let hosts: Vec<_> = self.hosts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let allocators = self.allocators();
        let stream = self.stream(handle)?;
        let forget = |last| {
            allocators.iter().filter_map(Weak::upgrade).for_each(|each| each.forget_stream(stream));
            let hosts = hosts.iter().filter_map(|(number, host)| Some((*number, host.upgrade()?)));
            hosts.for_each(|(number, host)| host.forget(number, stream, last));
        };
        self.driver.device_synchronize()?;
        forget(false);
        self.epoch.store(next_epoch(), Release);
        self.driver.stream_forget(stream)?;
        forget(true);
        Ok(())
    }
}

/// The number of `sim:2`, which is not a file.
fn numbered_simulation(text: &str) -> Option<u32> {
    text.strip_prefix("sim:")?.parse().ok()
}

/// Memory of this device has only addresses.
fn simulated(profile: Profile) -> Arc<dyn Driver> {
    Arc::new(SimDriver::new(profile, SimMemory::None))
}
