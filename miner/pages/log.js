// The log's last lines as they come; a search hides the others.
import { ask } from "./api.js";
import { card, el } from "./dom.js";
import { time } from "./format.js";

const EVERY_MS = 2000;
const KEPT = 500;
const TONES = { WARNING: "warn", ERROR: "bad", CRITICAL: "bad" };

export class Log {
  constructor() {
    this.after = -1;
    this.list = el("ul", { class: "lines journal", "aria-label": "Log, newest first" });
    this.empty = el("p", { class: "empty" }, "Nothing logged yet.");
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search the log", oninput: () => this.filter() });
    this.node = card("Log", { id: "log", wide: true, lead: "The last lines, newest first", tools: [this.search] }, this.empty,
      el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Log" }, this.list));
    this.read();
  }

  async read() {
    if (!document.hidden) {
      try {
        const lines = await ask(`/v1/miner/logs?after=${this.after}`);
        if (lines.length && lines.at(-1)[0] < this.after) this.list.replaceChildren();
        for (const line of lines) this.add(line);
      } catch {
        this.after = -1; // the miner was started again: its lines count anew
        this.list.replaceChildren();
      }
    }
    setTimeout(() => this.read(), EVERY_MS);
  }

  add([number, timeS, level, words]) {
    this.after = number;
    this.empty.hidden = true;
    this.list.prepend(el("li", {}, el("span", { class: "when" }, time(timeS)), el("span", { class: TONES[level] ?? "" }, TONES[level] ? `${level.toLowerCase()}: ${words}` : words)));
    if (this.search.value) this.filter();
    while (this.list.childElementCount > KEPT) this.list.lastElementChild.remove();
  }

  filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const line of this.list.children) line.hidden = !words.every((word) => line.textContent.toLowerCase().includes(word));
  }
}
