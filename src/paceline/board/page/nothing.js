// What the page shows if there is no run to show: the reason, and what to do.
import { $, empty, make } from "./dom.js";

// Shows a message if no run is selected, and returns whether it did.
export function showNothing(runs) {
  const blank = !runs.chosen.length;
  $("nothing").hidden = !blank;
  const key = JSON.stringify([blank, runs.root, runs.all.length, runs.matching.length]);
  if (blank && key !== $("nothing").dataset.key) $("nothing").replaceChildren(message(runs) ?? "");
  $("nothing").dataset.key = key;
  return blank;
}

function message(runs) {
  if (runs.root === undefined) return null; // the server has not answered yet
  if (!runs.all.length) return empty(`There are no runs in ${runs.root} yet.`, "Start a run, and it appears here: ", "paceline train dcgan --preset quick --out runs/first");
  if (!runs.matching.length) return empty("No run matches the filter.", "Search for a word in the name, state, tags or note, or for a condition such as ", "lr>0.01 tag:baseline");
  const list = make("span", { class: "only-narrow" }, "Open the list with the button “Runs”. ");
  return empty("No run is selected.", [list, "Click the circle next to a run in the list, or “all” above the list."]);
}
