// The dialog that starts an administrative change: a form, a review, and the request.
//
// Rules:
//   1. The form is built from the kinds of changes that the gateway returns; this file lists none.
//   2. A change is sent only after the review, which describes the change in words.
//   3. Before a disruptive change, the user must type the name of the affected object.

import * as data from "./cluster_data.js";
import {
  copyButton,
  el,
  errorBox,
  setAttribute,
  setHidden,
  setText,
  showError,
  stateWord,
} from "./dom.js";
import * as format from "./format.js";
import { request } from "./requests.js";

const POST_TIMEOUT_MS = 30000;
const RETRY_MS = 10000;
const ADDRESS = /^(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):\d{1,5}$/;

const state = { kinds: null, loading: null, retry_at: 0, closeCount: 0 };
let dialog = null;

export function startChangeDialog() {
  dialog = el("dialog", { id: "change-dialog", "aria-labelledby": "change-title" });
  dialog.addEventListener("close", () => {
    state.closeCount += 1;
  });
  document.body.append(dialog);
}

export function setKinds(kinds) {
  state.kinds = kinds;
}

async function loadKinds() {
  state.loading ??= request("changes")
    .then((answer) => setKinds(answer.kinds))
    .finally(() => {
      state.loading = null;
    });
  await state.loading;
}

// The kinds that concern partitions; empty until the gateway has returned the kinds.
export function changesOfPartition() {
  if (state.kinds === null) {
    if (state.loading === null && performance.now() >= state.retry_at) {
      state.retry_at = performance.now() + RETRY_MS;
      loadKinds().catch(() => {}); // the page then shows no buttons; a later call tries again
    }
    return [];
  }
  return state.kinds.filter((kind) =>
    kind.parameters.some((parameter) => parameter.kind === "partitions"),
  );
}

export async function openChange(name, given = {}) {
  const title = el("h2", { id: "change-title", tabindex: "-1" }, titleOf(name));
  const error = errorBox();
  const loading = el("p", {}, "Loading…");
  dialog.replaceChildren(
    title,
    loading,
    error,
    el("div", { class: "actions" }, closeButton("Close")),
  );
  if (!dialog.open) dialog.showModal();
  try {
    if (state.kinds === null) await loadKinds();
    const kind = state.kinds.find((candidate) => candidate.name === name);
    if (kind === undefined) throw new Error(`the gateway has no change "${name}"`);
    showForm(kind, given);
  } catch (problem) {
    setHidden(loading, true);
    showError(error, problem);
  }
}

const titleOf = (name) => name.replaceAll("-", " ").replace(/^./, (letter) => letter.toUpperCase());
const sentence = (text) => text.replace(/^./, (letter) => letter.toUpperCase());
const closeButton = (text) =>
  el("button", { type: "button", id: "change-cancel", click: () => dialog.close() }, text);

// ---- the form ----------------------------------------------------------------------------------

function showForm(kind, given) {
  const fields = kind.parameters.map((parameter) =>
    createField(parameter, String(given[parameter.name] ?? "")),
  );
  const form = el(
    "form",
    { id: "change-form", novalidate: true, autocomplete: "off", "data-change": kind.name },
    el("h2", { id: "change-title", tabindex: "-1" }, titleOf(kind.name)),
    el("p", {}, kind.summary),
    ...fields.map((field) => field.row),
    el(
      "div",
      { class: "actions" },
      closeButton("Cancel"),
      el("button", { type: "submit", class: "primary", id: "change-review" }, "Review…"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const invalidFields = fields.filter((field) => !check(field));
    if (invalidFields.length > 0) invalidFields[0].input.focus();
    else showReview(kind, fields);
  });
  dialog.replaceChildren(form);
  (fields.find((field) => field.input.value === "") ?? fields[0])?.input.focus();
}

function createField(parameter, value) {
  const id = `change-${parameter.name}`;
  const input = createInput(parameter, { id, value });
  const problem = el("p", { class: "field-problem", id: `${id}-problem`, role: "alert" });
  const help = el("p", { class: "help", id: `${id}-help` }, helpOf(parameter));
  setAttribute(input, "aria-describedby", `${id}-help ${id}-problem`);
  const optional = parameter.is_required ? "" : " (optional)";
  const row = el(
    "div",
    { class: "field" },
    el("label", { for: id }, `${sentence(parameter.text || parameter.name)}${optional}`),
    input,
    help,
    problem,
  );
  const field = { parameter, input, row, problem, help };
  input.addEventListener("input", () => {
    if (problem.textContent !== "") check(field);
    setText(help, helpOf(parameter, input.value));
  });
  setText(help, helpOf(parameter, input.value));
  return field;
}

function createInput(parameter, { id, value }) {
  const commonAttributes = {
    id,
    name: parameter.name,
    "data-kind": parameter.kind,
    required: parameter.is_required,
    autocomplete: "off",
    spellcheck: "false",
  };
  if (parameter.kind === "storage" || parameter.kind === "server")
    return createSelect(parameter, { commonAttributes, value });
  const kindAttributes = {
    integer: { inputmode: "numeric" },
    address: { placeholder: "host:port" },
    partitions: { placeholder: "0-3,7" },
  };
  const input = el("input", { type: "text", ...commonAttributes, ...kindAttributes[parameter.kind] });
  input.value = value;
  return input;
}

function createSelect(parameter, { commonAttributes, value }) {
  const items = itemsOf(parameter.kind);
  const select = el(
    "select",
    commonAttributes,
    el("option", { value: "" }, parameter.is_required ? `Choose a ${parameter.kind}` : "None"),
    ...items.map((item) => el("option", { value: item.address }, describe(parameter.kind, item))),
  );
  if (value !== "" && !items.some((item) => item.address === value)) {
    select.append(el("option", { value }, `${value} (not in the cluster)`));
  }
  select.value = value;
  return select;
}

const itemsOf = (kind) =>
  (kind === "storage" ? data.cluster()?.storages : data.cluster()?.servers) ?? [];

function describe(kind, item) {
  const size =
    kind === "storage"
      ? format.count(item.replica_count, "replica")
      : format.count(item.open.length, "open partition");
  return `${item.address} (${stateWord(item.state)}, ${size})`;
}

function helpOf(parameter, value = "") {
  if (parameter.kind === "partitions") {
    if (value.trim() === "") return "For example 0-3,7 or all.";
    const { partitions, error } = format.parsePartitions(
      value,
      data.cluster()?.partition_count ?? null,
    );
    return error === ""
      ? `${format.count(partitions.length, "partition")}: ${format.ranges(partitions)}`
      : "For example 0-3,7 or all.";
  }
  if (parameter.kind === "address") return "Host and port, for example storage4:15280.";
  return "";
}

function check(field) {
  const error = problemOf(field.parameter, field.input.value.trim());
  setText(field.problem, error);
  setAttribute(field.input, "aria-invalid", error === "" ? null : "true");
  return error === "";
}

function problemOf(parameter, value) {
  if (value === "") return parameter.is_required ? "This field is required." : "";
  if (parameter.kind === "integer" && !/^\d{1,15}$/.test(value)) return "Enter a whole number.";
  if (parameter.kind === "address" && !ADDRESS.test(value))
    return "Enter a host and a port, for example storage4:15280.";
  if (parameter.kind === "partitions")
    return format.parsePartitions(value, data.cluster()?.partition_count ?? null).error;
  return "";
}

// ---- the review --------------------------------------------------------------------------------

// All values are text, as in a command; the gateway parses numbers.
function argumentsOf(fields) {
  const values = {};
  for (const { parameter, input } of fields) {
    const value = input.value.trim();
    if (value === "") continue;
    values[parameter.name] = parameter.kind === "partitions" ? value.replace(/\s+/g, "") : value;
  }
  return values;
}

// The command as users type it: arguments and options in the order of the parameters.
function commandOf(kind, values) {
  const words = ["waltz-core", "cluster", kind.name];
  for (const { name, option } of kind.parameters) {
    if (!Object.hasOwn(values, name)) continue;
    words.push(...(option ? [option, values[name]] : [values[name]]));
  }
  return words.join(" ");
}

// The text that the user types to confirm a disruptive change (rule 3).
function nameToType(kind, values) {
  const firstOfKind = (kinds) =>
    kind.parameters.find(
      (parameter) => kinds.includes(parameter.kind) && Object.hasOwn(values, parameter.name),
    );
  const subject = firstOfKind(["storage", "server"]) ?? firstOfKind(["address"]);
  return subject === undefined ? kind.name : String(values[subject.name]);
}

function valueText(parameter, value) {
  if (parameter.kind === "partitions") {
    const { partitions } = format.parsePartitions(
      String(value),
      data.cluster()?.partition_count ?? null,
    );
    return `${format.count(partitions.length, "partition")}: ${format.ranges(partitions, Infinity)}`;
  }
  const item = itemsOf(parameter.kind).find((candidate) => candidate.address === value);
  return item !== undefined && ["storage", "server"].includes(parameter.kind)
    ? describe(parameter.kind, item)
    : String(value);
}

function showReview(kind, fields) {
  const values = argumentsOf(fields);
  const command = commandOf(kind, values);
  const page = {
    title: el("h2", { id: "change-title", tabindex: "-1" }, `${titleOf(kind.name)}: confirm`),
    error: errorBox({ id: "change-error" }),
    back: el(
      "button",
      {
        type: "button",
        id: "change-back",
        click: () =>
          showForm(
            kind,
            Object.fromEntries(fields.map((field) => [field.parameter.name, field.input.value])),
          ),
      },
      "Back",
    ),
    start: el(
      "button",
      { type: "submit", class: kind.is_disruptive ? "danger" : "primary", id: "change-start" },
      "Start the change",
    ),
    typed: null,
  };
  const shown = kind.parameters.filter((parameter) => Object.hasOwn(values, parameter.name));
  const form = el(
    "form",
    { id: "change-confirmation", novalidate: true, autocomplete: "off", "data-change": kind.name },
    page.title,
    el("p", { class: "sentence" }, kind.summary),
    el(
      "dl",
      { class: "facts review" },
      ...shown.map((parameter) =>
        el(
          "div",
          {},
          el("dt", {}, sentence(parameter.text || parameter.name)),
          el("dd", {}, valueText(parameter, values[parameter.name])),
        ),
      ),
    ),
    el(
      "div",
      { class: "command" },
      el("code", { id: "change-command" }, command),
      copyButton(() => command),
    ),
    ...(kind.is_disruptive ? confirmation(page, nameToType(kind, values)) : []),
    page.error,
    el("div", { class: "actions" }, closeButton("Cancel"), page.back, page.start),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!page.start.disabled) start(page, kind, values);
  });
  dialog.replaceChildren(form);
  page.title.focus(); // not the button, because Enter in the form must not start the change
}

function confirmation(page, name) {
  page.typed = el("input", {
    type: "text",
    id: "change-confirm",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "change-warning",
  });
  page.start.disabled = true;
  page.typed.addEventListener("input", () => {
    page.start.disabled = page.typed.value.trim() !== name;
  });
  return [
    el(
      "p",
      { class: "warning", id: "change-warning" },
      el("span", { class: "symbol", "aria-hidden": "true" }, "▲"),
      " This change is disruptive: it moves or removes replicas, or removes a member of the cluster.",
    ),
    el(
      "div",
      { class: "field" },
      el("label", { for: "change-confirm" }, "To confirm, type ", el("code", {}, name)),
      page.typed,
    ),
  ];
}

async function start(page, kind, values) {
  const closeCount = state.closeCount;
  page.start.disabled = true;
  page.back.disabled = true;
  setText(page.start, "Starting…");
  try {
    const { id } = await request("changes", {
      body: { name: kind.name, arguments: values },
      timeout_ms: POST_TIMEOUT_MS,
    });
    if (closeCount !== state.closeCount) return; // the user has closed the dialog
    dialog.close();
    location.hash = `#/changes?id=${encodeURIComponent(id)}`;
  } catch (error) {
    if (error.isAnswer === false)
      error.hint =
        "The change may have started. Look at the list of changes before you start it again.";
    showError(page.error, error);
    setText(page.start, "Start the change");
    page.start.disabled = false;
    page.back.disabled = false;
  }
}
