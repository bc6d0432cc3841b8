// Numbers, sizes, times, lists of partitions and payloads as text.

const NUMBER = new Intl.NumberFormat("en-GB");
const TIME = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});
const DAY = new Intl.DateTimeFormat("en-GB", { year: "numeric", month: "2-digit", day: "2-digit" });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const NONE = "–";
const isMissing = (value) => value === null || value === undefined;

export const integer = (value) => (isMissing(value) ? NONE : NUMBER.format(value));

// A mark or last ID; -1 is the position before the first transaction.
export const mark = (id) => (id === -1 ? "empty" : integer(id));

export function count(number, noun, plural = `${noun}s`) {
  return `${integer(number)} ${number === 1 ? noun : plural}`;
}

export function rate(perSecond) {
  if (isMissing(perSecond)) return NONE;
  if (perSecond > 0 && perSecond < 10) return `${perSecond.toFixed(1)}/s`;
  return `${NUMBER.format(Math.round(perSecond))}/s`;
}

export function milliseconds(ms) {
  if (isMissing(ms)) return NONE;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

export function size(bytes) {
  if (isMissing(bytes)) return NONE;
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function days(number) {
  if (isMissing(number)) return NONE;
  if (number >= 365) return "more than a year";
  return count(number < 10 ? Number(number.toFixed(1)) : Math.round(number), "day");
}

// ISO order of year, month and day, so that dates look the same in all locales.
export function time(ms, { hasMilliseconds = false } = {}) {
  if (isMissing(ms)) return NONE;
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return String(ms);
  const [day, month, year] = DAY.format(date).split("/");
  const fraction = hasMilliseconds ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "";
  return `${year}-${month}-${day} ${TIME.format(date)}${fraction}`;
}

export const clock = (ms) => TIME.format(new Date(ms));

export function duration(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function timeZone() {
  const minutes = -new Date().getTimezoneOffset();
  const hours = `${Math.floor(Math.abs(minutes) / 60)}`.padStart(2, "0");
  const restMinutes = `${Math.abs(minutes) % 60}`.padStart(2, "0");
  const name = Intl.DateTimeFormat().resolvedOptions().timeZone ?? "local time";
  return `${name}, UTC${minutes < 0 ? "-" : "+"}${hours}:${restMinutes}`;
}

// [0, 1, 2, 5] -> "0-2, 5"; after `countMax` ranges, only the number of the other ones is shown
export function ranges(numbers, countMax = 10) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const texts = [];
  for (let start = 0; start < sorted.length;) {
    let end = start;
    while (end + 1 < sorted.length && sorted[end + 1] === sorted[end] + 1) end += 1;
    if (texts.length === countMax) {
      texts.push(`and ${sorted.length - start} more`);
      break;
    }
    texts.push(start === end ? `${sorted[start]}` : `${sorted[start]}-${sorted[end]}`);
    start = end + 1;
  }
  return texts.length === 0 ? NONE : texts.join(", ");
}

// Addresses without the end that all of them share: a domain, a port, or both.
export function shortNames(addresses) {
  const names = new Map(addresses.map((address) => [address, address]));
  if (names.size < 2) return names;
  const [first, ...others] = names.keys();
  for (let at = 1; at < first.length; at += 1) {
    const end = first.slice(at);
    if (
      !/^[.:]/.test(end) ||
      !others.every((other) => other.length > end.length && other.endsWith(end))
    )
      continue;
    for (const address of names.keys()) names.set(address, address.slice(0, -end.length));
    break;
  }
  return names;
}

// "0-2,5" or "all" -> the partitions, or an error text
export function parsePartitions(text, partitionCount) {
  const compactText = text.replace(/\s+/g, "");
  if (compactText === "all")
    return { partitions: [...Array(partitionCount ?? 0).keys()], error: "" };
  const numbers = new Set();
  for (const part of compactText.split(",")) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part);
    if (match === null)
      return {
        partitions: [],
        error: `"${part}" is not a partition or a range. Use for example 0-3,7 or all.`,
      };
    const first = Number(match[1]);
    const last = Number(match[2] ?? match[1]);
    if (last < first) return { partitions: [], error: `Range ${part} ends before it begins.` };
    if (partitionCount !== null && last >= partitionCount) {
      return {
        partitions: [],
        error: `The cluster has no partition ${last}; the last one is ${partitionCount - 1}.`,
      };
    }
    for (let number = first; number <= last && numbers.size < 100000; number += 1)
      numbers.add(number);
  }
  return { partitions: [...numbers].sort((a, b) => a - b), error: "" };
}

// Indent JSON without parsing it, so that numbers stay exact and incomplete JSON can be indented.
export function indentJson(text) {
  const parts = [];
  let depth = 0;
  let at = 0;
  const newLine = () => parts.push("\n", "  ".repeat(Math.min(depth, 40)));
  while (at < text.length) {
    const char = text[at];
    if (char === '"') {
      let end = at + 1;
      while (end < text.length && text[end] !== '"') end += text[end] === "\\" ? 2 : 1;
      parts.push(text.slice(at, end + 1));
      at = end + 1;
      continue;
    }
    const emptyContainer = /^[[{]\s*[\]}]/.exec(text.slice(at, at + 40));
    if (emptyContainer !== null) {
      parts.push(char, emptyContainer[0][emptyContainer[0].length - 1]);
      at += emptyContainer[0].length;
      continue;
    }
    if (char === "{" || char === "[") {
      parts.push(char);
      depth += 1;
      newLine();
    } else if (char === "}" || char === "]") {
      depth = Math.max(0, depth - 1);
      newLine();
      parts.push(char);
    } else if (char === ",") {
      parts.push(char);
      newLine();
    } else if (char === ":") {
      parts.push(": ");
    } else if (!/\s/.test(char)) {
      parts.push(char);
    }
    at += 1;
  }
  return parts.join("");
}
