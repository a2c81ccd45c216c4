// Builds the page from top to bottom.

const shared = { sameScale: false, highest: 0 };

// Short file names with as many parent directories as needed to distinguish them.
const shortNames = (names) => {
  const parts = names.map((name) => name.split("/").filter((part) => part !== ""));
  for (let take = 1; take < 12; take++) {
    const short = parts.map((part) => part.slice(-take).join("/"));
    if (new Set(short).size === names.length) return short;
  }
  return names.map((name, i) => name + (names.indexOf(name) < i ? ` (${i + 1})` : ""));
};

// Outliers first, as `explain` orders several recordings: refused requests, retries, distance from the median reserved peak.
const outlierOrder = (histories, a, b) => {
  const explained = (history) => history.answers.explain?.said;
  if (![a, b].every(explained)) return 0;
  const peaks = histories.filter(explained).map((history) => explained(history).peak_reserved.reserved_bytes ?? 0).sort((x, y) => x - y);
  const median = peaks[Math.floor((peaks.length - 1) / 2)];
  const key = (history) => {
    const { refused, num_retries: retries, peak_reserved: { reserved_bytes: reserved } } = explained(history);
    return [refused, retries, Math.abs((reserved ?? 0) - median), reserved ?? 0];
  };
  const [first, second] = [key(a), key(b)], at = first.findIndex((value, i) => value !== second[i]);
  return at < 0 ? 0 : second[at] - first[at];
};

const run = async () => {
  const page = document.getElementById("page"), data = JSON.parse(document.getElementById("data").textContent);
  data.histories.sort((a, b) => outlierOrder(data.histories, a, b));
  const names = shortNames(data.histories.map((history) => history.name));
  data.histories.forEach((history, i) => { history.title = names[i]; });
  const count = data.histories.length, shown = count || data.runs.length || data.replays.reduce((sum, variant) => sum + variant.rows.length, 0), kind = count ? "recordings" : data.runs.length ? "runs" : "replays";
  const head = make("header", page);
  make("h1", head, {}, "GPU memory of " + (shown === 1 ? names[0] ?? (data.runs[0] ?? data.replays[0]).name : shown + " " + kind));
  const several = data.histories.length > 1, axes = [];
  if (several) {
    const box = make("label", head, { class: "same" }), same = make("input", box, { type: "checkbox" });
    box.append(" use the same scale for all charts");
    same.addEventListener("change", () => {
      shared.sameScale = same.checked;
      for (const axis of axes) axis.draw();
    });
  }
  drawRuns(page, data.runs);
  drawReplays(page, data.replays);
  if (count) figuresTable(page, data.histories);
  const grid = make("div", page, { class: several ? "histories several" : "histories" });
  const places = data.histories.map((about) => {
    const place = make("section", grid, { class: "history" });
    if (several) make("h2", place, {}, about.title).title = about.name;
    for (const note of about.notes) make("p", place, { class: "note" }, note);
    for (const mark of about.marks.filter(({ kind }) => kind === "oom").slice(0, 3)) {
      make("p", place, { class: "note alarm" }, `Event ${formatCount(mark.start + 1)}: ${mark.text}`);
    }
    drawVerdict(place, about);
    make("h3", place, {}, about.recorded ? "Blocks over time" : "Blocks when the snapshot was taken");
    const panels = make("div", place, { class: "panels" });
    if (about.recorded) {
      const compared = make("section", place, { class: "compared" });
      make("h3", compared, {}, "Replays under other allocators");
      settingsTable(compared, about);
    }
    const way = { to: null };
    // Called after the map has been drawn.
    const answer = () => {
      answerOf(place, about.answers.advise, "Settings (advise)", drawAdvice);
      answerOf(place, about.answers.explain, "Explanation (explain)", (part, explanation) => drawExplanation(part, explanation, way));
    };
    return { panels, way, answer };
  });
  for (const [i, about] of data.histories.entries()) {
    const history = await readHistory(about);
    const axis = new Axis(history), panel = new Panel(places[i].panels, history, axis, 0);
    axes.push(axis);
    await panel.begin();
    places[i].way.to = (event, address) => panel.reach(event, address);
    panel.draw();
    const reserved = panel.map.reserved ?? panel.map.active;
    shared.highest = reserved.reduce((a, b) => Math.max(a, b), shared.highest);
    if (i === 0) requestAnimationFrame(() => requestAnimationFrame((now) => { document.documentElement.dataset.first = now.toFixed(0); }));
  }
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  for (const { answer } of places) answer();
  const again = () => { for (const axis of axes) for (const panel of axis.panels) panel.paint(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.documentElement.dataset.ready = "yes";
};
run().catch((error) => {
  make("p", document.getElementById("page"), { class: "note alarm" }, "This page could not be drawn: " + error.message + ". It needs a browser of 2023 or later.");
  console.error(error);
});
