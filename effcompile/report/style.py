"""The style sheet of the HTML report: system fonts, light and dark by the reader's preference, printable."""

from __future__ import annotations

STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1c1d21;--dim:#6a6d76;--line:#e4e4e0;--good:#15803d;--bad:#c0262d;
--warn:#a15c07;
--rest:#d3d4d8;--c0:#3b6fd4;--c1:#e0912f;--c2:#3a9a76;--c3:#a55bbf;--c4:#d1556b;--c5:#5aa9c9;--c6:#8c8f3a}
@media(prefers-color-scheme:dark){:root{--bg:#15161a;--card:#1d1f24;--ink:#e8e8ea;--dim:#9a9da7;
--line:#30333b;--good:#4ade80;
--bad:#f87171;--warn:#fbbf24;--rest:#454953;--c0:#6f9cf0;--c1:#f0ad57;--c2:#5cc79c;--c3:#c48ae0;
--c4:#ec7f92;--c5:#7fc9e6;--c6:#bcc063}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 20px 48px}
p{margin:4px 0}h1{font-size:28px;line-height:1.2;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:13px;letter-spacing:.06em;text-transform:uppercase;color:var(--dim);font-weight:600;
margin:0 0 10px}
.brand{font-weight:600;color:var(--c0);margin-bottom:4px}.dim,small{color:var(--dim)}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.goal{display:flex;gap:16px;justify-content:space-between;align-items:center;background:var(--card);
border:1px solid var(--line);
border-radius:10px;padding:14px 18px;margin:18px 0 0}.what{font-weight:600;font-size:17px}
.badge{white-space:nowrap;border:1px solid currentColor;border-radius:999px;padding:3px 14px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;
margin-top:14px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 12px 6px 0;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;color:var(--dim);font-weight:500;font-size:13px;vertical-align:bottom}tbody th{
font-weight:500}
.n,.numbers td,.numbers thead th{text-align:right}
.numbers thead tr:first-child th[colspan]{text-align:center;border-bottom:1px solid var(--line)}
td.n,.numbers td,.row .n{white-space:nowrap}
figure{margin:0}svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);
font:13px system-ui,sans-serif;dominant-baseline:central}
svg .label{fill:var(--dim)}line.limit{stroke:var(--bad);stroke-dasharray:4 3}svg text.limit{fill:var(--bad);
font-size:12px}
svg text.over{fill:#fff;font-size:12px}line.divider{stroke:var(--ink);stroke-dasharray:2 3;opacity:.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px;font-size:13px;color:var(--dim)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.rows{min-width:720px}.row{display:grid;grid-template-columns:minmax(0,1fr) 188px 76px 92px 88px;
gap:12px;padding:7px 0;border-top:1px solid var(--line);
font-variant-numeric:tabular-nums}.head{border-top:0;color:var(--dim);font-size:13px}
.head span:nth-child(n+3){text-align:right}
td summary{white-space:nowrap}svg.narrow{display:none}
summary{cursor:pointer;list-style:none}summary::-webkit-details-marker{display:none}
summary.row>span:first-child::before,td summary::before{content:"▸";color:var(--dim);display:inline-block;
width:16px}
details[open]>summary.row>span:first-child::before,td details[open]>summary::before{content:"▾"}
.row small{display:block}summary.row span:first-child small{padding-left:16px}summary.row small code{
font-size:12px}
.member{padding:3px 0 3px 16px;font-size:13px;border-top:1px dashed var(--line)}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{margin:0;padding:10px 12px;background:var(--bg);border-radius:6px;overflow-x:auto;overflow-wrap:normal}
ul{margin:0;padding-left:18px}footer{margin-top:18px;font-size:12px;overflow-wrap:anywhere}
button{float:right;font:12px system-ui,sans-serif;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:6px;
padding:2px 10px;margin:6px;cursor:pointer}.sorts{cursor:pointer}.sorts:hover,.sorts:focus-visible{
text-decoration:underline}
@media(max-width:900px){figure{overflow-x:auto}svg{min-width:860px}}
@media(max-width:600px){main{padding:20px 10px 32px}section{padding:12px}.goal{flex-direction:column;
align-items:flex-start}
th,td{padding-right:9px}.legend{position:sticky;left:0}
svg.wide{display:none}svg.narrow{display:block;min-width:0}
.rows{min-width:0}.row{grid-template-columns:repeat(3,minmax(0,1fr));gap:2px 12px}
.row>:nth-child(-n+2){grid-column:1/-1}summary.row>:nth-child(2){padding-left:16px}
.numbers,.numbers :is(thead,tbody){display:block}.numbers tr{display:flex;flex-wrap:wrap}
.numbers tr{border-top:1px solid var(--line)}.numbers :is(th,td){border:0;padding:2px 0 2px 2px}
.numbers thead th{letter-spacing:-.04em}
.numbers tr>:not(:first-child){flex:1 1 0;min-width:0;white-space:normal;font-size:11px}
.numbers tr>[colspan="2"]{flex-grow:2}
.numbers tr>:first-child{flex:1 0 100%;padding-left:0;font-size:13px}
.numbers tr>:first-child:empty{display:none}
table:not(.numbers) tr{display:flex;flex-wrap:wrap;gap:0 4px;border-top:1px solid var(--line)}
table:not(.numbers) :is(th,td){border-top:0;padding:3px 9px 3px 0}
table:not(.numbers) tr>:first-child{flex:1 0 28%}table:not(.numbers) .n{min-width:66px}
table:not(.numbers) tr>:last-child:not(.n){flex-basis:100%}
table:not(.numbers) :is(th,td):has(>span:only-child:empty),table:not(.numbers) th:empty{display:none}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
