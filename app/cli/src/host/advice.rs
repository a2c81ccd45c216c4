//! Advice on pinned host memory: PyTorch's settings by release, and changes of the program.

use super::replay::{peak_live_least, range};
use crate::words::{counted, size};
use anyhow::Result;
use serde::Serialize;
use terminal::seconds;
use vramlab::backends::{HostPyTorchSettings, HostRelease, hosts};
use vramlab::histories::host::{HostReplay, HostReport, HostTrace, Side, Sizes, replay_host};
use vramlab::settings::Settings as _;
use vramlab::{HostCosts, Pinning, Selection};

/// Smallest gain, of pinned bytes, for which a change is advised.
const WORTH: f64 = 0.02;
/// Thresholds that are tried, in MiB.
const THRESHOLDS: [u64; 5] = [1, 16, 64, 256, 1024];
/// Threads that touch memory before it is registered: the smallest number of the built-in costs.
const THREADS: u32 = 4;

/// Pinned host memory under other settings, and by changes of the program.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostAdvice {
    /// Release of PyTorch whose rules were replayed.
    release: &'static str,
    /// What the sizes of the recording are: of `blocks`, each request is known within a factor of two.
    sizes: Sizes,
    /// Most bytes that were requested and live at once; an upper bound if requests are not known.
    peak_requested_bytes: u64,
    /// Lower bound on it.
    peak_requested_least_bytes: u64,
    /// Most bytes that were pinned at once: as recorded, else as replayed.
    peak_reserved_bytes: u64,
    /// Bytes due to rounding at that peak; an upper bound if requests are not known.
    rounding_bytes: u64,
    /// The recorded settings, and better ones, the best first.
    settings: Vec<HostSetting>,
    /// Changes of the program that save at least 2 %, the largest saving first.
    changes: Vec<HostChange>,
    /// Machine of the costs.
    costs: String,
}

/// Pinned memory under a setting.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HostSetting {
    /// In the syntax of `PYTORCH_ALLOC_CONF`; empty for the defaults.
    conf: String,
    peak_reserved_bytes: u64,
    /// The same under the smallest possible requests.
    peak_reserved_least_bytes: u64,
    /// Calls that pin memory.
    calls: u64,
    /// Their time; `null` where no cost was measured.
    seconds: Option<f64>,
}

/// A change of the program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct HostChange {
    kind: ChangeKind,
    /// Most bytes that are pinned with it, at most.
    peak_reserved_bytes: u64,
    /// Bytes that it saves, at least.
    saved_bytes: u64,
    /// Calls that pin memory.
    calls: u64,
    /// Their time; `null` where no cost was measured.
    seconds: Option<f64>,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ChangeKind {
    /// Pin once and in place: `torch.cuda.cudart().cudaHostRegister` on ordinary tensors.
    RegisterInPlace,
    /// One pinned buffer for everything that is live at once, and views of it.
    FlatBuffer,
}

impl ChangeKind {
    fn words(self) -> &'static str {
        match self {
            Self::RegisterInPlace => "pin once and in place with torch.cuda.cudart().cudaHostRegister",
            Self::FlatBuffer => "allocate one pinned buffer and use views of it",
        }
    }
}

/// A setting that is tried.
fn candidates(recorded: &HostPyTorchSettings) -> Vec<HostPyTorchSettings> {
    let mut out = Vec::new();
    if recorded.release.has_thresholds() {
        for threshold in THRESHOLDS {
            for cached in [Some(threshold), None] {
                let (round, cached) = (Some(threshold), cached);
                let pair = HostPyTorchSettings {
                    pinned_max_round_threshold_mb: round,
                    pinned_max_cached_size_mb: cached,
                    ..*recorded
                };
                out.push(pair);
            }
        }
    }
    let register = |settings: HostPyTorchSettings| HostPyTorchSettings {
        pinned_use_cuda_host_register: true,
        pinned_num_register_threads: settings.pinned_num_register_threads.max(THREADS),
        ..settings
    };
    let registered: Vec<_> = out.iter().copied().chain([*recorded]).map(register).collect();
    out.extend(registered);
    // Only pairs with which no request can overrun its block.
    out.retain(|settings| !settings.can_overrun() && settings != recorded);
    out
}

/// The text of `PYTORCH_ALLOC_CONF`.
fn conf(settings: &HostPyTorchSettings) -> String {
    let defaults = HostPyTorchSettings { release: settings.release, ..HostPyTorchSettings::default() }.list();
    let changed = settings.list().into_iter().zip(defaults).filter(|(now, default)| now != default);
    let value = |text: &str| match text {
        "on" => "True".to_owned(),
        "off" => "False".to_owned(),
        other => other.to_owned(),
    };
    changed.map(|(now, _)| format!("{}:{}", now.name, value(&now.value))).collect::<Vec<_>>().join(",")
}

/// Both bounds of a replay.
struct Bounds {
    least: HostReport,
    most: HostReport,
}

impl Bounds {
    fn new(trace: &HostTrace, alloc: &Selection) -> Result<Self> {
        let replayed = |side| {
            let options = HostReplay { side, ..HostReplay::default() };
            replay_host(trace, alloc, &options)
        };
        Ok(Self { least: replayed(Side::Least)?, most: replayed(Side::Most)? })
    }

    fn peaks(&self) -> [u64; 2] {
        [&self.least, &self.most].map(|report| report.stats.reserved_bytes.all.peak)
    }

    fn setting(&self, conf: String) -> HostSetting {
        let [least, most] = self.peaks();
        let account = self.most.account;
        // CAST: nanoseconds far below 2^53.
        let seconds = account.pin_ns.map(|ns| ns as f64 / 1e9);
        HostSetting { conf, peak_reserved_bytes: most, peak_reserved_least_bytes: least, calls: account.pins, seconds }
    }
}

/// The allocator that follows PyTorch, with these settings.
fn pytorch(settings: &HostPyTorchSettings) -> Option<Selection> {
    hosts().into_iter().find(|backend| backend.has_setting("release")).map(|backend| Selection::with(backend, settings))
}

/// Advice for a recording of pinned memory. `release` is the one that will run the program, if it is named.
///
/// # Errors
/// Those of a replay.
pub(crate) fn advise(
    trace: &HostTrace,
    recorded: &HostPyTorchSettings,
    release: Option<HostRelease>,
) -> Result<Option<HostAdvice>> {
    let mut recorded = *recorded;
    if let Some(release) = release {
        let defaults = HostPyTorchSettings::default();
        recorded.release = release;
        // An older release has fewer settings.
        if !release.has_thresholds() {
            recorded.pinned_max_round_threshold_mb = defaults.pinned_max_round_threshold_mb;
            recorded.pinned_max_cached_size_mb = defaults.pinned_max_cached_size_mb;
        }
        if !release.has_reserve() {
            recorded.pinned_reserve_segment_size_mb = defaults.pinned_reserve_segment_size_mb;
        }
    }
    let Some(alloc) = pytorch(&recorded) else { return Ok(None) };
    let current = Bounds::new(trace, &alloc)?;
    let [least, most] = current.peaks();
    let mut settings = vec![current.setting(conf(&recorded))];
    for candidate in candidates(&recorded) {
        let Some(alloc) = pytorch(&candidate) else { continue };
        let bounds = Bounds::new(trace, &alloc)?;
        let [other_least, other_most] = bounds.peaks();
        // A setting is better if it pins less whatever the requests were, or if it pins as much in less time.
        let setting = bounds.setting(conf(&candidate));
        let saves = other_most <= most && gain(least, other_least) >= WORTH;
        let faster = other_most <= most
            && setting.seconds.zip(settings[0].seconds).is_some_and(|(new, old)| new <= old * (1.0 - WORTH));
        if saves || faster {
            settings.push(setting);
        }
    }
    // Least memory first, then least time.
    let time = |setting: &HostSetting| setting.seconds.unwrap_or(f64::MAX);
    settings[1..].sort_by(|a, b| {
        let memory = |setting: &HostSetting| (setting.peak_reserved_least_bytes, setting.peak_reserved_bytes);
        memory(a).cmp(&memory(b)).then(time(a).total_cmp(&time(b)))
    });
    settings.dedup_by(|later, earlier| {
        (later.peak_reserved_least_bytes, later.peak_reserved_bytes, later.calls)
            == (earlier.peak_reserved_least_bytes, earlier.peak_reserved_bytes, earlier.calls)
            && time(later) >= time(earlier)
    });
    let peak_reserved_bytes = trace.recorded_peak.unwrap_or(most);
    let rounding_bytes = match trace.sizes {
        Sizes::Requested => current.most.ledger.internal,
        Sizes::Blocks => current.least.ledger.internal,
    };
    Ok(Some(HostAdvice {
        release: recorded.release.name(),
        sizes: trace.sizes,
        peak_requested_bytes: trace.peak_live,
        peak_requested_least_bytes: peak_live_least(trace),
        peak_reserved_bytes,
        rounding_bytes,
        changes: changes(trace, peak_reserved_bytes, &current),
        settings,
        costs: HostCosts::h100x8().name,
    }))
}

/// The share of `before` that `after` saves.
fn gain(before: u64, after: u64) -> f64 {
    // CAST: a share.
    1.0 - after as f64 / before.max(1) as f64
}

/// Changes of the program that save memory whatever the requests were.
fn changes(trace: &HostTrace, reserved: u64, current: &Bounds) -> Vec<HostChange> {
    let costs = HostCosts::h100x8();
    let live = trace.peak_live;
    // One registration for each block that PyTorch pinned; one call for the buffer.
    let options = [
        (ChangeKind::RegisterInPlace, live, current.most.account.pins, Pinning::Register { threads: THREADS }),
        (ChangeKind::FlatBuffer, live.checked_next_power_of_two().unwrap_or(live), 1, Pinning::Alloc),
    ];
    let mut out: Vec<HostChange> = options
        .into_iter()
        .filter(|(_, bytes, ..)| gain(reserved, *bytes) >= WORTH)
        .map(|(kind, bytes, calls, pinning)| HostChange {
            kind,
            peak_reserved_bytes: bytes,
            saved_bytes: reserved - bytes,
            calls,
            // CAST: nanoseconds far below 2^53.
            seconds: costs.pin_ns(bytes, pinning).map(|ns| ns as f64 / 1e9),
        })
        .collect();
    out.sort_by_key(|change| std::cmp::Reverse(change.saved_bytes));
    out
}

impl HostAdvice {
    /// The sentences of the screen.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let requested = range(Some(self.peak_requested_least_bytes), self.peak_requested_bytes);
        let mut out = vec![format!(
            "{} of host memory pinned for {requested} requested; up to {} of it is rounding (PyTorch {})",
            size(self.peak_reserved_bytes),
            size(self.rounding_bytes),
            self.release
        )];
        if let Some(best) = self.settings.get(1) {
            let time =
                best.seconds.map_or(String::new(), |time| format!(", {} on a host {}", seconds(time), self.costs));
            out.push(format!(
                "PYTORCH_ALLOC_CONF={} pins {} in {}{time}",
                best.conf,
                range(Some(best.peak_reserved_least_bytes), best.peak_reserved_bytes),
                counted(best.calls, "call")
            ));
        }
        for change in &self.changes {
            out.push(format!(
                "{}: pins at most {}, saves at least {}",
                change.kind.words(),
                size(change.peak_reserved_bytes),
                size(change.saved_bytes)
            ));
        }
        out
    }
}
