// One run: what it is, how far it has come, and its panels; drawn anew at most a few times a second, and not while hidden.
import { Live } from "./live.js";
import { runPath } from "./api.js";
import { RunStore } from "./store.js";
import { el, text } from "./dom.js";
import { count, duration, loss, plural, scaled, share, speed } from "./format.js";
import { pill } from "./runs.js";
import { Curves } from "./curves.js";
import { PipelineMap } from "./map.js";
import { Costs, Disruptions, Merges } from "./tables.js";
import { Cases, Scores } from "./scores.js";
import { Journal } from "./journal.js";

const DRAW_MS = 250;

export class RunPage {
  constructor(main, run, said) {
    this.store = new RunStore(run);
    this.main = main;
    this.head = new Head();
    const { store } = this;
    this.wide = [new Curves(store), new PipelineMap(store)];
    this.left = [new Disruptions(store), new Scores(store)];
    this.right = [new Merges(store), new Cases(store), new Costs(store)];
    this.last = [new Journal(store)];
    this.panels = [...this.wide, ...this.left, ...this.right, ...this.last];
    this.topics = new Set();
    this.onChange = (event) => this.wanted(event.detail);
    this.onVisible = () => document.hidden || this.wanted(new Set());
    this.onTheme = () => this.wanted(new Set(["theme", "history"]));
    this.store.addEventListener("change", this.onChange);
    document.addEventListener("visibilitychange", this.onVisible);
    addEventListener("themechange", this.onTheme);
    this.notice = el("p", { class: "empty", role: "status" }, `Reading run ${run}…`);
    main.replaceChildren(this.notice);
    this.live = new Live(`${runPath(run)}/live`, (kind, data) => this.store.heard(kind, data), (words, tone) => {
      said(words, tone);
      if (!this.store.overview) text(this.notice, tone === "bad" ? words : `Reading run ${run}…`);
    });
  }

  close() {
    this.live.stop();
    this.store.close();
    clearTimeout(this.timer);
    this.store.removeEventListener("change", this.onChange);
    document.removeEventListener("visibilitychange", this.onVisible);
    removeEventListener("themechange", this.onTheme);
    for (const panel of this.panels) panel.close?.();
  }

  wanted(topics) {
    for (const topic of topics) this.topics.add(topic);
    if (this.timer || document.hidden) return;
    this.timer = setTimeout(() => this.draw(), this.drawn ? DRAW_MS : 0);
  }

  draw() {
    this.timer = 0;
    const { overview } = this.store;
    if (!overview) return;
    if (!this.drawn) {
      this.drawn = true;
      this.main.replaceChildren(this.head.node, el("div", { class: "grid" },
        ...nodes(this.wide), el("div", { class: "column" }, ...nodes(this.left)), el("div", { class: "column" }, ...nodes(this.right)), ...nodes(this.last)));
      this.topics = new Set(["overview", "members", "history", "merges", "notes", "disruptions"]);
    }
    const topics = this.topics;
    this.topics = new Set();
    if (topics.has("overview") || topics.has("history")) this.head.draw(this.store);
    for (const panel of this.panels) {
      if (panel.topics.some((topic) => topics.has(topic))) panel.draw(topics);
    }
    if (this.store.history && !this.complete) {
      this.complete = true;
      requestAnimationFrame(() => performance.mark("first-screen"));
    }
  }
}

const nodes = (panels) => panels.map((panel) => panel.node);

/** Name, state, progress and the few numbers that matter. */
class Head {
  constructor() {
    this.name = el("h1", {});
    this.state = el("span", {});
    this.facts = el("p", { class: "muted facts" });
    this.progress = el("progress", { max: 1, value: 0, "aria-label": "Steps done" });
    this.progressText = el("span", { class: "muted" });
    this.waits = el("p", { class: "notice", role: "status", hidden: true });
    this.tiles = el("dl", { class: "tiles" });
    this.values = new Map();
    this.node = el("div", { class: "page-head" }, el("div", { class: "title" }, this.name, this.state), this.facts,
      el("div", { class: "progress" }, this.progress, this.progressText), this.waits, this.tiles);
  }

  /** `said`: a number, and its unit behind a blank. */
  tile(name, said, note = "") {
    const [value, ...unit] = said.split(" ");
    let found = this.values.get(name);
    if (!found) {
      found = { value: el("span", {}), unit: el("small", {}), note: el("dd", { class: "note" }) };
      this.values.set(name, found);
      this.tiles.append(el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, found.value, " ", found.unit), found.note));
    }
    text(found.value, value);
    text(found.unit, unit.join(" "));
    text(found.note, note);
  }

  draw(store) {
    const { overview, history } = store;
    const { summary, facts } = overview;
    text(this.name, summary.name);
    if (this.state.textContent !== summary.state) this.state.replaceChildren(pill(summary.state));
    text(this.facts, `${scaled(facts.num_parameters)} parameters · ${plural(facts.stages.length, "stage")} · ${facts.lanes ? `${plural(facts.lanes, "lane")} of ${plural(facts.inner_steps, "inner step")}` : plural(facts.microbatches, "microbatch").replace("chs", "ches")} · ${count(facts.tokens_per_step)} tokens a ${facts.lanes ? "round" : "step"}${facts.update_delay ? " · delayed updates" : ""}${facts.boundary_code === "raw" ? "" : ` · ${facts.boundary_code} boundaries`}`);
    this.progress.max = summary.steps || 1;
    this.progress.value = summary.step;
    text(this.progressText, `step ${count(summary.step)} of ${count(summary.steps)} · ${share(summary.step / (summary.steps || 1), 1)}${left(summary, history)}`);
    this.drawWaits(summary, facts.stages.map((_, stage) => stage).filter((stage) => ![...store.members.values()].some((row) => row[2] === stage)));
    this.drawTiles(overview, history);
  }

  drawWaits(summary, unserved) {
    let words = "";
    if (summary.stall) {
      const waits = summary.stall.waits.slice(0, 3).map((wait) => `${wait.who}: ${wait.what} (${duration(wait.waited_s)})`);
      words = `Stalled, nothing sealed for ${duration(summary.stall.no_seal_s)}: waits for ${waits.join("; ") || "nothing known"}`;
    } else if (summary.waiting_for && (summary.state !== "running" || unserved.length)) words = `Waits for ${summary.waiting_for}`;
    else if (summary.state === "queued") words = `In the queue at place ${summary.place}: it begins when the runs before it have finished`;
    else if (summary.state === "finished" && summary.root) words = `Finished. Run root ${summary.root}`;
    this.waits.hidden = !words;
    this.waits.classList.toggle("bad", Boolean(summary.stall));
    text(this.waits, words);
  }

  drawTiles(overview, history) {
    const last = history?.holdout.at(-1);
    const final = overview.final_holdout_loss;
    this.tile("Loss", loss(overview.summary.loss), history?.step.length ? `step ${count(history.step.at(-1))}` : "no step sealed yet");
    this.tile("Hold-out", loss(final ?? last?.[3]), final !== null ? "after the last step" : last ? `before step ${count(last[0])}` : "not measured yet");
    this.tile("Speed", overview.tokens_per_s ? speed(overview.tokens_per_s) : "–", overview.tokens_per_s ? `${scaled(overview.tokens_per_s * overview.facts.flops_per_token, "FLOP/s")} useful` : "");
    this.tile("MFU", overview.mfu ? share(overview.mfu) : "–", overview.mfu ? "of what its members' devices can, as they say" : "not known: a member hasn't said what it can");
    this.tile("Members", count(overview.num_members), `${count(overview.num_joined)} joined, ${count(overview.num_gone)} gone`);
    this.tile("Trained on", history?.tokens.length ? `${scaled(history.tokens.at(-1))} tokens` : "–", history?.time_s.length ? `in ${duration(history.time_s.at(-1))}` : "");
    this.tile("Work redone", count(overview.num_voids), overview.num_voids ? "partial sums void" : "nothing void");
  }
}

function left(summary, history) {
  const steps = history?.step.length ?? 0;
  if (summary.state !== "running" || steps < 5) return "";
  const from = Math.max(0, steps - 20);
  const perStep = (history.time_s.at(-1) - history.time_s[from]) / (history.step.at(-1) - history.step[from]);
  return ` · about ${duration((summary.steps - summary.step) * perStep)} left`;
}
