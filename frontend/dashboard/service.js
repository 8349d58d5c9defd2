// Everything that this page asks the service, and the key it asks with. No other host is ever named.

const KEY = "headwaiter-key";
let key = sessionStorage.getItem(KEY) ?? "";

export const hasKey = () => key !== "";

export function useKey(text) {
  key = text;
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

// What the service refused, in its words.
export class Refused extends Error {
  constructor(status, body, fallback) {
    super(body?.error?.message ?? (typeof body?.error === "string" ? body.error : fallback));
    this.status = status;
    this.type = body?.error_type ?? "";
    this.detail = body?.detail ?? null;
  }
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body, `${response.status} ${response.statusText}`);
}

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

export async function data(signal) {
  const options = { headers: headers(), cache: "no-store", signal };
  return (await checked(await fetch("dashboard/data", options))).json();
}

export const modelPath = (model) => `models/${model.split("/").map(encodeURIComponent).join("/")}`;

function post(model, body, signal) {
  return fetch(modelPath(model), {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
}

// The whole answer, with where its time went: {value, total_ms, parts: [{name, ms}]}.
export async function ask(model, body, signal) {
  const began = performance.now();
  const response = await checked(await post(model, body, signal));
  const value = await response.json();
  return { value, total_ms: performance.now() - began, parts: timing(response.headers.get("server-timing") ?? "") };
}

// "queue;dur=0.1, forward;dur=12.0" -> [{name: "queue", ms: 0.1}, …]
function timing(text) {
  return [...text.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, ms]) => ({ name, ms: Number(ms) }));
}

// The answer in pieces: yields {piece} for each, and {done} at the end.
export async function* stream(model, body, signal) {
  const response = await checked(await post(model, { ...body, stream: true }, signal));
  for await (const { name, text } of events(response.body)) {
    const value = JSON.parse(text);
    if (name === "error") throw new Refused(200, value, "the stream broke off");
    yield name === "done" ? { done: value } : { piece: value };
    if (name === "done") return;
  }
  throw new Error("the stream ended without its last event");
}

// The events of an event stream, as they arrive; comments are left out.
async function* events(body) {
  let rest = "";
  for await (const part of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + part).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const of = (field) => lines.filter((line) => line.startsWith(`${field}: `)).map((line) => line.slice(field.length + 2));
      const text = of("data").join("\n");
      if (text) yield { name: of("event")[0] ?? "message", text };
    }
  }
}

async function* chunks(readable) {
  const reader = readable.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    // Whoever stops reading wants no more of it.
    reader.cancel().catch(() => {});
  }
}
