//! The screen of `advise`: the recorded run, the settings to change, the lower bound, and unknowns.

use super::evaluate::{Outcome, Setting};
use super::evidence::Evidence;
use super::search::Ranked;
use super::{Advice, Other, Verdict, WORTH, happened, program};
use crate::replay::Bounds;
use crate::words::{RECORD, counted};
use terminal::{Page, command, duration, quoted};
use vramlab::Bytes;
use vramlab::histories::plan::SearchEnd;

/// Largest deviation of a replay from the recording, in percent, that the screen shows without a caution.
const TRUSTED: f64 = 1.0;
/// Number of settings shown after the first.
const NEXT_BEST: usize = 2;

/// Adds the answer for one history.
pub(super) fn report(advice: &Advice, all: bool, page: &mut Page) {
    let (events, streams) = (counted(advice.events, "event"), counted(advice.streams as u64, "stream"));
    let torch = advice.torch.as_ref().map_or(String::new(), |torch| format!(", PyTorch {torch}"));
    page.title(format!("{}: {events}, {streams}{torch}", advice.gpus.named(&advice.trace)));
    advice.gpus.lines().iter().for_each(|line| paragraph(page, line));
    happened::report(advice, page);
    let peak = advice.settings.first().map_or(0, |first| first.outcome.peak_reserved_bytes);
    let first = program::comes_first(&advice.program_changes, advice.verdict, advice.saving_percent, peak);
    if first {
        program_changes(advice, page);
    }
    settings_to_change(advice, page);
    if !first {
        program_changes(advice, page);
    }
    lower_bound(advice, all, page);
    if let Some(host) = &advice.host {
        page.title("Pinned host memory");
        host.sentences().iter().for_each(|sentence| paragraph(page, sentence));
    }
    unknowns(advice, page);
}

/// Ends the page with the next command.
pub(super) fn end(advice: &Advice, page: &mut Page) {
    page.gap();
    let limit = advice.limit_bytes.map_or(String::new(), |limit| match &advice.limit_text {
        Some(text) => format!(" --limit {}", quoted(text)),
        None => format!(" --limit {limit}B"),
    });
    let (trace, gpu) = (quoted(&advice.trace), advice.gpus.argument());
    let arguments = format!("replay {trace} --alloc caching,pytorch-expandable{limit}{gpu}");
    page.next(&command("vramlab", &arguments));
}

/// Minimum memory as text, rounded up so that the shown size is enough.
pub(super) fn at_least(bytes: u64) -> String {
    let shown = Bytes(bytes).to_string();
    // The last shown digit is raised by one.
    let (number, unit) = shown.split_once(' ').unwrap_or((&shown, "B"));
    let enough = |text: &str| text.parse::<Bytes>().is_ok_and(|Bytes(read)| read >= bytes);
    match number.split_once('.').map(|(_, digits)| digits.len()) {
        Some(digits) if !enough(&shown) => {
            let step = 0.1_f64.powi(i32::try_from(digits).unwrap_or(0));
            format!("{:.digits$} {unit}", number.parse::<f64>().unwrap_or(0.0) + step)
        }
        _ => shown,
    }
}

/// Adds a paragraph under a title.
pub(super) fn paragraph(page: &mut Page, text: impl AsRef<str>) {
    page.labelled("", 2, text.as_ref());
}

/// Adds a line that belongs to the paragraph above.
fn detail(page: &mut Page, text: impl AsRef<str>) {
    page.labelled("", 4, text.as_ref());
}

/// A saving; a lower bound where recording started late.
fn saving_words(advice: &Advice, saving: Option<f64>) -> Option<String> {
    let saving = saving.filter(|saving| *saving > 0.0)?;
    Some(match advice.evidence.is_bound() {
        true => format!("saves at least {saving:.1} %"),
        false => format!("-{saving:.1} %"),
    })
}

/// Peak, minimum memory and cost of a setting.
fn outlook(setting: &Setting, saving: Option<String>) -> String {
    format!("{}; {}", memory(setting, saving), cost(&setting.outcome))
}

/// Peak and minimum memory of a setting.
fn memory(setting: &Setting, saving: Option<String>) -> String {
    let Setting { outcome, smallest_memory_bytes, instant_peak_reserved_bytes, .. } = setting;
    let reserved = Bytes(outcome.peak_reserved_bytes);
    let mut out = match &outcome.first_failure {
        Some(failure) => format!("runs out of memory at allocation {} with {reserved} reserved", failure.allocation),
        None if outcome.over_limit => format!("peak reserved {reserved}, above the limit"),
        None => format!("peak reserved {reserved}"),
    };
    let differs = *instant_peak_reserved_bytes != outcome.peak_reserved_bytes;
    let instant = differs.then(|| format!("{} without deferred frees", Bytes(*instant_peak_reserved_bytes)));
    let remarks: Vec<String> = saving.into_iter().chain(instant).collect();
    if !remarks.is_empty() {
        out += &format!(" ({})", remarks.join("; "));
    }
    out += &match smallest_memory_bytes {
        // Under a limit PyTorch counts the full segment of a request, of which expandable segments map a part.
        Some(least) if outcome.runs() && *least > outcome.peak_reserved_bytes.next_multiple_of(2 << 20) => {
            format!(", minimum memory {} (a limit counts whole segments)", at_least(*least))
        }
        Some(least) => format!(", minimum memory {}", at_least(*least)),
        None => ", out of memory at every tested size".to_owned(),
    };
    out
}

fn cost<T>(outcome: &Outcome<T>) -> String {
    driver_time(outcome, " (simulated H200)")
}

/// The device is that of the setting above, which names it.
fn current_cost<T>(outcome: &Outcome<T>) -> String {
    driver_time(outcome, "")
}

fn driver_time<T>(outcome: &Outcome<T>, device: &str) -> String {
    // CAST: seconds back to nanoseconds, for display.
    let time = duration((outcome.simulated_s.unwrap_or(0.0) * 1e9).round() as u64);
    let out = format!("{time} in {}{device}", counted(outcome.calls(), "driver call"));
    match outcome.num_alloc_retries {
        0 => out,
        retries => out + &format!(" and {}", cache_flushes(retries)),
    }
}

fn cache_flushes(count: u64) -> String {
    if count == 1 { "1 cache flush".to_owned() } else { format!("{count} cache flushes") }
}

fn settings_to_change(advice: &Advice, page: &mut Page) {
    let Some(first) = advice.settings.first() else { return };
    let tried = advice.settings.len() + advice.also_tried.len();
    let settings = counted(tried as u64, "setting");
    let recorded = &advice.recorded;
    let now = &recorded.replayed;
    page.title("What would help");
    let off = recorded.replayed_off_percent.filter(|off| off.abs() > TRUSTED);
    let recorded_peak = recorded.peak_reserved_bytes.filter(|_| off.is_some());
    if let Some(off) = off {
        let more = if off > 0.0 { "more" } else { "less" };
        let off = off.abs();
        paragraph(
            page,
            format!("Caution: the replay of the current settings reserves {off:.1} % {more} than recorded."),
        );
        if advice.verdict == Verdict::Change
            && recorded_peak.is_some_and(|peak| first.outcome.peak_reserved_bytes >= peak)
        {
            paragraph(page, "The first setting reserves less than that replay, but not less than the recorded run.");
        }
    }
    if recorded.out_of_memory.is_some() && now.runs() && advice.not_reproduced.is_none() {
        paragraph(page, "In this memory the replay of the current settings does not run out. Peaks are compared:");
    }
    match advice.verdict {
        Verdict::OutOfMemory => {
            let needed = advice.needed_bytes.map_or("more".to_owned(), at_least);
            paragraph(
                page,
                format!("No setting avoids the out-of-memory ({settings} tested). Minimum memory: {needed}, under:"),
            );
        }
        Verdict::Keep => paragraph(page, keep(advice, first, tried) + ":"),
        Verdict::Inconclusive if advice.not_reproduced.is_some() => {
            let why = advice.not_reproduced.as_deref().unwrap_or_default();
            paragraph(page, format!("Inconclusive: {why}. Pass the memory that the program had with --limit."));
            paragraph(page, "Lowest peak reserved within the recording:");
        }
        Verdict::Inconclusive => {
            let why = advice.evidence.inconclusive(first.outcome.peak_reserved_bytes);
            match advice.of_pytorch {
                true => {
                    paragraph(page, format!("Inconclusive: {why}. Record all events from the first CUDA call on:"));
                    RECORD.iter().for_each(|line| paragraph(page, line));
                }
                false => paragraph(page, format!("Inconclusive: {why}. Record all events of the program.")),
            }
            if let Some(kept) = kept(advice) {
                paragraph(page, format!("{kept}."));
            }
            paragraph(page, "Lowest peak reserved within the recording:");
        }
        Verdict::Change | Verdict::NotRecorded => {}
    }
    if advice.verdict == Verdict::Keep {
        // The current settings, or others that are not worth a change.
        let current = advice.settings.iter().find(|setting| setting.conf().acts_as(&recorded.conf)).unwrap_or(first);
        detail(page, outlook(current, None));
    } else {
        match advice.verdict {
            // Not a line to copy: memory runs out under it as well.
            Verdict::OutOfMemory => paragraph(page, first.conf().shown()),
            _ => exported(first, page),
        }
        detail(page, outlook(first, saving_words(advice, advice.saving_percent)));
        if let Some(obstacle) = &advice.obstacle {
            paragraph(page, format!("{obstacle}: use the setting below without expandable segments."));
        }
        if let Some(same_start) = advice.evidence.same_start_peak_reserved_bytes {
            paragraph(page, format!("current settings without the prior cache: peak reserved {}", Bytes(same_start)));
            if advice.saving_percent.is_some_and(|saving| saving > 0.0) {
                paragraph(page, late_start(&advice.evidence, same_start));
            }
        }
        let current = format!("{}; {}", current_memory(&recorded.current), current_cost(now));
        paragraph(
            page,
            match recorded_peak {
                Some(recorded) => {
                    format!("current settings: peak reserved {} recorded; replay: {current}", Bytes(recorded))
                }
                None => format!("current settings: {current}"),
            },
        );
        if let Some(more) = needs_more(advice, first) {
            paragraph(page, more);
        }
    }
    if advice.settings.iter().take(1 + NEXT_BEST).any(|setting| setting.outcome.over_limit) {
        paragraph(
            page,
            "PyTorch lets expandable segments exceed a limit set by set_per_process_memory_fraction; a GPU without more \
             memory refuses.",
        );
    }
    let second = advice.without_expandable_segments.as_ref();
    if first.conf().expandable {
        without_expandable(advice, page);
    }
    let shown = |setting: &Setting| second.is_some_and(|second| second.rank == setting.rank);
    // Where the verdict is to keep the settings, the first tested one is among the others.
    let others = advice.settings.iter().skip(usize::from(advice.verdict != Verdict::Keep));
    let others = others.filter(|setting| !setting.conf().acts_as(&recorded.conf) && !shown(setting));
    let next: Vec<&Setting> =
        others.filter(|setting| advice.given || setting.is_better_than(&recorded.current)).take(NEXT_BEST).collect();
    if !next.is_empty() {
        page.title(if advice.given { "Other tested settings" } else { "Next best" });
    }
    for setting in next {
        paragraph(page, setting.conf().shown());
        if let Some(python) = &setting.python {
            paragraph(page, python);
        }
        detail(page, outlook(setting, None));
    }
}

/// What a saving allows for in a recording that started late.
fn late_start(evidence: &Evidence, same_start: u64) -> String {
    format!(
        "The saving is a lower bound, because recording started late: the setting may have needed up to {} before, and another start \
         changes the current settings' peak to {} from {}.",
        Bytes(evidence.prior_reserved()),
        Bytes(same_start),
        Bytes(evidence.needed_reserved_bytes.unwrap_or(0))
    )
}

/// Peak and minimum memory of the current settings.
fn current_memory(current: &Setting) -> String {
    match (&current.outcome.first_failure, current.smallest_memory_bytes) {
        (None, _) => memory(current, None),
        (Some(_), least) => {
            let least = least.map_or(String::new(), |least| format!(", minimum memory {}", at_least(least)));
            format!("out of memory with peak reserved {}{least}", Bytes(current.outcome.peak_reserved_bytes))
        }
    }
}

/// That the current settings should be kept, and why: by the rule of the ranking, or because little is to be gained. `None` if the
/// verdict does not say so.
pub(super) fn kept(advice: &Advice) -> Option<String> {
    let first = advice.settings.first()?;
    match advice.verdict {
        Verdict::Keep => Some(keep(advice, first, advice.settings.len() + advice.also_tried.len())),
        Verdict::Inconclusive if advice.not_reproduced.is_some() => None,
        Verdict::Inconclusive => {
            let gain = most_to_gain(advice.recorded.peak_reserved_bytes?, advice.bounds.lower_bound_bytes)?;
            Some(format!("Within the recording no setting saves more than {gain:.1} %: keep the current settings"))
        }
        _ => None,
    }
}

/// The saving in percent that no allocator exceeds, if it is too small for a change. No allocator reserves less than the bound.
fn most_to_gain(peak: u64, bound: u64) -> Option<f64> {
    // CAST: bytes of a device, below 2^53.
    let gain = 100.0 * (1.0 - bound as f64 / peak.max(1) as f64).max(0.0);
    // Rounded up: the sentence is a bound.
    let gain = (gain * 10.0).ceil() / 10.0;
    (gain < WORTH).then_some(gain)
}

/// Why the current settings are kept, and what was compared.
fn keep(advice: &Advice, first: &Setting, tried: usize) -> String {
    let current = &advice.recorded.current;
    if tried == 1 {
        return "Keep the current settings; no others were tested".to_owned();
    }
    let (conf, peak) = (first.conf().shown(), first.outcome.peak_reserved_bytes);
    let now = current.outcome.peak_reserved_bytes;
    // CAST: bytes of a device, below 2^53.
    let below_replay = 100.0 * (1.0 - peak as f64 / now.max(1) as f64);
    let certain = advice.saving_percent.unwrap_or(0.0);
    if first.conf().acts_as(&advice.recorded.conf) || !first.is_better_than(current) && certain == 0.0 {
        return format!(
            "Keep the current settings; by peak reserved, minimum memory and driver time none of {tried} tested is better by half a percent"
        );
    }
    if (below_replay - certain).abs() < 0.05 {
        return format!("Keep the current settings; the best of {tried} tested, {conf}, saves {certain:.1} %");
    }
    let reference = advice.evidence.reference();
    let less = if below_replay < 0.0 { "more" } else { "less" };
    // CAST: as above.
    let below_reference = 100.0 * (1.0 - peak as f64 / advice.evidence.reference_bytes().max(1) as f64);
    let but = match certain {
        _ if below_reference <= 0.0 => format!("not less than {reference}"),
        certain if (below_reference - certain).abs() < 0.05 => format!("only {certain:.1} % less than {reference}"),
        certain => format!("recording started late, so that only {certain:.1} % are certain"),
    };
    format!(
        "Keep the current settings; the best of {tried} tested, {conf}, reserves {}, {:.1} % {less} than their replay ({}), but \
         {but}",
        Bytes(peak),
        below_replay.abs(),
        Bytes(now)
    )
}

/// That a setting needs more memory than the current settings, which a lower peak does not show.
pub(super) fn needs_more(advice: &Advice, setting: &Setting) -> Option<String> {
    let current = &advice.recorded.current;
    let (least, now) = setting.smallest_memory_bytes.zip(current.smallest_memory_bytes)?;
    (least > now && advice.verdict != Verdict::OutOfMemory).then(|| {
        format!(
            "It needs more memory than the current settings: minimum memory {} instead of {}.",
            at_least(least),
            at_least(now)
        )
    })
}

/// The program changes, each as one paragraph.
pub(super) fn changes(advice: &Advice) -> Vec<String> {
    let replayed = &advice.recorded.replayed;
    let paragraph =
        |change: &program::Change| format!("{} {} {}", change.sentence(), change.gain(replayed), change.remedy());
    advice.program_changes.iter().map(paragraph).collect()
}

fn program_changes(advice: &Advice, page: &mut Page) {
    if advice.program_changes.is_empty() {
        return;
    }
    page.title("Program changes");
    for change in &advice.program_changes {
        paragraph(page, change.sentence());
        detail(page, change.gain(&advice.recorded.replayed));
        detail(page, change.remedy());
    }
}

/// Adds the lines that set it.
fn exported(setting: &Setting, page: &mut Page) {
    page.verbatim(&setting.conf().export());
    if let Some(meaning) = setting.conf().meaning() {
        detail(page, meaning);
    }
    if let Some(python) = &setting.python {
        paragraph(page, python);
        detail(page, "Add the Python line to the program: PyTorch collects garbage only under a limit.");
    }
}

/// Adds the second answer, for programs that cannot use expandable segments.
fn without_expandable(advice: &Advice, page: &mut Page) {
    page.title("Without expandable segments");
    match &advice.without_expandable_segments {
        Some(second) if second.conf().acts_as(&advice.recorded.conf) => {
            paragraph(page, "No tested setting beats the current settings:");
            detail(page, outlook(second, None));
        }
        Some(second) => {
            exported(second, page);
            let comparable = advice.saving_percent.is_some();
            let saving = advice.evidence.saving(second.outcome.peak_reserved_bytes).filter(|_| comparable);
            detail(page, outlook(second, saving_words(advice, saving)));
            if let Some(more) = needs_more(advice, second) {
                detail(page, more);
            }
        }
        None => paragraph(page, "No such setting was tested."),
    }
    // A program that ran with them can use them.
    if !advice.recorded.conf.expandable && advice.of_pytorch {
        paragraph(page, EXPANDABLE_UNAVAILABLE);
    }
}

/// When PyTorch's expandable segments cannot be used.
const EXPANDABLE_UNAVAILABLE: &str = "Expandable segments are unavailable on Windows, before PyTorch 2.1, in a MemPool with its own \
                                      allocator, and where GPU memory is shared through CUDA IPC (custom all-reduce, as in \
                                      vLLM; before 2.5 also DataLoader workers that send CUDA tensors).";

fn lower_bound(advice: &Advice, all: bool, page: &mut Page) {
    page.title("Lower bound");
    paragraph(page, bounds(advice));
    let other = |outcome: &Outcome<Other>| {
        let ran_out = if outcome.out_of_memory { " (out of memory)" } else { "" };
        format!("{} {}{ran_out}", outcome.of.alloc, Bytes(outcome.peak_reserved_bytes))
    };
    let mut others: Vec<&Outcome<Other>> = advice.other_allocators.iter().collect();
    others.sort_by_key(|outcome| (outcome.out_of_memory, outcome.peak_reserved_bytes));
    if !others.is_empty() {
        let list: Vec<String> = others.into_iter().map(other).collect();
        let end = if all { "." } else { "; --all lists more." };
        paragraph(page, format!("Other allocators: {}{end}", list.join(", ")));
    }
}

/// Peak requested and its lower bounds.
pub(super) fn bounds(advice: &Advice) -> String {
    let live = Bytes(advice.live_bytes);
    let Bounds { lower_bound_bytes, plan_bytes, ordered_lower_bound_bytes, ordered_plan_bytes, .. } = advice.bounds;
    let needs = |bound: u64, plan: Option<u64>, end: Option<SearchEnd>| {
        let short = end == Some(SearchEnd::Memory);
        let plan = match plan {
            Some(plan) if short => format!(" (offline placement within --read-memory: {})", Bytes(plan)),
            Some(plan) => format!(" (offline placement: {})", Bytes(plan)),
            None if short => " (no offline placement: raise --read-memory)".to_owned(),
            None => String::new(),
        };
        format!("{}{plan}", Bytes(bound))
    };
    let waits = advice.unknown.deferred_frees > 0;
    let mut out = match waits {
        true => format!("Peak requested: {live}; lower bound with deferred frees as recorded "),
        false => format!("Peak requested: {live}; lower bound "),
    };
    out += &needs(lower_bound_bytes, plan_bytes, advice.bounds.plan_end);
    if (ordered_lower_bound_bytes, ordered_plan_bytes) != (lower_bound_bytes, plan_bytes) {
        let ordered = needs(ordered_lower_bound_bytes, ordered_plan_bytes, advice.bounds.ordered_plan_end);
        let also = if waits { "also " } else { "" };
        out += &format!("; if {also}no stream waits to reuse another's block {ordered}");
    }
    // Other allocators have one pool for all, and round in other ways.
    let is_below =
        |outcome: &Outcome<Other>| outcome.runs() && outcome.peak_reserved_bytes < lower_bound_bytes / 100 * 99;
    if advice.pools.is_some() {
        out += "; each with the private pools apart, as recorded";
    } else if !waits && advice.other_allocators.iter().any(is_below) {
        out += "; each with sizes as PyTorch rounds them";
    }
    match waits {
        true => out + ". Settings need less where PyTorch, out of memory, waits for these frees.",
        false => out + ".",
    }
}

fn unknowns(advice: &Advice, page: &mut Page) {
    page.title("Unknown");
    unknown(advice).iter().for_each(|sentence| paragraph(page, sentence));
}

/// Sentences about what no replay shows.
pub(super) fn unknown(advice: &Advice) -> Vec<String> {
    let mut out = Vec::new();
    let unknown = &advice.unknown;
    if unknown.deferred_frees > 0 {
        let frees = counted(unknown.deferred_frees, "free");
        out.push(match advice.streams {
            ..2 => format!("{frees} did not complete when requested; the recording of one stream does not show why."),
            _ => format!("{frees} waited for other streams; their completion depends on timing."),
        });
    }
    out.extend(unknown.events.as_ref().map(|events| format!("What other events changed: {events}.")));
    out.extend(advice.evidence.not_seen.iter().cloned());
    if advice.recorded.out_of_memory.is_some() {
        out.push("The program's behaviour if memory had not run out.".to_owned());
    }
    out.push(match unknown.device_free_bytes {
        Some(free) => {
            format!("Memory outside the allocator (context, NCCL, cuBLAS); {} were free on the device.", Bytes(free))
        }
        None => "Memory outside the allocator (context, NCCL, cuBLAS).".to_owned(),
    });
    out.push("Choices that programs make by free memory, such as cuDNN's algorithms.".to_owned());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_minimum_memory_is_never_below_the_exact_size() {
        for bytes in [1, 82 << 20, 4127 << 21, (1 << 30) + 1, 765 << 21, (1 << 40) - (2 << 20), 3 << 40] {
            let shown = at_least(bytes);
            let Bytes(read) = shown.parse().unwrap();
            assert!(read >= bytes && read <= bytes + bytes / 64, "{bytes}: {shown}");
        }
        assert_eq!((at_least(82 << 20), at_least(4127 << 21)), ("82 MiB".to_owned(), "8.07 GiB".to_owned()));
    }
}
