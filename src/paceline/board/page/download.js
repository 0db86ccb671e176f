// Downloads: the values of a chart or a table as CSV, and a chart as PNG.
import { fetchExactSeries } from "./api.js";
import { colorOf, css } from "./colors.js";
import { make } from "./dom.js";

const WIDTH = 1000, HEIGHT = 520, TITLE = 34, LINE = 20, DENSITY = 2;
const MAX_LEGEND_ROWS = 24;

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = make("a", { href: url, download: name });
  document.body.append(link); // some browsers ignore a link outside the page
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

const fileName = (name, suffix) => `${name.replaceAll(/[^\w.-]+/g, "-").replaceAll(/^-+|-+$/g, "") || "board"}.${suffix}`;

// A spreadsheet would run a cell that starts with one of these characters as a formula, so an apostrophe is put before such text.
const FORMULA = /^[=+\-@\t\r]/;

function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = FORMULA.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function saveTable(name, rows) {
  save(fileName(name, "csv"), new Blob([rows.map((row) => `${row.map(cell).join(",")}\n`).join("")], { type: "text/csv" }));
}

// One line per point. If a curve is long, a point is the mean of several values, and low and high are their range.
export async function saveCsv(name, runs) {
  const columns = ["images", "seconds", "mean", "low", "high"];
  const found = runs.length ? await fetchExactSeries(runs.map((run) => run.id), name) : [];
  const lines = found.flatMap((series) => {
    const run = runs.find((one) => one.id === series.run)?.name ?? series.run;
    return series.images.map((_, i) => [run, ...columns.map((column) => series[column][i])]);
  });
  saveTable(name, [["run", ...columns], ...lines]);
}

export function savePng(name, plot) {
  const runs = plot.curves.map((curve) => curve.run);
  const rows = Math.ceil(Math.min(runs.length, MAX_LEGEND_ROWS) / 2);
  const canvas = make("canvas");
  canvas.width = WIDTH * DENSITY;
  canvas.height = (TITLE + HEIGHT + rows * LINE + 12) * DENSITY;
  const context = canvas.getContext("2d");
  context.scale(DENSITY, DENSITY);
  context.fillStyle = css("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = css("--ink");
  context.font = "600 15px system-ui, sans-serif";
  context.fillText(name, 12, 23);
  context.translate(0, TITLE);
  plot.draw(context, WIDTH, HEIGHT);
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const [number, run] of runs.slice(0, MAX_LEGEND_ROWS).entries()) {
    const x = 20 + (number % 2) * (WIDTH / 2), y = HEIGHT + LINE * (Math.floor(number / 2) + 0.5) + 2;
    context.fillStyle = colorOf(run);
    context.beginPath();
    context.arc(x, y, 4, 0, 7);
    context.fill();
    context.fillStyle = css("--ink");
    const last = number === MAX_LEGEND_ROWS - 1 && runs.length > MAX_LEGEND_ROWS;
    context.fillText(last ? `and ${runs.length - number} more runs` : run.name, x + 12, y, WIDTH / 2 - 50);
  }
  canvas.toBlob((blob) => save(fileName(name, "png"), blob));
}
