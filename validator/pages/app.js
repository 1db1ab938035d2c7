// The page: which run is looked at (from the address behind #), the theme, and what is said of the connection.
import { el, text } from "./dom.js";
import { themeSwitch } from "./switch.js";
import { RunPage } from "./run.js";
import { showRuns } from "./runs.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let page = null;

export function said(words, tone) {
  text(connection, words);
  connection.dataset.tone = tone;
}

function route() {
  const [, kind, name] = location.hash.split("/").map((part) => decodeURIComponent(part));
  return kind === "run" && name ? { kind, name } : { kind: kind === "runs" ? "runs" : "" };
}

async function show() {
  page?.close();
  page = null;
  const where = route();
  if (where.kind === "run") {
    document.title = `${where.name} · IOTA`;
    page = new RunPage(main, where.name, said);
    return;
  }
  document.title = "Runs · IOTA";
  page = showRuns(main, said, where.kind === "" ? only : () => false);
}

/** The one run worth looking at, if there is just one: opened without a click. */
function only(runs) {
  const open = runs.filter((run) => ["running", "stalled", "waiting", "paused"].includes(run.state));
  const chosen = open.length === 1 ? open[0] : runs.length === 1 ? runs[0] : null;
  if (chosen) location.replace(`#/run/${encodeURIComponent(chosen.name)}`);
  return chosen !== null;
}

themeSwitch(document.getElementById("theme"), (words) => said(words, "wait"));
addEventListener("hashchange", () => { if (location.hash.startsWith("#/")) show(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("error", (event) => main.prepend(el("p", { class: "notice bad" }, `The page has failed: ${event.message}`)));
show();
