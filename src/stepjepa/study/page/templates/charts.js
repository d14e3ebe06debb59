// Draws the lines of charts.py as SVG, at once and in the colours of the page; a library for charts would be megabytes
// in every page. A chart has axes, a tooltip at the nearest point, a zoom (drag;
// double click shows all), and it is drawn again when a run is hidden or the window changes.
(() => {
  "use strict";
  const SPACE = "http://www.w3.org/2000/svg";
  const MARGIN = {left: 58, right: 12, top: 10, bottom: 34};
  const HEIGHT = 260;
  // The colour of the text around: a theme, or paper, needs no new drawing.
  const INK = {fill: "currentColor", "font-size": 12, "font-family": "system-ui, sans-serif"};
  const hidden = new Set();
  const charts = [];

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  };

  // The smallest of 1, 2 and 5 times a power of ten that divides a range into no more than so many parts.
  const stepOf = (range, parts) => {
    const power = 10 ** Math.floor(Math.log10(range / parts));
    return power * ([1, 2, 5, 10].find((factor) => power * factor * parts >= range * (1 - 1e-9)) ?? 10);
  };

  // Values that differ by rounding alone are one value, with room above and below; shares stay between 0 and 1.
  const rangeOf = (values, percent) => {
    const [low, high] = roomAround(values);
    return percent && values.every((value) => value >= 0 && value <= 1) ? [Math.max(low, 0), Math.min(high, 1)] : [low, high];
  };

  const roomAround = (values) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (!(high - low > 1e-6 * size) || size < 1e-12) {
      if (size < 1e-12) return [0, 1];
      const middle = (low + high) / 2, room = Math.abs(middle) / 10;
      return [middle - room, middle + room];
    }
    const room = (high - low) * 0.04;
    return [low - room, high + room];
  };

  const ticksOf = ([low, high], parts) => {
    const step = stepOf(high - low, parts);
    const ticks = [];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) ticks.push(place * step);
    return {ticks, step};
  };

  // As many digits as neighbours on an axis need to differ.
  const label = (value, step, percent) => {
    if (percent) return `${label(value * 100, step * 100, false)}%`;
    if (Math.abs(value) < step * 1e-6) return "0";
    if (step < 1e-4 || Math.abs(value) >= 1e7) return value.toExponential(Math.max(0, Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(step))));
    return value.toLocaleString("en", {maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9))});
  };
  const exact = (value, percent) => percent ? `${(100 * value).toFixed(1)}%` : String(Number(value.toPrecision(4)));

  const marker = (line, x, y, parent) => {
    const path = line.heldOut ? `M${x - 4} ${y}L${x} ${y - 4}L${x + 4} ${y}L${x} ${y + 4}Z` : `M${x - 3} ${y}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0`;
    element("path", {d: path, fill: line.colour}, parent);
  };

  class Chart {
    constructor(holder) {
      this.holder = holder;
      ({lines: this.lines, percent: this.percent} = JSON.parse(document.getElementById(`${holder.id}-data`).textContent));
      this.tooltip = document.createElement("div");
      this.tooltip.className = "tooltip";
      this.tooltip.hidden = true;
      this.svg = element("svg", {xmlns: SPACE, height: HEIGHT, "aria-hidden": "true"});
      holder.append(this.svg, this.tooltip);
      this.zoom = null;
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerdown", (event) => this.press(event));
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("pointerleave", () => { this.tooltip.hidden = true; this.point?.setAttribute("visibility", "hidden"); });
      this.svg.addEventListener("dblclick", () => { this.zoom = null; this.draw(); });
      holder.closest("figure").querySelector("button")?.addEventListener("click", () => this.save());
      this.draw();
    }

    draw() {
      const {svg, holder, percent} = this;
      const width = Math.max(holder.clientWidth, 200);
      svg.replaceChildren();
      svg.setAttribute("width", width);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.shown = this.lines.filter((line) => !hidden.has(line.run));
      const steps = this.shown.flatMap((line) => line.x);
      const across = this.zoom ?? (steps.length ? [0, steps.reduce((most, step) => Math.max(most, step), 1)] : [0, 1]);
      const inside = (step) => step >= across[0] && step <= across[1];
      const values = this.shown.flatMap((line) => line.y.filter((_, place) => inside(line.x[place])));
      const up = rangeOf(values.length ? values : [0, 1], percent);
      const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, HEIGHT - MARGIN.bottom];
      this.across = across;
      this.toX = (step) => left + (right - left) * (step - across[0]) / (across[1] - across[0]);
      this.toStep = (x) => across[0] + (across[1] - across[0]) * (Math.min(Math.max(x, left), right) - left) / (right - left);
      this.toY = (value) => bottom - (bottom - top) * (value - up[0]) / (up[1] - up[0]);
      const grid = element("g", {stroke: "currentColor", "stroke-opacity": .18}, svg);
      const words = element("g", INK, svg);
      const vertical = ticksOf(up, 5), horizontal = ticksOf(across, Math.max(2, Math.min(6, width / 90)));
      for (const value of vertical.ticks) {
        element("line", {x1: left, x2: right, y1: this.toY(value), y2: this.toY(value)}, grid);
        element("text", {x: left - 6, y: this.toY(value) + 4, "text-anchor": "end"}, words, label(value, vertical.step, percent)).classList.add("tick");
      }
      for (const step of horizontal.ticks) {
        element("line", {x1: this.toX(step), x2: this.toX(step), y1: top, y2: bottom}, grid);
        element("text", {x: this.toX(step), y: bottom + 15, "text-anchor": "middle"}, words, label(step, horizontal.step, false));
      }
      element("text", {x: (left + right) / 2, y: HEIGHT - 3, "text-anchor": "middle"}, words, "step");
      const clip = `${holder.id}-clip`;
      element("rect", {x: left - 5, y: top - 5, width: right - left + 10, height: bottom - top + 10}, element("clipPath", {id: clip}, element("defs", {}, svg)));
      const lines = element("g", {"clip-path": `url(#${clip})`}, svg);
      for (const line of this.shown) {
        const group = element("g", {class: "line"}, lines);
        const path = line.x.map((step, place) => `${place ? "L" : "M"}${this.toX(step).toFixed(1)} ${this.toY(line.y[place]).toFixed(1)}`).join("");
        element("path", {d: path, fill: "none", stroke: line.colour, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": line.dash}, group);
        if (line.heldOut || line.x.length < 3) line.x.forEach((step, place) => marker(line, this.toX(step), this.toY(line.y[place]), group));
      }
      this.band = element("rect", {y: top, height: bottom - top, fill: "currentColor", opacity: .12, visibility: "hidden"}, svg);
      this.point = element("circle", {r: 4.5, fill: "none", stroke: "currentColor", "stroke-width": 2, visibility: "hidden"}, svg);
    }

    place(event) {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    move(event) {
      const [x, y] = this.place(event);
      if (this.from !== undefined) {
        this.band.setAttribute("x", Math.min(x, this.from));
        this.band.setAttribute("width", Math.abs(x - this.from));
        this.band.setAttribute("visibility", "visible");
      }
      let near = null, least = Infinity;
      for (const line of this.shown) {
        line.x.forEach((step, place) => {
          if (step < this.across[0] || step > this.across[1]) return;
          const distance = (this.toX(step) - x) ** 2 + (this.toY(line.y[place]) - y) ** 2;
          if (distance < least) [near, least] = [{line, step, value: line.y[place]}, distance];
        });
      }
      if (!near) return;
      const [atX, atY] = [this.toX(near.step), this.toY(near.value)];
      this.point.setAttribute("cx", atX);
      this.point.setAttribute("cy", atY);
      this.point.setAttribute("visibility", "visible");
      this.tooltip.textContent = `${near.line.name}\nstep ${near.step.toLocaleString("en")}: ${exact(near.value, this.percent)}`;
      this.tooltip.hidden = false;
      const room = this.holder.clientWidth - this.tooltip.offsetWidth;
      this.tooltip.style.left = `${Math.max(0, Math.min(room, atX + 10))}px`;
      this.tooltip.style.top = `${Math.max(0, atY - this.tooltip.offsetHeight - 10)}px`;
    }

    press(event) {
      if (event.pointerType !== "mouse") return this.move(event);
      this.from = this.place(event)[0];
      // A drag may end outside of the chart.
      this.svg.setPointerCapture(event.pointerId);
    }

    release(event) {
      const [from, to] = [this.from, this.place(event)[0]];
      this.from = undefined;
      this.band.setAttribute("visibility", "hidden");
      if (from === undefined || Math.abs(to - from) < 8) return;
      this.zoom = [Math.min(from, to), Math.max(from, to)].map(this.toStep);
      this.draw();
    }

    // By itself a chart needs its title, the names of its lines, and a colour of its text.
    complete() {
      const copy = this.svg.cloneNode(true), width = Number(copy.getAttribute("width"));
      const words = element("g", {...INK, color: getComputedStyle(this.holder).color}, copy);
      element("text", {x: MARGIN.left, y: -8, "font-weight": "bold"}, words, this.holder.dataset.title);
      this.shown.forEach((line, place) => {
        const [x, y] = [MARGIN.left, HEIGHT + 14 + 18 * place];
        element("line", {x1: x, x2: x + 30, y1: y - 4, y2: y - 4, stroke: line.colour, "stroke-width": 2, "stroke-dasharray": line.dash}, words);
        if (line.heldOut) marker(line, x + 15, y - 4, words);
        element("text", {x: x + 36, y}, words, line.name);
      });
      const height = HEIGHT + 24 + 18 * this.shown.length + 8;
      for (const [name, value] of Object.entries({color: words.getAttribute("color"), height, viewBox: `0 -24 ${width} ${height}`})) copy.setAttribute(name, value);
      return copy;
    }

    save() {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(this.complete())], {type: "image/svg+xml"}));
      link.download = `${this.holder.dataset.title}.svg`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }
  }

  document.querySelectorAll(".chart").forEach((holder) => charts.push(new Chart(holder)));
  const again = () => charts.forEach((chart) => chart.draw());

  // The boxes of runs in every section stand for the same choice; the button of an arm is all boxes of its runs.
  const boxes = document.querySelectorAll("[data-legend] input");
  const choose = (chosen, shown) => {
    const names = new Set(chosen.map((box) => box.value));
    names.forEach((name) => { if (shown) hidden.delete(name); else hidden.add(name); });
    boxes.forEach((box) => { if (names.has(box.value)) box.checked = shown; });
    again();
  };
  boxes.forEach((box) => box.addEventListener("change", () => choose([box], box.checked)));
  document.querySelectorAll("[data-legend] button").forEach((button) => button.addEventListener("click", () => {
    const own = [...button.parentElement.querySelectorAll("input")];
    choose(own, own.some((box) => !box.checked));
  }));

  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
})();
