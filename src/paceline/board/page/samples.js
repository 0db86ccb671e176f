// Sample images of one or two runs, with one slider through training time.
import { fetchSamples, imageUrl } from "./api.js";
import { $, make } from "./dom.js";
import { whole } from "./numbers.js";

const FRAME_MS = 220;

export class Samples {
  constructor(fail) {
    this.fail = fail;
    this.kept = new Map(); // run ID → {revision, kinds}; kinds: images seen at each sample, by kind
    this.chosen = [null, null];
    this.follow = true; // show the newest image until the user moves the slider
    this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "images seen", oninput: () => { this.follow = Number(this.slider.value) === this.moments.length - 1; this.draw(); } });
    this.moment = make("output");
    this.play = make("button", { class: "quiet", onclick: () => this.run() }, "Play");
    this.kind = make("select", { "aria-label": "kind of sample image", hidden: true, onchange: () => this.arrange() });
    this.panes = [0, 1].map((side) => {
      const select = make("select", { "aria-label": side ? "right run" : "left run", onchange: () => { this.chosen[side] = select.value || null; this.arrange(); } });
      const image = make("img", { alt: "", decoding: "async" });
      const caption = make("figcaption");
      return { select, image, caption, pane: make("div", { class: "pane" }, select, make("figure", {}, image, caption)) };
    });
    this.empty = make("p", { class: "empty" }, "No run has sample images.");
    this.content = make("div", {}, make("div", { class: "tools" }, this.play, make("label", { class: "through" }, this.slider, this.moment), this.kind), make("div", { class: "pair" }, ...this.panes.map((one) => one.pane)));
    $("samples").append(this.empty, this.content);
    this.moments = [];
  }

  async show(runs) {
    this.runs = runs.filter((run) => run.has_samples);
    this.empty.hidden = this.runs.length > 0;
    this.content.hidden = !this.runs.length;
    const ids = this.runs.map((run) => run.id);
    if (!ids.includes(this.chosen[0])) this.chosen[0] = ids[0] ?? null;
    if (this.chosen[1] && !ids.includes(this.chosen[1])) this.chosen[1] = null;
    if (this.chosen[1] === null && !this.offered && ids.length > 1) this.chosen[1] = ids.find((id) => id !== this.chosen[0]);
    this.offered = ids.length > 1 || this.offered;
    await this.arrange();
  }

  async arrange() {
    try {
      for (const run of this.runs.filter((one) => this.chosen.includes(one.id)))
        if (this.kept.get(run.id)?.revision !== run.revision) this.kept.set(run.id, { revision: run.revision, kinds: await fetchSamples(run.id) });
    } catch (error) {
      this.fail(error);
    }
    for (const [side, { select }] of this.panes.entries()) {
      const plan = JSON.stringify([this.runs.map((run) => [run.id, run.name]), this.chosen[side]]);
      if (select.dataset.plan === plan) continue;
      select.dataset.plan = plan;
      const options = this.runs.map((run) => make("option", { value: run.id, selected: run.id === this.chosen[side] }, run.name));
      select.replaceChildren(...(side ? [make("option", { value: "" }, "no second run")] : []), ...options);
      select.value = this.chosen[side] ?? "";
    }
    const kinds = [...new Set(this.chosen.flatMap((id) => Object.keys(this.kept.get(id)?.kinds ?? {})))].sort();
    if (kinds.join("\n") !== this.kinds?.join("\n")) {
      const before = this.kind.value;
      this.kind.replaceChildren(...kinds.map((kind) => make("option", { value: kind, selected: kind === before }, kind)));
      this.kind.hidden = kinds.length < 2;
      this.kinds = kinds;
    }
    const at = this.moments[Number(this.slider.value)];
    this.moments = [...new Set(this.chosen.flatMap((id) => this.of(id)))].sort((a, b) => a - b);
    this.slider.max = Math.max(0, this.moments.length - 1);
    const same = this.moments.findLastIndex((moment) => moment <= at);
    this.slider.value = this.follow || same < 0 ? this.moments.length - 1 : same;
    this.draw();
  }

  of(id) {
    return this.kept.get(id)?.kinds[this.kind.value] ?? [];
  }

  draw() {
    const moment = this.moments[Number(this.slider.value)];
    this.moment.textContent = moment === undefined ? "" : `${whole(moment)} images`;
    for (const [side, { image, caption, pane }] of this.panes.entries()) {
      const id = this.chosen[side];
      const moments = this.of(id);
      const shown = moments.findLast((one) => one <= moment) ?? moments[0];
      image.hidden = shown === undefined;
      pane.classList.toggle("off", !id);
      if (shown === undefined) { caption.textContent = id ? "no images yet" : ""; continue; }
      const name = this.runs.find((run) => run.id === id)?.name ?? "";
      const source = imageUrl(id, this.kind.value, shown, moments.length > 1 ? 0 : 1);
      if (image.getAttribute("src") !== source) image.src = source;
      image.alt = `${name} at ${whole(shown)} images`;
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
      if (this.panes.some(({ image }) => image.getAttribute("src") && !image.complete)) return; // slow connection: do not skip frames
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
