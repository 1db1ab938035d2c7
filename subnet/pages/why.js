// Why a score is what it is: its terms with their arithmetic, what holds the miner back, what wasn't paid, what was refused.
import { el, table } from "./dom.js";
import { count, duration, scaled, time } from "./format.js";

export function why(found) {
  const parts = [el("p", { class: "hotkey" }, el("code", {}, found.hotkey)),
    el("p", {}, found.place ? el("strong", {}, `Place ${count(found.place)} of ${count(found.num_scores)}. `) : "No score: never a member here, or forgotten. ", `${found.where[0].toUpperCase()}${found.where.slice(1)}.`)];
  if (found.terms.length) {
    const columns = [{ name: "Term" }, { name: "Value", number: true }, { name: "How it comes about" }];
    const rows = found.terms.map((term) => [term.name, term.unit ? scaled(term.value, term.unit) : `${Number(term.value.toPrecision(5))}`, el("span", { class: "how" }, term.how)]);
    parts.push(el("h3", {}, "Its terms"), table("Terms of the score", columns, rows));
  }
  if (found.holds.length) {
    parts.push(el("h3", {}, "What holds it back"), el("ul", { class: "lines" }, ...found.holds.map((hold) => el("li", {}, el("strong", {}, hold.what), el("span", {}, `${hold.why}. Until ${hold.ends}.${hold.hint ? ` ${hold.hint}.` : ""}`)))));
  }
  if (found.unpaid.length) {
    const columns = [{ name: "Step", number: true }, { name: "Stage", number: true }, { name: "Items", number: true }, { name: "Why" }];
    parts.push(el("h3", {}, "Not paid"), table("Sums that were not paid", columns, found.unpaid.slice(-20).map((one) => [count(one.step), count(one.stage), one.items ? count(one.items) : "in part", one.sealed ? one.why : `${one.why}, found before its seal`])));
  }
  for (const refusal of found.refusals) parts.push(el("p", { class: "notice" }, `Refused at ${time(refusal.time_s)}: ${refusal.reason}${refusal.hint ? ` (${refusal.hint})` : ""}`));
  parts.push(el("p", { class: "muted small" }, `Numbers fade by half every ${duration(found.policy.half_life_s ?? 0)}.`));
  return parts;
}
