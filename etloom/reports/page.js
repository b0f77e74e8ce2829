// The page around the timeline: the panel of details, searching, and the start.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const COLOURS = FACTS.colors.map(([name]) => name);
const LABELS = FACTS.colors.map(([, label]) => label);

const FIRST = 8; // ranks that are open when the page is

function panel(timeline, rank, index) {
  const side = document.getElementById("details");
  panel.empty ??= [...side.childNodes];
  side.classList.toggle("filled", Boolean(rank));
  if (!rank) return side.replaceChildren(...panel.empty);
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
  const buttons = element("div", { className: "buttons" }, go("zoom to it", index, "show"));
  if (rank.launch[index]) buttons.append(go("go to its launch", rank.launch[index] - 1));
  if (rank.operator[index]) buttons.append(go("go to its operator", rank.operator[index] - 1));
  if (caused.length) buttons.append(go(caused.length > 1 ? `first of ${formatCount(caused.length)} device events` : "go to its device event", caused[0]));
  side.replaceChildren(list, buttons);
}

function searching(timeline) {
  const input = document.getElementById("search");
  const answer = document.getElementById("found");
  input.addEventListener("input", () => {
    const found = timeline.search(input.value);
    answer.textContent = !input.value.trim() ? ""
      : found.events ? `${formatCount(found.events)} events, ${formatTime(found.time)}` : "no event has this name";
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") timeline.next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { input.value = ""; input.dispatchEvent(new Event("input")); timeline.canvas.focus(); }
  });
  window.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    input.focus();
  });
}

async function start() {
  tables();
  const root = document.getElementById("tracks");
  const timeline = root && new Timeline(root);
  themes(() => timeline?.readColours());
  if (!timeline) return;
  timeline.onselect = (rank, index) => panel(timeline, rank, index);
  searching(timeline);
  buttons(timeline);
  const status = document.getElementById("status");
  const packed = [...document.querySelectorAll("script[data-rank]")];
  for (const [i, script] of packed.entries()) {
    status.textContent = `unpacking ${i + 1} of ${packed.length} ranks`;
    timeline.add(await unpack(script.textContent), i < FIRST);
    script.remove();
    if (i + 1 < Math.min(FIRST, packed.length)) continue;
    // The page can be used from here on; the other ranks come, folded, while it is.
    root.dataset.ready = "true";
    window.etloom = { timeline };
    timeline.coming = i + 1 < packed.length;
    await new Promise((go) => setTimeout(go));
  }
  const events = timeline.ranks.reduce((sum, rank) => sum + rank.events, 0);
  timeline.layout();
  status.textContent = `${formatCount(events)} events`;
  const path = document.querySelector('button[data-act="path"]');
  path.disabled = !timeline.onPath();
  if (path.disabled) path.title = "no event here is on a critical path";
  root.dataset.whole = "true";
}

function buttons(timeline) {
  const act = {
    fit: () => timeline.fit(), in: () => timeline.zoom(0.6), out: () => timeline.zoom(1 / 0.6),
    path: (button) => {
      timeline.mark(!timeline.path);
      button.setAttribute("aria-pressed", String(timeline.path));
    },
  };
  for (const button of document.querySelectorAll("button[data-act]")) {
    button.addEventListener("click", () => act[button.dataset.act](button));
  }
  for (const button of document.querySelectorAll("button[data-at-event]")) {
    button.addEventListener("click", () => {
      const found = timeline.go(Number(button.dataset.atRank), Number(button.dataset.atEvent));
      if (found) document.getElementById("timeline").scrollIntoView();
      else button.textContent = "not drawn";
    });
  }
}

start().catch((error) => {
  const status = document.getElementById("status");
  if (status) status.textContent = `the timeline could not be shown: ${error.message}`;
  throw error;
});
