// What surrounds a timeline on every page: the panel of details, the search, and the buttons.

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
    const id = rank.id[target]; // its index may change
    button.addEventListener("click", () => {
      timeline.select(rank, rank.id.indexOf(id));
      timeline[verb](rank, rank.id.indexOf(id));
    });
    return button;
  };
  const caused = rank.caused.get(index) || [];
  const buttons = element("div", { className: "buttons" }, go("zoom to it", index, "zoomTo"));
  if (rank.launch[index]) buttons.append(go("go to its launch", rank.launch[index] - 1));
  if (rank.operator[index]) buttons.append(go("go to its operator", rank.operator[index] - 1));
  if (caused.length) buttons.append(go(caused.length > 1 ? `first of ${formatCount(caused.length)} device events` : "go to its device event", caused[0]));
  const wait = findWait(timeline, rank, index);
  if (wait) {
    const button = element("button", { type: "button", textContent: `show rank ${wait.peer}, which is late` });
    button.addEventListener("click", () => showFinding(timeline, wait));
    buttons.append(button);
  }
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
  const everywhere = document.getElementById("everywhere");
  timeline.onmatch = () => {
    const { events, time, at, isPending, searched } = timeline.matches;
    const place = at < 0 ? "" : `${formatCount(at + 1)} of `;
    const where = searched === "null" ? "" : " in the selected time";
    answer.textContent = !input.value.trim() ? "" : isPending ? "searching"
      : events ? `${place}${formatCount(events)} events${where}, ${formatTime(time)}` : `no event${where} has this name`;
    showScope();
  };
  const showScope = () => {
    everywhere.hidden = !input.value.trim() || !timeline.measured;
    everywhere.setAttribute("aria-pressed", String(timeline.everywhere));
  };
  everywhere.addEventListener("click", () => {
    timeline.everywhere = !timeline.everywhere;
    timeline.refreshSearch();
  });
  timeline.atRest.push(() => {
    timeline.refreshSearch();
    showScope();
  });
  input.addEventListener("input", () => {
    timeline.search(input.value);
    timeline.onmatch();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      timeline.next(event.shiftKey ? -1 : 1);
      timeline.canvas.focus({ preventScroll: true }); // its keys, such as M, apply to the match
    }
    if (event.key === "Escape") { input.value = ""; input.dispatchEvent(new Event("input")); timeline.canvas.focus(); }
  });
  window.addEventListener("keydown", (event) => {
    if (!/^[/?]$/.test(event.key) || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    if (event.key === "/") input.focus();
    else toggleHelp(timeline);
  });
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
  for (const button of document.querySelectorAll("button[data-view], button[data-call]")) {
    button.addEventListener("click", async () => {
      const view = button.dataset.call ? viewCall(button.dataset.call) : JSON.parse(button.dataset.view);
      if (!await showFinding(timeline, view)) await loaded.then(() => showFinding(timeline, view));
      const caption = document.getElementById("caption");
      caption.textContent = view.caption;
      caption.hidden = !view.caption;
      document.getElementById("timeline").scrollIntoView();
      timeline.canvas.focus({ preventScroll: true });
    });
  }
}

// The view of a call that is the longest of several, as longest_calls.py writes it.
function viewCall(text) {
  const [rank, event, start, duration, count] = text.split(".").map(Number);
  const caption = `${count > 1 ? `The longest of ${formatCount(count)}` : "The only one"}, on rank ${rank}.`;
  return { rank, event, start, end: start + duration, peer: null, caption };
}

// A click on a column of the chart of steps shows the step on the timeline.
function connectStepColumns(timeline) {
  for (const column of document.querySelectorAll(".columns [data-step]")) {
    column.addEventListener("click", () => {
      if (timeline.showStep(Number(column.dataset.step))) document.getElementById("timeline").scrollIntoView();
    });
  }
}

function connectTimeline(timeline, loaded) {
  connectStepColumns(timeline);
  connectSearch(timeline);
  connectSelection(timeline);
  connectButtons(timeline, loaded);
}

function showFailure(error) {
  const status = document.getElementById("status");
  if (status) status.textContent = `the timeline could not be shown: ${error.message}`;
  throw error;
}
