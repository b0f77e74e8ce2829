// A timeline whose events stay on the server (timeline_index.py): it holds those in view, and asks for everything else.

const MORE_TIME = 0.3; // of the view, loaded before and after it
const MORE_ROWS = 12; // loaded above and below those in sight
const FINDING_ROWS = 8; // of each track, loaded to look for the event of a finding
const RETRY = 2000; // ms between questions whether the summary is ready

class ServedTimeline extends Timeline {
  async ask(question, rank, values) {
    const response = await fetch(`${question}?${new URLSearchParams({ rank: rank.rank, ...values })}`);
    if (!response.ok) throw new Error(await response.text());
    return response.headers.get("Content-Type") === "application/json" ? response.json() : restore(decode(await response.arrayBuffer()));
  }

  // Adds those of these ranks that are not there yet; the first one is unfolded.
  async addRanks(numbers) {
    for (const number of numbers) {
      if (this.ranks.some(({ rank }) => rank === number)) continue;
      const rank = await this.ask("overview", { rank: number }).catch(reportFailure);
      if (!rank) continue;
      this.add(rank, this.ranks.length < FACTS.open_ranks);
      rank.whole = { ...rank, tracks: rank.tracks.map((track) => ({ ...track })) };
    }
  }

  // ---- what is in view

  draw() {
    super.draw();
    if (!this.waiting) this.ranks.forEach((rank) => this.update(rank));
  }

  // Where nothing is loaded yet, the overview is drawn.
  drawTrack(item) {
    const { rank, track } = item;
    if (!this.hasTime(rank)) super.drawTrack({ ...item, rank: rank.whole, track: rank.whole.tracks[rank.tracks.indexOf(track)] });
    super.drawTrack(item);
  }

  hasTime({ loaded }) {
    return loaded && loaded.from <= this.view[0] && loaded.to >= this.view[1];
  }

  // Loads what is in view of a rank, unless it is loaded or on its way.
  update(rank) {
    const shown = this.listRows(rank, 0);
    if (!shown.length || rank.pending || this.covers(rank, shown)) return;
    rank.pending = true;
    const loaded = this.load(rank, this.describeView(rank)).finally(() => { rank.pending = false; });
    loaded.then(() => this.schedule(), reportFailure); // after a failure, the next movement asks again
  }

  covers(rank, shown) {
    const { loaded } = rank;
    return this.hasTime(rank) && loaded.cell * this.scale < 1.01 && loaded.q === this.query && loaded.ids === this.selectedId(rank)
      && shown.every(([track, first, end]) => loaded.rows.some((part) => part[0] === track && part[1] <= first && part[2] >= end));
  }

  selectedId(rank) {
    return this.selected?.rank === rank ? String(rank.id[this.selected.index]) : "";
  }

  // The rows in sight of unfolded tracks, with `more` around them: [track, first, end].
  listRows(rank, more = Infinity) {
    return this.items.filter((item) => item.track && item.rank === rank).map((item) => {
      const above = MINIMAP + AXIS - this.at(item);
      const [first, end] = [Math.floor(above / ROW) - more, Math.ceil((above + this.visible - MINIMAP - AXIS) / ROW) + more];
      return [rank.tracks.indexOf(item.track), Math.max(0, first), Math.min(item.rows, end)];
    }).filter(([, first, end]) => first < end);
  }

  describeView(rank) {
    const [from, to] = this.view;
    const more = (to - from) * MORE_TIME;
    return { from: from - more, to: to + more, rows: this.listRows(rank, MORE_ROWS), ids: this.selectedId(rank) };
  }

  async load(rank, { from, to, rows, ids }) {
    const part = { from: Math.floor(from), to: Math.ceil(to), rows, ids, q: this.query };
    const cells = Math.max(1, Math.ceil((part.to - part.from) * this.scale));
    part.cell = (part.to - part.from) / cells;
    rank.requests = (rank.requests ?? 0) + 1;
    const number = rank.requests;
    const { tracks, ...columns } = await this.ask("slice", rank, { ...part, cells, rows: encodeRows(rows) });
    if (number !== rank.requests) return; // another part was asked for meanwhile
    const chosen = [this.selected, this.hovered].filter((other) => other?.rank === rank).map((other) => [other, rank.id[other.index]]);
    tracks.forEach(({ rows }, i) => { rank.tracks[i].rows = rows; });
    const isNew = rank.loaded?.ids !== ids;
    Object.assign(rank, columns, { loaded: part, match: this.matchNames(columns) });
    for (const [other, id] of chosen) other.index = rank.id.indexOf(id);
    if (this.hovered?.index < 0) this.hovered = null;
    if (this.selected?.index < 0) this.select(null);
    else if (isNew && this.selected?.rank === rank) this.onselect(rank, this.selected.index);
    this.pathLinks = null;
  }

  // Waits for loads, while nothing else is loaded.
  async hold(loads) {
    this.waiting = (this.waiting ?? 0) + 1;
    await Promise.all(loads).finally(() => { this.waiting--; });
  }

  async seek(rank, id) {
    await this.hold([this.load(rank, { ...this.describeView(rank), ids: String(id) })]);
    return rank.id.indexOf(id);
  }

  // Loads all rows of the time in view.
  loadView() {
    return this.hold(this.ranks.filter(({ open }) => open).map((rank) => {
      const rows = rank.tracks.map((track, i) => [i, 0, track.rows.length]);
      return this.load(rank, { ...this.describeView(rank), rows });
    }));
  }

  // Loads what a finding shows, whose ranks may not be there yet.
  async prepare({ rank, event, start, end, peer, peer_event }) {
    const parts = [[rank, event], [peer, peer_event]].filter(([number]) => number !== null);
    await this.addRanks(parts.map(([number]) => number));
    await this.hold(parts.map(([number, id]) => {
      const found = this.ranks.find((other) => other.rank === number);
      const rows = found.tracks.map((_, i) => [i, 0, FINDING_ROWS]);
      return this.load(found, { from: start, to: Math.max(end, start + 1), rows, ids: String(id ?? "") });
    }));
  }

  // ---- all events

  search(query) {
    super.search(query); // marks what is loaded
    for (const { whole } of this.ranks) if (whole) whole.match = this.matchNames(whole);
    if (!query.trim()) return;
    const span = this.describeSearched();
    const searched = String(this.searched);
    this.matches = { isPending: true, searched };
    const ranks = [...this.ranks].sort((a, b) => a.rank - b.rank);
    this.counting = Promise.all(ranks.map((rank) => this.ask("search", rank, { q: query, ...span }))).then((sums) => {
      if (query !== this.query || ranks.length !== this.ranks.length || searched !== this.matches.searched) return;
      const add = (name) => sums.reduce((sum, answer) => sum + answer[name], 0);
      this.matches = { searched, span, events: add("events"), time: add("time"), at: -1, counts: ranks.map((rank, i) => [rank, sums[i].events]) };
      this.onmatch();
    }, reportFailure);
  }

  // The time that is searched, as the server reads it.
  describeSearched() {
    const [from, to] = this.searched ?? [];
    return from === undefined ? {} : { from, to };
  }

  async next(direction) {
    this.refreshSearch();
    await this.counting;
    const { events, at, counts, span } = this.matches;
    if (!events) return;
    let number = this.matches.at = (Math.max(at, direction < 0 ? 0 : -1) + direction + events) % events;
    const [rank] = counts.find(([, count]) => number < count || ((number -= count), false));
    await this.goTo(rank, { q: this.query, number, ...span });
    this.onmatch();
  }

  async selectNeighbor(direction) {
    if (!this.selected) return super.selectNeighbor(direction);
    const { rank, index } = this.selected;
    await this.goTo(rank, { id: rank.id[index], number: direction });
  }

  async goTo(rank, values) {
    const id = await this.ask("event", rank, values);
    if (id === null) return;
    const index = await this.seek(rank, id);
    this.select(rank, index);
    this.reveal(rank, index);
  }

  // The answers of the unfolded ranks about the selected time: [rank, answer].
  askAll(question, [from, to], values) {
    const ranks = this.ranks.filter((rank) => this.listRows(rank).length);
    return Promise.all(ranks.map(async (rank) => [rank, await this.ask(question, rank, { from, to, rows: encodeRows(this.listRows(rank)), ...values })]));
  }

  async sumNames(range, byTrack) {
    const names = new Map();
    for (const [rank, rows] of await this.askAll("names", range, { by: byTrack ? "track" : "name" })) {
      for (const [name, number, count, sum, max] of rows) {
        const track = byTrack ? nameTrack(rank, rank.tracks[number]) : "";
        addSums(names, `${track}\n${name}`, { name, track, count, sum, max });
      }
    }
    return sortNames([...names.values()]);
  }

  async sumLaunched(range) {
    const names = new Map();
    for (const [, rows] of await this.askAll("launched", range)) {
      for (const [name, , count, sum, max] of rows) addSums(names, name, { name, track: "", count, sum, max });
    }
    return sortNames([...names.values()]);
  }

  async buildCalls(range) {
    const root = startTree();
    for (const [, rows] of await this.askAll("calls", range)) {
      const calls = [];
      for (const [caller, name, color, count, sum] of rows) calls.push(addCall(calls[caller] ?? root, name, color, count, sum));
    }
    return root;
  }
}

function reportFailure({ message }) {
  document.getElementById("status").textContent = message;
}

const encodeRows = (rows) => rows.map((part) => part.join(".")).join("_");

// Shows the first ranks, offers the others, and waits for the summary.
async function openServed(timeline, root) {
  const { ranks, summarized } = FACTS.served;
  await timeline.addRanks(ranks);
  root.dataset.ready = "true";
  const [number, button] = document.querySelectorAll("#add-rank > *");
  button?.addEventListener("click", async () => {
    await timeline.addRanks([number.valueAsNumber]);
    const rank = timeline.ranks.find((other) => other.rank === number.valueAsNumber);
    if (!rank) return;
    rank.open = true;
    timeline.layout();
    timeline.scrollTo(rank);
  });
  number?.addEventListener("keydown", (event) => event.key === "Enter" && button.click());
  if (!summarized) waitForSummary(document.getElementById("computing"));
}

// Offers the whole page once it is there; a link to the view keeps what is shown now.
async function waitForSummary(note) {
  const answer = await (await fetch("ready")).json();
  if (answer === false) return setTimeout(() => waitForSummary(note), RETRY);
  if (answer !== true) return note.replaceChildren(answer);
  const button = element("button", { type: "button", textContent: "Show the summary, the findings and the tables" });
  button.addEventListener("click", () => location.reload());
  note.replaceChildren(button);
}
