"""Models of the usual shapes with random weights: what they answer is nonsense, and takes as long as if it were not.

Writes them as `save_pretrained` does, tokenizer included, so that they are served like any other. Needs no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.inputs import WORDS
from benchmarks.systems import BENCH_DIRECTORY

MODELS_DIRECTORY = BENCH_DIRECTORY / "models"


def roberta_base(kind: str, *, layers: int = 12, device: str = "cpu", dtype: str = "float32") -> Path:
    """`kind` is the class: `RobertaModel` or `RobertaForQuestionAnswering`. 125 million weights with 12 layers."""
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=50265,
        num_hidden_layers=layers,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    return _saved(f"{kind}-{layers}-{dtype}", getattr(transformers, kind), config, device, dtype)


def gpt_j(*, layers: int = 28, width: int = 4096, heads: int = 16, device: str = "cpu", dtype: str = "float32") -> Path:
    """6 billion weights with 28 layers of 4,096."""
    import transformers

    config = transformers.GPTJConfig(
        vocab_size=50400,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        rotary_dim=min(64, width // heads),
        # No end, so that every answer is as long as it was asked to be.
        bos_token_id=0,
        eos_token_id=50399,
    )
    return _saved(f"GPTJ-{layers}-{width}-{dtype}", transformers.GPTJForCausalLM, config, device, dtype)


def _saved(name: str, model_class: Any, config: Any, device: str, dtype: str) -> Path:
    directory = MODELS_DIRECTORY / name
    if (directory / "complete").exists():
        return directory
    import torch

    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(previous)
    model.save_pretrained(directory)
    _tokenizer(gpt="GPT" in name).save_pretrained(directory)
    (directory / "complete").touch()
    return directory


def _tokenizer(*, gpt: bool) -> Any:
    """Byte-level BPE, taught the words of the benchmarks: one token for each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>"] if gpt else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    names = ["input_ids", "attention_mask"]
    if gpt:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|endoftext|>",
            model_input_names=names,
            model_max_length=2048,
        )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_input_names=names,
        model_max_length=512,
    )
