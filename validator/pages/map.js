// The pipeline, stage by stage: each member a cell by state and speed. Cells are kept and changed in place, however many.
import { card, el, table, text } from "./dom.js";
import { count, duration, plural, short } from "./format.js";
import { explain } from "./scores.js";

const STATES = { working: "at work", ready: "ready, no work", behind: "catching up", silent: "not heard" };
const ROOMY = 10;

export class PipelineMap {
  topics = ["members", "overview"];

  constructor(store) {
    this.store = store;
    this.stages = new Map();
    this.list = el("ol", { class: "stages" });
    this.legend = el("p", { class: "legend" }, ...Object.entries(STATES).map(([state, words]) => el("span", { class: "key" }, el("i", { class: "swatch", "data-state": state }), words)),
      el("span", { class: "muted" }, "fuller: faster than others of its stage"));
    this.table = el("details", { class: "as-table", ontoggle: () => this.drawTable() }, el("summary", {}, "The same as a table"), el("div", {}));
    this.node = card("Pipeline", { id: "pipeline", wide: true }, this.legend, this.list, this.table);
  }

  draw(topics) {
    if (!topics.has("members") && this.stages.size) return;
    const { overview, members } = this.store;
    const byStage = overview.facts.stages.map(() => []);
    for (const row of members.values()) byStage[row[2]]?.push(row);
    overview.facts.stages.forEach((layers, number) => this.stage(number, layers, overview.facts.stages.length).draw(byStage[number], overview.summary.state));
    if (this.table.open) this.drawTable();
  }

  stage(number, layers, total) {
    let found = this.stages.get(number);
    if (!found) {
      found = new Stage(number, layers, total);
      this.stages.set(number, found);
      this.list.append(found.node);
    }
    return found;
  }

  drawTable() {
    if (!this.table.open) return;
    const columns = [{ name: "Member" }, { name: "Stage", number: true }, { name: "State" }, { name: "Items done", number: true }, { name: "Leases", number: true }, { name: "Time an item", number: true }, { name: "Last heard", number: true }];
    const rows = [...this.store.members.values()].sort((a, b) => a[2] - b[2] || (a[1] < b[1] ? -1 : 1)).map(([, hotkey, stage, state, , leases, done, seconds, silent]) => [
      el("button", { type: "button", class: "link", title: hotkey, onclick: () => explain(hotkey) }, short(hotkey)), count(stage), STATES[state], count(done), count(leases), seconds === null ? "–" : duration(seconds), silent ? `${duration(silent)} ago` : "just now"]);
    this.table.lastElementChild.replaceChildren(table("Members by stage", columns, rows, { empty: "Nobody has joined." }));
  }
}

class Stage {
  constructor(number, [first, last], total) {
    this.cells = new Map();
    const layers = first === last ? `layer ${first}` : `layers ${first} to ${last}`;
    const ends = number === 0 ? "embedding, " : "";
    const head = number === total - 1 ? ", head" : "";
    this.what = el("span", { class: "muted" }, `${ends}${layers}${head}`);
    this.counts = el("span", { class: "muted counts" });
    this.box = el("div", { class: "cells", role: "group", "aria-label": `Members of stage ${number}`, onkeydown: (event) => this.key(event) });
    this.empty = el("p", { class: "empty", hidden: true });
    this.number = number;
    this.node = el("li", { class: "stage" }, el("div", { class: "stage-head" }, el("h3", {}, `Stage ${number}`), this.what, this.counts), this.box, this.empty);
  }

  draw(rows, state) {
    const roomy = rows.length <= ROOMY;
    this.box.classList.toggle("roomy", roomy);
    const speeds = rows.map((row) => row[7]).filter((seconds) => seconds).sort((a, b) => a - b);
    const median = speeds[speeds.length >> 1] ?? null;
    const seen = new Set();
    for (const row of rows) {
      seen.add(row[0]);
      let cell = this.cells.get(row[0]);
      if (!cell) {
        cell = new Cell(row, () => explain(row[1]));
        this.cells.set(row[0], cell);
        this.box.append(cell.node);
      }
      cell.draw(row, median, roomy);
    }
    for (const [id, cell] of this.cells) {
      if (seen.has(id)) continue;
      cell.node.remove();
      this.cells.delete(id);
    }
    const first = this.box.firstElementChild;
    if (first && !this.box.querySelector('[tabindex="0"]')) first.tabIndex = 0;
    const working = rows.filter((row) => row[3] === "working").length;
    const rate = rows.reduce((sum, row) => sum + (row[7] ? 1 / row[7] : 0), 0);
    text(this.counts, rows.length ? `${plural(rows.length, "member")} · ${count(working)} at work${rate ? ` · up to ${rate >= 10 ? count(rate) : rate.toFixed(1)} items/s` : ""}` : "");
    this.empty.hidden = rows.length > 0;
    text(this.empty, state === "finished" ? "The run is over; its members have left." : state === "queued" ? "The run has not begun." : `Nobody serves stage ${this.number}: the run waits for a miner.`);
  }

  /** One stop for the tab key; arrows go from member to member. */
  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const cells = [...this.box.children];
    const to = cells[cells.indexOf(document.activeElement) + step];
    if (!to) return;
    document.activeElement.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

class Cell {
  constructor([, hotkey], opened) {
    this.name = el("b", {}, short(hotkey));
    this.note = el("small", {});
    this.node = el("button", { type: "button", class: "cell", tabindex: "-1", onclick: opened }, this.name, this.note);
  }

  draw(row, median, roomy) {
    const [, hotkey, , state, , leases, done, seconds, silent] = row;
    const rank = seconds && median ? Math.min(4, Math.max(1, Math.round((2.5 * median) / seconds))) : 0;
    const said = `${state}/${rank}/${leases}/${done}/${seconds}/${silent}/${roomy}`;
    if (said === this.said) return;
    this.said = said;
    this.node.dataset.state = state;
    this.node.dataset.rank = String(rank);
    const words = state === "silent" ? `not heard for ${duration(silent)}` : `${STATES[state]}${leases ? `, ${plural(leases, "item")}` : ""}`;
    const pace = seconds ? `, ${duration(seconds)} an item` : "";
    if (roomy) text(this.note, state === "silent" ? words : seconds ? `${duration(seconds)}/item` : STATES[state]);
    const label = `${hotkey}: ${words}${pace}, ${plural(done, "item")} done`;
    this.node.title = label;
    this.node.setAttribute("aria-label", label);
  }
}
