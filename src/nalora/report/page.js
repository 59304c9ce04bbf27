// The controls, and the list of all charts.
function followDefaults() {
  const labels = layerNames();
  if (!labels.includes(state.layer)) state.layer = labels[0] ?? "0";
  const layer = layerChannels();
  // A channel that the user selected stays selected in other layers; else the one with the layer's largest update.
  if (layer && (!state.followed || state.channel >= layer.width)) {
    state.channel = layer.numbers[layer.norms.indexOf(extent(layer.norms)[1])];
  }
}

function layerNames() {
  const sources = runs.flatMap((run) => [run.gates, run.diagnosis, run.capacity, run.mismatch]).filter(Boolean);
  const names = new Set(sources.flatMap((source) => source.labels));
  return [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

function changed() {
  followDefaults();
  const layer = layerChannels();
  const input = document.getElementById("channel");
  if (layer) input.max = layer.width - 1;
  if (state.channel !== null && document.activeElement !== input) input.value = state.channel;
  document.getElementById("layer").value = state.layer;
  redraw();
  showExamples();
}

function options(select, names, values) {
  select.replaceChildren(...names.map((name, i) => element("option", { value: values ? values[i] : name }, name)));
}

function makeControls() {
  const choice = document.getElementById("run-choice");
  runs.forEach((run, i) => {
    const box = element("input", { type: "checkbox", id: `run-${i}`, checked: "" });
    box.addEventListener("change", () => {
      if (box.checked) state.chosen.add(i); else state.chosen.delete(i);
      changed();
    });
    const swatch = element("span", { class: "swatch-box" });
    choice.append(element("label", { for: `run-${i}`, title: run.name }, box, swatch, brief(run.name)));
  });
  choice.hidden = runs.length < 2;
  const most = [(run) => run.gates, (run) => run.diagnosis, (run) => run.capacity].map((has) => runs.findIndex(has));
  state.detail = Math.max(0, most.find((i) => i >= 0) ?? 0);
  const listen = (id, set) => document.getElementById(id).addEventListener("change", (event) => { set(event.target.value); changed(); });
  options(document.getElementById("detail"), runs.map((run) => brief(run.name)), range(runs.length));
  document.getElementById("detail").value = state.detail;
  document.getElementById("detail-field").hidden = runs.length < 2;
  options(document.getElementById("layer"), layerNames());
  document.getElementById("layer-field").hidden = !layerNames().length;
  document.getElementById("channel-field").hidden = !runs.some((run) => run.capacity);
  options(document.getElementById("measure"), Object.values(MEASURES), Object.keys(MEASURES));
  document.getElementById("measure-field").hidden = !runs.some((run) => run.diagnosis);
  document.getElementById("mode-field").hidden = !runs.some((run) => run.gates);
  const difference = document.getElementById("difference");
  if (runs.length > 1) difference.append(element("option", { value: "difference" }, `${report.charts.difference} ${brief(runs[0].name)}`));
  document.getElementById("difference-field").hidden = runs.length < 2;
  listen("difference", (value) => { state.difference = value === "difference"; });
  listen("detail", (value) => { state.detail = Number(value); });
  listen("layer", (value) => { state.layer = value; });
  listen("measure", (value) => { state.measure = value; });
  listen("mode", (value) => { state.mode = value; });
  listen("channel", (value) => { if (/^\d+$/.test(value)) follow(Number(value)); });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("controls").hidden = [...document.getElementById("controls").children].every((field) => field.hidden);
}

function follow(channel) {
  state.channel = channel;
  state.followed = true;
}

function chooseLayer(point) {
  const layer = layerNames().find((name) => literal(name) === String(point.y));
  if (layer !== undefined) { state.layer = layer; changed(); }
}

function makeCharts() {
  if (report.answer) answerCharts(report.answer);
  addLineChart("results", "loss");
  const evaluated = new Map();
  for (const run of runs) for (const [task, models] of Object.entries(run.evaluations)) for (const measures of Object.values(models)) {
    for (const measure of Object.keys(measures)) evaluated.set(`${task}\n${measure}`, [task, measure]);
  }
  [...evaluated.values()].slice(0, 6).forEach(([task, measure], i) =>
    addChart("results", `answers-${i}`, `Held-out: ${measure}`, `${task}, with 95 % intervals.`, scores(task, measure)));
  const any = (has) => runs.some(has), wide = { wide: true };
  const missing = (topic) => () => ({ missing: lacking(range(runs.length), [topic]) });
  if (any((run) => run.gates)) {
    for (const [name, chart] of Object.entries(report.charts.heat)) {
      addChart("gates", name, chart.title, chart.caption, () => gateHeat(name, chart), { onClick: chooseLayer });
    }
    addChart("gates", "scales", "Step scales", "The factors of the steps of each projection.", scales);
  } else {
    addChart("gates", "p_sup", "Shares, mask and step scales", "Recorded while an NA-LoRA run trains.", missing("gates"), wide);
  }
  if (any((run) => run.gates || run.diagnosis)) {
    addChart("gates", "kappa", "κ and the distribution of z", "κ = z·φ′/φ: 1 where the output is proportional to the input, 0 where it does not respond to it.", curve, wide);
  }
  if (any((run) => run.diagnosis)) {
    addChart("moved", "moved-heat", "Per layer", "From one snapshot to the next.", movedHeat, { onClick: chooseLayer });
    addChart("moved", "moved-layer", "The selected layer", "The same measure, for the selected layer and runs.", movedLayer);
  } else {
    addChart("moved", "moved-heat", "Movement between snapshots", "Measured after training, for any method.", missing("diagnosis"), wide);
  }
  if (any((run) => run.mismatch)) {
    document.getElementById("mismatch").hidden = false;
    addChart("mismatch", "mismatch-shares", "Parts of the difference", "Shares of the three terms' energies, by layer.", mismatchShares);
    addChart("mismatch", "mismatch-bound", "Difference and its bound", "Mean norm of the difference per token, and the corollary's bound on it.",
      () => mismatchLines("bound", BOUND, "norm per token"));
    addChart("mismatch", "mismatch-mask", "Mask and mismatch", "Rank correlation of mask and mismatch; the share of top channels that they have in common and the share of the mismatch in the mask's top channels, with the values expected by chance.",
      () => mismatchLines("mask", AGREEMENT, "agreement"));
    addChart("mismatch", "mismatch-channels", "Channels with the largest mismatch", "The ten largest.", topChannels);
  }
  addLineChart("capacity", "update");
  addChart("capacity", "projections", "Update norm per projection", "For the run in detail.", projectionNorms);
  if (any((run) => run.gates)) addLineChart("capacity", "kept");
  if (any((run) => run.capacity)) {
    addChart("capacity", "channels", "Gate channels", "Each point is a channel; click one, or enter its number, to select it.", channelNorms,
      { live: true, onClick: (point) => { follow(Number(point.x)); changed(); } });
  }
  if (any((run) => run.diagnosis && run.diagnosis.channels)) {
    addChart("capacity", "channel-moved", "The selected channel", "Its measure from snapshot to snapshot.", channelMoved);
  }
  addLineChart("cost", "time", wide);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
let wanted = "system";
function applyTheme() {
  document.documentElement.dataset.theme = wanted === "system" ? (dark.matches ? "dark" : "light") : wanted;
  document.getElementById("theme").textContent = THEMES[wanted];
  document.querySelectorAll(".swatch-box").forEach((swatch, i) => { swatch.style.background = colour(i); });
}

function setPrinting(now) {
  if (printing === now) return;
  printing = now;
  for (const folded of document.querySelectorAll("#reproduce details")) folded.open = now;
  redraw();
  showExamples();
}

function start() {
  makeControls();
  followDefaults();
  makeCharts();
  makeExamples();
  applyTheme();
  const names = Object.keys(THEMES);
  document.getElementById("theme").addEventListener("click", () => {
    wanted = names[(names.indexOf(wanted) + 1) % names.length];
    applyTheme();
    redraw();
  });
  dark.addEventListener("change", () => { applyTheme(); redraw(); });
  let width = window.innerWidth, resized = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(resized);
    resized = setTimeout(redraw, 120);
  });
  window.addEventListener("beforeprint", () => setPrinting(true));
  window.addEventListener("afterprint", () => setTimeout(() => setPrinting(matchMedia("print").matches)));
  matchMedia("print").addEventListener("change", (event) => setPrinting(event.matches));
  for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button));
  const list = document.getElementById("sections");
  for (const section of document.querySelectorAll("main > section:not([hidden])")) {
    list.append(element("li", {}, element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
  }
  changed();
  // Text and tables first: parsing the 5 MB of plotly takes half a second, and more on a busy machine.
  requestAnimationFrame(() => setTimeout(() => {
    document.head.append(element("script", {}, document.getElementById("plotly").textContent));
    for (const chart of charts) watcher.observe(chart.box);
    if (printing) redraw();
  }));
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    // Some browsers do not allow it for pages opened from disk: select the text, for Ctrl-C.
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy the command"; }, 2500);
}

start();
