// The leaderboard: one row per run with the best and last values of its metrics and the settings that differ.
import { lookUp } from "./api.js";
import { colorOf } from "./colors.js";
import { ColumnMenu } from "./columns.js";
import { isLowerBetter, switchDirection } from "./direction.js";
import { $, make } from "./dom.js";
import { saveTable } from "./download.js";
import { fromLink, toLink } from "./link.js";
import { decimals, duration, short, whole } from "./numbers.js";

const SPEED = "time/images_per_second";
const EVALUATED = /^(train|validation|test)\//;
const COUNTED = /\/(count|checkpoint_images|\w*seconds)$/; // recorded with the metrics, but not results
const BASELINE = /\/(input|bicubic)_/; // the score of the input, with which the result is compared
const PLACES = new Set(["out", "name"]); // settings that differ in all runs
const MAX_USUAL_SETTINGS = 12;
const MAX_ROWS = 500; // a browser needs seconds to lay out thousands of rows
const SECTIONS = [
  ["Results", (name) => EVALUATED.test(name) && name.startsWith("test/") && !COUNTED.test(name)],
  ["Results", (name) => EVALUATED.test(name) && !COUNTED.test(name)],
  ["Speed and time", (name) => name === SPEED],
  ["Losses", (name) => !/^(time|gpu|host|lr|train|validation|test)\//.test(name) && name !== "epoch"],
  ["Speed and time", (name) => name.startsWith("time/")],
  ["Other values", () => true],
];

export class Table {
  constructor(rows, { only, edit }) {
    this.rows = rows;
    this.only = only;
    this.edit = edit;
    const [column, direction] = (fromLink("sort") ?? "").split(/ (?=up$|down$)/);
    this.sort = column ? { column, up: direction === "up" } : null;
    this.menu = new ColumnMenu(() => this.draw());
    const csv = make("button", { class: "quiet", onclick: () => this.download() }, "CSV");
    this.note = make("span", { class: "dim" });
    this.place = make("div");
    $("table").append(make("div", { class: "tools" }, this.menu.menu, csv, this.note), this.place);
  }

  show(runs) {
    this.runs = runs;
    const partial = runs.filter((run) => this.rows.get(run.id)?.complete === false).length;
    const notes = [
      runs.length > MAX_ROWS ? `showing ${whole(MAX_ROWS)} of ${whole(runs.length)} runs; filter or sort to see others, or download all as CSV` : "",
      partial ? `${whole(partial)} ${partial === 1 ? "run is" : "runs are"} still being read: best values may change` : "",
    ];
    this.note.textContent = notes.filter(Boolean).join("; ");
    this.draw();
  }

  // Columns: {key, head, hint, section (in the menu), usual (shown unless the user hides it), value(run) for sorting and
  // CSV, cell(run, digits) for the page, number (a column of numbers with the same number of decimals), metric, mark (emphasise the best)}.
  columns() {
    return [
      { key: "run", head: "run", value: (run) => run.name, cell: (run) => this.name(run) },
      { key: "images", head: "images", section: "Run", usual: true, value: (run) => run.images, cell: (run) => whole(run.images) },
      { key: "time", head: "time", section: "Run", usual: true, hint: "training time", value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
      { key: "host", head: "host", section: "Run", usual: false, setting: true, value: (run) => run.host, cell: (run) => run.host || "–" },
      ...this.metrics().flatMap((name) => this.metricColumns(name)),
      ...this.settings(),
    ];
  }

  metrics() {
    const counts = new Map();
    for (const name of this.runs.flatMap((run) => run.names)) counts.set(name, (counts.get(name) ?? 0) + 1);
    const rank = (name) => SECTIONS.findIndex(([, holds]) => holds(name));
    const compare = (a, b) => rank(a) - rank(b) || counts.get(b) - counts.get(a) || (a < b ? -1 : 1); // metrics of most runs first
    return [...counts.keys()].filter((name) => !name.startsWith("spread/")).sort(compare);
  }

  metricColumns(name) {
    const section = SECTIONS.find(([, holds]) => holds(name))[0];
    const result = (run) => lookUp(this.rows.get(run.id)?.results, name);
    const value = (run) => result(run)?.last ?? lookUp(run.last_values, name);
    const usual = name === SPEED || (EVALUATED.test(name) && !COUNTED.test(name) && !BASELINE.test(name) && !this.isRepeated(name));
    const last = { key: `${name} last`, head: name, part: "last", section, usual, metric: name, hint: `${name}: last value`, value, number: true, cell: (run, digits) => show(name, value(run), digits) };
    if (!EVALUATED.test(name) || COUNTED.test(name)) return [{ ...last, part: "", mark: name === SPEED }];
    if (name.startsWith("test/")) return [{ ...last, part: "", mark: true, directed: true }];
    const side = isLowerBetter(name) ? "lowest" : "highest";
    const at = (run) => result(run)?.[`${side}_at`];
    const best = { ...last, key: `${name} best`, part: "best", mark: true, directed: true, hint: `${name}: best value`, value: (run) => result(run)?.[side], cell: (run, digits) => make("span", { title: Number.isFinite(at(run)) ? `at ${whole(at(run))} images` : "" }, show(name, result(run)?.[side], digits)) };
    return [best, last];
  }

  // Metrics on training images are left out by default if the same metric was measured on validation images.
  isRepeated(name) {
    return name.startsWith("train/") && this.runs.some((run) => run.names.includes(name.replace("train/", "validation/")));
  }

  settings() {
    const names = [...new Set(this.runs.flatMap((run) => Object.keys(this.rows.get(run.id)?.settings ?? {})))];
    const value = (run, name) => lookUp(this.rows.get(run.id)?.settings, name);
    const kinds = (name) => new Set(this.runs.map((run) => value(run, name)).filter((one) => one !== undefined)).size;
    const usual = new Set(names.filter((name) => !PLACES.has(name) && kinds(name) > 1).slice(0, MAX_USUAL_SETTINGS));
    return names.map((name) => ({ key: `setting ${name}`, head: name, section: "Settings", usual: usual.has(name), hint: `setting ${name}`, setting: true, value: (run) => value(run, name), cell: (run) => text(value(run, name)) }));
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
    const columns = this.menu.select(this.columns()), runs = this.sorted(columns).slice(0, MAX_ROWS);
    const key = JSON.stringify([this.sort, columns.map(({ key: one, metric }) => [one, metric && isLowerBetter(metric)]), runs.map((run) => [run.id, run.state, run.tags, run.note, colorOf(run), columns.map(({ value }) => value(run))])]);
    if (key === this.key) return;
    this.key = key;
    const digits = columns.map((column) => (column.number ? decimals(runs.map(column.value)) : null));
    const best = columns.map((column, at) => column.mark && runs.length > 1 ? bestOf(this.runs.map(column.value), isLowerBetter(column.metric), digits[at]) : undefined);
    const body = runs.map((run) => make("tr", { "data-run": run.id }, ...columns.map((column, at) => {
      const content = column.cell(run, digits[at]);
      if (!at) return make("th", { scope: "row" }, content);
      return make("td", { class: [column.setting ? "setting" : "number", best[at] !== undefined && show(column.metric, column.value(run), digits[at]) === best[at] ? "best" : ""].join(" ") }, content);
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
    const columns = this.menu.select(this.columns());
    const head = columns.map(({ head: name, part }) => (part ? `${name} ${part}` : name));
    const lines = this.sorted(columns).map((run) => [...columns.map(({ value }) => value(run)), run.state, run.tags.join(" "), run.note]);
    saveTable("runs", [[...head, "state", "tags", "note"], ...lines.map((line) => line.map((value) => (typeof value === "boolean" ? String(value) : value)))]);
  }
}

// The best of several values as text, so that values that look equal are all marked; nothing if all look equal.
function bestOf(values, lower, digits) {
  const numbers = values.filter(Number.isFinite), text = (value) => show("", value, digits);
  return new Set(numbers.map(text)).size > 1 ? text(numbers.reduce((a, b) => ((lower ? b < a : b > a) ? b : a))) : undefined;
}

function show(name, value, digits) {
  if (/\/(count|checkpoint_images)$/.test(name) && Number.isFinite(value)) return whole(value);
  return digits !== null && Number.isFinite(value) ? value.toFixed(digits) : short(value ?? null);
}

function text(value) {
  if (value === undefined) return "–";
  return typeof value === "number" ? short(value) : value === "" ? "“”" : String(value);
}
