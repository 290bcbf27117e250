// A table that is sorted by column and filtered by text; a row is only written again when it has changed.

// columns: {title, cell: (item) => text or node, order: (item) => number or text, right: align right, hint,
// optional: hide it if no item has a value}
// keyOf: what identifies an item; tickable: whether an item has a tick box, if there are any.
function makeTable(box, columns, keyOf, tickable = null) {
  const hasTicks = tickable !== null;
  const saved = new URLSearchParams(location.hash.slice(1)); // the table looks the same after "back" and a reload
  const state = { filter: saved.get("filter") ?? "", column: columns.findIndex(({ title }) => title === saved.get("sort")), down: saved.has("down") };
  const rows = new Map(), ticked = new Set();
  let items = [];

  const filter = Object.assign(document.createElement("input"), { type: "search", placeholder: "filter", value: state.filter });
  filter.setAttribute("aria-label", "Show only rows with this text");
  const count = element("span", "", "quiet"), compare = link("", "/compare"), bar = element("div", "", "bar");
  count.setAttribute("role", "status");
  compare.className = "button";
  bar.append(filter, count, compare);

  const table = element("table", "", "listing"), head = document.createElement("tr"), body = document.createElement("tbody");
  if (hasTicks) head.append(element("td", "", "tick"));
  const heads = columns.map((column, i) => {
    const cell = element("th", "", column.right ? "right" : ""), button = element("button", column.title);
    cell.scope = "col";
    button.title = column.hint ?? "";
    button.addEventListener("click", () => {
      const isFirst = state.column !== i;
      state.down = isFirst ? Boolean(column.right) : !state.down; // figures: the highest first
      state.column = i;
      remember();
      arrange();
    });
    cell.append(button);
    head.append(cell);
    return cell;
  });
  body.id = "rows";
  const top = document.createElement("thead"), wide = element("div", "", "wide"), none = element("p", "", "hint");
  top.append(head);
  table.append(top, body);
  wide.append(table);
  box.replaceChildren(bar, wide, none);

  function remember() {
    const chosen = new URLSearchParams();
    if (state.filter) chosen.set("filter", state.filter);
    if (state.column >= 0) chosen.set("sort", columns[state.column].title);
    if (state.column >= 0 && state.down) chosen.set("down", "");
    history.replaceState(null, "", `${location.pathname}${location.search}#${chosen}`);
  }

  function makeRow(item) {
    const made = document.createElement("tr");
    if (hasTicks) {
      const cell = element("td", "", "tick");
      if (tickable(item)) {
        const tick = Object.assign(document.createElement("input"), { type: "checkbox" });
        tick.setAttribute("aria-label", `Compare ${item.name}`);
        tick.addEventListener("change", () => {
          if (tick.checked) ticked.add(keyOf(item)); else ticked.delete(keyOf(item));
          showTicked();
        });
        cell.append(tick);
      }
      made.append(cell);
    }
    columns.forEach(({ title, right }, i) => {
      const cell = element(i ? "td" : "th", "", right ? "right" : "");
      if (!i) cell.scope = "row";
      cell.dataset.label = title;
      made.append(cell);
    });
    return made;
  }

  function fill(made, item) {
    const cells = [...made.children].slice(hasTicks ? 1 : 0);
    columns.forEach(({ cell }, i) => {
      cells[i].replaceChildren(cell(item));
      cells[i].classList.toggle("unknown", ["", "–"].includes(cells[i].textContent)); // a phone shows only what is known
    });
  }

  function showTicked() {
    const paths = [...ticked];
    compare.hidden = !hasTicks;
    compare.classList.toggle("off", paths.length < 2 || paths.length > 24);
    compare.textContent = paths.length < 2 ? "tick two or more to compare" : paths.length > 24 ? "tick at most 24" : `compare ${paths.length} on one plot`;
    if (paths.length < 2 || paths.length > 24) compare.removeAttribute("href");
    else compare.href = `/compare?${new URLSearchParams(paths.map((path) => ["run", path]))}`;
  }

  function inOrder() {
    if (state.column < 0) return items;
    const { order } = columns[state.column], sign = state.down ? -1 : 1;
    const known = items.filter((item) => order(item) !== null), unknown = items.filter((item) => order(item) === null);
    const compared = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
    return [...known.sort((a, b) => sign * compared(order(a), order(b))), ...unknown]; // unknown ones last
  }

  function arrange() {
    heads.forEach((cell, i) => cell.setAttribute("aria-sort", i !== state.column ? "none" : state.down ? "descending" : "ascending"));
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = inOrder().map((item) => rows.get(keyOf(item)).made).filter((made) => {
      const text = [...made.children].map((cell) => cell.textContent).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (shown.length !== body.children.length || shown.some((made, i) => body.children[i] !== made)) body.replaceChildren(...shown);
    count.textContent = shown.length === items.length ? "" : `${shown.length} of ${items.length}`;
    none.textContent = shown.length || !items.length ? "" : "No row has this text.";
    bar.hidden = items.length < 2;
    wide.hidden = !items.length;
  }

  filter.addEventListener("input", () => { state.filter = filter.value; remember(); arrange(); });

  return function show(now) {
    items = now;
    const keys = new Set(items.map(keyOf));
    for (const key of rows.keys()) {
      if (!keys.has(key)) { rows.delete(key); ticked.delete(key); }
    }
    for (const item of items) {
      const text = JSON.stringify(item), known = rows.get(keyOf(item)) ?? { made: makeRow(item), text: "" };
      if (known.text !== text) fill(known.made, item);
      rows.set(keyOf(item), { made: known.made, text });
    }
    columns.forEach(({ optional, order }, i) => {
      const isHidden = Boolean(optional) && items.every((item) => order(item) === null), at = i + Number(hasTicks);
      [head, ...[...rows.values()].map(({ made }) => made)].forEach((each) => { each.children[at].hidden = isHidden; });
    });
    arrange();
    showTicked();
  };
}

// -- rows of runs, groups, sweeps and packs --------------------------------------------------------------------------------

function runName(run) {
  const cell = document.createDocumentFragment();
  cell.append(link(run.name, addressOf(run.kind, run.path)));
  if (run.note) cell.append(element("span", run.note, "note-line"));
  return cell;
}

function progress(run) {
  const cell = document.createDocumentFragment();
  const unit = { sweep: " trials", pack: " jobs" }[run.kind] ?? "";
  cell.append(run.step, element("span", ` / ${run.total}${unit}`, "of"));
  if (run.progress !== null) {
    const bar = document.createElement("progress");
    bar.value = run.progress;
    bar.title = `${Math.round(100 * run.progress)} %`;
    cell.append(bar);
  }
  return cell;
}

// The course of the returns, and the latest.
function returns(run) {
  const cell = element("span", "", "returns");
  const [x, y] = run.spark;
  if (x.length > 1) cell.append(sparkline(x, y));
  cell.append(element("span", run.return));
  return cell;
}

function sparkline(x, y) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "polyline");
  const [left, right, low, high] = [Math.min(...x), Math.max(...x), Math.min(...y), Math.max(...y)];
  const across = (value) => 1 + 78 * ((value - left) / (right - left || 1)), down = (value) => 19 - 18 * ((value - low) / (high - low || 1));
  line.setAttribute("points", x.map((value, i) => `${across(value).toFixed(1)},${down(y[i]).toFixed(1)}`).join(" "));
  svg.setAttribute("viewBox", "0 0 80 20");
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}

const known = (text) => (text === "–" ? null : text);
const RUN_COLUMNS = [
  { title: "run", cell: runName, order: (run) => run.name },
  { title: "environment", cell: (run) => run.env, order: (run) => known(run.env) },
  { title: "preset", cell: (run) => run.preset, order: (run) => known(run.preset) },
  { title: "seed", cell: (run) => run.seed, order: (run) => run.order.seed },
  { title: "started", cell: (run) => run.date, order: (run) => run.order.date },
  { title: "state", cell: (run) => element("span", run.state, `state ${run.state}`), order: (run) => run.state },
  { title: "steps", cell: progress, order: (run) => run.order.step, right: true },
  { title: "steps/s", cell: (run) => run.rate, order: (run) => run.order.rate, right: true, hint: "average of the whole run" },
  { title: "return", cell: returns, order: (run) => run.order.return, right: true, hint: "of a group: the interquartile mean of its runs; of a sweep: its best trial" },
  { title: "GPU busy", cell: (run) => run.busy, order: (run) => run.order.busy, right: true, optional: true, hint: "in the latest segments of the run" },
];
const isComparable = (run) => run.kind === "run" || run.kind === "group";
const tableOfRuns = (box) => makeTable(box, RUN_COLUMNS, (run) => run.path, isComparable);
