// Reads the page's columns of numbers and computes levels from them.

// Formats bytes; `round` rounds to the last shown digit.
const bytesAs = (n, round) => {
  const unit = n >= 2 ** 40 ? 4 : n >= 2 ** 30 ? 3 : n >= 2 ** 20 ? 2 : n >= 1024 ? 1 : 0;
  const value = n / 1024 ** unit;
  const digits = unit === 0 || Number.isInteger(value) || value >= 100 ? 0 : value >= 9.995 ? 1 : 2;
  return (round(value * 10 ** digits) / 10 ** digits).toFixed(digits) + [" B", " KiB", " MiB", " GiB", " TiB"][unit];
};
const formatBytes = (n) => bytesAs(n, Math.round);
// Required memory, rounded up so that the shown value is enough.
const formatAtLeast = (n) => bytesAs(n, Math.ceil);
const formatTime = (ns) => {
  const size = Math.abs(ns);
  const [scale, unit] = size >= 1e9 ? [1e9, " s"] : size >= 1e6 ? [1e6, " ms"] : size >= 1e3 ? [1e3, " µs"] : [1, " ns"];
  return parseFloat((ns / scale).toPrecision(4)) + unit;
};
const formatCount = (n) => n.toLocaleString("en-US");
const formatAddress = (n) => "0x" + n.toString(16);

// Columns of integers: differences in groups of seven bits, lowest first, the sign in the lowest bit.
class Columns {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }
  varint() {
    let value = 0, scale = 1;
    for (;;) {
      const byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      scale *= 128;
    }
  }
  next(Kind) {
    const length = this.varint(), column = new Kind(length);
    let last = 0;
    for (let i = 0; i < length; i++) {
      const step = this.varint(), half = Math.floor(step / 2);
      last += step % 2 === 0 ? half : -half - 1;
      column[i] = last;
    }
    return column;
  }
}

const readColumns = async (number) => {
  const element = document.getElementById("numbers-" + number);
  const text = atob(element.textContent);
  element.remove();
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Columns(new Uint8Array(await new Response(stream).arrayBuffer()));
};

// One map: the offset of each block, and the segments. Offsets are addresses without the gaps between lanes.
const readMap = async (about, history) => {
  const columns = await readColumns(about.group);
  const map = { about, laneAddress: columns.next(Float64Array), laneBytes: columns.next(Float64Array) };
  map.place = columns.next(Float64Array);
  map.size = columns.next(Float64Array);
  map.path = columns.next(Uint8Array);
  map.segmentStart = columns.next(Uint32Array);
  map.segmentEnd = columns.next(Uint32Array);
  map.segmentPlace = columns.next(Float64Array);
  map.segmentBytes = columns.next(Float64Array);
  map.segmentStream = columns.next(Uint32Array);
  map.segmentPool = columns.next(Uint32Array);
  map.segmentBefore = columns.next(Uint8Array);
  for (let i = 0; i < map.place.length; i++) map.place[i] *= about.unit;
  for (let i = 0; i < map.segmentStart.length; i++) {
    map.segmentPlace[i] *= about.unit;
    map.segmentEnd[i] += map.segmentStart[i];
  }
  map.lanePlace = new Float64Array(map.laneBytes.length + 1);
  for (let i = 0; i < map.laneBytes.length; i++) map.lanePlace[i + 1] = map.lanePlace[i] + map.laneBytes[i];
  map.top = Math.max(map.lanePlace[map.laneBytes.length], 1);
  map.reserved = about.segments ? levels(history.events, map.segmentStart, map.segmentEnd, map.segmentBytes) : null;
  map.active = levels(history.events, history.start, history.end, map.size);
  return map;
};

// The sum of bytes live after each event, from `start` until `end`.
const levels = (events, start, end, bytes) => {
  const level = new Float64Array(events + 1);
  for (let i = 0; i < start.length; i++) {
    level[start[i]] += bytes[i];
    if (end[i] < events) level[end[i]] -= bytes[i];
  }
  for (let i = 1; i <= events; i++) level[i] += level[i - 1];
  level[events] = events > 0 ? level[events - 1] : 0;
  return level;
};

// Converts an offset to an address, and an address to an offset; null outside of all lanes.
const addressOf = (map, place) => {
  const lane = Math.min(before(map.lanePlace, place), map.laneAddress.length - 1);
  return map.laneAddress[lane] + (place - map.lanePlace[lane]);
};
const placeOf = (map, address) => {
  const lane = before(map.laneAddress, address);
  if (lane < 0 || address >= map.laneAddress[lane] + map.laneBytes[lane]) return null;
  return map.lanePlace[lane] + (address - map.laneAddress[lane]);
};
// The last position in ascending numbers whose value is at most `value`; -1 if there is none.
const before = (numbers, value) => {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
};

// The frames of a stack, the innermost first.
const framesOf = (history, stack) => {
  const from = stack > 0 ? history.stackEnd[stack - 1] : 0, to = stack > 0 ? history.stackEnd[stack] : 0;
  return Array.from(history.stackFrames.subarray(from, to), (frame) => history.about.frames[frame]);
};

const readHistory = async (about) => {
  const columns = await readColumns(about.lives);
  const history = { about, events: about.events, time: columns.next(Float64Array) };
  history.start = columns.next(Uint32Array);
  history.freed = columns.next(Uint32Array);
  history.end = columns.next(Uint32Array);
  history.bytes = columns.next(Float64Array);
  history.stream = columns.next(Uint32Array);
  history.stack = columns.next(Uint32Array);
  history.category = columns.next(Uint32Array);
  history.before = columns.next(Uint8Array);
  const count = history.start.length;
  for (let i = 0; i < count; i++) {
    history.freed[i] += history.start[i];
    history.end[i] += history.freed[i];
  }
  history.requested = levels(history.events, history.start, history.freed, history.bytes);
  history.maps = about.maps.map((map) => ({ about: map, ready: null }));
  history.map = (number) => (history.maps[number].ready ??= readMap(about.maps[number], history));
  const explanation = about.answers.explain?.said, points = explanation?.timeline ?? [];
  if (points.length && explanation.peak_reserved.reserved_bytes > 0) {
    const at = (point) => Math.min(Math.max(point.event - 1, 0), Math.max(history.events - 1, 0));
    const known = points.filter((point) => point.largest_hole_bytes !== null);
    history.hole = { event: Uint32Array.from(known, at), bytes: Float64Array.from(known, (point) => point.largest_hole_bytes) };
    const sampled = points.filter((point) => point.device_used_bytes !== null);
    if (sampled.length) history.used = { event: Uint32Array.from(sampled, at), bytes: Float64Array.from(sampled, (point) => point.device_used_bytes) };
  }
  if (about.ledger) {
    const ledger = await readColumns(about.ledger.group);
    history.ledger = { event: ledger.next(Uint32Array) };
    for (const part of LEDGER_PARTS) history.ledger[part.key] = ledger.next(Float64Array);
  }
  // Stacks, numbered from 1: the line of the user's code of each, and its frames.
  history.lineNames = ["", ...about.lines];
  const stacks = (about.stacks ?? null) === null ? null : await readColumns(about.stacks), empty = new Uint32Array(0);
  history.lineOf = Uint32Array.from([0, ...(stacks ? stacks.next(Uint32Array) : empty)]);
  history.stackEnd = Uint32Array.from([0, ...(stacks ? stacks.next(Uint32Array) : empty)]);
  history.stackFrames = stacks ? stacks.next(Uint32Array) : empty;
  for (let i = 1; i < history.stackEnd.length; i++) history.stackEnd[i] += history.stackEnd[i - 1];
  // The nesting depth of each annotation, and the number of nesting levels shown.
  const ends = [], last = (mark) => mark.end ?? Infinity;
  history.strips = 1;
  history.depth = about.marks.map((mark) => {
    if (mark.kind !== "annotation") return 0;
    while (ends.length && ends.at(-1) <= mark.start) ends.pop();
    ends.push(last(mark));
    history.strips = Math.max(history.strips, Math.min(ends.length, 3));
    return ends.length - 1;
  });
  // Positions of events on the axis: by number, or by the log's time.
  history.byNumber = new Float64Array(history.events + 1).map((_, i) => i);
  if (about.timed) {
    history.byTime = new Float64Array(history.events + 1);
    history.byTime.set(history.time);
    // Space after the last event keeps it visible.
    const last = history.events > 0 ? history.time[history.events - 1] : 0;
    history.byTime[history.events] = last + Math.max(last / 400, 1);
  }
  return history;
};

// Parts of reserved memory, from bottom to top.
const LEDGER_PARTS = [
  { key: "requested", name: "requested", tint: "#3b6fb6", says: "requested bytes of live blocks" },
  { key: "internal", name: "rounding", tint: "#8fb8de", says: "rounding inside live blocks" },
  { key: "pending", name: "pending", tint: "#b07aa1", says: "freed, but work of another stream may still use it" },
  { key: "hard", name: "partly used", tint: "#d1495b", says: "free blocks that share a segment, or a page of an expandable one, with active blocks: not releasable" },
  { key: "stream", name: "other streams", tint: "#edae49", says: "free blocks in segments of other streams" },
  { key: "soft", name: "free", tint: "#9aa5a0", says: "free segments and whole free pages: releasable" },
];
