// Appends transactions through gateways and follows their feeds, also while processes are killed.
// Then it checks that nothing is lost or duplicated (docs/gateway.md). It needs Node 18 or later:
//
//   node examples/gateway_client.mjs http://127.0.0.1:15380[,http://...] [COUNT]
import { randomUUID } from "node:crypto";
import { setTimeout as pause } from "node:timers/promises";

if (process.argv.length < 3) {
  console.error("usage: node gateway_client.mjs http://127.0.0.1:15380[,http://...] [COUNT]");
  process.exit(2);
}
const gateways = process.argv[2].split(",");
const count = Number(process.argv[3] ?? 200);
const token = process.env.WALTZ_TOKEN; // with access control
const common = token ? { Authorization: `Bearer ${token}` } : {};
let turn = 0;

// Repeats a request, at the next gateway, until a gateway has answered it.
async function request(path, { headers, ...options } = {}) {
  for (let tries = 1; ; tries += 1, turn += 1, await pause(100)) {
    try {
      const url = gateways[turn % gateways.length] + path;
      const response = await fetch(url, { ...options, headers: { ...common, ...headers } });
      if (response.status < 500 && response.status !== 429) return response;
      const answer = await response.text();
      if (tries % 50 === 0) console.error(`${url}: ${response.status} ${answer.trim()}`);
    } catch (error) { // the gateway was killed, or does not run
      const gateway = gateways[turn % gateways.length];
      if (tries % 50 === 0) console.error(`${gateway}: ${error.cause ?? error}; trying again`);
    }
  }
}

// Returns the ID of a new transaction. The key makes repetitions safe.
async function append(partition, text) {
  const data = Buffer.from(text).toString("base64");
  const response = await request("/v1/transactions", {
    method: "POST",
    headers: { "Content-Type": "application/json", "Idempotency-Key": randomUUID() },
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
        rest = lines.pop(); // the beginning of the next line
        for (const { transaction_id: id, mark: end, data } of lines.map((line) => JSON.parse(line))) {
          if (id !== undefined) apply(id, Buffer.from(data, "base64").toString());
          mark = id ?? end ?? mark; // the next connection continues here
        }
        if (isDone()) break;
      }
    } catch {} // the connection was lost
  }
}

const { marks } = await (await request("/v1/marks?linearizable=true")).json();
const partitions = Object.keys(marks).map(Number);
const run = randomUUID();
const reported = new Map(), seen = []; // text -> "partition/ID" of the answer; the same of the feeds
const isDone = () => reported.size === count && seen.length >= count;
for (const partition of partitions) {
  const apply = (id, text) => text.startsWith(run) && seen.push([text, `${partition}/${id}`]);
  follow(partition, marks[partition], apply, isDone);
}
let next = 0;
await Promise.all(Array.from({ length: 8 }, async () => {
  while (next < count) {
    const partition = partitions[next % partitions.length], text = `${run} ${next++}`;
    reported.set(text, `${partition}/${await append(partition, text)}`);
    if (reported.size % 50 === 0) console.log(`appended ${reported.size}`);
  }
}));
for (let tries = 0; !isDone() && tries < 600; tries += 1) await pause(100);
const found = new Map(seen);
const lost = [...reported].filter(([text, place]) => found.get(text) !== place).length;
console.log(`lost ${lost}, duplicated ${seen.length - found.size}`);
console.log(`gateway client: ${lost || seen.length !== count ? "WRONG" : "OK"}, ${count} transactions`);
process.exit(lost || seen.length !== count ? 1 : 0);
