// Unpacks a rank's events (packed_columns.py describes the format) and formats numbers.

async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const unpack = async (base64) => restore(decode(await inflate(base64)));

function restore(rank) {
  restoreTimes(rank);
  restorePieces(rank);
  indexPieces(rank);
  return rank;
}

function decode(buffer) {
  const headerLength = new DataView(buffer).getUint32(0, true);
  const rank = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headerLength)));
  let at = 4 + headerLength;
  for (const [name, form, n, width, isDifference] of rank.columns) {
    rank[name] = decodeColumn(new Uint8Array(buffer, at, n * width), form, n, isDifference);
    at += n * width;
  }
  return rank;
}

const ARRAYS = { u8: Uint8Array, u32: Uint32Array };

function decodeColumn(bytes, form, n, isDifference) {
  const values = new Float64Array(n);
  if (bytes.length) for (let i = 0; i < n; i++) values[i] = bytes[i] >> 1; // half of each natural number, which is exact
  for (let at = n, factor = 128; at < bytes.length; at += n, factor *= 256) {
    for (let i = 0; i < n; i++) values[i] += bytes[at + i] * factor;
  }
  let before = 0;
  for (let i = 0; i < n; i++) {
    const value = bytes[i] & 1 ? -values[i] - 1 : values[i];
    values[i] = isDifference ? before += value : value;
  }
  if (form === "wide") for (let i = 0; i < n; i++) if (values[i] < 0) values[i] = NaN;
  return ARRAYS[form] ? new ARRAYS[form](values) : values;
}

// Starts become times of the page, negative before its zero; `end` is the latest end so far in the row, so that it can
// be searched.
function restoreTimes(rank) {
  const { start, dur } = rank;
  const end = (rank.end = new Float64Array(rank.events));
  for (const track of rank.tracks) {
    for (let row = 0; row + 1 < track.rows.length; row++) {
      let time = -rank.zero;
      let latest = -Infinity;
      for (let i = track.rows[row]; i < track.rows[row + 1]; i++) {
        time += start[i];
        start[i] = time;
        latest = Math.max(latest, time + (dur[i] || 0));
        end[i] = latest;
      }
    }
  }
  for (const step of rank.steps) step[1] -= rank.zero;
  rank.caused = reverse(rank);
}

// Launch call or operator -> the device events it caused.
function reverse(rank) {
  const caused = new Map();
  const add = (cause, effect) => {
    if (!caused.has(cause)) caused.set(cause, []);
    caused.get(cause).push(effect);
  };
  for (let i = 0; i < rank.events; i++) {
    const [launch, operator] = [rank.launch[i], rank.operator[i]];
    if (launch) add(launch - 1, i);
    if (operator && operator !== launch) add(operator - 1, i);
  }
  return caused;
}

// The first index in [from, to) whose value is above the bound; `to` when none is.
function firstAbove(values, bound, from, to) {
  while (from < to) {
    const middle = (from + to) >>> 1;
    if (values[middle] > bound) to = middle;
    else from = middle + 1;
  }
  return from;
}

const UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

function formatTime(ns, digits = 4) {
  if (!Number.isFinite(ns)) return "none";
  const size = Math.abs(ns);
  const [unit, factor] = UNITS.find(([, f]) => size >= f) || ["ns", 1];
  const value = ns / factor;
  const decimals = unit === "ns" ? 0 : Math.max(0, digits - Math.floor(Math.log10(Math.abs(value) || 1)) - 1);
  return `${value.toFixed(decimals)} ${unit}`;
}

// A tick's label: as many decimals as its step needs, all in one unit.
function formatTick(ns, step) {
  if (ns === 0) return "0";
  const [unit, factor] = UNITS.find(([, f]) => Math.max(Math.abs(ns), step) >= f) || ["ns", 1];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  return `${(ns / factor).toFixed(Math.min(decimals, 9))} ${unit}`;
}

// Names that fit into this number of characters and stay distinct: abbreviated, else without their middle, else numbered.
function fitNames(names, room) {
  const short = names.map((name) => (name.length <= room ? name : abbreviate(name))).map((name) => {
    const half = (room - 1) / 2;
    return name.length <= room ? name : `${name.slice(0, Math.ceil(half))}…${name.slice(name.length - Math.floor(half))}`;
  });
  const seen = new Map();
  return short.map((name) => {
    const count = (seen.get(name) ?? 0) + 1;
    seen.set(name, count);
    return count === 1 ? name : `${name.slice(0, room - 3)} ${count}`;
  });
}

const ABBREVIATIONS = [[/ \([^)]*\)$/, ""], [/, annotations$/, " ann."], [/, Python$/, " Py"], [/, off the stack$/, " off"], [/\bstream\b/, "str"], [/\bthread\b/, "thr"]];
const abbreviate = (name) => ABBREVIATIONS.reduce((text, [word, short]) => text.replace(word, short), name);

const SIZES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

function formatSize(bytes) {
  const [unit, factor] = SIZES.find(([, f]) => bytes >= f) || ["B", 1];
  return `${factor === 1 ? bytes : (bytes / factor).toFixed(2)} ${unit}`;
}

const formatCount = (n) => n.toLocaleString("en-US");

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
