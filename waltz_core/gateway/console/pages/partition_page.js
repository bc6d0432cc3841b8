// The page of one partition: marks, replicas with their lag, rate, and recent rejections.

import { changesOfPartition, openChange } from "./change_dialog.js";
import * as data from "./cluster_data.js";
import {
  drawSparkline,
  el,
  errorBox,
  keyed,
  part,
  parts,
  scrollTable,
  setHidden,
  setState,
  setText,
  showError,
  sparkline,
  stateMark,
} from "./dom.js";
import * as format from "./format.js";
import { poll, request } from "./requests.js";

const REJECTIONS_POLL_MS = 5000;
const CLIENTS_MAX = 3;

export function partitionPage(root, { partition }) {
  const page = build(root, partition);
  const stopData = data.onClusterData(() => show(page, partition));
  const polling = poll(
    (signal) => loadRejections(page, partition, signal),
    () => REJECTIONS_POLL_MS,
  );
  return {
    title: `Partition ${partition}`,
    stop: () => {
      stopData();
      polling.stop();
    },
  };
}

const FACTS = [
  ["high_water", "High-water mark"],
  ["archived", "Archived mark"],
  ["session", "Store session"],
  ["owner", "Owner"],
];

function build(root, partition) {
  const page = {
    state: stateMark("unknown", { id: "partition-state" }),
    missing: el("p", { class: "problem", hidden: true }),
    error: el("p", { class: "problem", hidden: true }),
    facts: el(
      "dl",
      { class: "facts" },
      ...FACTS.map(([name, label]) =>
        el("div", {}, el("dt", {}, label), part("dd", name, { id: `partition-${name}` })),
      ),
    ),
    rate: el("output", { class: "big-number" }),
    line: sparkline(),
    replicas: el("tbody"),
    actions: el("div", { class: "toolbar", id: "partition-actions" }),
    rejections: el("tbody", { id: "rejections" }),
    rejectionsNone: el("p", { class: "empty" }, "Loading…"),
    rejectionsError: errorBox(),
    rejectedClients: el("p", { class: "note", id: "rejected-clients", hidden: true }),
  };
  page.rejectionsTable = scrollTable({
    caption: "Recent rejections",
    id: "rejections-table",
    columns: ["Time", "#Client ID", "Request ID", "Reason", "Rejected by"],
    body: page.rejections,
  });
  root.append(...layout(page, partition));
  setHidden(page.rejectionsTable, true);
  return page;
}

function layout(page, partition) {
  return [
    el("p", { class: "crumbs" }, el("a", { href: "#/" }, "Cluster")),
    el(
      "div",
      { class: "title-line" },
      el("h1", { tabindex: "-1" }, `Partition ${partition}`),
      page.state,
      el(
        "a",
        {
          class: "button",
          id: "show-transactions",
          href: `#/partitions/${partition}/transactions`,
        },
        "Transactions",
      ),
      el(
        "a",
        { class: "button", href: `#/partitions/${partition}/transactions?follow=1` },
        "Follow the tail",
      ),
    ),
    page.missing,
    page.error,
    el(
      "div",
      { class: "partition-top" },
      page.facts,
      el(
        "div",
        { class: "total" },
        el("span", { class: "label" }, "Transactions"),
        page.rate,
        page.line,
      ),
    ),
    el(
      "section",
      { "aria-labelledby": "replicas-title" },
      el("h2", { id: "replicas-title" }, "Replicas"),
      scrollTable({
        caption: "Replicas",
        id: "replicas-table",
        columns: ["Storage", "State", "#Last ID", "#Lag", "Reason"],
        body: page.replicas,
      }),
      page.actions,
    ),
    el(
      "section",
      { "aria-labelledby": "rejections-title" },
      el("h2", { id: "rejections-title" }, "Recent rejections"),
      page.rejectionsError,
      page.rejectionsNone,
      page.rejectedClients,
      page.rejectionsTable,
    ),
  ];
}

function show(page, partition) {
  const cluster = data.cluster();
  if (cluster === null) return;
  const item = cluster.partitions.find((candidate) => candidate.partition === partition);
  setHidden(page.missing, item !== undefined);
  if (item === undefined) {
    setText(
      page.missing,
      `The cluster has no partition ${partition}. It has ${format.count(cluster.partition_count, "partition")}.`,
    );
    return;
  }
  setState(page.state, item.state);
  setText(page.error, item.error);
  setHidden(page.error, !item.error);
  const nodes = parts(page.facts);
  setText(nodes.high_water, format.mark(item.high_water_mark));
  setText(
    nodes.archived,
    item.archived_mark === -1 ? "nothing is archived" : format.integer(item.archived_mark),
  );
  setText(nodes.session, format.integer(item.session_id));
  setText(nodes.owner, item.owner ?? "no owner");
  const points = data.ratePoints(partition);
  setText(page.rate, format.rate(data.rateOf(partition)));
  drawSparkline(page.line, points, { span_ms: data.SPARKLINE_MS, label: data.rateLabel(points) });
  keyed(
    page.replicas,
    item.replicas.map((replica) => ({ ...replica, lag: lag(item, replica) })),
    {
      key: (replica) => replica.storage,
      create: replicaRow,
      update: updateReplica,
    },
  );
  showActions(page, cluster, item);
}

function lag(item, replica) {
  if (item.high_water_mark === null || replica.last_id === null || replica.last_id === undefined)
    return null;
  return Math.max(0, item.high_water_mark - replica.last_id);
}

const replicaRow = ({ storage }) =>
  el(
    "tr",
    { "data-storage": storage },
    el("th", { scope: "row", class: "address", title: storage }, storage),
    el("td", {}, stateMark("unknown", { "data-part": "state" })),
    part("td", "last", { class: "number" }),
    part("td", "lag", { class: "number" }),
    part("td", "reason", { class: "wrap" }),
  );

function updateReplica(row, item) {
  const nodes = parts(row);
  setState(nodes.state, item.state);
  setText(nodes.last, format.mark(item.last_id));
  setText(nodes.lag, item.lag === null ? format.NONE : format.count(item.lag, "transaction"));
  setText(nodes.reason, item.reason ?? "");
}

function showActions(page, cluster, item) {
  const kinds = cluster.can_change ? changesOfPartition() : [];
  keyed(page.actions, kinds, {
    key: (kind) => kind.name,
    create: (kind) =>
      el(
        "button",
        {
          type: "button",
          "data-change": kind.name,
          title: kind.summary,
          click: () => openChange(kind.name, { partitions: String(item.partition) }),
        },
        `${kind.name.replaceAll("-", " ").replace(/^./, (letter) => letter.toUpperCase())}…`,
      ),
  });
  const reason = cluster.can_change ? "" : cluster.cannot_change_reason;
  page.reason ??= el("p", { class: "note" });
  setText(page.reason, reason && `You cannot change the cluster: ${reason}`);
  if (reason && !page.reason.isConnected) page.actions.after(page.reason);
  setHidden(page.reason, !reason);
}

async function loadRejections(page, partition, signal) {
  try {
    const { rejections } = await request(`partitions/${partition}/rejections`, { signal });
    if (signal.aborted) return;
    showError(page.rejectionsError, null);
    setHidden(page.rejectionsTable, rejections.length === 0);
    setHidden(page.rejectionsNone, rejections.length > 0);
    setHidden(page.rejectedClients, rejections.length === 0);
    setText(page.rejectedClients, rejectedClientsText(rejections));
    setText(page.rejectionsNone, "The owner has rejected no append recently.");
    showRejections(page, partition, rejections);
  } catch (error) {
    if (signal.aborted) return;
    setHidden(page.rejectionsNone, true);
    showError(page.rejectionsError, error);
  }
}

// Name the clients with the most rejections, so that the user need not count rows.
function rejectedClientsText(rejections) {
  const counts = new Map();
  for (const { client_id } of rejections) counts.set(client_id, (counts.get(client_id) ?? 0) + 1);
  const sortedClients = [...counts].sort(([, a], [, b]) => b - a);
  const clientTexts = sortedClients
    .slice(0, CLIENTS_MAX)
    .map(([client, number]) => `${client} (${format.integer(number)})`);
  const otherCount = sortedClients.length - clientTexts.length;
  return `Most rejected clients: ${clientTexts.join(", ")}${otherCount > 0 ? ` and ${format.integer(otherCount)} more` : ""}.`;
}

function showRejections(page, partition, rejections) {
  const countByName = new Map();
  const items = rejections.map((rejection) => {
    const name = `${rejection.request_id} ${rejection.time_ms}`;
    countByName.set(name, (countByName.get(name) ?? 0) + 1);
    return { ...rejection, name: `${name} ${countByName.get(name)}` };
  });
  keyed(page.rejections, items, {
    key: (rejection) => rejection.name,
    create: (rejection) => rejectionRow(partition, rejection),
  });
}

function rejectionRow(partition, item) {
  const hasWinner = Number.isInteger(item.winner) && item.winner >= 0;
  const winner = hasWinner
    ? el(
        "a",
        { href: `#/partitions/${partition}/transactions?first=${item.winner}&open=${item.winner}` },
        `transaction ${item.winner}`,
      )
    : format.NONE;
  const client =
    item.winner_client_id === null || item.winner_client_id === undefined
      ? ""
      : ` of client ${item.winner_client_id}`;
  return el(
    "tr",
    { "data-request": item.request_id },
    el("td", { class: "nowrap" }, format.time(item.time_ms)),
    el("td", { class: "number" }, String(item.client_id)),
    el("td", { class: "code" }, String(item.request_id)),
    el("td", {}, String(item.reason)),
    el("td", { class: "nowrap" }, winner, hasWinner ? client : ""),
  );
}
