// Draws curves with ranges and rank spread on a canvas of any size: a card, an enlarged chart or a downloaded image.
import { colorOf, css } from "./colors.js";
import { duration, logTicks, short, smoothed, ticks, timeTicks } from "./numbers.js";

export const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const EXACT = /^(train|validation|test|lr)\//; // few, exact values: smoothing would show numbers that were never measured
const MAX_MARKED_POINTS = 30; // curves with at most this many points get dots
const MIN_SMOOTHED_VALUES = 50; // a shorter curve is readable without smoothing
const MAX_SMOOTHED_STEPS = 1000;

// The smoothing weight of one point. A point may stand for many values, and zooming in loads more points. So the weight
// depends on the number of points, and a smoothed curve keeps its shape.
function weightOf(series, smooth) {
  if (series.values < MIN_SMOOTHED_VALUES) return 0;
  return smooth ** (Math.min(series.values, MAX_SMOOTHED_STEPS) / series.mean.length);
}

export class Plot {
  constructor(name, options) {
    this.options = options; // {axis, scale, smooth, band, zoom, focus}, shared by all charts and changed by the page
    this.exact = EXACT.test(name);
    this.curves = []; // [{run: {id, name}, series, spread or null}]
  }

  // Draws the axes and curves; `over` draws on top of them, within the area of the curves.
  draw(context, width, height, over = () => {}) {
    this.prepare(width, height);
    this.drawAxes(context, width, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 3, width - LEFT - RIGHT, height - TOP - BOTTOM + 6);
    context.clip();
    const focus = this.curves.some((curve) => curve.run.id === this.options.focus) ? this.options.focus : null;
    const few = this.curves.length <= 12;
    for (const curve of this.curves) if (curve.run.id !== focus) this.drawCurve(context, curve, few && !focus, focus ? 0.18 : 1);
    for (const curve of this.curves) if (curve.run.id === focus) this.drawCurve(context, curve, true, 1);
    over(context);
    context.restore();
  }

  prepare(width, height) {
    const { axis, zoom, scale } = this.options;
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    const log = scale === "log";
    for (const curve of this.curves) {
      const x = curve.series[axis];
      curve.x = x;
      const smooth = this.exact ? 0 : weightOf(curve.series, this.options.smooth);
      if (curve.smooth !== smooth) {
        curve.y = smoothed(curve.series.mean, smooth);
        curve.smooth = smooth;
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
    const labels = this.log ? logTicks(this.low, this.high) : ticks(this.low, this.high, Math.max(5, height / 35));
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
    if (!seconds) {
      context.textAlign = "left";
      context.fillText("images", 2, height - 6); // times have units
      context.textAlign = "center";
    }
    const count = (width - LEFT) / 65;
    for (const x of seconds ? timeTicks(this.left, this.right, count) : ticks(this.left, this.right, count)) {
      const text = seconds ? duration(x) : short(x);
      const half = context.measureText(text).width / 2;
      const at = Math.min(this.toX(x), width - half - 1);
      if (!seconds && at - half < LEFT - 5) continue; // no room beside the name of the axis
      context.fillText(x === 0 ? "0" : text, at, height - 6);
    }
  }

  drawCurve(context, curve, withRanges, alpha) {
    const { x, y, series, spread } = curve;
    context.strokeStyle = context.fillStyle = colorOf(curve.run);
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
    if (withRanges && curve.smooth) {
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
}
