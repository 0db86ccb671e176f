// The end of a run's log, a search through the log, and the reason for a failure.
import { fetchLog } from "./api.js";
import { $, make } from "./dom.js";
import { whole } from "./numbers.js";

const TYPING_MS = 250;

export class Logs {
  constructor(fail) {
    this.fail = fail;
    this.rank = 0;
    this.select = make("select", { "aria-label": "run", onchange: () => this.choose(this.select.value) });
    this.ranks = make("select", { "aria-label": "rank", onchange: () => { this.rank = Number(this.ranks.value); this.load(); } });
    this.find = make("input", { type: "search", placeholder: "search the log", "aria-label": "search the log", spellcheck: "false", maxlength: 200, oninput: () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.load(), TYPING_MS); } });
    this.count = make("span", { class: "dim", role: "status" });
    this.banner = make("p", { class: "banner", hidden: true });
    this.text = make("pre", { class: "log", tabindex: 0 });
    $("logs").append(make("div", { class: "tools" }, this.select, this.ranks, this.find, this.count), this.banner, this.text);
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
    if (!run) return;
    this.select.value = run.id;
    this.banner.hidden = !run.reason;
    this.banner.classList.toggle("calm", run.state !== "failed");
    this.banner.textContent = `${run.state}: ${run.reason}`;
    const wanted = this.find.value.trim();
    try {
      const answer = await fetchLog(run.id, this.rank, wanted);
      if (run.id !== this.run || wanted !== this.find.value.trim()) return; // the user has chosen something else
      this.showRanks(answer.ranks);
      if (answer.matches) this.showMatches(answer, wanted);
      else {
        this.count.textContent = "";
        this.showText(answer.text || (answer.ranks.length ? "The run has not printed anything yet." : "This run has no logs. A run writes logs/rank-N.txt while it trains."));
      }
    } catch (error) {
      this.fail(error);
    }
  }

  showRanks(ranks) {
    if (ranks.join() === this.known) return;
    this.known = ranks.join();
    this.ranks.replaceChildren(...ranks.map((rank) => make("option", { value: rank, selected: rank === this.rank }, `rank ${rank}`)));
    this.ranks.hidden = ranks.length < 2;
  }

  showText(text) {
    this.matched = null;
    if (this.text.textContent === text) return;
    const page = document.querySelector("main");
    const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 60;
    this.text.textContent = text;
    if (atEnd) page.scrollTop = page.scrollHeight;
  }

  showMatches({ matches, total, searched_share: share }, wanted) {
    const shown = matches.length < total ? `; the last ${whole(matches.length)} are shown` : "";
    const part = share < 1 ? ` in the last ${Math.round(100 * share)} % of the log` : "";
    this.count.textContent = `${whole(total)} ${total === 1 ? "line" : "lines"}${part}${shown}`;
    const key = JSON.stringify([wanted, matches]);
    if (key === this.matched) return;
    this.matched = key;
    const lines = matches.flatMap(({ line, text }) => [...(share < 1 ? [] : [make("span", { class: "dim" }, `${String(line).padStart(6)}  `)]), ...marked(text, wanted), "\n"]);
    this.text.replaceChildren(...(lines.length ? lines : ["No line contains this text. The search ignores case."]));
  }
}

function marked(text, wanted) {
  const lower = text.toLowerCase(), word = wanted.toLowerCase();
  const parts = [];
  let from = 0;
  if (lower.length === text.length) for (let at = lower.indexOf(word); at >= 0; at = lower.indexOf(word, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}
