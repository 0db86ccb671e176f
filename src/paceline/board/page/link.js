// The part of the address after "#" keeps the view, the selected runs, the zoom and the chart options.
// A link therefore opens the page as it was. The access token is never part of it.
const NAMES = ["view", "hide", "only", "filter", "charts", "axis", "scale", "smooth", "zoom", "chart", "sort", "columns"];

function parse() {
  const text = location.hash.slice(1);
  return new URLSearchParams(text.includes("=") ? text : { view: text });
}

export function fromLink(name) {
  return parse().get(name) || null;
}

export function toLink(changes) {
  const before = parse();
  const kept = NAMES.map((name) => [name, name in changes ? changes[name] : before.get(name)]);
  const text = new URLSearchParams(kept.filter(([, value]) => value)).toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}

// The first eight digits of an ID identify a run in a link.
export const shortId = (run) => run.id.slice(0, 8);

export function zoomFromLink() {
  const range = (fromLink("zoom") ?? "").split(",").map(Number);
  return range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

export const zoomToLink = (zoom) => toLink({ zoom: zoom ? zoom.map((one) => Number(one.toPrecision(9))).join(",") : "" });
