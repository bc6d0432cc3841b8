// The page of the cluster: health, rates, processes, and the matrix of partitions and storages.

import * as data from "./cluster_data.js";
import {
  drawSparkline,
  el,
  hiddenText,
  keyed,
  part,
  parts,
  setAttribute,
  setHidden,
  setState,
  setText,
  sparkline,
  stateMark,
} from "./dom.js";
import * as format from "./format.js";

const COMPACT_COLUMNS = 6; // with more storages, normal states are shown without words
const LONG_ROWS = 25;

export function clusterPage(root, { query, replaceQuery }) {
  const page = build(root, { query, replaceQuery });
  const stop = data.onClusterData(() => show(page));
  return { title: "Cluster", stop };
}

function build(root, { query, replaceQuery }) {
  const page = {
    isFiltered: query.get("problems") === "1",
    level: stateMark("unknown", { class: "state health-mark" }),
    health: el(
      "p",
      { id: "health-line", "data-testid": "health-line" },
      "Waiting for the gateway…",
    ),
    problems: el("ul", { class: "problem-list" }),
    notes: el("ul", { class: "note-list" }),
    rate: el("output", { class: "big-number", id: "total-rate" }),
    line: sparkline(),
    zookeeper: el("div", { class: "cards narrow" }),
    servers: el("div", { class: "cards" }),
    storages: el("div", { class: "cards" }),
    table: buildTable(),
    filter: el("input", { type: "checkbox", id: "only-problems" }),
    filterText: el("span"),
  };
  page.filter.checked = page.isFiltered;
  page.filter.addEventListener("change", () => {
    page.isFiltered = page.filter.checked;
    replaceQuery({ problems: page.isFiltered ? "1" : null });
    show(page);
  });
  page.content = el("div", { hidden: true }, ...sections(page));
  page.healthBox = el(
    "section",
    { class: "health", "aria-label": "Health" },
    page.level,
    el(
      "div",
      {
        class: "health-words",
        "data-testid": "problem-list",
        role: "status",
        "aria-live": "polite",
      },
      page.health,
      page.problems,
      page.notes,
    ),
    el(
      "div",
      { class: "total" },
      el("span", { class: "label" }, "Transactions"),
      page.rate,
      page.line,
    ),
  );
  root.append(
    el("h1", { tabindex: "-1", class: "visually-hidden" }, "Cluster"),
    page.healthBox,
    page.content,
  );
  return page;
}

function sections(page) {
  const section = (id, title, ...children) =>
    el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...children);
  return [
    el(
      "div",
      { class: "processes" },
      section("storages-title", "Storages", page.storages),
      section("servers-title", "Servers", page.servers),
      section("zookeeper-title", "ZooKeeper servers", page.zookeeper),
    ),
    section(
      "partitions-title",
      "Partitions",
      el(
        "div",
        { class: "toolbar" },
        el("label", { class: "check" }, page.filter, " Only partitions with problems"),
        page.filterText,
        legend(),
      ),
      page.table.box,
    ),
  ];
}

function legend() {
  const states = ["in_sync", "out_of_sync", "unavailable", "unknown"];
  return el("p", { class: "legend" }, "Replicas: ", ...states.map((state) => stateMark(state)));
}

function show(page) {
  const cluster = data.cluster();
  if (cluster === null) return;
  setHidden(page.content, false);
  const problems = data.problemsOf(cluster);
  const level = problems.length === 0 ? "good" : problems[0].level === "bad" ? "bad" : "warn";
  setState(page.level, level, { good: "Healthy", warn: "Degraded", bad: "Problem" }[level]);
  setAttribute(page.healthBox, "data-level", level);
  showHealth(page, cluster, problems);
  setText(page.rate, format.rate(data.totalRate()));
  drawSparkline(page.line, data.totalPoints(), {
    span_ms: data.SPARKLINE_MS,
    label: data.rateLabel(data.totalPoints()),
  });
  keyed(page.zookeeper, withShortNames(cluster.zookeeper), {
    key: (item) => item.address,
    create: zookeeperCard,
    update: updateZookeeper,
  });
  keyed(page.servers, withShortNames(cluster.servers), {
    key: (item) => item.address,
    create: serverCard,
    update: updateServer,
  });
  keyed(page.storages, withShortNames(withReplicaProblems(cluster)), {
    key: (item) => item.address,
    create: storageCard,
    update: updateStorage,
  });
  showTable(page, cluster);
}

// The health line shows the worst problem; a list after it shows the others.
function showHealth(page, cluster, problems) {
  setText(page.health, data.healthText(cluster, problems));
  keyed(page.problems, problems.slice(1), {
    key: (problem) => problem.text,
    create: (problem) => el("li", {}, stateMark(problem.level), " ", problem.text),
  });
  keyed(page.notes, data.notesOf(cluster), {
    key: (note) => note,
    create: (note) => el("li", {}, note),
  });
}

// Highlight the part of an address that differs from the others, because host names can be long.
function withShortNames(items) {
  const names = format.shortNames(items.map((item) => item.address));
  return items.map((item) => ({ ...item, short: names.get(item.address) }));
}

function withReplicaProblems(cluster) {
  const counts = new Map();
  for (const partition of cluster.partitions) {
    for (const replica of partition.replicas) {
      if (replica.state === "out_of_sync" || replica.state === "unavailable") {
        counts.set(replica.storage, (counts.get(replica.storage) ?? 0) + 1);
      }
    }
  }
  return cluster.storages.map((storage) => ({
    ...storage,
    not_in_sync: counts.get(storage.address) ?? 0,
  }));
}

// ---- cards -------------------------------------------------------------------------------------

function card(kind, address, fields) {
  return el(
    "article",
    { class: "card", "data-testid": `${kind}-card`, "data-address": address },
    el(
      "header",
      {},
      el("h3", {}, part("span", "short"), part("span", "rest", { class: "rest" })),
      part("span", "group", { class: "group-name" }),
      stateMark("unknown", { "data-part": "state" }),
    ),
    el("p", { class: "card-error", "data-part": "error", hidden: true }),
    el(
      "dl",
      {},
      ...fields.map(([name, label]) =>
        el("div", { "data-part": `${name}_row` }, el("dt", {}, label), part("dd", name)),
      ),
    ),
  );
}

function updateCard(node, item) {
  const { state, error, short, rest } = parts(node);
  setText(short, item.short);
  setText(rest, item.address.slice(item.short.length));
  setAttribute(node, "data-state", item.state);
  setState(state, item.state);
  setText(error, item.error);
  setHidden(error, !item.error);
}

const zookeeperCard = (item) => card("zookeeper", item.address, [["mode", "Mode"]]);

function updateZookeeper(node, item) {
  updateCard(node, item);
  setText(parts(node).mode, item.mode || format.NONE);
}

const serverCard = (item) =>
  card("server", item.address, [
    ["open", "Open"],
    ["not_open", "Not open"],
    ["preferred", "Preferred"],
    ["latency", "Answers in"],
    ["unreachable", "Unreachable"],
  ]);

function updateServer(node, item) {
  updateCard(node, item);
  const nodes = parts(node);
  const list = (partitions) =>
    partitions.length === 0
      ? "none"
      : `${format.count(partitions.length, "partition")}: ${format.ranges(partitions)}`;
  setText(nodes.open, list(item.open));
  setText(nodes.not_open, list(item.not_open));
  setHidden(nodes.not_open_row, item.not_open.length === 0);
  setAttribute(nodes.not_open_row, "data-level", "bad");
  setText(nodes.preferred, format.ranges(item.preferred));
  // A process that is down has no current latency.
  setText(nodes.latency, format.milliseconds(item.state === "down" ? null : item.latency_ms));
  setText(nodes.unreachable, item.unreachable_storages.join(", "));
  setHidden(nodes.unreachable_row, item.unreachable_storages.length === 0);
  setAttribute(nodes.unreachable_row, "data-level", "bad");
}

function storageCard(item) {
  const node = card("storage", item.address, [
    ["replicas", "Replicas"],
    ["disk", "Disk used"],
    ["full", "Full in"],
    ["append", "Append latency"],
  ]);
  node.querySelector('[data-part="disk_row"]').after(
    el(
      "div",
      {
        class: "bar",
        "data-part": "bar",
        role: "meter",
        "aria-label": `Disk use of ${item.address}`,
        "aria-valuemin": "0",
        "aria-valuemax": "100",
      },
      el("div", { class: "fill" }),
    ),
  );
  return node;
}

function updateStorage(node, item) {
  updateCard(node, item);
  setAttribute(node, "data-full", item.is_full);
  const nodes = parts(node);
  const outOfSyncText =
    item.not_in_sync === 0 ? "" : `, ${format.integer(item.not_in_sync)} not in sync`;
  setText(nodes.replicas, `${format.integer(item.replica_count)}${outOfSyncText}`);
  setAttribute(nodes.replicas_row, "data-level", item.not_in_sync > 0 ? "warn" : null);
  showDisk(nodes, item);
  setText(
    nodes.append,
    format.milliseconds(item.state === "down" ? null : item.append_latency_ms),
  );
  setText(nodes.group, `group ${item.group ?? format.NONE}`);
}

function showDisk(nodes, item) {
  const isKnown = item.size_bytes > 0;
  const usedPercent = isKnown
    ? Math.min(100, Math.max(0, 100 * (1 - item.free_bytes / item.size_bytes)))
    : 0;
  const level = item.is_full
    ? "bad"
    : item.days_until_full !== null && item.days_until_full < 7
      ? "warn"
      : null;
  setText(
    nodes.disk,
    isKnown ? `${usedPercent.toFixed(0)}% of ${format.size(item.size_bytes)}` : format.NONE,
  );
  setHidden(nodes.bar, !isKnown);
  setAttribute(nodes.bar, "aria-valuenow", usedPercent.toFixed(0));
  setAttribute(nodes.bar, "data-level", level ?? (usedPercent >= 90 ? "warn" : "good"));
  nodes.bar.firstChild.style.setProperty("--used", `${usedPercent.toFixed(1)}%`);
  const fullText =
    item.days_until_full === null ? "not filling" : format.days(item.days_until_full);
  setText(nodes.full, item.is_full ? "full" : isKnown ? fullText : format.NONE);
  setAttribute(nodes.full_row, "data-level", level);
}

// ---- partitions x storages ---------------------------------------------------------------------

function buildTable() {
  const head = el("tr");
  const body = el("tbody");
  const table = el(
    "table",
    { class: "matrix", id: "partitions-table" },
    el(
      "caption",
      { class: "visually-hidden" },
      "Partitions, their owners, and the state of the replica on each storage",
    ),
    el("thead", {}, head),
    body,
  );
  const box = el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Partitions and storages" },
    table,
  );
  return { head, body, table, box };
}

const FIXED = [
  ["partition", "Partition"],
  ["state", "State"],
  ["owner", "Owner"],
  ["mark", "High-water mark"],
  ["rate", "Rate"],
];
const NUMBERS = ["mark", "rate"];

function showTable(page, cluster) {
  const { head, body, table, box } = page.table;
  const storages = cluster.storages.map((storage) => storage.address);
  const names = format.shortNames(storages);
  const servers = format.shortNames(cluster.servers.map((server) => server.address));
  const columns = [
    ...FIXED.map(([id, label]) => ({ id: `fixed ${id}`, label, kind: id })),
    ...storages.map((address) => ({
      id: `storage ${address}`,
      label: names.get(address),
      title: address,
      kind: "storage",
    })),
  ];
  keyed(head, columns, {
    key: (column) => column.id,
    create: ({ label, title, kind }) =>
      el(
        "th",
        { scope: "col", class: `column-${kind}${NUMBERS.includes(kind) ? " number" : ""}`, title },
        label,
      ),
    update: (node, { label }) => setText(node, label),
  });
  setAttribute(table, "data-compact", storages.length > COMPACT_COLUMNS);
  const rows = page.isFiltered ? cluster.partitions.filter(data.hasProblem) : cluster.partitions;
  setAttribute(box, "data-long", rows.length > LONG_ROWS);
  setText(
    page.filterText,
    page.isFiltered
      ? `${format.integer(rows.length)} of ${format.count(cluster.partitions.length, "partition")}`
      : "",
  );
  keyed(body, rows, {
    key: (partition) => partition.partition,
    create: createRow,
    update: (row, partition) => updateRow(row, partition, { storages, servers }),
  });
}

function createRow({ partition }) {
  return el(
    "tr",
    { "data-partition": partition },
    el(
      "th",
      { scope: "row" },
      el("a", { href: `#/partitions/${partition}` }, hiddenText("Partition "), String(partition)),
    ),
    el("td", {}, stateMark("unknown", { "data-part": "state" })),
    part("td", "owner", { class: "address" }),
    part("td", "mark", { class: "number" }),
    part("td", "rate", { class: "number" }),
  );
}

function updateRow(row, item, { storages, servers }) {
  const nodes = parts(row);
  setAttribute(row, "data-state", item.state);
  setState(nodes.state, item.state);
  setAttribute(nodes.state, "title", item.error || null);
  setText(nodes.owner, servers.get(item.owner) ?? item.owner ?? format.NONE);
  setAttribute(nodes.owner, "title", item.owner);
  setText(nodes.mark, format.mark(item.high_water_mark));
  setText(nodes.rate, format.rate(data.rateOf(item.partition)));
  row.replicaCells ??= new Map();
  updateCells(row, item, storages);
}

function updateCells(row, item, storages) {
  const replicas = new Map(item.replicas.map((replica) => [replica.storage, replica]));
  for (const [address, cell] of row.replicaCells) {
    if (!storages.includes(address)) {
      cell.remove();
      row.replicaCells.delete(address);
    }
  }
  let previousCell = row.children[FIXED.length - 1];
  for (const address of storages) {
    let cell = row.replicaCells.get(address);
    if (cell === undefined) {
      cell = el("td", { class: "replica", "data-storage": address }, stateMark("none"));
      row.replicaCells.set(address, cell);
    }
    if (previousCell.nextSibling !== cell) previousCell.after(cell);
    previousCell = cell;
    const replica = replicas.get(address);
    setState(cell.firstChild, replica?.state ?? "none");
    setAttribute(cell, "title", replica ? replica.reason || null : null);
  }
}
