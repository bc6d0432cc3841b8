// The page of administrative changes: buttons that start a change, the progress of running changes,
// and the history.

import { openChange, setKinds } from "./change_dialog.js";
import {
  el,
  errorBox,
  keyed,
  part,
  parts,
  scrollTable,
  setAttribute,
  setHidden,
  setState,
  setText,
  showError,
  stateMark,
} from "./dom.js";
import * as format from "./format.js";
import { poll, request } from "./requests.js";

const POLL_MS = 3000;
const POLL_RUNNING_MS = 1000;
const STEPS_MAX = 100;

export function changesPage(root, { query }) {
  const page = build(root);
  page.newChangeId = query.get("id");
  const polling = poll(
    (signal) => load(page, signal),
    () => (page.isRunning ? POLL_RUNNING_MS : POLL_MS),
  );
  return {
    title: "Changes",
    stop: () => polling.stop(),
    onQuery: (next) => {
      page.newChangeId = next.get("id");
      polling.pollNow();
    },
  };
}

function build(root) {
  const page = {
    isRunning: false,
    newChangeId: null,
    error: errorBox(),
    reason: el("p", { class: "note", id: "cannot-change", hidden: true }),
    running: el("div", { class: "changes", id: "running-changes" }),
    kinds: el("ul", { class: "kinds", id: "change-kinds" }),
    history: el("tbody", { id: "history" }),
    noHistory: el("p", { class: "empty", hidden: true }, "No change is recorded."),
  };
  const columns = ["Begun", "Duration", "User", "Command", "Outcome"];
  page.historyBox = scrollTable({
    caption: "Changes that were recorded in ZooKeeper",
    id: "history-table",
    columns,
    body: page.history,
  });
  page.runningBox = el(
    "section",
    { "aria-labelledby": "running-title", hidden: true },
    el("h2", { id: "running-title" }, "Changes of this gateway"),
    page.running,
  );
  page.content = el(
    "div",
    { hidden: true },
    page.runningBox,
    el(
      "section",
      { "aria-labelledby": "kinds-title" },
      el("h2", { id: "kinds-title" }, "Start a change"),
      page.reason,
      page.kinds,
    ),
    el(
      "section",
      { "aria-labelledby": "history-title" },
      el("h2", { id: "history-title" }, "History"),
      page.noHistory,
      page.historyBox,
    ),
  );
  root.append(el("h1", { tabindex: "-1" }, "Changes"), page.error, page.content);
  return page;
}

async function load(page, signal) {
  try {
    const answer = await request("changes", { signal });
    if (signal.aborted) return;
    showError(page.error, null);
    setKinds(answer.kinds);
    show(page, answer);
  } catch (error) {
    if (!signal.aborted) showError(page.error, error);
  }
}

function show(page, answer) {
  page.isRunning = answer.running.some((change) => change.ended_ms === null);
  setHidden(page.content, false);
  setHidden(page.runningBox, answer.running.length === 0);
  keyed(page.running, answer.running, {
    key: (change) => change.id,
    create: createChange,
    update: updateChange,
  });
  focusNewChange(page);
  setText(page.reason, `You cannot change the cluster: ${answer.cannot_change_reason}`);
  setHidden(page.reason, answer.can_change);
  const kinds = answer.kinds.map((kind) => ({ ...kind, canStart: answer.can_change }));
  keyed(page.kinds, kinds, { key: (kind) => kind.name, create: createKind, update: updateKind });
  setHidden(page.noHistory, answer.history.length > 0);
  setText(
    page.noHistory,
    answer.can_change
      ? "No change is recorded."
      : "The console shows the history only to users that can change the cluster.",
  );
  setHidden(page.historyBox, answer.history.length === 0);
  showHistory(page, answer.history);
}

// Move the focus, once, to the change that the dialog has just started.
function focusNewChange(page) {
  const node =
    page.newChangeId === null ? undefined : page.running.keyedNodes.get(page.newChangeId);
  if (node === undefined) return;
  page.newChangeId = null;
  node.focus();
}

// ---- running changes ---------------------------------------------------------------------------

function createChange(item) {
  return el(
    "article",
    {
      class: "change",
      tabindex: "-1",
      "data-testid": "change",
      "data-id": item.id,
      "data-name": item.name,
    },
    el(
      "header",
      {},
      stateMark("begun", { "data-part": "state" }),
      el("code", { class: "command-text" }, item.command),
    ),
    el("p", { class: "meta" }, part("span", "times")),
    part("ol", "steps", { class: "steps" }),
    el("p", { class: "waits", "data-part": "waits_row" }, "Waits for: ", part("span", "waits")),
    part("p", "outcome", { class: "outcome", role: "status" }),
  );
}

function updateChange(node, item) {
  const nodes = parts(node);
  const outcome = outcomeOf(item.outcome);
  setAttribute(node, "data-state", outcome);
  setState(nodes.state, outcome);
  const end_ms = item.ended_ms ?? Date.now();
  setText(
    nodes.times,
    `Begun ${format.time(item.begun_ms)}, ${item.ended_ms === null ? "running for" : "took"} ${format.duration(end_ms - item.begun_ms)}, by ${item.user}`,
  );
  const firstStep = Math.max(0, item.steps.length - STEPS_MAX);
  const steps = item.steps
    .slice(firstStep)
    .map((text, index) => ({ text, number: firstStep + index + 1 }));
  keyed(nodes.steps, steps, {
    key: (step) => `${step.number} ${step.text}`,
    create: (step) => el("li", { value: step.number }, step.text),
  });
  setText(nodes.waits, item.waits_for);
  setHidden(nodes.waits_row, !item.waits_for || item.ended_ms !== null);
  setText(
    nodes.outcome,
    outcome === "begun" ? "" : [sentenceOf(item.outcome), item.summary].filter(Boolean).join(" "),
  );
}

function outcomeOf(text) {
  if (text === "begun" || text === "done") return text;
  return text.startsWith("failed") ? "failed" : text;
}

const sentenceOf = (text) =>
  `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

// ---- kinds and history -------------------------------------------------------------------------

function createKind(kind) {
  return el(
    "li",
    { class: "kind", "data-name": kind.name },
    el(
      "div",
      { class: "kind-words" },
      el(
        "h3",
        {},
        kind.name.replaceAll("-", " ").replace(/^./, (letter) => letter.toUpperCase()),
        kind.is_disruptive ? el("span", { class: "tag warn" }, "▲ disruptive") : null,
      ),
      el("p", {}, kind.summary),
    ),
    part(
      "button",
      "start",
      {
        type: "button",
        "data-change": kind.name,
        "aria-label": `Start: ${kind.name.replaceAll("-", " ")}`,
        click: () => openChange(kind.name),
      },
      "Start…",
    ),
  );
}

const updateKind = (node, kind) => setHidden(parts(node).start, !kind.canStart);

function showHistory(page, history) {
  const countByName = new Map();
  const items = history.map((entry) => {
    const name = `${entry.begun_ms} ${entry.user} ${entry.command}`;
    countByName.set(name, (countByName.get(name) ?? 0) + 1);
    return { ...entry, key: `${name} ${countByName.get(name)}` };
  });
  keyed(page.history, items, {
    key: (entry) => entry.key,
    create: historyRow,
    update: updateHistoryRow,
  });
}

const historyRow = (item) =>
  el(
    "tr",
    {},
    el("td", { class: "nowrap" }, format.time(item.begun_ms)),
    part("td", "duration", { class: "nowrap" }),
    el("td", {}, item.user),
    el("td", { class: "code wrap" }, item.command),
    el("td", { class: "wrap" }, stateMark("begun", { "data-part": "outcome" })),
  );

function updateHistoryRow(row, item) {
  const nodes = parts(row);
  setText(
    nodes.duration,
    item.ended_ms === null || item.ended_ms === undefined
      ? format.NONE
      : format.duration(item.ended_ms - item.begun_ms),
  );
  const outcome = outcomeOf(item.outcome);
  const textByOutcome = {
    failed: item.outcome,
    begun: "no outcome yet: it runs, or its process was killed",
  };
  setState(nodes.outcome, outcome, textByOutcome[outcome] ?? null);
}
