// What the board's server is asked. The cookie that came with the page is the key.
export class Refused extends Error {}

async function ask(path, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(query ? `${path}?${query}` : path, { signal: AbortSignal.timeout(60000) });
  if (answer.status === 401) throw new Refused("the board was started anew: open the URL that it printed");
  if (!answer.ok) throw new Error(`${answer.status} from ${path}`);
  return answer;
}

export const askRuns = async () => (await ask("/api/runs")).json();
export const askSettings = async (run) => (await ask(`/api/runs/${run}/settings`)).json();
export const askSamples = async (run) => (await (await ask(`/api/runs/${run}/samples`)).json()).samples;
export const askLog = async (run, rank) => (await ask(`/api/runs/${run}/log`, [["rank", rank]])).json();
export const pictureOf = (run, name, images, version) =>
  `/api/runs/${run}/picture?${new URLSearchParams([["name", name], ["images", images], ["v", version]])}`;

// Curves as {run, name, values, images, seconds, mean, low, high}; the last five are arrays.
export async function askSeries(runs, names, points) {
  const parameters = [...runs.map((run) => ["run", run]), ...names.map((name) => ["name", name])];
  const answer = await ask("/api/series", [...parameters, ["points", points], ["format", "binary"]]);
  const content = await answer.arrayBuffer();
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
