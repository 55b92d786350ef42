"""The report's style sheet: light and dark by the reader's setting, one column on narrow screens."""

STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--dim:#5c6675;--page:#fff;--panel:#f4f6f9;--line:#d9dee6;
--first:#1f6feb;--second:#c2410c;--idle:#e9edf2}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--dim:#9aa5b5;--page:#14181f;--panel:#1d232d;--line:#333c49;
--first:#6ea8ff;--second:#ffa46b;--idle:#2a313c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:1rem;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{margin:0;font-size:1.6rem}h1 small{color:var(--dim);font-weight:400;font-size:1rem}
h2{margin:2rem 0 .6rem;font-size:1.2rem;border-bottom:1px solid var(--line)}h3{font-size:.95rem;margin:.8rem 0 .3rem}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin:.4rem 0}a{color:var(--first)}
.note,footer{color:var(--dim);font-size:.85rem}.bad{color:var(--second)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:.6rem}
.figure{background:var(--panel);border-radius:6px;padding:.5rem .7rem}.figure b{display:block;font-size:1.15rem}
.figure span{color:var(--dim);font-size:.8rem}
.wide{overflow-x:auto;margin:.5rem 0}table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}.plans tbody:first-of-type tr:first-child td{font-weight:600}
td,th{overflow-wrap:normal}td:last-child{min-width:12em}.events td:first-child{white-space:nowrap}
.track{display:inline-block;width:8rem;margin-right:.5rem}.bar{display:inline-block;height:.7rem;border-radius:2px}
.bar.first{background:var(--first)}.bar.second{background:var(--second)}
.lanes{display:flex}.names{flex:none;width:4.6rem;font-size:.75rem;line-height:26px;color:var(--dim)}
.scroll{flex:1;min-width:0;overflow-x:auto}.lanes svg{display:block}.idle{fill:var(--idle)}
.task{stroke:var(--page);stroke-width:.5}g:hover .task{stroke:var(--ink);stroke-width:1.5}
.lanes text{font-size:11px;text-anchor:middle;dominant-baseline:central;pointer-events:none}
#zoom2:checked~div .zoomed{width:200%}#zoom4:checked~div .zoomed{width:400%}#zoom8:checked~div .zoomed{width:800%}
figure{margin:0 0 1rem}.key{font-size:.8rem;margin-left:.8rem}.key.first{color:var(--first)}
.key.second{color:var(--second)}.key.level{color:var(--dim)}
.axes{display:flex}.scale{display:flex;flex-direction:column;justify-content:space-between;width:5rem;height:180px;
flex:none;font-size:.72rem;color:var(--dim)}.grow{flex:1;min-width:0}
.steps{display:flex;justify-content:space-between;font-size:.72rem;color:var(--dim)}
.plot{display:block;overflow:visible;border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
polyline{fill:none;stroke-width:1.6;vector-effect:non-scaling-stroke}
polyline.first{stroke:var(--first)}polyline.second{stroke:var(--second)}
polyline.level{stroke:var(--dim);stroke-dasharray:5 4}
circle{opacity:.75}circle.first{fill:var(--first)}circle.second{fill:var(--second)}circle.level{fill:var(--dim)}
pre{background:var(--panel);padding:.7rem;overflow-x:auto;font-size:.8rem}
"""
