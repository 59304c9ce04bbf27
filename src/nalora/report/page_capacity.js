// The norms of the update, and the comparison with a target model.
function projectionNorms() {
  const { capacity, missing } = detail();
  if (!capacity) return { missing: lacking([state.detail], ["capacity"]) };
  const norms = numbers(capacity.norms);
  const z = capacity.kinds.map((_, k) => norms.map((row) => row[k]));
  const trace = heatTrace(capacity.labels, capacity.kinds, z, "update norm", "layer %{x}, %{y}<br>‖s·B·A‖ %{z:.5~g}");
  const layout = { xaxis: { ...layersAxis, showgrid: false }, yaxis: { type: "category", showgrid: false, autorange: "reversed" }, dragmode: false };
  return { traces: [trace], layout, height: 90 + 26 * capacity.kinds.length, note: missing.capacity || "" };
}

// The channels of the selected layer's gate: their numbers and norms.
function layerChannels() {
  const { capacity } = detail();
  const row = capacity ? capacity.labels.indexOf(state.layer) : -1;
  const layer = row < 0 ? null : capacity.channels[row];
  if (!layer || !layer.kind) return null;
  return { ...layer, norms: numbers(layer.norms), numbers: layer.numbers || range(layer.width) };
}

function channelNorms() {
  const layer = layerChannels();
  if (!layer) return { missing: detail().capacity ? `Layer ${state.layer} has no adapted gate.` : lacking([state.detail], ["capacity"]) };
  const at = layer.numbers.indexOf(state.channel);
  const points = (x, y, name, marker, extra = "") => ({
    type: "scatter", mode: "markers", x, y, name, marker, hovertemplate: `channel %{x}<br>update norm %{y:.5~g}<extra>${extra}</extra>`,
  });
  const traces = [points(layer.numbers, layer.norms, "update norm", { color: colour(state.detail), size: 4, opacity: 0.6 })];
  const marked = { color: css("--page"), size: 13, line: { color: css("--ink"), width: 3 } };
  if (at >= 0) traces.push(points([state.channel], [layer.norms[at]], `channel ${state.channel}`, marked, "selected"));
  const note = layer.numbers.length < layer.width ? `The ${count(layer.numbers.length)} channels with the largest update, of ${count(layer.width)}.` : "";
  return {
    traces, note, about: channelSentence(layer, at), title: `Gate channels of layer ${state.layer} (${layer.kind.split(".").pop()})`,
    layout: { xaxis: heading("channel"), yaxis: { ...heading("row norm of s·B·A"), rangemode: "tozero" } },
  };
}

function channelSentence(layer, at) {
  const channel = `Channel ${state.channel} of layer ${state.layer}`;
  if (at < 0) return `${channel} is not shown: only the channels with the largest update are.`;
  const rank = 1 + Array.from(layer.norms).filter((v) => v > layer.norms[at]).length;
  return `${channel}: update norm ${shown(layer.norms[at], 4)}, number ${count(rank)} of ${count(layer.width)}.`;
}

function channelMoved() {
  const { diagnosis } = detail();
  const row = diagnosis && diagnosis.channels ? diagnosis.labels.indexOf(state.layer) : -1;
  const layer = row < 0 ? null : diagnosis.channels.layers[row];
  const at = layer ? layer.numbers.indexOf(state.channel) : -1;
  if (!layer) return { missing: "Only the norm of this channel's update is known; `nalora diagnose RUN --per-channel` adds its movement." };
  if (at < 0) return { missing: `Channel ${state.channel} is not among the ${layer.numbers.length} channels of this layer in this page: those with the largest update and with the most flips.` };
  const names = Object.keys(layer.measures).filter((name) => MEASURES[name]);
  const name = names.includes(state.measure) ? state.measure : names[0];
  const mask = layer.measures.mask ? numbers(layer.measures.mask)[at] : null;
  return {
    about: mask ? `The mask's weight on it at the end: ${shown(mask[mask.length - 1], 4)}.` : "",
    title: `Channel ${state.channel} of layer ${state.layer}: ${MEASURES[name]}`,
    traces: [{
      type: "scatter", mode: "lines+markers", x: diagnosis.ends.map((step) => step[1]), y: numbers(layer.measures[name])[at], name: MEASURES[name],
      line: { color: colour(state.detail) }, hovertemplate: `up to step %{x}<br>${MEASURES[name]} %{y:.5~g}<extra></extra>`,
    }],
    layout: { xaxis: heading("up to step"), yaxis: { ...heading(MEASURES[name]), rangemode: "tozero" } },
  };
}

const TERMS = { residual_through_view: "residual through view", selection_mismatch: "selection mismatch", view_mismatch: "view mismatch" };
const BOUND = [["actual", "actual"], ["bound", "bound"]];
const AGREEMENT = [["rank_correlation", "rank correlation"], ["top_overlap", "overlap of the top channels"], ["energy_held", "mismatch in the mask's top channels"], ["chance", "by chance"]];
const noMismatch = () => ({ missing: lacking([state.detail], ["mismatch"]) });

function mismatchShares() {
  const { mismatch } = detail();
  if (!mismatch || !mismatch.share) return noMismatch();
  const names = Object.keys(TERMS).filter((name) => mismatch.share[name]);
  const traces = names.map((name, k) => ({
    type: "bar", x: mismatch.labels, y: mismatch.share[name], customdata: mismatch.energy[name], name: TERMS[name], marker: { color: colour(k) },
    hovertemplate: `layer %{x}<br>${TERMS[name]}: %{y:.4~g} of the energy (%{customdata:.4~g})<extra></extra>`,
  }));
  const legend = names.map((name, k) => ({ name: TERMS[name], colour: colour(k), box: true }));
  return { traces, legend, layout: { barmode: "stack", xaxis: layersAxis, yaxis: { ...heading("share of energy"), range: [0, 1] } } };
}

function mismatchLines(source, parts, axis) {
  const { mismatch } = detail();
  if (!mismatch) return noMismatch();
  const values = mismatch[source];
  if (!values) return { missing: "This run has no mask to compare with." };
  const traces = parts.filter(([key]) => values[key] !== undefined).map(([key, name], k) => {
    const flat = typeof values[key] === "number";
    return {
      type: "scatter", mode: flat ? "lines" : "lines+markers", x: mismatch.labels, y: flat ? mismatch.labels.map(() => values[key]) : values[key],
      name, line: { color: flat ? css("--faint") : colour(k), dash: dash(k) }, hovertemplate: `layer %{x}<br>${name} %{y:.4~g}<extra></extra>`,
    };
  });
  const legend = traces.map((trace) => ({ name: trace.name, colour: trace.line.color, dash: trace.line.dash }));
  return { traces, legend, layout: { xaxis: layersAxis, yaxis: { ...heading(axis), rangemode: "tozero" } } };
}

function topChannels() {
  const { mismatch } = detail();
  if (!mismatch) return noMismatch();
  const top = (mismatch.top_channels || [])[mismatch.labels.indexOf(state.layer)] || [];
  if (!top.length) return { missing: `The channels of layer ${state.layer} have no recorded values.` };
  return {
    title: `Channels with the largest selection mismatch in layer ${state.layer}`,
    traces: [{
      type: "bar", x: top.map(([channel]) => `${channel}`), y: top.map(([, share]) => share), name: "share", marker: { color: colour(1) },
      hovertemplate: "channel %{x}<br>%{y:.4~g} of the layer's selection mismatch<extra></extra>",
    }],
    layout: { xaxis: { ...heading("channel"), type: "category" }, yaxis: { ...heading("share"), rangemode: "tozero" } },
  };
}
