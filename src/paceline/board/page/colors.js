// A run's colour depends on its ID, so it stays the same when runs are added or removed and when the page is reloaded.
import { remember, remembered } from "./dom.js";

const LIGHT = ["#1f6fa8", "#d1622b", "#2f8a57", "#a23b72", "#7a5cc0", "#b08a12", "#17879a", "#c2413f", "#5d7a29", "#7d6558",
  "#334a8a", "#8a1f2b", "#4aa3df", "#c57bd6", "#8fae1f", "#e58f8a"];
const DARK = ["#62b0e8", "#f0935f", "#6cc893", "#e07fb4", "#ab93ee", "#dcb94a", "#4fc4d6", "#f08583", "#a5c765", "#bfa294",
  "#8ea2e8", "#c96a74", "#8fd0ff", "#e3b3f0", "#cfe36a", "#ffc2bd"];
const MAX_REMEMBERED = 2000;

const book = new Map(Object.entries(remembered("colors", {}))); // run ID → index of its colour

// Gives each new run the colour that its ID selects or, if another run has that colour, the next free one.
export function assignColors(ids) {
  const unknown = ids.filter((id) => !book.has(id)).sort();
  if (!unknown.length) return;
  let next = LIGHT.length; // the first colour after the fixed ones that may be free
  const taken = new Set(ids.filter((id) => book.has(id)).map((id) => book.get(id)));
  for (const id of unknown) {
    const preferred = parseInt(id.slice(0, 8), 16) % LIGHT.length;
    const slots = LIGHT.map((_, step) => (preferred + step) % LIGHT.length);
    while (taken.has(next)) next++;
    const index = slots.find((slot) => !taken.has(slot)) ?? next;
    taken.add(index);
    book.set(id, index);
  }
  const known = new Set(ids);
  if (book.size > MAX_REMEMBERED) for (const id of [...book.keys()].filter((one) => !known.has(one))) book.delete(id);
  remember("colors", Object.fromEntries(book));
}

export const isDark = () => document.documentElement.dataset.theme === "dark";

// After the fixed colours, hues are spaced around the colour wheel.
export function colorOf(run, dark = isDark()) {
  const index = book.get(run.id) ?? 0;
  if (index < LIGHT.length) return (dark ? DARK : LIGHT)[index];
  const hue = Math.round((index * 137.508) % 360);
  return dark ? `hsl(${hue} 60% 68%)` : `hsl(${hue} 55% 42%)`;
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
