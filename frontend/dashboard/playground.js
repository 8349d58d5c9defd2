// A model to choose, a form made for its task, and its answer.

import { Chat } from "./chat.js";
import { draw, h, short } from "./dom.js";
import { Form } from "./form.js";
import { drawing, plain } from "./results.js";
import { ask, hasKey, modelPath, Refused, stream } from "./service.js";
import { formOf } from "./tasks.js";

// A picture in a preview of the request would be the whole preview.
const SHOWN_CHARS_MAX = 4000;
const STRING_CHARS_MAX = 200;

export class Playground {
  constructor(bench, choice, about, askForKey) {
    Object.assign(this, { bench, choice, about, askForKey, status: null, present: null, models: null, running: null, urls: [] });
    choice.addEventListener("change", () => this.update(this.status));
  }

  // The newest snapshot. A form stays as it is, with what was typed, as long as its model is the same.
  update(status) {
    this.status = status;
    const names = status.models.map((model) => model.name);
    if (this.models !== names.join("\n")) {
      this.models = names.join("\n");
      const chosen = this.choice.value;
      this.choice.replaceChildren(...status.models.map(({ name }) => new Option(name)));
      this.choice.value = names.includes(chosen) ? chosen : (status.models.find(({ task }) => task === "text-generation") ?? status.models[0])?.name ?? "";
    }
    const model = this.#model();
    if (model) this.about.textContent = `${model.task}${model.state === "ready" ? "" : `, ${model.state}: requests wait until it is ready`}`;
    if (this.present !== this.#wanted()) this.#open();
  }

  #model() {
    return this.status?.models.find(({ name }) => name === this.choice.value);
  }

  #slotChoices() {
    return this.status.slots.find(({ model, choices }) => model === this.choice.value && Object.keys(choices).length)?.choices ?? {};
  }

  // What a form is made for; a chat is made anew once it is known whether the model has a chat template.
  #wanted() {
    const model = this.#model();
    const choices = model ? this.#slotChoices() : {};
    return model ? `${model.name}\n${model.task}\n${choices.chat_template ?? ""}\n${choices.sampling_rate_hz ?? ""}` : "";
  }

  #open() {
    this.present = this.#wanted();
    this.open?.close();
    this.open = null;
    // An answer to the form before would be drawn into this one.
    this.running?.abort();
    this.running = null;
    this.#forgetAnswer();
    const model = this.#model();
    if (!model) {
      draw(this.bench, h("p", { class: "soft" }, "There is no model to try."));
      return;
    }
    const choices = this.#slotChoices();
    if (model.task === "text-generation") {
      this.open = new Chat(model.name, choices.chat_template === true, choices.parameters, (error) => this.#failed(error));
      this.bench.replaceChildren(this.open.element);
      return;
    }
    this.#openForm(model, choices);
  }

  #openForm(model, choices) {
    const task = formOf(model.task);
    this.open = new Form(task.fields, choices.sampling_rate_hz);
    this.send = h("button", { class: "main" }, "Ask");
    this.note = h("span", { class: "soft", role: "status" });
    this.answer = h("div", { class: "answer", "aria-live": "polite" });
    this.request = h("pre", { tabindex: 0 });
    const details = h("details", { ontoggle: () => details.open && this.#preview(model, task) },
      h("summary", {}, "The request, as curl"), this.request);
    this.bench.replaceChildren(h("div", { class: "split" },
      h("form", { onsubmit: (event) => this.#submit(event, model, task), oninput: () => details.open && this.#preview(model, task) },
        this.open.elements, h("div", { class: "bar" }, this.send, this.note), details),
      this.answer));
    this.answer.append(h("p", { class: "soft center" }, "The answer will be here."));
  }

  async #submit(event, model, task) {
    event.preventDefault();
    if (this.running) {
      this.running.abort();
      return;
    }
    const running = (this.running = new AbortController());
    this.send.textContent = "Stop";
    this.note.textContent = "";
    try {
      const values = await this.open.values();
      const body = task.request(values);
      if (body.stream) await this.#pieces(model, body, running.signal);
      else this.#show(await ask(model.name, body, running.signal), values);
    } catch (error) {
      if (!running.signal.aborted) this.#failed(error);
    }
    if (this.running !== running && this.running !== null) return;
    this.running = null;
    this.send.textContent = "Ask";
  }

  async #pieces(model, { stream: _, ...body }, signal) {
    this.#forgetAnswer();
    const text = h("p", { class: "said" });
    this.answer.replaceChildren(text);
    for await (const { piece, done } of stream(model.name, body, signal)) {
      if (done !== undefined) this.answer.append(plain(done));
      else text.append(typeof piece?.text === "string" ? piece.text : `${JSON.stringify(piece)}\n`);
    }
  }

  #show({ value, total_ms: total, parts }, values) {
    this.#forgetAnswer();
    const shown = drawing(value, values, this.urls);
    this.answer.replaceChildren(...[
      shown,
      h("details", { open: shown === null }, h("summary", {}, "JSON"), plain(value)),
      times(total, parts),
    ].flat(Infinity).filter(Boolean));
  }

  #failed(error) {
    if (error instanceof Refused && error.status === 401) this.askForKey(hasKey() ? "The service does not know this key." : "");
    if (!this.answer?.isConnected) return;
    this.#forgetAnswer();
    const status = error instanceof Refused && error.status ? `${error.status} ${error.type}` : "";
    this.answer.replaceChildren(h("div", { class: "notice bad", role: "alert" },
      h("p", {}, error.message), status ? h("code", {}, status) : null,
      error.detail ? h("pre", {}, JSON.stringify(error.detail, null, 2)) : null));
  }

  #forgetAnswer() {
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.urls = [];
  }

  async #preview(model, task) {
    try {
      const body = JSON.stringify(task.request(await this.open.values()), (_, value) =>
        typeof value === "string" && value.length > STRING_CHARS_MAX ? `${value.slice(0, 60)}…` : value);
      const url = new URL(modelPath(model.name), document.baseURI);
      const key = hasKey() ? " -H 'Authorization: Bearer KEY'" : "";
      this.request.textContent = `curl ${url}${key} -d '${body.slice(0, SHOWN_CHARS_MAX).replaceAll("'", "'\\''")}'`;
    } catch (error) {
      this.request.textContent = error.message;
    }
  }
}

// Where the time went, as a bar; what is left over is the way there and back.
function times(total, parts) {
  const rest = Math.max(0, total - parts.reduce((sum, { ms }) => sum + ms, 0));
  const all = [...parts, { name: "on the way", ms: rest }];
  const shade = (index) => (index < parts.length ? `var(--c${index})` : "var(--line)");
  return h("div", { class: "times" },
    h("div", { class: "memory thin", "aria-hidden": "true" }, all.map(({ ms }, index) => h("i", { style: { width: `${(100 * ms) / total}%`, background: shade(index) } }))),
    h("p", { class: "legend" }, h("span", { class: "entry" }, "in all", h("b", {}, `${short(total)} ms`)), all.map(({ name, ms }, index) =>
      h("span", { class: "entry" }, h("i", { style: { background: shade(index) } }), name, h("b", {}, `${short(ms)} ms`)))));
}
