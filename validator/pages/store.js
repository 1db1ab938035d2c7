// What is known of one run: the overview and its members, the curve in columns of bounded length, the marks.
import { ask, runPath } from "./api.js";

const POINTS = 1000;
const MOST_POINTS = 2500; // then the history is read anew, thinned by the server
const MOST_MARKS = 600;
const COLUMNS = ["step", "time_s", "tokens", "loss", "loss_min", "loss_max", "norm", "tokens_per_s"];

export class RunStore extends EventTarget {
  constructor(run) {
    super();
    this.run = run;
    this.overview = null;
    this.members = new Map();
    this.history = null;
    this.reading = false;
    this.wanted = null;
    this.closed = new AbortController();
    this.readHistory(); // beside the overview, not behind it
  }

  close() { this.closed.abort(); }

  say(...topics) {
    this.dispatchEvent(new CustomEvent("change", { detail: new Set(topics) }));
  }

  heard(kind, data) {
    if (kind === "overview") {
      const again = this.overview !== null; // after a lost connection
      this.overview = data;
      this.members = new Map(data.members.map((row) => [row[0], row]));
      delete data.members;
      this.say("overview", "members", "merges", "notes");
      if (again) this.readHistory();
      return;
    }
    if (kind !== "update" || !this.overview) return;
    const topics = new Set();
    for (const [name, value] of Object.entries(data.set ?? {})) {
      this.overview[name] = value;
      topics.add(name === "merges" || name === "notes" ? name : "overview");
    }
    for (const row of data.rows ?? []) this.members.set(row[0], row);
    for (const id of data.gone ?? []) this.members.delete(id);
    if (data.rows || data.gone) topics.add("members");
    if (data.marks?.length) topics.add("disruptions");
    if (data.reload) this.readHistory();
    else if (this.addSteps(data.steps ?? [], data.marks ?? [])) topics.add("history");
    this.say(...topics);
  }

  addSteps(steps, marks) {
    const found = this.history;
    if (!found || this.reading) {
      if (steps.length || marks.length) this.stale = true;
      return false;
    }
    let last = found.step.at(-1) ?? -1;
    for (const [step, timeS, tokens, loss, norm, tokensPerS, holdout] of steps) {
      if (step <= last) continue;
      if (step > last + 1) return this.readHistory(), false; // something is missing
      [step, timeS, tokens, loss, loss, loss, norm, tokensPerS].forEach((value, index) => found[COLUMNS[index]].push(value));
      if (holdout !== null) found.holdout.push([step, timeS, tokens, holdout]);
      last = step;
      found.num_steps += 1;
    }
    for (const [step, kind, words] of marks) found.marks.push([step, kind, 1, words]);
    if (found.step.length > MOST_POINTS || found.marks.length > MOST_MARKS) this.readHistory();
    return steps.length > 0 || marks.length > 0;
  }

  async readHistory() {
    if (this.reading) {
      this.stale = true;
      return;
    }
    this.reading = true;
    this.stale = false;
    try {
      this.history = await ask(`${runPath(this.run)}/history?points=${POINTS}`, this.closed.signal);
      this.trouble = null;
    } catch (error) {
      if (this.closed.signal.aborted) return;
      this.trouble = error;
      setTimeout(() => this.closed.signal.aborted || this.readHistory(), 1000 * (error.retryAfter ?? 5));
    } finally {
      this.reading = false;
    }
    this.say("history", "disruptions");
    if (this.stale) setTimeout(() => this.closed.signal.aborted || this.readHistory(), 1000);
  }
}
