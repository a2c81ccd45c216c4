// Charts over time: reserved, active and requested memory, and the reserved-memory breakdown.

const MARGIN = { left: 76, right: 10, top: 6, bottom: 22 };

// Round numbers for an axis: steps of 1, 2 or 5 times a power of ten, or of a power of two for bytes.
const ticks = (low, high, count, binary) => {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [];
  let step;
  if (binary) step = 2 ** Math.ceil(Math.log2(rough));
  else {
    const power = 10 ** Math.floor(Math.log10(rough));
    step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  }
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high && out.length < 50; at += step) out.push(at);
  return out;
};

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const number = (name) => parseInt(read(name).slice(1), 16);
  return {
    ink: read("--ink"), rule: read("--rule"), faint: read("--faint"), alarm: read("--alarm"), accent: read("--accent"),
    paper: number("--paper"), held: number("--held"), paperText: read("--paper"), heldText: read("--held"),
  };
};

// Prepares a canvas at its size on the screen, in device pixels.
const prepared = (canvas) => {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  return { pen, scale, width, height, w: Math.max(width - MARGIN.left - MARGIN.right, 10) };
};

const axisText = (pen, colour, x, y, text, align) => {
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.fillText(text, x, y);
};

// The time axis below a chart.
const drawTimeAxis = (pen, axis, tint, w, bottom) => {
  const { x0, x1 } = axis.view, at = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * w;
  const text = axis.byTime ? (x) => tickTime(x, x1 - x0) : (x) => formatCount(x);
  for (const tick of ticks(x0, x1, Math.max(Math.floor(w / 110), 2), false)) {
    if (!axis.byTime && !Number.isInteger(tick)) continue;
    pen.fillStyle = tint.rule;
    pen.fillRect(Math.round(at(tick)), bottom, 1, 4);
    const x = at(tick);
    axisText(pen, tint.ink, x, bottom + 15, text(tick), x < MARGIN.left + 30 ? "left" : x > MARGIN.left + w - 30 ? "right" : "center");
  }
};
// Uses as many digits as needed to distinguish neighbouring ticks.
const tickTime = (ns, span) => {
  const [scale, unit] = span >= 2e9 ? [1e9, " s"] : span >= 2e6 ? [1e6, " ms"] : span >= 2e3 ? [1e3, " µs"] : [1, " ns"];
  return parseFloat((ns / scale).toPrecision(12)).toLocaleString("en-US", { maximumFractionDigits: 6 }) + unit;
};

// The highest value of a level in each column of pixels.
const highest = (history, xs, view, width, level) => {
  const out = new Float64Array(width);
  let event = Math.max(before(xs, view.x0), 0);
  for (let column = 0; column < width; column++) {
    const stop = view.x0 + ((view.x1 - view.x0) * (column + 1)) / width;
    let most = level[event];
    while (event + 1 < history.events && xs[event + 1] < stop) most = Math.max(most, level[++event]);
    const start = view.x0 + ((view.x1 - view.x0) * column) / width;
    out[column] = stop < xs[0] || start > xs[history.events] ? 0 : most;
  }
  return out;
};

// The last of these values in each column of pixels.
const held = ({ event, bytes }, axis, columns) => {
  const { x0, x1 } = axis.view, out = new Float64Array(columns);
  for (let column = 0, at = 0; column < columns; column++) {
    const stop = x0 + ((x1 - x0) * (column + 1)) / columns;
    while (at + 1 < event.length && axis.xs[event[at]] < stop) at++;
    out[column] = bytes[at];
  }
  return out;
};

const drawLevels = (canvas, panel) => {
  const { pen, height, w } = prepared(canvas), { history, axis, map } = panel, tint = colours();
  const h = height - MARGIN.top - MARGIN.bottom, columns = Math.round(w);
  const over = (level) => level && highest(history, axis.xs, axis.view, columns, level);
  const reserved = over(map.reserved), active = over(map.active), requested = over(history.requested);
  const recorded = panel.number > 0 && panel.first?.reserved ? over(panel.first.reserved) : null;
  const bound = history.about.lower_bound_bytes, plan = history.about.plan_bytes;
  const used = panel.number === 0 && history.used ? held(history.used, axis, columns) : null;
  const most = [reserved, active, requested, recorded, used].flatMap((values) => (values ? [values.reduce((a, b) => Math.max(a, b), 0)] : []));
  const top = Math.max(...most, shared.sameScale ? shared.highest : 0, 1) * 1.06;
  const y = (bytes) => MARGIN.top + h * (1 - bytes / top);
  const area = (values, colour, alpha) => {
    pen.globalAlpha = alpha;
    pen.fillStyle = colour;
    pen.beginPath();
    pen.moveTo(MARGIN.left, y(0));
    for (let i = 0; i < columns; i++) {
      pen.lineTo(MARGIN.left + i, y(values[i]));
      pen.lineTo(MARGIN.left + i + 1, y(values[i]));
    }
    pen.lineTo(MARGIN.left + columns, y(0));
    pen.fill();
    pen.globalAlpha = 1;
  };
  const line = (values, colour, dash) => {
    pen.strokeStyle = colour;
    pen.lineWidth = 1.3;
    pen.setLineDash(dash || []);
    pen.beginPath();
    for (let i = 0; i < columns; i++) {
      pen.lineTo(MARGIN.left + i, y(values[i]));
      pen.lineTo(MARGIN.left + i + 1, y(values[i]));
    }
    pen.stroke();
    pen.setLineDash([]);
  };
  for (const tick of ticks(0, top, 4, true)) {
    pen.fillStyle = tint.faint;
    pen.fillRect(MARGIN.left, Math.round(y(tick)), w, 1);
    axisText(pen, tint.ink, MARGIN.left - 6, y(tick) + 4, formatBytes(tick), "right");
  }
  if (reserved) {
    area(reserved, tint.heldText, 0.55);
    line(reserved, LEVEL_TINTS.reserved);
  }
  area(active, LEVEL_TINTS.active, 0.35);
  line(active, LEVEL_TINTS.active);
  line(requested, LEVEL_TINTS.requested);
  if (panel.number === 0 && history.hole) line(held(history.hole, axis, columns), LEVEL_TINTS.hole);
  if (recorded) line(recorded, LEVEL_TINTS.recorded, [5, 3]);
  if (used) line(used, LEVEL_TINTS.used);
  for (const [bytes, dash] of [[bound, [2, 3]], [plan, [7, 3]]]) {
    if (!bytes || bytes > top) continue;
    pen.strokeStyle = tint.ink;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(MARGIN.left, y(bytes));
    pen.lineTo(MARGIN.left + w, y(bytes));
    pen.stroke();
    pen.setLineDash([]);
  }
  drawTimeAxis(pen, axis, tint, w, MARGIN.top + h);
  drawMoment(pen, panel, tint, w, MARGIN.top, h);
};
const LEVEL_TINTS = { reserved: "#7d7d7d", active: "#3b6fb6", requested: "#228833", recorded: "#b3541e", hole: "#aa3377", used: "#66a5ad" };

const drawLedger = (canvas, panel) => {
  const { pen, height, w } = prepared(canvas), { history, axis } = panel, tint = colours();
  const h = height - MARGIN.top - MARGIN.bottom, { ledger } = history, count = ledger.event.length;
  const x = (i) => MARGIN.left + ((axis.xs[ledger.event[i]] - axis.view.x0) / (axis.view.x1 - axis.view.x0)) * w;
  let first = 0, last = count;
  while (first + 1 < count && x(first + 1) < MARGIN.left) first++;
  while (last > first + 1 && x(last - 1) > MARGIN.left + w) last--;
  last = Math.min(last + 1, count);
  const sum = new Float64Array(count);
  let top = 1;
  for (let i = first; i < last; i++) {
    let all = 0;
    for (const { key } of LEDGER_PARTS) all += ledger[key][i];
    top = Math.max(top, all);
  }
  if (shared.sameScale) top = Math.max(top, shared.highest);
  top *= 1.06;
  const y = (bytes) => MARGIN.top + h * (1 - bytes / top);
  for (const tick of ticks(0, top, 4, true)) {
    pen.fillStyle = tint.faint;
    pen.fillRect(MARGIN.left, Math.round(y(tick)), w, 1);
    axisText(pen, tint.ink, MARGIN.left - 6, y(tick) + 4, formatBytes(tick), "right");
  }
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN.left, MARGIN.top, w, h);
  pen.clip();
  for (const { key, tint: colour } of LEDGER_PARTS) {
    pen.fillStyle = colour;
    pen.beginPath();
    const upper = [];
    for (let i = first; i < last; i++) {
      const from = sum[i];
      sum[i] += ledger[key][i];
      const right = i + 1 < count ? x(i + 1) : MARGIN.left + w;
      pen.lineTo(x(i), y(from));
      pen.lineTo(right, y(from));
      upper.push([right, y(sum[i])], [x(i), y(sum[i])]);
    }
    for (let i = upper.length - 2; i >= 0; i -= 2) {
      pen.lineTo(...upper[i]);
      pen.lineTo(...upper[i + 1]);
    }
    pen.fill();
  }
  pen.restore();
  drawTimeAxis(pen, axis, tint, w, MARGIN.top + h);
  drawMoment(pen, panel, tint, w, MARGIN.top, h);
};

// The moment that was chosen, and lines for what the log marks.
const drawMoment = (pen, panel, tint, w, top, h) => {
  const { axis, history } = panel, at = (event) => MARGIN.left + ((axis.xs[event] - axis.view.x0) / (axis.view.x1 - axis.view.x0)) * w;
  const inside = (x) => x >= MARGIN.left && x <= MARGIN.left + w;
  const lines = history.about.marks.filter((mark) => mark.kind !== "annotation" && inside(at(mark.start)));
  for (const mark of lines.length > 120 ? lines.filter((mark) => mark.kind === "oom") : lines) {
    pen.fillStyle = mark.kind === "oom" ? tint.alarm : tint.rule;
    pen.fillRect(Math.round(at(mark.start)), top, mark.kind === "oom" ? 2 : 1, h);
  }
  if (axis.moment !== null && inside(at(axis.moment))) {
    pen.fillStyle = tint.accent;
    pen.fillRect(Math.round(at(axis.moment)), top, 1.5, h);
  }
};
