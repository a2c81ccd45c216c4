// Line charts and stacked bars of a few hundred numbers, as SVG and HTML that the page's style sheet colours.

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

// Powers of ten between two numbers, both included.
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
    make("p", figure, { class: "quiet" }, "nothing was recorded for it");
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
};

// One bar a row, of parts [tint, value, text]; all rows have one scale.
const stackedBars = (parent, rows, format) => {
  const sum = (parts) => parts.reduce((all, [, value]) => all + value, 0), most = Math.max(...rows.map(({ parts }) => sum(parts)), 1e-9);
  table(parent, ["run", "", "together"], rows.map(({ name, parts }) => {
    const strip = make("span", null, { class: "parts", role: "img", "aria-label": parts.map(([, value, text]) => text + " " + format(value)).join("; ") });
    for (const [tint, value, text] of parts.filter(([, value]) => value > 0)) {
      const piece = make("i", strip, { title: text + ": " + format(value) });
      piece.style.background = tint;
      piece.style.width = (100 * value) / most + "%";
    }
    return [inWords(name), strip, format(sum(parts))];
  })).classList.add("stacked");
};
