// What went wrong since the model server was started, the newest first, and how requests ended.

import { counted, duration, h } from "./dom.js";
import { colourOf } from "./machine.js";

// Codes and events of the log, for people.
const WORDS = {
  deadline_exceeded: "no answer before the deadline",
  draining: "came while no new requests were taken",
  front_left: "a front worker went away with requests under way",
  internal: "a fault of headwaiter itself",
  loop_late: "the model server itself was held up",
  model_crashed: "a model process died under a request",
  model_error: "the model raised an error",
  model_failed: "a model was given up",
  model_loading: "the model was not ready",
  out_of_memory: "the device's memory did not suffice",
  overloaded: "too much was waiting already",
  poison_input: "an input that ends its process was refused",
  replica_exited: "a model process ended",
  replica_killed: "a model process was ended",
  replica_quarantined: "a model process is not heard",
  request_poisoned: "an input ended its process twice",
  slot_given_up: "a slot was given up",
  spawn_failed: "a process could not be started",
};

export function troubleList({ status }) {
  if (!status) return [h("p", { class: "soft" }, "The model server is not heard, so nothing is known.")];
  const models = status.models.map((model) => model.name);
  return [
    status.troubles.length
      ? h("ol", { class: "troubles" }, [...status.troubles].reverse().map((trouble) => row(trouble, models)))
      : h("p", { class: "card calm" }, "Nothing has gone wrong since the model server was started."),
    h("div", { class: "card scroll" }, endings(status)),
  ];
}

function row(trouble, models) {
  const model = trouble.slot.replace(/\/[^/]*$/, "");
  return h("li", { class: "card trouble", "data-key": `${trouble.event} ${trouble.slot}` },
    h("span", { class: "when" }, `${duration(trouble.seconds_ago)} ago`),
    h("div", {},
      h("p", {},
        trouble.slot ? h("i", { class: "swatch", style: { background: colourOf(models, model) } }) : null,
        trouble.slot ? h("b", {}, `${trouble.slot} `) : null,
        WORDS[trouble.event] ?? trouble.event.replaceAll("_", " "),
        trouble.count > 1 ? h("span", { class: "count" }, `${trouble.count.toLocaleString("en")} times`) : null),
      trouble.text ? h("p", { class: "cause" }, trouble.text) : null),
    h("code", { class: "soft" }, trouble.event));
}

// Codes that requests ended with, model by model, over the life of the model server.
function endings(status) {
  const rows = status.counters.map((counters) => {
    const codes = Object.entries(counters.ended).concat(Object.entries(counters.rejected));
    const other = new Map();
    for (const [code, count] of codes) if (code !== "ok") other.set(code, (other.get(code) ?? 0) + count);
    const restarts = Object.entries(counters.restarts).map(([cause, count]) => `${cause} ${count}`).join(", ");
    return h("tr", {},
      h("th", { scope: "row" }, counters.model),
      h("td", { class: "number" }, (counters.ended.ok ?? 0).toLocaleString("en")),
      h("td", {}, [...other].map(([code, count]) => h("span", { class: "chip" }, `${code} ${count.toLocaleString("en")}`)), other.size ? null : "–"),
      h("td", { class: "number" }, counters.retried.toLocaleString("en")),
      h("td", {}, restarts || "–"));
  });
  return h("table", {},
    h("caption", {}, `How ${counted(status.counters.length, "model", "models")} answered, in ${duration(status.uptime_s)}`),
    h("thead", {}, h("tr", {}, ["Model", "Answered", "Otherwise", "Run again", "Processes replaced"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows));
}
