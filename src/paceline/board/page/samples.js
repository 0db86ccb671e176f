// Sample images of the selected runs side by side, with one slider through training.
import { fetchSamples, imageUrl } from "./api.js";
import { colorOf } from "./colors.js";
import { $, empty, make } from "./dom.js";
import { whole } from "./numbers.js";

const FRAME_MS = 220;
const MAX_PANES = 12;
const REAL = "real"; // the kind of the image that shows real examples; it does not change during training

export class Samples {
  constructor(fail) {
    this.fail = fail;
    this.kept = new Map(); // run ID → {revision, kinds, real}; kinds: images seen at each sample, by kind
    this.panes = new Map(); // run ID → {pane, name, image, caption}
    this.realPanes = new Map(); // size of the file with real images → pane
    this.runs = [];
    this.moments = [];
    this.follow = true; // show the newest image until the user moves the slider
    this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "images seen", oninput: () => { this.follow = Number(this.slider.value) === this.moments.length - 1; this.draw(); } });
    this.moment = make("output");
    this.play = make("button", { class: "quiet", onclick: () => this.run() }, "Play");
    this.kind = make("select", { "aria-label": "kind of sample image", hidden: true, onchange: () => this.arrange() });
    this.note = make("span", { class: "dim" });
    this.empty = make("div");
    this.grid = make("div", { class: "panes" });
    this.content = make("div", {}, make("div", { class: "tools" }, this.play, make("label", { class: "through" }, this.slider, this.moment), this.kind, this.note), this.grid);
    $("samples").append(this.empty, this.content);
  }

  async show(runs) {
    const having = runs.filter((run) => run.has_samples);
    this.runs = having.slice(0, MAX_PANES);
    this.note.textContent = having.length > MAX_PANES ? `showing the first ${MAX_PANES} of ${having.length} runs; select fewer in the list` : "";
    this.empty.replaceChildren(having.length ? "" : this.nothing(runs));
    this.content.hidden = !having.length;
    if (having.length) await this.arrange();
  }

  nothing(runs) {
    const what = runs.length === 1 ? "The selected run has no sample images yet." : "The selected runs have no sample images yet.";
    return empty(what, "Recipes that generate or restore images save them during training. To save them more often, use ", "--set sample_every=\"1 epochs\"");
  }

  async arrange() {
    try {
      const stale = this.runs.filter((run) => this.kept.get(run.id)?.revision !== run.revision);
      await Promise.all(stale.map(async (run) => {
        const { samples, real_bytes: real } = await fetchSamples(run.id);
        this.kept.set(run.id, { revision: run.revision, kinds: samples, real });
      }));
    } catch (error) {
      this.fail(error);
    }
    this.arrangePanes();
    const kinds = [...new Set(this.runs.flatMap((run) => Object.keys(this.kept.get(run.id)?.kinds ?? {})))].filter((kind) => kind !== REAL).sort();
    if (kinds.join("\n") !== this.kinds?.join("\n")) {
      const before = this.kind.value;
      this.kind.replaceChildren(...kinds.map((kind) => make("option", { value: kind, selected: kind === before }, kind)));
      this.kind.hidden = kinds.length < 2;
      this.kinds = kinds;
    }
    const at = this.moments[Number(this.slider.value)];
    this.moments = [...new Set(this.runs.flatMap((run) => this.of(run.id)))].sort((a, b) => a - b);
    this.slider.max = Math.max(0, this.moments.length - 1);
    const same = this.moments.findLastIndex((moment) => moment <= at);
    this.slider.value = this.follow || same < 0 ? this.moments.length - 1 : same;
    this.draw();
  }

  arrangePanes() {
    for (const run of this.runs) if (!this.panes.has(run.id)) this.panes.set(run.id, this.pane());
    const panes = this.groups().flatMap(([real, runs]) => [...(real ? [this.realPane(real, runs)] : []), ...runs.map((run) => this.panes.get(run.id).pane)]);
    const same = this.grid.children.length === panes.length && panes.every((pane, at) => this.grid.children[at] === pane);
    if (!same) this.grid.replaceChildren(...panes);
    for (const run of this.runs) {
      const { name } = this.panes.get(run.id);
      name.replaceChildren(make("span", { class: "dot", color: colorOf(run) }), ` ${run.name}`);
    }
  }

  // Runs with the same real images, and therefore the same training data, share a pane. Files of equal size count as equal.
  groups() {
    const groups = new Map();
    for (const run of this.runs) {
      const real = this.kept.get(run.id)?.real ?? 0;
      groups.set(real, [...(groups.get(real) ?? []), run]);
    }
    return [...groups];
  }

  realPane(real, runs) {
    if (!this.realPanes.has(real)) this.realPanes.set(real, this.pane());
    const { pane, name, image, caption } = this.realPanes.get(real);
    const source = imageUrl(runs[0].id, REAL, this.kept.get(runs[0].id).kinds[REAL][0], 1);
    if (image.getAttribute("src") !== source) image.src = source;
    pane.classList.add("real");
    name.textContent = image.alt = "real images";
    caption.textContent = `training data of ${runs[0].name}` + (runs.length > 1 ? ` and ${runs.length - 1} more ${runs.length === 2 ? "run" : "runs"}` : "");
    return pane;
  }

  pane() {
    const name = make("div");
    const image = make("img", { alt: "", decoding: "async" });
    const caption = make("figcaption");
    const large = make("button", { class: "enlarge", title: "enlarge or shrink the image", onclick: () => pane.classList.toggle("wide") }, image);
    const pane = make("div", { class: "pane" }, name, make("figure", {}, large, caption));
    return { pane, name, image, caption };
  }

  of(id) {
    return this.kept.get(id)?.kinds[this.kind.value] ?? [];
  }

  draw() {
    const moment = this.moments[Number(this.slider.value)];
    this.moment.textContent = moment === undefined ? "" : `${whole(moment)} images`;
    for (const run of this.runs) {
      const { image, caption } = this.panes.get(run.id);
      const moments = this.of(run.id);
      const shown = moments.findLast((one) => one <= moment) ?? moments[0];
      image.parentElement.hidden = shown === undefined;
      if (shown === undefined) { caption.textContent = moments.length || this.kinds.length < 2 ? "no images yet" : `no images of the kind “${this.kind.value}”`; continue; }
      const source = imageUrl(run.id, this.kind.value, shown, moments.length > 1 ? 0 : 1);
      if (image.getAttribute("src") !== source) image.src = source;
      image.alt = `${run.name} at ${whole(shown)} images`;
      image.dataset.images = shown;
      caption.textContent = shown === moment ? `at ${whole(shown)} images` : `at ${whole(shown)} images (no image at ${whole(moment)})`;
    }
  }

  run() {
    if (this.playing) return this.stop();
    this.play.textContent = "Pause";
    this.follow = false;
    if (Number(this.slider.value) >= this.moments.length - 1) this.slider.value = 0;
    this.draw();
    this.playing = setInterval(() => {
      const images = this.runs.map((run) => this.panes.get(run.id).image);
      if (images.some((image) => image.getAttribute("src") && !image.complete)) return; // slow connection: do not skip frames
      if (Number(this.slider.value) >= this.moments.length - 1) return this.stop();
      this.slider.value = Number(this.slider.value) + 1;
      this.draw();
    }, FRAME_MS);
  }

  stop() {
    clearInterval(this.playing);
    this.playing = null;
    this.play.textContent = "Play";
  }
}
