// Draws the timeline. Only what is in sight is drawn, and what is smaller than a pixel is merged.

const ROW = 16;
const TRACK_GAP = 7;
const HEAD = 24;
const AXIS = 26;
const MINIMAP = 34;
const SHADES = 3;
const MIN_SPAN = 50; // ns
const REST = 150; // ms without a new picture
const FONT = "11px system-ui, sans-serif";

class Painter {
  readColors() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(`--${name}`).trim();
    this.palette = Object.fromEntries(
      ["ground", "panel", "line", "line-strong", "ink", "ink-soft", "accent", "faded", "bad"].map((name) => [name, value(name)]),
    );
    this.fills = COLORS.map((name) => shades(value(`k-${name}`)));
    this.inks = this.fills.map((fills) => fills.map(readable));
    this.context.font = FONT;
    const sample = "aten::native_layer_norm_backward step#0123456789 ABCDEF";
    characterWidth = this.context.measureText(sample).width / sample.length;
    this.overview = null;
    this.schedule();
  }

  schedule() {
    if (this.pending || !this.width) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      const began = performance.now();
      this.draw();
      this.frames.push(performance.now() - began);
      if (this.frames.length > 300) this.frames.shift();
      clearTimeout(this.resting);
      if (!this.dragging) this.resting = setTimeout(() => this.atRest.forEach((act) => act()), REST);
    });
  }

  draw() {
    const { context: c, width, visible: height, gutter, palette } = this;
    const ratio = this.canvas.width / width;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.font = FONT;
    c.textBaseline = "middle";
    c.fillStyle = palette.ground;
    c.fillRect(0, 0, width, height);
    clipped(c, gutter, MINIMAP + AXIS, width - gutter, height, () => {
      this.drawGrid(height);
      for (const item of this.visibleItems()) {
        if (item.pin) this.cover(item, palette.ground);
        if (item.track) this.drawTrack(item);
        else this.drawHead(item);
      }
      this.drawSteps();
      if (this.path) this.drawPathLinks();
      this.drawSelection();
      this.drawMeasure(height);
    });
    clipped(c, 0, MINIMAP + AXIS, gutter, height, () => this.drawGutter());
    this.drawAxis();
    this.drawMinimap();
  }

  // Those that stay in sight come last, as they are drawn over the others.
  visibleItems() {
    const items = this.items.filter((item) => {
      const at = this.at(item);
      return at + item.height >= MINIMAP + AXIS && at <= this.visible;
    });
    return [...items.filter(({ pin }) => !pin), ...items.filter(({ pin }) => pin)];
  }

  // Hides what has scrolled under an item.
  cover(item, color) {
    if (this.scroller.scrollTop <= item.pin.y) return;
    this.context.fillStyle = color;
    this.context.fillRect(0, this.at(item), this.width, item.height);
  }

  drawTrack(item) {
    const { rank, track, rows } = item;
    for (let row = 0; row < rows; row++) {
      const at = this.at(item) + row * ROW;
      if (at + ROW < MINIMAP + AXIS || at > this.visible) continue;
      this.drawRow(rank, track.rows[row], track.rows[row + 1], at, ROW - 1, true);
    }
  }

  // Slices under a pixel are merged: one mark for all that end before the next pixel, found by binary search.
  drawRow(rank, from, to, y, height, labels) {
    const { context: c, scale, gutter, width, fills, inks } = this;
    const [t0, t1] = this.view;
    const { start, dur, end, color, name, match } = rank;
    const { path, palette } = this;
    const perPixel = 1 / scale;
    let last = null;
    for (let i = firstAbove(end, t0 - perPixel, from, to); i < to && start[i] <= t1; ) {
      const left = Math.max(gutter + (start[i] - t0) * scale, gutter - 2);
      const right = Math.min(gutter + (start[i] + (dur[i] || 0) - t0) * scale, width + 2);
      const shade = (rank.shade ?? name)[i] % SHADES;
      let fill = fills[color[i]][shade];
      if (right - left < 1) {
        const x = Math.floor(left);
        const next = Math.max(i + 1, firstAbove(end, t0 + (x + 1 - gutter) * perPixel, i + 1, to));
        if (match && !match.subarray(i, next).includes(1)) fill = palette.faded;
        if (path) fill = isOnPath(rank, i, next) ? palette.bad : palette.faded;
        if (fill !== last) c.fillStyle = last = fill;
        c.fillRect(x, y, 1, height);
        i = next;
        continue;
      }
      const off = path || (match && !match[i]);
      if (off) fill = palette.faded;
      if (fill !== last) c.fillStyle = last = fill;
      const wide = right - left;
      c.fillRect(left, y, wide > 3 ? wide - 0.7 : wide, height);
      const label = labels && wide > 28 ? shorten(rank.strings[name[i] - 1] || "", wide - 6) : "";
      if (label) {
        c.fillStyle = off ? palette["ink-soft"] : inks[color[i]][shade];
        last = null;
        c.fillText(label, left + 3, y + height / 2 + 0.5);
      }
      if (path && isOnPath(rank, i)) {
        last = null;
        this.drawPieces(rank, i, left, y, height, fills[color[i]][shade], inks[color[i]][shade], label);
      }
      i++;
    }
  }

  // The pieces of an event that are on the critical path: they keep its color, and are underlined.
  drawPieces(rank, index, left, y, height, fill, ink, label) {
    const { context: c } = this;
    const spans = [...visibleSpans(this, rank.path_start, rank.pathEnd, rank.firstPiece[index], rank.firstPiece[index + 1])];
    const line = Math.min(3, height);
    c.fillStyle = fill;
    for (const [from, to] of spans) c.fillRect(from, y, to - from, height);
    if (label) {
      c.save();
      c.beginPath();
      for (const [from, to] of spans) c.rect(from, y, to - from, height);
      c.clip();
      c.fillStyle = ink;
      c.fillText(label, left + 3, y + height / 2 + 0.5);
      c.restore();
    }
    c.fillStyle = this.palette.bad;
    for (const [from, to] of spans) c.fillRect(from, y + height - line, to - from, line);
  }

  // Where the path goes from one track to another.
  drawPathLinks() {
    const { context: c, palette } = this;
    c.strokeStyle = palette.bad;
    c.beginPath();
    this.pathLinks ??= listPathLinks(this.ranks);
    for (const [from, to] of this.pathLinks) {
      if (to.start < this.view[0] || from.end > this.view[1]) continue;
      const [a, b] = [this.place(from.rank, from.index), this.place(to.rank, to.index)];
      if (!a || !b || a.y === b.y) continue;
      c.moveTo(this.x(from.end), a.y + ROW / 2);
      c.lineTo(this.x(to.start), b.y + ROW / 2);
    }
    c.stroke();
  }

  drawHead(item) {
    const { context: c, palette, gutter, width } = this;
    const { rank, height } = item;
    const at = this.at(item);
    c.fillStyle = palette.panel;
    c.fillRect(gutter, at, width - gutter, height - 2);
    rank.steps.forEach(([number, start, dur], i) => {
      const left = Math.max(this.x(start), gutter);
      const right = Math.min(this.x(start + dur), width);
      if (right <= left) return;
      c.fillStyle = i % 2 ? palette.line : palette["line-strong"];
      c.fillRect(left, at + 3, Math.max(1, right - left - 1), height - 8);
      c.fillStyle = palette.ink;
      if (right - left > 40) c.fillText(shorten(`step ${number}  ${formatTime(dur)}`, right - left - 8), left + 5, at + height / 2 - 1);
    });
    if (!this.path) return;
    c.fillStyle = palette.bad;
    const { start, end } = rank.pathSpans;
    for (const [from, to] of visibleSpans(this, start, end, 0, start.length)) c.fillRect(from, at + height - 5, to - from, 3);
  }

  drawSteps() {
    const { context: c, palette } = this;
    c.strokeStyle = palette["ink-soft"];
    c.setLineDash([2, 3]);
    c.beginPath();
    this.ranks.forEach((rank, r) => {
      const y = this.top + this.items.find((item) => item.rank === rank).y;
      const below = this.items.find((item) => item.rank === this.ranks[r + 1]);
      const bottom = this.top + (below ? below.y : this.height);
      for (const [, start, dur] of rank.steps) {
        for (const time of [start, start + dur]) {
          if (time < this.view[0] || time > this.view[1]) continue;
          const x = Math.round(this.x(time)) + 0.5;
          c.moveTo(x, y);
          c.lineTo(x, bottom);
        }
      }
    });
    c.stroke();
    c.setLineDash([]);
  }

  drawSelection() {
    const { context: c, palette, selected, hovered } = this;
    for (const [chosen, size] of [[hovered, 1], [selected, 2]]) {
      const box = chosen && this.box(chosen.rank, chosen.index);
      if (!box) continue;
      c.strokeStyle = palette.ink;
      c.lineWidth = size;
      c.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, ROW);
    }
    c.lineWidth = 1;
    if (!selected) return;
    const { rank, index } = selected;
    if (rank.launch[index]) this.drawArrow(rank, rank.launch[index] - 1, index);
    for (const effect of (rank.caused.get(index) || []).slice(0, 64)) this.drawArrow(rank, index, effect);
  }

  box(rank, index) {
    const place = this.find(rank, index);
    if (!place) return null;
    const x = this.x(rank.start[index]);
    const width = Math.max(1, (rank.dur[index] || 0) * this.scale);
    return { x, y: this.place(rank, index).y, width };
  }

  // The y of an event's row; of a folded rank, that of its head.
  place(rank, index) {
    const place = this.find(rank, index);
    if (place) return { y: this.at(place.item) + Math.min(place.row, place.item.rows - 1) * ROW };
    const head = this.items.find((item) => item.rank === rank);
    return head && { y: this.at(head) };
  }

  drawArrow(rank, cause, effect) {
    const [from, to] = [this.box(rank, cause), this.box(rank, effect)];
    if (!from || !to) return;
    const { context: c } = this;
    const clamp = (x) => Math.min(Math.max(x, -1e5), 1e5);
    const [x0, x1] = [clamp(from.x + Math.min(from.width, 4)), clamp(to.x)];
    const [y0, y1] = [from.y + ROW - 1, to.y + ROW / 2];
    const bend = Math.min(80, Math.abs(x1 - x0) / 2 + 12);
    c.strokeStyle = c.fillStyle = this.palette.accent;
    c.lineWidth = 1.5;
    c.beginPath();
    c.moveTo(x0, y0);
    c.bezierCurveTo(x0, y0 + bend, x1 - bend, y1, x1 - 5, y1);
    c.stroke();
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x1 - 7, y1 - 3.5);
    c.lineTo(x1 - 7, y1 + 3.5);
    c.fill();
    c.lineWidth = 1;
  }

  drawMeasure(height) {
    if (!this.measured) return;
    const { context: c } = this;
    const [a, b] = this.measured;
    const [left, right] = [this.x(a), this.x(b)];
    c.globalAlpha = a === b ? 1 : 0.15;
    c.fillStyle = this.palette.accent;
    c.fillRect(left, MINIMAP + AXIS, a === b ? 2 : right - left, height);
    c.globalAlpha = 1;
    if (a !== b) this.chip(formatTime(b - a), (left + right) / 2, MINIMAP + AXIS + 14);
  }

  chip(text, x, y) {
    const { context: c } = this;
    const width = c.measureText(text).width + 12;
    c.fillStyle = this.palette.accent;
    c.fillRect(x - width / 2, y - 9, width, 18);
    c.fillStyle = this.palette.ground;
    c.fillText(text, x - width / 2 + 6, y + 0.5);
  }

  ticks() {
    const step = niceStep((this.view[1] - this.view[0]) / Math.max(2, (this.width - this.gutter) / 110));
    const out = [];
    for (let t = Math.ceil(this.view[0] / step) * step; t <= this.view[1]; t += step) out.push(Math.round(t));
    return [out, step];
  }

  drawGrid(height) {
    const { context: c } = this;
    c.strokeStyle = this.palette.line;
    c.beginPath();
    for (const tick of this.ticks()[0]) {
      const x = Math.round(this.x(tick)) + 0.5;
      c.moveTo(x, MINIMAP + AXIS);
      c.lineTo(x, height);
    }
    c.stroke();
  }

  drawAxis() {
    const { context: c, palette, width, gutter } = this;
    c.fillStyle = palette.panel;
    c.fillRect(0, MINIMAP, width, AXIS);
    c.fillStyle = palette["ink-soft"];
    const [ticks, step] = this.ticks();
    for (const tick of ticks) {
      const x = this.x(tick);
      c.fillRect(Math.round(x), MINIMAP + AXIS - 6, 1, 6);
      if (x < width - 50) c.fillText(formatTick(tick, step), x + 4, MINIMAP + AXIS / 2);
    }
    c.fillStyle = palette.panel;
    c.fillRect(0, MINIMAP, gutter, AXIS);
    c.fillStyle = palette.ink;
    c.fillText(shorten(`${formatTime(this.view[1] - this.view[0])} in view`, gutter - 16), 10, MINIMAP + AXIS / 2);
    c.fillStyle = palette["line-strong"];
    c.fillRect(0, MINIMAP + AXIS - 1, width, 1);
  }

  drawGutter() {
    const { context: c, palette, gutter, visible } = this;
    c.fillStyle = palette.panel;
    c.fillRect(0, MINIMAP + AXIS, gutter, visible);
    for (const item of this.visibleItems()) {
      const { rank, track, height } = item;
      const at = this.at(item);
      if (item.pin) this.cover(item, palette.panel);
      c.fillStyle = track ? palette["ink-soft"] : palette.ink;
      c.font = track ? FONT : `600 ${FONT}`;
      const mark = (track || rank).open ? "▾" : "▸";
      const foldable = !track || track.rows.length > 2;
      if (foldable) c.fillText(mark, track ? 12 : 6, at + (track ? ROW : HEAD) / 2);
      const name = track ? track.label : `rank ${rank.title ?? rank.rank}`;
      c.fillText(name, track ? 24 : 18, at + (track ? ROW : HEAD) / 2);
      c.fillStyle = palette.line;
      c.fillRect(0, at + height - 2, gutter, 1);
    }
    c.font = FONT;
    c.fillStyle = palette["line-strong"];
    c.fillRect(gutter - 1, MINIMAP + AXIS, 1, visible);
  }

  // All tracks at a small scale, the deeper rows over the others.
  paintOverview() {
    const { context, view, width } = this;
    const canvas = document.createElement("canvas");
    const ratio = this.canvas.width / width;
    canvas.width = this.canvas.width;
    canvas.height = Math.round(MINIMAP * ratio);
    this.context = canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    this.view = this.home;
    const tracks = this.ranks.flatMap((rank) => (rank.whole ?? rank).tracks.map((track) => [rank.whole ?? rank, track]));
    const each = (MINIMAP - 6) / Math.max(1, tracks.length);
    const weight = ({ rows, pathTime }) => (this.path ? pathTime : rows[rows.length - 1] - rows[0]);
    // Of tracks that fall on one line of pixels, one stands for all.
    const best = new Map();
    tracks.forEach(([, track], i) => {
      const line = Math.floor(i * each);
      if (!best.has(line) || weight(track) > weight(tracks[best.get(line)][1])) best.set(line, i);
    });
    tracks.forEach(([rank, { rows }], i) => {
      if (best.get(Math.floor(i * each)) !== i && each < 1) return;
      for (let row = 0; row + 1 < rows.length; row++) {
        this.drawRow(rank, rows[row], rows[row + 1], 3 + i * each, Math.max(1, each - (each > 3 ? 1 : 0)), false);
      }
    });
    Object.assign(this, { context, view });
    return canvas;
  }

  // The frame on the overview is the view.
  drawMinimap() {
    const { context: c, palette, width, gutter } = this;
    this.overview ??= this.paintOverview();
    c.drawImage(this.overview, 0, 0, width, MINIMAP);
    const [low, high] = this.home;
    const at = (time) => gutter + ((time - low) / (high - low)) * (width - gutter);
    const [left, right] = [Math.max(gutter, at(this.view[0])), Math.min(width, at(this.view[1]))];
    c.globalAlpha = 0.55;
    c.fillStyle = palette.panel;
    c.fillRect(gutter, 0, left - gutter, MINIMAP);
    c.fillRect(right, 0, width - right, MINIMAP);
    c.globalAlpha = 1;
    c.strokeStyle = palette.accent;
    c.strokeRect(left + 0.5, 0.5, Math.max(3, right - left - 1), MINIMAP - 1);
    c.fillStyle = palette.panel;
    c.fillRect(0, 0, gutter, MINIMAP);
    c.fillStyle = palette["ink-soft"];
    c.fillText("overview", 10, MINIMAP / 2);
  }
}

function clipped(context, x, y, width, height, paint) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  paint();
  context.restore();
}

// By the mean width of a character: measuring every label is not cheap.
let characterWidth = 6;

const roomFor = (width) => Math.floor(width / characterWidth);

function shorten(text, width) {
  const room = roomFor(width);
  return text.length <= room ? text : room < 3 ? text.slice(0, Math.max(0, room)) : `${text.slice(0, room - 1)}…`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
}

function shades(hex) {
  const channels = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return [1, 0.92, 1.09].slice(0, SHADES).map((factor) => `rgb(${channels.map((c) => Math.min(255, Math.round(c * factor))).join(",")})`);
}

function readable(rgb) {
  const [r, g, b] = rgb.match(/\d+/g).map((c) => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#0b0f14" : "#ffffff";
}
