"use strict";
// Draws the block maps: addresses over time, one rectangle for each life of a block.
(() => {
  const bytes = (n) => {
    const unit = n >= 2 ** 30 ? 3 : n >= 2 ** 20 ? 2 : n >= 1024 ? 1 : 0;
    const value = n / 1024 ** unit;
    return (value >= 100 || unit === 0 ? value.toFixed(0) : value.toPrecision(3)) + [" B", " KiB", " MiB", " GiB"][unit];
  };
  const time = (ns) => {
    const size = Math.abs(ns);
    const [scale, unit] = size >= 1e9 ? [1e9, " s"] : size >= 1e6 ? [1e6, " ms"] : size >= 1e3 ? [1e3, " µs"] : [1, " ns"];
    return parseFloat((ns / scale).toPrecision(4)) + unit;
  };
  // From light (small) to dark (large), readable without colour vision: the middle of cividis.
  const ramp = [[234, 209, 86], [188, 175, 111], [144, 143, 120], [104, 111, 119], [62, 80, 109], [20, 53, 108]];
  const tint = (size, least, most) => {
    const at = most > least ? (Math.log(size) - Math.log(least)) / (Math.log(most) - Math.log(least)) : 1;
    const place = Math.min(Math.max(at, 0), 1) * (ramp.length - 1);
    const low = Math.min(Math.floor(place), ramp.length - 2);
    return "rgb(" + ramp[low].map((c, i) => Math.round(c + (ramp[low + 1][i] - c) * (place - low))).join() + ")";
  };
  const LEFT = 74, BOTTOM = 34, TOP = 8, RIGHT = 8;

  for (const figure of document.querySelectorAll("figure.map")) {
    const canvas = figure.querySelector("canvas");
    const maps = JSON.parse(figure.querySelector("script").textContent);
    const pick = figure.querySelector(".pick");
    const tip = figure.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.hidden = true;
    let map = maps[maps.length - 1];
    let view = null;
    let drag = null;
    const whole = () => ({ t0: 0, t1: map.span, a0: 0, a1: map.top });
    const room = () => ({ w: canvas.clientWidth - LEFT - RIGHT, h: canvas.clientHeight - TOP - BOTTOM });
    const toX = (t) => LEFT + ((t - view.t0) / (view.t1 - view.t0)) * room().w;
    const toY = (a) => TOP + (1 - (a - view.a0) / (view.a1 - view.a0)) * room().h;
    const toT = (x) => view.t0 + ((x - LEFT) / room().w) * (view.t1 - view.t0);
    const toA = (y) => view.a0 + (1 - (y - TOP) / room().h) * (view.a1 - view.a0);

    const draw = () => {
      const scale = window.devicePixelRatio || 1;
      canvas.width = canvas.clientWidth * scale;
      canvas.height = canvas.clientHeight * scale;
      const pen = canvas.getContext("2d");
      pen.scale(scale, scale);
      const style = getComputedStyle(document.documentElement);
      const ink = style.getPropertyValue("--ink"), rule = style.getPropertyValue("--rule");
      const { w, h } = room();
      const least = Math.min(...map.blocks.map((b) => Math.max(b[4], 1)));
      const most = Math.max(...map.blocks.map((b) => b[4]));
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, TOP, w, h);
      pen.clip();
      const rectangle = (start, stop, place, size, edge) => {
        const x = toX(Math.max(start, view.t0)), right = toX(stop === null ? view.t1 : Math.min(stop, view.t1));
        const y = toY(place + size), height = toY(place) - y;
        if (right < LEFT || x > LEFT + w || y > TOP + h || y + height < TOP) return;
        pen.fillRect(x, y, Math.max(right - x, 0.7), Math.max(height, 0.7));
        if (edge && right - x > 3 && height > 3) pen.strokeRect(x + 0.25, y + 0.25, right - x - 0.5, height - 0.5);
      };
      pen.lineWidth = 0.5;
      pen.fillStyle = pen.strokeStyle = rule;
      pen.globalAlpha = 0.6;
      for (const [start, stop, place, size] of map.segments) rectangle(start, stop, place, size, true);
      pen.globalAlpha = 1;
      pen.strokeStyle = "rgba(255,255,255,.7)";
      for (const [start, stop, place, block, size] of map.blocks) {
        pen.fillStyle = tint(Math.max(size, 1), least, most);
        rectangle(start, stop, place, block, true);
      }
      pen.restore();
      pen.strokeStyle = pen.fillStyle = ink;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(LEFT, TOP);
      pen.lineTo(LEFT, TOP + h);
      pen.lineTo(LEFT + w, TOP + h);
      pen.stroke();
      pen.font = "11px system-ui, sans-serif";
      for (let tick = 0; tick <= 4; tick++) {
        const t = view.t0 + ((view.t1 - view.t0) * tick) / 4, a = view.a0 + ((view.a1 - view.a0) * tick) / 4;
        pen.textAlign = tick === 0 ? "left" : tick === 4 ? "right" : "center";
        pen.fillText(time(t), toX(t), TOP + h + 15);
        pen.textAlign = "right";
        pen.fillText(bytes(a), LEFT - 6, toY(a) + (tick === 4 ? 8 : 3));
      }
      pen.textAlign = "center";
      pen.fillText("time; up: addresses, unused space left out", LEFT + w / 2, TOP + h + 30);
      if (drag && drag.to) {
        pen.strokeRect(drag.x, drag.y, drag.to.x - drag.x, drag.to.y - drag.y);
      }
      figure.dataset.drawn = String(map.blocks.length);
    };
    const show = (index) => {
      map = maps[index];
      view = whole();
      [...pick.children].forEach((button, i) => button.classList.toggle("on", i === index));
      draw();
    };
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("mousedown", (event) => { drag = at(event); event.preventDefault(); });
    canvas.addEventListener("mousemove", (event) => {
      const here = at(event);
      if (drag) { drag.to = here; tip.hidden = true; draw(); return; }
      const t = toT(here.x), a = toA(here.y);
      const hit = map.blocks.find((b) => t >= b[0] && (b[1] === null || t < b[1]) && a >= b[2] && a < b[2] + b[3]);
      tip.hidden = !hit;
      if (hit) {
        const life = hit[1] === null ? "held to the end" : "lives " + time(hit[1] - hit[0]);
        tip.textContent = bytes(hit[4]) + " asked for, block of " + bytes(hit[3]) + "\nallocated at " + time(hit[0])
          + ", " + life + "\nserved by " + map.paths[hit[5]] + ", stream " + hit[6];
        tip.style.left = Math.min(here.x + 14, canvas.clientWidth - 220) + "px";
        tip.style.top = canvas.offsetTop + here.y + 14 + "px";
      }
    });
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    window.addEventListener("mouseup", () => {
      if (!drag) return;
      const { x, y, to } = drag;
      drag = null;
      if (to && Math.abs(to.x - x) > 4 && Math.abs(to.y - y) > 4) {
        view = { t0: toT(Math.min(x, to.x)), t1: toT(Math.max(x, to.x)), a0: toA(Math.max(y, to.y)), a1: toA(Math.min(y, to.y)) };
      }
      draw();
    });
    canvas.addEventListener("dblclick", () => { view = whole(); draw(); });
    window.addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    maps.forEach((one, index) => {
      const button = pick.appendChild(document.createElement("button"));
      button.textContent = one.title;
      button.addEventListener("click", () => show(index));
    });
    show(maps.length - 1);
  }
  document.documentElement.dataset.ready = "yes";
})();
