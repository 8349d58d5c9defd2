// The machine as it is, drawn from one document of dashboard/data: front workers, model server, devices with slots.

import { bytes, counted, duration, h, short } from "./dom.js";

const COLOURS = 8;
// States that somebody should look at, and those that pass by themselves.
const BAD = new Set(["failed", "failing", "killed", "silent"]);
const GOOD = new Set(["ready"]);
const IDLE = new Set(["vacant", "stopping", "unknown", "idle", "unloaded"]);

// An idle model is loaded for its next request.
const answers = (model) => model.replicas_ready > 0 || model.state === "idle";

export const colourOf = (names, name) => `var(--c${Math.max(0, names.indexOf(name)) % COLOURS})`;

export function tone(state) {
  if (GOOD.has(state)) return "good";
  if (BAD.has(state)) return "bad";
  return IDLE.has(state) ? "idle" : "busy";
}

// A state is told by its word as well as by its colour.
export const stateMark = (state, words = state) => h("span", { class: `state ${tone(state)}` }, words);

// Read aloud when it changes, and only then; so nothing that changes all the time stands in it.
export const pill = (mark, words) => h("span", { class: `pill ${mark}`, role: "status" }, words);

export function headline({ status, problem }) {
  if (!status) return [pill("bad", "model server not heard"), h("span", { class: "soft" }, problem)];
  const missing = status.models.filter((model) => model.required && !answers(model));
  const optional = status.models.filter((model) => !model.required && !answers(model));
  const [word, mark] = status.draining ? ["draining", "bad"]
    : !status.models.length ? ["no model", "bad"]
    : missing.length ? [`${missing.map((model) => model.name).join(", ")} not ready`, missing.some((model) => model.state === "failed") ? "bad" : "busy"]
    : optional.length ? [`ready, without ${optional.map((model) => model.name).join(", ")}`, "busy"]
    : ["ready", "good"];
  return [
    pill(mark, word),
    h("span", { class: "soft" }, `version ${status.version}, up ${duration(status.uptime_s)}`),
  ];
}

// `flow` is {rate, inflight}: requests a second and under way; null where not known.
export function picture({ status, front_workers: workers }, flow) {
  const moving = flow.rate > 0 ? "moving" : "";
  const names = status ? status.models.map((model) => model.name) : [];
  return [
    h("div", { class: "column fronts" }, fronts(status, workers, flow)),
    h("div", { class: `wire ${moving}`, "aria-hidden": "true" }),
    h("div", { class: "column" }, status ? server(status, names) : absent()),
    h("div", { class: `wire ${moving}`, "aria-hidden": "true" }),
    h("div", { class: "column" }, status ? devices(status, names) : null),
  ];
}

function fronts(status, configured, { rate, inflight }) {
  const heard = status ? status.fronts : 0;
  return h("article", { class: "card part" },
    h("h3", {}, "Front workers"),
    h("p", { class: "soft" }, "speak HTTP, hold no model"),
    h("div", { class: "workers", role: "img", "aria-label": counted(heard, "front worker is connected", "front workers are connected") },
      Array.from({ length: Math.min(32, Math.max(heard, configured)) }, (_, index) =>
        h("i", { class: index < heard ? "worker" : "worker missing" }))),
    facts([
      ["connected", status ? (heard === configured ? heard : `${heard} of ${configured}`) : "–"],
      ["requests/s", rate === null ? "–" : short(rate)],
      ["under way", inflight === null ? "–" : short(inflight)],
      status?.clients ? ["other programs", status.clients] : null,
    ]));
}

function absent() {
  return h("article", { class: "card part" }, h("h3", {}, "Model server"), stateMark("silent", "not heard"),
    h("p", { class: "soft" }, "The front workers go on looking for it, and requests wait until their deadline."));
}

function server(status, names) {
  const most = Math.max(8, ...status.models.map((model) => model.queued));
  return h("article", { class: "card part" },
    h("h3", {}, "Model server"),
    h("p", { class: "soft" }, "queues and batches, without torch"),
    h("ul", { class: "queues" }, status.models.map((model) => h("li", { "data-key": model.name },
      h("div", { class: "row" },
        h("i", { class: "swatch", style: { background: colourOf(names, model.name) } }),
        h("b", {}, model.name), h("span", { class: "soft grow" }, model.task),
        stateMark(model.state, model.state === "ready" ? `${model.replicas_ready}/${model.replicas_total} ready` : model.state)),
      h("div", { class: "row" },
        h("span", { class: "meter", role: "img", "aria-label": `${model.queued} waiting` },
          h("i", { style: { width: `${(100 * model.queued) / most}%`, background: colourOf(names, model.name) } })),
        h("span", { class: "number" }, `${short(model.queued)} waiting`)),
      model.reason ? h("p", { class: "reason" }, model.reason) : null))),
    facts([["pid", status.pid], status.malformed ? ["messages dropped", status.malformed] : null]));
}

function devices(status, names) {
  const listed = status.devices.length ? status.devices
    : [...new Set(status.slots.map((slot) => slot.device))].map((device) => ({ device, name: "", memory_bytes: 0 }));
  return listed.map((device) => {
    const slots = status.slots.filter((slot) => slot.device === device.device);
    const used = slots.reduce((total, slot) => total + slot.memory_bytes, 0);
    const whole = Math.max(device.memory_bytes, used, 1);
    return h("article", { class: "card part", "data-key": device.device },
      h("div", { class: "row" }, h("h3", { class: "device" }, device.device), h("span", { class: "soft grow" }, device.name),
        h("span", { class: "number" }, device.memory_bytes ? `${bytes(used)} of ${bytes(device.memory_bytes)}` : bytes(used))),
      h("div", { class: "memory", role: "img", "aria-label": `memory: ${bytes(used)}${device.memory_bytes ? ` of ${bytes(device.memory_bytes)}` : ""}` },
        slots.map((slot) => h("i", {
          title: `${slot.slot}: ${bytes(slot.memory_bytes)}`,
          style: { width: `${(100 * slot.memory_bytes) / whole}%`, background: colourOf(names, slot.model) },
        }))),
      h("ul", { class: "slots" }, slots.map((slot) => slotTile(slot, names))));
  });
}

function slotTile(slot, names) {
  const progress = slot.progress >= 0 && slot.progress < 1 && slot.state !== "ready" ? slot.progress : null;
  const words = progress === null ? slot.state : `${slot.state} ${Math.round(progress * 100)} %`;
  return h("li", { class: `slot ${tone(slot.state)}`, "data-key": slot.slot },
    h("details", {},
      h("summary", {},
        h("i", { class: "swatch", style: { background: colourOf(names, slot.model) } }),
        h("b", {}, slot.slot), stateMark(slot.state, words),
        h("span", { class: "soft grow" }, slot.held ? `holds ${short(slot.held)}` : slot.state === "ready" ? "idle" : ""),
        h("span", { class: "number" }, slot.memory_bytes ? bytes(slot.memory_bytes) : "–")),
      facts([
        ["pid", slot.pid || "–"], ["incarnation", slot.incarnation], ["restarts", slot.restarts],
        ["batches", slot.batches.toLocaleString("en")], ["requests", slot.requests.toLocaleString("en")],
        ["last heard", slot.heard_ms_ago < 0 ? "–" : `${slot.heard_ms_ago} ms ago`],
        ...Object.entries(slot.choices).filter(([, value]) => value !== null && typeof value !== "object")
          .map(([name, value]) => [name.replaceAll("_", " "), name.endsWith("bytes") || name.includes("bytes_") ? bytes(value) : String(value)]),
      ])),
    progress === null ? null : h("div", { class: "memory thin" }, h("i", { class: "progress", style: { width: `${progress * 100}%` } })),
    slot.reason ? h("p", { class: "reason" }, slot.reason) : null);
}

const facts = (entries) => h("dl", { class: "facts" }, entries.filter(Boolean).map(([name, value]) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
