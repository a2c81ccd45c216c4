// Rectangles on a grid of pixels. A pixel gets the mean colour of the rectangles that cover it, so that many small blocks show the
// used share of an area.

class Raster {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.under = new Float32Array(width * height);
    this.cover = new Float32Array(width * height);
    this.red = new Float32Array(width * height);
    this.green = new Float32Array(width * height);
    this.blue = new Float32Array(width * height);
  }
  clear() {
    for (const plane of [this.under, this.cover, this.red, this.green, this.blue]) plane.fill(0);
  }
  // Reserved memory, drawn below the blocks.
  hold(x0, y0, x1, y1) {
    this.each(x0, y0, x1, y1, (at, part) => { this.under[at] += part; });
  }
  block(x0, y0, x1, y1, tint) {
    if (x0 < 0) x0 = 0;
    if (y0 < 0) y0 = 0;
    if (x1 > this.width) x1 = this.width;
    if (y1 > this.height) y1 = this.height;
    if (x1 <= x0 || y1 <= y0) return;
    const red = tint >> 16, green = (tint >> 8) & 255, blue = tint & 255, width = this.width;
    const left = Math.floor(x0), right = Math.ceil(x1), low = Math.floor(y0), high = Math.ceil(y1);
    for (let y = low; y < high; y++) {
      const tall = Math.min(y + 1, y1) - Math.max(y, y0);
      let at = y * width + left;
      for (let x = left; x < right; x++, at++) {
        const part = tall * (Math.min(x + 1, x1) - Math.max(x, x0));
        this.cover[at] += part;
        this.red[at] += part * red;
        this.green[at] += part * green;
        this.blue[at] += part * blue;
      }
    }
  }
  each(x0, y0, x1, y1, then) {
    x0 = Math.max(x0, 0);
    y0 = Math.max(y0, 0);
    x1 = Math.min(x1, this.width);
    y1 = Math.min(y1, this.height);
    for (let y = Math.floor(y0); y < y1; y++) {
      const tall = Math.min(y + 1, y1) - Math.max(y, y0);
      for (let x = Math.floor(x0); x < x1; x++) {
        then(y * this.width + x, tall * (Math.min(x + 1, x1) - Math.max(x, x0)));
      }
    }
  }
  // The image: blocks over reserved memory over the background.
  image(paper, held) {
    const image = new ImageData(this.width, this.height), out = new Uint32Array(image.data.buffer);
    const channel = (colour, shift) => (colour >> shift) & 255;
    const [pr, pg, pb] = [16, 8, 0].map((shift) => channel(paper, shift));
    const [hr, hg, hb] = [16, 8, 0].map((shift) => channel(held, shift));
    const plain = 0xff000000 | (pb << 16) | (pg << 8) | pr;
    for (let i = 0; i < out.length; i++) {
      const under = Math.min(this.under[i], 1), cover = this.cover[i];
      if (under === 0 && cover === 0) {
        out[i] = plain;
        continue;
      }
      // Several blocks can cover a pixel, because blocks have a minimum size on the screen; take their mean.
      const scale = cover > 1 ? 1 / cover : 1, uncovered = cover > 1 ? 0 : 1 - cover;
      const red = (pr + (hr - pr) * under) * uncovered + this.red[i] * scale;
      const green = (pg + (hg - pg) * under) * uncovered + this.green[i] * scale;
      const blue = (pb + (hb - pb) * under) * uncovered + this.blue[i] * scale;
      out[i] = 0xff000000 | (Math.min(blue, 255) << 16) | (Math.min(green, 255) << 8) | Math.min(red, 255);
    }
    return image;
  }
}
// Block views of a panel: blocks at their addresses over time, or stacked blocks.

// From light (small) to dark (large), readable without colour vision: the middle of cividis.
const RAMP = [0xead156, 0xbcaf6f, 0x908f78, 0x686f77, 0x3e506d, 0x14356c];
const DISTINCT = [0x4477aa, 0xee6677, 0x228833, 0xccbb44, 0x66ccee, 0xaa3377, 0xe69f00, 0x009e73, 0x882255, 0x999933];
const REST = 0x9a9a9a;

const mixed = (low, high, at) => {
  const part = (shift) => {
    const from = (low >> shift) & 255, to = (high >> shift) & 255;
    return Math.round(from + (to - from) * at) << shift;
  };
  return part(16) | part(8) | part(0);
};
// On a dark background the ramp is reversed, so that large blocks stand out.
let darkPaper = false;
const ramped = (value, least, most) => {
  const at = most > least ? (Math.log(Math.max(value, 1)) - Math.log(least)) / (Math.log(most) - Math.log(least)) : 1;
  const near = Math.min(Math.max(at, 0), 1), place = (darkPaper ? 1 - near : near) * (RAMP.length - 1), low = Math.min(Math.floor(place), RAMP.length - 2);
  return mixed(RAMP[low], RAMP[low + 1], place - low);
};
const css = (tint) => "#" + tint.toString(16).padStart(6, "0");

// Ways to colour blocks, with their legends.
const TINTS = {
  size: { name: "size" },
  line: { name: "line", needs: (about) => about.lines.length > 0 },
  category: { name: "category", needs: (about) => about.categories.length > 0 },
  stream: { name: "stream", needs: (about) => about.streams.length > 1 },
  path: { name: "path", needs: (about, map) => map.path.some((path) => path > 0) },
  age: { name: "lifetime" },
};
// The size below which blocks account for less than a fiftieth of all bytes over time.
const smallestSeen = (history) => {
  const filled = new Float64Array(256), step = (bytes) => Math.floor(4 * Math.log2(Math.max(bytes, 1)));
  for (let i = 0; i < history.start.length; i++) filled[step(history.bytes[i])] += history.bytes[i] * (history.end[i] - history.start[i]);
  let left = filled.reduce((a, b) => a + b, 0) / 50, at = 0;
  while (at < 255 && (left -= filled[at]) > 0) at++;
  return 2 ** (at / 4);
};
const tintBlocks = (kind, history, map) => {
  const count = history.start.length, tint = new Uint32Array(count);
  darkPaper = matchMedia("(prefers-color-scheme: dark)").matches;
  if (kind === "size" || kind === "age") {
    const value = kind === "size" ? (i) => history.bytes[i] : (i) => history.end[i] - history.start[i];
    let least = Infinity, most = 1;
    for (let i = 0; i < count; i++) {
      least = Math.min(least, Math.max(value(i), 1));
      most = Math.max(most, value(i));
    }
    // Small blocks share one colour; otherwise all large blocks would.
    if (kind === "size") least = Math.max(least, smallestSeen(history));
    for (let i = 0; i < count; i++) tint[i] = ramped(value(i), least, most);
    const text = kind === "size" ? formatBytes : (n) => formatCount(n) + (n === 1 ? " event" : " events");
    const steps = [0, 0.25, 0.5, 0.75, 1].map((at) => Math.exp(Math.log(least) + (Math.log(most) - Math.log(least)) * at));
    const legend = count === 0 ? [] : steps.map((n, i) => [ramped(n, least, most), (i === 0 && kind === "size" ? "up to " : "") + text(Math.round(n))]);
    return { tint, legend: legend.filter((entry, i) => i === 0 || entry[1] !== legend[i - 1][1]) };
  }
  const [group, name] = {
    line: [(i) => history.lineOf[history.stack[i]], (n) => history.lineNames[n] || "not recorded"],
    category: [(i) => history.category[i], (n) => history.about.categories[n - 1] ?? "not recorded"],
    stream: [(i) => history.stream[i], (n) => "stream " + history.about.streams[n]],
    path: [(i) => map.path[i], (n) => history.about.paths[n] || "unknown"],
  }[kind];
  // The groups with the most bytes over time get distinct colours.
  const weight = new Map();
  for (let i = 0; i < count; i++) {
    weight.set(group(i), (weight.get(group(i)) || 0) + history.bytes[i] * (1 + history.end[i] - history.start[i]));
  }
  const order = [...weight].sort((a, b) => b[1] - a[1]).map(([key]) => key), colour = new Map();
  order.forEach((key, i) => colour.set(key, i < DISTINCT.length ? DISTINCT[i] : REST));
  for (let i = 0; i < count; i++) tint[i] = colour.get(group(i));
  const legend = order.slice(0, DISTINCT.length).map((key) => [colour.get(key), name(key)]);
  if (order.length > DISTINCT.length) legend.push([REST, formatCount(order.length - DISTINCT.length) + " others"]);
  return { tint, legend };
};

// Minimum size of a drawn block in pixels: blocks that keep a segment reserved are often small.
const LEAST = 0.6;

// Minimum size in pixels of a segment drawn with a frame.
const FRAMED = 5;

// Draws blocks at their addresses. Returns the blocks large enough for an outline, and the frames of segments.
const drawMap = (raster, history, map, xs, view, tint) => {
  const wide = raster.width / (view.x1 - view.x0), tall = raster.height / (view.y1 - view.y0);
  const box = (start, end, place, bytes) => {
    let x0 = (xs[start] - view.x0) * wide, x1 = (xs[end] - view.x0) * wide;
    let y1 = raster.height - (place - view.y0) * tall, y0 = y1 - bytes * tall;
    if (x1 - x0 < LEAST) x1 = x0 + LEAST;
    if (y1 - y0 < LEAST) y0 = y1 - LEAST;
    return [x0, y0, x1, y1];
  };
  const frames = [];
  for (let i = 0; i < map.segmentStart.length; i++) {
    if (xs[map.segmentEnd[i]] < view.x0 || xs[map.segmentStart[i]] > view.x1) continue;
    if (map.segmentPlace[i] > view.y1 || map.segmentPlace[i] + map.segmentBytes[i] < view.y0) continue;
    const at = box(map.segmentStart[i], map.segmentEnd[i], map.segmentPlace[i], map.segmentBytes[i]);
    raster.hold(...at);
    if (at[3] - at[1] >= FRAMED && at[2] - at[0] >= FRAMED && frames.length < 3000) frames.push([...at, i]);
  }
  const outlined = [], { start, end } = history, { place, size } = map;
  for (let i = 0; i < start.length; i++) {
    const from = xs[start[i]], to = xs[end[i]], low = place[i], bytes = size[i];
    if (to < view.x0 || from > view.x1 || low > view.y1 || low + bytes < view.y0 || bytes === 0) continue;
    let x0 = (from - view.x0) * wide, x1 = (to - view.x0) * wide;
    const y1 = raster.height - (low - view.y0) * tall;
    let y0 = y1 - bytes * tall;
    if (x1 - x0 < LEAST) x1 = x0 + LEAST;
    if (y1 - y0 < LEAST) y0 = y1 - LEAST;
    raster.block(x0, y0, x1, y1, tint[i]);
    if (x1 - x0 > 5 && y1 - y0 > 4 && outlined.length < 3000) outlined.push([x0, y0, x1, y1]);
  }
  return { outlined, frames };
};

// Draws live blocks, stacked in allocation order. Each column of pixels shows its moment with the most live bytes, so that no peak
// is lost.
const drawStack = (raster, history, map, xs, view, tint, level) => {
  const tall = raster.height / (view.y1 - view.y0);
  walkStack(history, columnsOf(history, xs, view, raster.width, level), (column, blocks) => {
    let sum = 0;
    for (let i = blocks.next[0]; i !== 0; i = blocks.next[i]) {
      const bytes = map.size[i - 1];
      if (sum + bytes > view.y0 && sum < view.y1) {
        const y1 = raster.height - (sum - view.y0) * tall;
        raster.block(column, y1 - bytes * tall, column + 1, y1, tint[i - 1]);
      }
      sum += bytes;
    }
  });
  return { outlined: [], frames: [] };
};

// For each column of pixels the event with the most live bytes.
const columnsOf = (history, xs, view, width, level) => {
  const at = new Int32Array(width);
  let event = Math.max(before(xs, view.x0), 0);
  for (let column = 0; column < width; column++) {
    const stop = view.x0 + ((view.x1 - view.x0) * (column + 1)) / width;
    let best = event;
    while (event + 1 < history.events && xs[event + 1] < stop) {
      event++;
      if (level[event] > level[best]) best = event;
    }
    // Nothing is drawn before the first event and after the last.
    const start = view.x0 + ((view.x1 - view.x0) * column) / width;
    at[column] = stop < xs[0] || start > xs[history.events] ? -1 : best;
  }
  return at;
};

// Calls `then` for each of these events with the live blocks in allocation order, in one pass: a linked list starting at number 0,
// with blocks numbered from 1. `moments` ascend; -1 is skipped.
const walkStack = (history, moments, then) => {
  const { start, end } = history, count = start.length;
  history.byEnd ??= endOrder(history);
  const next = new Int32Array(count + 1), last = new Int32Array(count + 1);
  let tail = 0, begun = 0, ended = 0;
  for (let column = 0; column < moments.length; column++) {
    const moment = moments[column];
    if (moment < 0) continue;
    for (; begun < count && start[begun] <= moment; begun++) {
      const number = begun + 1;
      next[tail] = number;
      last[number] = tail;
      next[number] = 0;
      tail = number;
    }
    for (; ended < count && end[history.byEnd[ended]] <= moment; ended++) {
      const number = history.byEnd[ended] + 1;
      next[last[number]] = next[number];
      if (next[number] !== 0) last[next[number]] = last[number];
      else tail = last[number];
    }
    then(column, { next });
  }
};

// Blocks, ordered by the end of their lifetimes.
const endOrder = (history) => {
  const { end, events } = history, at = new Uint32Array(events + 2);
  for (let i = 0; i < end.length; i++) at[end[i] + 1]++;
  for (let i = 1; i < at.length; i++) at[i] += at[i - 1];
  const order = new Uint32Array(end.length);
  for (let i = 0; i < end.length; i++) order[at[end[i]]++] = i;
  return order;
};
