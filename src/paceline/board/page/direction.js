// Whether a lower or a higher value of a metric is better. The name suggests it; the user can switch it in the table.
import { remember, remembered } from "./dom.js";

const LOWER = /(^|[/_\-\s])(loss|error|fid|kid|lpips|dists|niqe|mse|mae|rmse|nll|perplexity)([[/_\-\s@]|$)/i;
const EVALUATED = /^(train|validation|test)\//;

const switched = new Set(remembered("directions", []));

export function isLowerBetter(name) {
  const lower = name.startsWith("time/") ? false : !EVALUATED.test(name) || LOWER.test(name); // metrics outside evaluations are losses
  return lower !== switched.has(name);
}

export function switchDirection(name) {
  if (!switched.delete(name)) switched.add(name);
  remember("directions", [...switched]);
}
