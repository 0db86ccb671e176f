// Settings of the selected runs side by side, by default only those that differ.
import { fetchSettings, lookUp } from "./api.js";
import { colorOf } from "./colors.js";
import { $, empty, make, remember, remembered } from "./dom.js";

const MAX_RUNS = 24;

export class Settings {
  constructor(fail) {
    this.fail = fail;
    this.kept = new Map();
    this.different = make("input", { type: "checkbox", checked: remembered("different", true), onchange: () => { remember("different", this.different.checked); this.draw(); } });
    this.find = make("input", { type: "search", placeholder: "filter settings", "aria-label": "filter settings", spellcheck: "false", oninput: () => this.draw() });
    this.note = make("span", { class: "dim" });
    this.place = make("div");
    $("settings").append(make("div", { class: "tools" }, make("label", { class: "check" }, this.different, " only differences"), this.find, this.note), this.place);
  }

  async show(runs) {
    this.runs = runs.slice(0, MAX_RUNS);
    this.note.textContent = runs.length > MAX_RUNS ? `showing the first ${MAX_RUNS} of ${runs.length} runs` : "";
    try {
      const stale = this.runs.filter((run) => this.kept.get(run.id)?.revision !== run.revision);
      await Promise.all(stale.map(async (run) => this.kept.set(run.id, { revision: run.revision, ...(await fetchSettings(run.id)) })));
    } catch (error) {
      this.fail(error);
    }
    this.draw();
  }

  draw() {
    const filter = this.find.value.trim().toLowerCase();
    const only = this.different.checked && this.runs.length > 1;
    const rows = [];
    for (const [table, title] of [["settings", "Settings"], ["provenance", "Provenance"]]) {
      const names = [...new Set(this.runs.flatMap((run) => Object.keys(this.kept.get(run.id)?.[table] ?? {})))];
      const found = names.map((name) => {
        const values = this.runs.map((run) => lookUp(this.kept.get(run.id)?.[table], name));
        return { name, values, differs: new Set(values.map((value) => JSON.stringify(value))).size > 1 };
      }).filter(({ name, values, differs }) => (!only || differs) && `${name} ${values.join(" ")}`.toLowerCase().includes(filter));
      if (!found.length) continue;
      rows.push(make("tr", { class: "title" }, make("th", { colspan: this.runs.length + 1 }, title)));
      for (const { name, values, differs } of found)
        rows.push(make("tr", { class: differs && this.runs.length > 1 ? "differs" : null }, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, text(value)))));
    }
    const key = JSON.stringify([filter, rows.map((row) => row.textContent), this.runs.map((run) => [run.name, colorOf(run)])]);
    if (key === this.key) return;
    this.key = key;
    const head = make("tr", {}, make("th"), ...this.runs.map((run) => make("th", { scope: "col" }, make("span", { class: "marked" }, make("span", { class: "dot", color: colorOf(run) }), run.name))));
    const table = make("table", { class: "settings" }, make("thead", {}, head), make("tbody", {}, ...rows));
    this.place.replaceChildren(rows.length ? make("div", { class: "scroll tall" }, table) : this.nothing(filter));
  }

  nothing(filter) {
    if (filter) return empty("No setting matches the filter.", "Change or clear the filter for settings above.");
    if (this.runs.length > 1) return empty("These runs have the same settings.", "Clear “only differences” to see all settings.");
    return empty("This run has not recorded its settings.", "A run writes config.toml when it starts to train.");
  }
}

function text(value) {
  if (value === undefined) return "–";
  if (value === "") return "“”";
  if (typeof value === "number" && value !== 0 && (Math.abs(value) >= 1e15 || Math.abs(value) < 1e-4)) return value.toExponential();
  return String(value);
}
