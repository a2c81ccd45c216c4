// What the page says of a block or a segment, and how it finds blocks.

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
