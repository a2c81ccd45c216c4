// The answers of `advise` and `explain`: bars, tables, and links to the map.

// A bar for `value` on a scale up to `most`; `limit` is drawn as a line.
const bar = (value, most, kind = "", limit = null) => {
  const place = make("span", null, { class: "bar" }), fill = make("i", place, kind ? { class: kind } : {});
  fill.style.width = Math.max((100 * value) / Math.max(most, 1), 0.3) + "%";
  if (limit !== null && limit <= most) make("b", place).style.left = `calc(${(100 * limit) / most}% - 1px)`;
  return place;
};
// The words for each kind of bar that page.css draws; `""` is the plain one. A table may have words of its own.
const BAR_KINDS = { "": "others", measured: "recorded", replayed: "replayed", failed: "requests failed", pinned: "kept reserved", bound: "bound" };
// A legend above a table: each kind of bar in it, and the line at the limit. A table with one plain kind needs none.
const barLegend = (drawn, words = {}, limit = null) => {
  const kinds = [...new Set([...drawn.querySelectorAll(".bar > i")].map((fill) => fill.className))], line = drawn.querySelector(".bar > b");
  if (!line && kinds.every((kind) => kind === "")) return drawn;
  const place = make("div", null, { class: "legend bars" });
  const key = (text) => {
    const item = make("span", place, { class: "key" }), sample = make("span", item, { class: "bar" });
    item.append(text);
    return sample;
  };
  for (const kind of kinds) make("i", key({ ...BAR_KINDS, ...words }[kind]), kind ? { class: kind } : {});
  if (line) make("b", key("limit" + (limit === null ? "" : ", " + formatBytes(limit)))).style.left = "40%";
  drawn.parentElement.before(place);
  return drawn;
};
const inWords = (text) => make("span", null, { class: "words" }, text);
const percent = (part, whole) => (whole > 0 && part <= whole ? ((100 * part) / whole).toFixed(1) + " %" : "–");
const seconds = (s) => (s === null || s === undefined ? "–" : formatTime(s * 1e9));
const listed = (parent, sentences) => {
  if (!sentences.length) return;
  const list = make("ul", parent, { class: "sentences" });
  for (const sentence of sentences) make("li", list, {}, sentence[0].toUpperCase() + sentence.slice(1));
};

// A table that shows its first rows, and the others after a click.
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

// The answer of a command, or its error.
const answerOf = (parent, answer, title, then) => {
  if (!answer) return;
  const place = make("section", parent, { class: "answer" });
  make("h3", place, {}, title);
  if (answer.said) then(place, answer.said);
  else make("p", place, { class: "note" }, answer.failed);
};

// The main advice, at the top.
const drawVerdict = (parent, about) => {
  const advice = about.answers.advise?.said, best = advice?.settings[0];
  if (!best) return;
  const box = make("div", parent, { class: "verdict " + advice.verdict }), now = advice.recorded.replayed;
  make("p", box, {}, advice.happened[0]);
  const line = make("p", box);
  if (advice.verdict === "keep") {
    line.append(`${advice.kept} (peak reserved ${formatBytes(now.peak_reserved_bytes)}).`);
    return;
  }
  const needed = best.smallest_memory_bytes, minimum = needed ? "; minimum memory " + formatAtLeast(needed) : "";
  if (advice.not_reproduced) {
    line.append(`Inconclusive: ${advice.not_reproduced}.`);
    return;
  }
  if (advice.verdict === "not-said") {
    line.append("Inconclusive: more memory was reserved before recording started than the best setting needs afterwards, ");
    make("code", line, {}, best.conf || "PyTorch's defaults");
    line.append(advice.kept ? `. ${advice.kept}.` : ".");
    return;
  }
  if (advice.verdict === "out-of-memory") {
    line.append(advice.needed_bytes ? `No setting fixes this: the program needs ${formatAtLeast(advice.needed_bytes)}. The lowest peak is under ` : "No setting fixes this. The lowest peak is under ");
    make("code", line, {}, best.conf || "PyTorch's defaults");
    return;
  }
  line.append("Set ");
  make("code", line, {}, best.export);
  line.append(`: peak reserved ${formatBytes(best.peak_reserved_bytes)}` + (now.out_of_memory ? ", and memory does not run out" : ` instead of ${formatBytes(now.peak_reserved_bytes)}`) + minimum + ".");
  if (best.python) {
    line.append(" The program must also call ");
    make("code", line, {}, best.python);
  }
  const second = advice.without_expandable_segments;
  if (second && second.conf !== now.conf) {
    const other = make("p", box);
    other.append("Without expandable segments: ");
    make("code", other, {}, second.export);
    other.append(`: peak reserved ${formatBytes(second.peak_reserved_bytes)}.`);
  }
};

// Lines of settings break only at commas.
const confWords = (conf) => {
  const element = make("span", null, { class: "words conf" });
  conf.split(/(?<=,)/).forEach((part, i) => element.append(...(i ? [document.createElement("wbr"), part] : [part])));
  return element;
};
// A table without its empty columns.
const withoutEmpty = (head, rows) => {
  const full = head.map((_, i) => i === 0 || rows.some((row) => row[i] instanceof Node ? row[i].textContent !== "" || row[i].classList.contains("bar") : row[i] !== ""));
  return [head, ...rows].map((row) => row.filter((_, i) => full[i]));
};

const drawAdvice = (parent, advice) => {
  const limit = advice.limit_bytes, now = advice.recorded.replayed, outcomes = [now, ...advice.settings, ...advice.also_tried, ...advice.other_allocators];
  const most = Math.max(...outcomes.map((outcome) => outcome.peak_reserved_bytes), limit ?? 0);
  const calls = (outcome) => formatCount(Object.values(outcome.driver_calls).reduce((a, b) => a + b, 0));
  const row = (name, outcome, kind) => {
    const code = confWords(name), unknown = outcome.out_of_memory ? "out of memory" : "–", needed = outcome.smallest_memory_bytes;
    if (outcome.first_failure) code.title = outcome.first_failure.error;
    return [code, formatBytes(outcome.peak_reserved_bytes), bar(outcome.peak_reserved_bytes, most, outcome.out_of_memory ? "failed" : kind, limit),
      needed ? formatAtLeast(needed) : unknown, calls(outcome), seconds(outcome.simulated_s), formatCount(outcome.num_alloc_retries)];
  };
  listed(parent, advice.happened);
  const head = ["PYTORCH_CUDA_ALLOC_CONF", "peak reserved", "", "minimum memory", "driver calls", "time in driver calls (simulated H200)", "cache flushes"];
  const named = (setting) => setting.conf || "PyTorch's defaults";
  const settings = [row("current: " + named(now), now, ""), ...advice.settings.map((setting) => row(named(setting), setting, ""))];
  const drawn = (place, top, rows) => {
    const bars = barLegend(table(place, top, rows), { "": "memory suffices", failed: "memory runs out", bound: "memory suffices" }, limit);
    bars.classList.add("settings", "confs");
  };
  drawn(parent, head, settings);
  if (advice.also_tried.length) {
    const all = make("details", parent);
    make("summary", all, {}, `${formatCount(advice.also_tried.length)} more tested settings`);
    drawn(all, head, advice.also_tried.map((setting) => row(named(setting), setting, "")));
  }
  if (advice.changes.length) {
    make("h4", parent, {}, "Program changes");
    listed(parent, advice.changes);
  }
  make("h4", parent, {}, "Lower bound");
  make("p", parent, {}, advice.bound);
  const others = [...advice.other_allocators].sort((a, b) => a.out_of_memory - b.out_of_memory || a.peak_reserved_bytes - b.peak_reserved_bytes);
  if (others.length) drawn(parent, ["other allocators", ...head.slice(1)], others.map((other) => row(other.alloc, other, "bound")));
  make("h4", parent, {}, "Limits of this analysis");
  listed(parent, advice.not_known);
};

// A line, with a word for code that is not the user's.
const withCode = (line, code) => (code === "torch" || code === "library" ? `${line} (${code})` : line);

// `way.to(event, address)` shows a moment and the block at an address on the map.
const drawExplanation = (parent, explanation, way) => {
  const link = (text, event, address = null) => {
    const button = make("button", null, { type: "button", class: "way", title: "show on the map" }, text);
    button.addEventListener("click", () => way.to?.(Math.max(event - 1, 0), address));
    return button;
  };
  const when = (moment) => [moment.event > 0 ? "event " + formatCount(moment.event) : "before recording started", moment.time_ns === null ? "" : "after " + formatTime(moment.time_ns),
    moment.annotation ? "in " + moment.annotation : "", moment.line ? (moment.nearby ? "last recorded line " : "at ") + moment.line : ""].filter((text) => text).join(", ");
  const cause = new Map(explanation.sentences.causes), title = (text) => make("h4", parent, {}, text);
  const lineOf = (row) => inWords((row.nearby ? "~ " : "") + withCode(row.line, row.code) + (row.inside ? " › " + row.inside : ""));
  listed(parent, explanation.sentences.headline);
  drawBreakdown(title, parent, explanation, when);
  const [first] = explanation.who;
  for (const who of explanation.who) {
    // Nearly equal lists are shown once.
    if (who !== first && who.moment.active_bytes >= 0.98 * first.moment.active_bytes) continue;
    if (explanation.events === 0) {
      title("Active memory when the snapshot was taken: " + formatBytes(who.moment.active_bytes));
      drawWho(parent, explanation, who, lineOf);
      continue;
    }
    const label = { peak_active: "Active memory at its peak", out_of_memory: "Active memory when memory ran out", near_peak_reserved: "Active memory within 0.5 % of peak reserved" }[who.at] ?? "Active memory at peak reserved";
    title(`${label}: ${formatBytes(who.moment.active_bytes)}`).append(" ", link(when(who.moment), who.moment.event));
    drawWho(parent, explanation, who, lineOf);
  }
  if (explanation.grew) {
    const { from, to, lines } = explanation.grew, most = Math.max(...lines.map((row) => row.after_bytes)), more = (row) => row.after_bytes - row.before_bytes;
    title("Growth between ").append(link("event " + formatCount(from.event), from.event), " and ", link("event " + formatCount(to.event), to.event));
    longTable(parent, ["line", "growth", "after", "", "blocks"], lines.map((row) => [lineOf(row), (more(row) < 0 ? "−" : "+") + formatBytes(Math.abs(more(row))), formatBytes(row.after_bytes),
      bar(row.after_bytes, most), formatCount(row.before_blocks) + " → " + formatCount(row.after_blocks)]));
  }
  const { pinned } = explanation.reserved, at = explanation.reserved.moment.event;
  if (pinned.length) {
    const count = explanation.reserved.pinned_segments === 1 ? "1 segment" : formatCount(explanation.reserved.pinned_segments) + " segments";
    title(`Blocks that keep mostly free segments reserved: ${formatBytes(explanation.reserved.pinned_free_bytes)} free in ${count}`);
    const most = Math.max(...pinned.map((row) => row.bytes));
    longTable(parent, ["segment", "bytes", "free", "", "blocks", "kept by", "age"], pinned.map((row) => {
      const [keeper] = row.keepers, age = !keeper ? "–" : keeper.age_ns !== null ? formatTime(keeper.age_ns) : keeper.age_events !== null ? formatCount(keeper.age_events) + " events" : "unknown";
      return [link(formatAddress(row.address), at, keeper?.address ?? row.address), formatBytes(row.bytes), formatBytes(row.free_bytes), bar(row.free_bytes, most, "pinned"), formatCount(row.blocks),
        keeper ? lineOf(keeper) : "–", age + (keeper?.pending ? ", free pending" : "")];
    }));
  }
  if (explanation.peaks.length > 1) {
    title("Highest peaks of active memory");
    const most = explanation.peak_reserved.reserved_bytes || explanation.peak_active.active_bytes;
    const known = (bytes) => bytes === null ? "–" : formatBytes(bytes);
    const rows = explanation.peaks.map((moment) => [link(formatCount(moment.event), moment.event),
      moment.time_ns === null ? "–" : formatTime(moment.time_ns), formatBytes(moment.active_bytes), bar(moment.active_bytes, most), known(moment.reserved_bytes),
      known(moment.largest_hole_bytes), inWords([moment.annotation, moment.line].filter((text) => text).join(", "))]);
    const [head, ...full] = withoutEmpty(["event", "time", "active", "", "reserved", "largest free block", "annotation, line"], rows);
    longTable(parent, head, full);
  }
  if (explanation.retries.length) {
    title(`PyTorch released cached memory during ${formatCount(explanation.num_retries)} ${explanation.num_retries === 1 ? "request" : "requests"}`);
    longTable(parent, ["event", "requested", "release"], explanation.retries.map((retry, i) => [link(formatCount(retry.event), retry.event), formatBytes(retry.asked_bytes), inWords(explanation.sentences.retries[i])]).reverse());
  }
  if (explanation.shapes.length) {
    const segments = explanation.shapes.reduce((sum, shape) => sum + shape.taken_bytes, 0), most = Math.max(...explanation.shapes.map((shape) => shape.taken_bytes));
    title(`Cache misses allocated ${formatBytes(segments)} of segments`);
    const rows = explanation.shapes.map((shape) => [formatBytes(shape.requested_bytes), formatCount(shape.requests), formatCount(shape.misses),
      formatBytes(shape.taken_bytes), bar(shape.taken_bytes, most), inWords(cause.get(shape.cause)), inWords(shape.line ?? "")]);
    const [head, ...full] = withoutEmpty(["size", "requests", "misses", "segments", "", "main cause", "line"], rows);
    longTable(parent, head, full);
  }
};

// One bar of parts [tint, bytes, text]; their widths are their shares.
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

// Free memory that no release frees, which only explanations know.
const KEPT = { key: "kept", name: "kept", tint: "#6b4f4f" };
// The reserved-memory breakdown: one bar, and a sentence for each part.
const drawBreakdown = (title, parent, explanation, when) => {
  const breakdown = explanation.reserved, whole = breakdown.moment.reserved_bytes, parts = breakdown.parts.filter((part) => part.bytes > 0);
  if (whole > 0) {
    const moment = { out_of_memory: "when memory ran out", near_peak_reserved: "within 0.5 % of its peak" }[breakdown.at] ?? "at the peak";
    const at = explanation.events === 0 ? "when the snapshot was taken" : `${moment} (${when(breakdown.moment)})`;
    title(`${explanation.sentences.reserved} ${at}: ${formatBytes(whole)}`);
    const known = (part) => [...LEDGER_PARTS, KEPT].find((entry) => entry.key === part.name);
    partsOf(parent, parts.map((part) => [known(part)?.tint ?? "#888888", part.bytes, part.sentence]), whole);
    table(parent, ["part", "bytes", "share", ""], parts.map((part) => [keyOf(known(part)?.tint ?? "#888888", known(part)?.name ?? part.name), formatBytes(part.bytes), percent(part.bytes, whole), inWords(part.sentence.replace(/^[^()]*\([^()]*%\): /, ""))]));
  }
  if (breakdown.streams.length > 1) {
    const most = Math.max(...breakdown.streams.map((row) => row.reserved_bytes));
    table(parent, ["stream, pool", "segments", "reserved", "", "active", "pending", "free", "kept", "partly used", "largest free block"], breakdown.streams.map((row) => [
      (row.stream < 65536 ? row.stream : formatAddress(row.stream)) + ", " + row.pool + (row.private_pool ? ", private " + row.private_pool : ""), formatCount(row.segments), formatBytes(row.reserved_bytes), bar(row.reserved_bytes, most),
      ...[row.active_bytes, row.pending_bytes, row.soft_bytes, row.kept_bytes, row.hard_bytes, row.largest_hole_bytes].map(formatBytes)]));
  }
  listed(parent, explanation.sentences.streams);
};

// Tint, name and evidence.
const PURPOSES = {
  parameters: ["#3b6fb6", "parameters", "allocated by Module.to, load_state_dict, a module's __init__ or torch.nn.init"],
  gradients: ["#edae49", "gradients", "allocated by the backward pass, intermediate gradients included"],
  optimizer_state: ["#b07aa1", "optimizer state", "allocated in an optimizer's step and live after it"],
  optimizer_temporaries: ["#882255", "optimizer temporaries", "allocated in an optimizer's step that has not ended"],
  activations: ["#228833", "activations", "allocated in a module's forward"],
  autocast_copies: ["#6fb1d6", "autocast copies", "allocated by autocast's cached_cast and live after the operator"],
  workspace: ["#d1495b", "workspace", "allocated for cuBLAS or cuDNN"],
  unknown: ["#9aa5a0", "unknown", "no evidence in the recording"],
};
// Memory by purpose: a bar, and a row for each purpose.
const drawPurposes = (parent, who) => {
  if (!who.purposes.length) return;
  const whole = who.moment.active_bytes, of = (row) => PURPOSES[row.purpose] ?? ["#9aa5a0", row.purpose, ""];
  partsOf(parent, who.purposes.map((row) => [of(row)[0], row.bytes, `${of(row)[1]} ${formatBytes(row.bytes)}`]), whole);
  table(parent, ["purpose", "bytes", "share", "blocks", "evidence"], who.purposes.map((row) => [
    keyOf(of(row)[0], of(row)[1]), formatBytes(row.bytes), percent(row.bytes, whole), formatCount(row.blocks), inWords(of(row)[2])])).classList.add("purposes");
};

// Holders by purpose and line if known, else by size; and by call, outermost first.
const drawWho = (parent, explanation, who, lineOf) => {
  drawPurposes(parent, who);
  const whole = who.moment.active_bytes, rows = explanation.frames ? who.lines : who.sizes, most = Math.max(...rows.map((row) => row.bytes), 1);
  const figures = (row) => [formatBytes(row.bytes), bar(row.bytes, most), percent(row.bytes, whole), formatCount(row.blocks)];
  if (explanation.frames) {
    longTable(parent, ["line", "bytes", "", "share", "blocks", "age of the oldest"], rows.map((row) => [lineOf(row), ...figures(row), formatCount(row.oldest_events) + " events"]));
    if (rows.some((row) => row.nearby)) make("p", parent, { class: "quiet" }, "~: blocks without frames, such as those of the backward pass on a thread without Python; the line shown ran last.");
    const all = make("details", parent), calls = [];
    make("summary", all, {}, "by call, outermost first");
    const walk = (node, depth) => {
      for (let child of node.children) {
        if (child.bytes < 0.005 * whole || calls.length > 300) continue;
        // A chain of calls with the same bytes is one row.
        const names = [withCode(child.name, child.code)];
        while (child.children.length === 1 && child.children[0].bytes === child.bytes) {
          [child] = child.children;
          names.push(withCode(child.name, child.code));
        }
        const name = inWords(names.join(" › "));
        name.style.paddingLeft = Math.min(depth, 12) * 1.1 + "em";
        calls.push([name, formatBytes(child.bytes), bar(child.bytes, whole), percent(child.bytes, whole), formatCount(child.blocks)]);
        walk(child, depth + 1);
      }
    };
    walk(who.tree, 0);
    table(all, ["call", "bytes", "", "share", "blocks"], calls);
  } else {
    longTable(parent, ["size", "bytes", "", "share", "blocks"], rows.map((row) => [formatBytes(row.requested_bytes), ...figures(row)]));
    if (who.at === "peak_active") make("p", parent, { class: "quiet" }, "The recording has no stack frames; torch.cuda.memory._record_memory_history(context=\"alloc\", stacks=\"python\") records them.");
  }
  for (const [name, list] of [["category", who.categories], ["note", who.notes]]) {
    if (list.length) longTable(parent, [name, "bytes", "", "share", "blocks"], list.map((row) => [inWords(row.name), ...figures(row)]));
  }
};
