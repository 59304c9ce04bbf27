// Numbers as they came, and how they are shown.
const report = JSON.parse(document.getElementById("data").textContent);

// {f32, shape} -> one Float32Array, or rows of them. Float32 holds the files' five digits exactly enough to print them.
function unpack(packed) {
  const text = atob(packed.f32);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const all = new Float32Array(bytes.buffer);
  if (packed.shape.length < 2) return all;
  const [rows, columns] = packed.shape;
  return Array.from({ length: rows }, (_, i) => all.subarray(i * columns, (i + 1) * columns));
}

const unpacked = new WeakMap();
function numbers(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
}

function shown(value, digits = 5) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

// Colours of runs: told apart by people who do not see red or green, at 3:1 or more against either page.
const RUN_COLOURS = {
  light: ["#0072b2", "#c44e00", "#00805e", "#a8447f", "#7a6000", "#2b8fc9", "#5b47c0", "#565c64"],
  dark: ["#56b4e9", "#ff9b57", "#33c99b", "#e59ac6", "#e6c84f", "#9cc8ff", "#b7a6ff", "#c5cbd3"],
};
const DASHES = ["solid", "dash", "dot", "dashdot"];
const theme = () => (printing ? "light" : document.documentElement.dataset.theme);
const colour = (index) => RUN_COLOURS[theme()][index % 8];
// Lines differ too: two runs that coincide both show, and beyond the eighth a colour comes back with another line.
const dash = (index) => DASHES[(index + Math.floor(index / 8)) % 4];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SEQUENTIAL = "Viridis";
const diverging = () =>
  theme() === "dark"
    ? [[0, "#6db3f2"], [0.5, "#23282f"], [1, "#f5a54a"]]
    : [[0, "#1f66ad"], [0.5, "#f7f7f7"], [1, "#b45f06"]];

// Text that others chose as plotly shows it as it is: no tag, no link, no place of a template; our line breaks stay.
function literal(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;").replace(/\n/g, "<br>");
}
// The whole of a long name in a hover label: in lines, so that it stays on the page.
const inLines = (text, most = 40) => String(text).match(new RegExp(`[^]{1,${most}}`, "gu"))?.join("\n") ?? "";
// A name where there is little room; no two runs or arms share one.
const brief = (name) => report.labels[name] ?? name;
// The same beside an axis, where a long line would leave no room for the chart.
const tick = (name) => inLines(brief(name), 26);
const linesIn = (text) => text.split("\n").length;

const range = (n) => Array.from({ length: n }, (_, i) => i);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

// A centred running mean; the window is a thirtieth of the points, so short runs are not smoothed at all.
function smoothed(values) {
  const half = Math.floor(values.length / 60);
  if (half < 1) return null;
  return Array.from(values, (_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => !Number.isNaN(v));
    return part.length ? mean(Array.from(part)) : NaN;
  });
}
