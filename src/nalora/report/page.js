// The controls, and what happens when they change.
function followDefaults() {
  const labels = layerNames();
  if (!labels.includes(state.layer)) state.layer = labels[0] ?? "0";
  const layer = layerChannels();
  // A channel that somebody chose is followed through the layers; else the one with the layer's largest update.
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
  listen("detail", (value) => { state.detail = Number(value); });
  listen("layer", (value) => { state.layer = value; });
  listen("measure", (value) => { state.measure = value; });
  listen("mode", (value) => { state.mode = value; });
  listen("channel", (value) => { if (/^\d+$/.test(value)) follow(Number(value)); });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("controls").hidden = [...document.getElementById("controls").children].every((each) => each.hidden);
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
  addChart("learn", "loss", "Training loss", "At every logged step.", loss);
  const asked = new Map();
  for (const run of runs) for (const [task, who] of Object.entries(run.evaluations)) for (const { scores } of Object.values(who)) {
    for (const measure of Object.keys(scores)) asked.set(`${task}\n${measure}`, [task, measure]);
  }
  [...asked.values()].slice(0, 6).forEach(([task, measure], i) =>
    addChart("learn", `answers-${i}`, `Held-out: ${measure}`, `${task}, with 95 % intervals.`, answered(task, measure)));
  if (runs.some((run) => run.gates)) {
    for (const [name, title, about] of [
      ["p_sup", "Suppressive share", "How much of the gates' input closes them."],
      ["p_res", "Responsive share", "How much falls where the gate reacts."],
      ["p_pos", "Positive share", "How much passes almost unchanged."],
      ["kept_share", "Mask density", "The share of channels that the mask keeps (m > 0.5)."],
      ["stability", "Mask change", "Mean |m − m before| at each update; 0 is a mask at rest."],
    ]) addChart("gates", name, title, about, gateHeat(name, title.toLowerCase()), { onClick: chooseLayer });
    addChart("gates", "scales", "Step scales", "What the steps of each projection were multiplied by.", scales);
  } else {
    addChart("gates", "p_sup", "Shares, mask and step scales", "Recorded while an NA-LoRA run trains.", () => ({ missing: lacking(range(runs.length), "gates") }), { wide: true });
  }
  if (runs.some((run) => run.gates || run.diagnosis)) {
    addChart("gates", "kappa", "κ and the data", "κ = z·φ′/φ: 1 where the output follows the input in proportion, 0 where it does not react to it.", curve, { wide: true });
  }
  if (runs.some((run) => run.diagnosis)) {
    addChart("moved", "moved-heat", "Per layer", "From one snapshot to the next.", movedHeat, { onClick: chooseLayer });
    addChart("moved", "moved-layer", "The chosen layer", "The same, for the chosen layer and runs.", movedLayer);
  } else {
    addChart("moved", "moved-heat", "Movement between snapshots", "Measured after training, for any method.", () => ({ missing: lacking(range(runs.length), "diagnosis") }), { wide: true });
  }
  if (runs.some((run) => run.mismatch)) {
    document.getElementById("mismatch").hidden = false;
    addChart("mismatch", "mismatch-shares", "What the difference is made of", "Shares of the three terms' energies, by layer.", mismatchShares);
    addChart("mismatch", "mismatch-bound", "The bound and the truth", "Mean norm per token of the difference, and the corollary's bound on it.",
      mismatchLines("bound", [["actual", "actual"], ["bound", "bound", "dash"]], "norm per token"));
    addChart("mismatch", "mismatch-mask", "Did the mask put its weight there", "Rank correlation of mask and mismatch; how many top channels they share and how much of the mismatch the mask's top holds, with what chance gives.",
      mismatchLines("mask", [["rank_correlation", "rank correlation"], ["top_overlap", "overlap of the top channels", "dash"], ["energy_held", "mismatch held by the mask's top", "dashdot"], ["chance", "by chance", "dot"]], "agreement"));
    addChart("mismatch", "mismatch-channels", "Channels that carry it", "The ten largest.", topChannels);
  }
  addChart("capacity", "update", "Update norm per layer", "All adapted projections of a layer together.", updateNorms);
  addChart("capacity", "projections", "Update norm per projection", "For the run in detail.", projectionNorms);
  if (runs.some((run) => run.gates)) addChart("capacity", "kept", "Kept share at the last step", "The share of a layer's channels that the mask keeps.", keptShares);
  if (runs.some((run) => run.capacity)) {
    addChart("capacity", "channels", "Gate channels", "Each point is a channel; click one, or give its number, to follow it.", channelNorms,
      { live: true, onClick: (point) => { follow(Number(point.x)); changed(); } });
  }
  if (runs.some((run) => run.diagnosis && run.diagnosis.channels)) {
    addChart("capacity", "channel-moved", "The channel followed", "Its measure from snapshot to snapshot.", channelMoved);
  }
  addChart("cost", "time", "Time per step", "Wall clock between logged steps.", stepTimes, { wide: true });
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
let wanted = "system";
function applyTheme() {
  document.documentElement.dataset.theme = wanted === "system" ? (dark.matches ? "dark" : "light") : wanted;
  document.getElementById("theme").textContent = THEMES[wanted];
  document.querySelectorAll(".swatch-box").forEach((swatch, i) => { swatch.style.background = colour(i); });
}

function setPrinting(now) {
  if (printing === now) return;
  printing = now;
  for (const folded of document.querySelectorAll("#repeat details")) folded.open = now;
  redraw();
}

function start() {
  makeControls();
  followDefaults();
  makeCharts();
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
  // Words and tables first: reading 5 MB of plotly takes half a second, and more on a busy machine.
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
    // Not allowed for pages opened from disk in every browser: select the text, for Ctrl-C.
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy the command"; }, 2500);
}

start();
