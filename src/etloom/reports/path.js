// The critical path on the timeline: which pieces of which events are on it. A piece without an event is a delay.

// Adds the pieces by event and start (timeline_path.py describes the columns): path_event, 1 + the index of the event or
// 0, path_start and path_dur.
function restorePieces(rank) {
  const { path_row: rows, path_move: moves, path_gap: gaps, path_rest: rests, start, dur } = rank;
  const count = rows.length;
  const last = rank.tracks.flatMap(({ rows: bounds }) => bounds.slice(0, -1).filter((first, i) => first < bounds[i + 1]));
  const owner = Uint32Array.from(rows, (row, i) => (row ? (last[row - 1] += moves[i]) + 1 : 0));
  const [starts, durations] = [new Float64Array(count), new Float64Array(count)];
  const firsts = new Uint32Array(rank.events + 2); // the place of the first piece of each owner
  for (let i = 0, time = -rank.zero; i < count; i++) {
    const from = (starts[i] = time += gaps[i]);
    const end = owner[i] ? start[owner[i] - 1] + (dur[owner[i] - 1] || 0) : from;
    const next = owner[i + 1] ? start[owner[i + 1] - 1] : -Infinity;
    time = (next > from && (next < end || !owner[i]) ? next : end) + rests[i];
    durations[i] = time - from;
    firsts[owner[i] + 1]++;
  }
  for (let i = 1; i < firsts.length; i++) firsts[i] += firsts[i - 1];
  Object.assign(rank, { path_event: new Uint32Array(count), path_start: new Float64Array(count), path_dur: new Float64Array(count) });
  for (let i = 0; i < count; i++) {
    const place = firsts[owner[i]]++;
    [rank.path_event[place], rank.path_start[place], rank.path_dur[place]] = [owner[i], starts[i], durations[i]];
  }
}

// Adds what drawing needs: firstPiece[i], the first piece of event i, and the spans of all pieces in time order.
function indexPieces(rank) {
  const { path_event: owner, path_start: start, path_dur: dur, events } = rank;
  rank.pathEnd = start.map((time, i) => time + dur[i]);
  rank.firstPiece = new Uint32Array(events + 1);
  let piece = 0;
  for (let i = 0; i <= events; i++) {
    while (piece < owner.length && owner[piece] <= i) piece++;
    rank.firstPiece[i] = piece;
  }
  const spans = [];
  for (const i of [...start.keys()].sort((a, b) => start[a] - start[b])) {
    const last = spans[spans.length - 1];
    if (last && start[i] <= last[1]) last[1] = Math.max(last[1], rank.pathEnd[i]);
    else spans.push([start[i], rank.pathEnd[i]]);
  }
  rank.pathSpans = { start: spans.map(([from]) => from), end: spans.map(([, to]) => to) };
}

const isOnPath = (rank, from, to = from + 1) => rank.firstPiece[to] > rank.firstPiece[from];

// The time on the path of a track, or of the rank.
function sumPath(rank, track) {
  const [from, to] = track ? [rank.firstPiece[track.rows[0]], rank.firstPiece[track.rows[track.rows.length - 1]]]
    : [0, rank.path_dur.length];
  let time = 0;
  for (let piece = from; piece < to; piece++) time += rank.path_dur[piece];
  return time;
}

// How much of an event is on the path; null for nothing.
function formatShareOnPath(rank, index) {
  if (!isOnPath(rank, index)) return null;
  let time = 0;
  for (let piece = rank.firstPiece[index]; piece < rank.firstPiece[index + 1]; piece++) time += rank.path_dur[piece];
  return `${formatTime(time)} of it`;
}

// The [left, right] on the screen of sorted spans that do not overlap; those under a pixel are merged.
function* visibleSpans(timeline, starts, ends, from, to) {
  const { view: [t0, t1], scale, gutter, width } = timeline;
  for (let i = firstAbove(ends, t0, from, to); i < to && starts[i] <= t1; ) {
    const left = Math.max(gutter + (starts[i] - t0) * scale, gutter - 2);
    const right = Math.min(gutter + (ends[i] - t0) * scale, width + 2);
    if (right - left >= 1) {
      yield [left, right];
      i++;
    } else {
      const x = Math.floor(left);
      yield [x, x + 1];
      i = Math.max(i + 1, firstAbove(ends, t0 + (x + 1 - gutter) / scale, i + 1, to));
    }
  }
}

// Marks the critical path or not. What is marked comes into sight: if no piece is in view, the view moves to the nearest.
async function markPath(timeline, on) {
  timeline.path = on;
  timeline.overview = null;
  if (on && !findPiece(timeline, 3, true)) {
    if (!findPiece(timeline, 0)) moveToNearestPiece(timeline);
    await timeline.loadView();
    const longest = findPiece(timeline, 0);
    if (longest) timeline.reveal(longest.rank, longest.index);
  }
  timeline.schedule();
}

// The event with the longest piece in view, of at least so many pixels; optionally only of rows that are in sight.
function findPiece(timeline, pixels, inSight = false) {
  const [t0, t1] = timeline.view;
  let best = { time: pixels / timeline.scale };
  for (const rank of timeline.ranks) {
    const { path_event: owner, path_start: start, pathEnd: end } = rank;
    for (let piece = rank.firstPiece[0]; piece < owner.length; piece++) {
      const time = Math.min(end[piece], t1) - Math.max(start[piece], t0);
      if (time > best.time && (!inSight || timeline.isInSight(rank, owner[piece] - 1))) best = { rank, index: owner[piece] - 1, time };
    }
  }
  return best.rank ? best : null;
}

function moveToNearestPiece(timeline) {
  const [t0, t1] = timeline.view;
  let nearest = { distance: Infinity };
  for (const rank of timeline.ranks.map((rank) => rank.whole ?? rank)) {
    for (let piece = rank.firstPiece[0]; piece < rank.path_event.length; piece++) {
      const distance = Math.max(rank.path_start[piece] - t1, t0 - rank.pathEnd[piece]);
      if (distance < nearest.distance) nearest = { distance, at: (rank.path_start[piece] + rank.pathEnd[piece]) / 2 };
    }
  }
  if (nearest.at !== undefined) timeline.setView(nearest.at - (t1 - t0) / 2, nearest.at + (t1 - t0) / 2);
}

// [from, to]: consecutive pieces of the path on different tracks; between ranks only if their clocks can be compared.
function listPathLinks(ranks) {
  const pieces = ranks.flatMap((rank) => {
    const { path_event: owner, path_start: start, pathEnd: end } = rank;
    return Array.from({ length: owner.length - rank.firstPiece[0] }, (_, i) => {
      const piece = rank.firstPiece[0] + i;
      return { rank, index: owner[piece] - 1, start: start[piece], end: end[piece] };
    });
  });
  pieces.sort((a, b) => a.start - b.start);
  const links = [];
  for (let i = 1; i < pieces.length; i++) {
    const [from, to] = [pieces[i - 1], pieces[i]];
    if (from.rank !== to.rank ? FACTS.common_clock : trackOf(from.rank, from.index) !== trackOf(to.rank, to.index)) links.push([from, to]);
  }
  return links;
}

const trackOf = (rank, index) => rank.tracks.find(({ rows }) => index < rows[rows.length - 1]);
