// Where the update went, what the target asks for, what it cost.
function layerLine(pick, axis, what, topic) {
  return () => lines(chosen(), pick, { xaxis: { title: { text: "layer" }, type: "category", nticks: 12 }, yaxis: { title: { text: axis }, rangemode: "tozero" } },
    { along: "layer", what, topic, markers: true });
}

const updateNorms = layerLine(
  (run) => run.capacity && { x: run.capacity.labels, y: numbers(run.capacity.total) }, "‖s·B·A‖", "update norm", "capacity");

const keptShares = layerLine((run) => {
  if (!run.gates || !run.gates.columns.kept_share || run.missing.mask) return null;
  return { x: run.gates.labels, y: numbers(run.gates.columns.kept_share).map((row) => row[row.length - 1]) };
}, "kept share", "kept share", ["gates", "mask"]);

function projectionNorms() {
  const found = detail().capacity;
  if (!found) return { missing: lacking([state.detail], "capacity") };
  const norms = numbers(found.norms);
  const trace = {
    type: "heatmap", x: found.labels, y: found.kinds, z: found.kinds.map((_, k) => norms.map((row) => row[k])), colorscale: SEQUENTIAL,
    name: "update norm", colorbar: { thickness: 12, outlinewidth: 0 }, hovertemplate: "layer %{x}, %{y}<br>‖s·B·A‖ %{z:.5~g}<extra></extra>",
  };
  const layout = {
    xaxis: { title: { text: "layer" }, type: "category", showgrid: false, nticks: 12 },
    yaxis: { type: "category", showgrid: false, autorange: "reversed" }, dragmode: false,
  };
  return { traces: [trace], layout, height: 90 + 26 * found.kinds.length, note: detail().missing.capacity || "" };
}

// The channels of the chosen layer's gate: their numbers and norms.
function layerChannels() {
  const found = detail().capacity;
  const row = found ? found.labels.indexOf(state.layer) : -1;
  const layer = row < 0 ? null : found.channels[row];
  if (!layer || !layer.kind) return null;
  const norms = numbers(layer.norms);
  return { ...layer, norms, numbers: layer.numbers || range(layer.width) };
}

function channelNorms() {
  const layer = layerChannels();
  if (!layer) return { missing: detail().capacity ? `Layer ${state.layer} has no adapted gate.` : lacking([state.detail], "capacity") };
  const at = layer.numbers.indexOf(state.channel);
  const traces = [{
    type: "scatter", mode: "markers", x: layer.numbers, y: layer.norms, name: "update norm", marker: { color: colour(state.detail), size: 4, opacity: 0.6 },
    hovertemplate: "channel %{x}<br>update norm %{y:.5~g}<extra></extra>",
  }];
  if (at >= 0) traces.push({
    type: "scatter", mode: "markers", x: [state.channel], y: [layer.norms[at]], name: `channel ${state.channel}`,
    marker: { color: css("--page"), size: 13, line: { color: css("--ink"), width: 3 } },
    hovertemplate: "channel %{x}<br>update norm %{y:.5~g}<extra>followed</extra>",
  });
  const note = layer.numbers.length < layer.width ? `The ${layer.numbers.length.toLocaleString("en")} channels with the largest update, of ${layer.width.toLocaleString("en")}.` : "";
  return {
    traces, note, about: channelSentence(), title: `Gate channels of layer ${state.layer} (${layer.kind.split(".").pop()})`,
    layout: { xaxis: { title: { text: "channel" } }, yaxis: { title: { text: "row norm of s·B·A" }, rangemode: "tozero" } },
  };
}

function channelMoved() {
  const found = detail().diagnosis;
  const row = found && found.channels ? found.labels.indexOf(state.layer) : -1;
  const layer = row < 0 ? null : found.channels.layers[row];
  const at = layer ? layer.numbers.indexOf(state.channel) : -1;
  if (!layer) return { missing: "Only the size of this channel's update is known; `nalora diagnose RUN --per-channel` adds how it moved." };
  if (at < 0) return { missing: `Channel ${state.channel} is not among the ${layer.numbers.length} of this layer that this page keeps: those with the largest update and with the most flips.` };
  const names = Object.keys(layer.measures).filter((name) => MEASURES[name]);
  const name = names.includes(state.measure) ? state.measure : names[0];
  const y = numbers(layer.measures[name])[at];
  const mask = layer.measures.mask ? numbers(layer.measures.mask)[at] : null;
  return {
    about: mask ? `The mask's weight on it at the end: ${shown(mask[mask.length - 1], 4)}.` : "",
    title: `Channel ${state.channel} of layer ${state.layer}: ${MEASURES[name]}`,
    traces: [{
      type: "scatter", mode: "lines+markers", x: found.ends.map((e) => e[1]), y, name: MEASURES[name], line: { color: colour(state.detail) },
      hovertemplate: `up to step %{x}<br>${MEASURES[name]} %{y:.5~g}<extra></extra>`,
    }],
    layout: { xaxis: { title: { text: "up to step" } }, yaxis: { title: { text: MEASURES[name] }, rangemode: "tozero" } },
  };
}

function channelSentence() {
  const layer = layerChannels();
  if (!layer) return "";
  const at = layer.numbers.indexOf(state.channel);
  if (at < 0) return `Channel ${state.channel} of layer ${state.layer} is not shown: only the channels with the largest update are.`;
  const rank = 1 + Array.from(layer.norms).filter((v) => v > layer.norms[at]).length;
  return `Channel ${state.channel} of layer ${state.layer}: update norm ${shown(layer.norms[at], 4)}, number ${rank.toLocaleString("en")} of ${layer.width.toLocaleString("en")}.`;
}

const TERMS = { residual_through_view: "residual through view", selection_mismatch: "selection mismatch", view_mismatch: "view mismatch" };
const noMismatch = () => ({ missing: lacking([state.detail], "mismatch") });
const layers_axis = { title: { text: "layer" }, type: "category", nticks: 12 };

function mismatchShares() {
  const found = detail().mismatch;
  if (!found || !found.share) return noMismatch();
  const paints = [colour(0), colour(1), colour(2)];
  const names = Object.keys(TERMS).filter((name) => found.share[name]);
  const traces = names.map((name, k) => ({
    type: "bar", x: found.labels, y: found.share[name], customdata: found.energy[name], name: TERMS[name], marker: { color: paints[k] },
    hovertemplate: `layer %{x}<br>${TERMS[name]}: %{y:.4~g} of the energy (%{customdata:.4~g})<extra></extra>`,
  }));
  const legend = names.map((name, k) => ({ name: TERMS[name], colour: paints[k], box: true }));
  return { traces, legend, layout: { barmode: "stack", xaxis: layers_axis, yaxis: { title: { text: "share of energy" }, range: [0, 1] } } };
}

function mismatchLines(source, parts, axis) {
  return () => {
    const found = detail().mismatch;
    if (!found) return noMismatch();
    if (!found[source]) return { missing: "This run has no mask to compare with." };
    const traces = parts.filter(([key]) => found[source][key] !== undefined).map(([key, name, line], k) => {
      const flat = typeof found[source][key] === "number";
      return {
        type: "scatter", mode: flat ? "lines" : "lines+markers", x: found.labels, y: flat ? found.labels.map(() => found[source][key]) : found[source][key],
        name, line: { color: flat ? css("--faint") : colour(k), dash: line }, hovertemplate: `layer %{x}<br>${name} %{y:.4~g}<extra></extra>`,
      };
    });
    const legend = traces.map((t) => ({ name: t.name, colour: t.line.color, dash: t.line.dash }));
    return { traces, legend, layout: { xaxis: layers_axis, yaxis: { title: { text: axis }, rangemode: "tozero" } } };
  };
}

function topChannels() {
  const found = detail().mismatch;
  if (!found) return noMismatch();
  const row = found.labels.indexOf(state.layer);
  const top = (found.top_channels || [])[row] || [];
  if (!top.length) return { missing: `Nothing is known of the channels of layer ${state.layer}.` };
  return {
    title: `Channels that carry the selection mismatch of layer ${state.layer}`,
    traces: [{
      type: "bar", x: top.map(([c]) => `${c}`), y: top.map(([, share]) => share), name: "share", marker: { color: colour(1) },
      hovertemplate: "channel %{x}<br>%{y:.4~g} of the layer's selection mismatch<extra></extra>",
    }],
    layout: { xaxis: { title: { text: "channel" }, type: "category" }, yaxis: { title: { text: "share" }, rangemode: "tozero" } },
  };
}

// Seconds between rows over steps between rows; a resumed run's clock starts again, which is no step's time.
function stepTimes() {
  return lines(chosen(), (run) => {
    const { x, y } = metric(run, "seconds");
    const times = range(x.length).slice(1).map((i) => [x[i], (y[i] - y[i - 1]) / (x[i] - x[i - 1])]).filter(([, t]) => t >= 0);
    return { x: times.map((t) => t[0]), y: times.map((t) => t[1]) };
  }, merged(steps_axis, { yaxis: { title: { text: "seconds per step" }, rangemode: "tozero" } }), { smooth: true, what: "seconds", topic: "metrics" });
}
