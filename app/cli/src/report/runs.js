// Line charts and stacked bars as SVG and HTML, coloured by the page's style sheet.

const CYCLE = ["#3b6fb6", "#d1495b", "#228833", "#b07aa1", "#edae49", "#6fb1d6", "#882255", "#7d7d7d", "#117733", "#aa4499"];
const tintOf = (number) => CYCLE[number % CYCLE.length];

const svg = (kind, parent, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text) element.textContent = text;
  parent.appendChild(element);
  return element;
};

const legendOf = (parent, entries) => {
  const place = make("div", parent, { class: "legend charted" });
  for (const [tint, text] of entries) {
    const key = make("span", place, { class: "key", title: text });
    make("i", key).style.background = tint;
    key.append(text);
  }
};

// Powers of ten between two numbers, inclusive.
const powers = (low, high) => {
  const out = [];
  for (let at = Math.floor(Math.log10(low)); at <= Math.ceil(Math.log10(high)); at++) out.push(10 ** at);
  return out;
};

// Lines of points [x, y]. `logX` and `logY` are logarithmic axes; `xTicks` are [place, text].
const lineChart = (parent, { lines, label, width = 480, height = 230, x: ofX, y: ofY, xTicks = null, logX = false, logY = false, binary = false }) => {
  const points = lines.flatMap((line) => line.points).filter(([, y]) => !logY || y > 0);
  const figure = make("figure", parent, { class: "chart" });
  make("figcaption", figure, {}, label);
  if (!points.length) {
    make("p", figure, { class: "quiet" }, "not recorded");
    return;
  }
  const least = (of) => points.reduce((low, point) => Math.min(low, of(point)), Infinity), most = (of) => points.reduce((high, point) => Math.max(high, of(point)), -Infinity);
  const first = ([x]) => x, second = ([, y]) => y;
  const x0 = logX ? 1 : Math.min(least(first), 1), x1 = Math.max(most(first), x0 * 1.0001 + 1e-9);
  const y0 = logY ? least(second) / 1.15 : 0, y1 = Math.max(most(second), 1e-9) * (logY ? 1.15 : 1.06);
  const across = (x) => (logX ? Math.log(x / x0) / Math.log(x1 / x0) : (x - x0) / (x1 - x0)), up = (y) => (logY ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0));
  const left = 70, top = 6, w = width - left - 12, h = height - top - 22;
  const toX = (x) => (left + w * across(x)).toFixed(1), toY = (y) => (top + h * (1 - up(y))).toFixed(1);
  const root = svg("svg", figure, { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const tens = logY ? powers(y0, y1).filter((at) => at >= y0 && at <= y1) : [];
  const rows = tens.length > 1 ? tens : logY ? [y0 * 1.15, y1 / 1.15] : ticks(0, y1, 4, binary);
  for (const at of rows) {
    svg("line", root, { class: "rule", x1: left, x2: left + w, y1: toY(at), y2: toY(at) });
    svg("text", root, { x: left - 6, y: Number(toY(at)) + 4, "text-anchor": "end" }, ofY(at));
  }
  const columns = xTicks ?? ticks(x0, x1, 5, false).filter(Number.isInteger).map((at) => [at, ofX(at)]);
  for (const [at, text] of columns.filter(([at]) => at >= x0 && at <= x1)) {
    svg("line", root, { class: "rule", x1: toX(at), x2: toX(at), y1: top, y2: top + h + 4 });
    svg("text", root, { x: toX(at), y: top + h + 17, "text-anchor": "middle" }, text);
  }
  for (const { name, points: own, tint } of lines) {
    const drawn = own.filter(([, y]) => !logY || y > 0);
    if (!drawn.length) continue;
    const line = svg("polyline", root, { class: "line", stroke: tint, points: drawn.map(([x, y]) => toX(x) + "," + toY(y)).join(" ") });
    svg("title", line, {}, name);
  }
  const button = make("button", figure, { type: "button", class: "more", title: "save the chart as an SVG image" }, "SVG");
  button.addEventListener("click", () => save("vramlab-chart.svg", svgOf(root)));
};

// A chart as an SVG document, with the rules of the page's style sheet that it needs.
const svgOf = (root) => {
  const copy = root.cloneNode(true), style = svg("style", copy, {});
  const { ink, faint } = colours();
  style.textContent = `text { fill: ${ink}; font: 11px system-ui, sans-serif; } .rule { stroke: ${faint}; } .line { fill: none; stroke-width: 1.5; }`;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
};

// One bar per row, of parts [tint, value, text]; all rows share a scale.
const stackedBars = (parent, rows, format) => {
  const sum = (parts) => parts.reduce((all, [, value]) => all + value, 0), most = Math.max(...rows.map(({ parts }) => sum(parts)), 1e-9);
  table(parent, ["run", "", "total"], rows.map(({ name, parts }) => {
    const strip = make("span", null, { class: "parts", role: "img", "aria-label": parts.map(([, value, text]) => text + " " + format(value)).join("; ") });
    for (const [tint, value, text] of parts.filter(([, value]) => value > 0)) {
      const piece = make("i", strip, { title: text + ": " + format(value) });
      piece.style.background = tint;
      piece.style.width = (100 * value) / most + "%";
    }
    return [inWords(name), strip, format(sum(parts))];
  })).classList.add("stacked");
};
// Runs: a table of values, and curves.

const HOST_PARTS = [
  ["#d1495b", "waiting in memory calls"],
  ["#edae49", "working in memory calls"],
  ["#b07aa1", "waiting elsewhere (the GPU is the bottleneck)"],
  ["#3b6fb6", "launching kernels"],
  ["#9aa5a0", "everything else"],
];
// Columns of the table of runs. Empty columns are omitted.
const RUN_COLUMNS = [
  ["step", (run) => run.step && formatTime(run.step)],
  ["steps, 10th–90th percentile", (run) => run.step_spread && run.step_spread.map(formatTime).join(" – ")],
  ["host blocked per step", (run) => run.per_step && formatTime(run.per_step.blocked)],
  ["driver calls per step", (run) => run.per_step && run.per_step.calls.toFixed(1)],
  ["host blocked per epoch, with validation", (run) => run.per_epoch && formatTime(run.per_epoch.blocked)],
  ["mostly in", (run) => run.per_epoch && [...run.per_epoch.by_call].sort((a, b) => b.blocked - a.blocked).find((row) => row.blocked > 0)?.call],
  ["driver calls per epoch, with validation", (run) => run.per_epoch && formatCount(Math.round(run.per_epoch.calls))],
  ["allocate p50", (run) => run.allocate && formatTime(run.allocate[0])],
  ["allocate p99", (run) => run.allocate && formatTime(run.allocate[1])],
  ["free p50", (run) => run.free && formatTime(run.free[0])],
  ["free p99", (run) => run.free && formatTime(run.free[1])],
  ["peak reserved", (run) => run.peak_reserved && formatBytes(run.peak_reserved)],
  ["peak requested", (run) => run.peak_requested && formatBytes(run.peak_requested)],
  ["utilisation", (run) => run.utilisation && (100 * run.utilisation).toFixed(1) + " %"],
  ["validation accuracy", (run) => run.accuracy !== null && (100 * run.accuracy).toFixed(2) + " %"],
];

const section = (parent, title, says, draw) => {
  const place = make("section", parent, { class: "charts" });
  make("h3", place, {}, title);
  if (says) make("p", place, { class: "quiet" }, says);
  draw(place);
};
const asCount = (n) => formatCount(Math.round(n));
const asLoss = (n) => String(parseFloat(n.toPrecision(3)));

// Driver calls by host time, with the time spent waiting for the device.
const syncAccount = (parent, runs) => {
  const per = runs.every((run) => run.per_step) ? "per_step" : "per_epoch", counted = runs.filter((run) => run[per]);
  const period = per === "per_step" ? "training step" : "epoch, validation included";
  const most = Math.max(...counted.map((run) => run[per].by_call[0]?.total ?? 0), 1);
  for (const run of counted) {
    const rows = run[per].by_call.filter((row, i) => i < 6 && (i === 0 || row.total > 0.005 * most));
    make("h4", parent, {}, run.name);
    const drawn = table(parent, ["call", "calls per " + period, "host time", "", "waiting"], rows.map((row) =>
      [inWords(row.call), row.calls < 1000 ? parseFloat(row.calls.toPrecision(3)) : asCount(row.calls), formatTime(row.total), bar(row.total, most, row.blocked > row.total / 2 ? "pinned" : ""), row.blocked > 0 ? formatTime(row.blocked) : "–"]));
    barLegend(drawn, { "": "mostly at work", pinned: "waiting for the device for more than half of the time" });
  }
};

const NINES = [[1, "0 %"], [10, "90 %"], [100, "99 %"], [1000, "99.9 %"], [1e4, "99.99 %"], [1e5, "99.999 %"], [1e6, "99.9999 %"]];
const latencyCharts = (parent, run) => {
  const paths = [...new Set(run.spectra.map((spectrum) => spectrum.path))];
  make("h4", parent, {}, run.name);
  legendOf(parent, paths.map((path, i) => [tintOf(i), path]));
  const grid = make("div", parent, { class: "grid" });
  for (const operation of new Set(run.spectra.map((spectrum) => spectrum.operation))) {
    const lines = run.spectra.filter((spectrum) => spectrum.operation === operation).map((spectrum) => (
      { name: spectrum.path, tint: tintOf(paths.indexOf(spectrum.path)), points: spectrum.points.map(([share, ns]) => [1 / (1 - Math.min(share, 1 - 1e-9)), ns]) }));
    lineChart(grid, { lines, label: operation + ": time of one operation, by the share of operations at least as fast", logX: true, logY: true, xTicks: NINES, y: formatTime });
  }
};

const drawRuns = (page, runs) => {
  if (!runs.length) return;
  const place = make("section", page, { class: "runs" });
  make("h2", place, {}, runs.length === 1 ? "The run" : "The runs");
  const columns = RUN_COLUMNS.filter(([, of]) => runs.some((run) => of(run)));
  table(place, ["run", "device", ...columns.map(([name]) => name)], runs.map((run) => [inWords(run.name), inWords(run.device), ...columns.map(([, of]) => of(run) || "–")])).classList.add("measures");
  // A note that several runs share is shown once.
  for (const note of new Set(runs.flatMap((run) => run.notes))) {
    const names = runs.filter((run) => run.notes.includes(note)).map((run) => run.name);
    make("p", place, { class: "note" }, (runs.length === 1 ? "" : names.length > 2 ? `${names.length} of ${runs.length} runs: ` : names.join(", ") + ": ") + note);
  }
  const fold = make("details", place);
  make("summary", fold, {}, "Settings and data");
  table(fold, ["run", "directory", "settings"], runs.map((run) => [inWords(run.name), inWords(run.folder), inWords(run.settings.map((pair) => pair.join(" ")).join("; "))]));

  const hosts = runs.filter((run) => run.host);
  if (hosts.length) section(place, "Host time", "In the last epoch, validation included.", (part) => {
    legendOf(part, HOST_PARTS);
    stackedBars(part, hosts.map((run) => ({ name: run.name, parts: HOST_PARTS.map(([tint, text], i) => [tint, run.host[i], text]) })), formatTime);
  });
  if (runs.some((run) => run.per_epoch || run.per_step)) section(place, "Driver calls", "Epochs after the first. Red: calls that wait for the device more than half of their time.", (part) => syncAccount(part, runs));
  const stepped = runs.filter((run) => run.steps);
  if (stepped.length) section(place, "Memory after each step", "", (part) => {
    const levels = [["reserved", "reserved"], ["active", "active"], ["requested", "requested"]];
    legendOf(part, levels.map(([key, text]) => [LEVEL_TINTS[key], text]));
    const grid = make("div", part, { class: "grid" });
    for (const run of stepped) {
      const lines = levels.map(([key, name]) => ({ name, tint: LEVEL_TINTS[key], points: run.steps[key] }));
      lineChart(grid, { lines, label: run.name + ": bytes after a step", x: asCount, y: formatBytes, binary: true });
    }
  });
  const ledgers = runs.filter((run) => Object.keys(run.ledger).length);
  if (ledgers.length) section(place, "Reserved-memory breakdown", "At peak reserved memory.", (part) => {
    legendOf(part, LEDGER_PARTS.map(({ tint, name }) => [tint, name]));
    stackedBars(part, ledgers.map((run) => ({ name: run.name, parts: LEDGER_PARTS.map(({ key, tint, name }) => [tint, run.ledger[key] ?? 0, name]) })), formatBytes);
  });
  const timed = runs.filter((run) => run.spectra.length);
  if (timed.length) section(place, "Latency", "Time of one allocator call, by the path that served it.", (part) => timed.forEach((run) => latencyCharts(part, run)));
  const losing = stepped.filter((run) => run.steps.loss.length);
  if (losing.length) section(place, "Losses", "Cross-entropy in nats; in long runs each point is the mean of at least ten steps.", (part) => {
    legendOf(part, losing.map((run, i) => [tintOf(i), run.name]));
    const lines = losing.map((run, i) => ({ name: run.name, tint: tintOf(i), points: run.steps.loss }));
    lineChart(part, { lines, label: "loss of the training steps", width: Math.min(760, part.clientWidth || 760), x: asCount, y: asLoss, logY: true });
    for (const run of runs) if (run.losses) make("p", part, { class: "note" }, run.losses);
  });
};
// Replays of an experiment: a matrix of allocators and recordings, and one row for each replay.

const RATIO_BEST = 1, RATIO_WORST = 1.6;
// Peak reserved relative to the lower bound; for a capacity search the smallest memory relative to peak requested.
const ratioOf = (row) => {
  if (row.capacity_bytes !== null) return row.max_live_bytes ? row.capacity_bytes / row.max_live_bytes : null;
  return row.lower_bound_bytes ? row.peak_reserved_bytes / row.lower_bound_bytes : null;
};

const drawReplays = (page, all) => {
  for (const variant of all) {
    const place = make("section", page, { class: "replays" }), searched = variant.rows.some((row) => row.capacity_bytes !== null);
    make("h2", place, {}, variant.name);
    make("p", place, { class: "quiet" }, variant.question);
    const unique = (key) => [...new Set(variant.rows.map((row) => row[key]))], histories = unique("history");
    const cells = new Map(variant.rows.map((row) => [row.alloc + "\n" + row.history, ratioOf(row)]));
    make("h3", place, {}, searched ? "Smallest memory relative to peak requested" : "Peak reserved relative to the lower bound");
    const shade = (ratio) => {
      const cell = make("span", null, { class: "cell" }, ratio?.toFixed(3) ?? "–");
      if (ratio) cell.style.setProperty("--worse", (100 * Math.min(Math.max((ratio - RATIO_BEST) / (RATIO_WORST - RATIO_BEST), 0), 1)).toFixed(0) + "%");
      return cell;
    };
    table(place, ["allocator", ...histories], unique("alloc").map((alloc) => [alloc, ...histories.map((history) => shade(cells.get(alloc + "\n" + history)))])).classList.add("matrix");
    const count = (n) => (n === null ? "–" : formatCount(n)), calls = (row) => row.driver_calls && Object.values(row.driver_calls).reduce((sum, n) => sum + n, 0);
    const bytes = (row) => row.capacity_bytes ?? row.peak_reserved_bytes ?? 0, most = Math.max(...variant.rows.map(bytes), 1);
    const rows = variant.rows.map((row) => [inWords(row.history), inWords(row.alloc), formatBytes(bytes(row)), bar(bytes(row), most, row.failed_allocations ? "failed" : ""),
      count(row.num_alloc_retries), count(row.failed_allocations), count(calls(row)), seconds(row.simulated_s)]);
    const fold = make("details", place);
    make("summary", fold, {}, "Each replay");
    const drawn = table(fold, ["recording", "allocator", searched ? "smallest memory" : "peak reserved", "", "retries", "failed requests", "driver calls", "simulated time"], rows);
    barLegend(drawn, { "": "all requests served" });
  }
};
