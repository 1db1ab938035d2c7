// The miner's page: what it does and waits for, its machine, what it used, its score with its terms, its log; caps and Start/Stop
// with the token.
import { Refused, ask, refusalOf } from "./api.js";
import { card, el, table, text } from "./dom.js";
import { bytes, count, duration, scaled, share, short, time } from "./format.js";
import { facts } from "./facts.js";
import { Log } from "./log.js";
import { Machine } from "./machine.js";
import { themeSwitch } from "./switch.js";
import { why } from "./why.js";

const EVERY_MS = 2000;
const SCORE_EVERY_MS = 15000;
const STATES = { stopped: "stopped", resting: "resting", looking: "looking for a run", joining: "joining", waiting: "waiting", working: "at work" };
const TONES = { stopped: "queued", resting: "queued", looking: "waiting", joining: "waiting", waiting: "waiting", working: "running" };

const main = document.getElementById("main");
const connection = document.getElementById("connection");

function said(words, tone) {
  text(connection, words);
  connection.dataset.tone = tone;
}

/** A change: with the token that is kept for as long as this tab is open. */
async function change(path, body) {
  const token = controls.token.value.trim();
  sessionStorage.setItem("iota-miner-token", token);
  let response;
  try {
    response = await fetch(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(30000) });
  } catch {
    throw new Refused({ reason: "the miner doesn't answer" }, 0);
  }
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

class Head {
  constructor() {
    this.name = el("h1", {});
    this.state = el("span", { class: "pill" });
    this.waits = el("p", { class: "notice", role: "status", hidden: true });
    this.facts = el("p", { class: "muted facts" });
    this.told = el("p", { class: "notice", hidden: true });
    this.progress = el("progress", { max: 1, value: 0, "aria-label": "Steps of the run done" });
    this.progressText = el("span", { class: "muted" });
    this.bar = el("div", { class: "progress", hidden: true }, this.progress, this.progressText);
    this.node = el("div", { class: "page-head" }, el("div", { class: "title" }, this.name, this.state), this.facts, this.bar, this.waits, this.told);
  }

  draw(view) {
    text(this.name, `Miner ${short(view.hotkey)}`);
    this.name.title = view.hotkey;
    text(this.state, STATES[view.state]);
    this.state.dataset.state = TONES[view.state];
    const { part } = view;
    text(this.facts, part ? `run ${part.run}${part.stage === null ? "" : ` · stage ${part.stage} of ${part.num_stages}, layers ${part.first_layer} to ${part.last_layer}`} · ${view.device} · validator ${view.validator}` : view.validator ? `validator ${view.validator}` : view.device);
    this.bar.hidden = !part;
    if (part) {
      this.progress.max = part.steps || 1;
      this.progress.value = part.step;
      text(this.progressText, `step ${count(part.step)} of ${count(part.steps)}`);
    }
    this.waits.hidden = !view.waiting_for;
    text(this.waits, view.waiting_for ? `Waits for ${view.waiting_for}` : "");
    const { told } = view;
    this.told.hidden = !told?.code;
    if (told?.code) text(this.told, `Not let into run ${told.run} since ${time(told.since_s)}, told ${duration(Math.max(0, view.time_s - told.time_s))} ago: ${told.reason} (${told.code})${told.hint ? `. ${told.hint}` : ""}${told.again_s ? `. Asks again in ${duration(Math.max(0, told.again_s - view.time_s))}` : ""}`);
  }
}

class Work {
  constructor() {
    this.list = el("dl", { class: "facts-list" });
    this.times = el("div", {});
    this.node = card("Work", { id: "work" }, this.list, el("h3", {}, "Where the time went"), this.times);
  }

  draw({ part, reachable, reach }) {
    const lines = [["Reachable", reachable ? `yes: ${reach}` : `no, so all goes through the store: ${reach}`]];
    if (part) {
      lines.unshift(["Leased items", `${count(part.leases)} not done, ${count(part.queued)} being computed or queued`], ["Incarnation", part.incarnation || "not let in yet"]);
    }
    facts(this.list, lines);
    const spent = Object.entries(part?.busy_s ?? {}).sort((a, b) => b[1] - a[1]);
    const whole = spent.reduce((sum, [, seconds]) => sum + seconds, 0);
    this.times.replaceChildren(table("Time of the compute thread by kind of work", [{ name: "Kind" }, { name: "Time", number: true }, { name: "Share", number: true }],
      spent.map(([kind, seconds]) => [kind.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase(), duration(seconds), share(seconds / whole)]), { empty: "No run yet." }));
  }
}

class Used {
  constructor() {
    this.list = el("dl", { class: "facts-list" });
    this.disk = el("div", {});
    this.last = null;
    this.node = card("Used", { id: "used" }, this.list, el("h3", {}, "Kept"), this.disk);
  }

  draw(view) {
    const now = [view.time_s, view.upload.bytes, view.download.bytes];
    const seconds = this.last ? now[0] - this.last[0] : 0;
    const rate = (index) => (seconds > 0 ? ` · now ${scaled((now[index] - this.last[index]) / seconds, "B/s")}` : "");
    const memory = view.device_memory_limit_bytes === null ? bytes(view.device_memory_bytes) : `${bytes(view.device_memory_bytes)} of ${bytes(view.device_memory_limit_bytes)}`;
    const way = (name, index, flow) => {
      const now_per_s = seconds > 0 ? (now[index] - this.last[index]) / seconds : 0;
      const cap = flow.limit_bytes_per_s === null ? null : el("progress", { max: 1, value: Math.min(1, now_per_s / flow.limit_bytes_per_s), "aria-label": `${name}: share of its cap in use` });
      return [name, el("span", {}, `${bytes(flow.bytes)}${rate(index)}${held(flow)}`, cap)];
    };
    facts(this.list, [way("Up", 1, view.upload), way("Down", 2, view.download), ["Device memory", memory]]);
    this.last = now;
    this.disk.replaceChildren(table("What is kept on disk and in memory", [{ name: "What" }, { name: "Used", number: true }, { name: "Limit", number: true }],
      view.disk.map((one) => [one.what, bytes(one.used_bytes), bytes(one.limit_bytes)]), { empty: "Nothing yet: it takes part in no run." }));
  }
}

const held = (flow) => (flow.limit_bytes_per_s === null ? "" : ` · limit ${scaled(flow.limit_bytes_per_s, "B/s")}, held up ${duration(flow.held_up_s)}`);

class Controls {
  constructor() {
    this.token = el("input", { type: "password", id: "token", autocomplete: "off", "aria-describedby": "token-hint" });
    this.token.value = sessionStorage.getItem("iota-miner-token") ?? "";
    this.button = el("button", { type: "button", id: "start-stop", onclick: () => this.work() }, "…");
    this.up = el("input", { type: "number", id: "cap-up", min: "0.001", step: "any", placeholder: "no limit" });
    this.down = el("input", { type: "number", id: "cap-down", min: "0.001", step: "any", placeholder: "no limit" });
    this.said = el("p", { role: "status", class: "small" });
    const field = (words, input) => el("label", { class: "field" }, el("span", {}, words), input);
    this.node = card("Controls", { id: "controls", lead: "In force at once, until this process ends; its flags count at the next start" },
      el("form", { onsubmit: (event) => { event.preventDefault(); this.caps(); } },
        field("Upload, MB a second", this.up), field("Download, MB a second", this.down),
        el("div", { class: "field" }, el("button", { type: "submit" }, "Set caps"), this.button), field("Token", this.token),
        el("p", { class: "muted small", id: "token-hint" }, "From the file page-token in the miner's directory.")), this.said);
  }

  draw(view) {
    this.working = view.state !== "stopped";
    text(this.button, this.working ? "Stop" : "Start");
    if (this.node.contains(document.activeElement) || this.filled) return;
    this.filled = true; // later what stands there is the operator's
    for (const [input, flow] of [[this.up, view.upload], [this.down, view.download]]) {
      input.value = flow.limit_bytes_per_s === null ? "" : flow.limit_bytes_per_s / 1e6;
    }
  }

  caps() {
    const rate = (input) => (input.value === "" ? null : Number(input.value) * 1e6);
    return this.send("/v1/miner/caps", { upload_bytes_per_s: rate(this.up), download_bytes_per_s: rate(this.down) }, "The caps are set.");
  }

  work() {
    return this.send("/v1/miner/work", { working: !this.working }, this.working ? "Stopped: its leases went back." : "Started.");
  }

  async send(path, body, done) {
    text(this.said, "…");
    this.said.className = "small";
    try {
      draw(await change(path, body));
      text(this.said, done);
    } catch (error) {
      this.said.className = "small bad";
      text(this.said, `${error.message}${error.hint ? ` (${error.hint})` : ""}`);
    }
  }
}

const score = el("div", {}, el("p", { class: "empty" }, "Asking the validator…"));
const controls = new Controls();
const log = new Log();
const panels = [new Head(), new Work(), new Used(), controls, new Machine()];
let drawn = false;

function draw(view) {
  if (!drawn) {
    drawn = true;
    const [head, work, used, , machine] = panels;
    main.replaceChildren(head.node, el("div", { class: "grid" }, el("div", { class: "column" }, work.node, used.node), el("div", { class: "column" }, machine.node, controls.node, card("Score", { id: "score" }, score)), log.node));
  }
  document.title = `${STATES[view.state]} · IOTA miner`;
  for (const panel of panels) panel.draw(view);
}

async function read() {
  if (!document.hidden) {
    try {
      draw(await ask("/v1/miner"));
      said("Live", "live");
    } catch (error) {
      said(error.status ? error.message : "The miner doesn't answer", "bad");
    }
  }
  setTimeout(read, EVERY_MS);
}

async function readScore() {
  if (!document.hidden) {
    try {
      score.replaceChildren(...why(await ask("/v1/miner/score")));
    } catch (error) {
      score.replaceChildren(el("p", { class: "empty" }, `${error.message}${error.hint ? ` (${error.hint})` : ""}`));
    }
  }
  setTimeout(readScore, SCORE_EVERY_MS);
}

themeSwitch(document.getElementById("theme"), (words) => said(words, "wait"));
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
read();
readScore();
