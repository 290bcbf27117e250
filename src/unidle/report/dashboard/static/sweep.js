// The page of a sweep: the result of each trial, the Pareto front of several objectives, and a table of the trials.

let view = null, show = null, shownColumns = "";

const words = (name) => (name === "value" ? "return" : name.replaceAll("-", " "));

function trialName(trial) {
  const cell = document.createDocumentFragment(), name = `trial ${trial.number}`;
  cell.append(trial.path ? link(name, addressOf(trial.kind, trial.path)) : name);
  if (trial.error) cell.append(element("span", trial.error, "note-line"));
  return cell;
}

function columns() {
  return [
    { title: "trial", cell: trialName, order: (trial) => trial.number },
    ...view.objectives.map((name, i) => ({ title: words(name), cell: (trial) => trial.texts[i], order: (trial) => trial.values[i], right: true })),
    { title: "state", cell: (trial) => element("span", trial.state, `state ${trial.state}`), order: (trial) => trial.state },
    ...(view.objectives.length > 1 ? [{ title: "Pareto front", cell: (trial) => (trial.is_best ? "✓" : ""), order: (trial) => Number(trial.is_best), right: true }] : []),
    ...view.settings.map((name, i) => ({ title: name, cell: (trial) => trial.settings[i], order: (trial) => trial.numbers[i] ?? trial.settings[i], right: true })),
  ];
}

const dots = (name, trials, x, y, colour, size) => ({
  name, x: trials.map(x), y: trials.map(y), mode: "markers", line: { color: css(colour), width: 3 },
  marker: { color: css(colour), size }, customdata: trials.map((trial) => trial.number), hovertemplate: "trial %{customdata}: %{y:,.4~g}<extra></extra>",
});

function drawProgress() {
  const known = view.trials.filter((trial) => trial.values[0] !== null && trial.values[0] !== undefined);
  const of = (state) => known.filter((trial) => trial.state === state), x = (trial) => trial.number, y = (trial) => trial.values[0];
  const finished = of("finished"), traces = [dots("finished", finished, x, y, "c0", 8), dots("pruned", of("pruned"), x, y, "c5", 6)].filter((trace) => trace.x.length);
  if (view.objectives[0] === "return" || view.objectives[0] === "value") {
    let best = -Infinity;
    const line = finished.map((trial) => (best = Math.max(best, trial.values[0])));
    traces.push({ name: "best so far", x: finished.map(x), y: line, mode: "lines", line: { color: css("c1"), width: 1.8, shape: "hv" }, hovertemplate: "%{y:,.4~g}" });
  }
  byId("objective").textContent = view.objectives.length ? `${words(view.objectives[0])} of each trial` : "No trial has ended yet";
  showKeys("progress-keys", traces);
  plot(byId("progress"), traces, { hovermode: "closest", xaxis: { title: { text: "trial" } } });
}

function drawFront() {
  if (view.objectives.length < 2) return;
  const x = (trial) => trial.values[1], y = (trial) => trial.values[0];
  const known = view.trials.filter((trial) => trial.state === "finished" && trial.values.slice(0, 2).every((value) => value !== null));
  const best = known.filter((trial) => trial.is_best).sort((a, b) => x(a) - x(b));
  const front = { ...dots("Pareto front", best, x, y, "c0", 10), mode: "lines+markers", line: { color: css("c0"), width: 1.4 } };
  const traces = [dots("other trials", known.filter((trial) => !trial.is_best), x, y, "c5", 7), front];
  showKeys("front-keys", traces);
  plot(byId("front"), traces, {
    hovermode: "closest", xaxis: { title: { text: plain(words(view.objectives[1])) } }, yaxis: { title: { text: plain(words(view.objectives[0])), font: { size: 12 } } },
  });
}

function draw() {
  if (!view) return;
  document.title = `${view.name} · unidle`;
  setText("name", view.name);
  showState(view.state);
  showFacts(view.facts);
  showFigures(view.figures);
  byId("front-card").hidden = view.objectives.length < 2; // first, since it halves the width of the other chart
  drawProgress();
  drawFront();
  const asked = JSON.stringify([view.objectives, view.settings]);
  if (asked !== shownColumns) {
    shownColumns = asked;
    show = makeTable(byId("table"), columns(), (trial) => trial.number);
  }
  show(view.trials);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
follow(`${location.pathname}/events`, (now) => { view = now; draw(); });
