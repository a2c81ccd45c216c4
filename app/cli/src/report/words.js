// What the page says in words: of a block or a segment, and how it finds blocks; figures, settings compared, the moment that
// was chosen.

// An event and its time.
const eventWords = (history, event) => {
  return "event " + formatCount(event + 1) + (history.byTime ? " (" + formatTime(history.time[event]) + ")" : "");
};

// What a segment is, and what is free of it after an event, in lines of text.
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
    !history.about.recorded ? "held when the snapshot was taken" : (map.segmentBefore[segment] ? "there before the first event" : "taken from the device at " + eventWords(history, map.segmentStart[segment]))
      + (open ? ", held to the end" : ", given back at " + eventWords(history, map.segmentEnd[segment])),
    (history.about.recorded ? "after " + eventWords(history, event) + ": " : "") + formatCount(inside.length) + (inside.length === 1 ? " block" : " blocks") + " with " + formatBytes(used) + ", " + formatBytes(free) + " free"
      + (free > 0 ? ", the largest piece " + formatBytes(hole) : ""),
  ];
};

// What a block is, in lines of text.
const describeBlock = (history, map, i) => {
  const { about } = history, lines = [];
  const rounded = map.size[i] !== history.bytes[i] ? ", block of " + formatBytes(map.size[i]) : "";
  lines.push(formatBytes(history.bytes[i]) + " asked for (" + formatCount(history.bytes[i]) + " bytes)" + rounded);
  if (map.size[i] > 0) lines.push("at " + formatAddress(addressOf(map, map.place[i])) + (map.path[i] ? ", served by " + about.paths[map.path[i]] : "") + ", stream " + about.streams[history.stream[i]]);
  else lines.push("no memory: the request failed, stream " + about.streams[history.stream[i]]);
  const when = (event) => eventWords(history, event), segment = segmentOf(map, i, history.start[i]);
  if (segment >= 0) lines.push("in a " + segmentName(history, map, segment));
  const open = history.end[i] >= history.events, from = history.start[i], to = Math.min(history.end[i], history.events - 1);
  const age = formatCount(history.end[i] - from) + " events" + (history.byTime ? ", " + formatTime(history.time[to] - history.time[from]) : "");
  if (!about.recorded) lines.push("held when the snapshot was taken" + (history.freed[i] < history.events ? "; freed, and waits for other streams" : ""));
  else lines.push((history.before[i] ? "there before the first event" : "allocated at " + when(from)) + (open ? ", held to the end: at least " : ", free again at " + when(history.end[i]) + ": lives ") + age);
  const wait = history.end[i] - history.freed[i];
  if (history.freed[i] < history.events && wait > 1) lines.push("freed at " + when(history.freed[i]) + ", then waited " + formatCount(wait) + " events for other streams");
  const line = history.lineNames[history.lineOf[history.stack[i]]];
  const during = history.before[i] ? "" : rangesAt(about, from);
  if (during) lines.push("during " + during);
  const category = about.categories[history.category[i] - 1];
  if (category) lines.push("category " + category);
  if (line) lines.push(line);
  return lines;
};

// Blocks at an address, or of a line, a file or a function.
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
  const says = (frame) => frame.toLowerCase().includes(text.toLowerCase()), wanted = new Set();
  for (let stack = 1; stack < history.lineOf.length; stack++) {
    if (says(history.lineNames[history.lineOf[stack]]) || framesOf(history, stack).some(says)) wanted.add(stack);
  }
  for (let i = 0; wanted.size && i < history.start.length; i++) if (wanted.has(history.stack[i])) out.push(i);
  return out;
};

// Where there is no room for columns, each cell names its own.
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

// One column a history, one row a figure, in the order in which they come up.
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
  table(parent, ["", ...histories.map((one) => one.title)], names.map((name) => [name, ...histories.map(({ figures }) => value(figures, name))])).classList.add("figures");
};

// Peak reserved under each allocator as a bar, with what a plan and any allocator at all would need.
const settingsTable = (parent, about) => {
  const most = Math.max(...about.settings.map((one) => one.peak_reserved_bytes), 1);
  const over = (bytes) => (about.lower_bound_bytes > 0 ? (bytes / about.lower_bound_bytes).toFixed(3) : "–");
  const count = (n) => (n === null ? "–" : formatCount(n));
  const rows = [...about.settings].sort((a, b) => b.measured - a.measured || (a.failed > 0) - (b.failed > 0) || a.peak_reserved_bytes - b.peak_reserved_bytes)
    .map((one) => [one.name, formatBytes(one.peak_reserved_bytes), bar(one.peak_reserved_bytes, most, one.measured ? "measured" : one.failed ? "failed" : "replayed"),
      over(one.peak_reserved_bytes), count(one.retries), count(one.failed), count(one.driver_calls)]);
  if (about.plan_bytes !== null) rows.push(["a plan", formatBytes(about.plan_bytes), bar(about.plan_bytes, most, "bound"), over(about.plan_bytes), "–", "–", "–"]);
  rows.push(["lower bound", formatBytes(about.lower_bound_bytes), bar(about.lower_bound_bytes, most, "bound"), over(about.lower_bound_bytes), "–", "–", "–"]);
  table(parent, ["allocator", "peak reserved", "", "times the bound", "retries", "requests that failed", "driver calls"], rows).classList.add("settings");
};

// What an event did, as far as lives tell it.
const happened = (history, map, event) => {
  const out = [], say = (verb, i) => out.push(verb + " " + formatBytes(history.bytes[i]) + (map.size[i] > 0 ? " at " + formatAddress(addressOf(map, map.place[i])) : ""));
  for (let i = before(history.start, event); i >= 0 && history.start[i] === event && !history.before[i]; i--) say("allocation of", i);
  for (let i = 0; i < history.start.length && history.start[i] <= event; i++) {
    if (history.freed[i] === event && !(history.before[i] && event === 0)) say("request to free", i);
    if (history.end[i] === event && history.freed[i] !== event) say("free completed of", i);
  }
  for (let i = 0; i < map.segmentStart.length; i++) {
    if (map.segmentStart[i] === event && !map.segmentBefore[i]) out.push("segment of " + formatBytes(map.segmentBytes[i]) + " taken from the device");
    if (map.segmentEnd[i] === event) out.push("segment of " + formatBytes(map.segmentBytes[i]) + " given back to the device");
  }
  for (const mark of history.about.marks) if (mark.start === event && mark.kind !== "annotation") out.push(mark.text);
  return out;
};

const AROUND = 4;
// What the events around one did.
const tellEvents = (parent, history, map, event, choose) => {
  make("h3", parent, {}, "After event " + formatCount(event + 1) + " of " + formatCount(history.events) + (history.byTime ? ", at " + formatTime(history.time[event]) : ""));
  const from = Math.max(event - AROUND, 0), to = Math.min(event + AROUND, history.events - 1), list = make("ol", parent, { class: "events" });
  for (let at = from; at <= to; at++) {
    const item = make("li", list, { value: String(at + 1), ...(at === event ? { "aria-current": "true" } : {}) }), facts = happened(history, map, at);
    const button = make("button", item, { type: "button", class: "way" }, facts.slice(0, 6).join("; ") || "–");
    button.addEventListener("click", () => choose(at));
  }
};
const tellMoment = (parent, history, map, event, choose) => {
  if (history.about.recorded) tellEvents(parent, history, map, event, choose);
  else make("h3", parent, {}, "When the snapshot was taken");
  const level = [];
  if (map.reserved) level.push("reserved " + formatBytes(map.reserved[event]));
  level.push("active " + formatBytes(map.active[event]), "asked for " + formatBytes(history.requested[event]));
  make("p", parent, {}, level.join(", "));
  // What is live, by line where lines are known, else by size.
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
    make("p", parent, { class: "quiet" }, formatCount(live) + (live === 1 ? " block is live" : " blocks are live") + "; the most, by " + (byLine ? "line" : "size") + ":");
    table(parent, [byLine ? "line" : "size", "bytes", "blocks"], order.map(([key, { blocks, bytes }]) => [key, formatBytes(bytes), formatCount(blocks)]));
  }
};
