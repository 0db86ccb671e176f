// The page: looks at the runs again and again, and has the view that is open show them.
import { askRuns, Refused } from "./api.js";
import { Curves } from "./curves.js";
import { $, remember, remembered } from "./dom.js";
import { Logs } from "./logs.js";
import { Runs } from "./runs.js";
import { Samples } from "./samples.js";
import { Settings } from "./settings.js";

const SECONDS_BETWEEN_LOOKS = 2;
const THEMES = ["Auto", "Light", "Dark"];

history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now, and no longer in sight

const system = matchMedia("(prefers-color-scheme: dark)");
let theme = remembered("theme", "Auto");
function dress() {
  $("theme").textContent = theme;
  document.documentElement.dataset.theme = theme === "Auto" ? (system.matches ? "dark" : "light") : theme.toLowerCase();
}
dress();

let lost = "";
function fail(error) {
  lost = error instanceof Refused ? error.message : `no answer from the board (${error.message}); trying again`;
  tell();
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

let looked = 0;
let trouble = "";
function tell() {
  const seconds = Math.round((Date.now() - looked) / 1000);
  $("pulse").textContent = !looked ? "looking" : seconds < 3 ? "live" : `${seconds} s ago`;
  $("pulse").classList.toggle("lost", Boolean(lost));
  $("notice").hidden = !(lost || trouble);
  $("notice").textContent = lost || (trouble && `the runs cannot be read: ${trouble}`);
}

let waiting = null;
async function look() {
  clearTimeout(waiting);
  let pause = SECONDS_BETWEEN_LOOKS;
  try {
    const answer = await askRuns();
    lost = "";
    trouble = answer.trouble;
    pause = Math.max(pause, answer.every_seconds);
    looked = Date.now();
    $("root").textContent = $("root").title = answer.root;
    const running = answer.runs.filter((run) => run.state === "running").length;
    document.title = running ? `${running} running · Paceline` : "Paceline board";
    runs.update(answer.runs, answer.now);
    await views[view].show(runs.chosen);
  } catch (error) {
    fail(error);
  }
  tell();
  if (!document.hidden) waiting = setTimeout(look, 1000 * pause);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
for (const tab of document.querySelectorAll("#tabs button")) tab.addEventListener("click", () => open(tab.dataset.view));
$("drawer").addEventListener("click", () => $("drawer").setAttribute("aria-expanded", $("runs").classList.toggle("open")));
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remember("theme", theme);
  dress();
  runs.draw();
  views.curves.redraw();
});
system.addEventListener("change", () => { dress(); runs.draw(); views.curves.redraw(); });
setInterval(tell, 1000);
if (location.hash) open(location.hash.slice(1));
look();
