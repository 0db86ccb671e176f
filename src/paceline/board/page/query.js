// The filter for runs: words in the name, state, tags or note, and conditions such as lr>0.01, recipe=dcgan or tag:baseline.
import { lookUp } from "./api.js";

const CONDITION = /^([^\s=<>!:"]+)(!=|<=|>=|=|<|>|:)(.*)$/;

export function parseQuery(text) {
  const terms = text.trim().match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [];
  return terms.map((term) => {
    const found = CONDITION.exec(term);
    const clean = (part) => part.replaceAll('"', "").toLowerCase();
    return found ? { name: found[1], sign: found[2], value: clean(found[3]), word: clean(term) } : { word: clean(term) };
  });
}

const OWN = new Set(["tag", "state", "name", "note", "host"]);

// Whether a filter compares settings or metrics, which the page loads only on demand.
export const needsRows = (query) => query.some((term) => term.sign && !(term.sign === ":" && OWN.has(term.name)));

export function matches(run, row, query) {
  return query.every((term) => {
    const anywhere = () => `${run.name} ${run.state} ${run.tags.join(" ")} ${run.note}`.toLowerCase().includes(term.word);
    if (!term.sign) return anywhere();
    if (!term.value) return true; // the user is still typing
    if (term.sign === ":") return own(run, term) ?? anywhere();
    const value = find(run, row, term.name);
    if (value === undefined) return term.sign === "!=" && row !== undefined;
    return compare(value, term.sign, term.value);
  });
}

function own(run, { name, value }) {
  if (name === "tag") return run.tags.some((tag) => tag.toLowerCase() === value);
  return OWN.has(name) ? String(run[name] ?? "").toLowerCase().includes(value) : null;
}

// A setting by its full name or by the part after its last dot, or the last value of a metric.
function find(run, row, name) {
  if (name === "state" || name === "name" || name === "host") return run[name];
  const settings = row?.settings ?? {};
  if (Object.hasOwn(settings, name)) return settings[name];
  const key = Object.keys(settings).find((one) => one.endsWith(`.${name}`));
  return key ? settings[key] : lookUp(run.last_values, name) ?? undefined;
}

function compare(value, sign, wanted) {
  const text = String(value).toLowerCase();
  const [a, b] = [Number(text), Number(wanted)];
  const numbers = text !== "" && Number.isFinite(a) && Number.isFinite(b);
  if (sign === "=") return numbers ? a === b : text === wanted;
  if (sign === "!=") return numbers ? a !== b : text !== wanted;
  if (!numbers) return false;
  return sign === "<" ? a < b : sign === ">" ? a > b : sign === "<=" ? a <= b : a >= b;
}
