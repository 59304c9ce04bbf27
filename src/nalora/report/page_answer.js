// A study's results: the difference of each arm to the baseline, and the validation loss of each learning rate.
const PAIRED = "Paired by seed, with Student's 95 % interval of each difference.";

function answerCharts(answer) {
  document.getElementById("answer").hidden = false;
  answer.parts.forEach((part, i) => {
    const among = part.heading ? ` (${part.heading})` : "";
    for (const [j, measure] of Object.keys(part.differences).entries()) {
      addChart("answer", `difference-${i}-${j}`, `${measure}: difference to ${answer.baseline}${among}`, PAIRED,
        () => differences(part, measure, part.differences[measure], (row, name) => name(row.arm)));
    }
    for (const [j, measure] of Object.keys(part.controls).entries()) {
      addChart("answer", `control-${i}-${j}`, `${measure}: difference to controls${among}`,
        `Controls are arms that a method must beat in addition to the baseline. ${PAIRED}`,
        () => differences(part, measure, part.controls[measure], (row, name) => `${name(row.arm)}\nvs ${name(row.control)}`));
    }
    addChart("answer", `rates-${i}`, `Learning rates${among}`, "Validation loss; the chosen rate of an arm is filled.",
      () => rateCurves(part), { wide: true });
  });
}

// An arm has the colour of the run that represents it.
const placeOf = (part, arm) => part.shown[arm] ?? runs.length + Object.keys(part.screening).indexOf(arm);

function differences(part, measure, compared, named) {
  const rows = compared.filter((row) => row.value !== null).map((row) => ({
    ...row, label: named(row, tick), name: named(row, (arm) => arm), format: "+.4~g", size: 10,
    colour: row.verdict === "better" || row.verdict === "worse" ? colour(placeOf(part, row.arm)) : css("--faint"),
    details: [row.interval ? `95 % interval ${ends(row.interval)}, ${row.seeds} seeds` : "one seed", row.verdict],
  }));
  if (!rows.length) return { missing: part.missing ? `Not compared: ${missingRuns(part)}` : "No arm has been run with the baseline's seeds yet." };
  const axis = { title: { text: `difference in ${measure}` }, zeroline: true, zerolinecolor: css("--ink"), zerolinewidth: 1 };
  return { ...intervalPoints(rows, axis), about: "Significant differences are coloured, all others grey." };
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
  if (!traces.length) return { missing: "No run of the study has finished yet." };
  const [low, high] = extent(traces.flatMap((trace) => trace.y));
  const logarithmic = { type: "log", dtick: "D2", tickformat: "~g" };
  const layout = {
    xaxis: { ...logarithmic, title: { text: "learning rate" } },
    // On a linear axis, one rate that diverged would hide the differences between all others.
    yaxis: { ...(low > 0 && high > 10 * low ? logarithmic : {}), title: { text: "validation loss" } },
  };
  const notes = unknown.length ? [`No run yet: ${unknown.join("; ")}.`] : [];
  if (part.missing) notes.push(`A learning rate is chosen only when all of its runs are complete; ${missingRuns(part)}`);
  return { traces, layout, legend, note: notes.join(" "), height: 420 };
}
