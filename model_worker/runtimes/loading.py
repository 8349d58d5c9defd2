"""Loading weights and tokenizers with transformers, with causes that fit on one line.

Owns how every built-in runtime loads: the type of the weights, the network (none for local files), remote code (never
unless trusted, never a question on stdin), heads that were not in the file, and the noise of the libraries. Refuses
to know any task.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
import transformers
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils.tqdm import disable_progress_bars
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from model_worker.runtimes import compiling, linear_layers, sources, tasks
from model_worker.runtimes.bars import OnProgress, heard_bars
from model_worker.runtimes.gguf_files import ReadOnce
from model_worker.runtimes.sources import Source
from model_worker.specs import RuntimeSpec
from shared.errors import ConfigurationError, InvalidInput, LoadError

logger = logging.getLogger(__name__)

_LINE_LENGTH_MAX = 400
_TOKENIZER_LIMIT_MAX = 10**6
"""Tokenizers that know no limit report a huge number (10**30) instead."""

# The library's name for "Token indices sequence length is longer than the specified maximum …".
_TOO_LONG_WARNING = "sequence-length-is-longer-than-the-specified-maximum"

# In what the hub's library says before it waits, for a second or, later, eight, and asks again.
_HUB_RETRY = "[Retry "
_HUB_REFUSALS: dict[int | str, str] = {
    401: "there is no such model, or it is private: set HF_TOKEN to a token that may read it",
    403: "the token in HF_TOKEN may not read this model",
    404: "there is no such model or revision: check the spelling of both",
    429: "too many requests from here; it wants them later, or with a token in HF_TOKEN",
    "gated": "a gated model: ask for access on its page, then set HF_TOKEN to a token that has it",
}
_PERMANENT_HUB_REFUSALS = frozenset({401, 403, 404, "gated"})


class Checkpoint:
    """One model's files, and the ways to load from them. Main thread only."""

    def __init__(self, spec: RuntimeSpec, report_progress: Callable[[float, str], None]) -> None:
        self.spec = spec
        self._report_progress = report_progress
        try:
            self.source: Source = sources.resolve(spec.source)
        except ConfigurationError as error:
            raise LoadError(str(error), permanent=True) from None
        self._gguf = ReadOnce().applied if self.source.kind == "gguf" else nullcontext

    def load_config(self, subfolder: str = "") -> Any:
        with self.one_line_errors("its configuration"):
            config = AutoConfig.from_pretrained(self.source.location, **self._where(subfolder))
        try:
            tasks.check_architectures(self.spec.source, self.spec.task, getattr(config, "architectures", None) or [])
        except ConfigurationError as error:
            raise LoadError(str(error), permanent=True) from None
        return config

    def load_tokenizer(self, subfolder: str = "") -> Any:
        folder = f"{subfolder}/" if subfolder else ""
        has_own_file = self.source.kind == "gguf" or self._find(f"{folder}tokenizer.json")
        with self.one_line_errors("its tokenizer" if has_own_file else "its tokenizer, without a tokenizer.json"):
            tokenizer = AutoTokenizer.from_pretrained(self.source.location, **self._where(subfolder))
            self._refuse_made_up_vocabulary(tokenizer, subfolder)
        # As if it had been given already: the warning that a text is too long, which whoever sent it is told here.
        tokenizer.deprecation_warnings[_TOO_LONG_WARNING] = True
        return tokenizer

    def load_model(
        self,
        classes: Sequence[Any],
        config: Any,
        device: str,
        *,
        may_lack: Sequence[str] = (),
        subfolder: str = "",
    ) -> Any:
        """Loads with the first of `classes` that is made for `config`, in eval mode, onto `device`.

        `may_lack` are parts of the names of weights that the file need not hold.

        Raises:
            LoadError: also if the file lacks weights that the task needs: they would be random numbers.
        """
        model_class = next((candidate for candidate in classes if _is_made_for(candidate, config)), None)
        if model_class is None:
            raise LoadError(
                f"{self.spec.source}: task = {self.spec.task!r} is not there for models of type {config.model_type!r}",
                permanent=True,
            )
        dtype = resolve_dtype(self.spec.dtype, device)
        with self.one_line_errors("its weights"):
            model, report = model_class.from_pretrained(
                self.source.location,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                # They are refused below, by name; without this the names go to a table on the terminal.
                ignore_mismatched_sizes=True,
                **self._where(subfolder),
            )
            self._refuse_random_weights(model, report, may_lack)
            model.eval()
            model.to(device)
        if not self.spec.compile:  # which does the like by itself
            linear_layers.prepack(model)
        return model

    def compile_where_asked(self, model: Any, device: str) -> None:
        """
        Raises:
            LoadError: it was asked for, and is not possible here.
        """
        if self.spec.compile:
            compiling.compile_in_place(model, self.spec.source, device)

    def read_json(self, file: str) -> Any:
        """The content of a JSON file of the checkpoint; None if it has no such file."""
        with self.one_line_errors(file):
            path = self._find(file)
            return None if path is None else json.loads(Path(path).read_bytes())

    def read_weights(self, folder: str) -> dict[str, torch.Tensor]:
        """The tensors of a small module that is not a transformers model; empty if it has none."""
        with self.one_line_errors(f"the weights in {folder}"):
            if (path := self._find(f"{folder}/model.safetensors")) is not None:
                return load_file(path)
            if (path := self._find(f"{folder}/pytorch_model.bin")) is not None:
                tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
                return tensors
        return {}

    def load_component(self, name: str, auto_class: Any, *, required: bool) -> Any:
        """A processor (or the tokenizer) by its auto class; None if it is not `required` and not there."""
        try:
            if auto_class is AutoTokenizer:
                return self.load_tokenizer()
            with self.one_line_errors(f"its {name}"):
                return auto_class.from_pretrained(self.source.location, **self._where())
        except LoadError as error:
            # Which of the optional parts a model has can only be found out by trying.
            if required:
                raise
            logger.debug("optional_part_absent part=%s reason=%s", name, one_line(error))
            return None

    def _find(self, file: str) -> str | None:
        if self.source.kind == "gguf":
            return None
        path: str | None = cached_file(
            self.source.location,
            file,
            revision=self.spec.revision,
            local_files_only=self.source.is_local,
            _raise_exceptions_for_missing_entries=False,
        )
        return path

    def _where(self, subfolder: str = "") -> dict[str, Any]:
        keywords: dict[str, Any] = {
            # False, not None: with None transformers asks on stdin.
            "trust_remote_code": self.spec.trust_remote_code,
            "local_files_only": self.source.is_local,
        }
        if self.spec.revision is not None:
            keywords["revision"] = self.spec.revision
        if subfolder:
            keywords["subfolder"] = subfolder
        if self.source.file is not None:
            keywords["gguf_file"] = self.source.file
        return keywords

    def _refuse_random_weights(self, model: Any, report: dict[str, Any], may_lack: Sequence[str]) -> None:
        missing = sorted(key for key in report["missing_keys"] if not any(part in key for part in may_lack))
        if missing:
            raise LoadError(
                f"wrong task for the weights: {self.spec.source} lacks {len(missing)} of the weights that task = "
                f"{self.spec.task!r} needs as {type(model).__name__} ({_first_few(missing)}); they would be random",
                permanent=True,
            )
        mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"])
        if mismatched:
            raise LoadError(
                f"{self.spec.source}: {len(mismatched)} of its weights are not of the shape that its config.json says "
                f"({_first_few(mismatched)})",
                permanent=True,
            )

    def _refuse_made_up_vocabulary(self, tokenizer: Any, subfolder: str) -> None:
        # Without its files some tokenizers come up all the same, with a few special tokens and no words.
        files = {*type(tokenizer).vocab_files_names.values(), "tokenizer.json"}
        needs_none = self.source.kind == "gguf" or not type(tokenizer).vocab_files_names
        folder = f"{subfolder}/" if subfolder else ""
        if not needs_none and not any(self._find(folder + file) for file in files):
            raise LoadError(
                f"{self.spec.source}: cannot load its tokenizer: it has none of {', '.join(sorted(files))}",
                permanent=True,
            )

    @contextmanager
    def one_line_errors(self, part: str) -> Iterator[None]:
        """Turns whatever goes wrong while `part` is loaded into a `LoadError`, and keeps the libraries quiet."""
        try:
            # What is taken from the hub or from its cache on this disk, the libraries do not tell beforehand.
            doing = f"{'load' if self.source.is_local else 'download or find'} {part}"
            self._report_progress(-1.0, doing)
            with (
                self._gguf(),
                quiet_libraries(
                    lambda: self._report_progress(-1.0, f"{doing}: waiting to ask the hub again"),
                    lambda is_download, fraction: self._report_progress(
                        fraction, f"{'download' if is_download else 'load'} {part}"
                    ),
                ),
            ):
                yield
        except LoadError:
            raise
        except Exception as error:
            self._raise_load_error(part, error)

    def _raise_load_error(self, part: str, error: Exception) -> NoReturn:
        text = one_line(error)
        where = f"{self.spec.source}: cannot load {part}"
        if isinstance(error, torch.OutOfMemoryError):
            raise LoadError(f"{where}: out of device memory: {text}") from error
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"{where}: it needs Python code that comes with the model; read that code, then set "
                "trust_remote_code = true",
                permanent=True,
            ) from error
        if isinstance(error, SafetensorError):
            raise LoadError(f"{where}: damaged or incomplete .safetensors file: {text}", permanent=True) from error
        if isinstance(error, UnpicklingError):
            raise LoadError(
                f"{where}: damaged, or more than plain tensors: a pickled file that holds code is never run; "
                "convert it to .safetensors",
                permanent=True,
            ) from error
        if isinstance(error, ImportError):
            raise LoadError(f"{where}: a package is missing: {text}", permanent=True) from error
        refusal = _hub_refusal(error)
        if refusal is not None:
            status = refusal.response.status_code
            said = "gated" if isinstance(refusal, hub_errors.GatedRepoError) else status
            meaning = _HUB_REFUSALS.get(said, "try again later")
            raise LoadError(
                f"{where}: the hub answers {status}: {meaning}{self._why_from_hub()}",
                permanent=said in _PERMANENT_HUB_REFUSALS,
            ) from error
        permanent = self.source.is_local and isinstance(error, (OSError, ValueError, KeyError, TypeError))
        raise LoadError(
            f"{where}: {type(error).__name__}: {text}{self._why_from_hub()}", permanent=permanent
        ) from error

    def _why_from_hub(self) -> str:
        """For an error about a hub id, which may be a mistyped directory; empty for anything else."""
        return "" if self.source.is_local else f"; {sources.hub_words(self.spec).text}"


def _hub_refusal(error: BaseException) -> hub_errors.HfHubHTTPError | None:
    """What the hub said of the whole model, if that is the cause: transformers words most of it as a failed connection.

    A single file that is not there is something else: transformers looks for many, and says which one it needs.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, hub_errors.HfHubHTTPError) and not isinstance(cause, hub_errors.EntryNotFoundError):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def resolve_dtype(dtype: str, device: str) -> Any:
    """`auto` is float32 on a CPU, and as stored on an accelerator."""
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else "auto"
    return getattr(torch, dtype)


def position_limit(model: Any, tokenizer: Any) -> int | None:
    """The most tokens one sequence may have; None if neither model nor tokenizer knows a limit."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    positions = getattr(config, "max_position_embeddings", None)
    limits = [positions] if isinstance(positions, int) and positions > 0 else []
    for name, module in model.named_modules():
        # RoBERTa and its kin keep the rows up to the padding id free, so the table is longer than the longest text.
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            free_rows = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - free_rows)
    tokenizer_limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(tokenizer_limit, int) and 0 < tokenizer_limit <= _TOKENIZER_LIMIT_MAX:
        limits.append(tokenizer_limit)
    return min(limits, default=None)


def token_id_limit(model: Any, tokenizer: Any) -> int | None:
    """How many token ids the model knows, where the tokenizer knows more; else None: no id has to be looked at."""
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # it reads no tokens
        return None
    if rows is None or max(tokenizer.get_vocab().values(), default=0) < rows:
        return None
    return int(rows)


def known_token_ids(model: Any, tokenizer: Any) -> int:
    """How many ids both know; for ids that no tokenizer has made."""
    known = max(tokenizer.get_vocab().values(), default=-1) + 1
    return token_id_limit(model, tokenizer) or known


def pad_token_id(tokenizer: Any) -> int:
    """An id for padding. It is masked wherever it stands, so any will do where the tokenizer has none of its own."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def copy_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer for another thread: encoding rewrites settings of the shared object, and must not do so here."""
    return copy.deepcopy(tokenizer)


@contextmanager
def refuse_panics() -> Iterator[None]:
    """Turns a panic of the tokenizers' Rust code, which derives from `BaseException`, into an `InvalidInput`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidInput(f"the tokenizer cannot process this: {one_line(error)}") from error


def describe_model(model: Any) -> dict[str, object]:
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers(), *linear_layers.weights(model)]
    on_cpu = {"prepacked_linear_layers": linear_layers.described(model)} if model.device.type == "cpu" else {}
    return {
        "class": type(model).__name__,
        "dtype": str(getattr(model, "dtype", parameters[0].dtype if parameters else None)).removeprefix("torch."),
        "device": str(model.device),
        "compiled": model._compiled_call_impl is not None,
        "weights_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        **on_cpu,
        "transformers": transformers.__version__,
    }


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    text = next((line for line in lines if line), type(error).__name__)
    return text if len(text) <= _LINE_LENGTH_MAX else text[: _LINE_LENGTH_MAX - 1] + "…"


class _HubEar(logging.Handler):
    """Hears what the hub's library says while it loads. That it will try again is passed on, other warnings are not;
    what is worse goes where all other log lines go."""

    def __init__(self, on_retry: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._on_retry = on_retry

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            logging.getLogger().handle(record)
        elif _HUB_RETRY in record.getMessage():
            self._on_retry()


def _ignore_retry() -> None:
    """For whoever does not want to know."""


def _ignore_progress(is_download: bool, fraction: float) -> None:
    """For whoever does not want to know."""


@contextmanager
def quiet_libraries(
    on_hub_retry: Callable[[], None] = _ignore_retry, on_progress: OnProgress = _ignore_progress
) -> Iterator[None]:
    """No progress bars, no load reports; from now on the libraries' messages go where all other log lines go.

    What they warn of meanwhile is not for the log: a retry that helps is no news, and one that does not help ends in
    the error that tells the cause. But retries take half a minute, so `on_hub_retry` is called for each. What the bars
    would show goes to `on_progress`.
    """
    disable_progress_bars()
    hub_logger = logging.getLogger("huggingface_hub")
    # Of a caller that loads a part of a part; the library's own are not put back.
    outer_ears = [handler for handler in hub_logger.handlers if isinstance(handler, _HubEar)]
    hub_logger.handlers[:] = [_HubEar(on_hub_retry)]
    hub_level = hub_logger.level
    hub_logger.setLevel(logging.WARNING)
    hub_logger.propagate = False
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with heard_bars(on_progress):
            yield
    finally:
        transformers_logging.set_verbosity(before)
        hub_logger.handlers[:] = outer_ears
        hub_logger.setLevel(hub_level)
        hub_logger.propagate = not outer_ears


def _is_made_for(model_class: Any, config: Any) -> bool:
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return True
    remote = getattr(config, "auto_map", None) or {}
    return type(config) in mapping or model_class.__name__ in remote
