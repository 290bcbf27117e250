"""The style sheet of the report page and its charts, for light and dark mode."""

from __future__ import annotations

# Series colours: Okabe and Ito's, distinguishable with all kinds of colour vision, slightly darker on
# white and lighter on black for a contrast of at least 3:1.
PALETTE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --edge: #e4e3df; --ink: #1b1c1f; --soft: #65676e;
  --grid: #ecebe7; --axis: #c4c3be; --accent: #0068a8;
  --c0: #0072b2; --c1: #d55e00; --c2: #008f68; --c3: #b8559a; --c4: #b98000; --c5: #85888f;
  --c6: #3f4249; --c7: #6a4fb8; --c8: #8a5a3c; --hatch: rgba(255, 255, 255, .75);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101216; --card: #181b21; --edge: #292d36; --ink: #eceef2; --soft: #9aa1ad;
    --grid: #252932; --axis: #464c58; --accent: #6cbcf2;
    --c0: #56b4e9; --c1: #ff8c42; --c2: #2fc79a; --c3: #e58fc4; --c4: #f0c04a; --c5: #8a909b;
    --c6: #d5d8de; --c7: #a78bfa; --c8: #c9946f; --hatch: rgba(0, 0, 0, .55);
  }
}
"""

PAGE_CSS = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1200px; margin: 0 auto; padding: 44px 24px 56px; }
header { margin-bottom: 26px; }
.brand {
  color: var(--accent); font-size: 12px; font-weight: 650; letter-spacing: .09em;
  text-transform: uppercase;
}
h1 {
  margin: 4px 0 10px; font-size: 30px; line-height: 1.2; letter-spacing: -.015em;
  overflow-wrap: anywhere;
}
h2 { margin: 38px 0 14px; font-size: 18px; letter-spacing: -.005em; }
h2 small {
  margin-left: 10px; color: var(--soft); font-size: 13px; font-weight: 400; letter-spacing: 0;
}
.facts { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0; color: var(--soft); }
.facts b { color: var(--ink); font-weight: 600; }
.note {
  padding: 14px 18px; border-left: 3px solid var(--accent); border-radius: 4px;
  background: var(--card);
}
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 1px;
  overflow: hidden;
  margin: 0; border: 1px solid var(--edge); border-radius: 12px; background: var(--edge);
}
.figures div { padding: 16px 18px 14px; background: var(--card); }
.figures dt { color: var(--soft); font-size: 13px; }
.figures dd { margin: 0; }
.figures .value {
  font-size: 25px; font-weight: 620; line-height: 1.35; letter-spacing: -.02em;
  white-space: nowrap;
}
.figures .detail { color: var(--soft); font-size: 13px; min-height: 1.5em; }
.figures + .figures { margin-top: 16px; }
@media (max-width: 480px) { .figures .value { font-size: 20px; } }
.grid { display: grid; gap: 16px; }
.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.three { grid-template-columns: repeat(auto-fill, minmax(min(100%, 310px), 1fr)); }
.card {
  padding: 16px 18px 12px; border: 1px solid var(--edge); border-radius: 12px;
  background: var(--card);
}
.config { align-items: start; grid-template-columns: 2fr 1fr; }
.halves { display: grid; grid-template-columns: 1fr 1fr; gap: 0 36px; }
@media (max-width: 800px) { .config, .halves { grid-template-columns: 1fr; } }
.config h3 { margin: 2px 0 8px; font-size: 14px; }
.config h3 small { margin-left: 8px; color: var(--soft); font-size: 12px; font-weight: 400; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
th, td { padding: 5px 0; border-top: 1px solid var(--grid); text-align: left; vertical-align: top; }
th { padding-right: 14px; color: var(--soft); font-weight: 400; white-space: nowrap; }
td {
  text-align: right; overflow-wrap: anywhere;
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
.card h3 { margin: 0 0 8px; font-size: 14px; }
.tasks tr:first-child th { border-top: 0; }
.tasks th:not(:first-child) { padding-right: 0; padding-left: 14px; text-align: right; }
.trials td { padding-left: 14px; overflow-wrap: normal; }
.card:has(.trials) { overflow-x: auto; }
.runs { overflow-x: auto; }
.runs th:not(:first-child), .runs td { padding-right: 0; padding-left: 18px; text-align: right; white-space: nowrap; }
.runs thead th { border-top: 0; vertical-align: bottom; }
.runs tbody th { color: var(--ink); }
.runs a { color: var(--accent); }
.runs tr:has(.problem) > * { border-top: 0; padding-left: 0; }
.problem {
  position: sticky; left: 0; max-width: min(100%, 100vw - 86px);
  color: var(--soft); font-family: system-ui, sans-serif; text-align: left; white-space: normal;
}
@media (max-width: 480px) {
  .runs th:not(:first-child), .runs td { padding-left: 12px; }
  .runs thead th:not(:first-child) { white-space: normal; }
}
footer { margin-top: 36px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.figures, table, .chart { font-variant-numeric: tabular-nums; }
"""

CHART_CSS = """
.chart { display: block; width: 100%; height: auto; overflow: visible; font-size: 11.5px; }
.chart text { fill: var(--soft); }
.chart .chart-title { fill: var(--ink); font-size: 14px; font-weight: 620; }
.chart .chart-name, .chart .chart-figure { fill: var(--ink); }
.chart .chart-figure { font-weight: 600; }
.chart .chart-empty { font-style: italic; }
.chart-grid { stroke: var(--grid); }
.chart-zero { stroke: var(--axis); }
.chart .chart-reference-label {
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round;
}
.chart-reference { stroke: var(--soft); stroke-dasharray: 5 4; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); }
.c7 { --c: var(--c7); } .c8 { --c: var(--c8); }
.fill { fill: var(--c); }
.hatch-up { fill: url(#hatch-up); }
.hatch-down { fill: url(#hatch-down); }
.line {
  fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round;
  stroke-linecap: round;
}
.thin { stroke-width: 1.1; stroke-opacity: .6; }
.thin:hover { stroke-width: 2.6; stroke-opacity: 1; }
.thin ~ .line:not(.thin) { stroke-width: 2.8; }
.faint { stroke-width: 1; stroke-opacity: .32; }
.band { fill: var(--c); fill-opacity: .15; }
.thin ~ .band { fill-opacity: .24; pointer-events: none; }
.area { fill: var(--c); }
.area ~ .line { stroke: var(--card); stroke-width: 1; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.3; }
.strip { fill: none; pointer-events: all; }
.hover .cue { opacity: 0; pointer-events: none; }
.hover:hover .cue { opacity: 1; }
.spot:hover .dot { stroke: var(--ink); }
"""

# Hatch patterns for charts, once per file: stripes over any colour.
HATCHES = """<defs>
<pattern id="hatch-up" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="2" height="4" style="fill: var(--hatch)"/></pattern>
<pattern id="hatch-down" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<rect width="2" height="4" style="fill: var(--hatch)"/></pattern>
</defs>"""

CSS = PALETTE + PAGE_CSS + CHART_CSS
