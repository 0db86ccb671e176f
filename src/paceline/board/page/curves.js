// One chart per metric. A chart is drawn when it is scrolled into view, and fetched again when its runs change.
import { fetchSeries, MAX_RUNS_IN_URL } from "./api.js";
import { Bars } from "./bars.js";
import { Chart } from "./chart.js";
import { $, empty, make, remember, remembered } from "./dom.js";
import { Enlarged } from "./enlarged.js";
import { fromLink, toLink, zoomFromLink, zoomToLink } from "./link.js";
import { TimeSplit } from "./split.js";

const GROUPS = [
  ["Losses", (name) => !/^(time|gpu|host|lr|ranks|train|validation|test|spread)\//.test(name) && name !== "epoch"],
  ["Metrics", (name) => /^(train|validation)\//.test(name) && !/\/count$/.test(name)],
  ["Test metrics", (name) => isTest(name) && !/\/(count|checkpoint_images)$/.test(name)],
  ["Speed", (name) => /^time\/(images_per_second|images_per_second_without_loading|data_wait)$/.test(name)],
  ["Ranks", (name) => name.startsWith("ranks/")],
  ["GPU", (name) => name.startsWith("gpu/")],
  ["Host", (name) => name.startsWith("host/")],
  ["Learning rate", (name) => name.startsWith("lr/")],
  ["Seconds per log interval", (name) => /^time\/.*_seconds$/.test(name)],
];

const isTest = (name) => name.startsWith("test/"); // measured once per run, so shown as bars

export class Curves {
  constructor(fail) {
    this.fail = fail;
    this.options = { axis: "images", scale: "linear", smooth: 0.6, band: true, ...remembered("curves", {}), ...optionsInLink(), zoom: zoomFromLink(), focus: null };
    this.charts = new Map(); // by name
    this.bars = new Map();
    this.split = new TimeSplit();
    this.enlarged = new Enlarged(this.options, { zoom: (range) => this.zoom(range), fail, load: () => this.load() });
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
    $("find-chart").value = fromLink("charts") ?? "";
    $("find-chart").addEventListener("input", () => { toLink({ charts: $("find-chart").value.trim() }); this.arrange(this.runs ?? []); });
    $("unzoom").addEventListener("click", () => this.zoom(null));
    this.showOptions();
  }

  change(changes) {
    Object.assign(this.options, changes);
    const { axis, scale, smooth, band } = this.options;
    remember("curves", { axis, scale, smooth, band });
    toLink({ axis, scale, smooth: String(smooth) });
    this.showOptions();
    this.redraw();
  }

  showOptions() {
    $("smooth-shown").textContent = Number(this.options.smooth).toFixed(2);
    $("unzoom").hidden = !this.options.zoom;
  }

  zoom(range) {
    this.change({ zoom: range });
    zoomToLink(range);
    this.load();
  }

  focus(run) {
    this.options.focus = run;
    this.redraw();
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      for (const name of this.visible) this.charts.get(name)?.draw();
      this.enlarged.chart?.draw();
      for (const bars of this.bars.values()) bars.show(this.runs ?? []);
      this.split.show(this.runs ?? []);
    });
  }

  // Called after every poll with the selected runs.
  show(runs) {
    this.runs = runs;
    this.arrange(runs);
    this.load();
  }

  arrange(runs) {
    const filter = $("find-chart").value.trim().toLowerCase();
    const names = [...new Set(runs.flatMap((run) => run.names))].filter((name) => name.toLowerCase().includes(filter));
    const groups = GROUPS.map(([title, holds]) => [title, names.filter(holds).sort()]).filter(([, found]) => found.length);
    const plan = JSON.stringify([groups, filter !== ""]);
    if (plan !== this.plan) {
      this.plan = plan;
      this.build(groups);
    }
    for (const bars of this.bars.values()) bars.show(runs);
    this.split.show(runs);
    this.enlarged.openFromLink(names);
  }

  build(groups) {
    const top = this.wall.parentElement.parentElement.scrollTop;
    this.watcher.disconnect();
    this.visible.clear();
    const used = new Set(groups.flatMap(([, names]) => names));
    for (const kept of [this.charts, this.bars]) for (const name of kept.keys()) if (!used.has(name)) kept.delete(name);
    const parts = [];
    for (const [title, names] of groups) {
      parts.push(make("h2", {}, title), make("div", { class: "charts" }, ...names.map((name) => this.card(name))));
      if (title === "Speed") parts.push(this.split.place);
    }
    if (!groups.length) parts.push(this.nothing());
    this.wall.replaceChildren(...parts);
    for (const chart of this.charts.values()) this.watcher.observe(chart.card);
    this.wall.parentElement.parentElement.scrollTop = top;
  }

  card(name) {
    const kept = isTest(name) ? this.bars : this.charts;
    const events = { zoom: (range) => this.zoom(range), enlarge: (one) => this.enlarged.open(one), fail: this.fail };
    if (!kept.has(name)) kept.set(name, isTest(name) ? new Bars(name) : new Chart(name, this.options, events));
    return kept.get(name).card;
  }

  nothing() {
    if ($("find-chart").value.trim()) return empty("No chart matches the filter.", "Change or clear the filter for charts above.");
    return empty("No metrics yet.", "Charts appear when the run has written its first log line.");
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

  // Zoomed and enlarged charts get more points, within a limit for the chart as a whole.
  pointsFor(name) {
    const runs = this.runs.length;
    const usual = runs > 20 ? 300 : runs > 6 ? 600 : 1200;
    return this.options.zoom || this.enlarged.name === name ? Math.max(usual, Math.min(2048, Math.floor(100000 / runs))) : usual;
  }

  // Fetches the series that visible charts still need, one request at a time.
  async load() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    try {
      do {
        this.again = false;
        const names = [...new Set([...this.visible, ...(this.enlarged.name ? [this.enlarged.name] : [])])];
        const requests = this.requests(names);
        for (const { runs, names: lacking, points } of requests)
          for (let at = 0; at < runs.length; at += MAX_RUNS_IN_URL) await this.fetch(runs.slice(at, at + MAX_RUNS_IN_URL), lacking, points);
        const selection = (this.runs ?? []).map((run) => run.id).join();
        if (requests.length || selection !== this.selection) for (const name of names) this.give(name);
        this.selection = selection;
      } while (this.again);
    } catch (error) {
      this.fail(error);
    } finally {
      this.loading = false;
    }
  }

  // Runs that lack the same series are fetched with one request.
  requests(names) {
    const found = new Map();
    for (const run of this.runs ?? []) {
      const lacking = new Map(); // number of points → names
      for (const name of names) {
        const points = this.pointsFor(name);
        for (const one of [name, `spread/${name}`]) {
          const had = this.have.get(`${run.id} ${one}`);
          if (run.names.includes(one) && (!had || had.revision !== run.revision || had.points < points)) lacking.set(points, [...(lacking.get(points) ?? []), one]);
        }
      }
      for (const [points, ones] of lacking) {
        const key = `${points}\n${ones.join("\n")}`;
        if (!found.has(key)) found.set(key, { runs: [], names: ones, points });
        found.get(key).runs.push(run);
      }
    }
    return [...found.values()];
  }

  async fetch(runs, names, points) {
    const revisions = new Map(runs.map((run) => [run.id, run.revision]));
    const found = await fetchSeries([...revisions.keys()], names, points);
    for (const series of found) this.have.set(`${series.run} ${series.name}`, { series, revision: revisions.get(series.run), points });
  }

  give(name) {
    const curves = [];
    for (const run of this.runs ?? []) {
      const had = this.have.get(`${run.id} ${name}`);
      if (had) curves.push({ run, series: had.series, spread: this.have.get(`${run.id} spread/${name}`)?.series ?? null });
    }
    this.charts.get(name)?.show(curves);
    if (this.enlarged.name === name) this.enlarged.show(curves.map((curve) => ({ ...curve })));
  }
}

function optionsInLink() {
  const found = {};
  if (["images", "seconds"].includes(fromLink("axis"))) found.axis = fromLink("axis");
  if (["linear", "log"].includes(fromLink("scale"))) found.scale = fromLink("scale");
  const smooth = Number(fromLink("smooth") ?? NaN);
  if (smooth >= 0 && smooth < 1) found.smooth = smooth;
  return found;
}
