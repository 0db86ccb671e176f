// The page: polls the runs and updates the open view.
import { fetchRuns, Unauthorized } from "./api.js";
import { Curves } from "./curves.js";
import { $, remember, remembered } from "./dom.js";
import { fromLink, toLink } from "./link.js";
import { Logs } from "./logs.js";
import { NoteDialog } from "./notes.js";
import { showNothing } from "./nothing.js";
import { Rows } from "./rows.js";
import { Runs } from "./runs.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";
import { Table } from "./table.js";

const SECONDS_BETWEEN_POLLS = 2;
const THEMES = ["Auto", "Light", "Dark"];

history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now: remove it from the address bar

const system = matchMedia("(prefers-color-scheme: dark)");
let theme = remembered("theme", "Auto");
function applyTheme() {
  $("theme").textContent = theme;
  document.documentElement.dataset.theme = theme === "Auto" ? (system.matches ? "dark" : "light") : theme.toLowerCase();
}
applyTheme();

let lost = "";
function fail(error) {
  lost = error instanceof Unauthorized ? error.message : `no response from the board (${error.message}); retrying`;
  showStatus();
}

const rows = new Rows();
const notes = new NoteDialog(() => poll());
const views = {
  curves: new Curves(fail),
  table: new Table(rows, { only: (run) => runs.only(run), edit: (run) => notes.open(run) }),
  samples: new Samples(fail),
  settings: new Settings(fail),
  logs: new Logs(fail),
};
let view = fromLink("view") in views ? fromLink("view") : "curves";
const runs = new Runs(rows, {
  changed: () => refresh(),
  focus: (run) => views.curves.focus(run),
  open: (name, run) => { views.logs.choose(run.id); open(name); },
});

// Draws the list and the open view. Results and settings are loaded first if the filter or the table needs them.
async function refresh() {
  runs.draw();
  try {
    if ((view === "table" || runs.needsRows) && (await rows.update(runs.all, { values: view === "table" }))) runs.draw();
    const blank = showNothing(runs);
    for (const one of Object.keys(views)) $(one).hidden = blank || one !== view;
    if (!blank) await views[view].show(runs.chosen);
  } catch (error) {
    fail(error);
  }
}

const tabs = [...document.querySelectorAll("#tabs button")];
const scrolled = {}; // each view keeps its scroll position
function open(name) {
  const main = document.querySelector("main");
  scrolled[view] = main.scrollTop;
  view = name;
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", tab.dataset.view === view);
    tab.tabIndex = tab.dataset.view === view ? 0 : -1;
  }
  toLink({ view: view === "curves" ? "" : view });
  showDrawer(false);
  refresh();
  main.scrollTop = scrolled[view] ?? 0;
}

function showDrawer(on) {
  $("runs").classList.toggle("open", on);
  $("drawer").setAttribute("aria-expanded", on);
}

let polledAt = 0;
let error = "";
let limit = "";
function showStatus() {
  const seconds = Math.round((Date.now() - polledAt) / 1000);
  $("pulse").textContent = !polledAt ? "connecting" : seconds < 3 ? "live" : `${seconds} s ago`;
  $("pulse").classList.toggle("lost", Boolean(lost));
  $("notice").hidden = !(lost || error || limit);
  $("notice").textContent = lost || (error && `cannot read the runs: ${error}`) || limit;
}

// The server sends only the runs that have changed since the last answer.
let sequence = 0;
let known = new Map(); // run ID → run
function merge(response) {
  const changed = new Map(response.runs.map((run) => [run.id, run]));
  known = new Map(response.ids.map((id) => [id, changed.get(id) ?? known.get(id)]).filter(([, run]) => run));
  sequence = known.size === response.ids.length ? response.sequence : 0;
  return [...known.values()];
}

let waiting = null;
async function poll() {
  clearTimeout(waiting);
  let pause = SECONDS_BETWEEN_POLLS;
  try {
    const response = await fetchRuns(sequence);
    const all = merge(response);
    lost = "";
    error = response.error;
    limit = response.notice;
    pause = Math.max(pause, response.refresh_seconds);
    polledAt = Date.now();
    $("root").textContent = $("root").title = response.root;
    const running = all.filter((run) => run.state === "running").length;
    document.title = running ? `${running} running · Paceline` : "Paceline board";
    notes.obstacle = response.read_only;
    runs.update(all, response.now, response.root);
    await refresh();
  } catch (error) {
    fail(error);
  }
  showStatus();
  clearTimeout(waiting);
  if (!document.hidden) waiting = setTimeout(poll, 1000 * pause);
}

function showTheme() {
  applyTheme();
  views.curves.redraw();
  refresh();
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    if (getComputedStyle($("drawer")).display !== "none") showDrawer(true);
    $("filter").focus();
  } else if (event.key === "Escape") showDrawer(false);
});
for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    next.focus();
    open(next.dataset.view);
  });
}
$("drawer").addEventListener("click", () => showDrawer(!$("runs").classList.contains("open")));
$("link").hidden = !navigator.clipboard; // without HTTPS, only pages on this machine may use the clipboard
$("link").addEventListener("click", async () => {
  await navigator.clipboard.writeText(location.href);
  $("link").textContent = "copied";
  setTimeout(() => { $("link").textContent = "copy link"; }, 1500);
});
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("theme", theme);
  showTheme();
});
system.addEventListener("change", showTheme);
addEventListener("hashchange", () => location.reload()); // the user has opened another link in this tab
setInterval(showStatus, 1000);
open(view);
poll();
