// The page from top to bottom.

const shared = { sameScale: false, highest: 0 };

// What tells files apart: their names, with as many folders as that takes.
const shortNames = (names) => {
  const parts = names.map((name) => name.split("/").filter((part) => part !== ""));
  for (let take = 1; take < 12; take++) {
    const short = parts.map((part) => part.slice(-take).join("/"));
    if (new Set(short).size === names.length) return short;
  }
  return names.map((name, i) => name + (names.indexOf(name) < i ? ` (${i + 1})` : ""));
};

const run = async () => {
  const page = document.getElementById("page"), data = JSON.parse(document.getElementById("data").textContent);
  const names = shortNames(data.histories.map((one) => one.name));
  data.histories.forEach((one, i) => { one.title = names[i]; });
  const count = data.histories.length, shown = count || data.runs.length || data.replays.reduce((sum, arm) => sum + arm.rows.length, 0), kind = count ? "histories" : data.runs.length ? "runs" : "replays";
  const head = make("header", page);
  make("h1", head, {}, "GPU memory of " + (shown === 1 ? names[0] ?? (data.runs[0] ?? data.replays[0]).name : shown + " " + kind));
  const several = data.histories.length > 1, axes = [];
  if (several) {
    const box = make("label", head, { class: "same" }), same = make("input", box, { type: "checkbox" });
    box.append(" same scale for all levels");
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
      make("h3", compared, {}, "The same program under other allocators");
      make("p", compared, { class: "quiet" }, "Replays; the first line is what PyTorch recorded, where the log says it. The plan knows the whole history in advance.");
      settingsTable(compared, about);
    }
    const way = { to: null };
    // The map is drawn before them.
    const answer = () => {
      answerOf(place, about.answers.advise, "What would help (advise)", drawAdvice);
      answerOf(place, about.answers.explain, "Where the memory went (explain)", (part, found) => drawExplanation(part, found, way));
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
