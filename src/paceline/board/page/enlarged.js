// One chart enlarged in a dialog, with a legend. Escape or a click outside closes it.
import { Chart } from "./chart.js";
import { colorOf } from "./colors.js";
import { make } from "./dom.js";
import { fromLink, toLink } from "./link.js";
import { short } from "./numbers.js";

export class Enlarged {
  constructor(options, { zoom, fail, load }) {
    this.options = options;
    this.events = { zoom, fail };
    this.load = load;
    this.place = make("div");
    this.legend = make("div", { class: "legend" });
    const close = make("button", { class: "quiet", onclick: () => this.dialog.close() }, "Close");
    this.dialog = make("dialog", { class: "large", "aria-label": "enlarged chart", onclick: (event) => event.target === this.dialog && this.dialog.close(), onclose: () => this.closed() },
      make("div", { class: "inside" }, make("div", { class: "row" }, make("span", { class: "dim small gap" }, "Drag to zoom, double-click to reset. Arrow keys move the crosshair, + and − zoom."), close), this.place, this.legend));
    document.body.append(this.dialog);
    new ResizeObserver(() => this.chart?.draw()).observe(this.place);
  }

  get name() {
    return this.chart?.name ?? null;
  }

  open(name) {
    this.chart = new Chart(name, this.options, this.events);
    this.place.replaceChildren(this.chart.card);
    if (!this.dialog.open) this.dialog.showModal();
    this.chart.canvas.focus();
    toLink({ chart: name });
    this.load();
  }

  // Opens the chart that the link refers to, once its metric is known.
  openFromLink(names) {
    const name = fromLink("chart");
    if (name && !this.dialog.open && names.includes(name)) this.open(name);
  }

  show(curves) {
    this.chart.show(curves);
    this.legend.replaceChildren(...curves.map(({ run, series }) => make("span", {}, make("span", { class: "dot", color: colorOf(run) }), run.name, make("b", {}, short(series.mean.at(-1) ?? NaN)))));
  }

  closed() {
    this.chart = null;
    this.place.replaceChildren();
    toLink({ chart: "" });
  }
}
