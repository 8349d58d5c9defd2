// A form for one task, made from its fields, and what was typed into it.

import { h } from "./dom.js";
import { base64, samples } from "./media.js";

const ACCEPTED = { image: "image/*", audio: "audio/*" };

export class Form {
  // `rate` is the model's own, in hertz, for tasks that listen.
  constructor(fields, rate) {
    this.fields = fields;
    this.rate = rate ?? 16000;
    this.controls = Object.fromEntries(fields.map((field) => [field.name, control(field)]));
    this.preview = h("div", { class: "preview" });
    this.imageUrl = null;
    const small = (field) => ["number", "check"].includes(field.kind);
    this.elements = [
      ...fields.filter((field) => !small(field)).map((field) => this.#labelled(field)),
      this.preview,
      fields.some(small) ? h("div", { class: "bar" }, fields.filter(small).map((field) => this.#labelled(field))) : null,
    ];
  }

  // What was typed, by field; files as their contents.
  async values() {
    const entries = await Promise.all(this.fields.map(async (field) => [field.name, await this.#value(field)]));
    return { ...Object.fromEntries(entries), imageUrl: this.imageUrl };
  }

  close() {
    if (this.imageUrl) URL.revokeObjectURL(this.imageUrl);
  }

  #labelled(field) {
    const element = this.controls[field.name];
    if (field.kind === "image" || field.kind === "audio") element.addEventListener("change", () => this.#show(field, element.files[0]));
    if (field.kind === "check") return h("label", { class: "check" }, element, field.label);
    const hint = field.kind === "labels" ? "separated by commas"
      : field.kind === "audio" ? `decoded here, to ${this.rate.toLocaleString("en")} Hz` : "";
    return h("label", { class: field.kind === "number" ? "inline" : "field" },
      h("span", {}, field.label, hint ? h("small", {}, ` ${hint}`) : null), element);
  }

  #show({ kind }, file) {
    this.close();
    this.imageUrl = null;
    this.preview.replaceChildren();
    if (!file) return;
    const url = URL.createObjectURL(file);
    this.imageUrl = url;
    this.preview.append(kind === "image" ? h("img", { src: url, alt: `${file.name}, as chosen` }) : h("audio", { controls: true, src: url }));
  }

  async #value({ name, label, kind }) {
    const { value, checked, files } = this.controls[name];
    if (kind === "check") return checked;
    if (kind === "number") return value === "" ? null : Number(value);
    if (kind === "labels") return value.split(",").map((entry) => entry.trim()).filter(Boolean);
    if (kind === "lines") return value.split("\n").filter((entry) => entry.trim());
    if (kind === "json") return parsed(label, value);
    if (kind !== "image" && kind !== "audio") return value;
    if (!files[0]) throw new Error(`choose a file for "${label}"`);
    return kind === "image" ? base64(files[0]) : samples(files[0], this.rate);
  }
}

function control({ name, kind, value = "", rows = 3, hint = "" }) {
  const common = { name, spellcheck: "false", autocomplete: "off" };
  if (kind === "check") return h("input", { ...common, type: "checkbox" });
  if (kind === "number") return h("input", { ...common, type: "number", step: "any", placeholder: hint });
  if (ACCEPTED[kind]) return h("input", { ...common, type: "file", accept: ACCEPTED[kind] });
  if (kind === "line" || kind === "labels") return h("input", { ...common, type: "text", value });
  return h("textarea", { ...common, rows, class: kind === "json" ? "code" : null }, value);
}

function parsed(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}
