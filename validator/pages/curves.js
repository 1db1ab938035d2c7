// Loss and speed by step, tokens or time; disruptions as marks on the loss; the same numbers as a table.
/* global uPlot */
import { Chart } from "./chart.js";
import { card, choice, el, table, text } from "./dom.js";
import { count, duration, loss, plural, scaled, speed } from "./format.js";

const TONES = { lost: "bad", out: "bad", void: "warn", leader: "warn", owner: "warn", trace: "warn", skipped: "warn", case: "bad", rewound: "bad", left: "calm", control: "calm", joined: "good", alarm: "warn" };
const RANKS = ["good", "calm", "warn", "bad"]; // the worst is drawn last, so on top
const LINES = new Set(["lost", "out", "leader", "case", "rewound", "control", "alarm"]);
const NAMES = { lost: "lost", out: "put out", void: "redone", leader: "new leader", owner: "owner failed", trace: "check failed", skipped: "skipped", case: "case", rewound: "rewound", left: "left", control: "by the owner", joined: "joined", alarm: "spike" };
const TABLE_ROWS = 60;

export class Curves {
  topics = ["history", "theme"];

  constructor(store) {
    this.store = store;
    this.x = "step";
    this.log = false;
    this.wantMarks = true;
    this.lossChart = new Chart({ height: 320, label: "Training and hold-out loss", describe: (index) => this.describe(index),
      series: [{ spanGaps: true, width: 0 }, { spanGaps: true, width: 0 },
        { color: "--holdout", width: 1, dash: [4, 4], spanGaps: true, dots: true, name: "hold-out", say: loss },
        { color: "--loss", width: 2, spanGaps: true, name: "loss", say: loss }],
      bands: [{ series: [2, 1], color: "--band" }] });
    this.speedChart = new Chart({ height: 150, label: "Tokens a second", describe: (index) => this.describe(index), range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1],
      series: [{ color: "--speed", width: 1.5, spanGaps: true, name: "tokens/s", say: (value) => (value >= 1e4 ? scaled(value) : count(value)) }] });
    this.legend = el("p", { class: "legend", id: "mark-legend" });
    this.empty = el("p", { class: "empty" }, "No step is sealed yet: the curve begins with the first one.");
    this.table = el("details", { class: "as-table", ontoggle: () => this.drawTable() }, el("summary", {}, "The same as a table"), el("div", {}));
    this.charts = el("div", { hidden: true }, this.lossChart.node, this.legend, el("h3", {}, "Speed"), this.speedChart.node, this.table);
    this.back = el("button", { type: "button", class: "quiet", onclick: () => this.rebuild(), title: "A stretch is chosen by dragging over it" }, "Whole range");
    const tools = [
      choice("Horizontal axis", [["step", "Steps"], ["tokens", "Tokens"], ["time_s", "Time"]], this.x, (key) => { this.x = key; this.rebuild(); }),
      choice("Loss axis", [["linear", "Linear"], ["log", "Log"]], "linear", (key) => { this.log = key === "log"; this.rebuild(); }),
      el("label", { class: "check" }, el("input", { type: "checkbox", checked: true, id: "show-marks", onchange: (event) => { this.wantMarks = event.target.checked; this.draw(new Set(["history"])); } }), "Disruptions"),
      this.back,
    ];
    this.node = card("Loss", { id: "loss", wide: true, tools }, this.empty, this.charts);
    this.onTheme = () => this.rebuild();
    addEventListener("themechange", this.onTheme);
  }

  close() {
    removeEventListener("themechange", this.onTheme);
    this.lossChart.close();
    this.speedChart.close();
  }

  rebuild() {
    this.built = false;
    this.draw(new Set(["history"]));
  }

  draw() {
    const { history, trouble } = this.store;
    if (trouble && !history) text(this.empty, `The curve can't be read: ${trouble.message}${trouble.hint ? ` (${trouble.hint})` : ""}`);
    if (!history || !history.step.length) return;
    this.empty.hidden = true;
    this.charts.hidden = false;
    const data = this.lossData(history);
    const speeds = [history[this.x], history.tokens_per_s];
    const marks = this.wantMarks ? this.marks(history) : [];
    if (!this.built) {
      const say = { step: count, tokens: (value) => scaled(value), time_s: duration }[this.x];
      this.lossChart.build(data, { x: say, y: (value) => Number(value.toPrecision(4)).toString(), log: this.log, marks });
      this.speedChart.build(speeds, { x: say, y: (value) => scaled(value, "", 2).replace(".0", ""), log: false });
      this.built = true;
    } else {
      this.lossChart.set(data, marks);
      this.speedChart.set(speeds);
    }
    this.lossChart.whole(data[0]);
    this.speedChart.whole(speeds[0]);
    this.say(history);
    if (this.table.open) this.drawTable();
  }

  /** Hold-out points are measured at steps of their own: both on one axis. */
  lossData(history) {
    const xs = history[this.x];
    const at = { step: 0, time_s: 1, tokens: 2 }[this.x];
    const positive = (values) => (this.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const own = [xs, positive(history.loss_min), positive(history.loss_max), positive(history.loss)];
    const held = history.holdout.length ? [history.holdout.map((point) => point[at]), positive(history.holdout.map((point) => point[3]))] : [[], []];
    const [all, low, high, mean, holdout] = uPlot.join([own, held]);
    return [all, low, high, holdout, mean];
  }

  marks(history) {
    return history.marks.toSorted((a, b) => RANKS.indexOf(TONES[a[1]] ?? "calm") - RANKS.indexOf(TONES[b[1]] ?? "calm")).map(([step, kind, number, words]) => ({
      x: this.place(history, step), tone: TONES[kind] ?? "calm", line: LINES.has(kind),
      words: number > 1 ? `${count(number)} × ${NAMES[kind] ?? kind} from step ${count(step)}, the last: ${words}` : `step ${count(Math.max(0, step))}: ${words}`,
    }));
  }

  place(history, step) {
    if (this.x === "step") return Math.max(step, 0);
    let low = 0;
    let high = history.step.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (history.step[middle] < step) low = middle + 1;
      else high = middle;
    }
    return history[this.x][low];
  }

  describe(index) {
    const { history } = this.store;
    const x = this.lossChart.plot?.data[0][index];
    if (x === undefined || !history) return [];
    const own = history[this.x];
    let at = own.indexOf(x);
    if (at < 0) at = Math.max(0, own.findIndex((value) => value >= x));
    const lines = [{ words: `step ${count(history.step[at])} · ${scaled(history.tokens[at])} tokens · ${duration(history.time_s[at])}` }];
    const spread = history.loss_max[at] > history.loss_min[at] ? ` (${loss(history.loss_min[at])} to ${loss(history.loss_max[at])})` : "";
    lines.push({ words: `loss ${loss(history.loss[at])}${spread}`, tone: "loss" });
    const held = this.lossChart.plot.data[3][index];
    if (held !== null && held !== undefined) lines.push({ words: `hold-out ${loss(held)}`, tone: "holdout" });
    lines.push({ words: `${speed(history.tokens_per_s[at])} · gradient norm ${Number(history.norm[at]?.toPrecision?.(3) ?? 0)}` });
    return lines;
  }

  say(history) {
    const counts = {};
    for (const [, kind, number] of history.marks) counts[kind] = (counts[kind] ?? 0) + number;
    const parts = Object.entries(counts).map(([kind, number]) => el("span", { class: "key", "data-tone": TONES[kind] ?? "calm" }, `▲ ${count(number)} ${NAMES[kind] ?? kind}`));
    if (this.legend.dataset.said !== JSON.stringify(counts)) {
      this.legend.dataset.said = JSON.stringify(counts);
      this.legend.replaceChildren(...(parts.length ? parts : [el("span", { class: "muted" }, "Nothing has disturbed the run so far.")]));
    }
    const first = history.loss[0];
    const last = history.loss.at(-1);
    const disturbed = Object.values(counts).reduce((sum, number) => sum + number, 0);
    this.lossChart.frame.setAttribute("aria-label", `Loss from ${loss(first)} at step ${count(history.step[0])} to ${loss(last)} at step ${count(history.step.at(-1))}; ${plural(disturbed, "disruption")} marked. Arrow keys read the points.`);
  }

  drawTable() {
    const { history } = this.store;
    if (!this.table.open || !history) return;
    const every = Math.max(1, Math.ceil(history.step.length / TABLE_ROWS));
    const columns = [{ name: "Step", number: true }, { name: "Tokens", number: true }, { name: "Time", number: true }, { name: "Loss", number: true }, { name: "Least", number: true }, { name: "Greatest", number: true }, { name: "Tokens/s", number: true }];
    const rows = [];
    for (let index = history.step.length - 1; index >= 0; index -= every) {
      rows.push([count(history.step[index]), scaled(history.tokens[index]), duration(history.time_s[index]), loss(history.loss[index]), loss(history.loss_min[index]), loss(history.loss_max[index]), count(history.tokens_per_s[index])]);
    }
    this.table.lastElementChild.replaceChildren(table("Loss and speed by step", columns, rows));
  }
}
