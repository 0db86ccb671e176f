// The list of runs with their states, and the selection of runs to show.
import { assignColors, colorOf } from "./colors.js";
import { $, make, remember, remembered } from "./dom.js";
import { fromLink, shortId, toLink } from "./link.js";
import { duration, short } from "./numbers.js";
import { matches, needsRows, parseQuery } from "./query.js";

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
  constructor(rows, { changed, focus, open }) {
    this.rows = rows;
    this.changed = changed;
    this.focusOn = focus;
    this.open = open;
    this.hidden = new Set(remembered("hidden", []));
    this.items = new Map();
    this.all = [];
    $("filter").value = fromLink("filter") ?? "";
    $("filter").addEventListener("input", () => { toLink({ filter: $("filter").value.trim() }); this.changed(); });
    $("all").addEventListener("click", () => this.choose(true));
    $("none").addEventListener("click", () => this.choose(false));
  }

  update(runs, now, root) {
    assignColors(runs.map((run) => run.id));
    if (!this.all.length && runs.length) this.chooseFromLink(runs);
    this.all = [...runs].sort(byActivity);
    this.now = now;
    this.root = root;
  }

  chooseFromLink(runs) {
    const [hide, only] = ["hide", "only"].map((name) => fromLink(name)?.split(","));
    if (only) this.hidden = new Set(runs.filter((run) => !only.includes(shortId(run))).map((run) => run.name));
    else if (hide) this.hidden = new Set(runs.filter((run) => hide.includes(shortId(run))).map((run) => run.name));
  }

  get query() {
    return parseQuery($("filter").value);
  }

  get needsRows() {
    return needsRows(this.query);
  }

  get matching() {
    const query = this.query;
    return this.all.filter((run) => matches(run, this.rows.get(run.id), query));
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
    const hide = this.all.filter((run) => this.hidden.has(run.name)), only = this.all.filter((run) => !this.hidden.has(run.name));
    const fewer = hide.length <= only.length || !only.length;
    toLink({ hide: fewer ? hide.map(shortId).join() : "", only: fewer ? "" : only.map(shortId).join() });
    this.changed();
  }

  draw() {
    const counts = new Map();
    for (const run of this.all) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
    $("counts").title = $("counts").textContent = STATES.filter((state) => counts.has(state)).map((state) => `${counts.get(state)}\u00a0${state}`).join(" · ");
    $("all").hidden = $("none").hidden = !this.all.length;
    const items = this.matching.map((run) => this.item(run));
    if (!items.length && this.root !== undefined) items.push(make("li", { class: "dim" }, this.all.length ? "No run matches the filter." : "No runs yet."));
    const list = $("list");
    const same = list.children.length === items.length && items.every((item, at) => list.children[at] === item);
    if (!same) list.replaceChildren(...items);
  }

  // An item is rebuilt only when it has changed, so that a checkbox keeps its focus.
  item(run) {
    const details = this.details(run);
    const on = !this.hidden.has(run.name), color = colorOf(run);
    const key = JSON.stringify([run.name, run.state, run.reason, details, on, color, run.tags, run.note, run.broken_lines, run.names_truncated, run.mirror, straggler(run), Math.round(run.read_share * 20)]);
    const had = this.items.get(run.id);
    if (had?.key === key) return had.item;
    const share = run.total_images ? Math.min(1, run.images / run.total_images) : null;
    const reason = run.reason || run.log_tail.at(-1) || "no output";
    const item = make("li", { class: on ? "run" : "run off", color, "data-run": run.id, onpointerenter: () => on && this.focusOn(run.id), onpointerleave: () => this.focusOn(null) },
      make("input", { type: "checkbox", checked: on, "aria-label": `show ${run.name}`, onchange: (event) => this.toggle(run, event.target.checked) }),
      make("button", { class: "name", title: run.note || "show only this run", onclick: () => this.only(run) }, run.name),
      make("span", { class: "state", "data-state": run.state, title: run.reason || run.state }, run.state),
      make("span", { class: "details" }, ...details.map((detail) => make("span", {}, detail)),
        ...run.tags.map((tag) => make("span", { class: "tag" }, tag)),
        run.broken_lines ? make("span", { class: "warn", title: "unreadable lines in metrics.jsonl" }, `${run.broken_lines} broken ${run.broken_lines === 1 ? "line" : "lines"}`) : null,
        run.names_truncated ? make("span", { class: "warn", title: "metrics.jsonl contains more metrics than the board shows" }, `only ${run.names.length} metrics shown`) : null,
        straggler(run) ? make("span", { class: "warn", title: "this rank delays the others; the log gives the times of all ranks" }, straggler(run)) : null,
        run.mirror ? make("span", { class: run.mirror.error ? "warn" : "", title: `${run.mirror.url}\n${run.mirror.error || "no errors"}` }, this.mirror(run.mirror)) : null,
        run.read_share < 1 ? make("span", { title: "until metrics.jsonl has been read completely, the curves show a sample of its lines" }, `${Math.round(100 * run.read_share)} % read`) : null),
      share === null ? null : make("span", { class: "bar" }, make("i", { width: `${100 * share}%` })),
      run.state === "failed" ? make("button", { class: "reason", title: "open the log", onclick: () => this.open("logs", run) }, reason) : null);
    this.items.set(run.id, { key, item });
    return item;
  }

  mirror({ images, error }) {
    const there = images ? `mirrored up to ${short(images)} images` : "not mirrored yet";
    return error ? `mirror uploads are failing, ${there}` : there;
  }

  details(run) {
    const details = [];
    if (run.images) details.push(run.total_images > run.images ? `${short(run.images)} of ${short(run.total_images)}` : `${short(run.images)} ${run.images === 1 ? "image" : "images"}`);
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

// Returns a label for the rank that delays the others while a run trains; empty if there is none.
function straggler(run) {
  const rank = run.last_values["ranks/straggler"] ?? -1;
  return run.state === "running" && rank >= 0 ? `straggler: rank ${rank} (+${Math.round(100 * run.last_values["ranks/slowdown"])} %)` : "";
}
