// The findings of the doctor: their number in the navigation, and the page with their commands.

import { openChange } from "./change_dialog.js";
import * as data from "./cluster_data.js";
import {
  copyButton,
  el,
  errorBox,
  keyed,
  part,
  parts,
  setAttribute,
  setHidden,
  setText,
  showError,
} from "./dom.js";
import * as format from "./format.js";
import { poll, request } from "./requests.js";

const POLL_MS = 15000;
const TIMEOUT_MS = 20000; // the gateway checks twice, and omits temporary problems

const state = { answer: null, error: null, isChecking: false };
const listeners = new Set();
let polling = null;

export function startFindings() {
  polling = poll(load, () => POLL_MS);
}

async function load(signal) {
  state.isChecking = true;
  notify();
  try {
    state.answer = await request("findings", { signal, timeout_ms: TIMEOUT_MS });
    state.error = null;
  } catch (error) {
    if (signal.aborted) return;
    state.error = error;
  }
  state.isChecking = false;
  notify();
}

function notify() {
  showCount();
  for (const listener of [...listeners]) listener();
}

function showCount() {
  const badge = document.getElementById("findings-count");
  const number = state.answer?.findings.length ?? 0;
  setHidden(badge, number === 0);
  setText(badge, number);
  setAttribute(badge, "title", number === 0 ? null : format.count(number, "finding"));
}

export function findingsPage(root) {
  const page = {
    status: el("p", { class: "note", role: "status", id: "findings-status" }),
    error: errorBox(),
    list: el("ul", { class: "findings", id: "findings-list" }),
    check: el(
      "button",
      { type: "button", id: "check-again", click: () => polling.pollNow() },
      "Check again",
    ),
    reason: el("p", { class: "note", hidden: true }),
  };
  root.append(
    el("div", { class: "title-line" }, el("h1", { tabindex: "-1" }, "Findings"), page.check),
    el(
      "p",
      { class: "lead" },
      "The doctor checks the cluster, and states for each problem the command that repairs it.",
    ),
    page.status,
    page.error,
    page.reason,
    page.list,
  );
  const update = () => show(page);
  listeners.add(update);
  const stopData = data.onClusterData(update);
  return {
    title: "Findings",
    stop: () => {
      listeners.delete(update);
      stopData();
    },
  };
}

function show(page) {
  setAttribute(page.check, "aria-disabled", state.isChecking ? "true" : null);
  setText(page.status, statusText());
  showError(page.error, state.error);
  const canChange = data.cluster()?.can_change ?? false;
  const reason = data.cluster()?.cannot_change_reason ?? "";
  setText(page.reason, `You cannot run changes from the console: ${reason}`);
  setHidden(page.reason, canChange || reason === "");
  const countByName = new Map();
  const items = (state.answer?.findings ?? []).map((finding) => {
    const name = JSON.stringify([finding.name, finding.subject, finding.partition]);
    countByName.set(name, (countByName.get(name) ?? 0) + 1);
    const canRun = canChange && finding.change !== null;
    return { ...finding, key: `${name} ${countByName.get(name)}`, canRun };
  });
  keyed(page.list, items, { key: (finding) => finding.key, create: createItem, update: updateItem });
}

function statusText() {
  if (state.answer === null)
    return state.isChecking ? "The gateway checks the cluster. This takes up to 5 s." : "";
  const number = state.answer.findings.length;
  const countText = number === 0 ? "No findings." : `${format.count(number, "finding")}.`;
  return `${countText} Checked at ${format.clock(state.answer.time_ms)}, again every ${POLL_MS / 1000} s.`;
}

function createItem(finding) {
  const node = el("li", { class: "finding", "data-testid": "finding", "data-name": finding.name });
  node.append(
    el(
      "div",
      { class: "finding-head" },
      el("span", { class: "symbol", "aria-hidden": "true" }, "▲"),
      part("p", "sentence", { class: "sentence" }),
    ),
    el(
      "p",
      { class: "meta" },
      el("span", { class: "tag" }, finding.area),
      " ",
      el("span", { class: "code" }, finding.name),
      finding.partition === null || finding.partition === undefined
        ? null
        : el("a", { href: `#/partitions/${finding.partition}` }, `Partition ${finding.partition}`),
    ),
    el(
      "div",
      { class: "command", "data-part": "command_row" },
      part("code", "command"),
      copyButton(() => node.finding.command),
      part(
        "button",
        "run",
        {
          type: "button",
          class: "small",
          click: () => openChange(node.finding.change.name, node.finding.change.arguments),
        },
        "Run…",
      ),
    ),
  );
  return node;
}

function updateItem(node, finding) {
  node.finding = finding;
  const nodes = parts(node);
  setText(nodes.sentence, finding.sentence);
  setText(nodes.command, finding.command ?? "");
  setHidden(nodes.command_row, !finding.command && !finding.canRun);
  setHidden(nodes.run, !finding.canRun);
}
