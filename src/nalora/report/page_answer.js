// A study's answer: how far each arm is from the baseline, and what each learning rate came to.
function answerCharts(answer) {
  document.getElementById("answer").hidden = false;
  answer.parts.forEach((part, i) => {
    const among = part.heading ? ` (${part.heading})` : "";
    for (const [j, measure] of Object.keys(part.differences).entries()) {
      addChart("answer", `difference-${i}-${j}`, `${measure}: difference to ${answer.baseline}${among}`,
        "Paired by seed, with Student's 95 % interval of each difference.", () => differences(part, measure, part.differences[measure], (row) => tick(row.arm), (row) => row.arm));
    }
    for (const [j, measure] of Object.keys(part.controls).entries()) {
      addChart("answer", `control-${i}-${j}`, `${measure}: difference to controls${among}`,
        "What an arm must beat beside the baseline. Paired by seed, with Student's 95 % interval of each difference.",
        () => differences(part, measure, part.controls[measure], (row) => `${tick(row.arm)}\nbeside ${tick(row.beside)}`,
          (row) => `${row.arm}\nbeside ${row.beside}`));
    }
    addChart("answer", `rates-${i}`, `Learning rates${among}`, "Validation loss; the chosen rate of an arm is filled.",
      () => rateCurves(part), { wide: true });
  });
}

// An arm has the colour of the run that stands for it below.
const placeOf = (part, arm) => part.shown[arm] ?? runs.length + Object.keys(part.screening).indexOf(arm);

function differences(part, measure, found, named, whole) {
  const rows = found.filter((row) => row.value !== null);
  if (!rows.length) return { missing: part.missing ? `Not compared: ${missingRuns(part)}` : "No arm has been run with the baseline's seeds yet." };
  const traces = rows.map((row) => {
    const stroke = row.verdict === "better" || row.verdict === "worse" ? colour(placeOf(part, row.arm)) : css("--faint");
    const [low, high] = row.interval || [row.value, row.value];
    const told = row.interval ? `95 % interval ${shown(low)} … ${shown(high)}, ${row.seeds} seeds` : "one seed";
    return {
      type: "scatter", mode: "markers", orientation: "h", name: row.arm, x: [row.value], y: [named(row)],
      marker: { color: stroke, size: 10 },
      error_x: { type: "data", symmetric: false, array: [high - row.value], arrayminus: [row.value - low], color: stroke, thickness: 2, width: 6 },
      hovertemplate: `%{x:+.4~g}<br>${told}<br>${literal(row.verdict)}<extra>${literal(inLines(whole(row)))}</extra>`,
    };
  });
  const spoken = rows.map((row) => `${whole(row).replace("\n", " ")} ${shown(row.value)}, ${row.verdict}`).join("; ");
  const layout = {
    xaxis: { title: { text: `difference in ${measure}` }, zeroline: true, zerolinecolor: css("--ink"), zerolinewidth: 1 },
    yaxis: { type: "category", range: [rows.length - 0.5, -0.5] },
  };
  return { traces, layout, spoken, height: 90 + (8 + 18 * Math.max(...rows.map((row) => linesIn(named(row))))) * rows.length, about: "Coloured where the verdict is better or worse, grey where nothing can be told." };
}

const missingRuns = (part) => `these runs are missing because they failed: ${part.missing.join("; ")}.`;

function rateCurves(part) {
  const traces = [], legend = [], unknown = [];
  for (const [arm, losses] of Object.entries(part.screening)) {
    const known = losses.filter(([, loss]) => loss !== null);
    if (!known.length) { unknown.push(arm); continue; }
    const i = placeOf(part, arm);
    const filled = known.map(([rate]) => (rate === part.rates[arm] ? "circle" : "circle-open"));
    traces.push({
      type: "scatter", mode: "lines+markers", name: arm, x: known.map(([rate]) => rate), y: known.map(([, loss]) => loss),
      line: { color: colour(i), dash: dash(i), width: 2 }, marker: { symbol: filled, size: 9 },
      hovertemplate: "learning rate %{x}<br>validation loss %{y:.5~g}<extra>%{fullData.name}</extra>",
    });
    legend.push({ name: arm, colour: colour(i), dash: dash(i) });
  }
  if (!traces.length) return { missing: "No run of the study has ended yet." };
  const [low, high] = extent(traces.flatMap((trace) => trace.y));
  const logarithmic = { type: "log", dtick: "D2", tickformat: "~g" };
  const layout = {
    xaxis: { ...logarithmic, title: { text: "learning rate" } },
    // One rate that destroyed a run would press all others flat.
    yaxis: { ...(low > 0 && high > 10 * low ? logarithmic : {}), title: { text: "validation loss" } },
  };
  const notes = unknown.length ? [`No run yet: ${unknown.join("; ")}.`] : [];
  if (part.missing) notes.push(`No learning rate is chosen without all of its runs; ${missingRuns(part)}`);
  const note = notes.join(" ");
  return { traces, layout, legend, note, height: 420 };
}
