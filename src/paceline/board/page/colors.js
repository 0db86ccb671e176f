// One fixed color per run, by index; after the first ten, hues are spaced around the color wheel.
const LIGHT = ["#1f6fa8", "#d1622b", "#2f8a57", "#a23b72", "#7a5cc0", "#b08a12", "#17879a", "#c2413f", "#5d7a29", "#7d6558"];
const DARK = ["#62b0e8", "#f0935f", "#6cc893", "#e07fb4", "#ab93ee", "#dcb94a", "#4fc4d6", "#f08583", "#a5c765", "#bfa294"];

export const isDark = () => document.documentElement.dataset.theme === "dark";

export function colorOf(index) {
  if (index < LIGHT.length) return (isDark() ? DARK : LIGHT)[index];
  const hue = Math.round((index * 137.508) % 360);
  return isDark() ? `hsl(${hue} 60% 68%)` : `hsl(${hue} 55% 42%)`;
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
