// The page of several runs: its tables, and the timelines of one rank of all runs on one axis, aligned at a step.

const CHANGED = 0.03;
const CHANGED_MUCH = 0.3;

async function start() {
  tables();
  const root = document.getElementById("tracks");
  const timeline = root && new Timeline(root);
  themes(() => timeline?.readColors());
  if (!timeline) return;
  timeline.onselect = (rank, index) => showDetails(timeline, rank, index);
  connectTimeline(timeline);
  document.querySelector('button[data-act="path"]').hidden = true;
  const packs = [];
  for (const script of document.querySelectorAll("script[data-run]")) {
    const rank = await unpack(script.textContent);
    const run = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[script.dataset.run] ?? `${script.dataset.run}:`;
    Object.assign(rank, { number: rank.rank, title: `${rank.rank} of ${run}`, rank: `${run}${rank.rank}`, shift: 0, category: rank.color });
    rank.byChange = Uint8Array.from(rank.compared, (place) => colorOf(rank.changes[place - 1]));
    packs.push(rank);
    script.remove();
  }
  connectRuns(timeline, packs);
  document.getElementById("status").textContent = "";
  root.dataset.ready = root.dataset.whole = "true";
  window.etloom = { timeline, colors: COLORS, formatCompared }; // for the console and tests
  connectLink(timeline);
}

// The index of the color of [before, after], -1 where it is absent; the colors of changes follow those of categories.
function colorOf([before, after] = [0, 0]) {
  const color = (name) => COLORS.indexOf(name);
  if (Math.max(before, after) <= 0) return color("unmatched");
  if (before < 0 || after < 0) return color("alone");
  const ratio = Math.max(before, after) / Math.max(Math.min(before, after), 1);
  const size = ratio > 1 + CHANGED_MUCH ? 2 : 1;
  return color(ratio <= 1 + CHANGED ? "unchanged" : `${after > before ? "slower" : "faster"}-${size}`);
}

// The controls: rank, step, colors.
function connectRuns(timeline, packs) {
  const [rankOf, stepOf, colorBy] = ["rank", "step", "colors"].map((name) => document.getElementById(`compare-${name}`));
  const drawn = () => packs.filter(({ number }) => String(number) === rankOf.value);
  const align = () => {
    const matched = matchSteps(drawn())[stepOf.selectedIndex];
    drawn().forEach((rank, run) => shift(rank, matched ? rank.shift - matched[run][1] : 0));
    [timeline.ranks, timeline.overview] = [[], null];
    timeline.measure(null);
    timeline.select(null);
    for (const rank of drawn()) timeline.add(rank);
    if (!matched) return;
    const longest = Math.max(...matched.map(([, , duration]) => duration));
    timeline.setView(-0.02 * longest, 1.02 * longest);
  };
  rankOf.addEventListener("input", () => {
    const names = matchSteps(drawn()).map((steps) => [...new Set(steps.map(([number]) => number))].join(" and "));
    stepOf.replaceChildren(...(names.length ? names : ["none: aligned at the start"]).map((name) => element("option", { textContent: name })));
    align();
  });
  stepOf.addEventListener("input", align);
  colorBy.addEventListener("input", () => {
    const byChange = colorBy.selectedIndex === 0;
    for (const rank of packs) rank.color = byChange ? rank.byChange : rank.category;
    const legend = document.querySelector(".toolbar .legend");
    [...legend.children].forEach((item, i) => { item.hidden = byChange !== i < FACTS.change_colors; });
    timeline.overview = null;
    timeline.schedule();
  });
  for (const control of [rankOf, colorBy]) control.dispatchEvent(new Event("input"));
  connectSteps(stepOf);
}

// A click on a step of the chart shows it on the timelines, if they have it.
function connectSteps(stepOf) {
  for (const hit of document.querySelectorAll(".hit")) {
    const find = () => [...stepOf.options].findIndex(({ textContent }) => textContent === hit.dataset.step);
    hit.classList.toggle("shown", find() >= 0);
    hit.addEventListener("click", () => {
      if (find() < 0) return;
      stepOf.selectedIndex = find();
      stepOf.dispatchEvent(new Event("input"));
      document.getElementById("timeline").scrollIntoView();
    });
  }
}

// The steps of runs that belong together: of the same number, or, without any, in their order.
function matchSteps([first, ...others]) {
  const find = ({ steps }, number) => steps.find(([other]) => other === number);
  const common = first.steps.filter(([number]) => others.every((rank) => find(rank, number)));
  if (common.length) return common.map((step) => [step, ...others.map((rank) => find(rank, step[0]))]);
  const count = Math.min(...[first, ...others].map(({ steps }) => steps.length));
  return first.steps.slice(0, count).map((step, i) => [step, ...others.map(({ steps }) => steps[i])]);
}

// Moves a rank to where the time `by` of its own clock, negative, is the zero of the page.
function shift(rank, by) {
  const more = by - rank.shift;
  for (const times of [rank.start, rank.end]) times.forEach((time, i) => { times[i] = time + more; });
  for (const step of rank.steps) step[1] += more;
  rank.shift = by;
}

start().catch(showFailure);
