"""Makes models to try things with: the shapes of real ones, random weights, a tokenizer built on the spot.

    python -m examples.made_models gpt-neo examples/models/gpt

Owns what the stories and the applications beside them serve, so that none of them needs a network. Refuses to be
useful: what such a model says is noise, and the same noise every time. The one large shape, `gpt-j-6b`, is drawn on a
GPU and written to the disk in half precision; it takes 12 GB there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = (
    "The owner of the red hat is Kate, and the hat is on the table.",
    "Paris is the capital of France. Who lives in Paris? My name is Joe.",
    "A waiter carries twelve plates at once, and forgets nobody.",
)
VOCABULARY_SIZE = 400
# With the usual 0.02 a tiny model gives nearly the same answer to everything.
INITIAL_STD = 0.25

SMALL: dict[str, dict[str, Any]] = {
    "gpt-neo": {
        "architecture": "GPTNeoForCausalLM",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 128,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 32,
        "max_position_embeddings": 256,
    },
    "gpt-j": {
        "architecture": "GPTJForCausalLM",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
        "n_positions": 256,
    },
    "roberta-qa": {
        "architecture": "RobertaForQuestionAnswering",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "type_vocab_size": 1,
        # RoBERTa's first two positions are never used.
        "max_position_embeddings": 258,
    },
}
# The published shape of GPT-J-6B.
GPT_J_6B: dict[str, Any] = {
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "n_positions": 2048,
    "vocab_size": 50400,
}
SHAPES = (*SMALL, "gpt-j-6b")


def make(shape: str, directory: Path) -> Path:
    """Writes weights, configuration and tokenizer, as `save_pretrained` lays them out.

    Raises:
        RuntimeError: `gpt-j-6b` on a machine without CUDA.
    """
    if shape == "gpt-j-6b":
        return _make_large(directory)
    values = dict(SMALL[shape])
    architecture = values.pop("architecture")
    tokenizer = _roberta_tokenizer() if shape == "roberta-qa" else _gpt_tokenizer()
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1} if shape == "roberta-qa" else {}
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, architecture)
    values |= {"vocab_size": len(tokenizer), "initializer_range": INITIAL_STD, **ends}
    if not ends:
        values |= {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**values))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_apart(shape: str, directory: Path) -> Path:
    """As `make`, in a process of its own, which takes torch, and what it holds on a GPU, away with it."""
    command = [sys.executable, "-m", "examples.made_models", shape, str(directory)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the model {shape} could not be made: {done.stderr.strip()[-500:]}")
    return directory


def _make_large(directory: Path) -> Path:
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM
    from transformers.utils import logging

    if not torch.cuda.is_available():
        raise RuntimeError("the shape gpt-j-6b is drawn on a GPU, and this machine has none that torch can use")
    tokenizer = _gpt_tokenizer()
    logging.disable_progress_bar()
    config = GPTJConfig(**GPT_J_6B, bos_token_id=0, eos_token_id=0, dtype="float16")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = GPTJForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="2GB")
    tokenizer.save_pretrained(directory)
    return directory


def _byte_level(specials: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _gpt_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    # Like the real ones it has no token to pad with.
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(["<|endoftext|>"]),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
    )


def _roberta_tokenizer() -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = _byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.made_models", description="Writes a model of random weights into a directory."
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    try:
        print(make(arguments.shape, arguments.directory))
    except RuntimeError as error:
        raise SystemExit(f"made_models: {error}") from None


if __name__ == "__main__":
    main()
