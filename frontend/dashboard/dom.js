// Elements and numbers. Text becomes text nodes here, and nothing else in this page makes elements from text:
// what a model, an error or a name says can never turn into HTML.

const SVG = "http://www.w3.org/2000/svg";
// What the user has done to an element is not undone by drawing it again.
const KEPT = new Set(["open"]);

// An element: h("p", {class: "soft", onclick: run}, "text", child, …). Children that are null or false are left out.
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

// The same for SVG.
export function s(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Makes the children of `parent` look like `children`, and changes only what differs: focus, selection and open
// details stay. Listeners of elements that stay are those of the first drawing.
export function draw(parent, ...children) {
  const wanted = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
  wanted.forEach((child, index) => {
    const node = typeof child === "string" ? document.createTextNode(child) : child;
    const present = parent.childNodes[index];
    if (!present) parent.append(node);
    else if (!likened(present, node)) present.replaceWith(node);
  });
}

function likened(present, wanted) {
  if (present.nodeName !== wanted.nodeName) return false;
  if (present.nodeType === Node.TEXT_NODE) {
    if (present.data !== wanted.data) present.data = wanted.data;
    return true;
  }
  if (present.dataset?.key !== wanted.dataset?.key) return false;
  for (const { name } of [...present.attributes]) {
    if (!wanted.hasAttribute(name) && !KEPT.has(name)) present.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (name === "style") present.style.cssText = wanted.style.cssText;
    else if (present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
  draw(present, [...wanted.childNodes]);
  return true;
}

export const at = (id) => document.getElementById(id);

// 1234567 -> "1.18 MiB"
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (count >= 1024 && step < units.length - 1) {
    count /= 1024;
    step += 1;
  }
  return `${step ? short(count) : count} ${units[step]}`;
}

// Three digits that matter: 0.0312, 4.2, 1,240
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  if (size >= 10) return value.toFixed(1).replace(/\.0$/, "");
  if (size >= 0.01) return value.toFixed(2).replace(/\.?0+$/, "");
  return value.toPrecision(2);
}

// 0.0042 -> "4.2 ms"
export function seconds(value) {
  return value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`;
}

// 93784 -> "1d 2h"
export function duration(value) {
  const parts = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    const count = Math.floor(value / length);
    value -= count * length;
    if (count) parts.push(`${count}${unit}`);
  }
  return parts.slice(0, 2).join(" ") || "0s";
}

export const counted = (count, one, several) => `${count.toLocaleString("en")} ${count === 1 ? one : several}`;
