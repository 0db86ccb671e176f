// Requests to the board's server. The cookie that came with the page authenticates them.
export class Unauthorized extends Error {}

async function request(path, parameters = [], options = {}) {
  const query = new URLSearchParams(parameters).toString();
  const response = await fetch(query ? `${path}?${query}` : path, { signal: AbortSignal.timeout(60000), ...options });
  if (response.status === 401) throw new Unauthorized("the board was restarted: open the new URL that it printed");
  if (!response.ok) throw Object.assign(new Error(`${response.status} from ${path}`), { status: response.status, reason: await response.text() });
  return response;
}

// A setting or metric by its name. A name such as "constructor" would otherwise give a property that every object has.
export const lookUp = (table, name) => (table && Object.hasOwn(table, name) ? table[name] : undefined);

export const MAX_RUNS_IN_URL = 500; // a server rejects a URL of more than 64 kB

const byRun = (runs) => runs.map((run) => ["run", run]);

export const fetchRuns = async (after) => (await request("/api/runs", [["after", after]])).json();
export const fetchSettings = async (run) => (await request(`/api/runs/${run}/settings`)).json();
export const fetchSamples = async (run) => (await request(`/api/runs/${run}/samples`)).json();
export const fetchLog = async (run, rank, find) => (await request(`/api/runs/${run}/log`, [["rank", rank], ...(find ? [["find", find]] : [])])).json();
export const fetchLeaderboard = async (runs) => (await (await request("/api/leaderboard", byRun(runs))).json()).rows;
export const imageUrl = (run, name, images, version) =>
  `/api/runs/${run}/image?${new URLSearchParams([["name", name], ["images", images], ["v", version]])}`;

export async function saveNotes(run, notes) {
  const options = { method: "PUT", headers: { "content-type": "application/json" }, body: JSON.stringify(notes) };
  return (await request(`/api/runs/${run}/notes`, [], options)).json();
}

// Curves with all digits, for downloads; {run, name, images, seconds, mean, low, high}.
export const fetchExactSeries = async (runs, name) => (await (await request("/api/series", [...byRun(runs), ["name", name]])).json()).series;

// Curves as {run, name, values, images, seconds, mean, low, high}; the last five are arrays.
export async function fetchSeries(runs, names, points) {
  const parameters = [...byRun(runs), ...names.map((name) => ["name", name])];
  const response = await request("/api/series", [...parameters, ["points", points], ["format", "binary"]]);
  const content = await response.arrayBuffer();
  const length = new DataView(content).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(content, 4, length)));
  let position = 4 + length;
  return header.series.map((label) => {
    const series = { ...label };
    for (const row of header.rows) {
      series[row] = new Float32Array(content, position, label.points);
      position += 4 * label.points;
    }
    return series;
  });
}
