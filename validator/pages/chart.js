// A line chart on uPlot: axes in the page's colours, words at the lines' ends, marks with their reasons, arrow keys to walk along.
/* global uPlot */
import { el, text } from "./dom.js";

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FONT = '12px system-ui, -apple-system, "Segoe UI", sans-serif';

export class Chart {
  /** options: height, label, series (uPlot's, with color names), yValues, describe(index) -> words. */
  constructor(options) {
    this.options = options;
    this.index = null;
    this.box = el("div", { class: "plot" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.spoken = el("span", { class: "hidden", "aria-live": "polite" });
    this.frame = el("div", { class: "chart", tabindex: "0", role: "img", "aria-label": options.label, onkeydown: (event) => this.key(event), onblur: () => this.hide() }, this.box, this.tip, this.spoken);
    this.node = this.frame;
    this.size = new ResizeObserver(() => this.resize());
    this.size.observe(this.box);
  }

  close() {
    this.size.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
  }

  /** Anew, with other axes or colours. */
  build(data, { x, y, log, marks = [] }) {
    this.plot?.destroy();
    this.marks = marks;
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--muted"), font: FONT, grid, ticks: { show: false } };
    this.plot = new uPlot({
      width: this.box.clientWidth || 600,
      height: this.options.height,
      padding: [12, 76, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: this.options.range } },
      axes: [{ ...axis, size: 34, values: (_, values) => values.map(x), space: 72 },
        { ...axis, size: 56, values: (_, values) => values.map((value) => (value === null ? "" : y(value))), space: 36 }],
      series: [{}, ...this.options.series.map((series) => ({ ...series, stroke: series.color ? css(series.color) : "transparent",
        points: { show: false, ...series.dots && { show: true, size: 6, fill: css(series.color), stroke: css("--surface"), width: 1.5 } } }))],
      bands: (this.options.bands ?? []).map((band) => ({ series: band.series, fill: css(band.color) })),
      hooks: { draw: [(plot) => this.decorate(plot)], setCursor: [(plot) => this.point(plot)] },
    }, data, this.box);
  }

  set(data, marks = []) {
    this.marks = marks;
    this.plot.setData(data, !this.zoomed());
  }

  zoomed() {
    const { min, max } = this.plot.scales.x;
    const xs = this.plot.data[0];
    return xs.length > 1 && (min > this.first || max < this.last);
  }

  /** Remember what the whole range was, so that a zoom is kept while new points come. */
  whole(xs) {
    this.first = xs[0];
    this.last = xs.at(-1);
  }

  decorate(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      const color = css(`--mark-${mark.tone}`);
      ctx.fillStyle = color;
      if (mark.line && this.marks.length < 80) {
        ctx.globalAlpha = 0.35;
        ctx.fillRect(x - ratio / 2, bbox.top, ratio, bbox.height);
      }
      ctx.globalAlpha = 0.9;
      const base = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x, base - 9 * ratio);
      ctx.lineTo(x - 3.5 * ratio, base);
      ctx.lineTo(x + 3.5 * ratio, base);
      ctx.fill();
    }
    ctx.globalAlpha = 1;
    this.words(plot, ctx, ratio);
    ctx.restore();
  }

  /** Each line's name and last value at its end; moved apart where they would touch. */
  words(plot, ctx, ratio) {
    const { bbox } = plot;
    const ends = [];
    this.options.series.forEach((series, index) => {
      if (!series.name) return;
      const values = plot.data[index + 1];
      let last = values.length - 1;
      while (last >= 0 && (values[last] === null || values[last] === undefined)) last -= 1;
      if (last < 0) return;
      ends.push({ y: plot.valToPos(values[last], "y", true), words: [series.name, series.say(values[last])], color: css(series.color) });
    });
    ends.sort((a, b) => a.y - b.y);
    const gap = 31 * ratio;
    ends.forEach((end, index) => {
      end.y = Math.min(Math.max(end.y, bbox.top + 8 * ratio), bbox.top + bbox.height - 16 * ratio);
      if (index) end.y = Math.max(end.y, ends[index - 1].y + gap);
    });
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    for (const end of ends) {
      ctx.fillStyle = end.color;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.fillText(end.words[0], bbox.left + bbox.width + 8 * ratio, end.y - 7 * ratio);
      ctx.font = `600 ${13 * ratio}px system-ui, sans-serif`;
      ctx.fillText(end.words[1], bbox.left + bbox.width + 8 * ratio, end.y + 7 * ratio);
    }
  }

  near(x) {
    return this.marks.filter((mark) => Math.abs(this.plot.valToPos(mark.x, "x") - x) < 7).slice(-4);
  }

  point(plot) {
    const { left, idx } = plot.cursor;
    if (left < 0 || idx === null || idx === undefined) return this.hide();
    this.index = idx;
    const marks = this.near(left);
    const lines = [...this.options.describe(idx), ...marks.map((mark) => ({ words: mark.words, tone: mark.tone }))];
    this.tip.replaceChildren(...lines.map((line) => el("div", { "data-tone": line.tone ?? "" }, line.words)));
    this.tip.hidden = false;
    const place = plot.over.offsetLeft + left;
    const beyond = place > this.box.clientWidth / 2;
    this.tip.style.setProperty("left", beyond ? "auto" : `${place + 14}px`);
    this.tip.style.setProperty("right", beyond ? `${this.box.clientWidth - place + 14}px` : "auto");
  }

  hide() { this.tip.hidden = true; }

  key(event) {
    if (!this.plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const xs = this.plot.data[0];
    if (!xs.length) return;
    if (event.key === "Escape") return this.hide();
    const page = event.shiftKey ? 10 : 1;
    const from = this.index ?? xs.length - 1;
    const to = { ArrowLeft: from - page, ArrowRight: from + page, Home: 0, End: xs.length - 1 }[event.key];
    this.index = Math.min(xs.length - 1, Math.max(0, to));
    this.plot.setCursor({ left: this.plot.valToPos(xs[this.index], "x"), top: 10 });
    text(this.spoken, [...this.tip.children].map((line) => line.textContent).join(", "));
  }
}
