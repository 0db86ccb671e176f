// Number formatting, axis ticks and smoothing.
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function short(number) {
  if (number === null || !Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size >= 1e4) for (const [unit, name] of UNITS) if (size >= unit) return `${trim((number / unit).toPrecision(3))}${name}`;
  if (size !== 0 && size < 1e-3) return number.toExponential(2).replace(/\.?0+e/, "e");
  return trim(number.toPrecision(4));
}

// The number of decimals that aligns a column of numbers; null if their magnitudes differ too much.
export function decimals(values) {
  const texts = values.filter(Number.isFinite).map(short);
  const digits = Math.max(0, ...texts.map((text) => text.split(".")[1]?.length ?? 0));
  const whole = Math.max(0, ...texts.map((text) => text.split(".")[0].length));
  return texts.some((text) => /[a-z]/i.test(text)) || digits + whole > 7 ? null : digits;
}

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

export const whole = (number) => Math.round(number).toLocaleString("en");

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${trim(seconds.toPrecision(2))} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${trim((seconds / 3600).toFixed(1))} h`;
  return `${trim((seconds / 86400).toFixed(1))} d`;
}

export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) ?? 10 * power;
  const found = [];
  for (let number = Math.ceil(low / step); number <= Math.floor(high / step + 1e-9) && found.length < 50; number++) found.push(number * step);
  return found;
}

// Ticks at whole seconds, minutes and hours.
export function timeTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = steps.find((one) => one >= rough);
  if (rough < 1 || !step) return ticks(low, high, count);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high && found.length < 50; at += step) found.push(at);
  return found;
}

export function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  const factors = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every)
    for (const factor of factors) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
  return found;
}

// An exponential moving average with bias correction.
export function smoothed(values, weight) {
  if (!weight) return values;
  const result = new Float32Array(values.length);
  let sum = 0;
  let norm = 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) {
      sum = weight * sum + (1 - weight) * values[i];
      norm = weight * norm + (1 - weight);
      result[i] = sum / norm;
    } else result[i] = NaN;
  }
  return result;
}
