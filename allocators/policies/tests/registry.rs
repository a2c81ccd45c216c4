//! Backends of other crates in the list.

use std::sync::Arc;
use vramlab_device::settings::{NoSettings, number};
use vramlab_device::{Driver, NullDriver, Profile, SimDriver, sim::SimMemory};
use vramlab_policies::backends::{
    Naive, Needs, RegisterError, SegmentUse, StreamUse, With, all, compared, find, naive, register,
};
use vramlab_policies::{Backend, Capabilities, Selection};

vramlab_device::settings! {
    /// Settings of the test's backend.
    #[derive(Clone, Debug)]
    pub struct OutsideSettings {
        /// A number.
        pub bins: u32 = 4, number(1..=8);
    }
}

static OUTSIDE: Backend = Backend {
    name: "outside",
    summary: "one from another crate",
    capabilities: Capabilities::LEAST,
    compared: true,
    constructor: &With::<OutsideSettings>(|driver, _| Ok(Arc::new(Naive::new(driver)))),
};

static IMPOSTOR: Backend = named("naive");
static NOT_COMPARED: Backend = named("not-compared");

const fn named(name: &'static str) -> Backend {
    let constructor = &With::<NoSettings>(|driver, _| Ok(Arc::new(Naive::new(driver))));
    Backend { name, summary: "", capabilities: Capabilities::LEAST, compared: false, constructor }
}

#[test]
fn a_registered_backend_is_found_listed_and_built() {
    assert!(find("outside").is_err());
    register(&OUTSIDE).unwrap();
    register(&OUTSIDE).unwrap();
    assert_eq!(all().iter().filter(|backend| backend.name == "outside").count(), 1);
    assert_eq!(all().last().map(|backend| backend.name), Some("outside"));
    assert!(std::ptr::eq(find("outside").unwrap(), &raw const OUTSIDE));
    assert_eq!(OUTSIDE.settings()[0].value, "4");
    let chosen: Selection = "outside:bins=2".parse().unwrap();
    assert_eq!(chosen.to_string(), "outside:bins=2");
    assert_eq!(chosen.settings().get_as::<OutsideSettings>().map(|settings| settings.bins), Some(2));
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 20));
    chosen.build(&driver).unwrap();
    let error = "outsid".parse::<Selection>().unwrap_err().to_string();
    assert!(error.contains("did you mean 'outside'?"), "{error}");
    register(&NOT_COMPARED).unwrap();
    let compared = compared();
    assert!(compared.contains(&&OUTSIDE) && !compared.contains(&&NOT_COMPARED), "{compared:?}");
    assert!(all().contains(&&NOT_COMPARED));
}

#[test]
fn a_name_is_taken_once_and_can_be_written() {
    assert_eq!(register(&IMPOSTOR), Err(RegisterError::Taken("naive")));
    assert!(std::ptr::eq(find("naive").unwrap(), &raw const naive::BACKEND));
    for bad in [&named_statics::ALL, &named_statics::EMPTY, &named_statics::COMMA, &named_statics::DIGIT] {
        assert_eq!(register(bad), Err(RegisterError::BadName(bad.name)));
    }
}

/// Names with another meaning in a list.
mod named_statics {
    use super::{Backend, named};

    pub(crate) static ALL: Backend = named("all");
    pub(crate) static EMPTY: Backend = named("");
    pub(crate) static COMMA: Backend = named("a,b");
    pub(crate) static DIGIT: Backend = named("1a");
}

#[test]
fn what_an_allocator_can_do_follows_its_settings() {
    for backend in all() {
        assert_eq!(
            Selection::of(backend).capabilities(),
            backend.capabilities,
            "{backend}: the entry says the default"
        );
    }
    let of = |text: &str| {
        let selection: Selection = text.parse().unwrap();
        (selection.backend().capabilities, selection.capabilities())
    };
    for text in ["lab:source=expandable", "lab:source=expandable,grow=exact"] {
        let (default, now) = of(text);
        let (needs, segments) = (Needs::Vmm, SegmentUse::Expandable);
        let expected = Capabilities { needs, segments, restores: false, follows_pytorch: false, ..default };
        assert_eq!(now, expected, "{text}");
        assert!(default.follows_pytorch && default.restores && default.needs == Needs::Nothing, "{text}");
    }
    for text in [
        "lab:fit=first",
        "lab:size=bfc",
        "lab:split=never",
        "lab:grow=exact",
        "lab:retry_fit_after_sync=on",
        "caching:retry_fit_after_sync=on",
        "pytorch:retry_fit_after_sync=on",
    ] {
        let (default, now) = of(text);
        assert_eq!(now, Capabilities { follows_pytorch: false, ..default }, "{text}");
    }
    let (default, steals) = of("lab:stream=steal");
    let expected = Capabilities { streams: StreamUse::Any, coalesces: false, follows_pytorch: false, ..default };
    assert_eq!(steals, expected);
    let (default, planned) = of("plan:file=a.plan");
    assert_eq!(planned, Capabilities { streams: StreamUse::Any, ..default });
    assert_eq!(default.streams, StreamUse::Own);
    let (default, late) = of("lab:join=on-miss");
    assert_eq!(late, Capabilities { coalesces: false, follows_pytorch: false, ..default });
    let (default, collects) = of("bfc:garbage_collection=on");
    assert_eq!(collects, Capabilities { keeps_segments: false, ..default });
    assert!(default.keeps_segments);
    // Settings that do not change the capabilities.
    for text in ["caching:memory_limit=1G,max_split_size=32M", "lab:segment=2M", "remap:steal=always"] {
        let (default, now) = of(text);
        assert_eq!(now, default, "{text}");
    }
}

#[test]
fn device_without_a_need_is_refused_with_alternatives() {
    let device = || {
        let profile = Profile { vmm: None, pool: None, ..Profile::h200() };
        Arc::new(SimDriver::new(profile, SimMemory::None)) as Arc<dyn Driver>
    };
    let mut refused = 0;
    let with_setting: Selection = "lab:source=expandable".parse().unwrap();
    // Another test may have registered its own by now, whose settings differ from those of their allocators.
    let of_library = all().into_iter().filter(|backend| ![&OUTSIDE, &NOT_COMPARED].contains(backend));
    for selection in of_library.map(Selection::of).chain([with_setting]) {
        let built = selection.build(&device());
        if selection.capabilities().needs == Needs::Nothing {
            let built = built.unwrap();
            assert_eq!(built.settings(), selection.settings().json(), "{selection}");
            continue;
        }
        let text = built.unwrap_err().to_string();
        assert!(text.contains(selection.name()) && text.contains("H200") && !text.contains('\n'), "{text}");
        let (names, _) = text.split_once('(').unwrap().1.split_once(" do without").unwrap();
        for name in names.split(" and ") {
            assert_eq!(find(name).unwrap().capabilities.needs, Needs::Nothing, "{text}");
        }
        refused += 1;
    }
    assert!(refused >= 4, "{refused}");
}
