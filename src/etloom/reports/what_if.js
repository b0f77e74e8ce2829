// The what-if control: times of the contracted graph after a change by a factor (what_if.py describes the data).

class WhatIf {
  constructor(data) {
    Object.assign(this, data, { first: sumUp(data.degree, 1) });
    this.source = data.distance.slice();
    for (let point = 0; point < data.degree.length; point++) {
      for (let chain = this.first[point]; chain < this.first[point + 1]; chain++) this.source[chain] = point - data.distance[chain];
    }
    this.chainOfCell = sumUp(data.cell_chain);
    this.total = new Float64Array(this.source.length);
    this.firstCell = new Uint32Array(this.source.length + 1);
    this.chainOfCell.forEach((chain, cell) => { this.total[chain] += data.lag[cell]; this.firstCell[chain + 1] = cell + 1; });
    this.bounds = sumUp(data.counts, 1);
    this.recorded = this.predict(0, 1);
  }

  // The [upper, lower] bound of the run and of each step, and the parts of the critical path at the upper bound; ns.
  predict(change, factor) {
    const { chainOfCell, scaled, delay, changed, bounds, steps, step_points: points, step_firsts: firsts } = this;
    const [upper, lower, lag] = [this.total.slice(), this.total.slice(), this.lag.slice()];
    const grow = (time) => Math.round(time * factor) - time;
    for (let i = bounds[change], cell = 0; i < bounds[change + 1]; i++) {
      cell += changed[i];
      const longer = grow(scaled[i]);
      lag[cell] += longer;
      upper[chainOfCell[cell]] += longer;
      lower[chainOfCell[cell]] += longer + grow(delay[i]);
    }
    const times = [upper, lower].map((lags) => this.schedule(lags));
    const measure = (chosen) => times.map((time) => span(time, chosen)).sort((a, b) => b - a);
    return {
      run: measure(null),
      steps: steps.map((_, i) => measure(points.subarray(firsts[i], firsts[i + 1] ?? points.length))),
      path: this.walk(times[0], upper, lag),
    };
  }

  schedule(lags) {
    const { first, source, start } = this;
    const time = start.slice();
    for (let point = 0; point < time.length; point++) {
      if (first[point] === first[point + 1]) continue;
      let latest = -Infinity;
      for (let chain = first[point]; chain < first[point + 1]; chain++) latest = Math.max(latest, time[source[chain]] + lags[chain]);
      time[point] = latest;
    }
    return time;
  }

  // The time of each part of the critical path, back from the last point.
  walk(time, lags, lag) {
    const { first, source, firstCell, cell_part: part } = this;
    const sums = new Float64Array(this.parts.length);
    let point = time.indexOf(time.reduce((a, b) => Math.max(a, b)));
    while (first[point] < first[point + 1]) {
      let chain = first[point + 1] - 1;
      while (time[source[chain]] + lags[chain] !== time[point]) chain--;
      for (let cell = firstCell[chain]; cell < firstCell[chain + 1]; cell++) sums[part[cell]] += lag[cell];
      point = source[chain];
    }
    sums[sums.length - 1] += time[point] - time.reduce((a, b) => Math.min(a, b));
    return sums;
  }
}

// The time from the first to the last of all points, or of the chosen ones.
function span(time, chosen) {
  let [least, most] = [Infinity, -Infinity];
  for (let i = 0; i < (chosen ?? time).length; i++) {
    const at = time[chosen ? chosen[i] : i];
    if (at < least) least = at;
    if (at > most) most = at;
  }
  return most - least;
}

// The sums of all values up to each one; optionally with zeros before them.
function sumUp(values, before = 0) {
  const sums = new Uint32Array(values.length + before);
  let sum = 0;
  values.forEach((value, i) => { sums[i + before] = sum += value; });
  return sums;
}

const MAX_STEP_ROWS = 50;
const MS = new Intl.NumberFormat("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
const formatMs = (ns) => `${MS.format(ns / 1e6)} ms`;
const formatChange = (before, after) => `${after < before ? "−" : "+"}${Math.abs(100 * (after / before - 1)).toFixed(1)} %`;
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

async function connectWhatIf() {
  const script = document.getElementById("what-if-data");
  if (!script) return null;
  const graph = new WhatIf(decode(await inflate(script.textContent)));
  const { command, changes } = graph;
  script.remove();
  const part = (name) => document.getElementById(`what-if-${name}`);
  const show = () => {
    const factor = Number((10 ** (part("factor").value / 100)).toPrecision(2));
    const change = Math.max(0, part("change").selectedIndex);
    part("times").textContent = `x${factor}`;
    part("command").textContent = [command, ...changes[change].map((text) => `--set '${`${text} x${factor}`.replaceAll("'", "'\\''")}'`)].join(" ");
    showPrediction(graph, graph.predict(change, factor), part);
  };
  for (const name of ["change", "factor"]) part(name).addEventListener("input", show);
  part("reset").addEventListener("click", () => {
    part("factor").value = 0;
    part("factor").dispatchEvent(new Event("input"));
  });
  copyOnClick(part("copy"), () => part("command").textContent);
  // The change that shortens the run most is chosen first.
  const runs = changes.map((_, change) => graph.predict(change, 0.5).run[0]);
  part("change").selectedIndex = runs.indexOf(Math.min(...runs));
  show();
  return graph;
}

function showPrediction({ recorded, parts, steps }, predicted, part) {
  const at = (times, bound) => mean(times.steps.length ? times.steps.map((step) => step[bound]) : [times.run[bound]]);
  const [before, upper, lower] = [at(recorded, 0), at(predicted, 0), at(predicted, 1)];
  const subject = steps.length ? `A step, until its GPU activity ends (mean of ${formatCount(steps.length)})` : "The run";
  const changes = upper === lower ? formatChange(before, upper) : `${formatChange(before, lower)} to ${formatChange(before, upper)}`;
  part("answer").textContent = `${subject}: ${formatMs(lower)}${upper === lower ? "" : ` to ${formatMs(upper)}`} instead of ${formatMs(before)} (${changes})`;
  const number = (text) => element("td", { className: "number", textContent: text });
  const row = (name, [was], [most, least]) => element("tr", {}, element("td", { textContent: name }), ...[was, most, least].map((time) => number(formatMs(time))));
  part("steps").replaceChildren(row("run", recorded.run, predicted.run),
    ...steps.slice(0, MAX_STEP_ROWS).map(([rank, step], i) => row(`rank ${rank}, step ${step}`, recorded.steps[i], predicted.steps[i])));
  const longest = Math.max(...recorded.path, ...predicted.path, 1);
  part("path").replaceChildren(...[...parts.keys()].filter((i) => recorded.path[i] || predicted.path[i])
    .sort((a, b) => recorded.path[b] - recorded.path[a])
    .map((i) => element("tr", {}, element("td", { textContent: parts[i] }),
      number(formatMs(recorded.path[i])), number(formatMs(predicted.path[i])),
      element("td", {}, drawBars([recorded.path[i] / longest, predicted.path[i] / longest])))));
}

// Two bars, recorded and predicted, as shares of the width.
function drawBars(shares) {
  const bars = document.getElementById("what-if-bars").content.firstElementChild.cloneNode(true);
  shares.forEach((share, i) => bars.children[i].setAttribute("width", `${100 * share}%`));
  return bars;
}
