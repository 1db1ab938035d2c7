// Numbers with units, as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (Number.isFinite(value) ? whole.format(value) : "–");
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function loss(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1000 ? value.toExponential(2) : value.toFixed(value >= 10 ? 3 : 4);
}

const SCALES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function scaled(value, unit = "", digits = 3) {
  if (!Number.isFinite(value)) return "–";
  for (const [size, prefix] of SCALES) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(digits)} ${prefix}${unit}`;
  }
  return `${value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(1) : Number(value.toPrecision(digits))} ${unit}`.trim();
}

export const bytes = (value) => scaled(value, "B");
export const speed = (value) => `${value >= 100 ? count(value) : Number(value.toPrecision(3))} tokens/s`;
export const share = (value, digits = 1) => (Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : "–");
export const usd = (value) => `$${value >= 1 ? value.toFixed(2) : value.toFixed(4)}`;

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function time(seconds) {
  const at = new Date(seconds * 1000);
  return Date.now() - at.getTime() < 20 * 3600e3 ? clock.format(at) : day.format(at);
}

export const short = (hotkey) => (hotkey.length > 10 ? `${hotkey.slice(0, 8)}…` : hotkey);
