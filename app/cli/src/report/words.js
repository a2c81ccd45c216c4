// Text of the page: descriptions of blocks and segments, the search for blocks, tables of values and settings, the chosen moment.

// An event and its time.
const eventWords = (history, event) => {
  return "event " + formatCount(event + 1) + (history.byTime ? " (" + formatTime(history.time[event]) + ")" : "");
};

// Describes a segment, and its free memory after an event, in lines of text.
const describeSegment = (history, map, segment, event) => {
  const low = map.segmentPlace[segment], high = low + map.segmentBytes[segment], inside = [];
  for (let i = 0; i < history.start.length && history.start[i] <= event; i++) {
    if (history.end[i] > event && map.size[i] > 0 && map.place[i] >= low && map.place[i] < high) inside.push(i);
  }
  inside.sort((a, b) => map.place[a] - map.place[b]);
  let used = 0, hole = 0, from = low;
  for (const i of inside) {
    hole = Math.max(hole, map.place[i] - from);
    from = map.place[i] + map.size[i];
    used += map.size[i];
  }
  const free = map.segmentBytes[segment] - used, name = segmentName(history, map, segment);
  hole = Math.max(hole, high - from);
  const open = map.segmentEnd[segment] >= history.events;
  return [
    name[0].toUpperCase() + name.slice(1) + " at " + formatAddress(addressOf(map, low)),
    !history.about.recorded ? "reserved when the snapshot was taken" : (map.segmentBefore[segment] ? "reserved before recording started" : "allocated at " + eventWords(history, map.segmentStart[segment]))
      + (open ? ", reserved at the end" : ", released at " + eventWords(history, map.segmentEnd[segment])),
    (history.about.recorded ? "after " + eventWords(history, event) + ": " : "") + formatCount(inside.length) + (inside.length === 1 ? " block" : " blocks") + " with " + formatBytes(used) + ", " + formatBytes(free) + " free"
      + (free > 0 ? ", largest free block " + formatBytes(hole) : ""),
  ];
};

// Describes a block in lines of text.
const describeBlock = (history, map, i) => {
  const { about } = history, lines = [];
  const rounded = map.size[i] !== history.bytes[i] ? ", block of " + formatBytes(map.size[i]) : "";
  lines.push(formatBytes(history.bytes[i]) + " requested (" + formatCount(history.bytes[i]) + " bytes)" + rounded);
  if (map.size[i] > 0) lines.push("at " + formatAddress(addressOf(map, map.place[i])) + (map.path[i] ? ", served by " + about.paths[map.path[i]] : "") + ", stream " + about.streams[history.stream[i]]);
  else lines.push("no memory: the request failed, stream " + about.streams[history.stream[i]]);
  const when = (event) => eventWords(history, event), segment = segmentOf(map, i, history.start[i]);
  if (segment >= 0) lines.push("in a " + segmentName(history, map, segment));
  const open = history.end[i] >= history.events, from = history.start[i], to = Math.min(history.end[i], history.events - 1);
  const age = formatCount(history.end[i] - from) + " events" + (history.byTime ? ", " + formatTime(history.time[to] - history.time[from]) : "");
  if (!about.recorded) lines.push("live when the snapshot was taken" + (history.freed[i] < history.events ? "; its free is pending" : ""));
  else lines.push((history.before[i] ? "allocated before recording started" : "allocated at " + when(from)) + (open ? ", live at the end: at least " : ", free completed at " + when(history.end[i]) + ": lived ") + age);
  const wait = history.end[i] - history.freed[i];
  if (history.freed[i] < history.events && wait > 1) lines.push("freed at " + when(history.freed[i]) + "; the free was pending for " + formatCount(wait) + " events");
  const line = history.lineNames[history.lineOf[history.stack[i]]];
  const during = history.before[i] ? "" : rangesAt(about, from);
  if (during) lines.push("during " + during);
  const category = about.categories[history.category[i] - 1];
  if (category) lines.push("category " + category);
  if (line) lines.push(line);
  return lines;
};

// Finds blocks at an address, or of a line, a file or a function.
const searchBlocks = (history, map, text) => {
  const out = [], plain = text.toLowerCase().replace(/^[bs](?=[0-9a-f]{6})/, "").replace(/_\d+$/, "");
  const guesses = /^0x[0-9a-f]+$/.test(plain) ? [parseInt(plain, 16)] : /^\d+$/.test(plain) ? [Number(plain), parseInt(plain, 16)]
    : /^[0-9a-f]{4,}$/.test(plain) ? [parseInt(plain, 16)] : [];
  for (const address of guesses) {
    const place = placeOf(map, address);
    if (place === null) continue;
    for (let i = 0; i < history.start.length; i++) if (map.size[i] > 0 && map.place[i] <= place && place < map.place[i] + map.size[i]) out.push(i);
    if (out.length) return out;
  }
  if (guesses.length) return out;
  const matches = (frame) => frame.toLowerCase().includes(text.toLowerCase()), stacks = new Set();
  for (let stack = 1; stack < history.lineOf.length; stack++) {
    if (matches(history.lineNames[history.lineOf[stack]]) || framesOf(history, stack).some(matches)) stacks.add(stack);
  }
  for (let i = 0; stacks.size && i < history.start.length; i++) if (stacks.has(history.stack[i])) out.push(i);
  return out;
};

// A table. On narrow screens each cell shows the name of its column.
const table = (parent, head, rows) => {
  const wide = make("div", parent, { class: "wide" }), element = make("table", wide);
  const top = make("tr", make("thead", element)), words = (i) => rows[0]?.[i] instanceof Node && rows[0][i].classList.contains("words");
  head.forEach((text, i) => make("th", top, words(i) ? { class: "left" } : {}, text));
  const body = make("tbody", element);
  for (const cells of rows) {
    const row = make("tr", body);
    cells.forEach((cell, i) => {
      const element = make(i === 0 ? "th" : "td", row);
      if (words(i)) element.className = "left";
      if (i > 0 && head[i]) element.dataset.name = head[i];
      if (cell instanceof Node) element.append(cell);
      else element.textContent = cell;
    });
  }
  return element;
};

// A table of values: one column for each recording, one row for each value.
const figuresTable = (parent, histories) => {
  if (histories.length === 1) {
    const list = make("dl", parent, { class: "figures" });
    for (const [name, value] of histories[0].figures) {
      const item = make("div", list);
      make("dt", item, {}, name);
      make("dd", item, {}, value);
    }
    return;
  }
  const names = [];
  for (const { figures } of histories) {
    for (const [name] of figures) if (!names.includes(name)) names.push(name);
  }
  const value = (figures, name) => figures.find(([known]) => known === name)?.[1] ?? "–";
  table(parent, ["", ...histories.map((history) => history.title)], names.map((name) => [name, ...histories.map(({ figures }) => value(figures, name))])).classList.add("figures");
};

// Peak reserved under each allocator as bars, with the offline placement and the lower bound.
const settingsTable = (parent, about) => {
  const most = Math.max(...about.settings.map((setting) => setting.peak_reserved_bytes), 1);
  const over = (bytes) => (about.lower_bound_bytes > 0 ? (bytes / about.lower_bound_bytes).toFixed(3) : "–");
  const count = (n) => (n === null ? "–" : formatCount(n));
  const rows = [...about.settings].sort((a, b) => b.measured - a.measured || (a.failed > 0) - (b.failed > 0) || a.peak_reserved_bytes - b.peak_reserved_bytes)
    .map((setting) => [setting.name, formatBytes(setting.peak_reserved_bytes), bar(setting.peak_reserved_bytes, most, setting.measured ? "measured" : setting.failed ? "failed" : "replayed"),
      over(setting.peak_reserved_bytes), count(setting.retries), count(setting.failed), count(setting.driver_calls)]);
  if (about.plan_bytes !== null) rows.push(["offline placement", formatBytes(about.plan_bytes), bar(about.plan_bytes, most, "bound"), over(about.plan_bytes), "–", "–", "–"]);
  rows.push(["lower bound", formatBytes(about.lower_bound_bytes), bar(about.lower_bound_bytes, most, "bound"), over(about.lower_bound_bytes), "–", "–", "–"]);
  const drawn = table(parent, ["allocator", "peak reserved", "", "relative to lower bound", "retries", "failed requests", "driver calls"], rows);
  barLegend(drawn, { bound: "bounds; the offline placement knows all requests in advance" }).classList.add("settings");
};

// Describes an event, from the lifetimes of blocks and segments.
const describeEvent = (history, map, event) => {
  const out = [], say = (verb, i) => out.push(verb + " " + formatBytes(history.bytes[i]) + (map.size[i] > 0 ? " at " + formatAddress(addressOf(map, map.place[i])) : ""));
  for (let i = before(history.start, event); i >= 0 && history.start[i] === event && !history.before[i]; i--) say("allocation of", i);
  for (let i = 0; i < history.start.length && history.start[i] <= event; i++) {
    if (history.freed[i] === event && !(history.before[i] && event === 0)) say("free requested of", i);
    if (history.end[i] === event && history.freed[i] !== event) say("free completed of", i);
  }
  for (let i = 0; i < map.segmentStart.length; i++) {
    if (map.segmentStart[i] === event && !map.segmentBefore[i]) out.push("segment of " + formatBytes(map.segmentBytes[i]) + " allocated");
    if (map.segmentEnd[i] === event) out.push("segment of " + formatBytes(map.segmentBytes[i]) + " released");
  }
  for (const mark of history.about.marks) if (mark.start === event && mark.kind !== "annotation") out.push(mark.text);
  return out;
};

const AROUND = 4;
// Lists the events around a moment.
const listEvents = (parent, history, map, event, choose) => {
  make("h3", parent, {}, "After event " + formatCount(event + 1) + " of " + formatCount(history.events) + (history.byTime ? ", at " + formatTime(history.time[event]) : ""));
  const from = Math.max(event - AROUND, 0), to = Math.min(event + AROUND, history.events - 1), list = make("ol", parent, { class: "events" });
  for (let at = from; at <= to; at++) {
    const item = make("li", list, { value: String(at + 1), ...(at === event ? { "aria-current": "true" } : {}) }), facts = describeEvent(history, map, at);
    const button = make("button", item, { type: "button", class: "way" }, facts.slice(0, 6).join("; ") || "–");
    button.addEventListener("click", () => choose(at));
  }
};
const showMoment = (parent, history, map, event, choose) => {
  if (history.about.recorded) listEvents(parent, history, map, event, choose);
  else make("h3", parent, {}, "When the snapshot was taken");
  const level = [];
  if (map.reserved) level.push("reserved " + formatBytes(map.reserved[event]));
  level.push("active " + formatBytes(map.active[event]), "requested " + formatBytes(history.requested[event]));
  make("p", parent, {}, level.join(", "));
  // Live blocks by line if lines are known, else by size.
  const byLine = history.about.lines.length > 0, groups = new Map();
  let live = 0;
  for (let i = 0; i < history.start.length && history.start[i] <= event; i++) {
    if (history.end[i] <= event || map.size[i] === 0) continue;
    live++;
    const key = byLine ? history.lineNames[history.lineOf[history.stack[i]]] || "not recorded" : formatBytes(history.bytes[i]);
    const group = groups.get(key) ?? groups.set(key, { blocks: 0, bytes: 0 }).get(key);
    group.blocks++;
    group.bytes += map.size[i];
  }
  const order = [...groups].sort((a, b) => b[1].bytes - a[1].bytes).slice(0, 8);
  if (order.length) {
    make("p", parent, { class: "quiet" }, formatCount(live) + (live === 1 ? " live block" : " live blocks") + "; the largest by " + (byLine ? "line" : "size") + ":");
    table(parent, [byLine ? "line" : "size", "bytes", "blocks"], order.map(([key, { blocks, bytes }]) => [key, formatBytes(bytes), formatCount(blocks)]));
  }
};
