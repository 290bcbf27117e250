// Where the time went: the stacked timeline with its table, and a close-up of one segment.

const chosen = { kind: null, axis: "steps", offset: null }; // offset null: the latest segment
let view = null; // see view.py for its fields
let embeddedSpans = null; // in a single-file page
let shownSpans = null;

// Points of the chart: the start of each segment, and its end before an unmeasured gap and at the end of the run.
// [seconds, segment, whether it is an end]
function corners() {
  const { begin, end } = view.timeline;
  const gap = .005 * (end.at(-1) || 0); // smaller gaps come from differences between clocks
  return begin.flatMap((from, i) => {
    const isLast = i === begin.length - 1;
    return isLast || begin[i + 1] > end[i] + gap ? [[from, i, false], [end[i], i, true]] : [[from, i, false]];
  });
}

function area(name, column, x, at) {
  const [colour, hatch] = styleOf(name);
  const pattern = hatch ? { fillpattern: { shape: hatch, fgcolor: css(colour), bgcolor: css("hatch"), size: 6, solidity: .45 } } : {};
  return {
    name: plain(name), x, y: at.map(([, i, isEnd]) => (isEnd && i < column.length - 1 ? 0 : column[i])), stackgroup: "all", mode: "lines", fillcolor: css(colour), ...pattern,
    line: { shape: "hv", width: column.length < 120 ? .6 : 0, color: css("card") }, hovertemplate: "%{y:.1%}",
  };
}

function drawTimeline() {
  const { begin, end } = view.timeline;
  const columns = view.timeline[chosen.kind];
  const [divisor, title] = unitOf("seconds", end.at(-1) || 0);
  const points = corners();
  const x = scaled(points.map(([seconds]) => seconds), divisor);
  const traces = end.length ? Object.entries(columns).map(([name, column]) => area(name, column, x, points)) : [];
  const at = segmentIndex();
  const mark = at < 0 ? [] : [{
    type: "rect", xref: "x", yref: "paper", x0: begin[at] / divisor, x1: end[at] / divisor, y0: 0, y1: 1,
    line: { color: css("ink"), width: 1.5 }, fillcolor: "rgba(0,0,0,0)",
  }];
  const extra = {
    xaxis: { title: { text: title }, range: x.length ? [0, x.at(-1)] : [0, 1], hoverformat: ".4~g" },
    yaxis: { tickformat: ".0%", range: [0, 1], fixedrange: true }, ...markers("seconds", divisor, mark),
  };
  plot(byId("timeline"), traces, extra);
}

function drawTable() {
  const rows = view.tables[chosen.kind] || [];
  byId("table").replaceChildren(...rows.map(([name, share, time]) => {
    const [colour, hatch] = styleOf(name);
    const cell = document.createDocumentFragment();
    const box = swatch(colour, hatch ? "swatch hatched" : "swatch");
    box.style.setProperty("--angle", hatch === "/" ? "-45deg" : "45deg");
    cell.append(box, name);
    return row([cell, share, time]);
  }));
}

// -- close-up of one segment ---------------------------------------------------------------------------------------------

const segmentsWithSpans = () => view.timeline.offset.flatMap((offset, i) => (offset !== null && (!embeddedSpans || offset in embeddedSpans) ? [i] : []));

function segmentIndex() {
  const at = chosen.offset === null ? -1 : view.timeline.offset.indexOf(chosen.offset);
  return at >= 0 ? at : segmentsWithSpans().at(-1) ?? -1;
}

// 8.0 s, 2:29:45
function clockTime(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  return parts.map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
}

async function drawLanes() {
  const at = segmentIndex();
  byId("closeup").hidden = at < 0;
  if (at < 0) return;
  const offset = view.timeline.offset[at];
  const begin = view.timeline.spans_begin;
  if (shownSpans?.offset !== offset) {
    const spans = embeddedSpans ? embeddedSpans[offset] : await (await fetch(`${location.pathname}/spans?at=${offset}`)).json();
    shownSpans = { offset, spans };
    if (view.timeline.offset[segmentIndex()] !== offset) return; // another one was selected meanwhile
  }
  const latest = chosen.offset === null ? "Latest segment" : "Segment";
  const shown = Math.max(0, ...shownSpans.spans.map(([, , , to]) => 1e3 * to)); // a segment may be longer than its spans
  byId("lanes-title").textContent = `${latest} from ${clockTime(begin[at])}: its first ${shown < 10 ? shown.toPrecision(2) : Math.round(shown)} ms`;
  byId("latest").setAttribute("aria-pressed", String(chosen.offset === null));
  const order = segmentsWithSpans();
  byId("earlier").disabled = order.indexOf(at) <= 0;
  byId("later").disabled = order.indexOf(at) >= order.length - 1;
  const spans = shownSpans.spans;
  const lanes = [...new Set(spans.map(([lane]) => lane))].reverse(); // Plotly counts from below
  const phases = [...new Set(spans.map(([, phase]) => phase))];
  const traces = phases.map((phase) => {
    const own = spans.filter((span) => span[1] === phase);
    const [colour, hatch] = styleOf(phase);
    return {
      type: "bar", orientation: "h", name: plain(phase), y: own.map(([lane]) => plain(lane)), base: own.map(([, , from]) => 1e3 * from),
      x: own.map(([, , from, to]) => 1e3 * (to - from)), hovertemplate: "%{x:.3f} ms from %{base:.3f} ms",
      marker: { color: css(colour), line: { width: .4, color: css("card") }, pattern: hatch ? { shape: hatch, size: 5 } : {} },
    };
  });
  plot(byId("lanes"), traces, {
    barmode: "overlay", bargap: .25, hovermode: "closest", legend: { orientation: "h", x: 0, y: 1.3, font: { color: css("ink") } }, margin: { l: 60, r: 10, t: 30, b: 36 },
    showlegend: byId("lanes").clientWidth > 600, // on a phone it would cover the bars; the table above has the colours
    xaxis: { title: { text: "ms since the start of the segment" }, rangemode: "tozero" },
    yaxis: { categoryorder: "array", categoryarray: lanes.map(plain), showgrid: false, fixedrange: true },
    uirevision: String(offset),
  });
}

function showSegment(offset) {
  chosen.offset = offset;
  drawTimeline();
  drawLanes();
}

// The segment with spans nearest to the one clicked.
function nearest(at) {
  const order = segmentsWithSpans();
  return order.reduce((best, i) => (Math.abs(i - at) < Math.abs(best - at) ? i : best), order[0]);
}

function neighbour(by) {
  const order = segmentsWithSpans();
  const at = order[order.indexOf(segmentIndex()) + by];
  if (at !== undefined) showSegment(view.timeline.offset[at]);
}
