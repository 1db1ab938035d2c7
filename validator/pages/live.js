// Server-sent events over fetch, so that a refusal can be read; connects anew by itself, later each time, and when nothing is heard.
import { refusalOf } from "./api.js";

const SILENCE_MS = 20000;
const LONGEST_WAIT_MS = 30000;

export class Live {
  /** heard(kind, data); state(words, tone) with tone "live", "wait" or "bad". */
  constructor(path, heard, state) {
    Object.assign(this, { path, heard, state, waitMs: 1000, stopped: false });
    this.run();
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
    this.wake?.();
  }

  async run() {
    while (!this.stopped) {
      let waitMs = this.waitMs;
      try {
        await this.read();
        this.state("Reconnecting", "wait");
      } catch (error) {
        if (this.stopped) return;
        const wait = error.retryAfter ? Math.max(waitMs, error.retryAfter * 1000) : waitMs;
        waitMs = wait;
        const why = error.status ? error.message : "no connection to the validator";
        this.state(`Not live: ${why}. Next try in ${Math.round(wait / 1000)} s`, "bad");
      }
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, waitMs * (0.8 + 0.4 * Math.random()));
      });
      this.waitMs = Math.min(LONGEST_WAIT_MS, this.waitMs * 2);
    }
  }

  async read() {
    this.abort = new AbortController();
    let timer = 0;
    const watch = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.abort.abort(), SILENCE_MS);
    };
    watch();
    try {
      const response = await fetch(this.path, { signal: this.abort.signal, headers: { Accept: "text/event-stream" }, cache: "no-store" });
      if (!response.ok) throw await refusalOf(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        watch();
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) this.take(part);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  take(part) {
    let kind = "message";
    let data = "";
    for (const line of part.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return; // a heartbeat
    const value = JSON.parse(data);
    if (kind === "bye") {
      throw Object.assign(new Error(value.reason), { retryAfter: value.retry_after, status: 1 });
    }
    this.waitMs = 1000;
    this.state("Live", "live");
    this.heard(kind, value);
  }
}
