// "Where the time goes": one bar per run, divided into the parts of the training loop.
import { colorOf } from "./colors.js";
import { make } from "./dom.js";
import { duration } from "./numbers.js";

const PARTS = ["step", "data", "log", "evaluation", "sample", "save"];
const PART_COLORS = ["#3f7fae", "#d98b3a", "#8a8f95", "#7a68b8", "#4e9a6b", "#b8577f"];
const MAX_RUNS = 60;

const order = (part) => (PARTS.includes(part) ? PARTS.indexOf(part) : PARTS.length);
const partColor = (part) => PART_COLORS[PARTS.indexOf(part)] ?? "#a09080";

export class TimeSplit {
  constructor() {
    this.place = make("div");
  }

  show(runs) {
    const shown = runs.filter((run) => Object.keys(run.time_split).length).slice(0, MAX_RUNS);
    const key = JSON.stringify(shown.map((run) => [run.id, run.time_split, colorOf(run)]));
    if (key === this.key) return;
    this.key = key;
    const used = new Set();
    const bars = shown.flatMap((run) => {
      const total = Object.values(run.time_split).reduce((sum, seconds) => sum + seconds, 0) || 1;
      const parts = Object.entries(run.time_split).map(([part, seconds]) => [PARTS.includes(part) ? part : "other", seconds]);
      const bar = parts.sort((a, b) => order(a[0]) - order(b[0])).map(([part, seconds]) => {
        used.add(part);
        const share = (100 * seconds) / total;
        return make("i", { width: `${share}%`, background: partColor(part), title: `${part}: ${duration(seconds)}, ${share.toFixed(1)} %` });
      });
      return [make("span", { class: "ellipsis", title: run.name }, make("span", { class: "dot", color: colorOf(run) }), ` ${run.name}`), make("div", { class: "bar" }, ...bar)];
    });
    const legend = [...used].sort((a, b) => order(a) - order(b)).map((part) => make("span", {}, make("span", { class: "dot", color: partColor(part) }), part));
    const card = make("div", { class: "card" }, make("div", { class: "split" }, ...bars), make("div", { class: "legend" }, ...legend));
    this.place.replaceChildren(...(bars.length ? [make("h2", {}, "Where the time goes"), card] : []));
  }
}
