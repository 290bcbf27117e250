// The page of a group, or of runs that are compared: all curves on one plot, and the settings in which they differ.

let view = null;
const COLOURS = 9, DASHES = ["solid", "dash", "dot"];
const isGroup = !location.pathname.startsWith("/compare");
const show = tableOfRuns(byId("table"));

// Lines that share a colour differ in their dashes; the runs of a large group are all grey.
function styled(line, i) {
  const isGrey = line.is_thin && view.lines.length > COLOURS;
  return { colour: isGrey ? "c5" : `c${i % COLOURS}`, dash: isGrey ? "solid" : DASHES[Math.floor(i / COLOURS) % DASHES.length] };
}

function traces(axis, divisor) {
  const ordered = view.lines.map((line, i) => [line, styled(line, i)]);
  return ordered.reverse().flatMap(([line, { colour, dash }]) => { // the first one is drawn last, above the others
    const curve = line[axis], x = scaled(curve.x, divisor);
    const own = {
      name: plain(line.name), text: line.name, x, y: curve.y, mode: "lines", hovertemplate: "%{y:,.4~g}", hoverinfo: "x+y+name",
      opacity: line.is_thin ? .55 : 1, line: { color: css(colour), width: line.is_mean ? 3 : line.is_thin ? 1.2 : 1.8, dash },
    };
    const hasBand = line.is_mean && curve.low.some((value) => value !== null);
    return hasBand ? [...band(x, curve.low, curve.high, colour), own] : [own];
  });
}

function drawAxis(axis) {
  const [divisor, title] = unitOf(axis, largest(view.lines.flatMap((line) => line[axis].x)));
  const drawn = traces(axis, divisor);
  plot(byId(axis), drawn.map(({ text, ...trace }) => trace), {
    hovermode: view.lines.length > 2 * COLOURS ? "closest" : "x unified",
    xaxis: { title: { text: title }, rangemode: "tozero", hoverformat: axis === "steps" ? "," : ".4~g" },
  });
  return drawn;
}

function drawSettings() {
  const { names, rows, n_known: known } = view.settings;
  setText("same", names.length ? "" : known < 2 ? "There are no two runs to compare." : "The runs differ only in their seeds.");
  const isWide = rows.length > names.length; // the longer side goes down
  const table = [["", ...names], ...rows], turned = isWide ? table : table[0].map((_, i) => table.map((cells) => cells[i]));
  const head = element("thead"), body = element("tbody");
  head.append(row(turned[0]));
  head.querySelectorAll("td").forEach((cell) => cell.replaceWith(Object.assign(element("th", cell.textContent), { scope: "col" })));
  body.append(...turned.slice(1).map((cells) => row(cells)));
  byId("settings").replaceChildren(...(names.length ? [head, body] : []));
}

function draw() {
  if (!view) return;
  const name = isGroup ? view.name : `${view.rows.length} runs`;
  document.title = `${name} · unidle`;
  setText("name", name);
  showState(view.state);
  showFacts(view.facts);
  showFigures(view.figures);
  const hasMean = view.lines.some((line) => line.is_mean);
  setText("measure", `${view.measure}${hasMean ? "; bold: interquartile mean, shaded: its 95 % interval" : ""}`);
  const hasPoints = view.lines.some((line) => line.steps.x.length);
  byId("none").hidden = hasPoints;
  const drawn = drawAxis("steps");
  drawAxis("seconds");
  const named = drawn.filter((trace) => trace.showlegend !== false).reverse();
  showKeys("keys", view.lines.length > COLOURS && isGroup ? named.slice(0, 1) : named);
  drawSettings();
  show(view.rows);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
if (isGroup) showParents();
follow(isGroup ? `${location.pathname}/events` : `/compare/events${location.search}`, (now) => { view = now; draw(); });
