// Answers, drawn by what they look like: whatever the task, a list of labels with scores is bars.

import { h, s, short } from "./dom.js";
import { isPicture, pictureUrl, soundUrl } from "./media.js";

const JSON_CHARS_MAX = 20000;
const ROWS_MAX = 50;
const HUES = 8;

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isList = (value, of) => Array.isArray(value) && value.length > 0 && value.every(of);
const isVector = (value) => isList(value, (entry) => typeof entry === "number" || entry === null);

// `values` are those of the form that was sent; `urls` collects what is to be revoked with the answer.
export function drawing(result, values, urls) {
  for (const [fits, shown] of VIEWS) if (fits(result, values)) return shown(result, values, urls);
  return null;
}

const VIEWS = [
  [(result) => isObject(result) && isList(result.labels, (label) => typeof label === "string") && isVector(result.scores),
    ({ labels, scores }) => bars(labels.map((label, index) => ({ label, score: scores[index] })))],
  [(result) => isList(result, (entry) => isObject(entry) && isObject(entry.box)), boxes],
  [(result, { context }) => context !== undefined && isList([result].flat(), (entry) => isObject(entry) && "answer" in entry && "start" in entry),
    (result, { context }) => [result].flat().map((answer) => found(answer, context))],
  [(result, { text }) => text !== undefined && isList(result, (entry) => isObject(entry) && typeof entry.start === "number" && ("entity" in entry || "entity_group" in entry)),
    (result, { text }) => entities(result, text)],
  [(result) => isList(result, (entry) => isObject(entry) && "token_str" in entry),
    (result) => bars(result.map(({ token_str: token, score }) => ({ label: token, score })))],
  [(result) => isList(result, (entry) => isObject(entry) && isPicture(entry.mask)), masks],
  [(result) => isObject(result) && isPicture(result.depth), ({ depth }, _, urls) => picture(depth, "depth", urls)],
  [(result) => isList(result, (entry) => isObject(entry) && "label" in entry && typeof entry.score === "number"), bars],
  [(result) => isList(result, (entry) => isList(entry, (inner) => isObject(inner) && "label" in inner && typeof inner.score === "number")),
    (result) => result.map(bars)],
  [(result) => isObject(result) && Array.isArray(result.audio) && result.sampling_rate, sound],
  [(result, { texts }) => texts !== undefined && isList(result, isVector), (result, { texts }) => likeness(result, texts)],
  [isVector, vector],
  [(result) => isObject(result) && typeof result.text === "string", ({ text }) => h("p", { class: "said" }, text)],
  [(result) => isObject(result) && typeof result.generated_text === "string", ({ generated_text: text }) => h("p", { class: "said" }, text)],
  [(result) => typeof result === "string", (result) => h("p", { class: "said" }, result)],
];

function bars(rows) {
  return h("ul", { class: "bars" }, rows.slice(0, ROWS_MAX).map(({ label, score }) => h("li", {},
    h("span", { class: "name" }, String(label)),
    h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${100 * Math.max(0, Math.min(1, score))}%` } })),
    h("span", { class: "number" }, short(score)))));
}

// The text around an answer, with the answer marked. Positions count characters, where JavaScript counts halves of some.
function found({ answer, score, start, end }, context) {
  const letters = [...context];
  return h("div", {},
    h("p", { class: "said" }, answer || "no answer", " ", h("span", { class: "chip" }, short(score))),
    answer ? h("p", { class: "soft" }, letters.slice(0, start).join(""), h("mark", {}, letters.slice(start, end).join("")), letters.slice(end).join("")) : null);
}

function entities(rows, text) {
  const letters = [...text];
  const kinds = [...new Set(rows.map(kindOf))];
  const parts = [];
  let position = 0;
  for (const row of [...rows].sort((one, other) => one.start - other.start)) {
    if (row.start < position) continue;
    parts.push(letters.slice(position, row.start).join(""));
    parts.push(h("mark", { class: "entity", style: { "--hue": `var(--c${kinds.indexOf(kindOf(row)) % HUES})` } },
      letters.slice(row.start, row.end).join(""), h("small", {}, kindOf(row))));
    position = row.end;
  }
  return h("p", { class: "said" }, parts, letters.slice(position).join(""));
}

const kindOf = (row) => String(row.entity_group ?? row.entity);

// Boxes over the picture that was sent.
function boxes(rows, { imageUrl }) {
  if (!imageUrl) return bars(rows);
  const frame = h("div", { class: "boxes" });
  const image = h("img", { src: imageUrl, alt: "the picture that was sent" });
  image.addEventListener("load", () => frame.append(s("svg", { viewBox: `0 0 ${image.naturalWidth} ${image.naturalHeight}`, "aria-hidden": "true" },
    rows.map(({ box }, index) => s("rect", {
      x: box.xmin, y: box.ymin, width: box.xmax - box.xmin, height: box.ymax - box.ymin, style: { stroke: `var(--c${index % HUES})` },
    })))));
  frame.append(image);
  return [frame, bars(rows)];
}

function picture(text, name, urls) {
  const url = pictureUrl(text);
  urls.push(url);
  return h("img", { class: "made", src: url, alt: name });
}

function masks(rows, _, urls) {
  return h("div", { class: "gallery" }, rows.slice(0, ROWS_MAX).map(({ label, mask }) =>
    h("figure", {}, picture(mask, `where ${label} is`, urls), h("figcaption", {}, String(label)))));
}

function sound({ audio, sampling_rate: rate }, _, urls) {
  const url = soundUrl(audio.flat(Infinity), rate);
  urls.push(url);
  return h("audio", { controls: true, src: url });
}

// How alike texts are, by the angle between their vectors.
function likeness(vectors, texts) {
  const lengths = vectors.map((one) => Math.hypot(...one));
  const alike = (one, other) => vectors[one].reduce((total, value, index) => total + value * vectors[other][index], 0) / (lengths[one] * lengths[other]);
  return [
    h("p", { class: "soft" }, `${vectors.length} vectors of ${vectors[0].length} numbers; how alike the texts are, by cosine:`),
    h("div", { class: "scroll" }, h("table", { class: "likeness" },
      h("thead", {}, h("tr", {}, h("td", {}), texts.map((_, index) => h("th", { scope: "col" }, String(index + 1))))),
      h("tbody", {}, texts.map((text, row) => h("tr", {}, h("th", { scope: "row" }, `${row + 1}  ${text}`),
        texts.map((_, column) => {
          const value = alike(row, column);
          return h("td", { style: { "--share": `${Math.round(100 * Math.max(0, value))}%` } }, value.toFixed(2));
        })))))),
  ];
}

function vector(values) {
  const size = Math.max(...values.map(Math.abs)) || 1;
  const width = 2;
  return [
    h("p", { class: "soft" }, `${values.length} numbers, from ${short(Math.min(...values))} to ${short(Math.max(...values))}`),
    s("svg", { class: "vector", viewBox: `0 0 ${values.length * width} 60`, preserveAspectRatio: "none", "aria-hidden": "true" },
      values.map((value, index) => s("rect", {
        x: index * width, width: width * 0.8, y: value > 0 ? 30 - (30 * value) / size : 30, height: (30 * Math.abs(value)) / size,
      }))),
  ];
}

// The answer as it came.
export function plain(result) {
  const all = JSON.stringify(result, null, Array.isArray(result) && isList(result.flat(Infinity), (value) => typeof value === "number") ? 0 : 2);
  const cut = all.length > JSON_CHARS_MAX ? `${all.slice(0, JSON_CHARS_MAX)}\n… ${all.length.toLocaleString("en")} characters in all` : all;
  return h("pre", { tabindex: 0 }, cut);
}
