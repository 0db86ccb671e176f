// The end of a run's log, and the reason for a failure.
import { fetchLog } from "./api.js";
import { $, make } from "./dom.js";

export class Logs {
  constructor(fail) {
    this.fail = fail;
    this.rank = 0;
    this.select = make("select", { "aria-label": "run", onchange: () => this.choose(this.select.value) });
    this.ranks = make("select", { "aria-label": "rank", onchange: () => { this.rank = Number(this.ranks.value); this.load(); } });
    this.banner = make("p", { class: "banner", hidden: true });
    this.text = make("pre", { class: "log" });
    $("logs").append(make("div", { class: "tools" }, this.select, this.ranks), this.banner, this.text);
  }

  choose(id) {
    this.run = id;
    this.rank = 0;
    this.load();
  }

  async show(runs) {
    this.all = runs;
    if (!runs.some((run) => run.id === this.run)) this.run = (runs.find((run) => run.state === "failed") ?? runs[0])?.id;
    const plan = JSON.stringify([runs.map((run) => [run.id, run.name]), this.run]);
    if (plan !== this.plan) {
      this.plan = plan;
      this.select.replaceChildren(...runs.map((run) => make("option", { value: run.id, selected: run.id === this.run }, run.name)));
    }
    await this.load();
  }

  async load() {
    const run = this.all?.find((one) => one.id === this.run);
    if (!run) { this.text.textContent = "Select a run on the left."; return; }
    this.select.value = run.id;
    this.banner.hidden = !run.reason;
    this.banner.textContent = `${run.state}: ${run.reason}`;
    try {
      const { ranks, text } = await fetchLog(run.id, this.rank);
      if (ranks.join() !== this.known) {
        this.known = ranks.join();
        this.ranks.replaceChildren(...ranks.map((rank) => make("option", { value: rank, selected: rank === this.rank }, `rank ${rank}`)));
        this.ranks.hidden = ranks.length < 2;
      }
      if (this.text.textContent === text) return;
      const page = document.querySelector("main");
      const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 60;
      this.text.textContent = text || "No output yet.";
      if (atEnd) page.scrollTop = page.scrollHeight;
    } catch (error) {
      this.fail(error);
    }
  }
}
