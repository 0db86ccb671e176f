// One chart per metric. A chart is drawn when it is scrolled into view, and fetched again when its runs change.
import { fetchSeries } from "./api.js";
import { Chart } from "./chart.js";
import { colorOf } from "./colors.js";
import { $, make, remember, remembered } from "./dom.js";
import { duration } from "./numbers.js";

const GROUPS = [
  ["Losses", (name) => !/^(time|gpu|lr|train|validation|test|spread)\//.test(name) && name !== "epoch"],
  ["Metrics", (name) => /^(train|validation|test)\//.test(name) && !/\/(count|checkpoint_images)$/.test(name)],
  ["Speed", (name) => /^time\/(images_per_second|images_per_second_without_loading|data_wait)$/.test(name)],
  ["GPU", (name) => name.startsWith("gpu/")],
  ["Learning rate", (name) => name.startsWith("lr/")],
  ["Seconds per log interval", (name) => /^time\/.*_seconds$/.test(name)],
];
const PARTS = ["step", "data", "log", "evaluation", "sample", "save"];
const PART_COLORS = ["#3f7fae", "#d98b3a", "#8a8f95", "#7a68b8", "#4e9a6b", "#b8577f"];

export class Curves {
  constructor(fail) {
    this.fail = fail;
    this.options = { axis: "images", scale: "linear", smooth: 0.6, band: true, zoom: null, focus: null, ...remembered("curves", {}) };
    this.options.zoom = this.options.focus = null;
    this.charts = new Map(); // by name
    this.have = new Map(); // "run name" → {series, revision, points}
    this.visible = new Set();
    this.waiting = new Set();
    this.watcher = new IntersectionObserver((entries) => this.seen(entries), { root: document.querySelector("main"), rootMargin: "250px" });
    this.wall = $("wall");
    this.wire();
    new ResizeObserver(() => this.redraw()).observe(this.wall);
  }

  wire() {
    for (const name of ["axis", "scale"])
      for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
        input.checked = input.value === this.options[name];
        input.addEventListener("change", () => this.change({ [name]: input.value, ...(name === "axis" ? { zoom: null } : {}) }));
      }
    const slide = $("smooth");
    slide.value = this.options.smooth;
    slide.addEventListener("input", () => this.change({ smooth: Number(slide.value) }));
    $("band").checked = this.options.band;
    $("band").addEventListener("change", () => this.change({ band: $("band").checked }));
    $("find-chart").addEventListener("input", () => this.arrange(this.runs ?? []));
    $("unzoom").addEventListener("click", () => this.zoom(null));
    this.showOptions();
  }

  change(changes) {
    Object.assign(this.options, changes);
    const { axis, scale, smooth, band } = this.options;
    remember("curves", { axis, scale, smooth, band });
    this.showOptions();
    this.redraw();
  }

  showOptions() {
    $("smooth-shown").textContent = Number(this.options.smooth).toFixed(2);
    $("unzoom").hidden = !this.options.zoom;
  }

  zoom(range) {
    this.change({ zoom: range });
    this.load();
  }

  focus(run) {
    this.options.focus = run;
    this.redraw();
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => { for (const name of this.visible) this.charts.get(name)?.draw(); });
  }

  // Called after every poll with the selected runs, each of which has an index.
  show(runs) {
    this.runs = runs;
    this.arrange(runs);
    this.load();
  }

  arrange(runs) {
    const filter = $("find-chart").value.trim().toLowerCase();
    const names = [...new Set(runs.flatMap((run) => run.names))].filter((name) => name.toLowerCase().includes(filter));
    const groups = GROUPS.map(([title, holds]) => [title, names.filter(holds).sort()]).filter(([, found]) => found.length);
    const plan = JSON.stringify([groups, runs.length > 0]);
    if (plan !== this.plan) {
      this.plan = plan;
      this.build(groups, runs);
    }
    this.splits(runs);
  }

  build(groups, runs) {
    const top = this.wall.parentElement.parentElement.scrollTop;
    this.watcher.disconnect();
    this.visible.clear();
    const used = new Set(groups.flatMap(([, names]) => names));
    for (const name of this.charts.keys()) if (!used.has(name)) this.charts.delete(name);
    this.split = make("div");
    const parts = [];
    for (const [title, names] of groups) {
      const cards = names.map((name) => {
        if (!this.charts.has(name)) this.charts.set(name, new Chart(name, this.options, { zoom: (range) => this.zoom(range) }));
        return this.charts.get(name).card;
      });
      parts.push(make("h2", {}, title), make("div", { class: "charts" }, ...cards));
      if (title === "Speed") parts.push(this.split);
    }
    if (!groups.length) {
      const nothing = runs.length ? "No metrics yet." : "Select a run on the left.";
      parts.push(make("p", { class: "empty" }, $("find-chart").value ? "No chart matches the filter." : nothing));
    }
    this.wall.replaceChildren(...parts);
    for (const name of used) this.watcher.observe(this.charts.get(name).card);
    this.wall.parentElement.parentElement.scrollTop = top;
  }

  seen(entries) {
    for (const entry of entries) {
      const name = entry.target.dataset.name;
      if (entry.isIntersecting) {
        this.visible.add(name);
        this.give(name);
      } else this.visible.delete(name);
    }
    this.load();
  }

  get points() {
    if (this.options.zoom) return 2048;
    return this.runs.length > 20 ? 300 : this.runs.length > 6 ? 600 : 1200;
  }

  // Fetches the series that visible charts still need, one request at a time.
  async load() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    try {
      do {
        this.again = false;
        const names = [...this.visible];
        const stale = new Map(); // run → names
        for (const run of this.runs ?? [])
          for (const name of names.flatMap((one) => [one, `spread/${one}`])) {
            const had = this.have.get(`${run.id} ${name}`);
            if (run.names.includes(name) && (!had || had.revision !== run.revision || had.points < this.points)) stale.set(run, [...(stale.get(run) ?? []), name]);
          }
        const alike = new Map();
        for (const [run, lacking] of stale) alike.set(lacking.join("\n"), [...(alike.get(lacking.join("\n")) ?? []), run]);
        for (const [key, runs] of alike) await this.fetch(runs, key.split("\n"));
        if (stale.size) for (const name of names) this.give(name);
      } while (this.again);
    } catch (error) {
      this.fail(error);
    } finally {
      this.loading = false;
    }
  }

  async fetch(runs, names) {
    const points = this.points;
    const revisions = new Map(runs.map((run) => [run.id, run.revision]));
    const found = await fetchSeries([...revisions.keys()], names, points);
    for (const series of found) this.have.set(`${series.run} ${series.name}`, { series, revision: revisions.get(series.run), points });
  }

  give(name) {
    const chart = this.charts.get(name);
    if (!chart) return;
    const curves = [];
    for (const run of this.runs ?? []) {
      const had = this.have.get(`${run.id} ${name}`);
      if (had) curves.push({ run, series: had.series, spread: this.have.get(`${run.id} spread/${name}`)?.series ?? null });
    }
    chart.show(curves);
  }

  splits(runs) {
    const shown = runs.filter((run) => Object.keys(run.time_split).length).slice(0, 60);
    const rows = JSON.stringify(shown.map((run) => [run.id, run.time_split, run.index]));
    if (!this.split || (rows === this.splitRows && this.split.childElementCount)) return;
    this.splitRows = rows;
    const used = new Set();
    const bars = shown.flatMap((run) => {
      const total = Object.values(run.time_split).reduce((sum, seconds) => sum + seconds, 0) || 1;
      const parts = Object.entries(run.time_split).map(([part, seconds]) => [PARTS.includes(part) ? part : "other", seconds]);
      const bar = parts.sort((a, b) => order(a[0]) - order(b[0])).map(([part, seconds]) => {
        used.add(part);
        return make("i", { width: `${(100 * seconds) / total}%`, background: partColor(part), title: `${part}: ${duration(seconds)}, ${((100 * seconds) / total).toFixed(1)} %` });
      });
      return [make("span", { class: "ellipsis", title: run.name }, make("span", { class: "dot", color: colorOf(run.index) }), ` ${run.name}`), make("div", { class: "bar" }, ...bar)];
    });
    const legend = [...used].sort((a, b) => order(a) - order(b)).map((part) => make("span", {}, make("span", { class: "dot", color: partColor(part) }), part));
    this.split.replaceChildren(...(bars.length ? [make("h2", {}, "Where the time goes"), make("div", { class: "card" }, make("div", { class: "split" }, ...bars), make("div", { class: "legend" }, ...legend))] : []));
  }
}

const order = (part) => (PARTS.includes(part) ? PARTS.indexOf(part) : PARTS.length);
const partColor = (part) => PART_COLORS[PARTS.indexOf(part)] ?? "#a09080";
