// Shows the part of the timeline that a finding is about: its time, its event, and the ranks that it concerns.

// Returns false if the rank is not (yet) there.
async function showFinding(timeline, view) {
  await timeline.prepare(view);
  const rank = timeline.ranks.find(({ rank }) => rank === view.rank);
  if (!rank) return false;
  const peer = timeline.ranks.find(({ rank }) => rank === view.peer);
  const index = findEvent(rank, view);
  for (const other of timeline.ranks) other.open = other === rank || other === peer;
  if (peer) {
    placeNext(timeline, rank, peer);
    foldAround(rank, index, view);
    foldAround(peer, peer.id.indexOf(view.peer_event), view);
  } else {
    for (const track of rank.tracks) track.open = track.opens;
  }
  timeline.layout();
  const margin = Math.max((view.end - view.start) * 0.2, MIN_SPAN);
  timeline.setView(view.start - margin, view.end + margin);
  timeline.scrollTo(peer && timeline.ranks.indexOf(peer) < timeline.ranks.indexOf(rank) ? peer : rank);
  if (index >= 0) {
    timeline.select(rank, index);
    timeline.reveal(rank, index, false);
  }
  timeline.measure(view.start, view.end);
  return true;
}

// The view of the wait of a collective for the last rank, next to that rank; null if it does not wait, or the page does not
// have that rank.
function findWait(timeline, rank, index) {
  const late = (rank.late?.[index] ?? 0) - 1;
  if (late < 0 || late === rank.rank || !(FACTS.served || timeline.ranks.some((other) => other.rank === late))) return null;
  const start = rank.start[index];
  const end = Math.min(start + rank.wait[index], start + rank.dur[index]);
  return { rank: rank.rank, event: rank.id[index], start, end, peer: late, peer_event: rank.late_event[index] - 1, late };
}

// The event of the finding, or what it launched: the one that covers most of the time. Without any, the event of the
// rank that fits the time best; -1 if nothing is drawn there.
function findEvent(rank, { event, start, end }) {
  const index = event === null ? -1 : rank.id.indexOf(event);
  const overlap = (i) => Math.min(rank.start[i] + (rank.dur[i] || 0), end) - Math.max(rank.start[i], start);
  let [best, most] = [index, index < 0 ? 0 : Math.max(0, overlap(index))];
  if (index >= 0) {
    for (const effect of rank.caused.get(index) || []) if (overlap(effect) > most) [best, most] = [effect, overlap(effect)];
    return best;
  }
  for (let i = 0; i < rank.events; i++) {
    const fit = overlap(i) / Math.max(end - start, rank.dur[i] || 0, 1);
    if (fit > most) [best, most] = [i, fit];
  }
  return best;
}

// Moves the second rank next to the first.
function placeNext(timeline, rank, peer) {
  const { ranks } = timeline;
  if (Math.abs(ranks.indexOf(rank) - ranks.indexOf(peer)) === 1) return;
  ranks.splice(ranks.indexOf(peer), 1);
  ranks.splice(ranks.indexOf(rank) + 1, 0, peer);
}

// Folds the tracks of a rank except that of the event and, where a rank is late, the thread that is the busiest.
function foldAround(rank, index, { start, end, late }) {
  let busiest = { time: 0 };
  for (const track of rank.tracks) {
    track.open = index >= track.rows[0] && index < track.rows[track.rows.length - 1];
    if (!track.host || rank.rank !== late) continue;
    let time = 0;
    for (let i = track.rows[0]; i < track.rows[1]; i++) {
      time += Math.max(0, Math.min(rank.start[i] + (rank.dur[i] || 0), end) - Math.max(rank.start[i], start));
    }
    if (time > busiest.time) busiest = { track, time };
  }
  if (busiest.track) busiest.track.open = true;
}
