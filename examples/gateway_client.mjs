// Appends transactions through gateways and follows their feeds, also while processes are killed.
// At the end it checks that nothing is lost and nothing is duplicated. It needs Node 18 or later:
//
//   node examples/gateway_client.mjs http://127.0.0.1:15380[,http://...] [COUNT]
//
// A token, if the cluster has access control, is in the environment variable WALTZ_TOKEN.
import { randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";

const gateways = process.argv[2].split(",");
const count = Number(process.argv[3] ?? 200);
const token = process.env.WALTZ_TOKEN;
const common = token ? { Authorization: `Bearer ${token}` } : {};
let turn = 0;

// Repeats a request, at the next gateway, until its outcome is final.
async function request(path, { headers, ...options } = {}) {
  for (;;) {
    try {
      const url = gateways[turn % gateways.length] + path;
      const response = await fetch(url, { ...options, headers: { ...common, ...headers } });
      if (response.status < 500 && response.status !== 429) return response;
      await response.arrayBuffer();
    } catch {} // the gateway was killed, or does not run
    turn += 1;
    await pause(100);
  }
}

// Returns the ID of a new transaction. The key makes repetitions safe.
async function append(partition, text) {
  const data = Buffer.from(text).toString("base64");
  const response = await request("/v1/transactions", {
    method: "POST",
    headers: { "Idempotency-Key": randomUUID() },
    body: JSON.stringify({ transactions: [{ partition, data }] }),
  });
  const answer = await response.json();
  if (response.status !== 200) throw new Error(JSON.stringify(answer));
  return answer.outcomes[0].transaction_id;
}

// Calls `apply` with each transaction after `mark`, once and in order, until `isDone`.
async function follow(partition, mark, apply, isDone) {
  while (!isDone()) {
    const path = `/v1/partitions/${partition}/feed?from=${mark}`;
    const response = await request(path, { headers: { Accept: "application/x-ndjson" } });
    let rest = "";
    try {
      for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
        const lines = (rest + part).split("\n");
        rest = lines.pop(); // a line that is not complete yet
        for (const event of lines.map((line) => JSON.parse(line))) {
          if (event.error) console.log(event);
          if (event.data !== undefined) apply(event);
          mark = event.transaction_id ?? event.mark ?? mark; // where the next connection continues
        }
        if (isDone()) break;
      }
    } catch {} // the connection was lost
  }
}

const { marks } = await (await request("/v1/marks?linearizable=true")).json();
const partitions = Object.keys(marks).map(Number);
const run = randomUUID();
const acknowledged = new Map(); // text -> "partition/ID"
const applied = []; // [text, "partition/ID"] in the order of the feeds
const isDone = () => acknowledged.size === count && applied.length >= count;
const feeds = partitions.map((partition) =>
  follow(partition, marks[partition], ({ transaction_id, data }) => {
    const text = Buffer.from(data, "base64").toString();
    if (text.startsWith(run)) applied.push([text, `${partition}/${transaction_id}`]);
  }, isDone));
let next = 0;
const writers = Array.from({ length: 8 }, async () => {
  while (next < count) {
    const number = next++;
    const partition = partitions[number % partitions.length];
    const text = `${run} ${number}`;
    acknowledged.set(text, `${partition}/${await append(partition, text)}`);
    if (acknowledged.size % 50 === 0) console.log(`appended ${acknowledged.size}`);
  }
});
await Promise.all(writers);
await Promise.race([Promise.all(feeds), pause(60_000)]); // a feed sends a heartbeat every 10 s
const seen = new Map(applied);
const lost = [...acknowledged].filter(([text, place]) => seen.get(text) !== place);
const isCorrect = lost.length === 0 && applied.length === count;
console.log(`lost ${lost.length}, duplicated ${applied.length - seen.size}`);
console.log(`gateway client: ${isCorrect ? "OK" : "WRONG"}, ${count} transactions`);
process.exit(isCorrect ? 0 : 1);
