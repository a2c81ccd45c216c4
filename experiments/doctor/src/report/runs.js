// Runs as their records tell them: figures side by side, and curves.

const HOST_PARTS = [
  ["#d1495b", "waiting inside alloc and free"],
  ["#edae49", "alloc and free themselves"],
  ["#b07aa1", "waiting elsewhere (the device is the limit)"],
  ["#3b6fb6", "launching kernels"],
  ["#9aa5a0", "everything else"],
];
// Columns of the table of runs. One that no run fills is left out.
const RUN_COLUMNS = [
  ["step", (run) => run.step && formatTime(run.step)],
  ["10–90 % of steps", (run) => run.step_spread && run.step_spread.map(formatTime).join(" – ")],
  ["host blocked a step", (run) => run.per_step && formatTime(run.per_step.blocked)],
  ["driver calls a step", (run) => run.per_step && run.per_step.calls.toFixed(1)],
  ["host blocked an epoch, with validation", (run) => run.per_epoch && formatTime(run.per_epoch.blocked)],
  ["most in", (run) => run.per_epoch && [...run.per_epoch.by_call].sort((a, b) => b.blocked - a.blocked).find((row) => row.blocked > 0)?.call],
  ["driver calls an epoch, with validation", (run) => run.per_epoch && formatCount(Math.round(run.per_epoch.calls))],
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

// Calls that took the host's time; the part that waited for the device is marked.
const syncAccount = (parent, runs) => {
  const per = runs.every((run) => run.per_step) ? "per_step" : "per_epoch", counted = runs.filter((run) => run[per]);
  const period = per === "per_step" ? "training step" : "epoch, validation included";
  const most = Math.max(...counted.map((run) => run[per].by_call[0]?.total ?? 0), 1);
  for (const run of counted) {
    const rows = run[per].by_call.filter((row, i) => i < 6 && (i === 0 || row.total > 0.005 * most));
    make("h4", parent, {}, run.name);
    table(parent, ["call", "calls in one " + period, "host's time", "", "of it waiting"], rows.map((row) =>
      [inWords(row.call), row.calls < 1000 ? parseFloat(row.calls.toPrecision(3)) : asCount(row.calls), formatTime(row.total), bar(row.total, most, row.blocked > row.total / 2 ? "pinned" : ""), row.blocked > 0 ? formatTime(row.blocked) : "–"]));
  }
};

const NINES = [[1, "0 %"], [10, "90 %"], [100, "99 %"], [1000, "99.9 %"], [1e4, "99.99 %"], [1e5, "99.999 %"], [1e6, "99.9999 %"]];
const latencyCharts = (parent, run) => {
  const paths = [...new Set(run.spectra.map((one) => one.path))];
  make("h4", parent, {}, run.name);
  legendOf(parent, paths.map((path, i) => [tintOf(i), path]));
  const grid = make("div", parent, { class: "grid" });
  for (const operation of new Set(run.spectra.map((one) => one.operation))) {
    const lines = run.spectra.filter((one) => one.operation === operation).map((one) => (
      { name: one.path, tint: tintOf(paths.indexOf(one.path)), points: one.points.map(([share, ns]) => [1 / (1 - Math.min(share, 1 - 1e-9)), ns]) }));
    lineChart(grid, { lines, label: operation + ": time of one operation against the share that took no longer", logX: true, logY: true, xTicks: NINES, y: formatTime });
  }
};

const drawRuns = (page, runs) => {
  if (!runs.length) return;
  const place = make("section", page, { class: "runs" });
  make("h2", place, {}, runs.length === 1 ? "The run" : "The runs");
  const columns = RUN_COLUMNS.filter(([, of]) => runs.some((run) => of(run)));
  table(place, ["run", "device", ...columns.map(([name]) => name)], runs.map((run) => [inWords(run.name), inWords(run.device), ...columns.map(([, of]) => of(run) || "–")])).classList.add("measures");
  // What several runs have to say is said once.
  for (const note of new Set(runs.flatMap((run) => run.notes))) {
    const names = runs.filter((run) => run.notes.includes(note)).map((run) => run.name);
    make("p", place, { class: "note" }, (runs.length === 1 ? "" : names.length > 2 ? `${names.length} of ${runs.length} runs: ` : names.join(", ") + ": ") + note);
  }
  const fold = make("details", place);
  make("summary", fold, {}, "Settings in effect and data");
  table(fold, ["run", "folder", "settings"], runs.map((run) => [inWords(run.name), inWords(run.folder), inWords(run.settings.map((pair) => pair.join(" ")).join("; "))]));

  const hosts = runs.filter((run) => run.host);
  if (hosts.length) section(place, "Where the host's time goes", "In the last epoch, validation included.", (part) => {
    legendOf(part, HOST_PARTS);
    stackedBars(part, hosts.map((run) => ({ name: run.name, parts: HOST_PARTS.map(([tint, text], i) => [tint, run.host[i], text]) })), formatTime);
  });
  if (runs.some((run) => run.per_epoch || run.per_step)) section(place, "Driver calls", "Epochs after the first. Red: more than half of the time is waiting for the device.", (part) => syncAccount(part, runs));
  const stepped = runs.filter((run) => run.steps);
  if (stepped.length) section(place, "Memory after each step", "", (part) => {
    const levels = [["reserved", "reserved"], ["active", "active"], ["requested", "asked for"]];
    legendOf(part, levels.map(([key, text]) => [LEVEL_TINTS[key], text]));
    const grid = make("div", part, { class: "grid" });
    for (const run of stepped) {
      const lines = levels.map(([key, name]) => ({ name, tint: LEVEL_TINTS[key], points: run.steps[key] }));
      lineChart(grid, { lines, label: run.name + ": bytes after a step", x: asCount, y: formatBytes, binary: true });
    }
  });
  const ledgers = runs.filter((run) => Object.keys(run.ledger).length);
  if (ledgers.length) section(place, "Where reserved memory went", "At the moment when reserved memory was at its peak.", (part) => {
    legendOf(part, LEDGER_PARTS.map(({ tint, name }) => [tint, name]));
    stackedBars(part, ledgers.map((run) => ({ name: run.name, parts: LEDGER_PARTS.map(({ key, tint, name }) => [tint, run.ledger[key] ?? 0, name]) })), formatBytes);
  });
  const timed = runs.filter((run) => run.spectra.length);
  if (timed.length) section(place, "Latency", "Time that one call of the allocator takes, by the path that served it.", (part) => timed.forEach((run) => latencyCharts(part, run)));
  const losing = stepped.filter((run) => run.steps.loss.length);
  if (losing.length) section(place, "Losses", "Cross-entropy in nats; each point is the mean of at least ten steps where there are so many.", (part) => {
    legendOf(part, losing.map((run, i) => [tintOf(i), run.name]));
    const lines = losing.map((run, i) => ({ name: run.name, tint: tintOf(i), points: run.steps.loss }));
    lineChart(part, { lines, label: "loss of the training steps", width: Math.min(760, part.clientWidth || 760), x: asCount, y: asLoss, logY: true });
    for (const run of runs) if (run.losses) make("p", part, { class: "note" }, run.losses);
  });
};
