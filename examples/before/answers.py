"""Story 2 as people write it: the model in the web worker, and a process pool for the features in every call.

    MODEL=examples/models/qa uvicorn examples.before.answers:app

Older libraries opened that pool themselves, inside their `predict`. `START_METHOD=spawn` is what macOS, Windows and
libraries that ask for it do: the child then imports the main module again.
"""

import multiprocessing
import os

import torch
from fastapi import FastAPI
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

MODEL = os.environ["MODEL"]
PORT = int(os.environ.get("PORT", "8000"))

app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForQuestionAnswering.from_pretrained(MODEL).eval()
print(f"model loaded in process {os.getpid()}", flush=True)


def to_features(pair):
    encoded = tokenizer(*pair, truncation="only_second", return_offsets_mapping=True)
    return dict(encoded), encoded.sequence_ids()


@app.post("/answer")
def answer(body: dict):
    with multiprocessing.get_context(os.environ.get("START_METHOD", "fork")).Pool(1) as pool:
        [(features, sequence_ids)] = pool.map(to_features, [(body["question"], body["context"])])
    offsets = features.pop("offset_mapping")
    with torch.inference_mode():
        output = model(**{name: torch.tensor([values]) for name, values in features.items()})
    # The first token stands for "no answer": it takes part in the softmax and is no candidate.
    outside = torch.tensor([place > 0 and sequence_id != 1 for place, sequence_id in enumerate(sequence_ids)])
    start_scores = output.start_logits[0].masked_fill(outside, -1e4).softmax(0)
    end_scores = output.end_logits[0].masked_fill(outside, -1e4).softmax(0)
    scores = torch.outer(start_scores, end_scores).triu().tril(14)
    scores[0] = 0
    start, end = divmod(int(scores.argmax()), scores.shape[1])
    begin, stop = offsets[start][0], offsets[end][1]
    return {"answer": body["context"][begin:stop], "score": float(scores.max()), "start": begin, "end": stop}


@app.get("/health")
def health():
    return {"status": "ok"}


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, port=PORT)
