// The list of runs with their states, and the selection of runs to show.
import { colorOf } from "./colors.js";
import { $, make, remember, remembered } from "./dom.js";
import { duration, short } from "./numbers.js";

const STATES = ["running", "failed", "silent", "stopped", "finished", "unknown"];

// Active runs come first, most recently started on top, so that their order is stable. Others are sorted by last change.
function byActivity(one, other) {
  const runs = (other.state === "running") - (one.state === "running");
  return runs || lastActivity(other) - lastActivity(one) || (one.name < other.name ? -1 : 1);
}

function lastActivity(run) {
  return run.state === "running" ? run.since ?? 0 : Math.max(run.since ?? 0, run.last_line_time ?? 0);
}

export class Runs {
  constructor({ changed, focus, open }) {
    this.changed = changed;
    this.focusOn = focus;
    this.open = open;
    this.hidden = new Set(remembered("hidden", []));
    this.indices = new Map(); // a run keeps its color for as long as the page is open
    this.items = new Map();
    this.all = [];
    $("filter").addEventListener("input", () => { this.draw(); this.changed(); });
    $("all").addEventListener("click", () => this.choose(true));
    $("none").addEventListener("click", () => this.choose(false));
  }

  update(runs, now) {
    for (const run of runs) {
      if (!this.indices.has(run.id)) this.indices.set(run.id, this.indices.size);
      run.index = this.indices.get(run.id);
    }
    this.all = [...runs].sort(byActivity);
    this.now = now;
    this.draw();
  }

  get matching() {
    const filter = $("filter").value.trim().toLowerCase();
    return this.all.filter((run) => `${run.name} ${run.state}`.toLowerCase().includes(filter));
  }

  get chosen() {
    return this.matching.filter((run) => !this.hidden.has(run.name));
  }

  choose(on) {
    for (const run of this.matching) if (on) this.hidden.delete(run.name); else this.hidden.add(run.name);
    this.keep();
  }

  toggle(run, on) {
    if (on) this.hidden.delete(run.name);
    else this.hidden.add(run.name);
    this.keep();
  }

  only(run) {
    const alone = this.chosen.length === 1 && this.chosen[0].id === run.id;
    for (const one of this.all) if (alone || one.id === run.id) this.hidden.delete(one.name); else this.hidden.add(one.name);
    this.keep();
  }

  keep() {
    remember("hidden", [...this.hidden]);
    this.draw();
    this.changed();
  }

  draw() {
    const counts = new Map();
    for (const run of this.all) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
    $("counts").title = $("counts").textContent = STATES.filter((state) => counts.has(state)).map((state) => `${counts.get(state)}\u00a0${state}`).join(" · ");
    const items = this.matching.map((run) => this.item(run));
    const list = $("list");
    const same = list.children.length === items.length && items.every((item, at) => list.children[at] === item);
    if (!same) list.replaceChildren(...items);
    if (!this.all.length) list.replaceChildren(make("li", { class: "empty" }, "No runs in this folder yet."));
  }

  // An item is rebuilt only when it has changed, so that a checkbox keeps its focus.
  item(run) {
    const details = this.details(run);
    const key = JSON.stringify([run.name, run.state, run.reason, details, this.hidden.has(run.name), colorOf(run.index), run.broken_lines, run.mirror, Math.round(run.read_share * 20)]);
    const had = this.items.get(run.id);
    if (had?.key === key) return had.item;
    const on = !this.hidden.has(run.name);
    const share = run.total_images ? Math.min(1, run.images / run.total_images) : null;
    const item = make("li", { class: on ? "run" : "run off", color: colorOf(run.index), "data-run": run.id, onpointerenter: () => on && this.focusOn(run.id), onpointerleave: () => this.focusOn(null) },
      make("input", { type: "checkbox", checked: on, "aria-label": `show ${run.name}`, onchange: (event) => this.toggle(run, event.target.checked) }),
      make("span", { class: "name", title: "show only this run", onclick: () => this.only(run) }, run.name),
      make("span", { class: "state", "data-state": run.state, title: run.reason || run.state }, run.state),
      make("span", { class: "details" }, ...details.map((detail) => make("span", {}, detail)),
        run.broken_lines ? make("span", { class: "warn", title: "unreadable lines in metrics.jsonl" }, `${run.broken_lines} broken ${run.broken_lines === 1 ? "line" : "lines"}`) : null,
        run.mirror ? make("span", { class: run.mirror.error ? "warn" : "", title: `${run.mirror.url}\n${run.mirror.error || "no errors"}` }, this.mirror(run.mirror)) : null,
        run.read_share < 1 ? make("span", { title: "until metrics.jsonl has been read completely, the curves show a sample of its lines" }, `${Math.round(100 * run.read_share)} % read`) : null),
      share === null ? null : make("span", { class: "bar" }, make("i", { width: `${100 * share}%` })),
      run.state === "failed" ? make("span", { class: "reason", role: "button", tabindex: 0, title: "open the log", onclick: () => this.open("logs", run) }, run.reason || run.log_tail.at(-1) || "no output") : null);
    this.items.set(run.id, { key, item });
    return item;
  }

  mirror({ images, error }) {
    const there = images ? `mirrored up to ${short(images)} images` : "not mirrored yet";
    return error ? `mirror uploads are failing, ${there}` : there;
  }

  details(run) {
    const details = [];
    if (run.images) details.push(run.total_images > run.images ? `${short(run.images)} of ${short(run.total_images)}` : `${short(run.images)} images`);
    const speed = run.last_values["time/images_per_second"];
    if (run.state === "running" && speed) {
      details.push(`${short(speed)}/s`);
      if (run.total_images > run.images) details.push(`${duration((run.total_images - run.images) / speed)} left`);
      const quiet = this.now - run.last_line_time;
      if (run.last_line_time && quiet > 60) details.push(`no metrics for ${duration(quiet)}`);
    } else if (run.seconds) details.push(duration(run.seconds));
    return details;
  }
}
