// Functions that create elements, update them in place, and update lists of elements.
//
// Rules:
//   1. Data becomes only text nodes and attribute values; no function parses HTML.
//   2. An update writes only what has changed, so that focus, selection and scroll position stay.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else setAttribute(node, key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

// Make the children of `parent` equal to `items`; `create` and `update` get (item) and (node, item).
export function keyed(parent, items, { key, create, update }) {
  parent.keyedNodes ??= new Map();
  const nodesByKey = parent.keyedNodes;
  const keys = new Set(items.map((item) => String(key(item))));
  for (const [existingKey, node] of nodesByKey) {
    if (!keys.has(existingKey)) {
      node.remove();
      nodesByKey.delete(existingKey);
    }
  }
  let nextNode = parent.firstChild;
  for (const item of items) {
    const itemKey = String(key(item));
    let node = nodesByKey.get(itemKey);
    if (node === undefined) {
      node = create(item);
      nodesByKey.set(itemKey, node);
    }
    update?.(node, item);
    if (node === nextNode) nextNode = nextNode.nextSibling;
    else parent.insertBefore(node, nextNode);
  }
}

// Return named parts of a node: parts(card).title is the element with data-part="title".
export function parts(node) {
  if (node.namedParts === undefined) {
    node.namedParts = {};
    for (const part of node.querySelectorAll("[data-part]")) {
      node.namedParts[part.dataset.part] = part;
    }
  }
  return node.namedParts;
}

export function part(tag, name, attributes = {}, ...children) {
  return el(tag, { "data-part": name, ...attributes }, ...children);
}

// A table that scrolls in its own box; a title that starts with # marks a column of numbers.
export function scrollTable({ caption, id, columns, body }, attributes = {}) {
  const headerCells = columns.map((column) =>
    el(
      "th",
      { scope: "col", class: column.startsWith("#") ? "number" : null },
      column.replace("#", ""),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, ...attributes },
    el(
      "table",
      { id },
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, ...headerCells)),
      body,
    ),
  );
}

export const hiddenText = (text) => el("span", { class: "visually-hidden" }, text);

// The symbol, the word and the level of each state; the level determines the color.
const STATES = {
  up: ["✓", "up", "good"],
  down: ["✕", "down", "bad"],
  unknown: ["?", "unknown", "muted"],
  open: ["✓", "open", "good"],
  closed: ["✕", "closed", "bad"],
  no_owner: ["✕", "no owner", "bad"],
  no_quorum: ["✕", "no quorum", "bad"],
  in_sync: ["✓", "in sync", "good"],
  out_of_sync: ["▲", "out of sync", "warn"],
  unavailable: ["✕", "unavailable", "bad"],
  none: ["–", "no replica", "none"],
  good: ["✓", "", "good"],
  warn: ["▲", "", "warn"],
  bad: ["✕", "", "bad"],
  done: ["✓", "done", "good"],
  failed: ["✕", "failed", "bad"],
  begun: ["▶", "running", "busy"],
  muted: ["?", "", "muted"],
};

// An unknown state, from a newer or a malicious gateway, is shown as it is.
const styleOf = (state) =>
  Object.hasOwn(STATES, state) ? STATES[state] : ["?", String(state), "muted"];

export const stateWord = (state) => styleOf(state)[1];

export function stateMark(state, attributes = {}) {
  const node = el(
    "span",
    { class: "state", ...attributes },
    el("span", { class: "symbol", "aria-hidden": "true" }),
    el("span", { class: "word" }),
  );
  setState(node, state);
  return node;
}

export function setState(node, state, word = null) {
  const [symbol, defaultWord, level] = styleOf(state);
  setAttribute(node, "data-state", state);
  setAttribute(node, "data-level", level);
  setText(node.firstChild, symbol);
  setText(node.lastChild, word ?? defaultWord);
}

export function copyButton(textOf, label = "Copy") {
  const button = el("button", { type: "button", class: "small copy" }, label);
  let timer = null;
  button.addEventListener("click", async () => {
    setText(button, (await copyText(textOf(), button)) ? "Copied" : "Not copied");
    clearTimeout(timer);
    timer = setTimeout(() => setText(button, label), 1500);
  });
  return button;
}

// navigator.clipboard exists only with https and on localhost, but gateways often use plain http.
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "visually-hidden", readonly: true, tabindex: "-1" });
    area.value = text;
    (button.closest("dialog") ?? document.body).append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    button.focus();
    return isCopied;
  }
}

// Show an error of the gateway next to the place where it occurred; null hides the error.
export function errorBox(attributes = {}) {
  return el("div", { class: "problem", role: "alert", hidden: true, ...attributes });
}

export function showError(box, error) {
  setHidden(box, error === null);
  const text = error === null ? "" : `${error.message}\n${error.hint ?? ""}`;
  if (box.shownText === text) return;
  box.shownText = text;
  box.replaceChildren();
  if (error === null) return;
  box.append(
    el("p", {}, el("span", { class: "symbol", "aria-hidden": "true" }, "✕"), ` ${error.message}`),
  );
  if (error.hint) box.append(el("p", { class: "hint" }, error.hint));
}

const WIDTH = 120;
const HEIGHT = 28;

export function sparkline() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  for (const name of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    svg.append(path);
  }
  return svg;
}

// `points` are [ms, value], sorted by time; the time axis ends at the last point.
export function drawSparkline(svg, points, { span_ms, label }) {
  setAttribute(svg, "aria-label", label);
  const end_ms = points.length === 0 ? 0 : points[points.length - 1][0];
  const shownPoints = points.filter(([ms]) => ms >= end_ms - span_ms);
  const maximum = shownPoints.reduce((highest, [, value]) => Math.max(highest, value * 1.1), 1e-9);
  const pointText = ([ms, value]) =>
    `${(WIDTH * (1 - (end_ms - ms) / span_ms)).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (value / maximum)).toFixed(1)}`;
  const line = shownPoints.length < 2 ? "" : `M${shownPoints.map(pointText).join("L")}`;
  const startX = shownPoints.length < 2 ? "" : pointText(shownPoints[0]).split(",")[0];
  setAttribute(svg.firstChild, "d", line && `${line}L${WIDTH},${HEIGHT}L${startX},${HEIGHT}Z`);
  setAttribute(svg.lastChild, "d", line);
}
