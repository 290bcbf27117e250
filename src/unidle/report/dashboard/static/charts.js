// Common chart settings: colours, axis units, markers of changes.

// [palette colour, hatch] of a phase or cause; page.py inserts the table before this script.
const styleOf = (name) => (Object.hasOwn(PHASE_STYLES, name) ? PHASE_STYLES[name] : UNKNOWN_STYLE);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); // for Plotly

const UNITS = { seconds: [[7200, 3600, "h"], [240, 60, "min"], [0, 1, "s"]], joules: [[2e6, 1e6, "MJ"], [2e3, 1e3, "kJ"], [0, 1, "J"]] };
const NAMES = { seconds: "time", joules: "GPU energy", steps: "environment steps" };

// [divisor, axis title] that suits values up to `most`.
function unitOf(axis, most) {
  if (axis === "steps") return [1, NAMES.steps];
  const [, divisor, unit] = UNITS[axis].find(([from]) => most >= from);
  return [divisor, `${NAMES[axis]} (${unit})`];
}

const largest = (values) => values.reduce((most, value) => Math.max(most, value ?? 0), 0);
const scaled = (values, divisor) => values.map((value) => (value === null ? null : value / divisor));

function layout(extra) {
  const axis = { gridcolor: css("grid"), zerolinecolor: css("axis"), linecolor: css("axis"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = extra;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "keep", hovermode: "x unified",
    font: { family: "system-ui, sans-serif", size: 12, color: css("soft") }, margin: { l: 46, r: 10, t: 12, b: 40 },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("axis"), font: { color: css("ink") } },
    showlegend: false, // Plotly's covers the plot where it is narrow; see showKeys
    ...rest, xaxis: { ...axis, showgrid: false, ...xaxis, title: { font: { size: 12 }, ...xaxis.title } }, yaxis: { ...axis, ...yaxis },
  };
}

function plot(box, traces, extra) {
  return Plotly.react(box, traces, layout(extra), { displayModeBar: false, responsive: true });
}

// The legend above a chart: one entry per trace with the colour and style of its line.
function showKeys(id, traces) {
  byId(id).replaceChildren(...traces.map((trace) => {
    const key = element("span"), line = element("i");
    line.style.borderTop = `${(trace.line.width ?? 2) > 2 ? 3 : 2}px ${{ dash: "dashed", dot: "dotted" }[trace.line.dash] ?? "solid"} ${trace.line.color}`;
    line.style.opacity = String(trace.opacity ?? 1);
    key.append(line, trace.text ?? trace.name);
    return key;
  }));
}

// Two invisible lines with the area between them.
function band(x, low, high, colour) {
  const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, name: "low", y: low }, { ...edge, name: "high", y: high, fill: "tonexty", fillcolor: faded(colour) }];
}

function faded(colour) {
  const [red, green, blue] = css(colour).match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16));
  return `rgba(${red},${green},${blue},.15)`;
}

// Changes as numbered lines; the list below the chart explains them.
function markers(axis, divisor, shapes = []) {
  const positioned = view.changes.map((change, i) => [change[axis], change.change, i + 1]).filter(([x]) => x !== null);
  return {
    shapes: [...shapes, ...positioned.map(([x]) => ({
      type: "line", xref: "x", yref: "paper", x0: x / divisor, x1: x / divisor, y0: 0, y1: 1,
      line: { color: css("ink"), width: 1, dash: "dot" },
    }))],
    annotations: positioned.map(([x, change, number]) => ({
      x: x / divisor, y: 1, yref: "paper", xanchor: "left", yanchor: "top", showarrow: false, text: String(number),
      hovertext: plain(change), font: { color: css("ink"), size: 11 }, bgcolor: css("card"), borderpad: 2,
    })),
  };
}
