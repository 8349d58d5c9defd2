// What each task is asked with: the fields of its form, and how they become a request.
//
// A field is {name, label, kind, value}; kinds are text, line, lines, labels, number, check, image, audio and json.
// `request` gets the values by name. A task that is not here is asked with JSON.

const text = (label, value, more = {}) => ({ name: "text", label, kind: "text", value, ...more });
const line = (name, label, value) => ({ name, label, kind: "line", value });
const number = (name, label, hint) => ({ name, label, kind: "number", hint });
const check = (name, label) => ({ name, label, kind: "check" });
const labels = (value) => ({ name: "candidate_labels", label: "Candidate labels", kind: "labels", value });
const image = { name: "image", label: "Picture", kind: "image" };
const audio = { name: "audio", label: "Recording", kind: "audio" };

// Of several parameters those that were filled in.
export const given = (parameters) =>
  Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== null && value !== "" && value !== false));

const simple = (field, ...parameters) => ({
  fields: [field, ...parameters],
  request: (values) => ({
    inputs: values[field.name],
    parameters: given(Object.fromEntries(parameters.map(({ name }) => [name, values[name]]))),
  }),
});

const top = number("top_k", "How many", "as the model has it");
const TASKS = {
  "text-classification": simple(text("Text", "The waiter was quick, kind and funny."), top),
  "token-classification": simple(text("Text", "Ada Lovelace wrote to Charles Babbage in London.")),
  "fill-mask": simple(text("Text, with the model's mask in it", "The sea is very [MASK] today."), top),
  "feature-extraction": simple(text("Text", "A great day at the sea.")),
  summarization: simple(
    text("Text", "In a large restaurant the head waiter greets the guests and seats them. The waiters bring the food.", { rows: 6 }),
  ),
  translation: simple(
    text("Text", "Dinner is served."),
    line("src_lang", "From, as the model names it", ""),
    line("tgt_lang", "To", ""),
  ),
  "text2text-generation": simple(text("Text", "Is dinner served?")),
  "zero-shot-classification": simple(
    text("Text", "The new oven bakes bread in half the time."),
    labels("cooking, travel, politics"),
    check("multi_label", "Several may be true"),
  ),
  "question-answering": {
    fields: [
      line("question", "Question", "Who seats the guests?"),
      text("Context", "In a large restaurant the head waiter greets the guests and seats them. The waiters bring the food.", { name: "context", rows: 6 }),
      number("top_k", "How many answers", "1"),
      check("handle_impossible_answer", "There may be no answer"),
    ],
    request: ({ question, context, top_k, handle_impossible_answer }) => ({
      inputs: { question, context },
      parameters: given({ top_k, handle_impossible_answer }),
    }),
  },
  embedding: {
    fields: [
      { name: "texts", label: "Texts, one a line", kind: "lines", rows: 5, value: "A great day at the sea.\nThe beach was wonderful.\nThe database needs an index." },
      number("dimensions", "Dimensions", "all"),
    ],
    request: ({ texts, dimensions }) => ({ inputs: texts, parameters: given({ dimensions }) }),
  },
  "table-question-answering": {
    fields: [
      line("query", "Question", "How old is Ada?"),
      { name: "table", label: "Table, as JSON", kind: "json", rows: 4, value: '{"name": ["Ada", "Bob"], "age": ["36", "41"]}' },
    ],
    request: ({ query, table }) => ({ inputs: { query, table } }),
  },
  "automatic-speech-recognition": simple(audio),
  "audio-classification": simple(audio, top),
  "zero-shot-audio-classification": simple(audio, labels("a dog barks, rain, somebody speaks")),
  "text-to-audio": simple(text("Text", "Dinner is served.")),
  "image-classification": simple(image, top),
  "image-feature-extraction": simple(image),
  "image-segmentation": simple(image),
  "depth-estimation": simple(image),
  "object-detection": simple(image, number("threshold", "Threshold", "as the model has it")),
  "mask-generation": simple(image),
  "zero-shot-image-classification": simple(image, labels("a cat, a dog, a boat")),
  "zero-shot-object-detection": {
    fields: [image, labels("a cat, a dog, a boat")],
    request: ({ image, candidate_labels }) => ({ inputs: { image, candidate_labels } }),
  },
  "document-question-answering": {
    fields: [image, line("question", "Question", "What is the total?")],
    request: ({ image, question }) => ({ inputs: { image, question } }),
  },
};

// For everything else: classes of the users' own among them.
const PLAIN = {
  fields: [
    { name: "inputs", label: "inputs, as JSON", kind: "json", rows: 5, value: '"A great day at the sea."' },
    { name: "parameters", label: "parameters, as JSON", kind: "json", rows: 3, value: "{}" },
    check("stream", "In pieces"),
  ],
  request: ({ inputs, parameters, stream }) => ({ inputs, parameters, ...(stream && { stream }) }),
};

// Other names of tasks.
const ALIASES = { ner: "token-classification", "sentiment-analysis": "text-classification", "text-to-speech": "text-to-audio" };

export const formOf = (task) => TASKS[ALIASES[task] ?? task] ?? PLAIN;
