// The transactions of a partition: pages by ID or time, a header filter, and following the tail.
//
// Rules:
//   1. The URL contains the state of the page: first or last, header, open and follow.
//   2. The table has at most ROWS_MAX rows; while following, the oldest rows are removed.
//   3. A payload is shown only as text, and is never interpreted, for example as HTML.

import {
  copyButton,
  el,
  errorBox,
  scrollTable,
  setAttribute,
  setHidden,
  setText,
  showError,
} from "./dom.js";
import * as format from "./format.js";
import { poll, request } from "./requests.js";

const PAGE_SIZE = 50;
const FOLLOW_SIZE = 200;
const FOLLOW_POLL_MS = 1000;
const ROWS_MAX = 500;
const SKIP_OVER = 2000; // when following lags by more transactions, it skips to the tail
const PREVIEW_MAX = 200;
const END_PX = 40;
const COLUMNS = ["ID", "Time", "#Header", "#Client", "Request ID", "#Size", "Format", "Payload"];

export function transactionsPage(root, context) {
  const page = build(root, context);
  readQuery(page, context.query);
  return {
    title: `Transactions of partition ${context.partition}`,
    onQuery: (query) => readQuery(page, query),
    stop: () => {
      page.following?.stop();
      page.loading?.abort();
    },
  };
}

function build(root, { partition, replaceQuery, pushQuery }) {
  const page = {
    partition,
    replaceQuery,
    pushQuery,
    rows: [],
    first: null,
    last: null,
    next: null,
    previous: -1,
    mark: null,
    following: null,
    loading: null,
  };
  page.status = el("p", { class: "note", id: "transactions-status", role: "status" });
  page.error = errorBox({ id: "transactions-error" });
  page.recover = el("p", { hidden: true });
  page.body = el("tbody", { id: "transactions" });
  page.empty = el("p", { class: "empty", hidden: true });
  page.box = scrollTable(
    {
      caption: `Transactions of partition ${partition}`,
      id: "transactions-table",
      columns: COLUMNS,
      body: page.body,
    },
    { class: "scroll transactions", id: "transactions-box" },
  );
  page.box.addEventListener(
    "scroll",
    () => page.following !== null && page.isPaused && !isReading(page) && page.following.pollNow(),
  );
  root.append(
    el(
      "p",
      { class: "crumbs" },
      el("a", { href: "#/" }, "Cluster"),
      " / ",
      el("a", { href: `#/partitions/${partition}` }, `Partition ${partition}`),
    ),
    el("h1", { tabindex: "-1" }, "Transactions"),
    jumpForms(page),
    pageButtons(page),
    page.error,
    page.recover,
    page.status,
    page.empty,
    page.box,
  );
  return page;
}

function jumpForms(page) {
  page.idField = el("input", {
    id: "jump-id",
    inputmode: "numeric",
    pattern: "[0-9]+",
    autocomplete: "off",
    size: "12",
  });
  page.timeField = el("input", { id: "jump-time", type: "datetime-local", step: "1" });
  page.headerField = el("input", {
    id: "header-filter",
    autocomplete: "off",
    size: "10",
    placeholder: "7,8",
    "aria-describedby": "header-help",
  });
  const form = (id, label, field, buttonText, action, help = null) =>
    el(
      "form",
      {
        id,
        class: "jump",
        novalidate: true,
        autocomplete: "off",
        submit: (event) => {
          event.preventDefault();
          action();
        },
      },
      el("label", { for: field.id }, label),
      el("div", { class: "joined" }, field, el("button", { type: "submit" }, buttonText)),
      help,
    );
  return el(
    "div",
    { class: "jumps" },
    form("jump-id-form", "Transaction ID", page.idField, "Go", () => jumpToId(page)),
    form("jump-time-form", `Time (${format.timeZone()})`, page.timeField, "Go", () =>
      jumpToTime(page),
    ),
    form(
      "header-form",
      "Header",
      page.headerField,
      "Filter",
      () => filter(page),
      el(
        "span",
        { id: "header-help", class: "visually-hidden" },
        "Numbers with commas; empty for all headers",
      ),
    ),
  );
}

function pageButtons(page) {
  const button = (id, text, click) =>
    el(
      "button",
      {
        type: "button",
        id,
        click: () => {
          if (page[id].getAttribute("aria-disabled") === null) click();
        },
      },
      text,
    );
  page.oldest = button("oldest", "Oldest", () => go(page, { first: "0" }));
  page.older = button("older", "Older", () => go(page, { last: String(page.previous) }));
  page.newer = button("newer", "Newer", () => go(page, { first: String(page.next) }));
  page.newest = button("newest", "Newest", () => go(page, {}));
  page.follow = el(
    "button",
    { type: "button", id: "follow", "aria-pressed": "false", click: () => toggleFollow(page) },
    "Follow the tail",
  );
  page.expand = el(
    "button",
    { type: "button", id: "expand-all", click: () => toggleAll(page) },
    "Expand all",
  );
  return el(
    "div",
    { class: "toolbar" },
    el(
      "div",
      { class: "group", role: "group", "aria-label": "Pages" },
      page.oldest,
      page.older,
      page.newer,
      page.newest,
    ),
    page.follow,
    page.expand,
  );
}

const go = (page, { first = null, last = null, open = null }) =>
  page.pushQuery({ first, last, open, follow: null });

// ---- state in the URL --------------------------------------------------------------------------

function readQuery(page, query) {
  page.following?.stop();
  page.following = null;
  page.loading?.abort();
  page.first = digitsOrNull(query.get("first"));
  page.last = digitsOrNull(query.get("last"));
  page.open = digitsOrNull(query.get("open"));
  page.header = (query.get("header") ?? "").replace(/\s+/g, "");
  page.headerField.value = page.header;
  page.isFollowing = query.get("follow") === "1";
  setAttribute(page.follow, "aria-pressed", String(page.isFollowing));
  showError(page.error, null);
  setHidden(page.recover, true);
  if (page.isFollowing) follow(page);
  else loadPage(page);
}

const digitsOrNull = (text) => (/^\d{1,18}$/.test(text ?? "") ? text : null);

function pathOf(page, { first = null, last = null, count }) {
  const query = new URLSearchParams({ count });
  if (first !== null) query.set("first", first);
  if (last !== null) query.set("last", last);
  if (page.header !== "") query.set("header", page.header);
  return `partitions/${page.partition}/transactions?${query}`;
}

async function loadPage(page) {
  const control = new AbortController();
  page.loading = control;
  setText(page.status, "Loading…");
  try {
    const answer = await request(
      pathOf(page, {
        first: page.first,
        last: page.first === null ? page.last : null,
        count: PAGE_SIZE,
      }),
      { signal: control.signal, timeout_ms: 15000 },
    );
    if (control.signal.aborted) return;
    showPage(page, answer);
  } catch (error) {
    if (!control.signal.aborted) showFailure(page, error);
  }
}

function showFailure(page, error) {
  setText(page.status, "");
  showError(page.error, error);
  const available = error.fields?.first_available;
  setHidden(page.recover, !Number.isInteger(available));
  if (Number.isInteger(available)) {
    page.recover.replaceChildren(
      el(
        "button",
        { type: "button", click: () => go(page, { first: String(available), open: null }) },
        `Show transactions from the first available ID ${available}`,
      ),
    );
  }
}

function showPage(page, answer) {
  clearRows(page);
  addRows(page, answer.transactions);
  const isTail = page.first === null;
  page.next = answer.next;
  page.mark = answer.high_water_mark;
  page.previous = isTail
    ? (answer.previous ?? (answer.transactions[0]?.transaction_id ?? 0) - 1)
    : Number(page.first) - 1;
  enable(page.older, page.previous >= answer.first_available);
  enable(page.oldest, page.previous >= answer.first_available);
  enable(page.newer, answer.next <= answer.high_water_mark);
  enable(page.newest, true);
  showStatus(page, answer);
  page.box.scrollTop = isTail ? page.box.scrollHeight : 0;
}

const enable = (button, isEnabled) =>
  setAttribute(button, "aria-disabled", isEnabled ? null : "true");

function showStatus(page, answer) {
  const rows = page.rows;
  const filterText = page.header === "" ? "" : ` with header ${page.header}`;
  setHidden(page.box, rows.length === 0);
  setHidden(page.empty, rows.length > 0);
  setText(page.empty, emptyText(page, answer, filterText));
  const shownText =
    rows.length === 0
      ? ""
      : `${format.count(rows.length, "transaction")}${filterText}: ${rows[0].id} to ${rows[rows.length - 1].id}. `;
  const logText =
    answer.high_water_mark < answer.first_available
      ? "The log has no available transactions."
      : `The log has ${answer.first_available} to ${answer.high_water_mark}.`;
  setText(
    page.status,
    page.isFollowing
      ? `Following the tail${filterText}, ${format.count(rows.length, "row")}. High-water mark: ${answer.high_water_mark}.`
      : `${shownText}${logText}`,
  );
  setAttribute(page.status, "aria-live", page.isFollowing ? "off" : "polite");
}

function emptyText(page, answer, filterText) {
  if (page.isFollowing) return `Waiting for transactions${filterText}…`;
  if (page.first !== null && Number(page.first) > answer.high_water_mark)
    return `The log has no transaction ${page.first} yet.`;
  if (page.first !== null && answer.next <= answer.high_water_mark)
    return `There are no transactions${filterText} from ${page.first} to ${answer.next - 1}. Select Newer to continue.`;
  if (page.previous >= answer.first_available) {
    return `There are no transactions${filterText} from ${page.previous + 1} on. Select Older to continue.`;
  }
  return `There are no transactions${filterText} here.`;
}

// ---- jumps -------------------------------------------------------------------------------------

function fail(page, message, hint = "") {
  showError(page.error, { message, hint });
}

function jumpToId(page) {
  const id = page.idField.value.replace(/[\s,]+/g, ""); // a pasted ID may contain separators
  if (digitsOrNull(id) === null)
    fail(page, "this is not a transaction ID", "Enter a whole number.");
  else go(page, { first: id, open: id });
}

async function jumpToTime(page) {
  const time_ms = new Date(page.timeField.value).getTime();
  if (Number.isNaN(time_ms)) {
    fail(page, "the date or the time is missing", "Enter both.");
    return;
  }
  try {
    const { transaction_id, high_water_mark } = await request(
      `partitions/${page.partition}/first-at?time_ms=${time_ms}`,
      { timeout_ms: 15000 },
    );
    if (!page.box.isConnected) return;
    if (transaction_id > high_water_mark) {
      fail(
        page,
        `no transaction at or after ${format.time(time_ms)}`,
        "Select Newest to see the end of the log.",
      );
      return;
    }
    go(page, { first: String(transaction_id) });
  } catch (error) {
    showError(page.error, error);
  }
}

function filter(page) {
  const header = page.headerField.value.replace(/\s+/g, "");
  if (header !== "" && !/^-?\d+(,-?\d+)*$/.test(header))
    fail(page, "this is not a list of headers", "Enter numbers with commas, for example 7,8.");
  else page.pushQuery({ header: header === "" ? null : header, open: null });
}

// ---- following ---------------------------------------------------------------------------------

function toggleFollow(page) {
  if (!page.isFollowing) {
    page.pushQuery({ follow: "1", first: null, last: null, open: null });
    return;
  }
  page.following.stop();
  page.following = null;
  page.isFollowing = false;
  setAttribute(page.follow, "aria-pressed", "false");
  const first = page.rows[0]?.id ?? null;
  page.replaceQuery({ follow: null, first });
  page.first = first === null ? null : String(first);
  if (page.answer !== undefined) {
    page.previous = (first ?? page.answer.next) - 1;
    enable(page.older, page.previous >= page.answer.first_available);
    enable(page.oldest, page.previous >= page.answer.first_available);
    enable(page.newer, page.next <= page.answer.high_water_mark);
    showStatus(page, page.answer);
  }
}

function follow(page) {
  page.next = null;
  page.isLate = false;
  for (const button of [page.older, page.oldest, page.newer, page.newest]) enable(button, false);
  setText(page.status, "Loading…");
  page.following = poll(
    (signal) => followOnce(page, signal),
    () => (page.isLate ? 0 : FOLLOW_POLL_MS),
  );
}

async function followOnce(page, signal) {
  try {
    const isStart = page.next === null;
    page.isPaused = !isStart && isReading(page);
    if (page.isPaused) {
      setText(page.status, "Paused while you read. Scroll to the end of the table to continue.");
      return;
    }
    const path = isStart
      ? pathOf(page, { count: PAGE_SIZE })
      : pathOf(page, { first: page.next, count: FOLLOW_SIZE });
    const answer = await request(path, { signal, timeout_ms: 15000 });
    if (signal.aborted) return;
    showError(page.error, null);
    setHidden(page.recover, true);
    if (isStart) clearRows(page);
    addFollowed(page, answer, { isStart });
  } catch (error) {
    if (signal.aborted) return;
    page.isLate = false;
    // The next transaction has expired: start again at the tail.
    if (Number.isInteger(error.fields?.first_available)) page.next = null;
    showError(page.error, error);
  }
}

// While the user has scrolled back or has selected text, following does not move the rows.
function isReading({ box }) {
  if (box.hidden) return false;
  const selection = getSelection();
  if (!selection.isCollapsed && box.contains(selection.anchorNode)) return true;
  return box.scrollHeight - box.scrollTop - box.clientHeight > END_PX;
}

function addFollowed(page, answer, { isStart }) {
  const isAtEnd = isStart || !isReading(page); // the user may have scrolled after the request
  addRows(page, answer.transactions);
  page.answer = answer;
  page.next = answer.next;
  page.mark = answer.high_water_mark;
  page.isLate = answer.next <= answer.high_water_mark;
  // With a filter, there may be many transactions between the few rows that are shown.
  if (page.header === "" && answer.high_water_mark - answer.next > SKIP_OVER) {
    addGap(page, answer.high_water_mark - answer.next);
    page.next = answer.high_water_mark - PAGE_SIZE + 1;
  }
  if (isAtEnd) removeOldest(page);
  showStatus(page, answer);
  if (isAtEnd) page.box.scrollTop = page.box.scrollHeight;
}

function removeOldest(page) {
  for (const removed of page.rows.splice(0, Math.max(0, page.rows.length - ROWS_MAX))) {
    if (
      removed.row.contains(document.activeElement) ||
      removed.detail?.contains(document.activeElement)
    )
      page.box.focus();
    removed.gap?.remove();
    removed.row.remove();
    removed.detail?.remove();
  }
}

function addGap(page, number) {
  const gap = el(
    "tr",
    { class: "gap" },
    el(
      "td",
      { colspan: COLUMNS.length },
      `${format.count(number, "transaction")} skipped: the log grows faster than this page can show it.`,
    ),
  );
  page.body.append(gap);
  if (page.rows.length > 0) page.rows[page.rows.length - 1].gap = gap;
}

// ---- rows --------------------------------------------------------------------------------------

function clearRows(page) {
  page.body.replaceChildren();
  page.rows = [];
  setText(page.expand, "Expand all");
}

function addRows(page, transactions) {
  for (const transaction of transactions) {
    const item = createRow(page, transaction);
    page.rows.push(item);
    page.body.append(item.row);
    if (String(item.id) === page.open) {
      setAttribute(item.row, "data-wanted", "true");
      toggle(item, true);
    }
  }
}

function createRow(page, transaction) {
  const id = transaction.transaction_id;
  const button = el(
    "button",
    {
      type: "button",
      class: "expander",
      "aria-expanded": "false",
      "aria-label": `Transaction ${id}`,
    },
    el("span", { class: "arrow", "aria-hidden": "true" }, "▸"),
    ` ${id}`,
  );
  const preview = el(
    "td",
    { class: "preview code" },
    String(transaction.text ?? "").slice(0, PREVIEW_MAX),
  );
  const row = el(
    "tr",
    { "data-transaction": id },
    el("th", { scope: "row" }, button),
    el("td", { class: "nowrap" }, format.time(transaction.time_ms, { hasMilliseconds: true })),
    el("td", { class: "number" }, String(transaction.header)),
    el("td", { class: "number" }, String(transaction.client_id)),
    el("td", { class: "code" }, String(transaction.request_id)),
    el("td", { class: "number" }, format.size(transaction.size)),
    el("td", {}, String(transaction.format)),
    preview,
  );
  const item = { id, row, button, detail: null, transaction, page };
  button.addEventListener("click", (event) => {
    event.stopPropagation();
    toggle(item, item.button.getAttribute("aria-expanded") !== "true");
  });
  row.addEventListener("click", () => {
    if (String(getSelection()) === "")
      toggle(item, item.button.getAttribute("aria-expanded") !== "true");
  });
  return item;
}

function toggle(item, isOpen) {
  setAttribute(item.button, "aria-expanded", String(isOpen));
  setText(item.button.firstChild, isOpen ? "▾" : "▸");
  if (isOpen && item.detail === null) {
    item.detail = createDetail(item);
    item.row.after(item.detail);
  }
  if (item.detail !== null) setHidden(item.detail, !isOpen);
}

function createDetail({ id, transaction, page }) {
  const text = String(transaction.text ?? "");
  const isJson = transaction.format === "json" || /^\s*[{[]/.test(text);
  const shownText = isJson ? format.indentJson(text) : text;
  const shortenedNote = transaction.is_shortened ? " The gateway has shortened the payload." : "";
  return el(
    "tr",
    { class: "detail", "data-detail": id },
    el(
      "td",
      { colspan: COLUMNS.length },
      el(
        "div",
        { class: "detail-box" },
        el(
          "p",
          { class: "meta" },
          `${transaction.format}, ${format.count(transaction.size, "byte")}.${shortenedNote}`,
          copyButton(() => shownText, "Copy payload"),
          el(
            "a",
            { href: `#/partitions/${page.partition}/transactions?first=${id}&open=${id}` },
            "Link to this transaction",
          ),
        ),
        shownText === ""
          ? el("p", { class: "empty" }, "The payload has no text.")
          : el("pre", { tabindex: "0", "aria-label": `Payload of transaction ${id}` }, shownText),
      ),
    ),
  );
}

function toggleAll(page) {
  const isOpen = page.rows.some((row) => row.button.getAttribute("aria-expanded") !== "true");
  for (const row of page.rows) toggle(row, isOpen);
  setText(page.expand, isOpen ? "Collapse all" : "Expand all");
}
