//! Tests of texts for allocators: reading, writing, errors.

use super::{Selection, parse_list};
use crate::backends::{CachingSettings, all, caching, naive, pytorch, stream_ordered};
use crate::policy::size::torch::Divisions;
use vramlab_device::PoolSettings;
use vramlab_device::settings::Settings;

fn read(text: &str) -> Selection {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn error(text: &str) -> String {
    text.parse::<Selection>().map(|found| found.to_string()).unwrap_err().to_string()
}

fn list(text: &str) -> Vec<String> {
    let list = parse_list(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    list.iter().map(Selection::to_string).collect()
}

#[test]
fn a_name_has_the_defaults_and_settings_their_types() {
    assert_eq!(read("caching"), Selection::of(&caching::BACKEND));
    let chosen = read("caching:memory_limit=1G, max_split_size=32M,roundup_power2_divisions=[1:4,64:8]");
    let settings = chosen.settings().get_as::<CachingSettings>().unwrap();
    assert_eq!((settings.memory_limit, settings.max_split_size), (Some(1 << 30), Some(32 << 20)));
    assert_eq!(settings.roundup_power2_divisions.0[..7], [4, 0, 0, 0, 0, 0, 8]);
    // In the backend's order, in one spelling.
    let text = "caching:max_split_size=32M,roundup_power2_divisions=[1:4,64:8],memory_limit=1G";
    assert_eq!(chosen.to_string(), text);
    assert_eq!(read(text), chosen);
    let pool = read("stream-ordered:release_threshold=max,reuse_allow_opportunistic=off");
    let expected = PoolSettings { reuse_allow_opportunistic: false, ..PoolSettings::default() };
    assert_eq!(pool.settings().get_as::<PoolSettings>(), Some(&expected));
}

#[test]
fn every_setting_of_every_backend_can_be_written_out() {
    for backend in all() {
        let settings: Vec<String> =
            backend.settings().iter().map(|setting| format!("{}={}", setting.name, setting.value)).collect();
        let colon = if settings.is_empty() { "" } else { ":" };
        let text = format!("{}{colon}{}", backend.name, settings.join(","));
        let chosen = read(&text);
        assert_eq!(chosen.to_string(), text);
        assert_eq!(chosen, Selection::of(backend), "a default that is written out changes nothing");
        assert_eq!(serde_json::from_str::<Selection>(&serde_json::to_string(&chosen).unwrap()).unwrap(), chosen);
        assert!(!backend.summary.is_empty() && backend.settings().iter().all(|setting| !setting.help.is_empty()));
    }
}

#[test]
fn what_is_wrong_is_named_with_what_there_is() {
    let text = error("cacheing");
    assert!(text.starts_with("no allocator is called 'cacheing'; did you mean 'caching'? There are "), "{text}");
    for backend in all() {
        assert!(text.contains(backend.name), "{text}");
    }
    let text = error("caching:max_split_size_mb=32");
    assert!(
        text.starts_with("caching: there is no setting 'max_split_size_mb'; did you mean 'max_split_size'?"),
        "{text}"
    );
    assert!(text.contains("garbage_collection_threshold, "), "{text}");
    assert_eq!(
        error("caching:max_split_size=19M"),
        "caching: 'max_split_size' takes bytes, such as 512M, at least 20M, or none; found '19M'"
    );
    assert_eq!(error("naive:x=1"), "naive: there is no setting 'x'; there are none");
    assert_eq!(error("caching:memory_limit=1G,memory_limit=1G"), "caching: 'memory_limit' is given twice");
    for text in ["caching:", "caching:memory_limit", "caching,memory_limit=1G", "memory_limit=1G", "naive,caching"] {
        assert!(error(text).contains("write NAME or NAME:key=value,key=value"), "{}", error(text));
    }
    assert!(error("").starts_with("no allocator is called ''"), "{}", error(""));
}

#[test]
fn a_list_has_commas_between_allocators_and_between_settings() {
    assert_eq!(list("naive,caching"), ["naive", "caching"]);
    let text = "naive,caching:max_split_size=32M,memory_limit=1G,stream-ordered:release_threshold=0,naive";
    let expected =
        ["naive", "caching:max_split_size=32M,memory_limit=1G", "stream-ordered:release_threshold=0", "naive"];
    assert_eq!(list(text), expected);
    assert_eq!(
        list("caching:roundup_power2_divisions=[1:4,>:8],memory_limit=1G, naive"),
        ["caching:roundup_power2_divisions=[1:4,>:8],memory_limit=1G", "naive"]
    );
    assert_eq!(list("all").len(), all().len());
    for text in ["memory_limit=1G,caching", "naive,memory_limit=1G", "naive,,caching", "", "caching:a=[1,naive"] {
        assert!(parse_list(text).is_err(), "{text}");
    }
}

#[test]
fn what_a_history_says_counts_where_nothing_was_given() {
    let recorded = CachingSettings {
        // Less than the command line accepts: recorded values are taken as they are.
        max_split_size: Some(1 << 20),
        garbage_collection_threshold: 0.5,
        memory_limit: Some(1 << 30),
        roundup_power2_divisions: Divisions::uniform(4),
        ..CachingSettings::default()
    };
    let mut chosen = read("caching:garbage_collection_threshold=0,retry_fit_after_sync=on");
    chosen.adopt(&recorded);
    let expected = CachingSettings { garbage_collection_threshold: 0.0, retry_fit_after_sync: true, ..recorded };
    assert_eq!(chosen.settings().get_as::<CachingSettings>(), Some(&expected));
    let mut chosen = read("pytorch:garbage_collection_threshold=0,retry_fit_after_sync=on");
    chosen.adopt(&recorded);
    assert_eq!(chosen.settings().get_as::<CachingSettings>(), Some(&expected));
    assert_eq!(Selection::with(&pytorch::BACKEND, &recorded).settings().json(), recorded.json());
    // Another backend takes the settings that it has, which are none here.
    assert_eq!(Selection::with(&naive::BACKEND, &recorded), Selection::of(&naive::BACKEND));
    assert_eq!(Selection::with(&stream_ordered::BACKEND, &recorded), Selection::of(&stream_ordered::BACKEND));
}

#[test]
fn settings_that_do_not_go_together_are_refused_before_a_run() {
    let mut chosen = read("caching:garbage_collection_threshold=0.8");
    let error = chosen.check().unwrap_err().to_string();
    assert_eq!(
        error,
        "caching: garbage_collection_threshold is a fraction of memory_limit, which is not given; set memory_limit, too"
    );
    chosen.set("memory_limit", "1G").unwrap();
    chosen.check().unwrap();
}
