// Statistics of the selected time: which names take how much of it.

const MAX_NAMES = 500;
const EXACT = new Intl.NumberFormat("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
const formatExact = (ns) => EXACT.format(ns / 1000);
const formatShare = (share) => `${(100 * share).toFixed(2)} %`;

// Calls visit(item, index, time) for each event of the unfolded rows that overlaps a time range; `time` is its part inside.
function visitRange(timeline, [from, to], visit) {
  for (const item of timeline.items) {
    if (!item.track) continue;
    const { rank: { start, dur, end }, track: { rows } } = item;
    for (let row = 0; row < item.rows; row++) {
      for (let i = firstAbove(end, from, rows[row], rows[row + 1]); i < rows[row + 1] && start[i] < to; i++) {
        const stop = start[i] + (dur[i] || 0);
        if (stop > from) visit(item, i, Math.min(stop, to) - Math.max(start[i], from));
      }
    }
  }
}

// The names of a time range, each once or once per track: [{ name, track, count, sum, max }], the largest sum first. `max` is
// the longest call, with all of its time.
function sumNames(timeline, range, byTrack) {
  const names = [];
  const known = new Map(); // name -> its entry
  const places = new Map(); // rank or track -> the entry of each of its names
  visitRange(timeline, range, ({ rank, track }, index, time) => {
    const part = byTrack ? track : rank;
    if (!places.has(part)) places.set(part, []);
    const entries = places.get(part);
    const code = rank.name[index];
    if (!entries[code]) {
      const name = nameOf(rank, index);
      entries[code] = (!byTrack && known.get(name)) || { name, track: byTrack ? nameTrack(rank, track) : "", count: 0, sum: 0, max: 0 };
      if (!entries[code].count) names.push(entries[code]);
      known.set(name, entries[code]);
    }
    entries[code].count++;
    entries[code].sum += time;
    entries[code].max = Math.max(entries[code].max, rank.dur[index] || 0);
  });
  return sortNames(names);
}

// The device events that were launched in a time range, on unfolded ranks, as `sumNames` returns them.
function sumLaunched(timeline, [from, to]) {
  const names = new Map();
  for (const rank of timeline.ranks.filter(({ open }) => open)) {
    for (let i = 0; i < rank.events; i++) {
      const at = rank.launch[i] ? rank.start[rank.launch[i] - 1] : NaN;
      if (!(from <= at && at < to)) continue;
      const name = nameOf(rank, i);
      addSums(names, name, { name, track: "", count: 1, sum: rank.dur[i] || 0, max: rank.dur[i] || 0 });
    }
  }
  return sortNames([...names.values()]);
}

// Adds an entry to that of its key.
function addSums(names, key, entry) {
  const { count, sum, max } = names.get(key) ?? { count: 0, sum: 0, max: 0 };
  names.set(key, { ...entry, count: count + entry.count, sum: sum + entry.sum, max: Math.max(max, entry.max) });
}

const sortNames = (names) => names.sort((a, b) => b.sum - a.sum || b.count - a.count);
const nameTrack = (rank, track) => `rank ${rank.title ?? rank.rank}, ${track.name}`;

const nameOf = (rank, index) => rank.strings[rank.name[index] - 1] ?? "(no name)";

// Shows the statistics of the selected time under the timeline, unless they are there already.
async function showStatistics(timeline) {
  const [side, { value: by }, note, table, calls] = ["", "-by", "-note", "-table", "-calls"].map((part) => document.getElementById(`statistics${part}`));
  const { measured, items, fills } = timeline;
  const key = [measured, items, by, fills];
  if (showStatistics.key?.every((part, i) => part === key[i])) return;
  showStatistics.key = key;
  side.hidden = !measured || measured[0] === measured[1];
  if (side.hidden) return;
  const span = measured[1] - measured[0];
  document.getElementById("statistics-sql").hidden = !timeline.ranks.every(({ rank, open }) => !open || FACTS.zeros?.[rank]);
  table.parentNode.hidden = by.startsWith("call");
  calls.hidden = !table.parentNode.hidden;
  const counted = by === "launched" ? "GPU activities on the page that unfolded ranks launched in it, with all of their time, also after it."
    : "unfolded rows. Events that cross an edge count with their part inside.";
  note.textContent = `${formatTime(measured[0], 9)} to ${formatTime(measured[1], 9)} (${formatTime(span)}); ${counted}`;
  if (!calls.hidden) {
    const root = await timeline.buildCalls(measured);
    if (showStatistics.key !== key) return;
    return drawCalls(timeline, calls, by === "callers" ? invertCalls(root) : root, span);
  }
  const names = await (by === "launched" ? timeline.sumLaunched(measured) : timeline.sumNames(measured, by === "track"));
  if (showStatistics.key !== key) return;
  if (names.length > MAX_NAMES) note.append(` The first ${MAX_NAMES} of ${formatCount(names.length)} rows.`);
  table.classList.toggle("by-track", by === "track");
  const number = (value, text) => {
    const cell = element("td", { className: "number", textContent: text });
    cell.dataset.value = value;
    return cell;
  };
  table.tBodies[0].replaceChildren(...names.slice(0, MAX_NAMES).map(({ name, track, count, sum, max }) => element("tr", {},
    element("td", { className: "long" }, element("div", { textContent: name })), element("td", { textContent: track }),
    number(count, formatCount(count)), number(sum, formatExact(sum)), number(sum / count, formatExact(sum / count)), number(max, formatExact(max)),
    number(sum / span, formatShare(sum / span)))));
  sortTable(table, 3, -1);
  setSort(table, table.dataset.sort ?? "");
  side.querySelector("input").dispatchEvent(new Event("input"));
}

// The statement for `etloom query` that sums the selected time by name. Each rank counts its times from a zero of its own.
function writeStatement({ measured: [from, to], ranks }, by) {
  const parts = ranks.filter(({ open }) => open).map(({ rank }) => {
    const [start, end] = [from, to].map((time) => BigInt(FACTS.zeros[rank]) + BigInt(Math.round(time)));
    if (by === "launched") {
      return `SELECT d.name, coalesce(d.dur, 0) AS part FROM launches AS l JOIN events AS h ON h.rank = l.rank AND h.id = l.launch JOIN events AS d ON d.rank = l.rank AND d.id = l.device_event WHERE l.rank = ${rank} AND h.ts >= ${start} AND h.ts < ${end}`;
    }
    const stop = "ts + coalesce(dur, 0)";
    return `SELECT name, least(${stop}, ${end}) - greatest(ts, ${start}) AS part FROM events WHERE rank = ${rank} AND ts < ${end} AND ${stop} > ${start}`;
  });
  return `SELECT name, count(*) AS count, sum(part) AS sum_ns FROM (${parts.join(" UNION ALL ")}) AS parts GROUP BY name ORDER BY sum_ns DESC`;
}

function connectSelection(timeline) {
  copyOnClick(document.getElementById("statistics-sql"), () => writeStatement(timeline, document.getElementById("statistics-by").value));
  timeline.atRest.push(() => showStatistics(timeline));
}
