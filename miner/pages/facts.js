// Names and values in a list, drawn anew only where they changed.
import { el } from "./dom.js";

export function facts(list, lines) {
  const key = JSON.stringify(lines.map(([name, value]) => [name, typeof value === "string" ? value : value.textContent]));
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...lines.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
