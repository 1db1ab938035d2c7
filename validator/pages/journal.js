// The journal: its noteworthy lines as they come, or every record, with a search that goes back page by page.
import { ask, runPath } from "./api.js";
import { card, choice, el } from "./dom.js";
import { count, plural, time } from "./format.js";

const LIMIT = 60;
const MOST_LINES = 600;
const PAGES_AT_ONCE = 10;

/** Once more where the validator is busy just now. */
async function patiently(path, signal) {
  try {
    return await ask(path, signal);
  } catch (error) {
    if (error.code !== "busy") throw error;
    await new Promise((resolve) => { setTimeout(resolve, 1000 * (error.retryAfter ?? 1)); });
    return ask(path, signal);
  }
}

export class Journal {
  topics = ["notes", "overview"];

  constructor(store) {
    this.store = store;
    this.all = false;
    this.before = null;
    this.list = el("ol", { class: "lines journal", "aria-label": "Journal, newest first" });
    this.said = el("p", { class: "muted small", role: "status" });
    this.more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.read(this.before) }, "Older");
    this.search = el("input", { type: "search", placeholder: "Search: words, a hotkey, a step", "aria-label": "Search the journal", maxlength: "80",
      onkeydown: (event) => event.key === "Enter" && this.begin(), onsearch: () => this.begin() });
    const tools = [this.search, el("button", { type: "button", class: "quiet", onclick: () => this.begin() }, "Search"),
      choice("Which records", [["notes", "Noteworthy"], ["all", "Every record"]], "notes", (key) => this.switch(key === "all"))];
    this.node = card("Journal", { id: "journal", wide: true, tools }, el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Journal" }, this.list), this.more, this.said);
  }

  switch(all) {
    this.all = all;
    this.begin();
  }

  begin() {
    const wanted = this.search.value.trim();
    if (wanted && !this.all) {
      this.all = true;
      this.node.querySelector('input[value="all"]').checked = true;
    }
    this.before = null;
    this.list.replaceChildren();
    if (this.all) this.read(null);
    else this.draw();
  }

  draw() {
    if (this.all) {
      if (!this.search.value) this.said.textContent = `${plural(this.store.overview.journal_length, "record")} so far; Search reads the newest`;
      return;
    }
    const notes = [...this.store.overview.notes].reverse();
    const key = notes.join("\n");
    if (key === this.key && this.list.children.length) return;
    this.key = key;
    this.more.hidden = true;
    this.said.textContent = notes.length ? "" : "Nothing noteworthy yet.";
    this.list.replaceChildren(...notes.map((note) => el("li", {}, el("span", { class: "when" }, note.slice(0, 8)), el("span", {}, note.slice(9)))));
  }

  async read(before) {
    const query = this.search.value.trim();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.said.textContent = "Searching…";
    let found = 0;
    try {
      for (let page = 0; page < PAGES_AT_ONCE; page += 1) {
        const more = before === null ? "" : `&before=${before}`;
        const answer = await patiently(`${runPath(this.store.run)}/journal?limit=${LIMIT}&q=${encodeURIComponent(query)}${more}`, this.store.closed.signal);
        if (turn !== this.turn) return;
        this.list.append(...answer.lines.map((line) => el("li", {}, el("span", { class: "when" }, `${count(line.number)} · ${time(line.time_s)}`), el("b", {}, line.kind), el("span", {}, line.text))));
        found += answer.lines.length;
        before = answer.before;
        this.oldest = answer.oldest;
        if (before === null || found >= LIMIT) break;
      }
      while (this.list.children.length > MOST_LINES) this.list.firstElementChild.remove();
      this.before = before;
      this.more.hidden = before === null;
      const end = before === null ? `that is all since record ${count(this.oldest)}` : `searched back to record ${count(before)}`;
      this.said.textContent = `${plural(found, "record")} found; ${end}`;
    } catch (error) {
      if (this.store.closed.signal.aborted || turn !== this.turn) return;
      this.said.textContent = `The journal can't be read: ${error.message}${error.hint ? ` (${error.hint})` : ""}`;
    }
  }
}
