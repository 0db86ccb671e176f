// The leaderboard: one row per run with the best and last values of its metrics and the settings that differ.
import { colorOf } from "./colors.js";
import { isLowerBetter, switchDirection } from "./direction.js";
import { $, empty, make, remember, remembered } from "./dom.js";
import { saveTable } from "./download.js";
import { fromLink, toLink } from "./link.js";
import { duration, short, whole } from "./numbers.js";

const SPEED = "time/images_per_second";
const EVALUATED = /^(train|validation|test)\//;

export class Table {
  constructor(rows, { only, edit }) {
    this.rows = rows;
    this.only = only;
    this.edit = edit;
    const [column, direction] = (fromLink("sort") ?? "").split(/ (?=up$|down$)/);
    this.sort = column ? { column, up: direction === "up" } : null;
    this.losses = this.option("losses", "losses", "add a column with the last value of each loss");
    this.same = this.option("same", "equal settings", "add the settings that have the same value in all runs");
    this.find = make("input", { type: "search", placeholder: "filter columns", "aria-label": "filter columns", spellcheck: "false", oninput: () => this.draw() });
    const csv = make("button", { class: "quiet", onclick: () => this.download() }, "CSV");
    this.note = make("span", { class: "dim" });
    this.place = make("div");
    $("table").append(make("div", { class: "tools" }, this.losses.label, this.same.label, this.find, this.note, csv), this.place);
  }

  option(name, text, hint) {
    const input = make("input", { type: "checkbox", checked: remembered(`table.${name}`, false), onchange: () => { remember(`table.${name}`, input.checked); this.draw(); } });
    return { input, label: make("label", { class: "check", title: hint }, input, ` ${text}`) };
  }

  show(runs) {
    this.runs = runs;
    const partial = runs.filter((run) => this.rows.get(run.id)?.complete === false).length;
    this.note.textContent = partial ? `${partial} ${partial === 1 ? "run is" : "runs are"} still being read: best values may change` : "";
    this.draw();
  }

  // Columns: {key, head, hint, value(run) for sorting and CSV, cell(run) for the page, metric, mark (emphasise the best)}.
  columns() {
    const found = [
      { key: "run", head: "run", value: (run) => run.name, cell: (run) => this.name(run) },
      { key: "images", head: "images", value: (run) => run.images, cell: (run) => whole(run.images) },
      { key: "time", head: "time", hint: "training time", value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
      ...this.metrics().flatMap((name) => this.metricColumns(name)),
      ...this.settings().map((name) => ({ key: name, head: name, hint: `setting ${name}`, setting: true, value: (run) => this.rows.get(run.id)?.settings[name], cell: (run) => text(this.rows.get(run.id)?.settings[name]) })),
    ];
    const filter = this.find.value.trim().toLowerCase();
    return found.filter(({ key, head }) => key === "run" || `${key} ${head}`.toLowerCase().includes(filter));
  }

  metrics() {
    const names = [...new Set(this.runs.flatMap((run) => Object.keys(this.rows.get(run.id)?.results ?? {})))];
    const rank = (name) => (name.startsWith("test/") ? 0 : EVALUATED.test(name) ? 1 : name === SPEED ? 3 : 2);
    return names.filter((name) => this.losses.input.checked || rank(name) !== 2).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  }

  metricColumns(name) {
    const result = (run) => this.rows.get(run.id)?.results[name];
    const last = { key: `${name} last`, head: name, part: "last", metric: name, hint: `${name}: last value`, value: (run) => result(run)?.last, cell: (run) => short(result(run)?.last ?? null) };
    if (!EVALUATED.test(name)) return [{ ...last, mark: name === SPEED }];
    if (name.startsWith("test/")) return [{ ...last, part: "", mark: true, directed: true }];
    const side = isLowerBetter(name) ? "lowest" : "highest";
    const at = (run) => result(run)?.[`${side}_at`];
    const best = { key: `${name} best`, head: name, part: "best", metric: name, mark: true, directed: true, hint: `${name}: best value`, value: (run) => result(run)?.[side], cell: (run) => make("span", { title: at(run) === undefined ? "" : `at ${whole(at(run))} images` }, short(result(run)?.[side] ?? null)) };
    return [best, last];
  }

  settings() {
    const names = [...new Set(this.runs.flatMap((run) => Object.keys(this.rows.get(run.id)?.settings ?? {})))];
    const differs = (name) => new Set(this.runs.map((run) => JSON.stringify(this.rows.get(run.id)?.settings[name]))).size > 1;
    return names.filter((name) => (this.same.input.checked || differs(name)) && !["out", "name"].includes(name));
  }

  name(run) {
    const edit = make("button", { class: "tool", "aria-label": `tags and note of ${run.name}`, title: run.note || "edit tags and note", onclick: () => this.edit(run) }, run.note ? "✎ note" : "✎");
    return make("span", { class: "who" }, make("span", { class: "dot", color: colorOf(run) }),
      make("button", { class: "link name", title: `show only ${run.name}`, onclick: () => this.only(run) }, run.name),
      make("span", { class: "state", "data-state": run.state }, run.state), ...run.tags.map((tag) => make("span", { class: "tag" }, tag)), edit);
  }

  sorted(columns) {
    const column = columns.find(({ key }) => key === this.sort?.column);
    if (!column) return this.runs;
    const missing = (value) => value === undefined || value === null || value === "";
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return [...this.runs].sort((one, other) => {
      const [a, b] = [column.value(one), column.value(other)];
      if (missing(a) || missing(b)) return missing(a) - missing(b); // runs without a value are always last
      return this.sort.up ? compare(a, b) : compare(b, a);
    });
  }

  // The first click on a column puts its best values on top, the second reverses the order, the third restores it.
  order(column) {
    const first = column.metric ? isLowerBetter(column.metric) : column.key !== "images";
    if (this.sort?.column !== column.key) this.sort = { column: column.key, up: first };
    else this.sort = this.sort.up === first ? { column: column.key, up: !first } : null;
    toLink({ sort: this.sort ? `${this.sort.column} ${this.sort.up ? "up" : "down"}` : "" });
    this.draw();
  }

  draw() {
    if (!this.runs) return;
    const columns = this.columns(), runs = this.sorted(columns);
    const key = JSON.stringify([this.sort, columns.map(({ key: one, metric }) => [one, metric && isLowerBetter(metric)]), runs.map((run) => [run.id, run.state, run.tags, run.note, colorOf(run), columns.map(({ value }) => value(run))])]);
    if (key === this.key) return;
    this.key = key;
    if (!runs.length) {
      this.place.replaceChildren(empty("No run is selected.", "Click the circle of a run in the list, or “all” above the list."));
      return;
    }
    const best = columns.map((column) => column.mark && runs.length > 1 ? bestOf(runs.map(column.value), isLowerBetter(column.metric)) : undefined);
    const body = runs.map((run) => make("tr", { "data-run": run.id }, ...columns.map((column, at) => {
      const content = column.cell(run);
      if (!at) return make("th", { scope: "row" }, content);
      return make("td", { class: [column.setting ? "setting" : "number", best[at] !== undefined && column.value(run) === best[at] ? "best" : ""].join(" ") }, content);
    })));
    this.place.replaceChildren(make("div", { class: "scroll tall" }, make("table", { class: "board" }, make("thead", {}, make("tr", {}, ...columns.map((column) => this.head(column)))), make("tbody", {}, ...body))));
  }

  head(column) {
    const sorted = this.sort?.column === column.key;
    const sort = make("button", { class: "link", title: `sort by ${column.hint ?? column.head}`, onclick: () => this.order(column) }, column.head, column.part ? make("small", {}, column.part) : null, sorted ? (this.sort.up ? " ▲" : " ▼") : "");
    const lower = column.directed && isLowerBetter(column.metric);
    const direction = column.directed ? make("button", { class: "tool", title: `${lower ? "lower" : "higher"} values are better; click to switch`, "aria-label": `switch which values of ${column.metric} are better`, onclick: () => { switchDirection(column.metric); this.draw(); } }, lower ? "min" : "max") : null;
    return make("th", { scope: "col", class: column.setting ? "setting" : null, "aria-sort": sorted ? (this.sort.up ? "ascending" : "descending") : "none" }, sort, direction);
  }

  download() {
    const columns = this.columns();
    const head = columns.map(({ head: name, part }) => (part ? `${name} ${part}` : name));
    const lines = this.sorted(columns).map((run) => [...columns.map(({ value }) => value(run)), run.state, run.tags.join(" "), run.note]);
    saveTable("runs", [[...head, "state", "tags", "note"], ...lines.map((line) => line.map((value) => (typeof value === "boolean" ? String(value) : value)))]);
  }
}

// The best of several values; nothing if all are equal.
function bestOf(values, lower) {
  const numbers = values.filter(Number.isFinite);
  return new Set(numbers).size > 1 ? (lower ? Math.min(...numbers) : Math.max(...numbers)) : undefined;
}

function text(value) {
  if (value === undefined) return "–";
  return typeof value === "number" ? short(value) : value === "" ? "“”" : String(value);
}
