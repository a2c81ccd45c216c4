//! Settings that are declared, read, written and refused.

use super::{Settings, bytes, choice, fraction, nearest, number, switch, text};
use serde::Serialize;

crate::named! {
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    enum Fit {
        Best "best",
        First "first",
    }
}

crate::settings! {
    /// One of each kind.
    #[derive(Clone, Debug, PartialEq)]
    struct Every {
        /// Bytes
        /// of a `segment`.
        segment: u64 = 2 << 20, bytes().at_least(512).at_most(1 << 30);
        /// Most bytes.
        limit: Option<u64> = None, bytes().or("none");
        /// Bytes that stay.
        keep: u64 = u64::MAX, bytes().or("max");
        /// Bins.
        bins: u32 = 8, number(1..=64);
        /// Part of the limit.
        threshold: f64 = 0.0, fraction();
        /// Whether to try again.
        again: bool = true, switch();
        /// Which block.
        fit: Fit = Fit::Best, choice();
        /// A word.
        word: String = "a".into(), text("a word");
    }
    check Every::consistent;
}

impl Every {
    fn consistent(&self) -> Result<(), String> {
        if self.threshold > 0.0 && self.limit.is_none() { Err("threshold needs limit".into()) } else { Ok(()) }
    }
}

#[test]
fn every_kind_reads_what_it_writes() {
    assert_eq!((Fit::named("first"), Fit::named("last")), (Some(Fit::First), None));
    let mut settings = Every::default();
    let values = [
        ("segment", "3M"),
        ("limit", "1025"),
        ("keep", "5K"),
        ("bins", "64"),
        ("threshold", "0.25"),
        ("again", "off"),
        ("fit", "first"),
        ("word", "b"),
    ];
    for (name, text) in values {
        let before = settings.get(name).unwrap();
        assert_ne!(before, text, "{name}");
        settings.set(name, text).unwrap();
        assert_eq!(settings.get(name).as_deref(), Some(text), "{name}");
    }
    assert_eq!((settings.segment, settings.limit, settings.fit), (3 << 20, Some(1025), Fit::First));
    // Back to what it was, by the text of the defaults.
    for setting in Every::default().list() {
        settings.set(setting.name, &setting.value).unwrap();
    }
    assert_eq!(settings, Every::default());
    assert_eq!(Every::default().list().len(), values.len());
}

#[test]
fn what_a_setting_does_not_take_is_refused_and_changes_nothing() {
    let mut settings = Every::default();
    for (name, text, takes) in [
        ("segment", "511", "bytes, such as 512M, at least 512, at most 1G"),
        ("segment", "2G", "bytes, such as 512M, at least 512, at most 1G"),
        ("limit", "None", "bytes, such as 512M, or none"),
        ("bins", "0", "a whole number from 1 to 64"),
        ("bins", "-1", "a whole number from 1 to 64"),
        ("threshold", "nan", "a number from 0 to 1"),
        ("threshold", "1.01", "a number from 0 to 1"),
        ("again", "yes", "on or off"),
        ("fit", "worst", "best or first"),
    ] {
        let error = settings.set(name, text).unwrap_err().to_string();
        assert_eq!(error, format!("'{name}' takes {takes}; found '{text}'"));
    }
    let error = settings.set("segments", "1M").unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no setting 'segments'; did you mean 'segment'? \
         There are segment, limit, keep, bins, threshold, again, fit, word"
    );
    assert_eq!(settings, Every::default());
    let error = super::NoSettings {}.set("x", "1").unwrap_err().to_string();
    assert_eq!(error, "there is no setting 'x'; there are none");
}

#[test]
fn help_is_one_plain_line_and_json_has_types() {
    let settings = Every::default();
    assert_eq!(settings.list()[0].help, "Bytes of a segment");
    let json = settings.json();
    assert_eq!(json["limit"], serde_json::Value::Null);
    assert_eq!((json["keep"].as_u64(), json["again"].as_bool()), (Some(u64::MAX), Some(true)));
}

#[test]
fn what_settings_mean_together_is_checked() {
    let mut settings = Every { threshold: 0.5, ..Every::default() };
    assert_eq!(settings.check(), Err("threshold needs limit".to_owned()));
    settings.limit = Some(1);
    assert_eq!(settings.check(), Ok(()));
    let copy = settings.boxed();
    assert_eq!(copy.get_as::<Every>(), Some(&settings));
    assert!(copy.get_as::<super::NoSettings>().is_none());
}

#[test]
fn a_name_that_is_like_none_has_no_nearest() {
    let names = ["naive", "caching", "stream-ordered"];
    assert_eq!(nearest("cachign", names), Some("caching"));
    assert_eq!(nearest("Stream_Ordered", names), Some("stream-ordered"));
    assert_eq!(nearest("zzz", names), None);
}

crate::settings! {
    /// All of another, and one more.
    #[derive(Clone, Debug, PartialEq)]
    struct More extends every: Every {
        /// One more.
        more: bool = false, switch();
    }
}

#[test]
fn settings_extend_others() {
    let mut settings = More::default();
    settings.set("bins", "9").unwrap();
    settings.set("more", "on").unwrap();
    assert!(settings.more && settings.every.bins == 9 && settings.get("bins").as_deref() == Some("9"));
    let names: Vec<&str> = settings.list().iter().map(|setting| setting.name).collect();
    assert_eq!((names.first(), names.last(), names.len()), (Some(&"segment"), Some(&"more"), 9));
    assert_eq!((&settings.json()["bins"], &settings.json()["more"]), (&9.into(), &true.into()));
    assert!(settings.set("mor", "on").unwrap_err().to_string().ends_with("fit, word, more"));
    settings.set("threshold", "0.5").unwrap();
    assert_eq!(settings.check(), Err("threshold needs limit".into()));
    assert!(settings.take_over(&Every::default()) && settings.more && settings.every == Every::default());
    assert!(!settings.take_over(&super::NoSettings::default()));
}
