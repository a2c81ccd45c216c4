// What `advise` and `explain` say, drawn from their figures: bars, tables, and ways into the map.

// A bar of so much of the most; `limit` draws a line across it.
const bar = (value, most, kind = "", limit = null) => {
  const place = make("span", null, { class: "bar" }), fill = make("i", place, kind ? { class: kind } : {});
  fill.style.width = Math.max((100 * value) / Math.max(most, 1), 0.3) + "%";
  if (limit !== null && limit <= most) make("b", place).style.left = `calc(${(100 * limit) / most}% - 1px)`;
  return place;
};
const inWords = (text) => make("span", null, { class: "words" }, text);
const percent = (part, whole) => (whole > 0 && part <= whole ? ((100 * part) / whole).toFixed(1) + " %" : "–");
const seconds = (s) => (s === null || s === undefined ? "–" : formatTime(s * 1e9));
const listed = (parent, sentences) => {
  if (!sentences.length) return;
  const list = make("ul", parent, { class: "sentences" });
  for (const sentence of sentences) make("li", list, {}, sentence[0].toUpperCase() + sentence.slice(1));
};

// A table of which the first rows are shown, and the others at the press of a button.
const FEW = 8;
const longTable = (parent, head, rows) => {
  const made = table(parent, head, rows), more = [...made.tBodies[0].rows].slice(FEW);
  made.classList.add("long");
  if (more.length < 3) return made;
  for (const row of more) row.hidden = true;
  const button = make("button", parent, { type: "button", class: "more" }, `all ${formatCount(rows.length)} rows`);
  button.addEventListener("click", () => {
    for (const row of more) row.hidden = false;
    button.remove();
  });
  return made;
};

// The answer of a command, or one line that says why there is none.
const answerOf = (parent, answer, title, then) => {
  if (!answer) return;
  const place = make("section", parent, { class: "answer" });
  make("h3", place, {}, title);
  if (answer.said) then(place, answer.said);
  else make("p", place, { class: "note" }, answer.failed);
};

// What would help, in two lines above everything else.
const drawVerdict = (parent, about) => {
  const advice = about.answers.advise?.said, best = advice?.settings[0];
  if (!best) return;
  const box = make("div", parent, { class: "verdict " + advice.verdict }), now = advice.recorded.replayed;
  make("p", box, {}, advice.happened[0]);
  const line = make("p", box);
  if (advice.verdict === "keep") {
    line.append(`No setting of PyTorch reserves less by more than ${advice.saving_percent ? "2 %" : "half a percent"}: ${formatBytes(now.peak_reserved_bytes)} as it ran.`);
    return;
  }
  const needed = best.smallest_memory_bytes, least = needed ? ", and it runs in " + formatAtLeast(needed) + " or more" : "";
  if (advice.verdict === "not-said") {
    line.append("The recording does not say what would help: before it began more was reserved than the setting needs that does best in what was recorded, ");
    make("code", line, {}, best.conf || "PyTorch's defaults");
    return;
  }
  if (advice.verdict === "out-of-memory") {
    line.append(advice.needed_bytes ? `No setting mends this: you need ${formatAtLeast(advice.needed_bytes)}. It takes the least under ` : "No setting mends this. It takes the least under ");
    make("code", line, {}, best.conf || "PyTorch's defaults");
    return;
  }
  line.append("What would help: ");
  make("code", line, {}, best.export);
  line.append(` reserves ${formatBytes(best.peak_reserved_bytes)} ` + (now.out_of_memory ? "and memory does not run out" : `instead of ${formatBytes(now.peak_reserved_bytes)}`) + least + ".");
  if (best.python) {
    line.append(" It needs, in the program, ");
    make("code", line, {}, best.python);
  }
  const second = advice.without_expandable_segments;
  if (second && second.conf !== now.conf) {
    const other = make("p", box);
    other.append("Without expandable segments: ");
    make("code", other, {}, second.export);
    other.append(` reserves ${formatBytes(second.peak_reserved_bytes)}.`);
  }
};

// Settings may be broken at their commas only.
const confWords = (conf) => {
  const element = make("span", null, { class: "words conf" });
  conf.split(/(?<=,)/).forEach((part, i) => element.append(...(i ? [document.createElement("wbr"), part] : [part])));
  return element;
};
// A table without the columns in which nothing stands.
const withoutEmpty = (head, rows) => {
  const full = head.map((_, i) => i === 0 || rows.some((row) => row[i] instanceof Node ? row[i].textContent !== "" || row[i].classList.contains("bar") : row[i] !== ""));
  return [head, ...rows].map((row) => row.filter((_, i) => full[i]));
};

const drawAdvice = (parent, advice) => {
  const limit = advice.limit_bytes, now = advice.recorded.replayed, outcomes = [now, ...advice.settings, ...advice.also_tried, ...advice.other_allocators];
  const most = Math.max(...outcomes.map((one) => one.peak_reserved_bytes), limit ?? 0);
  const calls = (one) => formatCount(Object.values(one.driver_calls).reduce((a, b) => a + b, 0));
  const row = (name, one, kind) => {
    const code = confWords(name), ran = one.out_of_memory ? "runs out" : "–", needed = one.smallest_memory_bytes;
    if (one.first_failure) code.title = one.first_failure.error;
    return [code, formatBytes(one.peak_reserved_bytes), bar(one.peak_reserved_bytes, most, one.out_of_memory ? "failed" : kind, limit),
      needed ? formatAtLeast(needed) : ran, calls(one), seconds(one.simulated_s), formatCount(one.num_alloc_retries)];
  };
  listed(parent, advice.happened);
  const head = ["PYTORCH_CUDA_ALLOC_CONF", "peak reserved", limit === null ? "" : "bar: the limit, " + formatBytes(limit), "runs in", "driver calls", "time in them (simulated H200)", "releases of the cache"];
  const named = (one) => one.conf || "PyTorch's defaults";
  const settings = [row("as it ran: " + named(now), now, ""), ...advice.settings.map((one) => row(named(one), one, ""))];
  table(parent, head, settings).classList.add("settings", "confs");
  if (advice.also_tried.length) {
    const all = make("details", parent);
    make("summary", all, {}, `${formatCount(advice.also_tried.length)} more settings that were tried`);
    table(all, head, advice.also_tried.map((one) => row(named(one), one, ""))).classList.add("settings", "confs");
  }
  make("h4", parent, {}, "What no setting can do");
  make("p", parent, {}, advice.bound);
  const others = [...advice.other_allocators].sort((a, b) => a.out_of_memory - b.out_of_memory || a.peak_reserved_bytes - b.peak_reserved_bytes);
  if (others.length) table(parent, ["other allocators", ...head.slice(1)], others.map((one) => row(one.alloc, one, "bound"))).classList.add("settings", "confs");
  make("h4", parent, {}, "What this does not know");
  listed(parent, advice.not_known);
};

// `way.to(event, address)` shows a moment on the map, and what lay at an address then.
const drawExplanation = (parent, found, way) => {
  const link = (text, event, address = null) => {
    const button = make("button", null, { type: "button", class: "way", title: "show it on the map" }, text);
    button.addEventListener("click", () => way.to?.(Math.max(event - 1, 0), address));
    return button;
  };
  const when = (moment) => [moment.event > 0 ? "event " + formatCount(moment.event) : "before the first event", moment.time_ns === null ? "" : formatTime(moment.time_ns),
    moment.annotation ? "in " + moment.annotation : "", moment.line ? "at " + moment.line : ""].filter((text) => text).join(", ");
  const cause = new Map(found.sentences.causes), title = (text) => make("h4", parent, {}, text);
  const lineOf = (row) => inWords((row.nearby ? "~ " : "") + row.line + (row.inside ? " › " + row.inside : ""));
  listed(parent, found.sentences.headline);
  drawWent(title, parent, found, when);
  const [first] = found.who;
  for (const who of found.who) {
    // What is all but the same is not said twice.
    if (who !== first && who.moment.active_bytes >= 0.98 * first.moment.active_bytes) continue;
    if (found.events === 0) {
      title("Who held memory when the snapshot was taken: " + formatBytes(who.moment.active_bytes));
      drawWho(parent, found, who, lineOf);
      continue;
    }
    const what = { peak_active: "Who held memory at the peak of use", out_of_memory: "Who held memory when it ran out", near_peak_reserved: "Who held memory when reserved came within 0.5 % of its peak" }[who.at] ?? "Who held memory at the peak of reserved";
    title(`${what}: ${formatBytes(who.moment.active_bytes)}`).append(" ", link(when(who.moment), who.moment.event));
    drawWho(parent, found, who, lineOf);
  }
  if (found.grew) {
    const { from, to, lines } = found.grew, most = Math.max(...lines.map((row) => row.after_bytes)), more = (row) => row.after_bytes - row.before_bytes;
    title("What grew between ").append(link("event " + formatCount(from.event), from.event), " and ", link("event " + formatCount(to.event), to.event));
    longTable(parent, ["line", "more", "now", "", "blocks"], lines.map((row) => [lineOf(row), (more(row) < 0 ? "−" : "+") + formatBytes(Math.abs(more(row))), formatBytes(row.after_bytes),
      bar(row.after_bytes, most), formatCount(row.before_blocks) + " → " + formatCount(row.after_blocks)]));
  }
  const { pinned } = found.reserved, at = found.reserved.moment.event;
  if (pinned.length) {
    const many = found.reserved.pinned_segments === 1 ? "1 segment that is" : formatCount(found.reserved.pinned_segments) + " segments that are";
    title(`Which blocks pin the holes: ${formatBytes(found.reserved.pinned_free_bytes)} free in ${many} mostly free and cannot go back`);
    const most = Math.max(...pinned.map((row) => row.bytes));
    longTable(parent, ["segment", "bytes", "free", "", "blocks", "kept by", "its age"], pinned.map((row) => {
      const [keeper] = row.keepers, age = !keeper ? "–" : keeper.age_ns !== null ? formatTime(keeper.age_ns) : keeper.age_events !== null ? formatCount(keeper.age_events) + " events" : "old";
      return [link(formatAddress(row.address), at, keeper?.address ?? row.address), formatBytes(row.bytes), formatBytes(row.free_bytes), bar(row.free_bytes, most, "pinned"), formatCount(row.blocks),
        keeper ? lineOf(keeper) : "–", age + (keeper?.pending ? ", freed, not completed" : "")];
    }));
  }
  if (found.peaks.length > 1) {
    title("When: the highest peaks of use");
    const most = found.peak_reserved.reserved_bytes || found.peak_active.active_bytes;
    const rows = found.peaks.map((moment) => [link(formatCount(moment.event), moment.event),
      moment.time_ns === null ? "–" : formatTime(moment.time_ns), formatBytes(moment.active_bytes), bar(moment.active_bytes, most), formatBytes(moment.reserved_bytes),
      formatBytes(moment.largest_hole_bytes), inWords([moment.annotation, moment.line].filter((text) => text).join(", "))]);
    const [head, ...full] = withoutEmpty(["event", "time", "active", "", "reserved", "largest hole", "where"], rows);
    longTable(parent, head, full);
  }
  if (found.retries.length) {
    title(`Memory went back to the device during ${formatCount(found.num_retries)} ${found.num_retries === 1 ? "request" : "requests"}`);
    longTable(parent, ["event", "asked for", "what happened"], found.retries.map((retry, i) => [link(formatCount(retry.event), retry.event), formatBytes(retry.asked_bytes), inWords(found.sentences.retries[i])]).reverse());
  }
  if (found.shapes.length) {
    const taken = found.shapes.reduce((sum, one) => sum + one.taken_bytes, 0), most = Math.max(...found.shapes.map((one) => one.taken_bytes));
    title(`Which sizes miss: requests took ${formatBytes(taken)} from the device`);
    const rows = found.shapes.map((one) => [formatBytes(one.requested_bytes), formatCount(one.requests), formatCount(one.misses),
      formatBytes(one.taken_bytes), bar(one.taken_bytes, most), inWords(cause.get(one.cause)), inWords(one.line ?? "")]);
    const [head, ...full] = withoutEmpty(["size", "asked", "missed", "took", "", "mostly because", "line"], rows);
    longTable(parent, head, full);
  }
};

// One bar of parts [tint, bytes, what it says], as wide as their share of the whole.
const partsOf = (parent, parts, whole) => {
  const strip = make("div", parent, { class: "parts", role: "img", "aria-label": parts.map(([, , text]) => text).join("; ") });
  for (const [tint, bytes, text] of parts) {
    const piece = make("i", strip, { title: text });
    piece.style.background = tint;
    piece.style.flexGrow = String(bytes / Math.max(whole, 1));
  }
};
const keyOf = (tint, text) => {
  const key = make("span", null, { class: "key" });
  make("i", key).style.background = tint;
  key.append(text);
  return key;
};

// Reserved memory by what it was used for: one bar, and a sentence for each part of it.
const drawWent = (title, parent, found, when) => {
  const went = found.reserved, whole = went.moment.reserved_bytes, parts = went.parts.filter((part) => part.bytes > 0);
  if (whole > 0) {
    const moment = { out_of_memory: "when memory ran out", near_peak_reserved: "when it came within 0.5 % of its peak" }[went.at] ?? "at the peak";
    const at = found.events === 0 ? "when the snapshot was taken" : `${moment} (${when(went.moment)})`;
    title(`Where ${formatBytes(whole)} reserved went ${at}`);
    const known = (part) => LEDGER_PARTS.find((one) => one.key === part.name);
    partsOf(parent, parts.map((part) => [known(part)?.tint ?? "#888888", part.bytes, part.sentence]), whole);
    table(parent, ["part", "bytes", "share", ""], parts.map((part) => [keyOf(known(part)?.tint ?? "#888888", known(part)?.name ?? part.name), formatBytes(part.bytes), percent(part.bytes, whole), inWords(part.sentence.replace(/^[^()]*\([^()]*%\) /, ""))]));
  }
  if (went.streams.length > 1) {
    const most = Math.max(...went.streams.map((row) => row.reserved_bytes));
    table(parent, ["stream, pool", "segments", "reserved", "", "active", "waits", "idle segments", "pinned", "largest hole"], went.streams.map((row) => [
      (row.stream < 65536 ? row.stream : formatAddress(row.stream)) + ", " + row.pool, formatCount(row.segments), formatBytes(row.reserved_bytes), bar(row.reserved_bytes, most),
      ...[row.active_bytes, row.pending_bytes, row.soft_bytes, row.hard_bytes, row.largest_hole_bytes].map(formatBytes)]));
  }
  listed(parent, found.sentences.streams);
};

// Tint, name, and by what it is told.
const PURPOSES = {
  parameters: ["#3b6fb6", "parameters", "made by Module.to, load_state_dict, a module's __init__ or torch.nn.init"],
  gradients: ["#edae49", "gradients", "made by the backward pass, of parameters and on the way to them"],
  optimizer_state: ["#b07aa1", "optimizer state", "made in an optimizer's step, and held after it"],
  activations: ["#228833", "activations", "made in a module's forward"],
  workspace: ["#d1495b", "workspace", "made for cuBLAS or cuDNN"],
  unknown: ["#9aa5a0", "unknown", "the recording does not tell"],
};
// What memory is for: a bar, and a row for each part of it.
const drawPurposes = (parent, who) => {
  if (!who.purposes.length) return;
  const whole = who.moment.active_bytes, of = (row) => PURPOSES[row.purpose] ?? ["#9aa5a0", row.purpose, ""];
  partsOf(parent, who.purposes.map((row) => [of(row)[0], row.bytes, `${of(row)[1]} ${formatBytes(row.bytes)}`]), whole);
  table(parent, ["what it is for", "bytes", "share", "blocks", "told by"], who.purposes.map((row) => [
    keyOf(of(row)[0], of(row)[1]), formatBytes(row.bytes), percent(row.bytes, whole), formatCount(row.blocks), inWords(of(row)[2])])).classList.add("purposes");
};

// By what it is for and by line where these are known, else by size; and by call, from the outside in.
const drawWho = (parent, found, who, lineOf) => {
  drawPurposes(parent, who);
  const whole = who.moment.active_bytes, rows = found.frames ? who.lines : who.sizes, most = Math.max(...rows.map((row) => row.bytes), 1);
  const figures = (row) => [formatBytes(row.bytes), bar(row.bytes, most), percent(row.bytes, whole), formatCount(row.blocks)];
  if (found.frames) {
    longTable(parent, ["line", "bytes", "", "share", "blocks", "the oldest came"], rows.map((row) => [lineOf(row), ...figures(row), formatCount(row.oldest_events) + " events before"]));
    if (rows.some((row) => row.nearby)) make("p", parent, { class: "quiet" }, "~: blocks without frames, as the backward pass makes them on a thread without Python; the line ran last.");
    const all = make("details", parent), calls = [];
    make("summary", all, {}, "by call, from the outside in");
    const walk = (node, depth) => {
      for (const child of node.children) {
        if (child.bytes < 0.005 * whole || calls.length > 300) continue;
        const name = inWords(child.name);
        name.style.paddingLeft = Math.min(depth, 12) * 1.1 + "em";
        calls.push([name, formatBytes(child.bytes), bar(child.bytes, whole), percent(child.bytes, whole), formatCount(child.blocks)]);
        walk(child, depth + 1);
      }
    };
    walk(who.tree, 0);
    table(all, ["call", "bytes", "", "share", "blocks"], calls);
  } else {
    longTable(parent, ["size", "bytes", "", "share", "blocks"], rows.map((row) => [formatBytes(row.requested_bytes), ...figures(row)]));
    if (who.at === "peak_active") make("p", parent, { class: "quiet" }, "No stack frames were recorded, so lines are not known: torch.cuda.memory._record_memory_history(context=\"alloc\", stacks=\"python\") records them.");
  }
  for (const [name, list] of [["category", who.categories], ["note", who.notes]]) {
    if (list.length) longTable(parent, [name, "bytes", "", "share", "blocks"], list.map((row) => [inWords(row.name), ...figures(row)]));
  }
};
