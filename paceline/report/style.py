"""How the reports look: one style sheet, light and dark, for screens from a phone's to a wide one, and for paper."""

STYLE = """
:root {
  --paper: #fcfcfa; --ink: #1d2227; --soft: #57606a; --rule: #dcdfda; --panel: #f3f4f1;
  --tile: #e7e8e4; --drafted: #cfe3f8; --drafted-even: #b6d4f2; --warning: #fdeed9; --warning-edge: #b3541e;
  --c0: #1f66b0; --c1: #c2621a; --c2: #2b8a80; --c3: #7d5ba6; --c4: #8a8f96; --c5: #b24a7d; --c6: #74751c;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e3e6e8; --soft: #a3abb3; --rule: #31373d; --panel: #1c2024;
    --tile: #2b3036; --drafted: #183d63; --drafted-even: #22507e; --warning: #3a2a18; --warning-edge: #e39a5c;
    --c0: #6aaef0; --c1: #eb9a55; --c2: #5cc2b5; --c3: #b598dd; --c4: #98a0a8; --c5: #e088b3; --c6: #c5c45a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55; overflow-wrap: break-word;
  font: 1rem/1.55 -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; print-color-adjust: exact; -webkit-print-color-adjust: exact;
}
main { max-width: 70rem; margin: 0 auto; padding: clamp(1.8rem, 4vw, 3.5rem) 1.25rem 5rem; }
h1 { font-size: clamp(1.7rem, 1.2rem + 2.2vw, 2.6rem); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .8rem;
  max-width: 24em; text-wrap: balance; }
h2 { font-size: 1.35rem; letter-spacing: -.01em; line-height: 1.3; margin: 0 0 .9rem; }
h3 { font-size: 1rem; margin: 2.2rem 0 .6rem; }
section { border-top: 1px solid var(--rule); margin-top: 3rem; padding-top: 1.6rem; }
p, section ul:not([class]) { max-width: 44em; margin: 0 0 1rem; }
section ul:not([class]) { padding-left: 1.2em; }
section ul:not([class]) li { margin-bottom: .45rem; }
.lead { font-size: 1.15rem; color: var(--soft); }
small, caption, figcaption small, .axis, summary { font-size: .875rem; color: var(--soft); }
.pre, .code { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  font: .84rem/1.75 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem 3rem; }
.columns > div { min-width: 0; }
.badge { font-size: .75rem; font-weight: 600; border: 1px solid var(--warning-edge); border-radius: 1em;
  padding: .1em .7em; margin-left: .6em; white-space: nowrap; }
details { margin-top: 1.4rem; }
summary { cursor: pointer; }
.note { border-left: 3px solid var(--rule); background: var(--panel); padding: .8rem 1.1rem; margin: 1.4rem 0;
  max-width: 46em; }
.note.warning { border-color: var(--warning-edge); background: var(--warning); }
blockquote { margin: 0 0 1rem; padding: 0 0 0 1rem; border-left: 3px solid var(--rule); color: var(--soft);
  max-height: 20rem; overflow: auto; }
.code { background: var(--panel); padding: 1rem 1.1rem; margin: 0 0 1rem; border-radius: 4px; white-space: pre;
  overflow-x: auto; }
.code .comment { color: var(--soft); }
.code .command::before { content: "$ "; color: var(--soft); user-select: none; }

.figures { list-style: none; padding: 0; margin: 2.2rem 0 0; display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); }
.figures b { display: block; font-size: clamp(1.9rem, 1.5rem + 1.6vw, 2.7rem); line-height: 1.1; font-weight: 650;
  letter-spacing: -.03em; }
.figures span { display: block; margin-top: .35rem; }
.figures small { display: block; }

table { border-collapse: collapse; width: 100%; }
caption { text-align: left; padding-bottom: .5rem; }
th, td { padding: .45rem 0 .45rem 1rem; text-align: right; vertical-align: baseline; }
th { font-weight: 400; }
th:first-child { text-align: left; padding-left: 0; }
thead th { font-size: .875rem; color: var(--soft); vertical-align: bottom; }
tbody tr { border-top: 1px solid var(--rule); }
.scroll { overflow-x: auto; }
.facts { margin: 0 0 1.2rem; display: grid; gap: 0 3rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.facts div { display: grid; grid-template-columns: minmax(6rem, 10rem) 1fr; gap: 1rem; padding: .4rem 0;
  border-top: 1px solid var(--rule); }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; min-width: 0; }

figure { margin: 0 0 1.6rem; break-inside: avoid; }
figcaption { margin-bottom: .5rem; }
figcaption b { font-weight: 600; }
figcaption small { display: block; max-width: 44em; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: 0; margin: 0 0 .8rem;
  font-size: .875rem; max-width: none; }
.key li { display: flex; align-items: center; gap: .55em; }
.key i { flex: none; width: 1.4em; height: 3px; background: var(--c); }
.key i.faint { opacity: .5; }
.key .tile { flex: none; margin: 0; }
.plot { padding: 1.7rem 1.1rem 3rem 3rem; font-size: .8rem; }
.drawing { display: block; width: 100%; height: 14rem; overflow: visible; }
.drawing text { fill: var(--soft); font-size: .8rem; }
.inner { overflow: visible; }
.grid { stroke: var(--rule); }
polyline { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
polyline.faint { opacity: .5; stroke-width: 1.2; }
circle { fill: var(--c); stroke: var(--paper); stroke-width: 1.5; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); }
polyline.c2 { stroke-dasharray: 7 4; } polyline.c3 { stroke-dasharray: 2 5; } polyline.c4 { stroke-dasharray: 9 4 2 4; }
.bars th, .bars td { padding: .16rem 0; border: 0; white-space: nowrap; font-size: .875rem; }
.bars tr { border: 0; }
.bars th, .bars td, .shares th, .shares td { max-width: min(16rem, 40vw); overflow: hidden; text-overflow: ellipsis; }
.bars td:nth-child(2) { width: 100%; vertical-align: middle; padding: 0 .8rem; }
.bars td:last-child { text-align: left; }
.bar { height: .8rem; min-width: 1px; background: var(--c4); border-radius: 0 2px 2px 0; }
.marked .bar, .alike .bar { background: var(--c0); }
.marked th, .marked td { font-weight: 650; }
.stack { display: flex; gap: 2px; height: 1.6rem; margin-bottom: .7rem; }
.stack i { background: var(--c); flex: 1 1 0; min-width: 1px; }
.shares { width: auto; font-size: .9rem; }
.shares th, .shares td { padding-top: .2rem; padding-bottom: .2rem; }
.shares tr { border: 0; }
.shares th:first-child { padding-left: 1.35em; text-indent: -1.35em; }
.shares i { display: inline-block; width: .75em; height: .75em; margin-right: .6em; background: var(--c); }

.tile { background: var(--tile); border-radius: 2px; margin-right: 1px; padding: .14em 0; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }
.drafted { background: var(--drafted); box-shadow: inset 0 -2px var(--c0); }
.first { background: none; box-shadow: inset 0 0 0 1px var(--c4); }
.line-end::before { content: "\\21b5"; color: var(--soft); font-style: normal; }
.key .tile { font: .84rem ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; padding: .14em .3em; }

.plot rect { fill: var(--c0); stroke: var(--paper); }
.median { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 4; }
.mono { font: .84rem ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.line { display: block; }
.facts dd, .source, .path { overflow-wrap: anywhere; }
.path { min-width: 13rem; }
.scroll + .facts { margin-top: 1.6rem; }
.source { margin: 0 0 .5rem; max-width: none; }
.source small { display: block; }
.strip { display: block; width: 100%; height: .45rem; margin: 0 0 .8rem; background: var(--tile); }
.strip rect { fill: var(--c0); }
.tokens { color: var(--soft); white-space: break-spaces; unicode-bidi: plaintext; }
.tokens i, .tokens b { font-style: normal; font-weight: inherit; }
.tokens i { background: var(--panel); padding: .14em 0; }
.tokens i:nth-child(even) { background: var(--tile); }
.tokens b { color: var(--ink); }
.tokens b i { background: var(--drafted); }
.tokens b i:nth-child(even) { background: var(--drafted-even); }
.tokens .control { unicode-bidi: isolate; border-radius: 4px; box-shadow: inset 0 0 0 1px var(--c4); margin: 0 1px;
  padding: .14em .25em; font-size: .92em; }
.tokens b .control { box-shadow: inset 0 0 0 1px var(--c0); }
.tokens s { text-decoration: none;
  background: radial-gradient(circle, var(--c4) .07em, transparent .1em) 0 50% / 1ch 1em; }
.tokens em { display: block; margin: .4rem 0; color: var(--soft); }
.key .tokens { flex: none; }
@media print {
  main { max-width: none; padding: 0; }
  body { font-size: 10pt; }
  section { break-inside: auto; }
  h2, h3 { break-after: avoid; }
  blockquote { max-height: none; }
}
"""
