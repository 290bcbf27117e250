"use strict";
// Shared by both pages. Text from a run is only set as textContent, so it cannot become markup.

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
