// The state of the cluster, which all pages share: polled once a second, with rates, and with the
// health in words.
//
// Rules:
//   1. After a failed request, the pages show the last data, and `problem` states why it is old.
//   2. When a server stops, its entry in ZooKeeper disappears, and then the server is no longer in
//      the answers. The console shows it as down for REMEMBERED_MS, so that the user notices it.
//      This is only a warning, because the user may have stopped the server.
//   3. Rates are computed from successive marks and the gateway's time, never from this computer's
//      clock. A partition whose owner has not reported a mark has no rate.

import * as format from "./format.js";
import { poll, request } from "./requests.js";

const POLL_MS = 1000;
const SLOW_MS = 2000; // if a request takes longer, the displayed data is stale
const RATE_WINDOW_MS = 10000;
const KEPT_MS = 180000;
export const SPARKLINE_MS = KEPT_MS;
const DISK_DAYS_LOW = 7;
const REMEMBERED_MS = 600000;

const state = {
  cluster: null,
  problem: null,
  received: 0,
  sent: null,
  total: [],
  series: new Map(),
  lastSeen: new Map(), // server -> the time of the last answer that listed it
};
const listeners = new Set();
let polling = null;

export const cluster = () => state.cluster;
export const totalPoints = () => state.total;
export const ratePoints = (partition) => state.series.get(partition)?.rates ?? [];
export const rateOf = (partition) =>
  state.series.get(partition)?.isKnown ? lastValue(ratePoints(partition)) : null;
export const totalRate = () => lastValue(state.total);

const lastValue = (points) => (points.length === 0 ? null : points[points.length - 1][1]);

export function startClusterData() {
  polling = poll(load, () => POLL_MS);
}

export const refreshCluster = () => polling?.pollNow();

// Call `listener` now and after each change, until the returned function is called.
export function onClusterData(listener) {
  listeners.add(listener);
  listener();
  return () => listeners.delete(listener);
}

function notify() {
  for (const listener of [...listeners]) listener();
}

async function load(signal) {
  try {
    const answer = await request("cluster", {
      signal,
      onSend: () => {
        state.sent = performance.now();
      },
    });
    addLostServers(answer);
    state.cluster = answer;
    state.problem = null;
    state.received = performance.now();
    addSamples(answer);
  } catch (error) {
    if (signal.aborted) return;
    state.problem = error;
  } finally {
    state.sent = null;
  }
  notify();
}

// Why the displayed data is stale: {error, age_ms}, or null if it is not stale. `age_ms` is null if
// there is no data.
export function staleness() {
  const now = performance.now();
  const age_ms = state.cluster === null ? null : now - state.received;
  if (state.problem !== null) return { error: state.problem, age_ms };
  const wait_ms = state.sent === null ? 0 : now - state.sent;
  if (wait_ms < SLOW_MS) return null;
  return {
    error: { message: "the gateway has not answered yet", hint: "", isAnswer: false },
    age_ms,
  };
}

function addLostServers(answer) {
  for (const server of answer.servers) state.lastSeen.set(server.address, answer.time_ms);
  for (const [address, seen_ms] of state.lastSeen) {
    if (seen_ms === answer.time_ms) continue;
    if (answer.time_ms - seen_ms > REMEMBERED_MS) state.lastSeen.delete(address);
    else answer.servers.push(lostServer(address, seen_ms));
  }
  answer.servers.sort((a, b) => (a.address < b.address ? -1 : Number(a.address > b.address)));
}

function lostServer(address, seen_ms) {
  const error =
    `it is no longer registered in ZooKeeper (last seen at ${format.clock(seen_ms)}). ` +
    "It was stopped, or it has failed. If it must run, start it again";
  const none = { open: [], not_open: [], preferred: [], unreachable_storages: [] };
  return { address, state: "down", hasLeft: true, error, latency_ms: null, ...none };
}

function addSamples(answer) {
  let total = 0;
  for (const partition of answer.partitions) {
    const series = seriesOf(partition.partition);
    series.isKnown = partition.high_water_mark !== null;
    if (!series.isKnown) continue;
    addSample(series, answer.time_ms, partition.high_water_mark);
    total += lastValue(series.rates) ?? 0;
  }
  if ([...state.series.values()].some((series) => series.rates.length > 0)) {
    addPoint(state.total, answer.time_ms, total);
  }
}

function seriesOf(partition) {
  if (!state.series.has(partition))
    state.series.set(partition, { marks: [], rates: [], isKnown: false });
  return state.series.get(partition);
}

function addSample(series, ms, mark) {
  const { marks, rates } = series;
  if (marks.length > 0 && marks[marks.length - 1][0] >= ms) return; // the same answer as before
  marks.push([ms, mark]);
  // Keep one sample at or before the start of the window, so that the samples cover the window.
  while (marks.length > 2 && marks[1][0] <= ms - RATE_WINDOW_MS) marks.shift();
  if (marks.length < 2) return;
  const [first_ms, first] = marks[0];
  addPoint(rates, ms, Math.max(0, ((mark - first) * 1000) / (ms - first_ms)));
}

function addPoint(points, ms, value) {
  if (points.length > 0 && points[points.length - 1][0] >= ms) return;
  points.push([ms, value]);
  while (points[0][0] < ms - KEPT_MS) points.shift();
}

export function rateLabel(points) {
  if (points.length === 0) return "Rate: no data yet";
  const values = points.map(([, value]) => value);
  return (
    `Rate of the last ${format.duration(points[points.length - 1][0] - points[0][0])}: ` +
    `${format.rate(Math.min(...values))} to ${format.rate(Math.max(...values))}`
  );
}

// The problems of the cluster in words, the worst first: [{level, text}].
export function problemsOf(data) {
  return [
    ...zookeeperProblems(data),
    ...processProblems(data),
    ...partitionProblems(data),
    ...diskProblems(data),
  ].sort((a, b) => Number(b.level === "bad") - Number(a.level === "bad"));
}

function zookeeperProblems(data) {
  const problems = [];
  if (data.zookeeper_error)
    problems.push({
      level: "bad",
      text: `ZooKeeper does not answer, so no partition can move to another server (${data.zookeeper_error})`,
    });
  addNamed(
    problems,
    "warn",
    data.zookeeper.filter((server) => server.state === "down"),
    "ZooKeeper server",
    "down",
  );
  return problems;
}

function processProblems(data) {
  const problems = [];
  addNamed(
    problems,
    "bad",
    data.storages.filter((storage) => storage.state === "down"),
    "storage",
    "down",
  );
  addNamed(
    problems,
    "bad",
    data.servers.filter((server) => server.state === "down" && !server.hasLeft),
    "server",
    "down",
  );
  // Only a warning: the server may have been stopped on purpose. Partitions that are not open are
  // reported separately.
  addNamed(
    problems,
    "warn",
    data.servers.filter((server) => server.hasLeft),
    "server",
    "not registered any more",
  );
  addNamed(
    problems,
    "bad",
    data.storages.filter((storage) => storage.is_full),
    "storage",
    "full",
  );
  const down = new Set(
    data.storages.filter((storage) => storage.state === "down").map((storage) => storage.address),
  );
  for (const server of data.servers) {
    // A storage that is down is already in the list.
    const unreachable = server.unreachable_storages.filter((storage) => !down.has(storage));
    if (unreachable.length > 0) {
      problems.push({
        level: "warn",
        text: `Server ${server.address} cannot reach ${format.count(unreachable.length, "storage")}: ${unreachable.join(", ")}`,
      });
    }
  }
  return problems;
}

function partitionProblems(data) {
  const problems = [];
  const inState = (state) =>
    data.partitions
      .filter((partition) => partition.state === state)
      .map((partition) => partition.partition);
  const textByState = { closed: "no open session", no_owner: "no owner", no_quorum: "no quorum" };
  for (const [state, problemText] of Object.entries(textByState)) {
    const partitions = inState(state);
    const verb = partitions.length === 1 ? "accepts" : "accept";
    addPartitions(problems, "bad", partitions, `${problemText}, and ${verb} no appends`);
  }
  const partitionsWithReplica = (state) =>
    data.partitions
      .filter((partition) => partition.replicas.some((replica) => replica.state === state))
      .map((partition) => partition.partition);
  addPartitions(problems, "warn", partitionsWithReplica("out_of_sync"), "a replica out of sync");
  addPartitions(problems, "warn", partitionsWithReplica("unavailable"), "an unavailable replica");
  return problems;
}

function diskProblems(data) {
  const nearlyFull = data.storages.filter(
    (storage) =>
      !storage.is_full &&
      storage.days_until_full !== null &&
      storage.days_until_full < DISK_DAYS_LOW,
  );
  if (nearlyFull.length === 0) return [];
  const storageTexts = nearlyFull.map(
    (storage) => `${storage.address} (${format.days(storage.days_until_full)})`,
  );
  return [
    {
      level: "warn",
      text: `The disk of ${format.count(nearlyFull.length, "storage")} is full in less than ${DISK_DAYS_LOW} days: ${storageTexts.join(", ")}`,
    },
  ];
}

function addNamed(problems, level, items, noun, stateText) {
  if (items.length === 0) return;
  const verb = items.length === 1 ? "is" : "are";
  problems.push({
    level,
    text: `${format.count(items.length, noun)} ${verb} ${stateText}: ${items.map((item) => item.address).join(", ")}`,
  });
}

function addPartitions(problems, level, partitions, problemText) {
  if (partitions.length === 0) return;
  const verb = partitions.length === 1 ? "has" : "have";
  problems.push({
    level,
    text: `${format.count(partitions.length, "partition")} ${verb} ${problemText}: ${format.ranges(partitions)}`,
  });
}

// Notes are not problems. They state that appends continue (if all partitions are open), where to
// find repair commands, and how many states are unknown.
export function notesOf(data) {
  const notes = [];
  if (problemsOf(data).length > 0) {
    if (data.partitions.every((partition) => partition.state === "open"))
      notes.push("All partitions are open: appends continue.");
    notes.push("The page Findings lists commands that repair problems.");
  }
  if (!data.is_settled) notes.push("Partitions are moving between servers.");
  const kinds = [
    ["storage", data.storages],
    ["server", data.servers],
    ["partition", data.partitions],
  ];
  for (const [noun, items] of kinds) {
    const unknown = items.filter((item) => item.state === "unknown").length;
    if (unknown > 0) notes.push(`The state of ${format.count(unknown, noun)} is unknown.`);
  }
  return notes;
}

export function healthText(data, problems) {
  if (problems.length > 0) return `${problems[0].text}.`;
  const known = (items) => items.filter((item) => item.state !== "unknown").length;
  const countTexts = [
    format.count(known(data.storages), "storage"),
    format.count(known(data.servers), "server"),
    format.count(known(data.partitions), "partition"),
  ];
  const prefix = known(data.storages) > 1 ? "All " : "";
  return `${prefix}${countTexts[0]}, ${countTexts[1]} and ${countTexts[2]} are up.`;
}

export function hasProblem(partition) {
  return (
    partition.state === "closed" ||
    partition.state === "no_owner" ||
    partition.state === "no_quorum" ||
    partition.replicas.some(
      (replica) => replica.state === "out_of_sync" || replica.state === "unavailable",
    )
  );
}
