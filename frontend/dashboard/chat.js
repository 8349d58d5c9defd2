// A talk with a model that generates text, streamed. Models without a chat template get the text as it is and go on.

import { h, short } from "./dom.js";
import { stream } from "./service.js";
import { given } from "./tasks.js";

const SETTINGS = [
  ["max_new_tokens", "Tokens at most", 200], ["temperature", "Temperature", ""], ["top_p", "top_p", ""],
  ["top_k", "top_k", ""], ["repetition_penalty", "Repetition penalty", ""], ["seed", "Seed", ""],
];

export class Chat {
  // `talks`: the model has a chat template. `known` are the parameters that it takes.
  constructor(model, talks, known, onFailure) {
    Object.assign(this, { model, talks, onFailure, messages: [], running: null });
    this.log = h("div", { class: "talk", role: "log", tabindex: 0, "aria-label": `Talk with ${model}` });
    this.text = h("textarea", { rows: 2, "aria-label": talks ? "Message" : "Beginning of a text", placeholder: talks ? "Say something. Enter sends, Shift+Enter is a new line." : "The model goes on from here.", onkeydown: (event) => this.#key(event) });
    this.system = h("textarea", { rows: 2, placeholder: "You are a helpful assistant." });
    this.settings = SETTINGS.filter(([name]) => !known || known.includes(name)).map(([name, label, value]) =>
      [name, label, h("input", { type: "number", step: "any", min: 0, value, placeholder: "usual" })]);
    this.send = h("button", { class: "main" }, "Send");
    this.note = h("span", { class: "soft", role: "status" });
    this.hint = h("p", { class: "soft center" }, talks ? "Nothing said yet." : "This model has no chat template: it goes on with what you write.");
    this.log.append(this.hint);
    this.element = h("form", { class: "chat", onsubmit: (event) => this.#submit(event) },
      this.log,
      h("div", { class: "say" }, this.text, this.send),
      h("div", { class: "bar" }, h("button", { type: "button", onclick: () => this.#clear() }, "New talk"), this.note),
      h("details", {}, h("summary", {}, "Settings"),
        talks ? h("label", { class: "field" }, h("span", {}, "System message"), this.system) : null,
        h("div", { class: "bar" }, this.settings.map(([, label, input]) => h("label", { class: "inline" }, h("span", {}, label), input)))));
  }

  close() {
    this.running?.abort();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.element.requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    if (this.running) {
      this.running.abort();
      return;
    }
    const text = this.text.value;
    if (!text.trim()) return;
    this.text.value = "";
    // Two questions in a row: the one before was not answered.
    if (this.messages.at(-1)?.role === "user") this.messages.pop();
    this.messages.push({ role: "user", content: text });
    this.#card("user", text);
    this.#answer(text);
  }

  async #answer(text) {
    const card = this.#card("assistant busy", "");
    // A new talk may begin before this answer ends.
    const { messages } = this;
    const system = this.system.value.trim();
    const body = {
      inputs: this.talks ? [...(system ? [{ role: "system", content: system }] : []), ...messages] : text,
      parameters: given(Object.fromEntries(this.settings.map(([name, , input]) => [name, input.value === "" ? null : Number(input.value)]))),
    };
    this.running = new AbortController();
    this.send.textContent = "Stop";
    this.note.textContent = "";
    const began = performance.now();
    let first = null;
    let done = null;
    try {
      for await (const { piece, done: end } of stream(this.model, body, this.running.signal)) {
        first ??= performance.now() - began;
        done = end;
        if (piece) this.#append(card, piece.text ?? "");
      }
    } catch (error) {
      // Whoever stops an answer keeps what there is of it, and the service computes no more.
      if (error.name !== "AbortError") {
        this.#card("failed", error.message);
        this.onFailure(error);
      }
    }
    const took = performance.now() - began;
    card.classList.remove("busy");
    if (done) this.#summary(done, first, took);
    if (card.textContent) messages.push({ role: "assistant", content: card.textContent });
    else card.remove();
    this.running = null;
    this.send.textContent = "Send";
  }

  #summary({ generated_tokens: tokens, finish_reason: reason }, first, took) {
    const speed = tokens > 1 ? `, ${short(((tokens - 1) * 1000) / (took - first))} a second` : "";
    const end = reason === "length" ? "; cut off at the longest answer" : "";
    this.note.textContent = `${tokens} tokens${speed}, the first after ${short(first)} ms${end}`;
  }

  #card(kind, text) {
    this.hint.remove();
    const card = h("p", { class: `said ${kind}` }, text);
    this.log.append(card);
    this.log.scrollTop = this.log.scrollHeight;
    return card;
  }

  #append(card, text) {
    // Whoever has scrolled back to read is left there.
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    card.append(text);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.hint);
    this.note.textContent = "";
    this.text.focus();
  }
}
