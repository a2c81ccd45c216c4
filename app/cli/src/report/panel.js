// One recording under one allocator: the block map, the charts below it, and their pointer and key controls.

const make = (kind, parent, attributes = {}, text = "") => {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
};

// Saves a data URL as a file.
const save = (name, url) => make("a", null, { download: name, href: url }).click();

// Canvases, one below the other, as a PNG image.
const pngOf = (canvases, background) => {
  const image = document.createElement("canvas"), pen = image.getContext("2d");
  image.width = Math.max(...canvases.map((canvas) => canvas.width));
  image.height = canvases.reduce((sum, canvas) => sum + canvas.height, 0);
  pen.fillStyle = background;
  pen.fillRect(0, 0, image.width, image.height);
  let top = 0;
  for (const canvas of canvases) {
    pen.drawImage(canvas, 0, top);
    top += canvas.height;
  }
  return image.toDataURL("image/png");
};

// State shared by all panels of a recording: the visible time range, and the chosen moment.
class Axis {
  constructor(history) {
    this.history = history;
    this.byTime = false;
    this.xs = history.byNumber;
    this.moment = null;
    this.panels = [];
    this.view = this.whole();
  }
  whole() {
    return { x0: 0, x1: Math.max(this.xs[this.history.events], 1) };
  }
  show(x0, x1) {
    const { x1: end } = this.whole(), least = this.byTime ? Math.max(end / 1e7, 10) : 8;
    const span = Math.min(Math.max(x1 - x0, least), end), middle = (x0 + x1) / 2;
    const from = Math.min(Math.max(middle - span / 2, 0), end - span);
    this.view = { x0: from, x1: from + span };
    this.draw();
  }
  // Switches the axis between event numbers and time, and keeps the visible range.
  count(byTime) {
    const events = [this.view.x0, this.view.x1].map((x) => Math.max(before(this.xs, x), 0));
    this.byTime = byTime;
    this.xs = byTime ? this.history.byTime : this.history.byNumber;
    this.show(this.xs[events[0]], this.xs[Math.min(events[1], this.history.events)]);
  }
  eventAt(x) {
    return Math.min(Math.max(before(this.xs, x), 0), Math.max(this.history.events - 1, 0));
  }
  choose(event) {
    this.moment = event === null ? null : Math.min(Math.max(event, 0), Math.max(this.history.events - 1, 0));
    const x = event === null ? null : this.xs[this.moment];
    if (x !== null && (x < this.view.x0 || x > this.view.x1)) {
      const half = (this.view.x1 - this.view.x0) / 2;
      this.show(x - half, x + half);
    } else this.draw();
  }
  draw() {
    for (const panel of this.panels) panel.later();
  }
}

const STRIP = 17;
// Marks of a history, in the colours of `drawStrip` and `drawMoment`, with the words of the legend.
const MARK_KEYS = [
  ["annotation", "color-mix(in srgb, var(--accent) 25%, var(--paper))", "strips above: annotations"],
  ["oom", "var(--alarm)", "vertical lines: memory ran out"],
  ["step", "var(--rule)", "vertical lines: ends of training steps"],
];

class Panel {
  constructor(parent, history, axis, number) {
    Object.assign(this, { history, axis, number, kind: "map", colour: null, selected: -1, matches: [], waiting: false });
    axis.panels.push(this);
    this.root = make("section", parent, { class: "panel" });
    this.tools = make("div", this.root, { class: "tools" });
    this.legend = make("div", this.root, { class: "legend" });
    const about = "Arrow keys move, + and - zoom in time, Page Up and Page Down in memory, Home shows all; full stop and comma "
      + "move by one event; slash searches.";
    this.canvas = make("canvas", this.root, { class: "blocks", tabindex: "0", role: "img", "aria-label": "Blocks over time. " + about });
    if (axis.panels.length === 1) make("p", this.root, { class: "hint" }, "Wheel: zoom in time, with Shift in memory. Drag: move, with Shift: zoom to a box. Click: choose a block and a moment. " + about);
    this.levelsKey = make("div", this.root, { class: "legend" });
    this.levels = make("canvas", this.root, { class: "levels", role: "img", "aria-label": "Reserved, active and requested memory over time" });
    if (history.ledger && number === 0) {
      this.ledgerKey = make("div", this.root, { class: "legend" });
      this.ledger = make("canvas", this.root, { class: "levels", role: "img", "aria-label": "Reserved-memory breakdown over time" });
    }
    this.details = make("div", this.root, { class: "details", "aria-live": "polite" });
    this.tip = make("div", this.root, { class: "tip" });
    this.tip.hidden = true;
  }
  async begin() {
    this.first = await this.history.map(0);
    await this.show(this.number);
    this.controls();
    this.listen();
    new ResizeObserver(() => this.later()).observe(this.root);
  }
  // Shows another allocator's map.
  async show(number) {
    this.number = number;
    this.map = await this.history.map(number);
    const { about } = this.history, allowed = (kind) => !TINTS[kind].needs || TINTS[kind].needs(about, this.map);
    if (!this.colour || !allowed(this.colour)) this.colour = allowed("line") ? "line" : "size";
    this.allowed = Object.keys(TINTS).filter(allowed);
    if (this.kind === "segments" && !this.map.about.segments) this.kind = "map";
    this.view = this.everything();
    this.paint();
  }
  everything() {
    if (this.kind !== "stack") return { y0: 0, y1: this.map.top };
    return { y0: 0, y1: this.map.active.reduce((a, b) => Math.max(a, b), 1) * 1.03 };
  }
  paint() {
    const { tint, legend } = tintBlocks(this.colour, this.history, this.map);
    this.tint = tint;
    this.legend.replaceChildren();
    if (this.map.about.segments && this.kind !== "stack") legend.unshift([null, "reserved, not active"]);
    for (const [colour, text] of legend) this.key(this.legend, colour === null ? "var(--held)" : css(colour), text).title = text;
    const up = this.kind === "segments" ? "each bar: a segment, the largest first; full stop and comma move by one event" : this.kind === "map" ? "vertical: addresses, without the gaps between segments" : "vertical: bytes of live blocks, in allocation order";
    const framed = this.map.about.segments && this.kind === "map" ? "; frames: segments" + (this.history.about.streams.length > 1 ? ", coloured by stream" : "") + ", dashed: private pools" : "";
    const kinds = new Set(this.history.about.marks.map((mark) => mark.kind));
    for (const [kind, colour, text] of MARK_KEYS) {
      if (kinds.has(kind) && this.kind !== "segments") this.key(this.legend, colour, text);
    }
    make("span", this.legend, { class: "quiet" }, up + framed + (this.kind === "segments" ? "" : "; bright vertical line: the chosen moment"));
    this.levelsKey.replaceChildren();
    if (this.map.reserved) this.key(this.levelsKey, LEVEL_TINTS.reserved, "reserved");
    if (this.number > 0 && this.first.reserved) this.key(this.levelsKey, LEVEL_TINTS.recorded, "recorded reserved (dashed)");
    this.key(this.levelsKey, LEVEL_TINTS.active, "active");
    this.key(this.levelsKey, LEVEL_TINTS.requested, "requested");
    if (this.number === 0 && this.history.hole) this.key(this.levelsKey, LEVEL_TINTS.hole, "largest free block").title = "The largest request that would succeed without a driver call";
    if (this.number === 0 && this.history.used) this.key(this.levelsKey, LEVEL_TINTS.used, "used on the GPU").title = "By all processes, as reported by the driver";
    if (this.history.about.recorded) this.key(this.levelsKey, null, "lower bound " + formatBytes(this.history.about.lower_bound_bytes) + " (dotted)");
    if (this.history.about.plan_bytes) this.key(this.levelsKey, null, "offline placement " + formatBytes(this.history.about.plan_bytes) + " (dashed)");
    if (this.ledger) {
      const { allocator, as_recorded } = this.history.about.ledger;
      this.ledgerKey.replaceChildren();
      for (const { tint: colour, name, says } of LEDGER_PARTS) this.key(this.ledgerKey, colour, name).title = says;
      const how = as_recorded ? "; its replay matches every recorded block address" : "; no replay matches every recorded block address";
      make("span", this.ledgerKey, { class: "quiet" }, "breakdown of a replay under " + allocator + how);
    }
    this.later();
  }
  key(parent, colour, text) {
    const item = make("span", parent, { class: "key" });
    if (colour) make("i", item).style.background = colour;
    item.append(text);
    return item;
  }
  controls() {
    const choice = (label, options, chosen, then) => {
      const box = make("label", this.tools, {}, label + " "), select = make("select", box);
      for (const [value, text] of options) make("option", select, { value }, text);
      select.value = String(chosen);
      select.addEventListener("change", () => then(select.value));
      return select;
    };
    const views = [["map", "block map"], ["stack", "live blocks, stacked"]];
    if (this.map.about.segments) views.push(["segments", "segments at a moment"]);
    this.kinds = choice("show", views, this.kind, (kind) => {
      if (kind === "segments" && !this.map.about.segments) kind = this.kinds.value = "map";
      this.kind = kind;
      this.view = this.everything();
      this.paint();
    });
    this.kinds.dataset.tool = "kind";
    const colours = () => this.allowed.map((kind) => [kind, TINTS[kind].name]);
    if (this.history.maps.length > 1) {
      const names = this.history.about.maps.map((map, i) => [String(i), map.name + (map.failed ? ` (${formatCount(map.failed)} requests failed)` : "")]);
      choice("under", names, this.number, async (value) => {
        await this.show(Number(value));
        const tint = this.colours;
        this.kinds.value = this.kind;
        tint.replaceChildren();
        for (const [kind, text] of colours()) make("option", tint, { value: kind }, text);
        tint.value = this.colour;
      }).dataset.tool = "map";
    }
    this.colours = choice("colour by", colours(), this.colour, (colour) => {
      this.colour = colour;
      this.paint();
    });
    this.colours.dataset.tool = "colour";
    if (this.history.byTime && this.axis.panels.length === 1) {
      choice("axis", [["", "events"], ["time", "time"]], this.axis.byTime ? "time" : "", (value) => this.axis.count(value === "time")).dataset.tool = "axis";
    }
    const button = (text, title, then) => {
      const element = make("button", this.tools, { type: "button", title, "aria-label": title }, text);
      element.addEventListener("click", then);
      return element;
    };
    button("+", "zoom in", () => this.zoomTime(0.5));
    button("−", "zoom out", () => this.zoomTime(2));
    button("all", "show everything", () => this.home());
    button("PNG", "save the map and its charts as a PNG image", () => {
      save("vramlab-memory.png", pngOf([this.canvas, this.levels, this.ledger].filter(Boolean), colours().paperText));
    });
    const form = make("form", this.tools, { role: "search" });
    this.search = make("input", form, { type: "search", placeholder: this.history.about.lines.length ? "address or line" : "address, such as 0x7f…", "aria-label": "find a block" });
    this.answer = make("output", form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(this.search.value);
    });
    if (this.axis.panels.length === 1 && this.history.maps.length > 1) {
      button("compare…", "show another allocator next to this one", async () => {
        const panel = new Panel(this.root.parentElement, this.history, this.axis, this.number + 1 < this.history.maps.length ? this.number + 1 : 0);
        this.root.parentElement.classList.add("beside");
        await panel.begin();
        this.axis.draw();
      });
    }
  }
  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }
  strips() {
    return STRIP * this.history.strips;
  }
  area() {
    const top = MARGIN.top + this.strips();
    return { w: Math.max(this.canvas.clientWidth - MARGIN.left - MARGIN.right, 10), top, h: Math.max(this.canvas.clientHeight - top - MARGIN.bottom, 10) };
  }
  draw() {
    if (!this.map || this.root.clientWidth === 0) return;
    const began = performance.now();
    const { pen, scale, w } = prepared(this.canvas), { top, h } = this.area(), tint = colours();
    const width = Math.max(Math.round(w * scale), 1), height = Math.max(Math.round(h * scale), 1);
    if (this.kind === "segments") this.drawRows(pen, tint, { top, w, h });
    else this.drawOverTime(pen, tint, { scale, top, w, h, width, height });
    drawLevels(this.levels, this);
    if (this.ledger) drawLedger(this.ledger, this);
    this.showDetails();
    this.root.dataset.drawn = String(this.history.start.length);
    this.root.dataset.took = (performance.now() - began).toFixed(1);
    const { x0, x1, y0, y1 } = { ...this.axis.view, ...this.view };
    this.root.dataset.view = [x0, x1, y0, y1].join(" ");
  }
  // Segments after the chosen event; without a choice at peak reserved.
  drawRows(pen, tint, area) {
    const event = this.axis.moment ?? this.highest();
    this.cells = drawSegments(pen, tint, this, event, area);
    this.root.dataset.frames = String(this.cells.filter(({ block }) => block < 0).length);
    this.strip = [];
    axisText(pen, tint.ink, MARGIN.left, MARGIN.top + 9, "after " + eventWords(this.history, event), "left");
  }
  // The first event with peak reserved memory.
  highest() {
    const { reserved } = this.map;
    return reserved ? reserved.reduce((best, bytes, i) => (bytes > reserved[best] ? i : best), 0) : 0;
  }
  cellAt(x, y) {
    return this.cells?.findLast((cell) => cell.x0 <= x && x <= cell.x1 && cell.y0 <= y && y <= cell.y1);
  }
  drawOverTime(pen, tint, { scale, top, w, h, width, height }) {
    if (this.raster?.width !== width || this.raster?.height !== height) this.raster = new Raster(width, height);
    else this.raster.clear();
    const view = { ...this.axis.view, ...this.view }, paint = this.kind === "map" ? drawMap : drawStack;
    const { outlined, frames } = paint(this.raster, this.history, this.map, this.axis.xs, view, this.tint, this.map.active);
    const left = Math.round(MARGIN.left * scale), above = Math.round(top * scale);
    pen.canvas.getContext("2d").putImageData(this.raster.image(tint.paper, tint.held), left, above);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, top, w, h);
    pen.clip();
    pen.strokeStyle = tint.paperText;
    pen.lineWidth = 1;
    pen.globalAlpha = 0.65;
    pen.beginPath();
    for (const [x0, y0, x1, y1] of outlined) pen.rect(MARGIN.left + x0 / scale, top + y0 / scale, (x1 - x0) / scale, (y1 - y0) / scale);
    pen.stroke();
    pen.globalAlpha = 1;
    if (this.kind === "map") this.drawLanes(pen, tint, w, top, h);
    drawFrames(pen, tint, this, frames, scale, { top, w });
    this.root.dataset.frames = String(frames.length);
    if (this.selected >= 0 && this.kind === "map") this.outline(pen, tint, w, top, h);
    pen.restore();
    this.drawAxes(pen, tint, w, top, h);
    this.drawStrip(pen, tint, w);
    drawMoment(pen, this, tint, w, top, h);
  }
  // Lines between lanes; the addresses between lanes are omitted.
  drawLanes(pen, tint, w, top, h) {
    const { y0, y1 } = this.view, y = (place) => top + h * (1 - (place - y0) / (y1 - y0));
    const { lanePlace, laneBytes } = this.map;
    let last = Infinity;
    pen.fillStyle = tint.paperText;
    pen.globalAlpha = 0.8;
    for (let i = Math.max(before(lanePlace, y0), 0); i < laneBytes.length && lanePlace[i] <= y1; i++) {
      const at = y(lanePlace[i]);
      if (last - at < 3) continue;
      pen.fillRect(MARGIN.left, Math.round(at), w, 1);
      last = at;
    }
    pen.globalAlpha = 1;
  }
  outline(pen, tint, w, top, h) {
    const { history, map, selected: i } = this, { x0, x1 } = this.axis.view, { y0, y1 } = this.view, xs = this.axis.xs;
    const x = (at) => MARGIN.left + ((at - x0) / (x1 - x0)) * w, y = (place) => top + h * (1 - (place - y0) / (y1 - y0));
    const left = Math.max(x(xs[history.start[i]]), MARGIN.left - 4), right = Math.min(x(xs[history.end[i]]), MARGIN.left + w + 4);
    const upper = y(map.place[i] + map.size[i]), lower = y(map.place[i]);
    for (const [colour, width] of [[tint.paperText, 4], [tint.accent, 2]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.strokeRect(left, upper, Math.max(right - left, 2), Math.max(lower - upper, 2));
    }
  }
  drawAxes(pen, tint, w, top, h) {
    const { y0, y1 } = this.view, y = (place) => top + h * (1 - (place - y0) / (y1 - y0));
    pen.strokeStyle = tint.ink;
    pen.lineWidth = 1;
    pen.strokeRect(MARGIN.left - 0.5, top - 0.5, w + 1, h + 1);
    for (const tick of ticks(y0, y1, Math.max(Math.floor(h / 60), 2), true)) {
      axisText(pen, tint.ink, MARGIN.left - 6, Math.max(y(tick) + 4, top + 9), formatBytes(tick), "right");
      pen.fillStyle = tint.ink;
      pen.fillRect(MARGIN.left - 4, Math.round(y(tick)), 4, 1);
    }
    drawTimeAxis(pen, this.axis, tint, w, top + h);
  }
  // Annotations above the map; nested ones are drawn below their parents.
  drawStrip(pen, tint, w) {
    const { history } = this, { x0, x1 } = this.axis.view, xs = this.axis.xs, x = (event) => MARGIN.left + ((xs[event] - x0) / (x1 - x0)) * w;
    const filled = new Array(history.strips).fill(-Infinity), end = MARGIN.left + w;
    this.strip = [];
    for (const [i, mark] of history.about.marks.entries()) {
      const depth = history.depth[i];
      if (mark.kind !== "annotation" || depth >= history.strips) continue;
      const left = x(mark.start), right = Math.max(x(mark.end ?? history.events), left + 1.5);
      // Skip marks too close to the previous one.
      if (right < MARGIN.left || left > end || right - filled[depth] < 0.7) continue;
      filled[depth] = right;
      const from = Math.max(left, MARGIN.left), to = Math.min(right, end), upper = 2 + depth * STRIP;
      this.strip.push([left, right, upper, mark.text]);
      pen.fillStyle = tint.accent;
      pen.globalAlpha = 0.25 - 0.06 * depth;
      pen.fillRect(from, upper, to - from - (to - from > 3 ? 1 : 0), STRIP - (history.strips > 1 ? 1 : 0));
      pen.globalAlpha = 1;
      if (to - from <= 40) continue;
      pen.save();
      pen.beginPath();
      pen.rect(from, upper, to - from - 2, STRIP);
      pen.clip();
      axisText(pen, tint.ink, from + 3, upper + 12, mark.text, "left");
      pen.restore();
    }
  }
  toX(x) {
    const { w } = this.area(), { x0, x1 } = this.axis.view;
    return x0 + ((x - MARGIN.left) / w) * (x1 - x0);
  }
  toY(y) {
    const { top, h } = this.area(), { y0, y1 } = this.view;
    return y0 + (1 - (y - top) / h) * (y1 - y0);
  }
  // The block at a point of the canvas; -1 for none.
  at(x, y) {
    if (this.kind === "segments") return this.cellAt(x, y)?.block ?? -1;
    const { history, map } = this, when = this.toX(x), where = this.toY(y), xs = this.axis.xs;
    if (this.kind === "map") {
      // Blocks thinner than a pixel can be selected, too.
      const { w, h } = this.area(), near = ((this.axis.view.x1 - this.axis.view.x0) / w) * 0.7, thin = ((this.view.y1 - this.view.y0) / h) * 0.7;
      let best = -1;
      for (let i = 0; i < history.start.length; i++) {
        if (map.size[i] === 0 || xs[history.start[i]] > when + near || xs[history.end[i]] < when - near) continue;
        if (map.place[i] > where + thin || map.place[i] + map.size[i] < where - thin) continue;
        if (xs[history.start[i]] <= when && when < xs[history.end[i]] && map.place[i] <= where && where < map.place[i] + map.size[i]) return i;
        best = i;
      }
      return best;
    }
    const { w } = this.area(), column = Math.floor(x - MARGIN.left);
    if (column < 0 || column >= w) return -1;
    const scale = window.devicePixelRatio || 1, width = Math.max(Math.round(w * scale), 1);
    const moment = columnsOf(history, xs, this.axis.view, width, map.active)[Math.min(Math.floor(column * scale), width - 1)];
    let hit = -1, sum = 0;
    walkStack(history, [moment], (_, blocks) => {
      for (let i = blocks.next[0]; i !== 0 && hit < 0; i = blocks.next[i]) {
        if (where >= sum && where < sum + map.size[i - 1]) hit = i - 1;
        sum += map.size[i - 1];
      }
    });
    return hit;
  }
  // The segment at a point of the map; -1 for none.
  segmentAt(x, y) {
    const { map } = this, xs = this.axis.xs, when = this.toX(x), where = this.toY(y);
    if (this.kind === "segments") return this.cellAt(x, y)?.segment ?? -1;
    if (this.kind !== "map") return -1;
    for (let i = 0; i < map.segmentStart.length; i++) {
      if (xs[map.segmentStart[i]] <= when && when < xs[map.segmentEnd[i]] && map.segmentPlace[i] <= where && where < map.segmentPlace[i] + map.segmentBytes[i]) return i;
    }
    return -1;
  }
  hover(x, y) {
    const named = this.strip?.findLast(([left, right, upper]) => x >= left && x <= right && y >= upper && y < upper + STRIP);
    const i = named ? -1 : this.at(x, y), segment = named || i >= 0 ? -1 : this.segmentAt(x, y);
    this.tip.hidden = i < 0 && !named && segment < 0;
    if (this.tip.hidden) return;
    this.tip.textContent = named ? named[3] : (i >= 0 ? describeBlock(this.history, this.map, i) : describeSegment(this.history, this.map, segment, this.kind === "segments" ? this.axis.moment ?? this.highest() : this.axis.eventAt(this.toX(x)))).join("\n");
    const room = this.root.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = Math.max(Math.min(x + 14, room), 0) + "px";
    const below = this.canvas.offsetTop + y + 16;
    this.tip.style.top = (y + this.tip.offsetHeight + 24 > this.canvas.clientHeight ? below - this.tip.offsetHeight - 26 : below) + "px";
  }
  zoomTime(factor, at) {
    const { x0, x1 } = this.axis.view, fixed = at ?? (x0 + x1) / 2;
    this.axis.show(fixed - (fixed - x0) * factor, fixed + (x1 - fixed) * factor);
  }
  zoomMemory(factor, at) {
    const { y0, y1 } = this.view, fixed = at ?? (y0 + y1) / 2;
    this.showMemory(fixed - (fixed - y0) * factor, fixed + (y1 - fixed) * factor);
  }
  showMemory(y0, y1) {
    const { y1: top } = this.everything(), span = Math.min(Math.max(y1 - y0, 512), top), middle = (y0 + y1) / 2;
    const from = Math.min(Math.max(middle - span / 2, 0), top - span);
    this.view = { y0: from, y1: from + span };
    this.later();
  }
  move(right, up) {
    const { x0, x1 } = this.axis.view, { y0, y1 } = this.view, dx = (x1 - x0) * right, dy = (y1 - y0) * up;
    if (up) this.showMemory(y0 + dy, y1 + dy);
    if (right) this.axis.show(x0 + dx, x1 + dx);
  }
  home() {
    this.view = this.everything();
    const { x0, x1 } = this.axis.whole();
    this.axis.show(x0, x1);
  }
  choose(i, moment) {
    this.selected = i;
    this.axis.choose(moment);
  }
  // Shows a moment and the block at an address.
  reach(event, address) {
    const { history, map } = this, place = address === null ? null : placeOf(map, address), moment = Math.min(event, Math.max(history.events - 1, 0));
    if (place !== null && this.kind === "map") {
      const covers = (i) => map.size[i] > 0 && map.place[i] <= place && place < map.place[i] + map.size[i] && history.start[i] <= moment && moment < history.end[i];
      const i = history.start.findIndex((_, i) => covers(i)), bytes = i < 0 ? 1 << 20 : map.size[i];
      this.selected = i;
      this.showMemory(place - 4 * bytes, place + 5 * bytes);
    }
    this.axis.choose(moment);
    this.canvas.scrollIntoView({ block: "center" });
    this.canvas.focus({ preventScroll: true });
  }
  // Finds blocks at an address or of a line; the same query again shows the next one.
  find(query) {
    const text = query.trim(), { history, map } = this;
    if (text !== this.query) {
      this.query = text;
      this.matches = text === "" ? [] : searchBlocks(history, map, text);
      this.next = 0;
    }
    if (this.matches.length === 0) {
      this.answer.textContent = text === "" ? "" : "no block";
      return;
    }
    const i = this.matches[this.next];
    this.answer.textContent = `${formatCount(this.next + 1)} of ${formatCount(this.matches.length)}`;
    this.next = (this.next + 1) % this.matches.length;
    const from = this.axis.xs[history.start[i]], to = this.axis.xs[history.end[i]], wide = Math.max(to - from, this.axis.byTime ? 1000 : 10);
    this.kind === "map" && this.showMemory(map.place[i] - map.size[i] * 2, map.place[i] + map.size[i] * 3);
    this.selected = i;
    this.axis.moment = history.start[i];
    this.axis.show(from - wide / 2, to + wide / 2);
  }
  // Shows the details of the chosen block and moment.
  showDetails() {
    const { axis, history, map } = this, key = [this.selected, axis.moment, this.number].join();
    if (key === this.shownDetails) return;
    this.shownDetails = key;
    this.details.replaceChildren();
    if (this.selected >= 0) {
      const stack = framesOf(history, history.stack[this.selected]);
      make("h3", this.details, {}, "Block");
      make("pre", this.details, { class: "block" }, describeBlock(history, map, this.selected).join("\n"));
      if (stack.length > 1) {
        const all = make("details", this.details);
        make("summary", all, {}, "full stack");
        make("pre", all, {}, stack.join("\n"));
      }
    }
    if (axis.moment !== null) showMoment(this.details, history, map, axis.moment, (event) => axis.choose(event));
  }
  listen() {
    const { canvas } = this;
    let drag = null;
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { x, y } = point(event), turned = event.deltaY || event.deltaX, factor = Math.exp(Math.max(Math.min(turned, 200), -200) / 250);
      if (event.shiftKey) this.zoomMemory(factor, this.toY(y));
      else this.zoomTime(factor, this.toX(x));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { ...point(event), box: event.shiftKey, moved: false, view: this.view, time: this.axis.view };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const here = point(event);
      if (!drag) return this.hover(here.x, here.y);
      this.tip.hidden = true;
      if (Math.abs(here.x - drag.x) + Math.abs(here.y - drag.y) < 4 && !drag.moved) return;
      drag.moved = true;
      if (drag.box) {
        drag.to = here;
        this.draw();
        const pen = canvas.getContext("2d");
        pen.strokeStyle = colours().accent;
        pen.strokeRect(drag.x, drag.y, here.x - drag.x, here.y - drag.y);
        return;
      }
      const { w, h } = this.area(), { x0, x1 } = drag.time, { y0, y1 } = drag.view;
      const dx = ((drag.x - here.x) / w) * (x1 - x0), dy = ((here.y - drag.y) / h) * (y1 - y0);
      this.showMemory(y0 + dy, y1 + dy);
      this.axis.show(x0 + dx, x1 + dx);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const { x, y, to, moved } = drag;
      drag = null;
      if (to) {
        const [x0, x1] = [this.toX(Math.min(x, to.x)), this.toX(Math.max(x, to.x))];
        this.showMemory(this.toY(Math.max(y, to.y)), this.toY(Math.min(y, to.y)));
        this.axis.show(x0, x1);
      } else if (!moved) {
        const here = point(event);
        this.choose(this.at(here.x, here.y), this.kind === "segments" ? this.axis.moment : this.axis.eventAt(this.toX(here.x)));
      }
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("dblclick", () => this.home());
    this.levels.addEventListener("click", (event) => {
      const box = this.levels.getBoundingClientRect();
      this.axis.choose(this.axis.eventAt(this.toX(event.clientX - box.left)));
    });
    const step = (by) => this.axis.choose((this.axis.moment ?? this.axis.eventAt(this.axis.view.x0)) + by);
    const keys = {
      ArrowLeft: () => this.move(-0.15, 0), ArrowRight: () => this.move(0.15, 0), ArrowUp: () => this.move(0, 0.15), ArrowDown: () => this.move(0, -0.15),
      "+": () => this.zoomTime(0.5), "=": () => this.zoomTime(0.5), "-": () => this.zoomTime(2), PageUp: () => this.zoomMemory(0.5), PageDown: () => this.zoomMemory(2),
      Home: () => this.home(), ".": () => step(1), ",": () => step(-1), "/": () => this.search.focus(), Escape: () => this.choose(-1, null),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}
