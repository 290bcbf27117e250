// The page of all runs: one row per run, group, sweep and pack, updated by server-sent events.

let show = null;

follow("/events", (runs) => {
  const training = runs.filter((run) => run.state === "training").length;
  showState(training ? `${training} training` : "", "training");
  if (!runs.length) {
    show = null;
    byId("table").replaceChildren(element("p", "No runs yet; start one with `unidle train`.", "hint"));
    return;
  }
  show ??= tableOfRuns(byId("table"));
  show(runs);
});
