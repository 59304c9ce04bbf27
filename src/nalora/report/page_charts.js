// A chart: a figure with its caption, plot, legend, summary for screen readers and data table.
// figure() returns {traces, layout, legend?, note?, about?, title?, height?, spoken?} or {missing: sentence}.
const charts = [];
let printing = false;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Sentences set `commands` between backticks.
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));

function addChart(section, id, title, about, figure, options = {}) {
  const plot = element("div", { class: "plot", role: "img", id: `plot-${id}` });
  const legend = element("ul", { class: "legend", "aria-hidden": "true" });
  const note = element("p", { class: "note", hidden: "" });
  const thin = element("p", { class: "thin", hidden: "" });
  const table = element("details", {}, element("summary", {}, "Data table"));
  const heading = element("h3", {}, title);
  const words = element("p", options.live ? { "aria-live": "polite" } : {}, about);
  const caption = element("figcaption", {}, heading, words);
  const box = element("figure", { id: `chart-${id}` }, caption, note, plot, legend, thin, table);
  if (options.wide) box.classList.add("wide");
  document.querySelector(`[data-section="${section}"]`).append(box);
  const chart = { id, title, figure, about, words, plot, legend, note, thin, table, box, heading, stale: true, seen: false, ...options };
  table.addEventListener("toggle", () => table.open && fillTable(chart));
  charts.push(chart);
  return chart;
}

function baseLayout(height) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--faint"), automargin: true, title: { standoff: 10 } };
  return {
    height, margin: { l: 52, r: 12, t: 8, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" }, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--faint"), font: { color: css("--ink") }, namelength: -1 },
    xaxis: { ...axis }, yaxis: { ...axis }, dragmode: window.innerWidth < 700 ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--ink") },
  };
}

function merged(base, extra) {
  const result = { ...base };
  for (const [key, value] of Object.entries(extra || {})) {
    const both = value && typeof value === "object" && !Array.isArray(value) && result[key];
    result[key] = both ? merged(result[key], value) : value;
  }
  return result;
}

// Between the margins of an A4 page.
const PRINTED_WIDTH = 680;
const PLOT_OPTIONS = {
  displaylogo: false, showTips: false,
  // On touch screens, which have no hover, it would cover the chart permanently.
  displayModeBar: window.matchMedia("(hover: none)").matches ? false : "hover",
  modeBarButtons: [["zoom2d", "resetScale2d", "toImage"]],
};

function draw(chart) {
  const figure = chart.figure();
  const missing = figure.missing;
  chart.stale = false;
  delete chart.box.dataset.stale;
  chart.last = figure;
  chart.note.hidden = !missing;
  chart.note.replaceChildren(...withCode(missing || ""));
  chart.thin.hidden = !figure.note;
  chart.thin.replaceChildren(...withCode(figure.note || ""));
  chart.words.textContent = [chart.about, figure.about].filter(Boolean).join(" ");
  chart.plot.hidden = chart.legend.hidden = chart.table.hidden = Boolean(missing);
  if (missing) {
    Plotly.purge(chart.plot);
    return;
  }
  if (figure.title) chart.heading.textContent = figure.title;
  const layout = withLiteralTitles(merged(baseLayout(figure.height || 300), figure.layout));
  layout.width = printing ? PRINTED_WIDTH : chart.plot.clientWidth;
  Plotly.react(chart.plot, figure.traces.map(withLiteralNames), layout, PLOT_OPTIONS);
  chart.plot.setAttribute("aria-label", `${chart.heading.textContent}. ${figure.spoken || described(figure.traces)}`);
  chart.legend.replaceChildren(...(figure.legend || []).map(legendItem));
  if (chart.table.open) fillTable(chart);
  if (chart.onClick && !chart.listening) {
    chart.listening = true;
    chart.plot.on("plotly_click", (event) => chart.onClick(event.points[0]));
  }
}

// Plotly interprets tags and links in all texts: names, categories and titles become literal here, the parts of hover
// templates where the template is written.
function withLiteralNames(trace) {
  const made = { ...trace };
  if (made.name !== undefined) made.name = literal(inLines(made.name));
  for (const axis of ["x", "y"]) {
    if (Array.isArray(made[axis]) && typeof made[axis][0] === "string") made[axis] = made[axis].map(literal);
  }
  return made;
}

function withLiteralTitles(layout) {
  const made = { ...layout };
  for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
    const title = made[axis] && made[axis].title;
    if (title && title.text) made[axis] = { ...made[axis], title: { ...title, text: literal(inLines(title.text)) } };
  }
  return made;
}

function legendItem({ name, colour: stroke, dash: line, box }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  const shape = document.createElementNS(svg.namespaceURI, box ? "rect" : "line");
  const place = box ? { x: 6, width: 14, height: 10, fill: stroke } : { x1: 0, x2: 26, y1: 5, y2: 5, stroke, "stroke-width": 3 };
  for (const [key, value] of Object.entries(place)) shape.setAttribute(key, value);
  if (line && line !== "solid" && !box) shape.setAttribute("stroke-dasharray", line);
  svg.append(shape);
  return element("li", { title: name }, svg, brief(name));
}

// A summary of the traces for screen readers.
function described(traces) {
  const parts = traces.filter((trace) => trace.hoverinfo !== "skip").slice(0, 12).map((trace) => {
    if (trace.type === "heatmap") {
      const all = extent(trace.z.flatMap((row) => Array.from(row)));
      return all ? `${trace.y.length} layers, values from ${shown(all[0])} to ${shown(all[1])}` : "no values";
    }
    const flat = trace.orientation === "h";
    const values = Array.from(flat ? trace.x : trace.y).filter((v) => v !== null && !Number.isNaN(v));
    if (!values.length) return "";
    const low_high = extent(values);
    return `${trace.name || "values"}: from ${shown(values[0])} to ${shown(values[values.length - 1])}, `
      + `lowest ${shown(low_high[0])}, highest ${shown(low_high[1])}`;
  });
  return parts.filter(Boolean).join("; ") + ".";
}

const MOST_ROWS = 250;
function spread(count, most) {
  if (count <= most) return range(count);
  return range(most).map((i) => Math.round((i * (count - 1)) / (most - 1)));
}

function fillTable(chart) {
  if (!chart.last || chart.last.missing) return;
  const traces = chart.last.traces.filter((trace) => trace.hoverinfo !== "skip");
  const heat = traces.find((trace) => trace.type === "heatmap");
  const [head, rows, note] = heat ? heatRows(heat) : lineRows(traces);
  const cells = (values, name) => values.map((value, i) =>
    i || name === "th" ? element(name, name === "th" ? { scope: "col" } : {}, shown(value))
      : element("th", { scope: "row" }, shown(value)));
  const table = element("table", {},
    element("thead", {}, element("tr", {}, ...cells(head, "th"))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td")))));
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Data: ${chart.title}` }, table);
  chart.table.replaceChildren(chart.table.firstChild, ...(note ? [element("p", {}, note)] : []), scroll);
}

function heatRows(trace) {
  const columns = spread(trace.x.length, 24);
  const note = columns.length < trace.x.length ? `${columns.length} of ${trace.x.length} columns.` : "";
  const rows = range(trace.y.length).map((i) => [trace.y[i], ...columns.map((j) => trace.z[i][j])]);
  return [["", ...columns.map((j) => String(trace.x[j]))], rows, note];
}

function lineRows(traces) {
  const flat = traces[0].orientation === "h";
  const [along, values] = flat ? ["y", "x"] : ["x", "y"];
  const rows = new Map();
  traces.forEach((trace, column) => {
    Array.from(trace[along]).forEach((key, i) => {
      if (!rows.has(key)) rows.set(key, Array(traces.length).fill(null));
      rows.get(key)[column] = trace[values][i];
    });
  });
  const keys = [...rows.keys()];
  if (typeof keys[0] === "number") keys.sort((a, b) => a - b);
  const kept = spread(keys.length, MOST_ROWS);
  const note = kept.length < keys.length ? `${kept.length} of ${keys.length.toLocaleString("en")} rows.` : "";
  return [["", ...traces.map((trace) => trace.name || "value")], kept.map((i) => [keys[i], ...rows.get(keys[i])]), note];
}

// Charts are drawn when they are scrolled into view, so that a page with many charts opens as fast as one with few.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((other) => other.box === entry.target);
    chart.seen = entry.isIntersecting;
    // One at a time, so that the first is visible before the last is drawn.
    if (chart.seen && chart.stale) setTimeout(() => chart.stale && draw(chart));
  }
  drawAhead(1500);
}, { rootMargin: "300px" });

// The others are drawn while the browser is idle, for fast scrolling and for screenshots.
const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 100));
let ahead = false;
function drawAhead(wait = 0) {
  if (ahead) return;
  ahead = true;
  setTimeout(() => whenIdle(() => {
    ahead = false;
    const next = window.Plotly && charts.find((chart) => chart.stale);
    if (!next) return;
    draw(next);
    drawAhead();
  }), wait);
}

function redraw() {
  if (!window.Plotly) return;
  for (const chart of charts) {
    chart.stale = true;
    chart.box.dataset.stale = "";
    if (chart.seen || printing) draw(chart);
  }
  drawAhead();
}
