// Results and settings of the runs, for the table and for filters that compare settings. Loaded on demand.
import { fetchLeaderboard, MAX_RUNS_IN_URL } from "./api.js";

export class Rows {
  constructor() {
    this.kept = new Map(); // run ID → row
  }

  get(id) {
    return this.kept.get(id);
  }

  // Fetches the rows of runs that are new or, with `values`, have changed; returns whether any row was fetched.
  async update(runs, { values }) {
    const stale = runs.filter((run) => {
      const row = this.kept.get(run.id);
      return !row || (values && row.revision !== run.revision);
    });
    if (!stale.length) return false;
    const all = stale.length === runs.length || stale.length > MAX_RUNS_IN_URL;
    const rows = await fetchLeaderboard(all ? [] : stale.map((run) => run.id));
    for (const row of rows) this.kept.set(row.run, row);
    return true;
  }
}
