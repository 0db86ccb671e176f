// A dialog that shows and edits a run's tags and note.
import { saveNotes } from "./api.js";
import { make } from "./dom.js";

export class NoteDialog {
  constructor(saved) {
    this.saved = saved;
    this.obstacle = ""; // why this board cannot edit notes
    this.title = make("h2", { id: "note-title" });
    this.tags = make("input", { type: "text", name: "tags", spellcheck: "false", placeholder: "baseline seed-study", maxlength: 850 });
    this.note = make("textarea", { name: "note", rows: 7, maxlength: 4000, placeholder: "What this run is for, and what it showed" });
    this.message = make("p", { class: "warn", role: "alert", hidden: true });
    this.save = make("button", { class: "quiet primary", type: "submit" }, "Save");
    const cancel = make("button", { class: "quiet", type: "button", onclick: () => this.dialog.close() }, "Cancel");
    const form = make("form", { onsubmit: (event) => { event.preventDefault(); this.submit(); } }, this.title,
      make("label", {}, make("span", {}, "Tags, separated by spaces"), this.tags),
      make("label", {}, make("span", {}, "Note"), this.note),
      this.message, make("div", { class: "row end" }, cancel, this.save));
    this.dialog = make("dialog", { class: "notes", "aria-labelledby": "note-title" }, form);
    document.body.append(this.dialog);
  }

  open(run) {
    this.run = run;
    this.title.textContent = run.name;
    this.tags.value = run.tags.join(" ");
    this.note.value = run.note;
    this.tags.readOnly = this.note.readOnly = Boolean(this.obstacle);
    this.save.hidden = Boolean(this.obstacle);
    this.tell(this.obstacle && `Cannot edit: ${this.obstacle}.`);
    this.dialog.showModal();
    this.tags.focus();
  }

  tell(text) {
    this.message.hidden = !text;
    this.message.textContent = text;
  }

  async submit() {
    const tags = this.tags.value.split(/[\s,]+/).filter(Boolean);
    this.save.disabled = true;
    try {
      await saveNotes(this.run.id, { tags, note: this.note.value, notes_version: this.run.notes_version });
      this.dialog.close();
      this.saved();
    } catch (error) {
      this.tell(`Not saved: ${error.reason || error.message}.`);
    }
    this.save.disabled = false;
  }
}
