// Questions with the answers of the base model and of the selected runs: searched, filtered, and shown a few at a time.
const AT_A_TIME = 10;
const KINDS = {
  all: () => true,
  wrong: (scores) => scores.runs.some((score) => score < 1),
  right: (scores) => scores.runs.length > 0 && scores.runs.every((score) => score >= 1),
  changed: (scores) => scores.base.length > 0 && scores.runs.some((score) => score !== scores.base[0]),
  differ: (scores) => new Set(scores.runs).size > 1,
};
const asked = { task: 0, kind: "all", text: "", most: AT_A_TIME };

// The answers of run 2 are under run-2, those of a base model under base or base: NAME.
const isRun = (model) => /^run-\d+$/.test(model);
const runOf = (model) => Number(model.slice(4));
function scoresOf(row) {
  const known = Object.entries(row.answers).filter(([, [, score]]) => score !== null && score !== undefined);
  const of = (keep) => known.filter(([model]) => keep(model)).map(([, [, score]]) => score);
  return { base: of((model) => !isRun(model)), runs: of((model) => isRun(model) && state.chosen.has(runOf(model))) };
}

function matches(row) {
  const texts = [row.question, row.expected, ...Object.values(row.answers).map(([text]) => text)];
  return KINDS[asked.kind](scoresOf(row)) && texts.some((text) => text.toLowerCase().includes(asked.text.toLowerCase()));
}

function answerRow(set, model, [text, score]) {
  const name = isRun(model) ? brief(runs[runOf(model)].name) : model;
  const known = score !== null && score !== undefined;
  const right = known && set.judged ? score >= 1 : null;
  const mark = right === null ? "" : right ? "✓ right" : "✗ wrong";
  const number = known && score !== 0 && score !== 1 ? `${set.measure} ${shown(score, 3)}` : "";
  const verdict = element("td", { class: right === null ? "" : right ? "right" : "wrong" }, [mark, number].filter(Boolean).join(", ") || "–");
  return element("tr", {}, element("th", { scope: "row" }, name), verdict, element("td", { class: "said" }, text || "(empty)"));
}

function exampleCard(set, row) {
  const answers = Object.entries(row.answers).filter(([model]) => !isRun(model) || state.chosen.has(runOf(model)));
  const expected = row.expected ? [element("p", { class: "said" }, element("span", { class: "faint" }, "expected: "), row.expected)] : [];
  const body = element("tbody", {}, ...answers.map(([model, answer]) => answerRow(set, model, answer)));
  return element("article", { class: "example" }, element("p", { class: "said asked" }, row.question), ...expected, element("table", {}, body));
}

function showExamples() {
  const set = report.examples[asked.task];
  if (!set) return;
  const found = set.rows.filter(matches);
  const listed = printing ? found.slice(0, AT_A_TIME) : found.slice(0, asked.most);
  const held = set.rows.length < set.total ? ` on this page, which holds them evenly spaced of ${count(set.total)}` : "";
  document.getElementById("example-count").textContent = `${count(found.length)} of ${count(set.rows.length)} questions${held}.`;
  document.getElementById("example-list").replaceChildren(...listed.map((row) => exampleCard(set, row)));
  document.getElementById("example-more").hidden = printing || found.length <= asked.most;
}

function makeExamples() {
  if (!report.examples.length) return;
  document.getElementById("examples").hidden = false;
  const control = (id) => document.getElementById(`example-${id}`);
  options(control("task"), report.examples.map((set) => set.task), range(report.examples.length));
  document.getElementById("example-task-field").hidden = report.examples.length < 2;
  const has = (keep) => report.examples.some((set) => set.rows.some((row) => Object.keys(row.answers).some(keep)));
  for (const [kind, offered] of [["changed", has((model) => !isRun(model))], ["differ", runs.length > 1]]) {
    if (!offered) control("kind").querySelector(`[value="${kind}"]`).remove();
  }
  const listen = (id, event, set) => control(id).addEventListener(event, () => { set(control(id).value); asked.most = AT_A_TIME; showExamples(); });
  listen("task", "change", (value) => { asked.task = Number(value); });
  listen("kind", "change", (value) => { asked.kind = value; });
  listen("search", "input", (value) => { asked.text = value; });
  control("more").addEventListener("click", () => { asked.most += AT_A_TIME; showExamples(); });
}
