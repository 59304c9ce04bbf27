// The data of the page, and the format of numbers and names.
const report = JSON.parse(document.getElementById("data").textContent);

// {f32, shape} -> one Float32Array, or rows of them. Float32 is precise enough for the five digits of the files.
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

const { colours: COLOURS, dashes: DASHES, colormap: COLORMAP, measures: MEASURES } = report.charts;
const theme = () => (printing ? "light" : document.documentElement.dataset.theme);
const colour = (index) => COLOURS[theme()][index % COLOURS.light.length];
// Dashes differ too, so that two lines with the same values are both visible; a colour that repeats has other dashes.
const dash = (index) => DASHES[(index + Math.floor(index / COLOURS.light.length)) % DASHES.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const diverging = () =>
  theme() === "dark"
    ? [[0, "#6db3f2"], [0.5, "#23282f"], [1, "#f5a54a"]]
    : [[0, "#1f66ad"], [0.5, "#f7f7f7"], [1, "#b45f06"]];

// Names come from users: plotly must show them literally, without tags, links or template fields. Line breaks stay.
function literal(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;").replace(/\n/g, "<br>");
}
// A long name in lines, so that a hover label stays on the page.
const inLines = (text, most = 32) => String(text).match(new RegExp(`[^]{1,${most}}`, "gu"))?.join("\n") ?? "";
// The short form of a name, which is unique among runs and arms.
const brief = (name) => report.labels[name] ?? name;
// The short form at an axis, in lines so that the chart keeps its width.
const tick = (name) => inLines(brief(name), 26);
const linesIn = (text) => text.split("\n").length;

const range = (n) => Array.from({ length: n }, (_, i) => i);

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}
