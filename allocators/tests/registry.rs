//! Backends of other crates stand beside the library's own.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::sync::Arc;
use vramlab::backends::{Naive, Needs, Preset, RegisterError, With, all, find, naive, register};
use vramlab::settings::{NoSettings, number};
use vramlab::{Backend, Capabilities, Driver, NullDriver, Profile, Selection, SimDriver, SimMemory};

vramlab::settings! {
    /// Settings of the test's backend.
    #[derive(Clone, Debug)]
    pub struct OutsideSettings {
        /// How many.
        pub bins: u32 = 4, number(1..=8);
    }
}

static OUTSIDE: Backend = Backend {
    name: "outside",
    summary: "one from another crate",
    capabilities: Capabilities::LEAST,
    constructor: &Preset::<OutsideSettings> {
        defaults: || OutsideSettings { bins: 6 },
        build: |driver, _| Ok(Arc::new(Naive::new(driver))),
    },
};

static IMPOSTOR: Backend = named("naive");

const fn named(name: &'static str) -> Backend {
    let constructor = &With::<NoSettings>(|driver, _| Ok(Arc::new(Naive::new(driver))));
    Backend { name, summary: "", capabilities: Capabilities::LEAST, constructor }
}

#[test]
fn a_registered_backend_is_found_listed_and_built() {
    assert!(find("outside").is_err());
    register(&OUTSIDE).unwrap();
    register(&OUTSIDE).unwrap();
    assert_eq!(all().iter().filter(|backend| backend.name == "outside").count(), 1);
    assert_eq!(all().last().map(|backend| backend.name), Some("outside"));
    assert!(std::ptr::eq(find("outside").unwrap(), &raw const OUTSIDE));
    // The defaults are the preset's.
    assert_eq!(OUTSIDE.settings()[0].value, "6");
    let chosen: Selection = "outside:bins=2".parse().unwrap();
    assert_eq!(chosen.to_string(), "outside:bins=2");
    assert_eq!(chosen.settings().get_as::<OutsideSettings>().map(|settings| settings.bins), Some(2));
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 20));
    chosen.build(&driver).unwrap();
    let error = "outsid".parse::<Selection>().unwrap_err().to_string();
    assert!(error.contains("did you mean 'outside'?"), "{error}");
}

#[test]
fn a_name_is_taken_once_and_can_be_written() {
    assert_eq!(register(&IMPOSTOR), Err(RegisterError::Taken("naive")));
    assert!(std::ptr::eq(find("naive").unwrap(), &raw const naive::BACKEND));
    for bad in [&named_statics::ALL, &named_statics::EMPTY, &named_statics::COMMA, &named_statics::DIGIT] {
        assert_eq!(register(bad), Err(RegisterError::BadName(bad.name)));
    }
}

/// Names that stand for something else in a list.
mod named_statics {
    use super::{Backend, named};

    pub(crate) static ALL: Backend = named("all");
    pub(crate) static EMPTY: Backend = named("");
    pub(crate) static COMMA: Backend = named("a,b");
    pub(crate) static DIGIT: Backend = named("1a");
}

#[test]
fn a_device_that_lacks_what_a_backend_needs_is_refused_with_what_does_without() {
    let device = || {
        let profile = Profile { vmm: None, pool: None, ..Profile::h200() };
        Arc::new(SimDriver::new(profile, SimMemory::None)) as Arc<dyn Driver>
    };
    let mut refused = 0;
    for backend in all() {
        let built = Selection::of(backend).build(&device());
        if backend.capabilities.needs == Needs::Nothing {
            built.unwrap();
            continue;
        }
        let text = built.unwrap_err().to_string();
        assert!(text.contains(backend.name) && text.contains("H200") && !text.contains('\n'), "{text}");
        let (names, _) = text.split_once('(').unwrap().1.split_once(" do without").unwrap();
        for name in names.split(" and ") {
            assert_eq!(find(name).unwrap().capabilities.needs, Needs::Nothing, "{text}");
        }
        refused += 1;
    }
    assert!(refused >= 3, "{refused}");
}
