// The memory of caching allocators over time (memory_section.py describes the data): paints it, and lists what holds it
// at the selected moment.

const MEMORY_HEIGHT = 300;
const MARGIN = { left: 64, right: 12, top: 20, bottom: 22 };

class MemoryChart {
  constructor(canvas, devices, timeline) {
    Object.assign(this, { canvas, devices, timeline });
    this.context = canvas.getContext("2d");
    this.show = document.getElementById("memory-show");
    this.axis = document.getElementById("memory-axis");
    canvas.addEventListener("click", (event) => this.selectAt(event.offsetX));
    canvas.addEventListener("keydown", (event) => this.move(event));
    document.getElementById("memory-device").addEventListener("change", (event) => this.open(Number(event.target.value)));
    document.getElementById("memory-peak").addEventListener("click", () => this.select(this.peak));
    this.axis.addEventListener("click", () => this.setAxis(!this.byRequest));
    this.show.addEventListener("click", () => this.showOnTimeline());
    if (timeline) timeline.onview = () => this.byRequest || this.paint();
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    this.open(0);
    canvas.dataset.ready = "true";
  }

  open(number) {
    const data = (this.data = this.devices[number]);
    this.peak = data.peak;
    this.tops = data.allocated.map(() => 0);
    this.layers = data.parts.map((part) => {
      const below = this.tops;
      this.tops = below.map((size, i) => size + part[i]);
      return [below, this.tops];
    });
    const key = document.getElementById("memory-key").content.firstElementChild;
    document.getElementById("memory-legend").replaceChildren(...data.groups.map((name, i) => {
      const box = key.cloneNode(true);
      box.firstElementChild.setAttribute("class", data.colors[i]);
      return element("li", {}, box, name);
    }));
    document.getElementById("memory-note").textContent =
      `Area: memory in use, ${data.holders.some(([kind]) => kind) ? "by kind" : "by its largest holders"}. Line: reserved. Dashed: requested.`
      + (data.exact ? "" : ` ${formatCount(data.operations.length)} moments of ${formatCount(data.operations.at(-1) + 1)} requests and frees, with the highest and the lowest of each part.`);
    this.setAxis(!data.times);
    this.select(this.peak);
  }

  setAxis(byRequest) {
    this.byRequest = byRequest || !this.data.times;
    this.axis.disabled = !this.data.times;
    this.axis.setAttribute("aria-pressed", String(this.byRequest));
    this.places = this.byRequest ? this.data.operations : this.data.times;
    this.paint();
  }

  get span() { return Math.max(this.places.at(-1) - this.places[0], 1); }
  x(place) { return MARGIN.left + ((place - this.places[0]) / this.span) * (this.width - MARGIN.left - MARGIN.right); }
  y(size) { return MEMORY_HEIGHT - MARGIN.bottom - (size / this.scaleTop) * (MEMORY_HEIGHT - MARGIN.top - MARGIN.bottom); }

  paint() {
    const { canvas, context: c, data } = this;
    const width = (this.width = canvas.parentElement.clientWidth);
    if (!width || !this.places) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(MEMORY_HEIGHT * ratio);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    this.color = (name) => style.getPropertyValue(`--${name}`).trim();
    this.scaleTop = Math.max(data.reserved[this.peak], ...data.requested, 1) * 1.02;
    c.font = FONT;
    this.paintGrid();
    this.layers.forEach(([below, above], i) => {
      c.fillStyle = this.color(`k-${data.colors[i]}`);
      c.beginPath();
      this.trace(above);
      this.trace(below, true);
      c.fill();
    });
    this.paintLine(data.requested, "ink-soft", [3, 3], 1);
    this.paintLine(data.reserved, "ink", [], 1.5);
    this.paintMarks();
  }

  // A value holds until the next moment.
  trace(values, backwards = false) {
    const { context: c, places } = this;
    const points = values.flatMap((value, i) => [[this.x(places[i]), this.y(value)], [this.x(places[Math.min(i + 1, places.length - 1)]), this.y(value)]]);
    for (const [x, y] of backwards ? points.reverse() : points) c.lineTo(x, y);
  }

  paintLine(values, color, dash, width) {
    const { context: c } = this;
    c.strokeStyle = this.color(color);
    c.lineWidth = width;
    c.setLineDash(dash);
    c.beginPath();
    this.trace(values);
    c.stroke();
    c.setLineDash([]);
  }

  paintGrid() {
    const { context: c, width, places } = this;
    c.fillStyle = this.color("panel");
    c.fillRect(MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, MEMORY_HEIGHT - MARGIN.top - MARGIN.bottom);
    c.lineWidth = 1;
    c.strokeStyle = this.color("line");
    const line = (x0, y0, x1, y1) => { c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke(); };
    c.textBaseline = "middle";
    c.textAlign = "right";
    const step = niceStep(this.scaleTop / 5);
    for (let size = 0; size <= this.scaleTop; size += step) {
      c.fillStyle = this.color("ink-soft");
      line(MARGIN.left, this.y(size), width - MARGIN.right, this.y(size));
      c.fillText(size ? formatSize(size).replace(/\.?0+ /, " ") : "0", MARGIN.left - 6, this.y(size));
    }
    c.textAlign = "center";
    const wide = niceStep(this.span / Math.max(2, Math.floor(width / 140)));
    for (let at = Math.ceil(places[0] / wide) * wide; at <= places.at(-1); at += wide) {
      line(this.x(at), MARGIN.top, this.x(at), MEMORY_HEIGHT - MARGIN.bottom);
      const text = this.byRequest ? formatCount(at) : formatTick(at, wide);
      c.fillText(text, Math.min(this.x(at), width - MARGIN.right - c.measureText(text).width / 2), MEMORY_HEIGHT - MARGIN.bottom / 2);
    }
  }

  // The part that the timeline shows, the peak, and the selected moment.
  paintMarks() {
    const { context: c, data, places, width } = this;
    const right = width - MARGIN.right;
    const bottom = MEMORY_HEIGHT - MARGIN.bottom;
    if (this.isLinked && !this.byRequest) {
      const [from, to] = this.timeline.view.map((time) => Math.min(Math.max(this.x(time), MARGIN.left), right));
      c.globalAlpha = 0.6;
      c.fillStyle = this.color("ground");
      c.fillRect(MARGIN.left, MARGIN.top, from - MARGIN.left, bottom - MARGIN.top);
      c.fillRect(to, MARGIN.top, right - to, bottom - MARGIN.top);
      c.globalAlpha = 1;
    }
    const [x, y] = [this.x(places[this.peak]), this.y(data.reserved[this.peak])];
    c.fillStyle = this.color("bad");
    c.beginPath();
    c.arc(x, y, 3.5, 0, 7);
    c.fill();
    const text = `peak ${formatSize(data.reserved[this.peak])}`;
    const half = c.measureText(text).width / 2;
    c.textAlign = "center";
    c.fillText(text, Math.min(Math.max(x, MARGIN.left + half), right - half), MARGIN.top / 2);
    c.strokeStyle = this.color("accent");
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(this.x(places[this.moment]), MARGIN.top);
    c.lineTo(this.x(places[this.moment]), bottom);
    c.stroke();
  }

  selectAt(x) {
    const distance = (i) => Math.abs(this.x(this.places[i]) - x);
    this.select(this.places.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0));
  }

  // The last moment until a time of the timeline.
  selectTime(rank, time) {
    const { data } = this;
    if (!this.isLinked || rank !== data.rank || time < data.times[0]) return;
    this.select(Math.max(0, data.times.findLastIndex((at) => at <= time)));
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(Math.min(this.places.length - 1, Math.max(0, this.moment + step)));
  }

  get isLinked() { return Boolean(this.data.linked && this.data.times && this.timeline); }

  showOnTimeline() {
    const { timeline, data } = this;
    const time = data.times[this.moment];
    const half = (timeline.view[1] - timeline.view[0]) / 2;
    timeline.setView(time - half, time + half);
    timeline.measure(time, time);
    const rank = timeline.ranks.find((other) => other.rank === data.rank);
    if (rank) timeline.scrollTo(rank);
    document.getElementById("timeline").scrollIntoView();
    timeline.canvas.focus({ preventScroll: true });
  }

  select(moment) {
    const { data } = this;
    this.moment = moment;
    const [reserved, allocated, releasable] = [data.reserved[moment], data.allocated[moment], data.releasable[moment]];
    const place = data.times ? `at ${formatTime(data.times[moment])}, after` : "after";
    const peak = moment === this.peak ? ", the peak" : "";
    const title = element("h3", { textContent: `Memory ${place} ${formatCount(data.operations[moment] + 1)} requests and frees${peak}` });
    const sizes = element("p", { className: "soft", textContent:
      `${formatSize(reserved)} reserved, ${formatSize(allocated)} in use (${formatSize(data.requested[moment])} requested), `
      + `${formatSize(reserved - allocated)} free: ${formatSize(releasable)} could be released, ${formatSize(reserved - allocated - releasable)} are kept by live blocks.` });
    this.panel ??= document.getElementById("memory-moment");
    this.panel.replaceChildren(title, sizes, this.tabulate(moment));
    this.show.hidden = !this.isLinked;
    this.paint();
  }

  tabulate(moment) {
    const { data } = this;
    const total = Math.max(data.allocated[moment], 1);
    const named = ["kind", "line", "operator"].map((name, i) => [name, i]).filter(([, i]) => data.holders.some((holder) => holder[i]));
    const cell = (text, number) => element("td", { textContent: text, className: number ? "number" : "" });
    const row = (size, blocks, names) => element("tr", {}, cell(formatSize(size), true), cell(`${((100 * size) / total).toFixed(1)} %`, true), cell(formatCount(blocks), true), ...names.map((text) => cell(text, false)));
    const held = data.held[moment];
    const rows = held.map(([holder, size, blocks]) => row(size, blocks, named.map(([, i]) => (data.holders[holder][i] ?? "").replace(/^at::_ops::/, ""))));
    const more = data.count[moment] - held.length;
    if (more > 0) {
      const [size, blocks] = held.reduce(([a, b], [, x, y]) => [a - x, b - y], [data.allocated[moment], data.blocks[moment]]);
      rows.push(row(size, blocks, named.map(([name]) => (name === "line" ? `${formatCount(more)} others` : ""))));
    }
    const heads = ["bytes", "share", "blocks"].map((name) => element("th", { scope: "col", className: "number", textContent: name }));
    const head = element("tr", {}, ...heads, ...named.map(([name]) => element("th", { scope: "col", textContent: name })));
    const table = element("table", { className: "plain" }, element("thead", {}, head), element("tbody", {}, ...rows));
    return element("div", { className: "wrap" }, table);
  }
}

async function connectMemory(timeline) {
  const canvas = document.getElementById("memory-canvas");
  if (!canvas) return null;
  const bytes = await inflate(document.getElementById("memory-data").textContent);
  return new MemoryChart(canvas, JSON.parse(new TextDecoder().decode(bytes)), timeline);
}
