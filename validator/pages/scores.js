// Scores with their reasons, and audits with their cases.
import { ask, runPath } from "./api.js";
import { card, el, table } from "./dom.js";
import { bytes, count, plural, scaled, share, short } from "./format.js";
import { why } from "./why.js";

const EVERY_MS = 10000;
const SHOWN = 25;

export class Scores {
  topics = ["overview"];

  constructor(store) {
    this.store = store;
    this.body = el("div", {}, el("p", { class: "empty" }, "Reading the scores…"));
    this.find = el("input", { type: "search", placeholder: "Hotkey", "aria-label": "Find a hotkey", maxlength: "64", oninput: () => this.fill() });
    this.weights = el("p", { class: "muted small" });
    this.node = card("Scores and weights", { id: "scores", lead: "Choose one to see why", tools: [this.find] }, this.body, this.weights);
    this.read();
  }

  close() { clearTimeout(this.timer); }

  draw() {
    const said = this.store.overview.weights;
    this.weights.textContent = said ? `On the chain: ${said}` : "No weights have been set on the chain yet.";
  }

  async read() {
    const { signal } = this.store.closed;
    if (!document.hidden) {
      try {
        this.found = await ask("/v1/page/scores", signal);
        this.fill();
      } catch (error) {
        if (signal.aborted) return;
        this.said = "";
        this.body.replaceChildren(el("p", { class: "empty" }, `The scores can't be read: ${error.message}`));
      }
    }
    if (!signal.aborted) this.timer = setTimeout(() => this.read(), EVERY_MS);
  }

  fill() {
    if (!this.found || this.body.contains(document.activeElement)) return; // not under somebody's fingers
    const wanted = this.find.value.trim().toLowerCase();
    const said = JSON.stringify([wanted, this.found.rows]);
    if (said === this.said) return;
    this.said = said;
    const rows = this.found.rows.map((row, place) => [place + 1, ...row]).filter((row) => row[1].toLowerCase().includes(wanted));
    const columns = [{ name: "#", number: true }, { name: "Hotkey" }, { name: "Score", number: true }, { name: "Work", number: true }, { name: "Reliability", number: true }, { name: "Items", number: true }];
    const cells = rows.slice(0, SHOWN).map(([place, hotkey, total, work, , reliability, , , , items, convicted]) => [
      count(place), el("button", { type: "button", class: "link", title: hotkey, "aria-label": `Why ${hotkey} has this score`, onclick: () => explain(hotkey) }, short(hotkey)),
      convicted ? el("span", { class: "bad", title: convicted }, "convicted") : share(total, 2), scaled(work, "FLOPs"), reliability.toFixed(3), count(items)]);
    const more = rows.length > SHOWN ? el("p", { class: "muted small" }, `${count(SHOWN)} of ${count(rows.length)} shown; search for the others`) : null;
    this.body.replaceChildren(...[table("Scores, best first", columns, cells, { empty: wanted ? "No such hotkey has a score." : "Nobody has earned anything yet: the first sealed step counts." }), more].filter(Boolean));
  }
}

/** Why a score is what it is: its terms with their arithmetic, and what holds the miner back. */
export async function explain(hotkey) {
  const body = el("div", { class: "dialog-body" }, el("p", { class: "empty" }, "Reading…"));
  const close = el("button", { type: "button", class: "quiet", "aria-label": "Close" }, "✕");
  const dialog = el("dialog", { "aria-labelledby": "why-title" }, el("div", { class: "dialog-head" }, el("h2", { id: "why-title" }, `Why ${short(hotkey)} has its score`), close), body);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  try {
    body.replaceChildren(...why(await ask(`/v1/page/scores/${encodeURIComponent(hotkey)}`)));
  } catch (error) {
    body.replaceChildren(el("p", { class: "notice bad" }, `${error.message}${error.hint ? ` (${error.hint})` : ""}`));
  }
}

const CHARGES = { partial: "its sum isn't that of its items", merge: "a partition it merged isn't the sum", unopened: "it doesn't open what it has receipted", equivocation: "it signed one thing and receipted another",
  root: "it reported another state root than snapshot and log lead to", unusable: "a boundary that it has receipted is no numbers" };

export class Cases {
  topics = ["overview"];

  constructor(store) {
    this.store = store;
    this.line = el("p", {});
    this.body = el("div", {});
    this.node = card("Audits", { id: "audits", lead: "Work done again, to the bit" }, this.line, this.body);
  }

  draw() {
    const { audits, facts } = this.store.overview;
    if (!audits) {
      this.line.textContent = facts.audits === "off" ? "Audits are off in this run." : `Policy: ${facts.audits}.`;
    } else {
      const twice = audits.repeated ? ` (${count(audits.repeated)} twice)` : "";
      const cost = audits.receipted_s > 0 ? ` They cost ${share(audits.compute_s / audits.receipted_s)} of the members' compute and ${bytes(audits.read_bytes)} read.` : "";
      this.line.textContent = `${plural(audits.done, "audit")} done${twice}, ${count(audits.open)} open; ${plural(audits.cases, "case")}, ${count(audits.convicted)} convicted.${cost} Policy: ${facts.audits}.`;
    }
    const key = `${audits?.cases}/${audits?.convicted}/${audits?.open}/${this.store.overview.summary.state}`;
    if (key !== this.key) {
      this.key = key;
      this.read();
    }
  }

  async read() {
    try {
      const cases = await ask(`${runPath(this.store.run)}/cases`, this.store.closed.signal);
      const columns = [{ name: "Case", number: true }, { name: "Accused" }, { name: "Of" }, { name: "Outcome" }];
      const rows = cases.slice(-30).reverse().map((one) => [count(one.case), el("button", { type: "button", class: "link", title: one.hotkey, onclick: () => explain(one.hotkey) }, short(one.hotkey)),
        `${CHARGES[one.charge] ?? one.charge} (step ${count(one.step)}, stage ${count(one.stage)})`, el("span", { class: one.state === "convicted" ? "bad" : one.state === "cleared" ? "good" : "" }, `${one.state}${one.appeal ? `, appeal ${one.appeal}` : ""}`)]);
      this.body.replaceChildren(table("Cases, newest first", columns, rows, { empty: "Nobody stands accused." }));
    } catch (error) {
      if (!this.store.closed.signal.aborted) this.body.replaceChildren(el("p", { class: "empty" }, `The cases can't be read: ${error.message}`));
    }
  }
}
