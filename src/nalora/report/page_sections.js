// The state of the controls, the kinds of charts, and the charts of the results and of the gates.
const runs = report.runs;
const state = { chosen: new Set(range(runs.length)), detail: 0, layer: null, channel: null, followed: false, measure: "D_sel", mode: "value", difference: false };
const chosen = () => range(runs.length).filter((i) => state.chosen.has(i));
const detail = () => runs[state.detail];
const MOST_REASONS = 4;
const NO_RUN = "No run is selected: select one above.";
const heading = (name) => ({ title: { text: name } });
// Of a few steps, the ticks between them would be no steps.
const FEW_STEPS = 12;
function stepsAxis(name, traces) {
  const [low, high] = extent(traces.flatMap((trace) => Array.from(trace.x))) || [0, 0];
  return { ...heading(name), ...(name === "step" && high - low < FEW_STEPS ? { dtick: 1 } : {}) };
}
const layersAxis = { ...heading("layer"), type: "category", nticks: 12 };
const count = (number) => number.toLocaleString("en");

// The sentence in place of a chart: why each of these runs has no values.
const whyMissing = (run, topics) => topics.map((topic) => run.missing[topic]).find(Boolean);
function lacking(indices, topics) {
  const reasons = indices.map((i) => [runs[i].name, whyMissing(runs[i], topics)]).filter(([, why]) => why);
  if (!reasons.length) return "No selected run has these values.";
  if (reasons.length === runs.length && reasons.every(([, why]) => why === reasons[0][1])) return reasons[0][1];
  const listed = reasons.length > MOST_REASONS ? reasons.slice(0, MOST_REASONS - 1) : reasons;
  const more = reasons.length - listed.length;
  return listed.map(([name, why]) => `${name}: ${why}`).join(" ") + (more ? ` The same applies to ${more} more runs.` : "");
}

// A line for each selected run. `chart` is a description of charts.py; pick(run) returns {x, y, mean?, logged?} or null.
function lines(pick, chart) {
  const traces = [], legend = [], notes = [];
  if (!chosen().length) return { missing: NO_RUN };
  let smoothed = false;
  for (const i of chosen()) {
    const { name } = runs[i];
    const line = pick(runs[i]);
    if (!line || !line.x.length) {
      notes.push(`Not shown, ${name}: ${whyMissing(runs[i], chart.topics) || "no values."}`);
      continue;
    }
    // Dashes between markers are not visible.
    const stroke = { color: colour(i), dash: chart.markers ? "solid" : dash(i), width: 2 };
    traces.push({
      type: "scatter", mode: line.x.length < 3 || chart.markers ? "lines+markers" : "lines", x: line.x, y: line.y, name,
      line: line.mean ? { ...stroke, width: 1, dash: "solid" } : stroke, opacity: line.mean ? 0.45 : 1,
      marker: { symbol: i < COLOURS.light.length ? "circle" : "diamond" },
      hovertemplate: `${chart.x} %{x}<br>${chart.value} %{y:.5~g}<extra>%{fullData.name}</extra>`,
    });
    if (line.mean) {
      smoothed = true;
      traces.push({ type: "scatter", mode: "lines", x: line.x, y: line.mean, name: `${name}, smoothed`, line: stroke, hoverinfo: "skip" });
    }
    if (line.logged > line.x.length) notes.push(`${name}: ${count(line.x.length)} of ${count(line.logged)} logged steps.`);
    legend.push({ name, colour: stroke.color, dash: stroke.dash });
  }
  if (!traces.length) return { missing: lacking(chosen(), chart.topics) };
  const layout = {
    xaxis: chart.x === "layer" ? layersAxis : stepsAxis(chart.x, traces),
    yaxis: { ...heading(chart.y), ...(chart.from_zero ? { rangemode: "tozero" } : {}) },
  };
  return { traces, layout, legend, note: notes.join(" "), about: smoothed ? "Bold: running mean." : "" };
}

function addLineChart(section, id, options) {
  const values = report.charts.lines[id];
  const pick = (kind) => ({ [kind]: { [id]: line } }) => line && {
    x: Array.isArray(line.x) ? line.x : numbers(line.x), y: numbers(line.y), mean: line.mean && numbers(line.mean), logged: line.logged,
  };
  addChart(section, id, values.title, values.caption, () => {
    const kind = state.difference ? "differences" : "lines";
    const chart = report.charts[kind][id];
    return { ...lines(pick(kind), chart), title: chart.title };
  }, options);
}

// A point with its interval for each row {label, name, value, interval, colour, details, format?, size?, symbol?}.
const ends = (interval) => interval.map((end) => shown(end)).join(" … ");
function intervalPoints(rows, xaxis) {
  const traces = rows.map((row) => {
    const [low, high] = row.interval || [row.value, row.value];
    return {
      type: "scatter", mode: "markers", orientation: "h", name: row.label, x: [row.value], y: [row.label],
      marker: { color: row.colour, size: row.size || 11, symbol: row.symbol || "circle" },
      error_x: { type: "data", symmetric: false, array: [high - row.value], arrayminus: [row.value - low], color: row.colour, thickness: 2, width: 6 },
      hovertemplate: `${row.prefix ? `${literal(inLines(row.prefix))} ` : ""}%{x:${row.format || ".5~g"}}<br>`
        + `${row.details.map(literal).join("<br>")}<extra>${literal(inLines(row.name))}</extra>`,
    };
  });
  const spoken = rows.map((row) => `${row.name.replace("\n", " ")} ${shown(row.value)}, ${row.details.join(", ")}`).join("; ");
  const layout = { xaxis, yaxis: { type: "category", range: [rows.length - 0.5, -0.5] } };
  const height = Math.max(rows.length > 6 ? 22 : 34, 8 + 18 * Math.max(...rows.map((row) => linesIn(row.label))));
  return { traces, layout, spoken, height: 90 + height * rows.length };
}

// Scores of the base model and of the selected runs.
function scores(task, measure) {
  return () => {
    const bases = new Map(), adapted = [];
    runs.forEach((run, i) => {
      const { base, adapted: own } = run.evaluations[task] || {};
      const row = (score) => ({ ...score, prefix: measure, details: [`95 % interval ${ends(score.interval || [score.value, score.value])}`] });
      const has = (model) => model && model[measure] && model[measure].value !== null;
      if (has(base)) bases.set(JSON.stringify(base[measure]), { ...row(base[measure]), label: "base", name: "base", colour: css("--faint"), symbol: "diamond" });
      if (has(own) && state.chosen.has(i)) adapted.push({ ...row(own[measure]), label: tick(run.name), name: run.name, colour: colour(i) });
    });
    const rows = [...bases.values(), ...adapted];
    return rows.length ? intervalPoints(rows, heading(measure)) : { missing: NO_RUN };
  };
}

const heatHeight = (rows) => Math.max(150, Math.min(420, 9 * rows + 90));
const heatLayout = (along, rows) => ({
  xaxis: { ...heading(along), showgrid: false },
  yaxis: { ...heading("layer"), type: "category", showgrid: false, nticks: Math.min(rows, 9) },
  dragmode: false,
});
const heatTrace = (x, y, z, name, hovertemplate) => ({
  type: "heatmap", x, y, z, name, colorscale: COLORMAP, colorbar: { thickness: 12, outlinewidth: 0, tickfont: { size: 11 } },
  hovertemplate: `${hovertemplate}<extra></extra>`,
});

// The value at each step, or its change since the first one.
function gateHeat(name, chart) {
  const { gates, missing } = detail();
  if (!gates || !gates.columns[name] || chart.topics.some((topic) => missing[topic])) return { missing: lacking([state.detail], chart.topics) };
  const notes = [];
  if (gates.steps.length < gates.logged) notes.push(`Shown: ${gates.steps.length} of ${count(gates.logged)} logged steps, evenly spaced.`);
  const off = gates.mask_off.filter(Boolean);
  if (chart.topics.includes("mask") && off.length) notes.push(`The mask does not act on ${off.length} of ${gates.labels.length} layers: ${[...new Set(off)].join("; ")}.`);
  const z = numbers(gates.columns[name]), words = chart.title.toLowerCase();
  const change = state.mode === "change" && gates.steps.length > 1;
  const values = change ? z.map((row) => row.map((value) => value - row[0])) : z;
  const [low, high] = extent(values.flatMap((row) => Array.from(row))) || [0, 1];
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const hover = `layer %{y}, step %{x}<br>${words} %{customdata:.5~g}${change ? "<br>change %{z:+.4~g}" : ""}`;
  const scale = change ? { colorscale: diverging(), zmin: -most, zmax: most } : { zmin: low, zmax: high };
  const trace = { ...heatTrace(gates.steps, gates.labels, values, words, hover), customdata: z, ...scale };
  return { traces: [trace], layout: merged(heatLayout("step", gates.labels.length), { xaxis: stepsAxis("step", [trace]) }), height: heatHeight(gates.labels.length), note: notes.join(" ") };
}

function scales() {
  const { y, names } = report.charts.scales;
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
    Object.entries(names).filter(([column]) => gates.columns[column]).forEach(([column, projection], k) => {
      const name = runs.length > 1 ? `${brief(runs[i].name)}: ${projection}` : projection;
      const line = { color: colour(i), dash: dash(k), width: 2 };
      traces.push({
        type: "scatter", mode: gates.steps.length < 3 ? "lines+markers" : "lines", x: gates.steps, y: numbers(gates.columns[column])[row], name, line,
        hovertemplate: `step %{x}<br>${projection} × %{y:.5~g}<extra>${literal(inLines(runs[i].name))}</extra>`,
      });
      legend.push({ name, colour: line.color, dash: line.dash });
    });
  }
  if (!traces.length) return { missing: notes.join(" ") || lacking(chosen(), ["gates"]) };
  return { traces, legend, note: notes.join(" "), layout: { xaxis: stepsAxis("step", traces), yaxis: heading(y) }, title: `Step scales in layer ${state.layer}` };
}

// κ above the histogram of z, with the bounds of the responsive regime through both.
function curve() {
  const run = detail(), text = report.charts.kappa;
  const source = run.diagnosis || run.gates;
  const row = source ? source.labels.indexOf(state.layer) : -1;
  if (row < 0) return { missing: lacking([state.detail], [run.diagnosis ? "diagnosis" : "gates"]) };
  const activation = source.activations[row];
  const known = run.curves[activation];
  if (!known) return { missing: `nalora has no formula for κ of ${activation}, which is a user-defined function.` };
  const bounds = (source.thresholds[row] || []).filter((v) => v !== null);
  const hist = run.diagnosis && run.diagnosis.histogram;
  const traces = [{
    type: "scatter", mode: "lines", x: numbers(known.z), y: numbers(known.kappa), name: "κ", yaxis: "y",
    line: { color: css("--ink"), width: 2 }, hovertemplate: "z %{x:.3~g}<br>κ %{y:.4~g}<extra></extra>",
  }];
  const legend = [{ name: `κ of ${activation}`, colour: css("--ink") }];
  if (bounds.length) legend.push({ name: "bounds of the responsive regime", colour: css("--note-edge"), dash: dash(1) });
  const edges = hist ? hist.edges : null;
  const z_range = edges ? [Math.max(edges[0], -6), Math.min(edges[edges.length - 1], 6)] : [-6, 6];
  if (hist) {
    const middle = range(edges.length - 1).map((k) => (edges[k] + edges[k + 1]) / 2);
    hist.steps.forEach((step, k) => {
      const counts = (hist.counts[k] || [])[row] || [];
      if (!counts.length) return;
      const total = counts.reduce((a, b) => a + b, 0) || 1;
      const name = `${text.data} ${step}`, paint = k ? colour(1) : colour(0), line = k ? "solid" : dash(1);
      traces.push({
        type: "scatter", mode: "lines", x: middle, y: counts.map((c) => c / total), customdata: counts, yaxis: "y2", name,
        line: { color: paint, shape: "hvh", width: 2, dash: line }, ...(k ? {} : { fill: "tozeroy", fillcolor: `${paint}22` }),
        hovertemplate: "z near %{x:.3~g}<br>%{y:.4~g} of the values (%{customdata:,})<extra>%{fullData.name}</extra>",
      });
      legend.push({ name, colour: paint, dash: line });
    });
  }
  const shapes = bounds.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: css("--note-edge"), dash: dash(1), width: 1.5 } }));
  const layout = {
    shapes, xaxis: { ...heading(text.x), range: z_range, anchor: hist ? "y2" : "y" },
    yaxis: { ...heading(text.y), domain: hist ? [0.46, 1] : [0, 1] },
    ...(hist ? { yaxis2: { ...heading(text.share), domain: [0, 0.38], rangemode: "tozero", gridcolor: css("--line"), automargin: true } } : {}),
  };
  const note = hist ? "" : `A diagnosis adds the histogram of z. ${run.missing.diagnosis || ""}`;
  return { traces, legend, layout, note, height: hist ? 420 : 300, title: `κ of ${activation} in layer ${state.layer} and the distribution of z` };
}

const DEAD_GATES = "χ grows without bound where a gate's output vanishes (as −z² for GELU), so closed gates can carry nearly all of D_EH. D_EH of live gates weights every gate by its output, min(|φ(z)|, |φ(z′)|, 1).";
// The share of D_EH that remains when gates are weighted by their output.
function liveShare(diagnosis) {
  if (!state.measure.startsWith("D_EH")) return "";
  const [all, live] = ["D_EH", "D_EH_live"].map((name) => {
    const values = diagnosis.cumulative[name];
    return values && values.every((v) => typeof v === "number") ? values.reduce((a, b) => a + b, 0) : null;
  });
  const share = all && live !== null ? ` ${shown(100 * live / all, 3)} % of this run's D_EH, summed over layers and intervals, is of live gates.` : "";
  return DEAD_GATES + share;
}

function movedHeat() {
  const { diagnosis } = detail();
  if (!diagnosis || !diagnosis.ends.length) return { missing: diagnosis ? "The diagnosis has fewer than two snapshots to compare." : lacking([state.detail], ["diagnosis"]) };
  const z = numbers(diagnosis.measures[state.measure]);
  if (!extent(z.flatMap((row) => Array.from(row)))) return { missing: "This measure has no value here: the activations have no regimes, or the diagnosis was made by an earlier version of nalora." };
  const words = MEASURES[state.measure], steps = diagnosis.ends.map(([from, to]) => `${from} → ${to}`);
  const trace = heatTrace(steps, diagnosis.labels, z, words, `layer %{y}, steps %{x}<br>${words} %{z:.5~g}`);
  const layout = merged(heatLayout("from step → to step", diagnosis.labels.length), { xaxis: { type: "category" } });
  return { traces: [trace], layout, height: heatHeight(diagnosis.labels.length), note: liveShare(diagnosis), title: `Per layer: ${words}` };
}

function movedLayer() {
  const words = MEASURES[state.measure];
  const figure = lines((run) => {
    const row = run.diagnosis ? run.diagnosis.labels.indexOf(state.layer) : -1;
    const y = row < 0 ? [] : numbers(run.diagnosis.measures[state.measure])[row];
    return extent(y) && { x: run.diagnosis.ends.map((step) => step[1]), y };
  }, { x: "up to step", y: words, value: words, topics: ["diagnosis"], from_zero: true, markers: true });
  const { diagnosis, name } = detail();
  const row = diagnosis ? diagnosis.labels.indexOf(state.layer) : -1;
  const [sum, direct] = ["cumulative", "first_to_last"].map((key) => row >= 0 && diagnosis[key][state.measure] && diagnosis[key][state.measure][row]);
  const about = typeof sum === "number" && typeof direct === "number"
    ? `${name}: ${shown(sum, 4)} summed over the intervals, ${shown(direct, 4)} from the first to the last snapshot.` : "";
  return { ...figure, about, title: `Layer ${state.layer}: ${words}` };
}
