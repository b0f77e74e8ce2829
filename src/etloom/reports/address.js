// The view of the timeline in the address of the page: the time in view (t), the selected event (e) and time (s), folds
// that differ from those at first (f), the order of ranks (o), the search (q) and whether it ignores the selected time (a), the
// critical path (p), the scroll (y), the ranks on a page of a server (r), and the controls of the page by their letters.

const listControls = () => [...document.querySelectorAll("[data-state]")];

// What a control shows, as text: of a table, the column that a click sorted and the direction; empty as at first.
function readControl(control) {
  if (control.rows) return control.dataset.sort ?? "";
  return control.type === "search" ? control.value : String(Number(control.selectedIndex ?? control.value) || "");
}

function writeControl(control, text) {
  if (control.rows) setSort(control, text);
  else if (control.type === "search") control.value = text;
  else {
    const value = Math.trunc(Number(text)) || 0;
    if (control.options) control.selectedIndex = control.options[value] ? value : 0;
    else control.value = value;
  }
  control.dispatchEvent(new Event("input"));
}

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
  set("r", FACTS.served && String(ranks.map(({ rank }) => rank)) !== String(FACTS.served.ranks) && ranks.map(({ rank }) => rank).join("_"));
  set("o", ranks.some(({ place }, i) => place !== i) && ranks.map(({ place }) => place).join("_"));
  set("q", query);
  set("a", timeline.everywhere && "1");
  for (const control of listControls()) set(control.dataset.state, readControl(control));
  set("p", path && "1");
  set("y", Math.round(scroller.scrollTop));
  return state.toString();
}

// Returns false if the text is not a state of the timeline.
async function readState(timeline, text) {
  const state = new URLSearchParams(text);
  const get = (name) => state.get(name) ?? "";
  const span = readSpan(get("t"));
  if (!span) return false;
  // First, as they may unfold tracks and move the view.
  for (const control of listControls()) writeControl(control, get(control.dataset.state));
  if (timeline.path !== state.has("p")) document.querySelector('button[data-act="path"]').click();
  await timeline.addRanks((get("r").match(/\d+/g) ?? []).map(Number));
  const changed = new Set(get("f").split("_"));
  const order = get("o").split("_");
  const place = ({ place }) => (order.length > 1 ? order.indexOf(String(place)) : place);
  timeline.ranks.sort((a, b) => place(a) - place(b));
  for (const rank of timeline.ranks) {
    rank.open = rank.opens !== changed.has(String(rank.rank));
    rank.tracks.forEach((track, i) => { track.open = track.opens !== changed.has(`${rank.rank}.${i}`); });
  }
  timeline.layout();
  const input = document.getElementById("search");
  timeline.everywhere = state.has("a");
  input.value = get("q");
  input.dispatchEvent(new Event("input"));
  timeline.setView(...span);
  const [number, id] = get("e").split(".");
  const rank = timeline.ranks.find((other) => String(other.rank) === number);
  const index = rank && id ? await timeline.seek(rank, Number(id)) : -1;
  timeline.select(index < 0 ? null : rank, index);
  timeline.measure(...(readSpan(get("s")) ?? [null]));
  timeline.scroller.scrollTop = Number(get("y")) || 0;
  return true;
}

function readSpan(text) {
  const [from, to] = /^-?\d{1,16}_-?\d{1,16}$/.test(text) ? text.split("_").map(Number) : [];
  return from <= to ? [from, to] : null;
}

// Where the address of the page has no fragment, the links to its sections scroll.
function followLinks() {
  for (const link of document.querySelectorAll('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    });
  }
}

// Opens the view of the address, also of a changed one; the address follows the timeline once it rests.
function connectLink(timeline) {
  const button = document.getElementById("link");
  button.hidden = location.protocol === "about:"; // the frame of a notebook has no address
  if (button.hidden) return followLinks();
  let last = writeState(timeline);
  const update = () => {
    const state = writeState(timeline);
    if (state !== last) history.replaceState(null, "", `#${state}`);
    last = state;
  };
  const open = async () => {
    if (!await readState(timeline, location.hash.slice(1))) return;
    document.getElementById("timeline").scrollIntoView({ behavior: "instant" });
    last = writeState(timeline);
  };
  open();
  window.addEventListener("hashchange", open);
  timeline.atRest.push(update);
  for (const control of listControls()) control.addEventListener("input", () => timeline.schedule());
  copyOnClick(button, () => {
    last = null;
    update();
    return location.href;
  });
}
