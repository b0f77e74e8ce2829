// The heat map of ranks by step (fleet_map.py describes the data): paints it, and shows the ranks of a cell.

const NO_DATA = 255;
const LEVELS = 254;
const MAX_LABELS = 16; // of rows

class FleetMap {
  constructor(canvas, data, timeline, loaded) {
    Object.assign(this, { canvas, data, timeline, loaded });
    const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    this.cells = bytes(data.cells);
    this.slowest = new Uint32Array(bytes(data.slowest).buffer);
    this.panel = document.getElementById("fleet-cell");
    canvas.width = Math.max(data.columns.length * Math.floor(1024 / data.columns.length), data.columns.length);
    canvas.height = data.rows.length * Math.max(1, Math.floor(512 / data.rows.length));
    canvas.addEventListener("click", (event) => this.select(...this.cellAt(event)));
    canvas.addEventListener("pointermove", (event) => { canvas.title = this.nameCell(...this.cellAt(event)); });
    canvas.addEventListener("keydown", (event) => this.move(event));
    this.paint();
    this.labelAxes();
    const worst = this.cells.reduce((best, level, i) => (level !== NO_DATA && (this.cells[best] === NO_DATA || level > this.cells[best]) ? i : best), 0);
    this.select(Math.floor(worst / data.columns.length), worst % data.columns.length);
    canvas.dataset.ready = "true";
  }

  paint() {
    const { canvas, cells, data } = this;
    const style = getComputedStyle(canvas);
    const [idle, bad, ink] = ["--k-idle", "--bad", "--ink"].map((name) => style.getPropertyValue(name));
    const context = canvas.getContext("2d");
    const [width, height] = [canvas.width / data.columns.length, canvas.height / data.rows.length];
    context.globalAlpha = 1;
    context.clearRect(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < cells.length; i++) {
      if (cells[i] === NO_DATA) continue;
      const [x, y] = [(i % data.columns.length) * width, Math.floor(i / data.columns.length) * height];
      context.globalAlpha = 1;
      context.fillStyle = idle;
      context.fillRect(x, y, width, height);
      context.globalAlpha = cells[i] / LEVELS;
      context.fillStyle = bad;
      context.fillRect(x, y, width, height);
    }
    context.globalAlpha = 1;
    if (!this.cell) return;
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.strokeRect(this.cell[1] * width, this.cell[0] * height, width, height);
  }

  // Names of ranks at the rows, and of the first and last steps below the map.
  labelAxes() {
    const { rows, columns } = this.data;
    const stride = Math.ceil(rows.length / MAX_LABELS);
    document.getElementById("fleet-rows").replaceChildren(...rows.map(([rank], i) => element("span", { textContent: i % stride ? "" : `rank ${rank}` })));
    const ends = columns.length > 1 ? [columns[0][0], columns.at(-1)[1]] : [columns[0][0]];
    if (ends[0] !== null) document.getElementById("fleet-columns").replaceChildren(...ends.map((step) => element("span", { textContent: `step ${step}` })));
  }

  // The row and the column under the pointer.
  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { rows, columns } = this.data;
    const place = (at, size, count) => Math.min(count - 1, Math.max(0, Math.floor((at / size) * count)));
    return [place(event.clientY - box.top, box.height, rows.length), place(event.clientX - box.left, box.width, columns.length)];
  }

  // The ranks and steps of a cell, as text.
  nameCell(row, column) {
    const [[first, last], [from, to]] = [this.data.rows[row], this.data.columns[column]];
    const ranks = first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
    const steps = from === null ? "the whole run" : from === to ? `step ${from}` : `steps ${from} to ${to}`;
    return `${ranks}, ${steps}`;
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows, columns } = this.data;
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.select(clamp(this.cell[0] + step[0], rows.length), clamp(this.cell[1] + step[1], columns.length));
  }

  select(row, column) {
    this.cell = [row, column];
    const { data } = this;
    const at = row * data.columns.length + column;
    const [from] = data.columns[column];
    const reference = (data.references[row] ?? data.references[0])[column];
    const rank = this.slowest[at];
    const lines = [element("b", { textContent: this.nameCell(row, column) })];
    if (this.cells[at] === NO_DATA) {
      lines.push(element("p", { textContent: "no time to compare is known" }));
    } else {
      const excess = (this.cells[at] / LEVELS) * data.top;
      const slow = excess < 0.05 ? "takes no longer than" : `takes ${excess.toFixed(1)} % longer than`;
      lines.push(element("p", { textContent: `rank ${rank} ${slow} ${data.compared}, ${reference}` }), this.describe(rank, from));
    }
    this.panel.replaceChildren(...lines);
    this.paint();
  }

  // A button for the timeline of the rank, next to a typical one; or how to get it.
  describe(rank, step) {
    const { data } = this;
    if (!this.timeline || !this.isDrawn(rank)) {
      return element("p", { className: "soft", textContent: `The timeline of rank ${rank} is not in this file; etloom ui RUN shows it.` });
    }
    const host = data.hosts[rank];
    const peer = rank !== data.typical && this.isDrawn(data.typical) ? data.typical : undefined;
    const compared = peer === undefined ? "" : ` next to rank ${peer}${data.is_fleet ? ", which is typical" : ""}`;
    const button = element("button", { type: "button", textContent: `Timeline of rank ${rank}${host ? ` on ${host}` : ""}${compared}` });
    button.addEventListener("click", async () => {
      await this.timeline.addRanks([rank, peer ?? rank]);
      if (!await this.show(rank, step, peer)) await this.loaded.then(() => this.show(rank, step, peer));
      document.getElementById("timeline").scrollIntoView();
      this.timeline.canvas.focus({ preventScroll: true });
    });
    return button;
  }

  // Whether the timeline of a rank is in this page, or at its server.
  isDrawn(rank) {
    return FACTS.served || this.data.drawn.includes(rank);
  }

  // Returns false if the rank is not (yet) there.
  async show(rank, step, peer) {
    const drawn = this.timeline.ranks.find((other) => other.rank === rank);
    if (!drawn) return false;
    const [, start, length] = drawn.steps.find(([number]) => number === step) ?? [null, 0, drawn.end.at(-1) ?? 0];
    return showFinding(this.timeline, { rank, event: null, start, end: start + length, peer: peer ?? null, peer_event: null });
  }
}

function connectFleet(timeline, loaded) {
  const canvas = document.getElementById("fleet-map");
  if (!canvas) return null;
  const text = new TextDecoder().decode(Uint8Array.from(atob(document.getElementById("fleet-data").textContent), (letter) => letter.charCodeAt(0)));
  return new FleetMap(canvas, JSON.parse(text), timeline, loaded);
}
