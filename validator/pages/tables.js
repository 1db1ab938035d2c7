// Disruptions, merges with their checks, bytes and cost.
import { ask, runPath } from "./api.js";
import { card, el, table } from "./dom.js";
import { bytes, count, duration, plural, share, time, usd } from "./format.js";

const NUM_MARKS = 30;

export class Disruptions {
  topics = ["disruptions"];

  constructor(store) {
    this.store = store;
    this.before = null;
    this.list = el("ul", { class: "lines", "aria-label": "Disruptions, newest first" });
    this.empty = el("p", { class: "empty" }, "Nothing has disturbed the run so far.");
    this.more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.read(this.before) }, "Older");
    this.node = card("Disruptions", { id: "disruptions", lead: "What died or lied, and what was done about it" }, this.empty, el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Disruptions" }, this.list), this.more);
  }

  draw() {
    const now = Date.now();
    if (this.read_ms && now - this.read_ms < 2000) return this.soon();
    this.read_ms = now;
    this.read(null);
  }

  soon() {
    this.timer ??= setTimeout(() => { this.timer = null; this.draw(); }, 2000);
  }

  close() { clearTimeout(this.timer); }

  async read(before) {
    let page;
    try {
      page = await ask(`${runPath(this.store.run)}/disruptions?limit=${NUM_MARKS}${before === null ? "" : `&before=${before}`}`, this.store.closed.signal);
    } catch (error) {
      if (this.store.closed.signal.aborted) return;
      this.empty.hidden = false;
      this.empty.textContent = `The disruptions can't be read: ${error.message}`;
      return;
    }
    const lines = page.marks.map(([step, timeS, kind, , words]) => el("li", { "data-kind": kind }, el("span", { class: "when" }, `${time(timeS)} · step ${count(Math.max(0, step))}`), el("span", {}, words)));
    if (before === null) this.list.replaceChildren(...lines);
    else this.list.append(...lines);
    this.before = page.before;
    this.more.hidden = page.before === null;
    this.empty.hidden = page.total > 0;
  }
}

export class Merges {
  topics = ["merges"];

  constructor(store) {
    this.store = store;
    this.body = el("div", {});
    this.node = card("Merges and their checks", { id: "merges", lead: "Each sum is checked by every replica before it is applied" }, this.body);
  }

  draw() {
    const { merges, num_merges: total } = this.store.overview;
    const columns = [{ name: "Step", number: true }, { name: "Group", number: true }, { name: "Check" }, { name: "Members", number: true }, { name: "Size", number: true }, { name: "Took", number: true }];
    const rows = [...merges].reverse().slice(0, 14).map((line) => [line.step < 0 ? "start" : count(line.step), count(line.group), verdict(line), count(line.contributors), bytes(line.merged_bytes), duration(line.seconds)]);
    this.body.replaceChildren(table("The last merges", columns, rows, { empty: "No sum has been merged yet." }), el("p", { class: "muted small" }, total ? `${plural(total, "merge")} sealed in all` : ""));
  }
}

function verdict(line) {
  const again = line.version > 1 ? ` · manifest ${line.version}` : "";
  const store = line.routed ? " · through the store" : "";
  if (line.failed || (line.traced && !line.sealed)) return el("span", { class: "bad" }, `✗ ${plural(line.failed, "check")} failed${line.sealed ? ", traced" : ", being traced"}${again}`);
  if (line.sealed && line.unchecked_stages.length) return el("span", { class: "warn" }, `sealed, nobody else could check${again}${store}`);
  if (line.sealed) return el("span", { class: "good" }, `✓ ${count(line.passed)} of ${count(line.passed + line.failed)} agree${line.traced ? ", traced" : ""}${again}${store}`);
  const stage = line.version === 0 ? "commitments asked for" : line.partitions < line.num_partitions ? `${count(line.partitions)} of ${plural(line.num_partitions, "partition")} merged` : `${count(line.passed)} checked`;
  return el("span", { class: "muted" }, `… ${stage}${again}${store}`);
}

export class Costs {
  topics = ["overview"];

  constructor(store) {
    this.store = store;
    this.list = el("dl", { class: "facts-list" });
    this.node = card("Bytes and cost", { id: "costs", lead: "What the run asked of the object store" }, this.list);
  }

  draw() {
    const { store, store_bytes: held, audits, journal_length: length, journal_head: head } = this.store.overview;
    const lines = [];
    if (store) {
      const used = (name) => (store.own[name] ?? 0) + (store.reported[name] ?? 0);
      lines.push(["Up", `${bytes(used("bytes_up"))} in ${plural(used("puts"), "put")}`], ["Down", `${bytes(used("bytes_down"))} in ${plural(used("gets"), "get")}`],
        ["Held now", `${bytes(held)}`], ["Cost so far", `${usd(store.usd)} by the run file's prices`], ["To keep it", `${usd(store.usd_per_month)} a month`]);
    }
    if (audits && audits.receipted_s > 0) lines.push(["Audits", `${share(audits.compute_s / audits.receipted_s)} of the members' compute · ${bytes(audits.read_bytes)} read`]);
    lines.push(["Journal", `${count(length)} records · head ${head.slice(0, 12) || "–"}`]);
    const said = JSON.stringify(lines);
    if (said === this.said) return;
    this.said = said;
    this.list.replaceChildren(...lines.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }
}
