"use strict";
// Shared by all pages. Text from a run is only set as textContent, so it cannot become markup.

const byId = (id) => document.getElementById(id);

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(cells, headed = true) {
  const made = document.createElement("tr");
  cells.forEach((cell, i) => {
    const box = element(i === 0 && headed ? "th" : "td");
    if (i === 0 && headed) box.scope = "row";
    box.append(cell);
    made.append(box);
  });
  return made;
}

function link(text, address) {
  const made = element("a", text);
  made.href = address;
  return made;
}

const encoded = (path) => path.split("/").map(encodeURIComponent).join("/");
const addressOf = (kind, path) => `/${kind === "pack" ? "pack" : "run"}/${encoded(path)}`;

function swatch(colour, className = "swatch") {
  const made = element("span", "", className);
  made.style.setProperty("--c", `var(--${colour})`);
  return made;
}

// Only writes what has changed: screen readers announce every change.
function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
  byId(id).hidden = !text;
}

// Links to the group or sweep that a run belongs to.
function showParents() {
  const [, ...names] = location.pathname.split("/").slice(1).map(decodeURIComponent);
  names.slice(0, -1).forEach((name, i) => {
    byId("parents").append(" / ", link(name, addressOf("run", names.slice(0, i + 1).join("/"))));
  });
}

function showFacts(facts) {
  byId("facts").replaceChildren(...facts.map(([name, value]) => {
    const fact = element("span", `${name} `);
    fact.append(element("b", value));
    return fact;
  }));
}

function showFigures(figures) {
  byId("figures").hidden = !figures.length;
  byId("figures").replaceChildren(...figures.map(([name, value, detail]) => {
    const box = document.createElement("div");
    box.append(element("dt", name), element("dd", value, "value"), element("dd", detail, "detail"));
    return box;
  }));
}

function showState(word, kind = word) {
  const badge = byId("state");
  if (badge.textContent !== word) badge.textContent = word;
  badge.className = `state ${kind}`;
}

// The token is in a cookie now: keep it out of the address bar and the history.
function forgetToken() {
  const address = new URL(location.href);
  if (!address.searchParams.has("token")) return;
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

function follow(path, show) {
  forgetToken();
  const events = new EventSource(path);
  events.onmessage = (event) => show(JSON.parse(event.data));
  events.onerror = () => showState("connection lost, retrying", "lost");
}
