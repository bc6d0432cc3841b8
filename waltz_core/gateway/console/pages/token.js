// The token of the user: a dialog asks for it, and the session storage of this tab keeps it.

import { setHidden, setText } from "./dom.js";

const KEY = "waltz-console-token";
const VALID = /^[\x21-\x7e]+$/; // other characters are not allowed in an HTTP header

const state = { token: read(), pending: null, isDeclined: false };
const find = (id) => document.getElementById(id);

export const currentToken = () => state.token;
export const isSignInDeclined = () => state.isDeclined;
export const pendingSignIn = () => state.pending;

// The browser can block session storage; then the token is kept only until the page is closed.
function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function write(token) {
  state.token = token;
  try {
    if (token === "") sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, token);
  } catch {
    // see read()
  }
  showButtons();
}

function showButtons() {
  setHidden(find("sign-out"), state.token === "");
  setHidden(find("sign-in"), !state.isDeclined);
}

// Show the dialog; the promise is fulfilled when the user has entered a token or has cancelled.
export function askForToken(problem) {
  if (state.pending !== null) return state.pending;
  const dialog = find("token-dialog");
  const problemText = state.token === "" ? "" : problem;
  setText(find("token-problem"), problemText);
  setHidden(find("token-problem"), problemText === "");
  find("token-field").value = "";
  state.pending = new Promise((resolve) => {
    state.finish = (isDeclined) => {
      state.pending = null;
      state.isDeclined = isDeclined;
      showButtons();
      if (dialog.open) dialog.close();
      resolve();
    };
  });
  if (!dialog.open) dialog.showModal();
  find("token-field").focus();
  return state.pending;
}

function onSubmit(event) {
  event.preventDefault();
  const token = find("token-field").value.trim();
  if (!VALID.test(token)) {
    setText(find("token-problem"), "A token consists of visible ASCII characters without spaces.");
    setHidden(find("token-problem"), false);
    return;
  }
  find("token-field").value = "";
  write(token);
  state.finish?.(false);
}

export function startToken() {
  find("token-form").addEventListener("submit", onSubmit);
  find("token-cancel").addEventListener("click", () => state.finish?.(true));
  find("token-dialog").addEventListener("close", () => {
    if (state.pending !== null) state.finish(true);
  });
  find("sign-in").addEventListener("click", () => askForToken(""));
  find("sign-out").addEventListener("click", () => {
    write("");
    location.reload(); // to forget the data that was shown with this token
  });
  showButtons();
}
