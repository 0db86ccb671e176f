// One chart on a canvas: any number of curves with ranges, rank spread, a crosshair and zoom.
import { colorOf, css } from "./colors.js";
import { make } from "./dom.js";
import { duration, logTicks, short, smoothed, ticks, timeTicks, whole } from "./numbers.js";

const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MAX_TIP_ROWS = 8;
const EXACT = /^(train|validation|test|lr)\//; // few, exact values: smoothing would show numbers that were never measured
const MAX_MARKED_POINTS = 30; // curves with at most this many points get dots

export class Chart {
  constructor(name, options, events) {
    this.name = name;
    this.options = options; // {axis, scale, smooth, band, zoom, focus}, shared by all charts and changed by the page
    this.events = events; // {zoom(range or null)}
    this.curves = [];
    this.exact = EXACT.test(name);
    const slash = name.lastIndexOf("/");
    this.value = make("span", { class: "value" });
    this.canvas = make("canvas", { role: "img", "aria-label": name });
    this.tip = make("div", { class: "tip", hidden: true });
    this.card = make("article", { class: "card", "data-name": name },
      make("h3", {}, make("span", { class: "ellipsis", title: name }, slash > 0 ? make("span", { class: "group" }, name.slice(0, slash + 1)) : null, name.slice(slash + 1)), this.value),
      this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointerup", (event) => this.release(event));
    this.canvas.addEventListener("pointercancel", () => { this.pressed = null; this.leave(); });
    this.canvas.addEventListener("dblclick", () => this.events.zoom(null));
  }

  // curves: [{run: {id, name, index}, series, spread or null}]
  show(curves) {
    this.curves = curves;
    this.draw();
  }

  get smooth() {
    return this.exact ? 0 : this.options.smooth;
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
    this.prepare(width, height);
    this.drawAxes(context, width, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 3, width - LEFT - RIGHT, height - TOP - BOTTOM + 6);
    context.clip();
    const focus = this.options.focus;
    const few = this.curves.length <= 12;
    for (const curve of this.curves) if (curve.run.id !== focus) this.drawCurve(context, curve, few && !focus, focus ? 0.18 : 1);
    for (const curve of this.curves) if (curve.run.id === focus) this.drawCurve(context, curve, true, 1);
    if (this.at !== undefined) this.drawCrosshair(context, height);
    if (this.pressed && this.at !== undefined) {
      context.globalAlpha = 0.12;
      context.fillStyle = css("--accent");
      context.fillRect(Math.min(this.pressed, this.at), TOP, Math.abs(this.at - this.pressed), height - TOP - BOTTOM);
    }
    context.restore();
    this.showValue();
  }

  prepare(width, height) {
    const { axis, zoom, scale } = this.options;
    const smooth = this.smooth;
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    const log = scale === "log";
    for (const curve of this.curves) {
      const x = curve.series[axis];
      curve.x = x;
      if (curve.smoothedBy !== smooth || curve.smoothedOf !== curve.series) {
        curve.y = smoothed(curve.series.mean, smooth);
        curve.smoothedBy = smooth;
        curve.smoothedOf = curve.series;
      }
      for (let i = 0; i < x.length; i++) {
        if (!Number.isFinite(x[i])) continue;
        if (zoom && (x[i] < zoom[0] || x[i] > zoom[1])) continue;
        if (x[i] < left) left = x[i];
        if (x[i] > right) right = x[i];
        const bottom = this.curves.length > 12 || smooth ? Math.min(curve.y[i], curve.series.mean[i]) : curve.series.low[i];
        const top = this.curves.length > 12 || smooth ? Math.max(curve.y[i], curve.series.mean[i]) : curve.series.high[i];
        if ((!log || bottom > 0) && bottom < low) low = bottom;
        if ((!log || top > 0) && top > high) high = top;
      }
    }
    if (zoom) [left, right] = zoom;
    else if (left <= right) left = Math.min(left, right > 0 && left > 0 && left < right * 0.2 ? 0 : left);
    if (!(left < right)) { left = Number.isFinite(left) ? left - 0.5 : 0; right = Number.isFinite(right) ? left + 1 : 1; }
    if (!(low <= high)) { low = log ? 0.1 : 0; high = 1; }
    if (log) {
      const room = Math.max(1.05, (high / low) ** 0.05);
      low /= room; high *= room;
    } else {
      const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.05 || 0.5;
      low = low >= 0 && low - room < 0 ? 0 : low - room;
      high += room;
    }
    const inner = height - TOP - BOTTOM, across = width - LEFT - RIGHT;
    this.toX = (x) => LEFT + ((x - left) / (right - left)) * across;
    this.fromX = (at) => left + ((at - LEFT) / across) * (right - left);
    this.toY = log
      ? (y) => (y > 0 ? TOP + inner - (Math.log(y / low) / Math.log(high / low)) * inner : NaN)
      : (y) => TOP + inner - ((y - low) / (high - low)) * inner;
    Object.assign(this, { left, right, low, high, log });
  }

  drawAxes(context, width, height) {
    context.font = "10.5px system-ui, sans-serif";
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const grid = css("--grid"), dim = css("--dim");
    const labels = this.log ? logTicks(this.low, this.high) : ticks(this.low, this.high, 5);
    for (const y of labels) {
      const at = Math.round(this.toY(y)) + 0.5;
      context.strokeStyle = grid;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillStyle = dim;
      context.fillText(short(Math.abs(y) < (this.high - this.low) * 1e-9 && !this.log ? 0 : y), LEFT - 6, at);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const seconds = this.options.axis === "seconds";
    const count = (width - LEFT) / 65;
    for (const x of seconds ? timeTicks(this.left, this.right, count) : ticks(this.left, this.right, count)) {
      const text = seconds ? duration(x) : short(x);
      const half = context.measureText(text).width / 2;
      const at = Math.min(this.toX(x), width - half - 1);
      context.fillText(x === 0 ? "0" : text, at, height - 6);
    }
  }

  drawCurve(context, curve, withRanges, alpha) {
    const { x, y, series, spread } = curve;
    context.strokeStyle = context.fillStyle = colorOf(curve.run.index);
    context.lineJoin = "round";
    if (withRanges && this.options.band && spread && spread.mean.length === x.length) {
      const half = spread.mean;
      context.globalAlpha = 0.2 * alpha;
      this.fillBetween(context, x, (i) => series.mean[i] - half[i] / 2, (i) => series.mean[i] + half[i] / 2);
    }
    if (withRanges && series.values > x.length) {
      context.globalAlpha = 0.1 * alpha;
      this.fillBetween(context, x, (i) => series.low[i], (i) => series.high[i]);
    }
    if (withRanges && this.smooth) {
      context.globalAlpha = 0.28 * alpha;
      context.lineWidth = 1;
      this.strokeLine(context, x, series.mean);
    }
    context.globalAlpha = alpha;
    context.lineWidth = this.curves.length > 20 && alpha === 1 && !this.options.focus ? 1 : 1.6;
    this.strokeLine(context, x, y);
    if (this.exact && x.length <= MAX_MARKED_POINTS)
      for (let i = 0; i < x.length; i++) { context.beginPath(); context.arc(this.toX(x[i]), this.toY(y[i]), 2.2, 0, 7); context.fill(); }
    context.globalAlpha = 1;
  }

  strokeLine(context, x, y) {
    context.beginPath();
    let drawing = false, alone = 0, lastX = 0, lastY = 0;
    for (let i = 0; i < x.length; i++) {
      const atX = this.toX(x[i]), atY = this.toY(y[i]);
      if (!Number.isFinite(atX) || !Number.isFinite(atY)) { drawing = false; continue; }
      if (drawing) context.lineTo(atX, atY);
      else context.moveTo(atX, atY);
      drawing = true;
      alone++; lastX = atX; lastY = atY;
    }
    context.stroke();
    if (alone === 1) { context.beginPath(); context.arc(lastX, lastY, 2.5, 0, 7); context.fill(); }
  }

  fillBetween(context, x, low, high) {
    const lowest = this.log ? this.low : -Infinity;
    const good = [];
    for (let i = 0; i < x.length; i++) if (Number.isFinite(x[i]) && Number.isFinite(low(i)) && Number.isFinite(high(i)) && high(i) > lowest) good.push(i);
    if (good.length < 2) return;
    context.beginPath();
    for (const i of good) context.lineTo(this.toX(x[i]), this.toY(high(i)));
    for (const i of good.reverse()) context.lineTo(this.toX(x[i]), this.toY(Math.max(low(i), lowest)));
    context.closePath();
    context.fill();
  }

  drawCrosshair(context, height) {
    context.strokeStyle = css("--faint");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(this.at) + 0.5, TOP);
    context.lineTo(Math.round(this.at) + 0.5, height - BOTTOM);
    context.stroke();
    for (const { curve, i } of this.near ?? []) {
      context.fillStyle = colorOf(curve.run.index);
      context.beginPath();
      context.arc(this.toX(curve.x[i]), this.toY(curve.y[i]), 3, 0, 7);
      context.fill();
    }
  }

  showValue() {
    const lasts = this.curves.map((curve) => curve.series.mean.at(-1)).filter(Number.isFinite);
    this.value.textContent = this.curves.length === 1 && lasts.length ? short(lasts[0]) : "";
    this.card.dataset.values = this.curves.reduce((sum, curve) => sum + curve.series.values, 0);
    this.canvas.setAttribute("aria-label", `${this.name}, ${this.curves.length} runs` + (lasts.length === 1 ? `, last ${short(lasts[0])}` : ""));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.at = Math.max(LEFT, Math.min(event.clientX - box.left, box.width - RIGHT));
    const atY = event.clientY - box.top, target = this.fromX(this.at);
    const found = [];
    for (const curve of this.curves) {
      const i = nearest(curve.x, target);
      if (i < 0 || !Number.isFinite(curve.y[i]) || Math.abs(this.toX(curve.x[i]) - this.at) > 40) continue;
      found.push({ curve, i, distance: Math.abs(this.toY(curve.y[i]) - atY) });
    }
    found.sort((a, b) => a.distance - b.distance);
    this.near = found.slice(0, MAX_TIP_ROWS);
    this.draw();
    this.showTip(event.clientX - box.left, found.length);
  }

  showTip(atX, total) {
    if (!this.near.length) { this.tip.hidden = true; return; }
    const [{ curve: first, i }] = this.near;
    const where = this.options.axis === "seconds" ? duration(first.x[i]) : `${whole(first.x[i])} images`;
    const rows = [...this.near].sort((a, b) => b.curve.y[b.i] - a.curve.y[a.i]).map(({ curve, i: at }) => {
      const spread = this.options.band && curve.spread?.mean.length === curve.x.length ? curve.spread.mean[at] : NaN;
      return make("tr", {}, make("td", {}, make("span", { class: "dot", color: colorOf(curve.run.index) })),
        make("td", { class: "number" }, short(curve.y[at])),
        make("td", { class: "at" }, Number.isFinite(spread) ? `± ${short(spread / 2)}` : this.smooth ? `(${short(curve.series.mean[at])})` : ""),
        make("td", { class: "name ellipsis" }, curve.run.name));
    });
    this.tip.replaceChildren(make("div", { class: "at" }, where), make("table", {}, ...rows),
      total > MAX_TIP_ROWS ? make("div", { class: "at" }, `and ${total - MAX_TIP_ROWS} more`) : "");
    this.tip.hidden = false;
    const right = atX > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${atX + 24}px`;
    this.tip.style.right = right ? `${this.card.clientWidth - atX + 2}px` : "auto";
    this.tip.style.top = "34px";
  }

  leave() {
    this.at = this.near = undefined;
    this.pressed = null;
    this.tip.hidden = true;
    this.draw();
  }

  press(event) {
    if (event.pointerType === "mouse" && event.button === 0) this.pressed = this.at;
    else this.point(event);
  }

  release() {
    if (this.pressed && Math.abs(this.at - this.pressed) > 6)
      this.events.zoom([this.fromX(Math.min(this.at, this.pressed)), this.fromX(Math.max(this.at, this.pressed))]);
    this.pressed = null;
  }
}

function nearest(x, target) {
  let low = 0, high = x.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(x[low - 1] - target) < Math.abs(x[low] - target) ? low - 1 : low;
}
