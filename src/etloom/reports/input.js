// Input on the timeline: wheel, mouse, touch and keyboard.

function listen(timeline) {
  const { canvas, scroller } = timeline;
  new ResizeObserver(() => timeline.resize()).observe(scroller);
  scroller.addEventListener("scroll", () => timeline.schedule());
  listenToWheel(timeline);
  listenToPointers(timeline);
  canvas.addEventListener("dblclick", (event) => event.offsetX > timeline.gutter && timeline.fit());
  canvas.addEventListener("pointerleave", () => {
    timeline.tip.hidden = true;
    timeline.hovered = null;
    timeline.schedule();
  });
  window.addEventListener("keydown", (event) => {
    const isLetter = /^[a-z]$/i.test(event.key); // without a focused control, other keys scroll the page
    if (event.target !== canvas && !(event.target === document.body && isLetter)) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = keys(timeline);
    const key = event.key === "Enter" && event.shiftKey ? "N" : event.key;
    const action = actions[key] ?? actions[isLetter ? key.toLowerCase() : key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

function listenToWheel(timeline) {
  const { canvas } = timeline;
  let lastPageScroll = -Infinity;
  // A page scroll that happens to reach the timeline goes on; a new turn of the wheel zooms.
  window.addEventListener("wheel", (event) => {
    if (event.target !== canvas) lastPageScroll = event.timeStamp;
  }, { passive: true });
  canvas.addEventListener("wheel", (event) => {
    if (event.timeStamp - lastPageScroll < 200) {
      lastPageScroll = event.timeStamp;
      return;
    }
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 20 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      timeline.pan(((event.deltaX || event.deltaY) * unit) / (timeline.width - timeline.gutter));
    } else {
      const turn = Math.max(-120, Math.min(120, event.deltaY * unit));
      timeline.zoom(Math.exp(turn * 0.0025), timeline.time(Math.max(event.offsetX, timeline.gutter)));
    }
    timeline.hover(event);
  }, { passive: false });
}

// Drag moves, two fingers pinch, shift and drag measures, a drag on the overview moves the view, a click selects.
function listenToPointers(timeline) {
  const { canvas, scroller } = timeline;
  const pointers = new Map();
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    timeline.dragging = true;
    canvas.setPointerCapture(event.pointerId);
    drag = {
      x: event.offsetX, y: event.offsetY, view: [...timeline.view], scroll: scroller.scrollTop, moved: false,
      overview: event.offsetY < MINIMAP && event.offsetX > timeline.gutter,
      measure: event.shiftKey ? timeline.time(event.offsetX) : null,
      pinch: pointers.size === 2 ? spread(pointers) : null,
    };
    if (drag.overview) timeline.center(event.offsetX);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return timeline.hover(event);
    pointers.set(event.pointerId, event);
    if (Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    timeline.tip.hidden = true;
    if (drag.overview) timeline.center(event.offsetX);
    else if (drag.measure !== null) timeline.measure(drag.measure, timeline.time(event.offsetX));
    else if (drag.pinch && pointers.size === 2) {
      timeline.view = [...drag.view];
      timeline.zoom(drag.pinch.distance / Math.max(1, spread(pointers).distance), timeline.time(drag.pinch.middle));
    } else {
      const shift = (drag.x - event.offsetX) / timeline.scale;
      timeline.setView(drag.view[0] + shift, drag.view[1] + shift);
      if (event.pointerType === "mouse") scroller.scrollTop = drag.scroll + drag.y - event.offsetY;
    }
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    timeline.dragging = pointers.size > 0;
    timeline.schedule();
    if (event.type === "pointerup" && drag && !drag.moved && !drag.overview) {
      timeline.measure(null);
      timeline.click(event.offsetX, event.offsetY);
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
}

function spread(pointers) {
  const [a, b] = [...pointers.values()];
  return { distance: Math.abs(a.offsetX - b.offsetX), middle: (a.offsetX + b.offsetX) / 2 };
}

function keys(timeline) {
  const scroll = (rows) => () => { timeline.scroller.scrollTop += rows * ROW; };
  const zoom = (factor) => () => timeline.zoom(factor);
  const pan = (share) => () => timeline.pan(share);
  const fit = () => timeline.fit();
  const { selected } = timeline;
  return {
    w: zoom(0.7), "+": zoom(0.7), "=": zoom(0.7), s: zoom(1 / 0.7), "-": zoom(1 / 0.7),
    a: pan(-0.15), ArrowLeft: pan(-0.15), d: pan(0.15), ArrowRight: pan(0.15),
    ArrowUp: scroll(-3), ArrowDown: scroll(3), PageUp: scroll(-15), PageDown: scroll(15),
    0: fit, Home: fit, f: () => timeline.fitSelection(), m: () => timeline.measureSelected(),
    z: () => selected && timeline.zoomTo(selected.rank, selected.index),
    n: () => timeline.next(1), Enter: () => timeline.next(1), N: () => timeline.next(-1), p: () => timeline.next(-1),
    ".": () => timeline.selectNeighbor(1), ",": () => timeline.selectNeighbor(-1),
    t: () => selected && timeline.fold(trackOf(selected.rank, selected.index)),
    r: () => selected && timeline.fold(selected.rank),
    Escape: () => { timeline.measure(null); timeline.select(null); },
  };
}
