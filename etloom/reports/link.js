// The state of the timeline in the address of the page, so that a link reopens a view: the time in view (t), the selected
// event (e) and time (s), what is folded otherwise than at first (f), the order of the ranks (o), the search (q), whether
// the critical path is marked (p), and how far it is scrolled (y).

function writeState(timeline) {
  const { ranks, view, selected, measured, query, path, scroller } = timeline;
  const state = new URLSearchParams({ t: view.map(Math.round).join("_") });
  const set = (name, value) => value && state.set(name, value);
  set("e", selected && `${selected.rank.rank}.${selected.rank.id[selected.index]}`);
  set("s", measured?.join("_"));
  set("f", ranks.flatMap((rank) => [
    ...(rank.open === rank.opens ? [] : [rank.rank]),
    ...rank.tracks.flatMap((track, i) => (track.open === track.opens ? [] : [`${rank.rank}.${i}`])),
  ]).join("_"));
  const order = ranks.map(({ rank }) => rank).join("_");
  set("o", order !== [...ranks].sort((a, b) => a.place - b.place).map(({ rank }) => rank).join("_") && order);
  set("q", query);
  set("p", path && "1");
  set("y", Math.round(scroller.scrollTop));
  return state.toString();
}

// Returns false if the text is not a state of the timeline.
function readState(timeline, text) {
  const state = new URLSearchParams(text);
  const span = readSpan(state.get("t"));
  if (!span) return false;
  // Marking the path may unfold tracks and move the view: it goes first.
  if (timeline.path !== state.has("p")) document.querySelector('button[data-act="path"]').click();
  const list = (name) => (state.get(name) ?? "").split("_");
  const changed = new Set(list("f"));
  const order = list("o");
  const place = ({ rank, place }) => (order.length > 1 ? order.indexOf(String(rank)) : place);
  timeline.ranks.sort((a, b) => place(a) - place(b));
  for (const rank of timeline.ranks) {
    rank.open = rank.opens !== changed.has(String(rank.rank));
    rank.tracks.forEach((track, i) => { track.open = track.opens !== changed.has(`${rank.rank}.${i}`); });
  }
  timeline.layout();
  const input = document.getElementById("search");
  input.value = state.get("q") ?? "";
  input.dispatchEvent(new Event("input"));
  timeline.setView(...span);
  const [number, id] = (state.get("e") ?? "").split(".");
  const rank = timeline.ranks.find((other) => String(other.rank) === number);
  const index = rank && id ? rank.id.indexOf(Number(id)) : -1;
  timeline.select(index < 0 ? null : rank, index);
  timeline.measure(...(readSpan(state.get("s")) ?? [null]));
  timeline.scroller.scrollTop = Number(state.get("y")) || 0;
  return true;
}

function readSpan(text) {
  const match = /^(-?\d{1,16})_(-?\d{1,16})$/.exec(text ?? "");
  return match && Number(match[1]) <= Number(match[2]) ? [Number(match[1]), Number(match[2])] : null;
}

// Opens the view of the address, now and when the address is changed; the address follows the timeline once it rests.
function connectLink(timeline) {
  let last = writeState(timeline);
  const update = () => {
    const state = writeState(timeline);
    if (state !== last) history.replaceState(null, "", `#${state}`);
    last = state;
  };
  const open = () => {
    if (!readState(timeline, location.hash.slice(1))) return;
    document.getElementById("timeline").scrollIntoView({ behavior: "instant" });
    last = writeState(timeline);
  };
  open();
  window.addEventListener("hashchange", open);
  timeline.atRest.push(update);
  document.getElementById("link").addEventListener("click", ({ target }) => {
    last = null;
    update();
    copyLink(target);
  });
}

async function copyLink(button) {
  button.textContent = await navigator.clipboard.writeText(location.href).then(() => "Copied", () => "Copy the address instead");
  setTimeout(() => { button.textContent = "Copy link"; }, 2000);
}
