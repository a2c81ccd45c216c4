//! A picture of a part of a capture: ranges, calls with their waits, and the device's work, on one axis of time, as SVG.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use terminal::duration;
use vramlab_nsight::{Attribution, Capture, Wait, WorkKind, steps};

/// Bars beyond this number cannot be told apart on a page.
const MOST_BARS: usize = 1500;
/// Threads and streams that are shown, those with the most time first.
const MOST_LANES: usize = 6;
/// Levels of ranges that are shown.
const MOST_LEVELS: usize = 4;
/// Without steps: the longest part that is shown.
const LONGEST_NS: i64 = 1_000_000_000;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 170.0;
const LANE: f64 = 22.0;

// Okabe and Ito's colours, which people with any colour vision can tell apart (https://jfly.uni-koeln.de/color/).
const ALLOCATE: &str = "#009E73";
const FREE: &str = "#D55E00";
const LAUNCH: &str = "#999999";
const SYNCHRONIZE: &str = "#0072B2";
const KERNEL: &str = "#56B4E9";
const COPY: &str = "#E69F00";
const OTHER: &str = "#cccccc";

/// The part of a capture that a picture shows.
pub(crate) struct Window {
    /// Its title: `step 187`, or its place in the capture.
    pub(crate) title: String,
    start: i64,
    end: i64,
}

impl Window {
    /// A step of median duration, not among the first; without steps, the second in which calls waited most, or as much of it as a
    /// picture can show.
    pub(crate) fn new(capture: &Capture, attribution: &Attribution) -> Self {
        let mut named: Vec<_> = capture.ranges.iter().filter(|range| steps(&range.text).is_some()).collect();
        if !named.is_empty() {
            named.drain(..named.len() / 4);
            named.sort_by_key(|range| range.end - range.start);
            let range = named[named.len() / 2];
            return Self { title: range.text.clone(), start: range.start, end: range.end };
        }
        let (first, last) = capture.span();
        let mut length = (last - first).min(LONGEST_NS);
        loop {
            let start = busiest(capture, &attribution.waits, length).unwrap_or(first);
            let end = start + length;
            let calls = capture.calls.iter().filter(|call| call.start < end && call.end > start).count();
            let work = capture.work.iter().filter(|work| work.start < end && work.end > start).count();
            if calls + work <= MOST_BARS || length < 1000 {
                let ns = |ns: i64| duration(ns.unsigned_abs());
                return Self { title: format!("{} from {} on", ns(length), ns(start - first)), start, end };
            }
            length /= 2;
        }
    }

    /// From its start to its end.
    pub(crate) fn length(&self) -> i64 {
        self.end - self.start
    }
}

/// The start of the part of this length in which calls lost most time.
fn busiest(capture: &Capture, waits: &[Wait], length: i64) -> Option<i64> {
    let start = |wait: &Wait| capture.calls[wait.call].start;
    let (mut first, mut sum, mut best) = (0, 0, None);
    for wait in waits {
        sum += wait.blocked_ns;
        while start(wait) - start(&waits[first]) >= length {
            sum -= waits[first].blocked_ns;
            first += 1;
        }
        if best.is_none_or(|(most, _)| sum > most) {
            best = Some((sum, start(&waits[first])));
        }
    }
    // A little before, so that the launch behind the wait is seen.
    best.map(|(_, start)| start - length / 20)
}

struct Bar {
    start: i64,
    end: i64,
    colour: &'static str,
    text: String,
    waited: i64,
}

struct Lane {
    label: String,
    bars: Vec<Bar>,
    /// Whether names are written into bars that have room.
    named: bool,
}

/// The picture. Cost: O(calls + work + ranges).
pub(crate) fn svg(capture: &Capture, attribution: &Attribution, window: &Window) -> String {
    let mut lanes = ranges(capture, window);
    lanes.extend(calls(capture, attribution, window));
    lanes.extend(work(capture, window));
    // CAST: a number of lanes, and times of a window, below 2^53.
    let height = LANE * lanes.len() as f64 + 40.0;
    let scale = (WIDTH - LEFT) / window.length().max(1) as f64;
    let x = |time: i64| LEFT + (time.clamp(window.start, window.end) - window.start) as f64 * scale;
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\
         <defs><pattern id=\"wait\" width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"1.6\" height=\"4\" fill=\"#000\"/></pattern></defs>",
        escaped(&window.title)
    );
    for (place, lane) in lanes.iter().enumerate() {
        let top = LANE * place as f64;
        let middle = top + LANE * 0.64;
        let _ = write!(
            svg,
            "<text x=\"0\" y=\"{middle:.1}\" fill=\"currentColor\">{}</text>",
            escaped(&short(&lane.label, 27))
        );
        for bar in &lane.bars {
            let (left, width) = (x(bar.start), (x(bar.end) - x(bar.start)).max(0.6));
            let label = format!("{}, {}", bar.text, duration((bar.end - bar.start).unsigned_abs()));
            let waited = if bar.waited > 0 {
                format!(", {} of it waiting", duration(bar.waited.unsigned_abs()))
            } else {
                String::new()
            };
            let _ = write!(
                svg,
                "<rect x=\"{left:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{}\"><title>{}</title></rect>",
                top + 2.0,
                LANE - 4.0,
                bar.colour,
                escaped(&(label + &waited))
            );
            if bar.waited > 0 {
                let width = (x(bar.start + bar.waited) - left).max(0.6);
                let (y, height) = (top + 2.0, LANE - 4.0);
                let _ = write!(
                    svg,
                    "<rect x=\"{left:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" fill=\"url(#wait)\" pointer-events=\"none\"/>"
                );
            }
            if lane.named && width > 7.0 * bar.text.chars().count() as f64 {
                let _ = write!(
                    svg,
                    "<text x=\"{:.1}\" y=\"{middle:.1}\" fill=\"#000\">{}</text>",
                    left + 3.0,
                    escaped(&bar.text)
                );
            }
        }
    }
    axis(&mut svg, window, LANE * lanes.len() as f64, scale);
    svg + "</svg>"
}

/// Ticks at round times below the lanes.
fn axis(svg: &mut String, window: &Window, top: f64, scale: f64) {
    let length = window.length().max(1);
    let mut step = 1;
    // At most eight ticks, at 1, 2 or 5 times a power of ten.
    'steps: loop {
        for factor in [1, 2, 5] {
            if length / (step * factor) <= 8 {
                step *= factor;
                break 'steps;
            }
        }
        step *= 10;
    }
    let _ = write!(
        svg,
        "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"currentColor\"/>",
        top + 4.0,
        top + 4.0
    );
    for time in (0..=length).step_by(usize::try_from(step).unwrap_or(1)) {
        let x = LEFT + time as f64 * scale;
        let anchor = if x > WIDTH - 30.0 { "end" } else { "middle" };
        let _ = write!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"currentColor\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"currentColor\">{}</text>",
            top + 4.0,
            top + 9.0,
            top + 22.0,
            duration(time.unsigned_abs())
        );
    }
}

/// Ranges of the thread with the most calls in the window, by level.
fn ranges(capture: &Capture, window: &Window) -> Vec<Lane> {
    let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
    for call in capture.calls.iter().filter(|call| call.start < window.end && call.end > window.start) {
        *counts.entry(call.thread).or_default() += 1;
    }
    let Some((&thread, _)) = counts.iter().max_by_key(|&(_, count)| count) else { return Vec::new() };
    let mut levels: BTreeMap<usize, Vec<Bar>> = BTreeMap::new();
    for range in &capture.ranges {
        if range.thread == thread && range.start < window.end && range.end > window.start {
            let text = range.text.clone();
            let bar = Bar { start: range.start, end: range.end, colour: "#e8e8e8", text, waited: 0 };
            levels.entry(range.level).or_default().push(bar);
        }
    }
    let lane =
        |(place, bars)| Lane { label: if place == 0 { "ranges".to_owned() } else { String::new() }, bars, named: true };
    levels.into_values().take(MOST_LEVELS).enumerate().map(lane).collect()
}

/// Whether more than one process worked.
fn several_processes(capture: &Capture) -> bool {
    let mut processes =
        capture.calls.iter().map(|call| call.process).chain(capture.work.iter().map(|work| work.process));
    processes.next().is_some_and(|first| processes.any(|process| process != first))
}

/// The beginning of a label. The lower 24 bits of Nsight's global id are the system's number.
fn process(id: i64) -> String {
    format!("pid {}, ", id & 0xFF_FFFF)
}

/// Calls by thread.
fn calls(capture: &Capture, attribution: &Attribution, window: &Window) -> Vec<Lane> {
    let blocked: HashMap<usize, i64> = attribution.waits.iter().map(|wait| (wait.call, wait.blocked_ns)).collect();
    let mut threads: BTreeMap<i64, Vec<Bar>> = BTreeMap::new();
    for (index, call) in capture.calls.iter().enumerate() {
        if call.start >= window.end || call.end <= window.start {
            continue;
        }
        let name = capture.call_name(call);
        let colour = match name.kind.as_str() {
            "mem_free" | "mem_free_async" | "host_free" | "mem_unmap" | "mem_release" => FREE,
            "mem_alloc" | "mem_alloc_async" | "host_alloc" | "mem_create" | "mem_map" => ALLOCATE,
            "kernel_launch" | "graph_launch" => LAUNCH,
            kind if kind.ends_with("_synchronize") => SYNCHRONIZE,
            _ => OTHER,
        };
        let waited = blocked.get(&index).copied().unwrap_or(0).min(call.duration());
        threads.entry(call.thread).or_default().push(Bar {
            start: call.start,
            end: call.end,
            colour,
            text: name.name.clone(),
            waited,
        });
    }
    let several = several_processes(capture);
    let processes: HashMap<i64, String> = match several {
        true => capture.calls.iter().map(|call| (call.thread, process(call.process))).collect(),
        false => HashMap::new(),
    };
    let label = |thread: i64| {
        let name = capture.threads.get(&thread);
        let thread_name = name.map_or_else(|| format!("thread {}", thread & 0xFF_FFFF), Clone::clone);
        format!("calls, {}{thread_name}", processes.get(&thread).map_or("", String::as_str))
    };
    most(threads, label)
}

/// Work by device and stream.
fn work(capture: &Capture, window: &Window) -> Vec<Lane> {
    let mut streams: BTreeMap<(i64, i64, i64), Vec<Bar>> = BTreeMap::new();
    let devices: std::collections::BTreeSet<i64> = capture.work.iter().map(|work| work.device).collect();
    for work in capture.work.iter().filter(|work| work.start < window.end && work.end > window.start) {
        let colour = if matches!(work.kind, WorkKind::Kernel | WorkKind::Graph) { KERNEL } else { COPY };
        let text = capture.work_name(work).to_owned();
        let bar = Bar { start: work.start, end: work.end, colour, text, waited: 0 };
        streams.entry((work.process, work.device, work.stream)).or_default().push(bar);
    }
    let several = several_processes(capture);
    let label = |(id, device, stream): (i64, i64, i64)| {
        let name = capture.streams.get(&stream).cloned().unwrap_or_else(|| format!("stream {stream}"));
        let name = if devices.len() > 1 { format!("GPU {device}, {name}") } else { name };
        if several { process(id) + &name } else { name }
    };
    most(streams, label)
}

/// The lanes with the most time, in the order of their keys.
fn most<K: Ord + Copy>(lanes: BTreeMap<K, Vec<Bar>>, label: impl Fn(K) -> String) -> Vec<Lane> {
    let time = |bars: &[Bar]| bars.iter().map(|bar| bar.end - bar.start).sum::<i64>();
    let mut times: Vec<i64> = lanes.values().map(|bars| time(bars)).collect();
    times.sort_unstable_by(|a, b| b.cmp(a));
    let least = times.get(MOST_LANES - 1).copied().unwrap_or(0);
    let shown = lanes.into_iter().filter(|(_, bars)| time(bars) >= least).take(MOST_LANES);
    shown.map(|(key, bars)| Lane { label: label(key), bars, named: false }).collect()
}

/// The colours with their meaning, as HTML.
pub(crate) fn legend() -> String {
    let meanings = [
        (ALLOCATE, "allocate"),
        (FREE, "free"),
        (LAUNCH, "launch"),
        (SYNCHRONIZE, "synchronize"),
        (OTHER, "other call"),
        (KERNEL, "kernel"),
        (COPY, "copy or fill"),
    ];
    let mut html = String::new();
    for (colour, meaning) in meanings {
        let _ = write!(html, "<span><i style=\"background:{colour}\"></i>{meaning}</span> ");
    }
    html + "<span><i class=\"wait\"></i>part of a call in which it waited for the GPU</span>"
}

fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_owned() } else { text.chars().take(most - 1).chain(['…']).collect() }
}

/// Text as it may stand in HTML and SVG, in content and in attributes.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            character if character.is_control() => out.push('\u{fffd}'),
            character => out.push(character),
        }
    }
    out
}
