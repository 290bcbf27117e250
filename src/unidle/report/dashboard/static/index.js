// The page of all runs: one row per run, updated by server-sent events.

function runLink(run) {
  const link = element("a", run.name);
  link.href = "/run/" + encodeURIComponent(run.name);
  return link;
}

function progress(run) {
  const cell = document.createDocumentFragment();
  cell.append(run.step, element("span", ` / ${run.total}`, "of"));
  if (run.progress !== null) {
    const bar = document.createElement("progress");
    bar.value = run.progress;
    bar.title = `${Math.round(100 * run.progress)} %`;
    cell.append(bar);
  }
  return cell;
}

follow("/events", (runs) => {
  const training = runs.filter((run) => run.state === "training").length;
  showState(training ? `${training} training` : "", "training");
  byId("none").hidden = runs.length > 0;
  byId("rows").replaceChildren(...runs.map((run) => row([
    runLink(run), run.env, run.preset, element("span", run.state, `state ${run.state}`), progress(run), run.rate,
    run.return, run.busy,
  ])));
});
