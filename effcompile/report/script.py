"""What the HTML report does in a browser: sort a table by a column, copy a command.

Without it all is readable.
"""

from __future__ import annotations

SCRIPT = """
"use strict";
const UNITS = {"ns":1e-9,"µs":1e-6,"ms":1e-3,"s":1,"B":1,
               "KiB":1024,"MiB":1048576,"GiB":1073741824,"TiB":1099511627776,"%":0.01};
function figure(text) {
  const number = text.trim().replace(/−/g, "-");
  const found = number.match(/^[+<]?\\s*(-?[\\d.]+(?:e[-+]?\\d+)?)\\s*(ns|µs|ms|s|B|[KMGT]iB|%|×)?/);
  return found ? Number(found[1]) * (UNITS[found[2]] || 1) : null;
}
function sorted(rows, at, cells, down) {
  const keyed = rows.map(row => [row, (cells(row)[at] || {textContent: ""}).textContent]);
  keyed.sort((a, b) => {
    const x = figure(a[1]), y = figure(b[1]);
    if (x === null || y === null) return (x === null) - (y === null) || a[1].localeCompare(b[1]);
    return down ? y - x : x - y;
  });
  return keyed.map(pair => pair[0]);
}
function sortable(heads, rows, cells, into) {
  heads.forEach((head, at) => {
    if (!head.textContent.trim()) return;
    let down = false;
    head.tabIndex = 0; head.setAttribute("role", "button"); head.classList.add("sorts"); head.title = "sort";
    const act = () => { down = !down; into.append(...sorted(rows(), at, cells, down)); };
    head.addEventListener("click", act);
    head.addEventListener("keydown", event => { if (event.key === "Enter") act(); });
  });
}
document.querySelectorAll("table:not(.numbers)").forEach(table => {
  const body = table.tBodies[0];
  sortable([...table.tHead.rows[0].cells], () => [...body.rows], row => row.cells, body);
});
document.querySelectorAll(".rows").forEach(list => {
  sortable([...list.querySelector(".head").children], () => [...list.querySelectorAll(":scope > details")],
           row => row.querySelector("summary").children, list);
});
document.querySelectorAll("pre").forEach(pre => {
  const button = document.createElement("button");
  button.textContent = "copy"; button.type = "button";
  const text = pre.textContent;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  });
  pre.before(button);
});
"""
