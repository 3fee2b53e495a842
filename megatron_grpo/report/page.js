"use strict";
// Draws every figure of the page from its data block, and lets a reader show or hide arms and byte kinds.
// Colours of text and grid come from the style sheet, so that dark mode and print need no redrawing.
const data = JSON.parse(document.getElementById("data").textContent);
const MANY = 6; // arms beyond which bands and one label for all of them would hide the curves
const FLAT_PX = 330, WIDE_PX = 680; // widths on paper
const hidden = { arm: new Set(), kind: new Set() };
let bands = data.arms.length <= MANY;
let stackedArm = 0;

// Plotly reads a few tags in texts; names are only text.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text) => plain(text.length > 24 ? text.slice(0, 23) + "…" : text);
const digits = (value) => Number(value.toPrecision(4)).toString();
const shade = (color) => `rgba(${[1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)).join(",")},0.16)`;

function band(curve) {
  const { color } = data.arms[curve.arm];
  const at = curve.stderr.flatMap((error, index) => (error === null ? [] : [index]));
  const edge = (sign) => at.map((index) => curve.mean[index] + sign * curve.stderr[index]);
  return {
    type: "scatter", mode: "lines", x: at.concat(at.slice().reverse()).map((index) => curve.ticks[index]),
    y: edge(1).concat(edge(-1).reverse()), fill: "toself", fillcolor: shade(color), line: { width: 0, color },
    hoverinfo: "skip", meta: { arm: curve.arm, band: true },
  };
}

function line(curve) {
  const { name, color, dash } = data.arms[curve.arm];
  const text = curve.mean.map((mean, index) => {
    const error = curve.stderr[index] === null ? "" : ` ± ${digits(curve.stderr[index])}`;
    return `${digits(mean)}${error}${data.seeds > 1 ? ` (n ${curve.n[index]})` : ""}`;
  });
  return {
    type: "scatter", mode: curve.ticks.length > 40 ? "lines" : "lines+markers", x: curve.ticks, y: curve.mean,
    name: short(name), text, hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    line: { color, dash, width: 1.8 }, marker: { color, size: 4 }, meta: { arm: curve.arm },
  };
}

function curvesFigure(plot) {
  const traces = plot.curves.filter((curve) => curve.stderr.some((error) => error !== null)).map(band);
  const layout = { xaxis: { title: { text: "tick" }, range: data.tickRange }, yaxis: { title: { text: plot.unit } } };
  if (plot.fromZero) layout.yaxis.rangemode = "tozero";
  if (plot.level) {
    const [value, meaning] = plot.level;
    layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { width: 1, dash: "dot" } }];
    layout.annotations = [{
      xref: "paper", x: 0, y: value, text: meaning, showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 11 },
    }];
  }
  layout.hovermode = data.arms.length <= MANY ? "x unified" : "closest";
  return { traces: traces.concat(plot.curves.map(line)), layout };
}

function armsFigure(plot) {
  const labels = plot.arms.map((arm) => short(data.arms[arm].name));
  const y = plot.arms.map((_, index) => index);
  const traces = Object.entries(plot.byKind).map(([kind, values]) => ({
    type: "bar", orientation: "h", y, x: values, name: data.kinds[kind].label, marker: { color: data.kinds[kind].color },
    hovertemplate: `%{x:.4g} ${plot.unit}<extra>%{fullData.name}</extra>`, meta: { kind },
  }));
  for (const [key, symbol] of [["equivalent", "line-ns"], ["total", "diamond-tall"]]) {
    traces.push({
      type: "scatter", mode: "markers", y, x: plot[key], name: data.dense[key].label,
      marker: { symbol, size: symbol === "line-ns" ? 15 : 8, color: data.dense[key].color, line: { width: 2.5, color: data.dense[key].color } },
      hovertemplate: `%{x:.4g} ${plot.unit}<extra>%{fullData.name}</extra>`, meta: { kind: key },
    });
  }
  return {
    traces,
    layout: {
      barmode: "stack", hovermode: "closest", height: 70 + 26 * y.length, xaxis: { title: { text: plot.unit + " a tick" } },
      yaxis: { tickvals: y, ticktext: labels, range: [y.length - 0.4, -0.6], automargin: true },
    },
  };
}

function ticksFigure(plots) {
  const plot = plots.find((each) => each.arm === stackedArm) || plots[0];
  const traces = Object.entries(plot.byKind).map(([kind, values]) => ({
    type: "bar", x: plot.ticks, y: values, width: plot.width, name: data.kinds[kind].label,
    marker: { color: data.kinds[kind].color, line: { width: 0 } },
    hovertemplate: `%{y:.4g} ${plot.unit}<extra>%{fullData.name}</extra>`, meta: { kind },
  }));
  for (const [key, dash] of [["equivalent", "solid"], ["total", "dot"]]) {
    traces.push({
      type: "scatter", mode: plot.ticks.length > 1 ? "lines" : "markers", x: plot.ticks, y: plot[key], name: data.dense[key].label,
      line: { shape: "hvh", width: 1.5, dash, color: data.dense[key].color }, marker: { color: data.dense[key].color },
      hovertemplate: `%{y:.4g} ${plot.unit}<extra>%{fullData.name}</extra>`, meta: { kind: key },
    });
  }
  return {
    traces,
    layout: {
      barmode: "stack", hovermode: "x unified", xaxis: { title: { text: "tick" }, range: data.tickRange },
      yaxis: { title: { text: plot.unit + " a tick" }, rangemode: "tozero" },
    },
  };
}

const visible = ({ arm, kind, band: isBand }) =>
  !hidden.arm.has(String(arm)) && !hidden.kind.has(kind) && (!isBand || bands);

const builders = { curves: curvesFigure, arms: armsFigure, ticks: (plot) => ticksFigure(plot.arms) };
const figures = [...document.querySelectorAll(".plot")];
const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page; it does not draw zoom boxes

function draw(div) {
  const plot = data.plots[Number(div.dataset.plot)];
  const { traces, layout } = builders[plot.type](plot);
  for (const trace of traces) trace.visible = visible(trace.meta);
  const axis = { zeroline: false, fixedrange: coarse, ticks: "", title: { standoff: 6 } };
  layout.xaxis = { ...axis, ...layout.xaxis, title: { ...axis.title, ...layout.xaxis.title } };
  layout.yaxis = { ...axis, ...layout.yaxis, title: { ...axis.title, ...layout.yaxis.title } };
  div.style.height = `${layout.height || 260}px`;
  return Plotly.react(div, traces, {
    margin: { l: 54, r: 10, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12 }, showlegend: false, hoverlabel: { namelength: -1 },
    dragmode: coarse ? false : "zoom", modebar: { bgcolor: "rgba(0,0,0,0)" }, ...layout,
  }, { responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover", modeBarButtons: [["toImage", "resetScale2d"]] });
}

function refresh() {
  for (const button of document.querySelectorAll("button[data-group]")) {
    button.setAttribute("aria-pressed", String(!hidden[button.dataset.group].has(button.dataset.value)));
  }
  for (const button of document.querySelectorAll("button[data-act=bands]")) button.setAttribute("aria-pressed", String(bands));
  for (const div of figures) Plotly.restyle(div, { visible: div.data.map((trace) => visible(trace.meta)) });
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { group, value, act } = button.dataset;
  if (group) hidden[group].delete(value) || hidden[group].add(value);
  if (act === "all") hidden.arm.clear();
  if (act === "none") data.arms.forEach((_, index) => hidden.arm.add(String(index)));
  if (act === "bands") bands = !bands;
  refresh();
});
document.addEventListener("change", (event) => {
  stackedArm = Number(event.target.value);
  figures.filter((div) => data.plots[Number(div.dataset.plot)].type === "ticks").forEach(draw);
});
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  for (const div of figures) Plotly.relayout(div, { width: div.parentElement.matches(".wide") ? WIDE_PX : FLAT_PX });
});
addEventListener("afterprint", () => figures.forEach((div) => Plotly.relayout(div, { width: null, autosize: true })));

figures.forEach(draw);
refresh();
