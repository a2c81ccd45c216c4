// Segments: the segment of a block, names, and frames on the map.

// The segment that contains a block after an event; -1 if unknown.
const segmentOf = (map, block, event) => {
  const place = map.place[block];
  if (map.size[block] === 0) return -1;
  for (let i = 0; i < map.segmentStart.length; i++) {
    if (map.segmentPlace[i] <= place && place < map.segmentPlace[i] + map.segmentBytes[i] && map.segmentStart[i] <= event && event <= map.segmentEnd[i]) return i;
  }
  return -1;
};

// A segment in a few words: size, kind and stream.
const segmentName = (history, map, segment) => {
  const pool = map.about.pools[map.segmentPool[segment]], stream = map.segmentStream[segment];
  return "segment of " + formatBytes(map.segmentBytes[segment]) + (pool ? " (" + pool + ")" : "")
    + (stream > 0 ? ", stream " + history.about.streams[stream - 1] : "");
};

// The annotations that contain an event, outermost first; without annotations the training step that contains it.
const rangesAt = (about, event) => {
  const out = about.marks.filter((mark) => mark.kind === "annotation" && mark.start <= event && event < (mark.end ?? Infinity)).map((mark) => mark.text);
  const step = about.marks.find((mark) => mark.kind === "step" && event < mark.start);
  if (step && !out.length) out.push(step.text.replace("end of ", ""));
  return out.join(" / ");
};

// Draws frames of segments, coloured by stream if there are several; dashed for private pools. Names are drawn where they fit.
const drawFrames = (pen, tint, panel, frames, scale, { top, w }) => {
  const { history, map } = panel, several = history.about.streams.length > 1;
  pen.save();
  pen.lineWidth = 1;
  pen.font = "10px system-ui, sans-serif";
  for (const [x0, y0, x1, y1, i] of frames) {
    const left = Math.max(MARGIN.left + x0 / scale, MARGIN.left - 2), right = Math.min(MARGIN.left + x1 / scale, MARGIN.left + w + 2);
    const upper = top + y0 / scale, lower = top + y1 / scale, stream = map.segmentStream[i];
    pen.strokeStyle = several && stream > 0 ? css(DISTINCT[(stream - 1) % DISTINCT.length]) : tint.ink;
    pen.globalAlpha = 0.6;
    pen.setLineDash(/private/.test(map.about.pools[map.segmentPool[i]]) ? [4, 3] : []);
    pen.strokeRect(Math.round(left) + 0.5, Math.round(upper) + 0.5, Math.max(Math.round(right - left) - 1, 1), Math.max(Math.round(lower - upper) - 1, 1));
    if (lower - upper < 34 || right - left < 160) continue;
    const text = segmentName(history, map, i).replace("segment of ", ""), from = Math.max(left, MARGIN.left) + 2;
    const bottom = Math.min(lower, top + panel.area().h) - 2, wide = pen.measureText(text).width + 6;
    if (from + wide > right || bottom - 12 < Math.max(upper, top)) continue;
    pen.globalAlpha = 0.85;
    pen.fillStyle = tint.paperText;
    pen.fillRect(from, bottom - 12, wide, 12);
    pen.globalAlpha = 1;
    axisText(pen, tint.ink, from + 3, bottom - 3, text, "left");
  }
  pen.restore();
};

// Draws the segments after an event in rows, the largest first, their length proportional to their size, with their blocks. Returns
// the drawn cells, for the pointer.
const drawSegments = (pen, tint, panel, event, { top, w, h }) => {
  const { history, map } = panel, several = history.about.streams.length > 1, cells = [];
  const live = Array.from(map.segmentStart.keys()).filter((i) => map.segmentStart[i] <= event && event < map.segmentEnd[i]);
  live.sort((a, b) => map.segmentBytes[b] - map.segmentBytes[a] || map.segmentPlace[a] - map.segmentPlace[b]);
  const most = live.length ? map.segmentBytes[live[0]] : 1, gap = 3, at = new Map();
  let row = 0, filled = 0;
  for (const i of live) {
    const long = (map.segmentBytes[i] / most) * w;
    if (filled > 0 && filled + long > w + 0.5) [row, filled] = [row + 1, 0];
    at.set(i, { row, left: MARGIN.left + filled, long: Math.max(long - gap, Math.min(long, 1)) });
    filled += long;
  }
  const tall = h / (row + 1), high = Math.max(tall - Math.min(gap, tall / 3), 1);
  for (const [i, { row, left, long }] of at) {
    const cell = { x0: left, y0: top + row * tall, x1: left + long, y1: top + row * tall + high, segment: i, block: -1 };
    pen.fillStyle = tint.heldText;
    pen.fillRect(cell.x0, cell.y0, long, high);
    cells.push(cell);
  }
  const byPlace = [...live].sort((a, b) => map.segmentPlace[a] - map.segmentPlace[b]), places = byPlace.map((i) => map.segmentPlace[i]);
  for (let i = 0; i < history.start.length && history.start[i] <= event; i++) {
    if (history.end[i] <= event || map.size[i] === 0) continue;
    const segment = byPlace[before(places, map.place[i])], cell = at.get(segment);
    if (!cell || map.place[i] >= map.segmentPlace[segment] + map.segmentBytes[segment]) continue;
    const scale = cell.long / map.segmentBytes[segment], x0 = cell.left + (map.place[i] - map.segmentPlace[segment]) * scale;
    const x1 = Math.max(x0 + map.size[i] * scale, x0 + 0.6), y0 = top + cell.row * tall;
    pen.fillStyle = css(panel.tint[i]);
    pen.fillRect(x0, y0, x1 - x0, high);
    if (x1 - x0 > 4 && high > 4) {
      pen.strokeStyle = i === panel.selected ? tint.accent : tint.paperText;
      pen.lineWidth = i === panel.selected ? 3 : 0.7;
      pen.strokeRect(x0, y0, x1 - x0, high);
    }
    cells.push({ x0, y0, x1, y1: y0 + high, segment, block: i });
  }
  pen.lineWidth = 1;
  for (const { x0, y0, x1, y1, segment, block } of cells) {
    if (block >= 0) continue;
    const stream = map.segmentStream[segment];
    pen.strokeStyle = several && stream > 0 ? css(DISTINCT[(stream - 1) % DISTINCT.length]) : tint.ink;
    if (y1 - y0 > 3) pen.strokeRect(x0 + 0.5, y0 + 0.5, Math.max(x1 - x0 - 1, 1), y1 - y0 - 1);
  }
  return cells;
};
