// What the service said since this page was opened, and the curves that follow from it: counters become rates,
// histograms percentiles. Numbers that are not known are null, and are drawn as gaps.

// Rates are taken over so many samples, so that a single one does not make a spike.
const RATE_SAMPLES = 2;
// Percentiles need more requests than a moment has.
const PERCENTILE_SAMPLES = 6;

export class History {
  constructor(keptSeconds) {
    this.keptSeconds = keptSeconds;
    this.samples = [];
  }

  // `answer` is a document of dashboard/data; null is a time at which nothing was heard.
  add(now, answer) {
    this.samples.push(answer ? sample(now, answer) : { now, heard: false, models: {}, inflight: null });
    while (this.samples[0].now < now - this.keptSeconds) this.samples.shift();
  }

  // When each sample was taken, in seconds.
  times() {
    return this.samples.map(({ now }) => now);
  }

  // A number of each sample, for one model or the sum of all.
  level(names, field) {
    return this.samples.map(({ models }) => sum(names.map((name) => models[name]?.[field])));
  }

  inflight() {
    return this.samples.map(({ inflight }) => inflight);
  }

  // How fast a counter grows, per second.
  rate(names, field) {
    return this.#over(RATE_SAMPLES, (now, before) => {
      const grown = names.map((name) => growth(now.models[name]?.[field], before.models[name]?.[field]));
      const total = sum(grown);
      return total === null ? null : total / (now.now - before.now);
    });
  }

  // How much one counter grew for each step of another: the mean size of a batch.
  quotient(names, above, below) {
    return this.#over(RATE_SAMPLES, (now, before) => {
      const [upper, lower] = [above, below].map((field) =>
        sum(names.map((name) => growth(now.models[name]?.[field], before.models[name]?.[field]))),
      );
      return lower ? upper / lower : null;
    });
  }

  // The value below which `share` of what a histogram counted lies.
  percentile(names, field, share) {
    return this.#over(PERCENTILE_SAMPLES, (now, before) => {
      const counts = new Map();
      for (const name of names) {
        const [present, past] = [now.models[name]?.[field], before.models[name]?.[field]];
        for (const [bound, count] of Object.entries(present ?? {})) {
          const grown = growth(count, past?.[bound] ?? 0);
          if (grown === null) return null;
          counts.set(bound, (counts.get(bound) ?? 0) + grown);
        }
      }
      return quantile(counts, share);
    });
  }

  #over(count, of) {
    return this.samples.map((now, index) => {
      let first = index;
      // Never across a time at which nothing was heard: what was counted meanwhile would be a spike behind it.
      while (now.heard && first > 0 && index - first < count && this.samples[first - 1].heard) first -= 1;
      return first === index ? null : of(now, this.samples[first]);
    });
  }
}

function sample(now, { status, http }) {
  const models = {};
  const of = (name) => (models[name] ??= { failed: 0, overloaded: 0, refused: 0, requests: 0, tokens: null });
  for (const [name, { by_status: byStatus, seconds_buckets: buckets }] of Object.entries(http.models)) {
    const model = of(name);
    model.buckets = buckets;
    for (const [code, count] of Object.entries(byStatus)) {
      model.requests += count;
      if (code === "429") model.overloaded += count;
      else if (code >= "500") model.failed += count;
      else if (code >= "400") model.refused += count;
    }
  }
  for (const { name, queued } of status?.models ?? []) of(name).queued = queued;
  for (const counters of status?.counters ?? []) {
    Object.assign(of(counters.model), { batches: counters.batches, batchSum: counters.batch_size_sum });
  }
  for (const slot of status?.slots ?? []) {
    const model = of(slot.model);
    if (isContinuous(slot)) model.tokens = (model.tokens ?? 0) + slot.step_items;
  }
  return { now, heard: true, models, inflight: http.inflight };
}

export const isContinuous = (slot) => String(slot.choices.batching ?? "").startsWith("continuous") || slot.step_items > 0;

// A counter that fell was begun anew.
function growth(now, before) {
  if (typeof now !== "number") return null;
  const grown = now - (before ?? 0);
  return grown < 0 ? null : grown;
}

function sum(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
}

// From cumulative counts by upper bound; within a bucket as if values were spread evenly.
export function quantile(cumulative, share) {
  const bounds = [...cumulative].map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count]);
  bounds.sort(([one], [other]) => one - other);
  const total = bounds.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [low, below] = [0, 0];
  for (const [high, count] of bounds) {
    if (count >= total * share) {
      return high === Infinity ? low : low + (high - low) * ((total * share - below) / (count - below));
    }
    [low, below] = [high, count];
  }
  return low;
}
