// The call tree of the selected time as boxes: calls below their callers, or inverted, as wide as their time.

const startTree = () => ({ name: "all calls", color: COLORS.indexOf("other"), count: 0, sum: 0, calls: new Map() });

// Counts calls of a name below a caller; `sum` includes the calls below.
function addCall(caller, name, color, count, time) {
  if (!caller.calls.has(name)) caller.calls.set(name, { ...startTree(), name, color, caller });
  for (const call of caller.caller ? [caller.calls.get(name)] : [caller, caller.calls.get(name)]) {
    call.count += count;
    call.sum += time;
  }
  return caller.calls.get(name);
}

// The calls of unfolded threads in a time range. What outlasts its caller counts up to the caller's end.
function buildCalls(timeline, [from, to]) {
  const stacks = new Map(); // rank and thread -> its events
  visitRange(timeline, [from, to], ({ rank, track: { stack } }, index) => {
    if (stack === null) return;
    const key = `${rank.rank}.${stack}`;
    if (!stacks.has(key)) stacks.set(key, { rank, events: [] });
    stacks.get(key).events.push(index);
  });
  const root = startTree();
  for (const { rank: { start, dur, color }, rank, events } of stacks.values()) {
    const open = [{ call: root, end: to }];
    for (const i of events.sort((a, b) => start[a] - start[b] || dur[b] - dur[a] || a - b)) {
      while (open.length > 1 && open[0].end <= start[i]) open.shift();
      const end = Math.min(start[i] + (dur[i] || 0), open[0].end);
      const call = addCall(open[0].call, nameOf(rank, i), color[i], 1, end - Math.max(start[i], from));
      open.unshift({ call, end });
    }
  }
  return root;
}

// Each name with its time outside the calls below it; its callers are below it.
function invertCalls(root) {
  const inverted = startTree();
  const visit = (call) => {
    const { count } = call;
    let time = call.sum;
    for (const inner of call.calls.values()) {
      time -= inner.sum;
      visit(inner);
    }
    for (let at = inverted; call.caller; call = call.caller) at = addCall(at, call.name, call.color, count, time);
  };
  visit(root);
  return inverted;
}

// Draws a call over the whole width; a click draws another one, on the widest its caller.
function drawCalls(timeline, area, root, span) {
  const boxes = [];
  const place = (call, depth, left) => {
    const width = (100 * call.sum) / root.sum;
    if (!(width > 0.15)) return;
    const title = `${call.name}\n${formatCount(call.count)} calls, ${formatExact(call.sum)} µs, ${formatShare(call.sum / span)} of the time`;
    const box = element("button", { type: "button", textContent: width > 2 ? call.name : "", title });
    Object.assign(box.style, { left: `${left}%`, width: `${width}%`, top: `${18 * depth}px`,
      background: timeline.fills[call.color][0], color: timeline.inks[call.color][0] });
    box.addEventListener("click", () => drawCalls(timeline, area, call === root ? call.caller ?? call : call, span));
    boxes.push(box);
    for (const inner of [...call.calls.values()].sort((a, b) => b.sum - a.sum)) {
      place(inner, depth + 1, left);
      left += (100 * inner.sum) / root.sum;
    }
  };
  place(root, 0, 0);
  area.replaceChildren(...(boxes.length ? boxes : ["no calls of unfolded threads"]));
}
