// Puts the page together: asks for the data every two seconds while somebody looks, and has every part draw it.

import { Chart } from "./charts.js";
import { at, draw, h, seconds, short } from "./dom.js";
import { History } from "./history.js";
import { colourOf, headline, picture, pill } from "./machine.js";
import { Playground } from "./playground.js";
import * as service from "./service.js";
import { troubleList } from "./troubles.js";

const EVERY_MS = 2000;
const TIMEOUT_MS = 5000;
// Longer than the longest span that can be chosen.
const KEPT_S = 960;
const SPAN_MIN_S = 60;
// More curves than this cannot be told apart: the busiest are drawn.
const CURVES_MAX = 8;
const ALL = "";

const history = new History(KEPT_S);
const playground = new Playground(at("bench"), at("playground-model"), at("playground-about"), askForKey);
const charts = {
  rate: new Chart("Requests", "answered per second", short, 1),
  latency: new Chart("Latency", "first header to last byte", seconds, 0.005),
  queue: new Chart("In the house", "waiting for a model, and under way in all", short, 4),
  batch: new Chart("Batch size", "requests that share a forward, on average", short, 2),
  tokens: new Chart("Tokens", "generated per second", short, 10),
  failures: new Chart("Not answered", "per second, by whose doing", short, 1),
};
let answer = null;
let paused = false;
let refused = false; // whether the service has said that it needs a key, or another one
let asked = null; // the models in the select, so that it is only filled when they change

draw(at("charts"), Object.values(charts).map((chart) => chart.element));

async function turn() {
  try {
    if (!paused && !document.hidden) await look();
  } finally {
    setTimeout(turn, EVERY_MS);
  }
}

async function look() {
  try {
    answer = await service.data(AbortSignal.timeout(TIMEOUT_MS));
  } catch (error) {
    history.add(performance.now() / 1000, null);
    failed(error);
    return;
  }
  refused = false;
  history.add(performance.now() / 1000, answer);
  draw(at("notice"));
  show();
}

function failed(error) {
  if (error instanceof service.Refused && error.status === 401) {
    draw(at("health"), pill("busy", "needs an API key"));
    // Asked for once; later it is the user who opens the dialog.
    if (!refused) askForKey(service.hasKey() ? "The service does not know this key." : "");
    refused = true;
    return;
  }
  const words = error instanceof service.Refused ? error.message : "This service does not answer; the page goes on asking.";
  draw(at("health"), pill("bad", "no answer"));
  draw(at("notice"), h("p", { class: "notice bad" }, words));
  if (answer) drawCharts();
}

function show() {
  const names = answer.status?.models.map((model) => model.name) ?? Object.keys(answer.http.models);
  draw(at("health"), headline(answer));
  const flow = { rate: history.rate(Object.keys(answer.http.models), "requests").at(-1), inflight: answer.http.inflight };
  draw(at("picture"), picture(answer, flow));
  draw(at("trouble-list"), troubleList(answer));
  fillChoice(names);
  drawCharts();
  if (answer.status) playground.update(answer.status);
}

function fillChoice(names) {
  if (asked === names.join("\n")) return;
  asked = names.join("\n");
  const chosen = at("traffic-model").value;
  at("traffic-model").replaceChildren(new Option("all models", ALL), ...names.map((name) => new Option(name)));
  at("traffic-model").value = names.includes(chosen) ? chosen : ALL;
}

function drawCharts() {
  const all = answer.status?.models.map((model) => model.name) ?? Object.keys(answer.http.models);
  const chosen = at("traffic-model").value;
  const names = chosen === ALL ? all : [chosen];
  const now = performance.now() / 1000;
  const times = history.times();
  // A page just opened has little to show: what there is fills the width, from a minute on.
  const span = Math.min(Number(at("traffic-span").value), Math.max(SPAN_MIN_S, now - times[0]));
  const put = (chart, curves) => chart.update(times, curves, now, span);
  const each = (values) => busiest(names.map((name) => ({ name, colour: colourOf(all, name), values: values(name) })));
  put(charts.rate, each((name) => history.rate([name], "requests")));
  put(charts.latency, [["p50", 0.5, "--c0"], ["p95", 0.95, "--c3"], ["p99", 0.99, "--c2"]].map(([name, share, colour]) => ({
    name, colour: `var(${colour})`, values: history.percentile(names, "buckets", share),
  })));
  put(charts.queue, [
    ...each((name) => history.level([name], "queued")),
    ...(chosen === ALL ? [{ name: "under way", colour: "var(--soft)", values: history.inflight() }] : []),
  ]);
  put(charts.batch, each((name) => history.quotient([name], "batchSum", "batches")));
  put(charts.tokens, each((name) => history.rate([name], "tokens")).filter(({ values }) => values.some((value) => value !== null)));
  put(charts.failures, [
    { name: "failed", colour: "var(--bad)", values: history.rate(names, "failed") },
    { name: "overloaded", colour: "var(--busy)", values: history.rate(names, "overloaded") },
    { name: "refused", colour: "var(--soft)", values: history.rate(names, "refused") },
  ]);
}

function busiest(curves) {
  if (curves.length <= CURVES_MAX) return curves;
  const size = ({ values }) => values.reduce((total, value) => total + (value ?? 0), 0);
  const kept = new Set([...curves].sort((one, other) => size(other) - size(one)).slice(0, CURVES_MAX));
  return curves.filter((curve) => kept.has(curve));
}

function askForKey(reason) {
  const dialog = at("key-dialog");
  if (dialog.open) return;
  if (reason) at("key-reason").textContent = reason;
  at("key-text").value = "";
  dialog.returnValue = "";
  dialog.showModal();
}

at("key").addEventListener("click", () => askForKey("It stays in this tab, and is forgotten with it."));
at("key-dialog").addEventListener("close", () => {
  const { returnValue } = at("key-dialog");
  if (returnValue) refused = false;
  if (returnValue === "use") service.useKey(at("key-text").value.trim());
  if (returnValue === "forget") service.useKey("");
  at("key-text").value = "";
  if (returnValue) look();
});
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
});
for (const id of ["traffic-model", "traffic-span"]) at(id).addEventListener("change", () => answer && drawCharts());

turn();
