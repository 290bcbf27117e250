// The page of a run: draws a view that comes from the server repeatedly or is embedded in the page.

// -- learning, speed, power ----------------------------------------------------------------------------------------------

function drawCurves(id, curves, percent) {
  const axis = chosen.axis;
  const all = [curves.training, curves.evaluation];
  const [divisor, title] = unitOf(axis, largest(all.flatMap((curve) => curve[axis])));
  const traces = [];
  const format = percent ? "%{y:.1%}" : "%{y:,.4~g}";
  if (curves.training.value.length) {
    traces.push({
      name: "training, last 100 episodes", x: scaled(curves.training[axis], divisor), y: curves.training.value,
      mode: "lines", line: { color: css("c0"), width: 1.8 }, hovertemplate: format,
    });
  }
  const evaluation = curves.evaluation;
  if (evaluation.value.length) {
    const x = scaled(evaluation[axis], divisor);
    const edge = (sign) => evaluation.value.map((value, i) => value + sign * (evaluation.spread[i] ?? 0));
    if (evaluation.spread.some((spread) => spread !== null)) {
      traces.push(...band(x, edge(-1), edge(1), "c1"));
    }
    traces.push({
      name: "evaluation", x, y: evaluation.value, mode: "lines+markers", line: { color: css("c1"), width: 1.8 },
      marker: { size: 6 }, hovertemplate: format,
    });
  }
  const goal = !percent && view.target !== null ? [{
    type: "line", xref: "paper", x0: 0, x1: 1, y0: view.target, y1: view.target, line: { color: css("soft"), width: 1, dash: "dash" },
  }] : [];
  showKeys(`${id}-keys`, traces.filter((trace) => trace.showlegend !== false));
  plot(byId(id), traces, {
    xaxis: { title: { text: title }, rangemode: "tozero", hoverformat: axis === "steps" ? "," : ".4~g" },
    yaxis: percent ? { tickformat: ".0%", range: [-.03, 1.03] } : {}, ...markers(axis, divisor, goal),
  });
}

function drawSpeed() {
  const { seconds, rate, mean } = view.speed;
  const [divisor, title] = unitOf("seconds", largest(seconds));
  const x = scaled(seconds, divisor);
  const hovertemplate = "%{y:,.4~g}";
  const traces = [{ name: "each iteration", x, y: rate, mode: "lines", line: { color: css("c0"), width: mean ? 1 : 1.8 }, opacity: mean ? .35 : 1, hovertemplate }];
  if (mean) traces.push({ name: "running mean", x, y: mean, mode: "lines", line: { color: css("c0"), width: 2 }, hovertemplate });
  showKeys("speed-keys", mean ? traces : []);
  plot(byId("speed"), traces, {
    xaxis: { title: { text: title }, rangemode: "tozero", hoverformat: ".4~g" },
    yaxis: { rangemode: "tozero" }, ...markers("seconds", divisor),
  });
}

function drawPower() {
  byId("energy").hidden = !view.power && !view.parts; // of a run without a GPU, or without the meter
  byId("power-card").hidden = !view.power;
  byId("parts-card").hidden = !view.parts;
  if (view.parts) {
    const head = row(["part", "share of time", "GPU busy", "power"]);
    head.querySelectorAll("td").forEach((cell) => cell.replaceWith(Object.assign(element("th", cell.textContent), { scope: "col" })));
    byId("parts").replaceChildren(head, ...view.parts.rows.map((cells) => row(cells)));
  }
  if (!view.power) return;
  const { seconds, watts, joules } = view.power;
  const [divisor, title] = unitOf("seconds", largest(seconds));
  const [size, energy] = unitOf("joules", largest(joules));
  const x = scaled(seconds, divisor);
  const traces = [
    { name: "power (W)", x, y: watts, mode: "lines", line: { color: css("c1"), width: 1.8 }, hovertemplate: "%{y:.0f} W" },
    { name: energy, x, y: scaled(joules, size), yaxis: "y2", mode: "lines", line: { color: css("c0"), width: 1.8, dash: "dash" }, hovertemplate: "%{y:.4~g}" },
  ];
  showKeys("power-keys", traces);
  plot(byId("power"), traces, {
    margin: { l: 46, r: 50, t: 12, b: 40 }, xaxis: { title: { text: title }, rangemode: "tozero", hoverformat: ".4~g" },
    yaxis: { rangemode: "tozero" },
    yaxis2: { overlaying: "y", tickmode: "auto", nticks: 6, side: "right", rangemode: "tozero", showgrid: false, automargin: true, color: css("soft") },
    ...markers("seconds", divisor),
  });
}

// -- losses and settings -------------------------------------------------------------------------------------------------

const lossCards = new Map(); // title → plot

function drawLosses() {
  byId("learning").hidden = !view.losses.length;
  const shown = new Set(view.losses.map(({ title }) => title));
  for (const [title, chart] of lossCards) {
    if (!shown.has(title)) { chart.parentElement.remove(); lossCards.delete(title); }
  }
  for (const loss of view.losses) {
    if (!lossCards.has(loss.title)) {
      const card = element("div", "", "card"), head = element("h3", loss.title), chart = element("div", "", "plot small");
      head.append(element("small", loss.meaning));
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", loss.title);
      card.append(head, chart);
      byId("losses").append(card);
      lossCards.set(loss.title, chart);
    }
    const [divisor, title] = unitOf(chosen.axis, largest(loss[chosen.axis]));
    const line = { name: plain(loss.title), x: scaled(loss[chosen.axis], divisor), y: loss.value, mode: "lines", line: { color: css("c0"), width: 1.6 }, hovertemplate: "%{y:,.4~g}<extra></extra>" };
    plot(lossCards.get(loss.title), [line], { showlegend: false, xaxis: { title: { text: title }, rangemode: "tozero", hoverformat: chosen.axis === "steps" ? "," : ".4~g" }, yaxis: { exponentformat: "e" } });
  }
}

let shownConfig = "";
function drawConfig() {
  const text = JSON.stringify(view.config);
  if (text === shownConfig) return;
  shownConfig = text;
  byId("settings").hidden = !view.config.length;
  const cards = view.config.map(([name, meaning, settings]) => {
    const card = element("div", "", "card"), head = element("h3", name), tables = element("div", "", name === "recipe" ? "halves" : "");
    const half = name === "recipe" ? Math.ceil(settings.length / 2) : settings.length; // the recipe is long
    head.append(element("small", meaning));
    for (const part of [settings.slice(0, half), settings.slice(half)].filter(({ length }) => length)) {
      const table = document.createElement("table");
      table.append(...part.map((setting) => row(setting)));
      tables.append(table);
    }
    card.append(head, tables);
    return card;
  });
  const others = element("div", "", "grid");
  others.append(...cards.slice(1));
  byId("config").replaceChildren(...cards.slice(0, 1), others);
}

// -- the page ----------------------------------------------------------------------------------------------------------

function drawWords() {
  document.title = `${view.name} · unidle`;
  setText("name", view.name);
  showState(view.state);
  setText("verdict", view.verdict);
  setText("parts-sentence", view.parts ? `GPU busy ${view.parts.sentence}.` : "");
  setText("source", view.source === "meter.jsonl" ? "measured by the meter" : "by the trainer's clock, since this run has no meter.jsonl");
  showFacts(view.facts);
  showFigures(view.figures);
  byId("changes").hidden = !view.changes.length;
  byId("changes").querySelector("ol").replaceChildren(...view.changes.map(({ change }) => element("li", change)));
}

function press(id, choice, possible) {
  byId(id).querySelectorAll("button").forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.choice === choice));
    button.disabled = !possible(button.dataset.choice);
  });
}

function draw() {
  if (!view) return;
  if (!chosen.kind || !view.tables[chosen.kind]) chosen.kind = view.tables.gpu ? "gpu" : "host";
  drawWords();
  press("kinds", chosen.kind, (kind) => Boolean(view.tables[kind]));
  byId("kinds").hidden = !view.tables.gpu; // without a GPU there is nothing to choose
  press("axes", chosen.axis, () => true);
  byId("axes").querySelector("[data-choice=joules]").hidden = !view.has_joules;
  drawTimeline();
  drawTable();
  drawLanes();
  const none = { value: [], spread: [], steps: [], seconds: [], joules: [] };
  byId("success-card").hidden = !view.success;
  drawCurves("returns", view.returns || { training: none, evaluation: none }, false);
  if (view.success) drawCurves("success", view.success, true);
  drawSpeed();
  drawPower();
  drawLosses();
  drawConfig();
  byId("timeline").on && addClickHandler();
}

let hasClickHandler = false;
function addClickHandler() {
  if (hasClickHandler) return;
  hasClickHandler = true;
  byId("timeline").on("plotly_click", ({ points }) => {
    const at = nearest(corners()[points[0].pointNumber]?.[1] ?? 0);
    if (at !== undefined) showSegment(view.timeline.offset[at]);
  });
}

function onChoice(id, take) {
  byId(id).addEventListener("click", (event) => {
    const choice = event.target.dataset.choice;
    if (choice) { take(choice); draw(); }
  });
}

onChoice("kinds", (kind) => { chosen.kind = kind; });
onChoice("axes", (axis) => { chosen.axis = axis; });
byId("earlier").addEventListener("click", () => neighbour(-1));
byId("later").addEventListener("click", () => neighbour(1));
byId("latest").addEventListener("click", () => showSegment(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

let isDue = false;
function drawSoon() { // a hidden tab draws when it becomes visible
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; draw(); });
}

const data = byId("data");
if (data) {
  const embedded = JSON.parse(data.textContent);
  embeddedSpans = embedded.spans;
  view = embedded.view;
  byId("home").removeAttribute("href");
  byId("footer").textContent = "A static copy: the state of the run when this file was written.";
  draw();
} else {
  showParents();
  follow(`${location.pathname}/events`, (now) => { view = now; drawSoon(); });
}
