// One chart of a metric: the plot, a crosshair with values, zoom, and buttons to enlarge and download it.
import { colorOf, css } from "./colors.js";
import { make } from "./dom.js";
import { saveCsv, savePng } from "./download.js";
import { duration, short, whole } from "./numbers.js";
import { BOTTOM, LEFT, Plot, RIGHT, TOP } from "./plot.js";

const MAX_TIP_ROWS = 8;
const REACH = 40; // maximum distance in pixels between the pointer and the points that the crosshair shows

export const title = (name) => {
  const slash = name.lastIndexOf("/");
  return make("span", { class: "ellipsis", title: name }, slash > 0 ? make("span", { class: "group" }, name.slice(0, slash + 1)) : null, name.slice(slash + 1));
};

export class Chart {
  constructor(name, options, events) {
    this.name = name;
    this.options = options;
    this.events = events; // {zoom(range or null), enlarge(name) or nothing in an enlarged chart, fail(error)}
    this.plot = new Plot(name, options);
    this.value = make("span", { class: "value" });
    this.canvas = make("canvas", { role: "img", tabindex: 0, "aria-label": name });
    this.tip = make("div", { class: "tip", hidden: true, role: "status" });
    const tool = (label, hint, act) => make("button", { class: "tool", title: hint, "aria-label": `${hint}: ${name}`, onclick: act }, label);
    this.tools = make("span", { class: "tools-of-card" },
      tool("CSV", "download the values as CSV", () => saveCsv(this.name, this.plot.curves.map((curve) => curve.run)).catch(events.fail)),
      tool("PNG", "download the chart as PNG", () => savePng(this.name, this.plot)),
      events.enlarge ? tool("⤢", "enlarge the chart", () => events.enlarge(name)) : null);
    this.card = make("article", { class: "card", "data-name": name }, make("h3", {}, title(name), this.value, this.tools), this.canvas, this.tip);
    this.wire();
  }

  wire() {
    const on = (event, act) => this.canvas.addEventListener(event, act);
    on("pointermove", (event) => this.point(event));
    on("pointerleave", () => this.leave());
    on("pointerdown", (event) => this.press(event));
    on("pointerup", () => this.release());
    on("pointercancel", () => this.leave());
    on("dblclick", () => this.events.zoom(null));
    on("keydown", (event) => this.key(event));
    on("blur", () => this.leave());
  }

  show(curves) {
    this.plot.curves = curves;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    const density = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * density)) this.canvas.width = Math.round(width * density);
    if (this.canvas.height !== Math.round(height * density)) this.canvas.height = Math.round(height * density);
    const context = this.canvas.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, width, height);
    this.plot.draw(context, width, height, () => this.drawPointer(context, height));
    this.showValue();
    this.showTip();
  }

  // The points near the pointer are looked up on every redraw, because new values and zooming move them.
  drawPointer(context, height) {
    this.near = this.pointer ? this.nearest() : [];
    if (!this.pointer) return;
    context.strokeStyle = css("--faint");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(this.pointer.x) + 0.5, TOP);
    context.lineTo(Math.round(this.pointer.x) + 0.5, height - BOTTOM);
    context.stroke();
    for (const { curve, x, y } of this.near.slice(0, MAX_TIP_ROWS)) {
      context.fillStyle = colorOf(curve.run);
      context.beginPath();
      context.arc(x, y, 3, 0, 7);
      context.fill();
    }
    if (this.pressed === undefined) return;
    context.globalAlpha = 0.12;
    context.fillStyle = css("--accent");
    context.fillRect(Math.min(this.pressed, this.pointer.x), TOP, Math.abs(this.pointer.x - this.pressed), height - TOP - BOTTOM);
    context.globalAlpha = 1;
  }

  nearest() {
    const { plot, pointer } = this;
    const found = [];
    for (const curve of plot.curves) {
      const i = nearestIndex(curve.x, plot.fromX(pointer.x));
      if (i < 0 || !Number.isFinite(curve.y[i])) continue;
      const x = plot.toX(curve.x[i]), y = plot.toY(curve.y[i]);
      if (Math.abs(x - pointer.x) <= REACH && Number.isFinite(y)) found.push({ curve, i, x, y, distance: Math.abs(y - pointer.y) });
    }
    return found.sort((a, b) => a.distance - b.distance);
  }

  showValue() {
    const lasts = this.plot.curves.map((curve) => curve.series.mean.at(-1)).filter(Number.isFinite);
    this.value.textContent = this.plot.curves.length === 1 && lasts.length ? short(lasts[0]) : "";
    this.card.dataset.values = this.plot.curves.reduce((sum, curve) => sum + curve.series.values, 0);
    const count = this.plot.curves.length;
    this.canvas.setAttribute("aria-label", `${this.name}, ${count} runs` + (lasts.length === 1 ? `, last ${short(lasts[0])}` : ""));
  }

  showTip() {
    this.tip.hidden = !this.near?.length;
    if (this.tip.hidden) return;
    const first = this.near[0];
    const where = this.options.axis === "seconds" ? duration(first.curve.x[first.i]) : `${whole(first.curve.x[first.i])} images`;
    const rows = this.near.slice(0, MAX_TIP_ROWS).sort((a, b) => b.curve.y[b.i] - a.curve.y[a.i]).map(({ curve, i }) => {
      const spread = this.options.band && curve.spread?.mean.length === curve.x.length ? curve.spread.mean[i] : NaN;
      return make("tr", {}, make("td", {}, make("span", { class: "dot", color: colorOf(curve.run) })),
        make("td", { class: "number" }, short(curve.y[i])),
        make("td", { class: "at" }, Number.isFinite(spread) ? `± ${short(spread / 2)}` : curve.smooth ? `(${short(curve.series.mean[i])})` : ""),
        make("td", { class: "name ellipsis" }, curve.run.name));
    });
    const more = this.near.length - rows.length;
    this.tip.replaceChildren(make("div", { class: "at" }, where), make("table", {}, ...rows), more > 0 ? make("div", { class: "at" }, `and ${more} more`) : "");
    this.placeTip(first);
  }

  // Places the values beside the nearest point: on its right or, if the page has no room there, on its left.
  placeTip({ x, y }) {
    const { canvas, card, tip } = this;
    const page = card.closest("dialog, main").getBoundingClientRect(), origin = card.getBoundingClientRect().left;
    const atX = canvas.offsetLeft + x, atY = canvas.offsetTop + y, gap = 14;
    const right = atX + gap, left = atX - gap - tip.offsetWidth;
    const fits = origin + right + tip.offsetWidth <= page.right - 4;
    tip.style.left = `${fits ? right : Math.max(page.left - origin, left)}px`;
    tip.style.top = `${Math.max(0, Math.min(atY - tip.offsetHeight / 2, card.clientHeight - tip.offsetHeight))}px`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.pointTo(event.clientX - box.left, event.clientY - box.top);
  }

  pointTo(x, y) {
    this.pointer = { x: Math.max(LEFT, Math.min(x, this.canvas.clientWidth - RIGHT)), y };
    this.draw();
  }

  leave() {
    if (!this.pointer) return;
    this.pointer = this.pressed = undefined;
    this.draw();
  }

  press(event) {
    this.point(event);
    if (event.pointerType === "mouse" && event.button === 0) {
      this.pressed = this.pointer.x;
      this.canvas.setPointerCapture(event.pointerId);
    }
  }

  release() {
    const from = this.pressed;
    this.pressed = undefined;
    if (from === undefined || !this.pointer || Math.abs(this.pointer.x - from) <= 6) return;
    this.events.zoom([from, this.pointer.x].sort((a, b) => a - b).map((at) => this.plot.fromX(at)));
  }

  // Arrow keys move the crosshair; + and - zoom around it.
  key(event) {
    const { left, right } = this.plot, middle = (LEFT + this.canvas.clientWidth - RIGHT) / 2;
    const at = this.pointer ?? { x: middle, y: this.canvas.clientHeight / 2 };
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) this.pointTo(at.x + moves[event.key] * (event.shiftKey ? 40 : 8), this.near?.[0]?.y ?? at.y);
    else if (event.key === "Enter" && this.events.enlarge) this.events.enlarge(this.name);
    else if (event.key === "+" || event.key === "-") {
      const center = this.plot.fromX(at.x), factor = event.key === "+" ? 0.5 : 2;
      this.events.zoom([center - (center - left) * factor, center + (right - center) * factor]);
    } else if (event.key === "0") this.events.zoom(null);
    else return;
    event.preventDefault();
  }
}

function nearestIndex(x, target) {
  let low = 0, high = x.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(x[low - 1] - target) < Math.abs(x[low] - target) ? low - 1 : low;
}
