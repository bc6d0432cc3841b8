// Requests to the gateway: single requests, and polling while the page is visible.
//
// Rules:
//   1. Polling never sends two requests at the same time, and sends none while the page is hidden.
//   2. A request ends after its timeout.
//   3. After status 401, a dialog asks the user for a token, and the request is sent again.

import { askForToken, currentToken, isSignInDeclined, pendingSignIn } from "./token.js";

const API = new URL("../v1/console/", document.baseURI);
const TIMEOUT_MS = 5000;

export class GatewayError extends Error {
  constructor(message, { hint = "", status = 0, type = "", fields = {} } = {}) {
    super(message);
    this.hint = hint;
    this.status = status;
    this.type = type;
    this.fields = fields;
  }

  // false: the gateway has not answered, so its state is unknown
  get isAnswer() {
    return this.status !== 0;
  }
}

export async function request(
  path,
  { timeout_ms = TIMEOUT_MS, signal = null, body = null, onSend = null } = {},
) {
  for (;;) {
    if (pendingSignIn() !== null) await pendingSignIn();
    if (isSignInDeclined()) {
      throw new GatewayError("the gateway requires a token", {
        hint: "Select Sign in.",
        status: 401,
        type: "AuthenticationFailed",
      });
    }
    const token = currentToken();
    onSend?.();
    try {
      return await send(path, { token, timeout_ms, signal, body });
    } catch (error) {
      if (error.status !== 401) throw error;
      // Meanwhile the user may have entered a token for another request.
      if (token === currentToken()) await askForToken(error.message);
    }
  }
}

async function send(path, { token, timeout_ms, signal, body }) {
  const control = new AbortController();
  const abort = () => control.abort();
  const timer = setTimeout(abort, timeout_ms);
  signal?.addEventListener("abort", abort);
  const headers = { Accept: "application/json" };
  if (token !== "") headers.Authorization = `Bearer ${token}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  try {
    const response = await fetch(new URL(path, API), {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? null : JSON.stringify(body),
      signal: control.signal,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
    });
    return await read(response);
  } catch (error) {
    if (error instanceof GatewayError || signal?.aborted) throw error;
    const reason = control.signal.aborted
      ? `no answer within ${timeout_ms / 1000} s`
      : "the connection failed";
    throw new GatewayError(`the gateway does not answer: ${reason}`, {
      hint: "Check that the gateway runs, and the network to it.",
    });
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

async function read(response) {
  const text = await response.text();
  let fields;
  try {
    fields = JSON.parse(text);
  } catch {
    throw new GatewayError(`the gateway answered with status ${response.status} and without JSON`, {
      hint: "Check that no proxy answers in place of the gateway.",
      status: response.status,
    });
  }
  if (response.ok) return fields;
  throw new GatewayError(
    String(fields?.error ?? `the gateway answered with status ${response.status}`),
    {
      hint: String(fields?.hint ?? ""),
      status: response.status,
      type: String(fields?.type ?? ""),
      fields: fields ?? {},
    },
  );
}

// Call `task(signal)` every `interval_ms()` (rule 1). Return functions that stop it, and that poll
// at once.
export function poll(task, interval_ms) {
  const control = new AbortController();
  let wake = () => {};
  let isPollRequested = false;
  const pause = (ms) =>
    new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  const onVisible = () => document.visibilityState === "visible" && wake();
  document.addEventListener("visibilitychange", onVisible);
  const run = async () => {
    while (!control.signal.aborted) {
      const start_ms = performance.now();
      if (document.visibilityState === "visible") {
        try {
          await task(control.signal);
        } catch (error) {
          if (!control.signal.aborted) console.error(error); // a bug; later answers may work
        }
      }
      if (control.signal.aborted) break;
      if (!isPollRequested)
        await pause(Math.max(50, interval_ms() - (performance.now() - start_ms)));
      isPollRequested = false;
    }
  };
  run();
  return {
    pollNow: () => {
      isPollRequested = true; // even if a request is in flight, because its answer may be too old
      wake();
    },
    stop: () => {
      control.abort();
      document.removeEventListener("visibilitychange", onVisible);
      wake();
    },
  };
}
