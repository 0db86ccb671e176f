// The menu that shows and hides columns of the table. Only the user's changes are kept, so that defaults follow the runs.
import { make, remember, remembered } from "./dom.js";
import { fromLink, toLink } from "./link.js";

export class ColumnMenu {
  constructor(changed) {
    this.changed = changed;
    this.choices = new Map(Object.entries(inLink() ?? remembered("table.columns", {}))); // key → whether the user shows it
    this.find = make("input", { type: "search", placeholder: "find a column", "aria-label": "find a column", spellcheck: "false", oninput: () => this.draw() });
    this.reset = make("button", { class: "link", type: "button", onclick: () => this.choose(this.columns.map(({ key }) => key), null) }, "defaults");
    this.list = make("div", { class: "list" });
    this.title = make("summary", { class: "quiet" }, "Columns");
    this.menu = make("details", { class: "menu", ontoggle: () => this.draw() }, this.title,
      make("div", { class: "panel" }, make("div", { class: "row" }, this.find, this.reset), this.list));
    document.addEventListener("pointerdown", (event) => { if (!this.menu.contains(event.target)) this.menu.open = false; });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.menu.open) return;
      this.menu.open = false;
      this.title.focus();
    });
  }

  isShown({ key, usual }) {
    return this.choices.get(key) ?? usual;
  }

  // Takes all columns that the runs could have, and returns those to show. The first column is always shown.
  select(columns) {
    this.columns = columns.slice(1);
    this.draw();
    return columns.filter((column, at) => !at || this.isShown(column));
  }

  choose(keys, on) {
    const usual = new Map(this.columns.map((column) => [column.key, column.usual]));
    for (const key of keys) if (on === null || on === usual.get(key)) this.choices.delete(key); else this.choices.set(key, on);
    remember("table.columns", Object.fromEntries(this.choices));
    toLink({ columns: [...this.choices].map(([key, shown]) => `${shown ? "+" : "-"}${key}`).join(",") });
    this.changed();
  }

  draw() {
    if (!this.menu.open || !this.columns) return;
    const wanted = this.find.value.trim().toLowerCase();
    const found = this.columns.filter((column) => name(column).toLowerCase().includes(wanted));
    const sections = Map.groupBy(found, ({ section }) => section);
    const key = JSON.stringify(found.map((column) => [column.section, column.key, this.isShown(column)]));
    this.reset.disabled = !this.choices.size;
    if (key === this.key) return;
    this.key = key;
    const focused = document.activeElement?.dataset.column;
    this.list.replaceChildren(...(found.length ? [...sections].map(([section, columns]) => this.section(section, columns)) : [make("p", { class: "dim" }, "No column matches the search.")]));
    if (focused) [...this.list.querySelectorAll("input")].find((input) => input.dataset.column === focused)?.focus();
  }

  section(title, columns) {
    const shown = columns.filter((column) => this.isShown(column)).length;
    const all = this.box(`section ${title}`, shown === columns.length, (on) => this.choose(columns.map(({ key }) => key), on), make("b", {}, title));
    all.firstChild.indeterminate = shown > 0 && shown < columns.length;
    return make("fieldset", { "aria-label": title }, all, ...columns.map((column) => this.box(column.key, this.isShown(column), (on) => this.choose([column.key], on), name(column))));
  }

  box(key, checked, act, text) {
    return make("label", { class: "check" }, make("input", { type: "checkbox", checked, "data-column": key, onchange: (event) => act(event.target.checked) }), text);
  }
}

const name = ({ head, part }) => (part ? `${head} ${part}` : head);

function inLink() {
  const text = fromLink("columns");
  return text && Object.fromEntries(text.split(",").filter((one) => /^[+-]./.test(one)).map((one) => [one.slice(1), one[0] === "+"]));
}
