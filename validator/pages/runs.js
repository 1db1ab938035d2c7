// The list of runs and the queue.
import { ask } from "./api.js";
import { el, table } from "./dom.js";
import { count, loss, share } from "./format.js";

const EVERY_MS = 3000;

export function pill(state) {
  return el("span", { class: "pill", "data-state": state }, state);
}

/** `opened(runs)`: true where it has gone on to a run by itself. */
export function showRuns(main, said, opened) {
  const closed = new AbortController();
  const body = el("div", {}, el("p", { class: "empty" }, "Reading the runs…"));
  main.replaceChildren(el("div", { class: "page-head" }, el("h1", {}, "Runs")), body);
  let timer = 0;
  let first = true;

  async function read() {
    let wait = EVERY_MS;
    try {
      const runs = await ask("/v1/page/runs", closed.signal);
      if (closed.signal.aborted || (first && opened(runs))) return;
      first &&= !runs.length;
      said("Live", "live");
      body.replaceChildren(runs.length ? list(runs) : nothing());
    } catch (error) {
      if (closed.signal.aborted) return;
      wait = 1000 * (error.retryAfter ?? 10);
      said(`Not live: ${error.message}`, "bad");
    }
    timer = setTimeout(read, wait);
  }

  read();
  return { close() { closed.abort(); clearTimeout(timer); } };
}

function nothing() {
  return el("div", { class: "card" }, el("p", { class: "empty" }, "No run has been submitted yet. "),
    el("p", {}, "Submit one: ", el("code", {}, "iota run submit RUN.toml")));
}

function list(runs) {
  const active = runs.filter((run) => !["queued", "finished"].includes(run.state));
  const queue = runs.filter((run) => run.state === "queued").sort((a, b) => a.place - b.place);
  const done = runs.filter((run) => run.state === "finished").reverse();
  const parts = [];
  if (active.length) parts.push(el("h2", {}, "Now"), el("div", { class: "run-cards" }, ...active.map(one)));
  if (queue.length) parts.push(el("h2", {}, "Queue"), rows(queue, "Queued runs"));
  if (done.length) parts.push(el("h2", {}, "Finished"), rows(done, "Finished runs"));
  return el("div", {}, ...parts);
}

const address = (run) => `#/run/${encodeURIComponent(run.name)}`;

function one(run) {
  return el("a", { class: "card run-card", href: address(run) },
    el("span", { class: "run-name" }, run.name), pill(run.state),
    el("progress", { max: run.steps || 1, value: run.step, "aria-label": "Steps done" }),
    el("span", {}, `step ${count(run.step)} of ${count(run.steps)} · ${share(run.step / (run.steps || 1), 0)}`),
    el("span", { class: "muted" }, run.waiting_for ? `waits for ${run.waiting_for}` : `loss ${loss(run.loss)}`));
}

function rows(runs, caption) {
  const columns = [{ name: "Run" }, { name: "State" }, { name: "Steps", number: true }, { name: "Loss", number: true }, { name: "Root" }];
  return table(caption, columns, runs.map((run) => [
    el("a", { href: address(run) }, run.name),
    run.state === "queued" ? `place ${run.place}` : run.state,
    count(run.steps), loss(run.loss), run.root ? el("code", { title: run.root }, `${run.root.slice(0, 12)}…`) : "–",
  ]));
}
