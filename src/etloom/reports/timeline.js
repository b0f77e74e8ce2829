// The timeline: its layout, the view, the selection, search, and the event under the pointer.

class Timeline extends Painter {
  constructor(root) {
    super();
    this.root = root;
    this.scroller = root.querySelector(".scroller");
    this.canvas = root.querySelector("canvas");
    this.spacer = root.querySelector(".spacer");
    this.tip = root.querySelector(".tip");
    this.context = this.canvas.getContext("2d");
    this.ranks = [];
    this.items = [];
    this.extent = [0, 1]; // of all events
    this.home = [0, 1]; // of the work: without the profiler's own events
    this.view = [0, 1];
    this.selected = null;
    this.hovered = null;
    this.measured = null;
    this.query = "";
    this.everywhere = false; // whether a search ignores the selected time
    this.path = false; // whether the critical path is marked
    this.pathLinks = null;
    this.loading = false; // whether more ranks follow
    this.frames = [];
    this.onselect = () => {};
    this.onview = () => {};
    this.onmatch = () => {};
    this.atRest = []; // called once the picture rests and no button is pressed
    this.readColors();
    listen(this);
  }

  add(rank, fit = true) {
    rank.place = this.ranks.length;
    rank.open = rank.opens = fit;
    rank.match = null;
    for (const track of rank.tracks) {
      track.open = track.opens = !track.folded;
      track.pathTime = sumPath(rank, track);
    }
    this.labelTracks(rank);
    this.ranks.push(rank);
    this.pathLinks = null;
    const tracks = this.ranks.flatMap((rank) => rank.tracks.map((track) => [rank, track]));
    const work = tracks.filter(([, track]) => track.work);
    this.extent = bounds(tracks);
    this.home = bounds(work.length ? work : tracks);
    this.search(this.query);
    this.layout();
    if (fit) this.fit();
  }

  // ---- layout

  layout() {
    this.items = [];
    let y = 0;
    for (const rank of this.ranks) {
      const pin = { y, height: 0, bottom: 0 };
      // The head and the GPU tracks, which come first, stay in sight while the others scroll, if they leave room for these.
      const add = (item) => {
        const isPinned = (!item.track || (item.track.gpu && pin.height === y - pin.y)) && pin.height + item.height < 0.6 * this.rowSpace;
        if (isPinned) pin.height += item.height;
        this.items.push({ ...item, y, pin: isPinned ? pin : null });
        y += item.height;
      };
      add({ rank, track: null, height: HEAD });
      for (const track of rank.open ? rank.tracks : []) {
        const rows = track.open ? track.rows.length - 1 : 1;
        add({ rank, track, rows, height: rows * ROW + TRACK_GAP });
      }
      pin.bottom = y;
    }
    this.height = y;
    this.spacer.style.height = `${Math.max(0, y + AXIS + MINIMAP - this.scroller.clientHeight)}px`;
    // While ranks come in one after the other, the overview waits for the last.
    if (!this.loading) this.overview = null;
    this.schedule();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.scroller;
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.gutter = width < 640 ? 124 : 210;
    this.visible = height;
    for (const rank of this.ranks) this.labelTracks(rank);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.layout();
  }

  // The names of tracks, as they fit beside them.
  labelTracks(rank) {
    const labels = fitNames(rank.tracks.map(({ name }) => name), roomFor(this.gutter - 30));
    rank.tracks.forEach((track, i) => { track.label = labels[i]; });
  }

  // The y of an item on the screen.
  at({ y, pin }) {
    const shift = pin ? Math.min(this.scroller.scrollTop - pin.y, pin.bottom - pin.y - pin.height) : 0;
    return this.top + y + Math.max(shift, 0);
  }

  get rowSpace() { return (this.visible || 0) - MINIMAP - AXIS; }
  get top() { return MINIMAP + AXIS - this.scroller.scrollTop; }
  get scale() { return (this.width - this.gutter) / (this.view[1] - this.view[0]); }
  x(time) { return this.gutter + (time - this.view[0]) * this.scale; }
  time(x) { return this.view[0] + (x - this.gutter) / this.scale; }

  // Where an event lies: its item and row.
  find(rank, index) {
    const track = trackOf(rank, index);
    const item = this.items.find((item) => item.track === track);
    return item && { item, row: firstAbove(track.rows, index, 0, track.rows.length) - 1 };
  }

  // ---- view

  setView(from, to) {
    const [low, high] = this.extent;
    const margin = (high - low) * 0.05 + MIN_SPAN;
    let span = Math.min(Math.max(to - from, MIN_SPAN), high - low + 2 * margin);
    from = Math.min(Math.max(from, low - margin), high + margin - span);
    this.view = [from, from + span];
    this.onview();
    this.schedule();
  }

  fit() {
    const [from, to] = this.home;
    const pad = (to - from) * 0.01;
    this.setView(from - pad, to + pad);
  }

  // Fits the event or time that was selected last, else all.
  fitSelection() {
    const { selected, measured, latest } = this;
    if (!latest) return this.fit();
    if (latest === selected) return this.zoomTo(selected.rank, selected.index);
    const margin = (measured[1] - measured[0]) * 0.05;
    this.setView(measured[0] - margin, measured[1] + margin);
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const span = Math.max(MIN_SPAN, (this.view[1] - this.view[0]) * factor);
    const share = (at - this.view[0]) / (this.view[1] - this.view[0]);
    this.setView(at - share * span, at + (1 - share) * span);
  }

  pan(share) {
    const shift = share * (this.view[1] - this.view[0]);
    this.setView(this.view[0] + shift, this.view[1] + shift);
  }

  zoomTo(rank, index) {
    const start = rank.start[index];
    const span = Math.max((rank.dur[index] || 0) * 4, MIN_SPAN * 4);
    this.setView(start + (rank.dur[index] || 0) / 2 - span / 2, start + (rank.dur[index] || 0) / 2 + span / 2);
    this.reveal(rank, index);
  }

  // Scrolls to the event's row and, unless told not to, moves the view to its time where it is outside.
  reveal(rank, index, move = true) {
    rank.open = trackOf(rank, index).open = true;
    this.layout();
    if (!this.isInSight(rank, index)) {
      const { item, row } = this.find(rank, index);
      const hidden = item.pin ? 0 : this.pinnedHeight(rank);
      this.scroller.scrollTop = item.y + row * ROW - hidden - (this.rowSpace - hidden) / 3;
    }
    const start = rank.start[index];
    if (move && (start + (rank.dur[index] || 0) < this.view[0] || start > this.view[1])) {
      const half = (this.view[1] - this.view[0]) / 2;
      this.setView(start - half, start + half);
    }
    this.schedule();
  }

  // Whether the row of an event is in sight.
  isInSight(rank, index) {
    const place = this.find(rank, index);
    if (!place) return false;
    const y = this.place(rank, index).y - MINIMAP - AXIS;
    return y >= (place.item.pin ? 0 : this.pinnedHeight(rank)) && y + ROW <= this.rowSpace;
  }

  // The height of the tracks of a rank that stay in sight.
  pinnedHeight(rank) {
    return this.items.find((item) => item.rank === rank).pin?.height ?? 0;
  }

  // Folds a rank or a track, or unfolds it.
  fold(part) {
    part.open = !part.open;
    this.layout();
  }

  // Shows a step of the first rank that has it, and selects its time; returns whether there is one.
  showStep(number) {
    for (const { steps } of this.ranks) {
      const step = steps.find(([other]) => other === number);
      if (!step) continue;
      const [, start, duration] = step;
      this.setView(start - 0.05 * duration, start + 1.05 * duration);
      this.measure(start, start + duration);
      return true;
    }
    return false;
  }

  scrollTo(rank) {
    this.scroller.scrollTop = this.items.find((item) => item.rank === rank).y;
  }

  select(rank, index) {
    this.selected = this.latest = rank ? { rank, index } : null;
    this.onselect(rank, index);
    this.schedule();
  }

  // ---- search

  // The time in which a search counts and visits events, as the statistics do: the selected one; null for all.
  get searched() {
    const { measured, everywhere } = this;
    return everywhere || !measured || measured[0] === measured[1] ? null : measured;
  }

  // Searches again if another time is selected now.
  refreshSearch() {
    if (!this.query.trim() || String(this.searched) === this.matches.searched) return;
    this.search(this.query);
    this.onmatch();
  }

  search(query) {
    this.query = query;
    this.matches = { events: 0, time: 0, list: [], searched: String(this.searched) };
    const [from, to] = this.searched ?? [-Infinity, Infinity];
    for (const rank of this.ranks) {
      rank.match = this.matchNames(rank);
      if (!rank.match) continue;
      for (let i = rank.match.indexOf(1); i >= 0; i = rank.match.indexOf(1, i + 1)) {
        if (!(rank.start[i] + (rank.dur[i] || 0) > from && rank.start[i] < to)) continue;
        this.matches.events++;
        this.matches.time += rank.dur[i] || 0;
        if (this.matches.list.length < 100000) this.matches.list.push([rank, i]);
      }
    }
    this.matches.list.sort(([a, i], [b, j]) => a.rank - b.rank || a.start[i] - b.start[j]);
    this.matches.at = -1;
    this.schedule();
    return this.matches;
  }

  // Which events have a name that is searched; null without a search.
  matchNames(rank) {
    const text = this.query.trim().toLowerCase();
    if (!text) return null;
    const names = [false, ...rank.strings.map((string) => string.toLowerCase().includes(text))];
    return Uint8Array.from(rank.name, (name) => names[name]);
  }

  next(direction) {
    this.refreshSearch();
    const { list } = this.matches;
    if (!list.length) return;
    const before = Math.max(this.matches.at, direction < 0 ? 0 : -1);
    this.matches.at = (before + direction + list.length) % list.length;
    const [rank, index] = list[this.matches.at];
    this.select(rank, index);
    this.reveal(rank, index);
    this.onmatch();
  }

  center(x) {
    const [low, high] = this.home;
    const middle = low + ((x - this.gutter) / (this.width - this.gutter)) * (high - low);
    const half = (this.view[1] - this.view[0]) / 2;
    this.setView(middle - half, middle + half);
  }

  measure(from, to) {
    this.measured = from === null ? null : [Math.min(from, to), Math.max(from, to)].map(Math.round);
    this.latest = this.measured;
    this.schedule();
  }

  // Selects the time of the selected event.
  measureSelected() {
    if (!this.selected) return;
    const { rank, index } = this.selected;
    if (rank.dur[index]) this.measure(rank.start[index], rank.start[index] + rank.dur[index]);
  }

  // The event before or after the selected one in its row; without one, the first of all.
  selectNeighbor(direction) {
    if (!this.selected) {
      const item = this.items.find(({ track }) => track && track.rows[0] < track.rows.at(-1));
      return item && this.select(item.rank, item.track.rows[0]);
    }
    const { rank, index } = this.selected;
    const { item, row } = this.find(rank, index);
    const next = index + direction;
    if (next < item.track.rows[row] || next >= item.track.rows[row + 1]) return;
    this.select(rank, next);
    this.reveal(rank, next);
  }

  // ---- what a timeline answers itself, or a server for it (served.js)

  // The index of an event.
  async seek(rank, id) { return rank.id.indexOf(id); }
  async addRanks() {}
  async prepare() {}
  async loadView() {}
  async sumNames(range, byTrack) { return sumNames(this, range, byTrack); }
  async sumLaunched(range) { return sumLaunched(this, range); }
  async buildCalls(range) { return buildCalls(this, range); }

  // ---- the pointer

  item(y) {
    return y < MINIMAP + AXIS ? undefined : this.visibleItems().findLast((item) => y >= this.at(item) && y < this.at(item) + item.height);
  }

  hit(x, y) {
    const item = this.item(y);
    if (!item || !item.track || x < this.gutter) return null;
    const row = Math.floor((y - this.at(item)) / ROW);
    if (row >= item.rows) return null;
    const { rank, track } = item;
    const [from, to] = [track.rows[row], track.rows[row + 1]];
    const slack = 2 / this.scale;
    const time = this.time(x);
    let best = null;
    let nearest = slack;
    for (let i = firstAbove(rank.end, time - slack, from, to); i < to && rank.start[i] <= time + slack; i++) {
      const distance = Math.max(rank.start[i] - time, time - rank.start[i] - (rank.dur[i] || 0), 0);
      if (best === null ? distance <= nearest : distance < nearest) {
        best = i;
        nearest = distance;
      }
      if (distance === 0) break;
    }
    return best === null ? null : { rank, index: best };
  }

  hover(event) {
    const hit = this.hit(event.offsetX, event.offsetY);
    const item = event.offsetX < this.gutter ? this.item(event.offsetY) : null;
    const step = this.stepAt(event.offsetX, this.item(event.offsetY));
    this.canvas.style.cursor = hit || item || step ? "pointer" : "";
    if (hit?.rank !== this.hovered?.rank || hit?.index !== this.hovered?.index) {
      this.hovered = hit;
      this.schedule();
    }
    this.tip.hidden = !hit && !item?.track && !step;
    if (this.tip.hidden) return;
    const name = step ? `step ${step[0]}, annotated for ${formatTime(step[2])}: a click selects this time` : item?.track?.name;
    this.tip.replaceChildren(...(hit ? tipLines(hit) : [element("strong", { textContent: name })]));
    if (!hit && item?.track?.omitted) this.tip.append(element("div", { textContent: `${formatCount(item.track.omitted)} events omitted` }));
    const { width, height } = this.tip.getBoundingClientRect();
    const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 10 : event.clientX + 14;
    const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${Math.max(4, top)}px`;
  }

  click(x, y) {
    const item = this.item(y);
    if (item && x < this.gutter) {
      return this.fold(item.track || item.rank);
    }
    const step = this.stepAt(x, item);
    if (step) return this.measure(step[1], step[1] + step[2]);
    const hit = this.hit(x, y);
    return hit ? this.select(hit.rank, hit.index) : this.select(null);
  }

  // The step at a place of the head of a rank.
  stepAt(x, item) {
    if (!item || item.track || x < this.gutter) return undefined;
    const time = this.time(x);
    return item.rank.steps.find(([, start, dur]) => start <= time && time < start + dur);
  }
}

function tipLines({ rank, index }) {
  const lines = details(rank, index).filter(([label]) => !["rank", "track", "event"].includes(label));
  return lines.map(([label, text]) =>
    label === "name" ? element("strong", { textContent: shorten(text, 700) })
      : element("div", {}, element("span", { textContent: label }), ` ${shorten(text, 600)}`));
}

// [label, text] for each known attribute of an event.
function details(rank, index) {
  const text = (column) => (rank[column][index] ? rank.strings[rank[column][index] - 1] : null);
  const step = rank.step[index] ? rank.steps[rank.step[index] - 1][0] : null;
  const correlation = rank.correlation[index];
  const named = (reference) => (reference ? rank.strings[rank.name[reference - 1] - 1] : null);
  return [
    ["name", text("name") ?? "(no name)"], ["category", LABELS[(rank.category ?? rank.color)[index]]],
    ["start", formatTime(rank.start[index], 9)],
    ["duration", Number.isNaN(rank.dur[index]) ? "none (an instant, or never closed)" : formatTime(rank.dur[index])],
    ["critical path", formatShareOnPath(rank, index)], ["compared", formatCompared(rank, index)],
    ["step", step], ["correlation", Number.isNaN(correlation) ? null : correlation],
    ["shapes", text("shapes")], ["launch", text("geometry")], ["communication", text("communication")],
    ["wait", formatWait(rank, index)],
    ["launched by", rank.launch[index] ? `${named(rank.launch[index])}, which began ${formatTime(rank.start[index] - rank.start[rank.launch[index] - 1])} before` : null], ["operator", named(rank.operator[index])],
    ["also here", rank.hidden?.[index] ? `${formatCount(rank.hidden[index])} more; zoom in` : null],
    ["rank", rank.title ?? rank.rank], ["track", trackOf(rank, index).name], ["event", rank.id[index]],
  ].filter(([, value]) => value !== null).map(([label, value]) => [label, String(value)]);
}

// What the operator or kernel takes in the runs that are compared, per step; null for nothing.
function formatCompared(rank, index) {
  const [before, after, ofOperator] = rank.changes?.[rank.compared[index] - 1] ?? [];
  if (!(Math.max(before, after) > 0)) return null;
  const [first, second] = [before, after].map((time) => (time < 0 ? "absent" : formatTime(time)));
  const percent = Math.min(before, after) > 0 ? ` (${after < before ? "−" : "+"}${Math.abs(100 * (after / before - 1)).toFixed(1)} %)` : "";
  return `${ofOperator ? "its operator " : ""}${first} → ${second} per step${percent}`;
}

// For which rank a collective waits, and how long; null for an event that is not a matched collective.
function formatWait(rank, index) {
  const late = (rank.late?.[index] ?? 0) - 1;
  if (late < 0) return null;
  const time = formatTime(rank.wait[index]);
  if (late === rank.rank) return rank.wait[index] ? `none; others wait for it, up to ${time}` : "none";
  return `${time} for rank ${late}, which arrived later`;
}

function bounds(tracks) {
  let [low, high] = [Infinity, -Infinity];
  for (const [rank, { rows, span }] of tracks) {
    if (span) [low, high] = [Math.min(low, span[0]), Math.max(high, span[1])];
    for (let row = 0; row + 1 < rows.length; row++) {
      if (rows[row] === rows[row + 1]) continue;
      low = Math.min(low, rank.start[rows[row]]);
      high = Math.max(high, rank.end[rows[row + 1] - 1]);
    }
  }
  return low <= high ? [low, Math.max(high, low + 1000)] : [0, 1000];
}
