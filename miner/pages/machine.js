// What the device says of itself, and how much of what it could do this miner uses.
import { card, el } from "./dom.js";
import { bytes, scaled, share } from "./format.js";
import { facts } from "./facts.js";

const NAMES = { temperature: "Temperature", power: "Power", memory: "Memory", use: "In use", clock: "Clock" };

export class Machine {
  constructor() {
    this.list = el("dl", { class: "facts-list" });
    this.lead = el("p", { class: "muted small facts" });
    this.node = card("Machine", { id: "machine", lead: "What the device says of itself" }, this.list, this.lead);
  }

  draw({ machine, speed, device }) {
    if (!machine) return facts(this.list, [["Device", `${device}: being looked at`]]);
    const not = new Set(machine.unreadable);
    const of = (value, limit, unit) => (limit ? `${scaled(value, unit)} of ${scaled(limit, unit)}` : scaled(value, unit));
    const said = {
      temperature: machine.temperature_c === null ? "" : `${Math.round(machine.temperature_c)} °C`,
      power: machine.power_w === null ? "" : of(machine.power_w, machine.power_limit_w, "W"),
      memory: machine.memory_total_bytes === null ? "" : `${bytes(machine.memory_used_bytes)} of ${bytes(machine.memory_total_bytes)}, by all programs`,
      use: machine.use === null ? "" : `${share(machine.use, 0)}, by all programs`,
      clock: machine.clock_mhz === null ? "" : `${Math.round(machine.clock_mhz)} MHz`,
    };
    const lines = [["Device", machine.name]];
    if (speed) lines.push(["Useful work", `${scaled(speed.flops_per_s, "FLOP/s")}, the last minute`], ["MFU", speed.mfu === null ? "not known: the peak isn't measured" : `${share(speed.mfu)} of ${scaled(speed.peak_flops_per_s, "FLOP/s")}`]);
    for (const [key, name] of Object.entries(NAMES)) lines.push([name, not.has(key) ? "not readable" : said[key]]);
    facts(this.list, lines);
    this.lead.textContent = speed ? "MFU: FLOPs of forward and backward by what matrix products in the run's precision reach on this device." : "";
  }
}
