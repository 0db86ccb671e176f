// One bar per run for a metric that is measured once, such as a metric on the test split.
import { title } from "./chart.js";
import { colorOf } from "./colors.js";
import { make } from "./dom.js";
import { isLowerBetter } from "./direction.js";
import { short } from "./numbers.js";

const MAX_BARS = 24;

export class Bars {
  constructor(name) {
    this.name = name;
    this.place = make("div", { class: "bars" });
    this.note = make("p", { class: "dim small" });
    this.hint = make("span", { class: "value" });
    this.card = make("article", { class: "card", "data-name": name, "data-kind": "bars" }, make("h3", {}, title(name), this.hint), this.place, this.note);
  }

  show(runs) {
    const lower = isLowerBetter(this.name);
    const found = runs.map((run) => ({ run, value: run.last_values[this.name] })).filter(({ value }) => Number.isFinite(value));
    found.sort((a, b) => (lower ? a.value - b.value : b.value - a.value));
    const shown = found.slice(0, MAX_BARS);
    const low = Math.min(0, ...shown.map(({ value }) => value)), high = Math.max(0, ...shown.map(({ value }) => value));
    const share = (value) => (high > low ? (100 * (value - low)) / (high - low) : 0);
    const key = JSON.stringify(shown.map(({ run, value }) => [run.name, value, colorOf(run)]));
    this.hint.textContent = lower ? "lower is better" : "higher is better";
    this.note.textContent = found.length > MAX_BARS ? `and ${found.length - MAX_BARS} more runs in the table` : "";
    this.note.hidden = found.length <= MAX_BARS;
    if (key === this.key) return;
    this.key = key;
    this.place.replaceChildren(...shown.flatMap(({ run, value }) => {
      const from = Math.min(share(0), share(value));
      const bar = make("i", { width: `${Math.abs(share(value) - share(0))}%`, left: `${from}%`, background: colorOf(run) });
      return [make("span", { class: "ellipsis", title: run.name }, make("span", { class: "dot", color: colorOf(run) }), ` ${run.name}`), make("span", { class: "track" }, bar), make("b", {}, short(value))];
    }));
  }
}
