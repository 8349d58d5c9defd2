"""The limit that no server can pass: the same inputs in one process, without HTTP, queue or waiting.

`python -m benchmarks.offline embedding|question-answering|text-generation DIRECTORY` reads one command a line and
answers each with one line of JSON; `Offline` is the side that asks. `limit` sorts all inputs by length, cuts them into
batches by padded tokens, and computes them one after the other, tokenising included; `one_by_one` computes each by
itself, in the order given, as a program without any batching would. `generate ROWS REQUESTS TOKENS SEED` computes that
many prompts in batches of so many rows, each answer of that length, with the library's own `generate`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import inputs
from benchmarks.summary import percentile
from tests.topology import ROOT

# Padded tokens in one batch. Which one is best depends on the processor's caches, so the first `limit` tries each.
BUDGETS = (1024, 2048, 4096)


def sorted_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions of all inputs, by length, in batches whose padded size (longest x count) is at most `budget`."""
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(position)
    return batches


class Offline:
    """A process that holds the model and computes when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def offline(kind: str, directory: str) -> Iterator[Offline]:
    command = [sys.executable, "-m", "benchmarks.offline", kind, directory]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Offline(process)
        assert process.stdin is not None
        process.stdin.close()


# --- the process -------------------------------------------------------------------------------------------------

Compute = Callable[[Sequence[list[int]]], object]
Command = Callable[[list[str]], dict[str, float]]


def _load(kind: str, directory: str) -> tuple[list[Any], Callable[[Any], list[int]], Compute]:
    """Inputs, a function that tokenises one of them, and one that computes a batch."""
    import torch
    from transformers import AutoModel, AutoModelForQuestionAnswering, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any
    if kind == "embedding":
        entries: list[Any] = list(inputs.mixed_texts())
        model = AutoModel.from_pretrained(directory).eval()
    else:
        entries = list(inputs.questions())
        model = AutoModelForQuestionAnswering.from_pretrained(directory).eval()

    def tokenise(entry: Any) -> list[int]:
        ids: list[int] = (
            tokenizer(entry)["input_ids"]
            if isinstance(entry, str)
            else tokenizer(entry["question"], entry["context"])["input_ids"]
        )
        return ids

    def compute(sequences: Sequence[list[int]]) -> object:
        longest = max(map(len, sequences))
        ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
        mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
        with torch.inference_mode():
            output = model(input_ids=ids, attention_mask=mask)
            if kind != "embedding":
                return output.start_logits.numpy(), output.end_logits.numpy()
            mean = (output.last_hidden_state * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            return torch.nn.functional.normalize(mean, dim=1).numpy()

    return entries, tokenise, compute


def main() -> None:
    kind, directory = sys.argv[1:]
    answer_one = _text_commands(directory) if kind == "text-generation" else _batch_commands(kind, directory)
    for line in sys.stdin:
        print(json.dumps(answer_one(line.split())), flush=True)


def _text_commands(directory: str) -> Command:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def answer_one(command: list[str]) -> dict[str, float]:
        if not command or command[0] != "generate":
            raise ValueError(f"unknown command {command!r}")
        rows, requests, tokens, seed = map(int, command[1:])
        texts = inputs.prompts(requests, seed)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, requests, rows):
            batch = tokenizer(texts[first : first + rows], return_tensors="pt", padding=True)
            with torch.inference_mode():
                ids = model.generate(
                    **batch, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id
                )
            tokenizer.batch_decode(ids)
        made = requests * tokens
        cpu_s = time.process_time() - start_cpu_s
        return {"tokens_per_s": made / (time.perf_counter() - start_s), "cpu_token_ms": cpu_s / made * 1000}

    return answer_one


def _batch_commands(kind: str, directory: str) -> Command:
    entries, tokenise, compute = _load(kind, directory)

    def all_sorted(budget: int) -> float:
        start_s = time.perf_counter()
        sequences = [tokenise(entry) for entry in entries]
        for positions in sorted_batches(list(map(len, sequences)), budget):
            compute([sequences[position] for position in positions])
        return len(entries) / (time.perf_counter() - start_s)

    def one_by_one(seconds: float) -> dict[str, float]:
        took_ms: list[float] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            entry = entries[len(took_ms) % len(entries)]
            start_s = time.perf_counter()
            compute([tokenise(entry)])
            took_ms.append((time.perf_counter() - start_s) * 1000)
        values = {"p50_ms": percentile(took_ms, 0.5), "p99_ms": percentile(took_ms, 0.99)}
        return {"requests_per_s": len(took_ms) / seconds, **values}

    best = 0

    def answer_one(command: list[str]) -> dict[str, float]:
        nonlocal best
        match command:
            case ["limit"]:
                if not best:
                    best = max(BUDGETS, key=all_sorted)
                return {"requests_per_s": all_sorted(best), "batch_tokens": best}
            case ["one_by_one", seconds]:
                return one_by_one(float(seconds))
            case _:
                raise ValueError(f"unknown command {command!r}")

    return answer_one


if __name__ == "__main__":
    main()
