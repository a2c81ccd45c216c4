//! The answer in sentences: what happened, what would help, what cannot, and what the file does not tell.

use super::evaluate::{Outcome, Setting};
use super::evidence::Evidence;
use super::{Advice, LimitSource, Other, Verdict, program};
use crate::explain::phases;
use crate::replay::Bounds;
use crate::words::{RECORD, counted};
use terminal::{Page, command, duration, quoted};
use vramlab::Bytes;
use vramlab::histories::plan::SearchEnd;

/// Replays that are farther from what was recorded, in percent, are to be taken with care.
const TRUSTED: f64 = 1.0;
/// Settings behind the first that are shown.
const NEXT_BEST: usize = 2;

/// Adds the answer for one history.
pub(super) fn report(advice: &Advice, all: bool, page: &mut Page) {
    let (events, streams) = (counted(advice.events, "event"), counted(advice.streams as u64, "stream"));
    let torch = advice.torch.as_ref().map_or(String::new(), |torch| format!(", PyTorch {torch}"));
    page.title(format!("{}: {events}, {streams}{torch}", advice.gpus.named(&advice.trace)));
    advice.gpus.lines().iter().for_each(|line| say(page, line));
    what_happened(advice, page);
    let first = program::comes_first(&advice.program_changes, advice.verdict, advice.saving_percent);
    if first {
        what_a_change_gains(advice, page);
    }
    what_helps(advice, page);
    if !first {
        what_a_change_gains(advice, page);
    }
    what_cannot(advice, all, page);
    what_is_unknown(advice, page);
}

/// Ends the page with the command that goes on from a history.
pub(super) fn end(advice: &Advice, page: &mut Page) {
    page.gap();
    let limit = advice.limit_bytes.map_or(String::new(), |limit| format!(" --limit {limit}B"));
    let (trace, gpu) = (quoted(&advice.trace), advice.gpus.argument());
    let arguments = format!("replay {trace} --alloc caching,pytorch-expandable{limit}{gpu}");
    page.next(&command("vramlab", &arguments));
}

/// Memory that has to be had: shown so that what is shown is enough.
pub(super) fn at_least(bytes: u64) -> String {
    let shown = Bytes(bytes).to_string();
    // As many digits as are shown, the last one more.
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

/// A paragraph under a title.
fn say(page: &mut Page, text: impl AsRef<str>) {
    page.labelled("", 2, text.as_ref());
}

/// What belongs to the line above.
fn detail(page: &mut Page, text: impl AsRef<str>) {
    page.labelled("", 4, text.as_ref());
}

fn what_happened(advice: &Advice, page: &mut Page) {
    page.title("What happened");
    happened(advice).iter().for_each(|sentence| say(page, sentence));
}

/// What happened, and under which limit settings are compared.
pub(super) fn happened(advice: &Advice) -> Vec<String> {
    let mut out = Vec::new();
    if advice.cut.is_some() {
        let events = counted(advice.events, "event");
        out.push(format!("The file was cut short: this is about its first {events}."));
    }
    out.extend(before(&advice.evidence));
    let recorded = &advice.recorded;
    // Long lines break at spaces only.
    let conf = recorded.conf.shown().replace(',', ", ");
    let mut text = match advice.settings_known {
        true => format!("{} It ran under {conf}.", advice.happened),
        false => format!("{} Its settings are missing, and taken to be {conf}.", advice.happened),
    };
    let compared = &advice.evidence.compared;
    let off = recorded.replayed_off_percent;
    if let Some(tested) = compared.sentence() {
        text += &format!(" {tested}");
    } else if let Some(off) = off.filter(|off| *off != 0.0) {
        let more = if off > 0.0 { "more" } else { "less" };
        text += &format!(" Replayed under that it reserves {:.2} % {more}.", off.abs());
    } else if off.is_some() && compared.changes() > 0 {
        text += &format!(" Replayed under that its peak is the same to the byte ({}).", compared.counts());
    }
    out.push(text);
    out.extend(phases::sentence(&advice.phases));
    if let Some((limit, source)) = advice.limit_bytes.zip(advice.limit_source) {
        let limit = Bytes(limit);
        out.push(match source {
            LimitSource::Given => format!("What follows is for a limit of {limit}."),
            LimitSource::Retries => {
                let (times, most) = advice.released.as_ref().map_or((0, 0), |told| (told.times, told.limit_most_bytes));
                let times = if times == 1 { "once".to_owned() } else { format!("{times} times") };
                format!(
                    "Memory was full {times}, and PyTorch released its cache to serve a request, by the stacks of what went back: there \
                     was room for {limit} to {}. What follows is for {limit} (--limit sets it).",
                    Bytes(most)
                )
            }
            LimitSource::Recorded => format!("Its limit was {limit}; what follows is for that."),
            LimitSource::OutOfMemory => {
                format!("There was room for {limit} or little more; what follows is for that (--limit sets it).")
            }
            LimitSource::Collections => format!(
                "Garbage was collected, which PyTorch does under a memory limit only: {limit} or less, by what was reserved \
                 then. What follows is for that (--limit sets it)."
            ),
        });
    }
    if advice.unknown.limit {
        out.push(
            "Garbage may have been collected, which PyTorch does under a memory limit only. Give it with --limit: without it \
             what follows takes these frees for the program's own."
                .to_owned(),
        );
    }
    out
}

/// What was there before the recording began, and what became of it.
fn before(Evidence { before, told_from_end, .. }: &Evidence) -> Option<String> {
    if before.reserved_bytes == 0 {
        return None;
    }
    let (reserved, in_use) = (Bytes(before.reserved_bytes), Bytes(before.in_blocks_bytes.min(before.reserved_bytes)));
    let mut out = match told_from_end {
        true => format!(
            "No segment comes or goes in the recording; the {reserved} of its end are taken to have been there before."
        ),
        false => format!("{reserved} were reserved before the recording began, {in_use} of them in use."),
    };
    let (at_once, returned) = (before.returned_at_once_bytes, before.returned_unused_bytes);
    if at_once > 0 {
        let bytes = Bytes(at_once);
        out += &format!(
            " {bytes} were cached and went back before the first allocation, as an earlier run's cache does by empty_cache."
        );
    }
    if returned > at_once {
        out += &format!(" {} were cached and went back without being used.", Bytes(returned - at_once));
    }
    if before.kept_unused_bytes > 0 {
        out += &format!(" {} stayed cached to the end without being used.", Bytes(before.kept_unused_bytes));
    }
    Some(out)
}

/// What a setting would reserve, need and cost.
fn figures(setting: &Setting, saving: Option<f64>) -> String {
    let Setting { outcome, smallest_memory_bytes, instant_peak_reserved_bytes, .. } = setting;
    let reserved = Bytes(outcome.peak_reserved_bytes);
    let mut out = match &outcome.first_failure {
        Some(failure) => format!("runs out of memory at allocation {} with {reserved} reserved", failure.allocation),
        None if outcome.over_limit => format!("reserves {reserved}, more than the limit"),
        None => format!("reserves {reserved}"),
    };
    if let Some(less) = saving.filter(|less| *less > 0.0) {
        out += &format!(" (-{less:.1} %)");
    }
    if *instant_peak_reserved_bytes != outcome.peak_reserved_bytes {
        out += &format!(" ({} if frees completed at once)", Bytes(*instant_peak_reserved_bytes));
    }
    out += &match smallest_memory_bytes {
        Some(least) if !outcome.runs() => format!(", needs {}", at_least(*least)),
        // Under a limit PyTorch counts the whole segment that a request would take, of which expandable segments map a part.
        Some(least) if *least > outcome.peak_reserved_bytes.next_multiple_of(2 << 20) => {
            format!(", runs in {} (a limit counts whole segments)", at_least(*least))
        }
        Some(least) => format!(", runs in {}", at_least(*least)),
        None => ", and runs in no memory that was tried".to_owned(),
    };
    format!("{out}; {}", cost(outcome))
}

fn cost<T>(outcome: &Outcome<T>) -> String {
    // CAST: seconds back to nanoseconds, for display.
    let time = duration((outcome.simulated_s.unwrap_or(0.0) * 1e9).round() as u64);
    let out = format!("{time} in {} (simulated H200)", counted(outcome.calls(), "driver call"));
    match outcome.num_alloc_retries {
        0 => out,
        1 => out + " and 1 release of the cache",
        retries => out + &format!(" and {retries} releases of the cache"),
    }
}

fn what_helps(advice: &Advice, page: &mut Page) {
    let Some(first) = advice.settings.first() else { return };
    let tried = advice.settings.len() + advice.also_tried.len();
    let settings = counted(tried as u64, "setting");
    let recorded = &advice.recorded;
    let now = &recorded.replayed;
    page.title("What would help");
    let off = recorded.replayed_off_percent.filter(|off| off.abs() > TRUSTED);
    let ran = recorded.peak_reserved_bytes.filter(|_| off.is_some());
    if let Some(off) = off {
        let more = if off > 0.0 { "more" } else { "less" };
        let off = off.abs();
        say(page, format!("Take this with care: what ran is replayed with {off:.1} % {more} than was reserved."));
        if advice.verdict == Verdict::Change && ran.is_some_and(|ran| first.outcome.peak_reserved_bytes >= ran) {
            say(page, "The first setting reserves less than that replay, and no less than what ran.");
        }
    }
    match advice.verdict {
        Verdict::OutOfMemory => {
            let needed = advice.needed_bytes.map_or("more".to_owned(), at_least);
            say(page, format!("No setting mends this: you need {needed} ({settings} tried). It takes the least under"));
        }
        Verdict::Keep => {
            say(
                page,
                match tried {
                    1 => "No change: only what ran was tried, which".to_owned(),
                    _ => match advice.saving_percent.filter(|saving| *saving > 0.0) {
                        Some(saving) => format!(
                            "Keep what you have: {} saves {saving:.1} %, the most of {tried} settings. What ran",
                            first.conf().shown()
                        ),
                        None => {
                            format!(
                                "No change: none of {tried} settings reserves half a percent less than what ran, which"
                            )
                        }
                    },
                },
            );
        }
        Verdict::NotSaid => {
            let why = advice.evidence.not_said(first.outcome.peak_reserved_bytes);
            say(page, format!("The recording does not say: {why}. Record all events from the first CUDA call on:"));
            RECORD.iter().for_each(|line| say(page, line));
            say(page, "In what was recorded, the least is reserved under");
        }
        Verdict::Change | Verdict::NotRecorded => {}
    }
    if advice.verdict == Verdict::Keep {
        // What ran, or what is so little better that it is not worth a change.
        let ran = advice.settings.iter().find(|setting| setting.conf().acts_as(&recorded.conf)).unwrap_or(first);
        detail(page, figures(ran, None));
    } else {
        exported(first, page);
        detail(page, figures(first, advice.saving_percent));
        if let Some(obstacle) = &advice.obstacle {
            say(page, format!("{obstacle}: take what is said below without expandable segments."));
        }
        let what = if now.out_of_memory { "runs out of memory with" } else { "reserves" };
        let reserved = Bytes(now.peak_reserved_bytes);
        if let Some(same_start) = advice.evidence.same_start_peak_reserved_bytes {
            say(page, format!("what ran, begun without what was cached: reserves {}", Bytes(same_start)));
        }
        say(
            page,
            match ran {
                Some(ran) => format!("as it ran: reserved {}; its replay {what} {reserved}; {}", Bytes(ran), cost(now)),
                None => format!("as it ran: {what} {reserved}; {}", cost(now)),
            },
        );
    }
    if advice.settings.iter().take(1 + NEXT_BEST).any(|setting| setting.outcome.over_limit) {
        say(
            page,
            "PyTorch lets expandable segments pass a limit of set_per_process_memory_fraction; a GPU with no more memory \
             refuses.",
        );
    }
    let second = advice.without_expandable_segments.as_ref();
    if first.conf().expandable {
        without_expandable(advice, page);
    }
    let shown = |setting: &Setting| second.is_some_and(|second| second.rank == setting.rank);
    // Where nothing is to be changed, the first is one of them.
    let others = advice.settings.iter().skip(usize::from(advice.verdict != Verdict::Keep));
    let others = others.filter(|setting| !setting.conf().acts_as(&recorded.conf) && !shown(setting));
    let next: Vec<&Setting> = others.take(NEXT_BEST).collect();
    if !next.is_empty() {
        page.title("Next best");
    }
    for setting in next {
        say(page, setting.conf().shown());
        if let Some(python) = &setting.python {
            say(page, python);
        }
        detail(page, figures(setting, None));
    }
}

/// What the program itself could do.
fn what_a_change_gains(advice: &Advice, page: &mut Page) {
    if advice.program_changes.is_empty() {
        return;
    }
    page.title("What a change of the program would gain");
    for change in &advice.program_changes {
        say(page, change.sentence());
        detail(page, change.gain(&advice.recorded.replayed));
        detail(page, change.remedy());
    }
}

/// The lines that set it.
fn exported(setting: &Setting, page: &mut Page) {
    setting.conf().export_lines().iter().for_each(|line| say(page, line));
    if let Some(python) = &setting.python {
        say(page, python);
        detail(page, "The line of Python goes into the program: PyTorch collects garbage under a limit only.");
    }
}

/// The second answer, for programs that cannot have the first.
fn without_expandable(advice: &Advice, page: &mut Page) {
    page.title("Without expandable segments");
    match &advice.without_expandable_segments {
        Some(second) if second.conf().acts_as(&advice.recorded.conf) => {
            say(page, "No setting is better than what ran, which");
            detail(page, figures(second, None));
        }
        Some(second) => {
            exported(second, page);
            let comparable = advice.saving_percent.is_some();
            let saving = advice.evidence.saving(second.outcome.peak_reserved_bytes).filter(|_| comparable);
            detail(page, figures(second, saving));
        }
        None => say(page, "No such setting was looked at."),
    }
    // A program that ran with them can have them.
    if !advice.recorded.conf.expandable {
        say(page, NOT_TO_BE_HAD);
    }
}

/// When PyTorch's expandable segments cannot be used.
const NOT_TO_BE_HAD: &str = "Expandable segments cannot be had on Windows, before PyTorch 2.1, in a MemPool with an allocator of \
                             its own, or where GPU memory is shared by CUDA IPC (custom all-reduce as in vLLM; before 2.5 also \
                             DataLoader workers that send CUDA tensors).";

fn what_cannot(advice: &Advice, all: bool, page: &mut Page) {
    page.title("What no setting can do");
    say(page, least(advice));
    let other = |outcome: &Outcome<Other>| {
        let ran_out = if outcome.out_of_memory { " (runs out)" } else { "" };
        format!("{} {}{ran_out}", outcome.of.alloc, Bytes(outcome.peak_reserved_bytes))
    };
    let mut others: Vec<&Outcome<Other>> = advice.other_allocators.iter().collect();
    others.sort_by_key(|outcome| (outcome.out_of_memory, outcome.peak_reserved_bytes));
    if !others.is_empty() {
        let list: Vec<String> = others.into_iter().map(other).collect();
        let rest = if all { "." } else { "; --all has the rest." };
        say(page, format!("Other allocators: {}{rest}", list.join(", ")));
    }
}

/// What is asked for at once, and what that needs at least.
pub(super) fn least(advice: &Advice) -> String {
    let live = Bytes(advice.live_bytes);
    let Bounds { lower_bound_bytes, plan_bytes, ordered_lower_bound_bytes, ordered_plan_bytes, .. } = advice.bounds;
    let needs = |bound: u64, plan: Option<u64>, end: Option<SearchEnd>| {
        let short = end == Some(SearchEnd::Memory);
        let plan = match plan {
            Some(plan) if short => format!(" (a plan, within --read-memory: {})", Bytes(plan)),
            Some(plan) => format!(" (a plan: {})", Bytes(plan)),
            None if short => " (no plan: --read-memory leaves no room for one)".to_owned(),
            None => String::new(),
        };
        format!("{}{plan}", Bytes(bound))
    };
    let waits = advice.unknown.deferred_frees > 0;
    let mut out = match waits {
        true => format!("{live} are asked for at once. With frees that wait for other streams as they did, at least "),
        false => format!("{live} are asked for at once; at least "),
    };
    out += &needs(lower_bound_bytes, plan_bytes, advice.bounds.plan_end);
    if (ordered_lower_bound_bytes, ordered_plan_bytes) != (lower_bound_bytes, plan_bytes) {
        let ordered = needs(ordered_lower_bound_bytes, ordered_plan_bytes, advice.bounds.ordered_plan_end);
        let besides = if waits { "besides " } else { "" };
        out += &format!("; if {besides}no stream may wait to reuse another's block, {ordered}");
    }
    match waits {
        true => out + ". Settings run in less where PyTorch, out of memory, waits for these frees.",
        false => out + " are needed.",
    }
}

fn what_is_unknown(advice: &Advice, page: &mut Page) {
    page.title("What this does not know");
    unknown(advice).iter().for_each(|sentence| say(page, sentence));
}

/// What no replay can tell.
pub(super) fn unknown(advice: &Advice) -> Vec<String> {
    let mut out = Vec::new();
    let unknown = &advice.unknown;
    if unknown.deferred_frees > 0 {
        let frees = counted(unknown.deferred_frees, "free");
        out.push(format!("{frees} waited for other streams; when these were done depends on timing."));
    }
    out.extend(advice.evidence.not_seen.iter().cloned());
    if advice.recorded.out_of_memory.is_some() {
        out.push("What the program would have done after memory ran out.".to_owned());
    }
    out.push(match unknown.device_free_bytes {
        Some(free) => {
            format!("Memory outside the allocator (context, NCCL, cuBLAS); {} were free on the device.", Bytes(free))
        }
        None => "Memory outside the allocator (context, NCCL, cuBLAS).".to_owned(),
    });
    out.push("What programs choose by free memory, as cuDNN does its algorithms.".to_owned());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_to_be_enough_is() {
        for bytes in [1, 82 << 20, 4127 << 21, (1 << 30) + 1, 765 << 21, (1 << 40) - (2 << 20), 3 << 40] {
            let shown = at_least(bytes);
            let Bytes(read) = shown.parse().unwrap();
            assert!(read >= bytes && read <= bytes + bytes / 64, "{bytes}: {shown}");
        }
        assert_eq!((at_least(82 << 20), at_least(4127 << 21)), ("82 MiB".to_owned(), "8.07 GiB".to_owned()));
    }
}
