// The entry point of the console. The hash of the URL selects the page. This file also contains
// the navigation, the banner and the keyboard shortcuts.

import { startChangeDialog } from "./change_dialog.js";
import { changesPage } from "./changes_page.js";
import * as data from "./cluster_data.js";
import { clusterPage } from "./cluster_page.js";
import { el, setAttribute, setHidden, setText } from "./dom.js";
import { findingsPage, startFindings } from "./findings_page.js";
import * as format from "./format.js";
import { partitionPage } from "./partition_page.js";
import { startToken } from "./token.js";
import { transactionsPage } from "./transactions_page.js";

const ROUTES = [
  [/^\/$/, clusterPage, "cluster"],
  [/^\/partitions\/(\d{1,9})$/, partitionPage, "cluster"],
  [/^\/partitions\/(\d{1,9})\/transactions$/, transactionsPage, "cluster"],
  [/^\/findings$/, findingsPage, "findings"],
  [/^\/changes$/, changesPage, "changes"],
];
const SHORTCUTS = { c: "#/", f: "#/findings", h: "#/changes" };
const CHORD_MS = 1500;
const BANNER_MS = 500;

const current = { path: null, page: null };
const find = (id) => document.getElementById(id);

// ---- pages -------------------------------------------------------------------------------------

function readHash() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?", 2);
  return { path: path || "/", query: new URLSearchParams(query) };
}

function withQuery(changes) {
  const { path, query } = readHash();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString().replaceAll("%2C", ",");
  return `#${path}${text && "?"}${text}`;
}

// Change the query in the URL without a new entry in the history and without reloading the page.
function replaceQuery(changes) {
  history.replaceState(null, "", withQuery(changes));
}

function pushQuery(changes) {
  const hash = withQuery(changes);
  if (location.hash === hash)
    showPage(); // the browser sends no event in this case
  else location.hash = hash;
}

function showPage() {
  const { path, query } = readHash();
  if (path === current.path && current.page?.onQuery) {
    current.page.onQuery(query);
    return;
  }
  const isFirst = current.path === null;
  current.page?.stop?.();
  current.path = path;
  const main = find("main");
  main.replaceChildren();
  const [match, create, section] = matchRoute(path);
  current.page = create(main, {
    query,
    replaceQuery,
    pushQuery,
    partition: Number(match?.[1] ?? 0),
  });
  for (const name of ["cluster", "findings", "changes"]) {
    setAttribute(
      find(`nav-${name}`),
      "aria-current",
      name !== section ? null : find(`nav-${name}`).hash === `#${path}` ? "page" : "true",
    );
  }
  showTitle();
  if (isFirst) return;
  window.scrollTo(0, 0);
  main.querySelector("h1")?.focus({ preventScroll: true });
}

function matchRoute(path) {
  for (const [pattern, create, section] of ROUTES) {
    const match = pattern.exec(path);
    if (match !== null) return [match, create, section];
  }
  return [null, unknownPage, ""];
}

function unknownPage(root) {
  root.append(
    el("h1", { tabindex: "-1" }, "Page not found"),
    el(
      "p",
      {},
      "The console has no page at this address. ",
      el("a", { href: "#/" }, "Show the cluster"),
    ),
  );
  return { title: "Page not found" };
}

function showTitle() {
  const title = [current.page.title, data.cluster()?.name, "Waltz console"]
    .filter(Boolean)
    .join(" · ");
  if (document.title !== title) document.title = title;
}

// ---- banner ------------------------------------------------------------------------------------

function showBanner() {
  const stale = data.staleness();
  setHidden(find("stale-banner"), stale === null);
  setAttribute(document.body, "data-stale", stale === null ? null : "true");
  setText(find("cluster-name"), data.cluster()?.name ?? "");
  setAttribute(
    find("cluster-name"),
    "title",
    data.cluster() && `${data.cluster().name}, Waltz ${data.cluster().version}`,
  );
  showTitle();
  if (stale === null) {
    setText(find("stale-text"), "");
    return;
  }
  const message = stale.error.message;
  setText(find("stale-text"), `${message.charAt(0).toUpperCase()}${message.slice(1)}.`);
  setText(find("stale-hint"), stale.error.hint ?? "");
  setText(
    find("stale-age"),
    stale.age_ms === null
      ? "There is no data yet."
      : `The data is stale: it is ${format.duration(stale.age_ms)} old.`,
  );
}

// ---- keyboard ----------------------------------------------------------------------------------

function startKeyboard() {
  let chordEnd_ms = 0;
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea, [contenteditable]");
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      isTyping ||
      document.querySelector("dialog[open]")
    )
      return;
    if (!find("use-shortcuts").checked) return;
    const isChord = event.timeStamp < chordEnd_ms;
    chordEnd_ms = 0;
    if (event.key === "?") find("help-dialog").showModal();
    else if (event.key === "g") chordEnd_ms = event.timeStamp + CHORD_MS;
    else if (isChord && Object.hasOwn(SHORTCUTS, event.key)) location.hash = SHORTCUTS[event.key];
    else return;
    event.preventDefault();
  });
  find("show-help").addEventListener("click", () => find("help-dialog").showModal());
  find("help-close").addEventListener("click", () => find("help-dialog").close());
  find("skip-link").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the address of the page
    find("main").focus();
    find("main").scrollIntoView();
  });
}

startToken();
startKeyboard();
startChangeDialog();
data.startClusterData();
startFindings();
window.addEventListener("hashchange", showPage);
showPage();
data.onClusterData(showBanner);
// The banner contains an age, which changes.
setInterval(() => document.visibilityState === "visible" && showBanner(), BANNER_MS);
