// Every chart of the page, in the order of its sections.
const runs = report.runs;
const state = { chosen: new Set(range(runs.length)), detail: 0, layer: null, channel: null, followed: false, measure: "D_sel", mode: "value" };
const chosen = () => range(runs.length).filter((i) => state.chosen.has(i));
const detail = () => runs[state.detail];
const runLegend = (indices, line = dash) => indices.map((i) => ({ name: runs[i].name, colour: colour(i), dash: line(i) }));
const MOST_TOLD = 4;
const NO_RUN = "No run is chosen: tick one above.";

// The sentence that stands in place of a chart: what each of the runs lacks.
const whyMissing = (run, topics) => [topics].flat().map((topic) => run.missing[topic]).find(Boolean);
function lacking(indices, topics) {
  const said = indices.map((i) => [runs[i].name, whyMissing(runs[i], topics)]).filter(([, why]) => why);
  const all = said.length > 0 && said.every(([, why]) => why === said[0][1]);
  if (!said.length) return "No run that is chosen has this.";
  if (runs.length === 1 || (all && said.length === runs.length)) return said[0][1];
  const told = said.length > MOST_TOLD ? said.slice(0, MOST_TOLD - 1) : said;
  const more = said.length - told.length;
  return told.map(([name, why]) => `${name}: ${why}`).join(" ") + (more ? ` And so for ${more} more runs.` : "");
}

function lines(indices, pick, layout, options = {}) {
  if (!indices.length) return { missing: NO_RUN };
  const traces = [], legend = [], without = [];
  let bold = false;
  // Dashes between markers are no line any more.
  const drawn = options.markers ? () => "solid" : dash;
  for (const i of indices) {
    const xy = pick(runs[i]);
    if (!xy || !xy.x.length) { without.push(i); continue; }
    const line = { color: colour(i), dash: drawn(i), width: 2 };
    const mode = xy.x.length < 3 || options.markers ? "lines+markers" : "lines";
    const soft = options.smooth ? smoothed(xy.y) : null;
    traces.push({
      type: "scatter", mode, x: xy.x, y: xy.y, name: runs[i].name, line: soft ? { ...line, width: 1, dash: "solid" } : line,
      marker: { symbol: i < 8 ? "circle" : "diamond" },
      opacity: soft ? 0.45 : 1,
      hovertemplate: `${options.along || "step"} %{x}<br>${options.what || "value"} %{y:.5~g}<extra>%{fullData.name}</extra>`,
    });
    bold = bold || Boolean(soft);
    if (soft) traces.push({ type: "scatter", mode: "lines", x: xy.x, y: soft, name: `${runs[i].name}, smoothed`, line, hoverinfo: "skip" });
    legend.push(i);
  }
  if (!traces.length) return { missing: lacking(indices, options.topic) };
  const notes = without.map((i) => `Not shown, ${runs[i].name}: ${whyMissing(runs[i], options.topic) || "it has none."}`);
  for (const i of legend) {
    const { logged, x } = pick(runs[i]);
    if (logged > x.length) notes.push(`${runs[i].name}: ${x.length.toLocaleString("en")} of ${logged.toLocaleString("en")} logged steps.`);
  }
  return { traces, layout, legend: runLegend(legend, drawn), height: options.height, note: notes.join(" "), about: bold ? "Bold: a running mean." : "" };
}

const metric = (run, name) => ({ x: numbers(run.metrics[name].x), y: numbers(run.metrics[name].y), logged: run.metrics[name].logged });
const steps_axis = { xaxis: { title: { text: "step" } } };

function loss() {
  return lines(chosen(), (run) => metric(run, "loss"), merged(steps_axis, { yaxis: { title: { text: "loss" } } }),
    { smooth: true, what: "loss", topic: "metrics" });
}

// Base and runs as points with their intervals, one under the other.
function answered(task, measure) {
  return () => {
    const rows = [];
    const bases = new Set();
    for (const i of range(runs.length)) {
      const asked = runs[i].evaluations[task] || {};
      for (const who of ["base", "adapted"]) {
        const score = asked[who] && asked[who].scores[measure];
        if (!score || score.value === null || (who === "adapted" && !state.chosen.has(i))) continue;
        const key = JSON.stringify(score);
        if (who === "base" && bases.has(key)) continue;
        if (who === "base") bases.add(key);
        rows.push({ name: who === "base" ? "base" : tick(runs[i].name), whole: who === "base" ? "base" : runs[i].name, score, colour: who === "base" ? css("--faint") : colour(i), base: who === "base" });
      }
    }
    rows.sort((a, b) => b.base - a.base);
    if (!rows.length) return { missing: NO_RUN };
    const traces = rows.map((row) => {
      const [low, high] = row.score.interval || [row.score.value, row.score.value];
      return {
        type: "scatter", mode: "markers", orientation: "h", name: row.name, x: [row.score.value], y: [row.name],
        marker: { color: row.colour, size: 11, symbol: row.base ? "diamond" : "circle" },
        error_x: { type: "data", symmetric: false, array: [high - row.score.value], arrayminus: [row.score.value - low], color: row.colour, thickness: 2, width: 6 },
        hovertemplate: `${literal(inLines(measure))} %{x:.5~g}<br>95 % interval ${shown(low)} … ${shown(high)}<extra>${literal(inLines(row.whole))}</extra>`,
      };
    });
    const spoken = rows.map((r) => `${r.whole} ${shown(r.score.value)}, interval ${(r.score.interval || []).map((v) => shown(v)).join(" to ")}`).join("; ");
    const layout = { xaxis: { title: { text: measure } }, yaxis: { type: "category", range: [rows.length - 0.5, -0.5] } };
    return { traces, layout, spoken, height: 90 + Math.max(rows.length > 6 ? 22 : 34, 8 + 18 * Math.max(...rows.map((row) => linesIn(row.name)))) * rows.length };
  };
}

function heat(source, name, colorbar, about) {
  const z = numbers(source.columns[name]);
  const first = z.map((row) => row[0]);
  const change = state.mode === "change" && source.steps.length > 1;
  const values = change ? z.map((row, i) => row.map((v) => v - first[i])) : z;
  const bounds = extent(values.flatMap((row) => Array.from(row))) || [0, 1];
  const most = Math.max(Math.abs(bounds[0]), Math.abs(bounds[1])) || 1;
  const trace = {
    type: "heatmap", x: source.steps, y: source.labels, z: values, name: colorbar, customdata: z,
    colorscale: change ? diverging() : SEQUENTIAL, zmin: change ? -most : bounds[0], zmax: change ? most : bounds[1],
    colorbar: { thickness: 12, outlinewidth: 0, tickfont: { size: 11 } },
    hovertemplate: `layer %{y}, step %{x}<br>${colorbar} %{customdata:.5~g}`
      + (change ? "<br>change %{z:+.4~g}" : "") + "<extra></extra>",
  };
  return { traces: [trace], layout: heatLayout("step", source.labels.length), height: heatHeight(source.labels.length), note: about };
}

const heatHeight = (rows) => Math.max(150, Math.min(420, 9 * rows + 90));
const heatLayout = (along, rows) => ({
  xaxis: { title: { text: along }, showgrid: false },
  yaxis: { title: { text: "layer" }, type: "category", showgrid: false, nticks: Math.min(rows, 9) },
  dragmode: false,
});

function gateHeat(name, words) {
  return () => {
    const gates = detail().gates;
    const ofMask = name === "kept_share" || name === "stability";
    if (!gates || !gates.columns[name] || (ofMask && detail().missing.mask)) return { missing: lacking([state.detail], ["gates", "mask"]) };
    const notes = [];
    if (gates.steps.length < gates.logged) notes.push(`Shown: ${gates.steps.length} of ${gates.logged.toLocaleString("en")} logged steps, evenly spread.`);
    const off = gates.mask_off.filter(Boolean);
    if (ofMask && off.length) notes.push(`The mask does not act on ${off.length} of ${gates.labels.length} layers: ${[...new Set(off)].join("; ")}.`);
    return heat(gates, name, words, notes.join(" "));
  };
}

function scales() {
  const parts = [["scale_gate", "gate", "solid"], ["scale_up", "up", "dash"], ["scale_down", "down", "dot"]];
  const traces = [], legend = [], notes = [];
  if (!chosen().length) return { missing: NO_RUN };
  for (const i of chosen()) {
    const gates = runs[i].gates;
    const row = gates ? gates.labels.indexOf(state.layer) : -1;
    if (row < 0) continue;
    if (gates.scaling_off[row]) {
      notes.push(`${runs[i].name}: the steps of layer ${state.layer} are not scaled (${gates.scaling_off[row]}).`);
      continue;
    }
    for (const [column, name, line] of parts) {
      if (!gates.columns[column]) continue;
      const title = runs.length > 1 ? `${brief(runs[i].name)}: ${name}` : name;
      traces.push({
        type: "scatter", mode: gates.steps.length < 3 ? "lines+markers" : "lines", x: gates.steps, y: numbers(gates.columns[column])[row],
        name: title, line: { color: colour(i), dash: line, width: 2 },
        hovertemplate: `step %{x}<br>${name} × %{y:.5~g}<extra>${literal(inLines(runs[i].name))}</extra>`,
      });
      legend.push({ name: title, colour: colour(i), dash: line });
    }
  }
  if (!traces.length) return { missing: notes.join(" ") || lacking(chosen(), "gates") };
  return { traces, legend, note: notes.join(" "), layout: merged(steps_axis, { yaxis: { title: { text: "step scale" } } }), title: `Step scales in layer ${state.layer}` };
}

// κ above, where the data lies below, the bounds of the responsive regime through both.
function curve() {
  const run = detail();
  const source = run.diagnosis || run.gates;
  const row = source ? source.labels.indexOf(state.layer) : -1;
  if (row < 0) return { missing: lacking([state.detail], run.diagnosis ? "diagnosis" : "gates") };
  const activation = source.activations[row];
  const known = run.curves[activation];
  if (!known) return { missing: `The curve of ${activation} is not known here: it is a function of your own.` };
  const bounds = (source.thresholds[row] || []).filter((v) => v !== null);
  const hist = run.diagnosis && run.diagnosis.histogram;
  const traces = [{
    type: "scatter", mode: "lines", x: numbers(known.z), y: numbers(known.kappa), name: "κ", yaxis: "y",
    line: { color: css("--ink"), width: 2 }, hovertemplate: "z %{x:.3~g}<br>κ %{y:.4~g}<extra></extra>",
  }];
  const legend = [{ name: `κ of ${activation}`, colour: css("--ink") }];
  if (bounds.length) legend.push({ name: "bounds of the responsive regime", colour: css("--note-edge"), dash: "dash" });
  const edges = hist ? hist.edges : null;
  const z_range = edges ? [Math.max(edges[0], -6), Math.min(edges[edges.length - 1], 6)] : [-6, 6];
  if (hist) {
    const middle = range(edges.length - 1).map((k) => (edges[k] + edges[k + 1]) / 2);
    hist.steps.forEach((step, k) => {
      const counts = (hist.counts[k] || [])[row] || [];
      if (!counts.length) return;
      const total = counts.reduce((a, b) => a + b, 0) || 1;
      const paint = k ? colour(1) : colour(0);
      traces.push({
        type: "scatter", mode: "lines", x: middle, y: counts.map((c) => c / total), customdata: counts, yaxis: "y2", name: `data at step ${step}`,
        line: { color: paint, shape: "hvh", width: 2, dash: k ? "solid" : "dash" }, ...(k ? {} : { fill: "tozeroy", fillcolor: `${paint}22` }),
        hovertemplate: "z near %{x:.3~g}<br>%{y:.4~g} of the values (%{customdata:,})<extra>%{fullData.name}</extra>",
      });
      legend.push({ name: `data at step ${step}`, colour: paint, dash: k ? "solid" : "dash" });
    });
  }
  const shapes = bounds.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: css("--note-edge"), dash: "dash", width: 1.5 } }));
  const layout = {
    shapes, xaxis: { title: { text: "gate input z" }, range: z_range, anchor: hist ? "y2" : "y" },
    yaxis: { title: { text: "κ" }, domain: hist ? [0.46, 1] : [0, 1] },
    ...(hist ? { yaxis2: { title: { text: "share" }, domain: [0, 0.38], rangemode: "tozero", gridcolor: css("--line"), automargin: true } } : {}),
  };
  const note = hist ? "" : `The data's histogram comes with a diagnosis. ${run.missing.diagnosis || ""}`;
  return { traces, legend, layout, note, height: hist ? 420 : 300, title: `κ of ${activation} in layer ${state.layer}, with the data under it` };
}

const MEASURES = {
  D_sel: "gate movement D_sel", flip: "regime flips", kappa_drift: "κ drift", suppressive: "suppressive crossings",
  positive: "positive crossings", severe: "severe jumps", D_EH: "homogeneity movement D_EH",
  D_EH_live: "D_EH of live gates",
};
const DEAD_GATES = "χ grows without bound where a gate's output vanishes (as −z² for GELU), so closed gates can carry nearly all of D_EH. D_EH of live gates counts every gate by its output, min(|φ(z)|, |φ(z′)|, 1).";
// Which part of D_EH is left when gates count by their output.
function liveShare(found) {
  if (!state.measure.startsWith("D_EH")) return "";
  const [all, live] = ["D_EH", "D_EH_live"].map((name) => {
    const values = found.cumulative[name];
    return values && values.every((v) => typeof v === "number") ? values.reduce((a, b) => a + b, 0) : null;
  });
  const share = all && live !== null ? ` Of this run's D_EH, summed over layers and intervals, ${shown(100 * live / all, 3)} % is left so.` : "";
  return DEAD_GATES + share;
}
const interval_name = ([from, to]) => `${from} → ${to}`;

function movedHeat() {
  const found = detail().diagnosis;
  if (!found || !found.ends.length) return { missing: found ? "The diagnosis compares no two snapshots." : lacking([state.detail], "diagnosis") };
  const z = numbers(found.measures[state.measure]);
  if (!extent(z.flatMap((row) => Array.from(row)))) return { missing: "This measure has no value here: the activations have no regimes, or the diagnosis was made by an earlier version of nalora." };
  const words = MEASURES[state.measure];
  const trace = {
    type: "heatmap", x: found.ends.map(interval_name), y: found.labels, z, name: words, colorscale: SEQUENTIAL,
    colorbar: { thickness: 12, outlinewidth: 0 }, hovertemplate: `layer %{y}, steps %{x}<br>${words} %{z:.5~g}<extra></extra>`,
  };
  const layout = merged(heatLayout("from step → to step", found.labels.length), { xaxis: { type: "category" } });
  return { traces: [trace], layout, height: heatHeight(found.labels.length), note: liveShare(found), title: `Per layer: ${words}` };
}

function movedLayer() {
  const words = MEASURES[state.measure];
  const figure = lines(chosen(), (run) => {
    const row = run.diagnosis ? run.diagnosis.labels.indexOf(state.layer) : -1;
    if (row < 0) return null;
    const y = numbers(run.diagnosis.measures[state.measure])[row];
    return extent(y) ? { x: run.diagnosis.ends.map((e) => e[1]), y } : null;
  }, { xaxis: { title: { text: "up to step" } }, yaxis: { title: { text: words }, rangemode: "tozero" } },
  { markers: true, what: words, topic: "diagnosis" });
  const found = detail().diagnosis;
  const row = found ? found.labels.indexOf(state.layer) : -1;
  const [sum, ends] = ["cumulative", "first_to_last"].map((key) => row >= 0 && found[key][state.measure] && found[key][state.measure][row]);
  const about = typeof sum === "number" && typeof ends === "number"
    ? `${detail().name}: ${shown(sum, 4)} summed over the intervals, ${shown(ends, 4)} from the first to the last.` : "";
  return { ...figure, about, title: `Layer ${state.layer}: ${words}` };
}
