//! Frees and requests of other streams while a request releases the cache: `caching` holds no lock of a stream over the device's
//! calls.

use crate::common::{allocate, free};
use std::sync::{Arc, Mutex};
use vramlab_device::{CallArguments, CallKind, CallOutcome, Driver, DriverResult, Hook, HookedDriver, NullDriver};
use vramlab_policies::Selection;

const MIB: u64 = 1 << 20;

type Interruption = Box<dyn FnOnce() + Send>;

/// Runs a function inside the next call that releases memory.
#[derive(Default)]
struct Interrupt(Mutex<Option<Interruption>>);

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

// SAFETY: it forwards every call.
unsafe impl Hook for Interrupt {
    type Before = ();

    fn before(&self, _: &dyn Driver, kind: CallKind, _: CallArguments) -> DriverResult<()> {
        let due = if kind == CallKind::MemFree { self.0.lock().unwrap().take() } else { None };
        due.into_iter().for_each(|interruption| interruption());
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: CallKind, _: CallArguments, (): (), _: CallOutcome) {}
}

#[test]
fn a_request_that_fits_at_every_moment_is_served() {
    let interrupt = Arc::new(HookedDriver::with_hook(Arc::new(NullDriver::new(1 << 40)), Interrupt::default()));
    let driver: Arc<dyn Driver> = Arc::clone(&interrupt) as _;
    let [a, b, c, d] = std::array::from_fn(|_| driver.stream_create().unwrap());
    let caching = "caching:memory_limit=90M".parse::<Selection>().unwrap().build(&driver).unwrap();
    let [live, of_c, of_d] = [b, c, d].map(|stream| allocate(caching.as_ref(), 30 * MIB, stream).unwrap());
    free(caching.as_ref(), of_c, c).unwrap();
    free(caching.as_ref(), of_d, d).unwrap();
    // While the segment of C is released: the block of B is freed, after the free segments were listed. Then that of D is allocated,
    // before it is released. So at most 30 MiB are live at any time, and 60 MiB fit.
    let (other, taken) = (Arc::clone(&caching), Arc::new(Mutex::new(None)));
    let keep = Arc::clone(&taken);
    *interrupt.hook().0.lock().unwrap() = Some(Box::new(move || {
        free(other.as_ref(), live, b).unwrap();
        *keep.lock().unwrap() = Some(allocate(other.as_ref(), 30 * MIB, d).unwrap());
    }));
    let served = allocate(caching.as_ref(), 60 * MIB, a).unwrap();
    let stats = caching.stats();
    assert_eq!((stats.num_ooms, stats.reserved_bytes.all.current), (0, 90 * MIB));
    let of_d = taken.lock().unwrap().take().unwrap();
    for (block, stream) in [(served, a), (of_d, d)] {
        free(caching.as_ref(), block, stream).unwrap();
    }
    // Without frees meanwhile a refusal is final.
    assert!(allocate(caching.as_ref(), 100 * MIB, a).is_err());
    assert_eq!((caching.stats().num_ooms, caching.stats().num_alloc_retries), (1, 3));
}
