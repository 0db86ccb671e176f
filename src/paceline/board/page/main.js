// The page: polls the runs and updates the open view.
import { fetchRuns, Unauthorized } from "./api.js";
import { Curves } from "./curves.js";
import { $, remember, remembered } from "./dom.js";
import { Logs } from "./logs.js";
import { Runs } from "./runs.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";

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

const views = { curves: new Curves(fail), samples: new Samples(fail), settings: new Settings(fail), logs: new Logs(fail) };
let view = "curves";
const runs = new Runs({
  changed: () => views[view].show(runs.chosen),
  focus: (run) => views.curves.focus(run),
  open: (name, run) => { views.logs.run = run.id; views.logs.rank = 0; open(name); },
});

function open(name) {
  view = name in views ? name : "curves";
  for (const tab of document.querySelectorAll("#tabs button")) tab.setAttribute("aria-selected", tab.dataset.view === view);
  for (const one of Object.keys(views)) $(one).hidden = one !== view;
  history.replaceState(null, "", view === "curves" ? location.pathname : `#${view}`);
  $("runs").classList.remove("open");
  views[view].show(runs.chosen);
}

let polledAt = 0;
let error = "";
function showStatus() {
  const seconds = Math.round((Date.now() - polledAt) / 1000);
  $("pulse").textContent = !polledAt ? "connecting" : seconds < 3 ? "live" : `${seconds} s ago`;
  $("pulse").classList.toggle("lost", Boolean(lost));
  $("notice").hidden = !(lost || error);
  $("notice").textContent = lost || (error && `cannot read the runs: ${error}`);
}

let waiting = null;
async function poll() {
  clearTimeout(waiting);
  let pause = SECONDS_BETWEEN_POLLS;
  try {
    const response = await fetchRuns();
    lost = "";
    error = response.error;
    pause = Math.max(pause, response.refresh_seconds);
    polledAt = Date.now();
    $("root").textContent = $("root").title = response.root;
    const running = response.runs.filter((run) => run.state === "running").length;
    document.title = running ? `${running} running · Paceline` : "Paceline board";
    runs.update(response.runs, response.now);
    await views[view].show(runs.chosen);
  } catch (error) {
    fail(error);
  }
  showStatus();
  if (!document.hidden) waiting = setTimeout(poll, 1000 * pause);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
for (const tab of document.querySelectorAll("#tabs button")) tab.addEventListener("click", () => open(tab.dataset.view));
$("drawer").addEventListener("click", () => $("drawer").setAttribute("aria-expanded", $("runs").classList.toggle("open")));
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("theme", theme);
  applyTheme();
  runs.draw();
  views.curves.redraw();
});
system.addEventListener("change", () => { applyTheme(); runs.draw(); views.curves.redraw(); });
setInterval(showStatus, 1000);
if (location.hash) open(location.hash.slice(1));
poll();
