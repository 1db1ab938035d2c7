// Questions to the validator. A refusal becomes an error that says what, why, and when to try again.

export class Refused extends Error {
  constructor(refusal, status) {
    super(refusal.reason || `the validator answered ${status}`);
    this.code = refusal.code || "unknown";
    this.hint = refusal.hint || "";
    this.retryAfter = refusal.retry_after ?? null;
    this.status = status;
  }
}

export async function refusalOf(response) {
  let refusal = {};
  try { refusal = await response.json(); } catch { refusal = {}; } // a proxy's page instead of our answer
  return new Refused(refusal, response.status);
}

export async function ask(path, signal) {
  let response;
  const patience = AbortSignal.timeout(15000);
  try {
    response = await fetch(path, { signal: signal ? AbortSignal.any([signal, patience]) : patience, headers: { Accept: "application/json" } });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused({ code: "unreachable", reason: "the validator doesn't answer", hint: "is it running?", retry_after: 2 }, 0);
  }
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

export const runPath = (run) => `/v1/page/runs/${encodeURIComponent(run)}`;
