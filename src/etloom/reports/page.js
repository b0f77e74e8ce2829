// The page of a run: its start.

async function start() {
  tables();
  const root = document.getElementById("tracks");
  const timeline = root && new (FACTS.served ? ServedTimeline : Timeline)(root);
  let [fleet, memory] = [null, null];
  themes(() => { timeline?.readColors(); fleet?.paint(); memory?.paint(); });
  let finish;
  const loaded = new Promise((done) => { finish = done; });
  fleet = connectFleet(timeline, loaded);
  memory = await connectMemory(timeline);
  if (!timeline) return connectWhatIf();
  timeline.onselect = (rank, index) => {
    showDetails(timeline, rank, index);
    if (rank) memory?.selectTime(rank.rank, rank.start[index]);
  };
  timeline.onload = finish;
  window.etloom = { timeline, memory, findPiece, fitNames, showFinding, sumPath }; // for the console and tests
  connectTimeline(timeline, loaded);
  const status = document.getElementById("status");
  const packed = [...document.querySelectorAll("script[data-rank]")];
  for (const [i, script] of packed.entries()) {
    status.textContent = `unpacking ${i + 1} of ${packed.length} ranks`;
    timeline.add(await unpack(script.textContent), i < FACTS.open_ranks);
    script.remove();
    if (i + 1 < Math.min(FACTS.open_ranks, packed.length)) continue;
    // From here on the page can be used; the other ranks follow, folded.
    root.dataset.ready = "true";
    timeline.loading = i + 1 < packed.length;
    await new Promise((go) => setTimeout(go));
  }
  if (FACTS.served) await openServed(timeline, root);
  const events = timeline.ranks.reduce((sum, rank) => sum + (rank.total ?? rank.events), 0);
  timeline.layout();
  status.textContent = `${formatCount(events)} events`;
  const path = document.querySelector('button[data-act="path"]');
  path.disabled = !timeline.ranks.some((rank) => rank.path_event.length > rank.firstPiece[0]);
  if (path.disabled) path.title = "no event here is on a critical path";
  window.etloom.whatIf = await connectWhatIf();
  root.dataset.whole = "true";
  timeline.onload();
  connectLink(timeline);
}

start().catch(showFailure);
