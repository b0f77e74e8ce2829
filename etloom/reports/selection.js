// Statistics of the selected time: which names take how much of it.

const MAX_NAMES = 500; // rows of the table
const EXACT = new Intl.NumberFormat("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

// Calls visit(item, index, time, isClipped) for each event of the unfolded rows that overlaps the time range; `time` is
// the part of its duration inside.
function visitRange(timeline, [from, to], visit) {
  for (const item of timeline.items) {
    if (!item.track) continue;
    const { rank: { start, dur, end }, track: { rows } } = item;
    for (let row = 0; row < item.rows; row++) {
      for (let i = firstAbove(end, from, rows[row], rows[row + 1]); i < rows[row + 1] && start[i] < to; i++) {
        const stop = start[i] + (dur[i] || 0);
        if (stop <= from) continue; // events that share the last row overlap
        visit(item, i, Math.min(stop, to) - Math.max(start[i], from), start[i] < from || stop > to);
      }
    }
  }
}

// The names of a time range, the largest sum first: [{ name, track, count, sum }]; and the number of clipped events. A
// name has one entry, or one for each track.
function sumNames(timeline, range, byTrack) {
  const names = [];
  const known = new Map(); // name -> its entry
  const places = new Map(); // rank or track -> the entry of each of its names
  let clipped = 0;
  visitRange(timeline, range, ({ rank, track }, index, time, isClipped) => {
    const part = byTrack ? track : rank;
    if (!places.has(part)) places.set(part, []);
    const entries = places.get(part);
    const code = rank.name[index];
    if (!entries[code]) {
      const name = rank.strings[code - 1] ?? "(no name)";
      entries[code] = (!byTrack && known.get(name)) || { name, track: byTrack ? `rank ${rank.rank}, ${track.name}` : "", count: 0, sum: 0 };
      if (!entries[code].count) names.push(entries[code]);
      known.set(name, entries[code]);
    }
    entries[code].count++;
    entries[code].sum += time;
    clipped += isClipped;
  });
  return { names: names.sort((a, b) => b.sum - a.sum || b.count - a.count), clipped };
}

// Shows the statistics of the selected time under the timeline, unless they are there already.
function showStatistics(timeline) {
  const side = document.getElementById("statistics");
  const by = document.getElementById("statistics-by").value;
  const { measured, items } = timeline;
  const key = [measured, items, by];
  if (showStatistics.key?.every((part, i) => part === key[i])) return;
  showStatistics.key = key;
  side.hidden = !measured || measured[0] === measured[1];
  if (side.hidden) return;
  const span = measured[1] - measured[0];
  const { names, clipped } = sumNames(timeline, measured, by === "track");
  const parts = [`${formatTime(measured[0], 9)} to ${formatTime(measured[1], 9)} (${formatTime(span)}), all unfolded rows.`];
  if (clipped) parts.push(`${formatCount(clipped)} events cross an edge: only their part inside counts.`);
  if (names.length > MAX_NAMES) parts.push(`The first ${MAX_NAMES} of ${formatCount(names.length)} rows.`);
  document.getElementById("statistics-note").textContent = parts.join(" ");
  const table = document.getElementById("statistics-table");
  table.classList.toggle("by-track", by === "track");
  const number = (value, text) => {
    const cell = element("td", { className: "number", textContent: text });
    cell.dataset.value = value;
    return cell;
  };
  table.tBodies[0].replaceChildren(...names.slice(0, MAX_NAMES).map(({ name, track, count, sum }) => element("tr", {},
    element("td", { className: "long" }, element("div", { textContent: name })), element("td", { textContent: track }),
    number(count, formatCount(count)), number(sum, EXACT.format(sum / 1000)), number(sum / count, EXACT.format(sum / count / 1000)),
    number(sum / span, `${((100 * sum) / span).toFixed(2)} %`))));
  sortTable(table, 3, -1);
  side.querySelector("input").dispatchEvent(new Event("input"));
}

// Nothing is summed while a selection is drawn: the table follows once the timeline rests.
function connectSelection(timeline) {
  const show = () => showStatistics(timeline);
  timeline.atRest.push(show);
  document.getElementById("statistics-by").addEventListener("change", show);
}
