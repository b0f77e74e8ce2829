// The page around the timeline: the panel of details, searching, and the start.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const COLORS = FACTS.colors.map(([name]) => name);
const LABELS = FACTS.colors.map(([, label]) => label);

function showDetails(timeline, rank, index) {
  const side = document.getElementById("details");
  showDetails.help ??= [...side.childNodes];
  side.classList.toggle("filled", Boolean(rank));
  if (!rank) return side.replaceChildren(...showDetails.help);
  const list = element("dl");
  for (const [label, text] of details(rank, index)) {
    list.append(element("dt", { textContent: label }), element("dd", { textContent: text }));
  }
  const go = (label, target, verb = "reveal") => {
    const button = element("button", { type: "button", textContent: label });
    button.addEventListener("click", () => {
      timeline.select(rank, target);
      timeline[verb](rank, target);
    });
    return button;
  };
  const caused = rank.caused.get(index) || [];
  const buttons = element("div", { className: "buttons" }, go("zoom to it", index, "zoomTo"));
  if (rank.launch[index]) buttons.append(go("go to its launch", rank.launch[index] - 1));
  if (rank.operator[index]) buttons.append(go("go to its operator", rank.operator[index] - 1));
  if (caused.length) buttons.append(go(caused.length > 1 ? `first of ${formatCount(caused.length)} device events` : "go to its device event", caused[0]));
  side.replaceChildren(list, buttons);
}

function toggleHelp(timeline) {
  const side = document.getElementById("details");
  const { rank, index } = timeline.selected ?? {};
  showDetails(timeline, side.classList.contains("filled") ? null : rank, index);
  side.scrollIntoView({ block: "nearest" });
}

function connectSearch(timeline) {
  const input = document.getElementById("search");
  const answer = document.getElementById("matches");
  timeline.onmatch = () => {
    const { events, time, at } = timeline.matches;
    const place = at < 0 ? "" : `${formatCount(at + 1)} of `;
    answer.textContent = !input.value.trim() ? ""
      : events ? `${place}${formatCount(events)} events, ${formatTime(time)}` : "no event has this name";
  };
  input.addEventListener("input", () => {
    timeline.search(input.value);
    timeline.onmatch();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") timeline.next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { input.value = ""; input.dispatchEvent(new Event("input")); timeline.canvas.focus(); }
  });
  window.addEventListener("keydown", (event) => {
    if (!/^[/?]$/.test(event.key) || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    if (event.key === "/") input.focus();
    else toggleHelp(timeline);
  });
}

async function start() {
  tables();
  const root = document.getElementById("tracks");
  const timeline = root && new Timeline(root);
  let [fleet, memory] = [null, null];
  themes(() => { timeline?.readColors(); fleet?.paint(); memory?.paint(); });
  let finish;
  const loaded = new Promise((done) => { finish = done; });
  fleet = connectFleet(timeline, loaded);
  memory = await connectMemory(timeline);
  if (!timeline) return;
  timeline.onselect = (rank, index) => {
    showDetails(timeline, rank, index);
    if (rank) memory?.selectTime(rank.rank, rank.start[index]);
  };
  connectSearch(timeline);
  connectSelection(timeline);
  timeline.onload = finish;
  connectButtons(timeline, loaded);
  const status = document.getElementById("status");
  const packed = [...document.querySelectorAll("script[data-rank]")];
  for (const [i, script] of packed.entries()) {
    status.textContent = `unpacking ${i + 1} of ${packed.length} ranks`;
    timeline.add(await unpack(script.textContent), i < FACTS.open_ranks);
    script.remove();
    if (i + 1 < Math.min(FACTS.open_ranks, packed.length)) continue;
    // From here on the page can be used; the other ranks follow, folded.
    root.dataset.ready = "true";
    window.etloom = { timeline, memory, findPiece, fitNames, showFinding, sumPath }; // for the console and tests
    timeline.loading = i + 1 < packed.length;
    await new Promise((go) => setTimeout(go));
  }
  const events = timeline.ranks.reduce((sum, rank) => sum + rank.events, 0);
  timeline.layout();
  status.textContent = `${formatCount(events)} events`;
  const path = document.querySelector('button[data-act="path"]');
  path.disabled = !timeline.ranks.some((rank) => rank.path_event.length > rank.firstPiece[0]);
  if (path.disabled) path.title = "no event here is on a critical path";
  root.dataset.whole = "true";
  timeline.onload();
  connectLink(timeline);
}

function connectButtons(timeline, loaded) {
  const act = {
    next: () => timeline.next(1), previous: () => timeline.next(-1), fit: () => timeline.fit(), in: () => timeline.zoom(0.6), out: () => timeline.zoom(1 / 0.6),
    path: (button) => {
      markPath(timeline, !timeline.path);
      button.setAttribute("aria-pressed", String(timeline.path));
    },
  };
  for (const button of document.querySelectorAll("button[data-act]")) {
    button.addEventListener("click", () => act[button.dataset.act](button));
  }
  for (const button of document.querySelectorAll("button[data-view]")) {
    button.addEventListener("click", async () => {
      const view = JSON.parse(button.dataset.view);
      if (!showFinding(timeline, view)) await loaded.then(() => showFinding(timeline, view));
      const caption = document.getElementById("caption");
      caption.textContent = view.caption;
      caption.hidden = !view.caption;
      document.getElementById("timeline").scrollIntoView();
      timeline.canvas.focus({ preventScroll: true });
    });
  }
}

start().catch((error) => {
  const status = document.getElementById("status");
  if (status) status.textContent = `the timeline could not be shown: ${error.message}`;
  throw error;
});
