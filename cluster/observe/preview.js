"use strict";
// Draws DATA: one page at a time, chosen by the part of the address after "#".

const COLORS = ["#3871dc", "#ff9830", "#56a64b", "#e02f44", "#8f3bb8", "#37a2eb", "#b5a41c", "#fa6400",
  "#1f78c1", "#7c4d3a", "#c15c8c", "#508642"];
const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const UNITS = { reqps: " req/s", ops: "/s", watt: " W" };

function short(value) {
  for (const [size, letter] of PREFIXES) {
    if (Math.abs(value) >= size) return digits(value / size) + letter;
  }
  return digits(value);
}

function digits(value) {
  return value === 0 ? "0" : String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return digits(value * 1e6) + " µs";
  if (value < 1) return digits(value * 1e3) + " ms";
  return value < 120 ? digits(value) + " s" : digits(value / 60) + " min";
}

function shown(value, unit) {
  if (value === null || value === undefined) return "";
  if (unit === "s") return seconds(value);
  if (unit === "percentunit") return digits(value * 100) + " %";
  if (unit === "percent") return digits(value) + " %";
  if (unit === "bytes") return short(value) + "B";
  if (unit === "Bps") return short(value) + "B/s";
  return short(value) + (UNITS[unit] || "");
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function times(panel) {
  const first = panel.series[0];
  return first.values.map((_, index) => DATA.start + index * panel.step);
}

function stat(box, panel) {
  const values = panel.series[0].values.filter((value) => value !== null);
  const last = values[values.length - 1];
  const number = element("div", shown(last, panel.unit), box);
  number.className = "number";
  const [warn, bad] = panel.thresholds;
  if (warn !== undefined) number.style.color = last >= bad ? "#e02f44" : last >= warn ? "#c98a00" : "#2f8f2f";
}

function pale(color) {
  // As good as translucent on white, and of a stack what lies below shows unmixed.
  const parts = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return `rgb(${parts.map((part) => Math.round(255 - 0.45 * (255 - part))).join(",")})`;
}

function clock(second) {
  return new Date(second * 1000).toISOString().slice(11, DATA.end - DATA.start < 600 ? 19 : 16);
}

function stacked(series) {
  const sums = [];
  return series.map((row) => row.values.map((value, index) => {
    sums[index] = (sums[index] || 0) + (value || 0);
    return sums[index];
  }));
}

function lines(box, panel) {
  // Of a stack the largest sum is drawn first, so that the areas below it stay visible.
  const order = panel.series.map((_, index) => index);
  let values = panel.series.map((row) => row.values);
  if (panel.stacked) {
    values = stacked(panel.series).reverse();
    order.reverse();
  }
  const width = box.clientWidth - 16;
  const axis = (extra) => ({ stroke: "#6a737d", font: "10px sans-serif", grid: { stroke: "#eceef0", width: 1 },
    ticks: { show: false }, ...extra });
  new uPlot({
    width, height: 165, padding: [8, 8, 0, 0], legend: { show: false }, cursor: { show: false },
    scales: { y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] } },
    axes: [
      axis({ size: 24, space: 70, values: (_, ticks) => ticks.map(clock) }),
      axis({ size: 62, values: (_, ticks) => ticks.map((tick) => shown(tick, panel.unit)) }),
    ],
    series: [{}, ...order.map((index) => {
      const color = COLORS[index % COLORS.length];
      return { stroke: color, width: 1.2, spanGaps: false, points: { show: false },
        fill: panel.stacked ? pale(color) : undefined };
    })],
  }, [times(panel), ...values], box);
  legend(box, panel);
}

function legend(box, panel) {
  const list = element("div", "", box);
  list.className = "legend";
  panel.series.forEach((row, index) => {
    const entry = element("span", "", list);
    element("i", "", entry).style.background = COLORS[index % COLORS.length];
    entry.append(row.name);
  });
  if (panel.left) element("span", `and ${panel.left} more`, list);
}

function heatmap(box, panel) {
  // Buckets are cumulative, ascending by bound: a cell is what its bound has more than the one below it.
  const rows = panel.series.map((row, index) => row.values.map((value, column) => {
    const below = index ? panel.series[index - 1].values[column] || 0 : 0;
    return Math.max(0, (value || 0) - below);
  }));
  const used = rows.map((row, index) => [row, panel.series[index].name]).filter(([row]) => Math.max(...row) > 0);
  if (!used.length) return nothing(box);
  const canvas = element("canvas", "", box);
  canvas.className = "heat";
  canvas.width = rows[0].length;
  canvas.height = used.length;
  const most = Math.max(...used.map(([row]) => Math.max(...row)));
  const context = canvas.getContext("2d");
  used.forEach(([row], index) => row.forEach((value, column) => {
    context.fillStyle = value > 0 ? `rgba(214, 84, 0, ${0.12 + 0.88 * value / most})` : "#fafafa";
    context.fillRect(column, used.length - 1 - index, 1, 1);
  }));
  const ends = element("div", "", box);
  ends.className = "ends";
  const bound = (name) => name === "+Inf" ? "more" : "up to " + shown(Number(name), panel.unit);
  element("span", `bottom: ${bound(used[0][1])}, top: ${bound(used[used.length - 1][1])}`, ends);
  element("span", `darkest: ${digits(most)} a second`, ends);
}

function nothing(box) {
  element("div", "no data", box).className = "none";
}

function draw() {
  const uid = location.hash.slice(1);
  const page = DATA.pages.find((one) => one.uid === uid) || DATA.pages[0];
  const nav = document.querySelector("nav");
  nav.replaceChildren();
  for (const one of DATA.pages) {
    const link = element("a", one.title, nav);
    link.href = "#" + one.uid;
    if (one === page) link.className = "on";
  }
  const from = new Date(DATA.start * 1000).toISOString(), to = new Date(DATA.end * 1000).toISOString();
  document.querySelector(".note").textContent =
    `${page.text} Preview from ${DATA.source}, ${from.slice(0, 19)} to ${to.slice(0, 19)} UTC; not Grafana.`;
  const main = document.querySelector("main");
  main.replaceChildren();
  for (const panel of page.panels) {
    if (panel.row) element("h2", panel.row, main);
    const box = element("section", "", main);
    box.style.gridColumn = `span ${panel.width}`;
    box.title = panel.text;
    element("h3", panel.title, box);
    if (!panel.series.some((row) => row.values.some((value) => value !== null))) nothing(box);
    else if (panel.kind === "stat") stat(box, panel);
    else if (panel.kind === "heatmap") heatmap(box, panel);
    else lines(box, panel);
  }
}

window.addEventListener("hashchange", draw);
draw();
