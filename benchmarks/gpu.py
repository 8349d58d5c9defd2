"""Random weights in the shapes of RoBERTa-base and GPT-J on one GPU, in half precision: `python -m benchmarks.gpu`.

For each shape: throughput through the whole path (HTTP, front worker, model server, one model process) beside the
offline limit, latency of a single request beside the model in the same process, and how much of the time the GPU was
idle. Needs no network, and ends within six minutes. Without a GPU it checks itself with small shapes on the CPU,
and its figures mean nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import inputs, shapes
from benchmarks.load_generator import in_turn, lanes, rates
from benchmarks.offline import sorted_batches
from benchmarks.summary import percentile
from tests.topology import ROOT, Service

BUDGET_S = 360.0
NVML_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Shape:
    """One model and what is asked of it. `layers` and `width` of zero: as the name says."""

    name: str
    task: str
    device: str
    dtype: str
    layers: int
    width: int
    connections: int
    texts: int
    window_s: float
    new_tokens: int = 0
    batch_tokens: int = 65_536
    """Padded tokens of one offline batch."""

    def save(self) -> str:
        if self.new_tokens:
            heads = max(1, self.width // 256)
            path = shapes.gpt_j(layers=self.layers, width=self.width, heads=heads, device=self.device, dtype=self.dtype)
        else:
            path = shapes.roberta_base("RobertaModel", layers=self.layers, device=self.device, dtype=self.dtype)
        return str(path)

    def inputs(self) -> list[str]:
        chooser = random.Random(5)
        lengths = inputs.log_normal_lengths(self.texts, mean=120, median=80, maximum=480)
        chooser.shuffle(lengths)
        if self.new_tokens:
            return [inputs.words(32, chooser) for _ in range(self.texts)]
        return [inputs.words(length, chooser) for length in lengths]

    def bodies(self) -> list[bytes]:
        if not self.new_tokens:
            return inputs.bodies(self.inputs())
        parameters = {"max_new_tokens": self.new_tokens, "do_sample": False}
        return [json.dumps({"inputs": text, "parameters": parameters}).encode() for text in self.inputs()]


ON_GPU = (
    Shape("RoBERTa-base", "embedding", "cuda:0", "float16", 12, 768, 128, 512, 15.0),
    Shape("GPT-J", "text-generation", "cuda:0", "float16", 28, 4096, 32, 64, 30.0, new_tokens=32),
)
ON_CPU = (
    Shape("RoBERTa, 1 layer", "embedding", "cpu", "float32", 1, 768, 8, 16, 2.0, batch_tokens=2048),
    Shape("GPT-J, 1 layer of 256", "text-generation", "cpu", "float32", 1, 256, 4, 8, 2.0, new_tokens=4),
)


class IdleShare:
    """How much of the time no kernel ran, while entered, as NVML counts it."""

    def __init__(self, device: str) -> None:
        self._index = int(device.partition(":")[2]) if device.startswith("cuda") else None
        self._stop = threading.Event()
        self._busy: list[float] = []
        self._thread = threading.Thread(target=self._watch, name="nvml")

    def __enter__(self) -> IdleShare:
        if self._index is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._index is not None:
            self._thread.join()

    @property
    def text(self) -> str:
        return f"{1 - statistics.fmean(self._busy):.0%}" if self._busy else "–"

    def _watch(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
        while not self._stop.wait(NVML_PAUSE_S):
            self._busy.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        pynvml.nvmlShutdown()


def through_headwaiter(shape: Shape, directory: str) -> dict[str, Any]:
    device = shape.device.replace(":0", "")
    model = {"name": "m", "model": directory, "task": shape.task, "device": device, "dtype": shape.dtype}
    bodies = shape.bodies()
    with Service([model], workers=2) as service:
        service.wait_ready(180)
        plan = [in_turn(range(len(bodies)))] * shape.connections
        with IdleShare(shape.device) as idle:
            loaded = lanes(
                service.port, "/models/m", bodies, plan, seconds=shape.window_s, warm_up_s=shape.window_s / 4
            )
        one = lanes(service.port, "/models/m", bodies, plan[:1], seconds=shape.window_s / 3, warm_up_s=0.5)
        choices = service.slots()["m/0"]["choices"]
    return {
        **rates(loaded, shape.window_s),
        "single_p50_ms": percentile([exchange.took_s * 1000 for exchange in one], 0.5),
        "idle": idle.text,
        "choices": choices,
    }


# --- the limit, in a process of its own so that its memory is free afterwards ------------------------------------


def offline(shape: Shape, directory: str) -> dict[str, float]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    loader: Any = AutoModelForCausalLM if shape.new_tokens else AutoModel
    model = loader.from_pretrained(directory, dtype=getattr(torch, shape.dtype)).to(shape.device).eval()
    texts = shape.inputs()

    def compute(batch: Sequence[str]) -> None:
        sequences = [tokenizer(text)["input_ids"] for text in batch]
        longest = max(map(len, sequences))
        ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences], device=shape.device)
        mask = torch.tensor([[1] * len(own) + [0] * (longest - len(own)) for own in sequences], device=shape.device)
        with torch.inference_mode():
            if shape.new_tokens:
                count = shape.new_tokens
                model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
                ).cpu()
            else:
                model(input_ids=ids, attention_mask=mask)[0].float().mean(dim=1).cpu()

    def all_sorted() -> float:
        if shape.new_tokens:
            size = shape.connections
            batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        else:
            lengths = [len(text.split()) + 2 for text in texts]
            batches = [[texts[i] for i in positions] for positions in sorted_batches(lengths, shape.batch_tokens)]
        start_s = time.perf_counter()
        for batch in batches:
            compute(batch)
        return len(texts) / (time.perf_counter() - start_s)

    all_sorted()
    rates_seen = [all_sorted() for _ in range(3)]
    single_ms = []
    for text in texts[:20]:
        start_s = time.perf_counter()
        compute([text])
        single_ms.append((time.perf_counter() - start_s) * 1000)
    return {"requests_per_s": statistics.median(rates_seen), "single_p50_ms": percentile(single_ms, 0.5)}


def offline_in_process(shape: Shape, number: int, directory: str) -> dict[str, float]:
    on_gpu = "gpu" if shape in ON_GPU else "cpu"
    command = [sys.executable, "-m", "benchmarks.gpu", on_gpu, str(number), directory]
    out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    answer: dict[str, float] = json.loads(out.splitlines()[-1])
    return answer


def has_gpu() -> bool:
    """Asks the driver, so that this process never holds a device."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    found = bool(pynvml.nvmlDeviceGetCount())
    pynvml.nvmlShutdown()
    return found


def main() -> None:
    if len(sys.argv) == 4:
        wanted = {"gpu": ON_GPU, "cpu": ON_CPU}[sys.argv[1]][int(sys.argv[2])]
        print(json.dumps(offline(wanted, sys.argv[3])))
        return
    start_s = time.monotonic()
    on_gpu = has_gpu()
    if not on_gpu:
        print("no GPU here: small shapes on the CPU, to see that this program works; the figures mean nothing")
    for number, shape in enumerate(ON_GPU if on_gpu else ON_CPU):
        left_s = BUDGET_S - (time.monotonic() - start_s)
        # Writing and loading 12 GB twice, and both measurements.
        if number and left_s < 120:
            print(f"{shape.name}: left out, {left_s:.0f} s are left of {BUDGET_S:.0f} s")
            continue
        directory = write(shape, on_gpu, number)
        limit = offline_in_process(shape, number, directory)
        ours = through_headwaiter(shape, directory)
        share = ours["requests_per_s"] / limit["requests_per_s"]
        print(f"{shape.name}, {shape.dtype}, {shape.connections} connections, one replica:")
        print(f"  {ours['requests_per_s']:.1f} requests/s, {share:.0%} of the offline limit", end="")
        if shape.new_tokens:
            print(f" ({shape.new_tokens} new tokens each)", end="")
        print(f"; p50 {ours['p50_ms']:.1f} ms, p99 {ours['p99_ms']:.1f} ms; GPU idle {ours['idle']} of the time")
        print(f"  one connection: p50 {ours['single_p50_ms']:.2f} ms, in process {limit['single_p50_ms']:.2f} ms")
        print(f"  {time.monotonic() - start_s:.0f} s so far; runtime: {ours['choices']}", flush=True)


def write(shape: Shape, on_gpu: bool, number: int) -> str:
    """Makes the weights in a process of its own: on a GPU that takes seconds, and its memory is free afterwards."""
    shapes_of = "ON_GPU" if on_gpu else "ON_CPU"
    code = f"from benchmarks.gpu import {shapes_of} as shapes; print(shapes[{number}].save())"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return out.splitlines()[-1]


if __name__ == "__main__":
    main()
