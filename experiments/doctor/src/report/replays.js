// Replays of an experiment: a matrix of allocators and histories, and a row for each.

const RATIO_BEST = 1, RATIO_WORST = 1.6;
// What was reserved over what any allocator needs; of a capacity the smallest memory over the most that was held.
const ratioOf = (row) => {
  if (row.capacity_bytes !== null) return row.max_live_bytes ? row.capacity_bytes / row.max_live_bytes : null;
  return row.lower_bound_bytes ? row.peak_reserved_bytes / row.lower_bound_bytes : null;
};

const drawReplays = (page, all) => {
  for (const arm of all) {
    const place = make("section", page, { class: "replays" }), searched = arm.rows.some((row) => row.capacity_bytes !== null);
    make("h2", place, {}, arm.name);
    make("p", place, { class: "quiet" }, arm.question);
    const unique = (key) => [...new Set(arm.rows.map((row) => row[key]))], histories = unique("history");
    const cells = new Map(arm.rows.map((row) => [row.alloc + "\n" + row.history, ratioOf(row)]));
    make("h3", place, {}, searched ? "Smallest memory over the most that was held at once" : "Peak reserved over the least that any allocator needs");
    const shade = (ratio) => {
      const cell = make("span", null, { class: "cell" }, ratio?.toFixed(3) ?? "–");
      if (ratio) cell.style.setProperty("--worse", (100 * Math.min(Math.max((ratio - RATIO_BEST) / (RATIO_WORST - RATIO_BEST), 0), 1)).toFixed(0) + "%");
      return cell;
    };
    table(place, ["allocator", ...histories], unique("alloc").map((alloc) => [alloc, ...histories.map((history) => shade(cells.get(alloc + "\n" + history)))])).classList.add("matrix");
    const count = (n) => (n === null ? "–" : formatCount(n)), calls = (row) => row.driver_calls && Object.values(row.driver_calls).reduce((sum, n) => sum + n, 0);
    const bytes = (row) => row.capacity_bytes ?? row.peak_reserved_bytes ?? 0, most = Math.max(...arm.rows.map(bytes), 1);
    const rows = arm.rows.map((row) => [inWords(row.history), inWords(row.alloc), formatBytes(bytes(row)), bar(bytes(row), most, row.failed_allocations ? "failed" : ""),
      count(row.num_alloc_retries), count(row.failed_allocations), count(calls(row)), seconds(row.simulated_s)]);
    const fold = make("details", place);
    make("summary", fold, {}, "Each replay");
    table(fold, ["history", "allocator", searched ? "smallest memory" : "peak reserved", "", "retries", "requests that failed", "driver calls", "simulated"], rows);
  }
};
