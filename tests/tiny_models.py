"""Models of a few kilobytes with random weights, in the shapes of real ones, and tokenizers made on the spot.

Owns what the tests load. The weights are drawn from a wide distribution: with the usual narrow one every model gives
nearly the same answer whatever its input is, and a wrong mask or position would go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model_worker.runtimes import loading

# One thread computes a model of this size faster than several, and leaves the other cores to the other tests.
torch.set_num_threads(1)

INITIAL_STD = 0.25
VOCABULARY_SIZE = 400

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "She sells sea shells by the sea shore!",
    "A model that is loaded twice answers once.",
    "Hello world",
    "one two three four five six seven eight nine ten",
    "Nobody expects the waiter to run; the waiter walks.",
    "Is this positive or negative? It is hard to say.",
]

# Families that get BERT's tokenizer here.
_BERT_TOKENIZED = ("bert", "distilbert", "albert", "xlnet", "modernbert", "deberta_v2")
# And those that get RoBERTa's, whose table of positions begins behind the padding id, 1.
_ROBERTA_TOKENIZED = ("roberta", "mpnet")

# XLNet counts positions relatively, Mamba not at all, and neither knows a number of them.
_WITHOUT_POSITIONS = ("xlnet", "mamba")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

_BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_GPT_SPECIALS = ["<|endoftext|>"]
_LLAMA_SPECIALS = ["<unk>", "<s>", "</s>"]

_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "roberta": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "type_vocab_size": 1,
    },
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "albert": {
        "embedding_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    "mpnet": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    # Its second layer sees four tokens to each side.
    "modernbert": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "local_attention": 8,
    },
    "deberta_v2": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 32,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "use_cache": True},
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
}
_FAMILIES = {
    "Bert": "bert",
    "DistilBert": "distilbert",
    "Albert": "albert",
    "XLNet": "xlnet",
    "Roberta": "roberta",
    "MPNet": "mpnet",
    "ModernBert": "modernbert",
    "DebertaV2": "deberta_v2",
    "GPT2": "gpt2",
    "GPTNeo": "gpt_neo",
    "GPTJ": "gptj",
    "Llama": "llama",
    "Mamba": "mamba",
}


def save(
    directory: Path,
    class_name: str,
    *,
    positions: int = 64,
    labels: Sequence[str] | None = None,
    chat_template: str | None = None,
    model_max_length: int | None = None,
    padding_side: str = "right",
    truncation_side: str = "right",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a model of a transformers class (`BertForMaskedLM`, `GPTNeoForCausalLM`, …) with its tokenizer.

    `positions` is the longest text in tokens; `config` goes on top of the tiny configuration.
    """
    model_class = getattr(transformers, class_name)
    if labels is not None:
        config["id2label"] = dict(enumerate(labels))
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    family = _FAMILIES[class_name.partition("For")[0].removesuffix("Model").removesuffix("LMHead")]
    tokenizer = build_tokenizer(family)
    tokenizer.chat_template = chat_template
    if model_max_length is not None:
        tokenizer.model_max_length = model_max_length
    model = _model(model_class, family, len(tokenizer), positions, seed, config)
    with loading.quiet_libraries():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    # The library saves no side that was set on the tokenizer.
    saved = directory / "tokenizer_config.json"
    sides = {"padding_side": padding_side, "truncation_side": truncation_side}
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **sides}))
    return directory


def save_translator(directory: Path, class_name: str, *, positions: int = 64) -> Path:
    """Writes a model with an encoder and a decoder (`BartForConditionalGeneration`, `T5ForConditionalGeneration`)."""
    tokenizer = _roberta_tokenizer()
    tokenizer.model_max_length = positions
    sizes: dict[str, dict[str, Any]] = {
        "BartForConditionalGeneration": {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": positions,
            "init_std": INITIAL_STD,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        "T5ForConditionalGeneration": {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "initializer_factor": 4.0,
            "decoder_start_token_id": 1,
        },
    }
    model_class = getattr(transformers, class_name)
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = model_class.config_class(vocab_size=len(tokenizer), **ends, **sizes[class_name])
    with torch.random.fork_rng(devices=[]), loading.quiet_libraries():
        torch.manual_seed(0)
        model_class(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_speech(directory: Path) -> Path:
    """Writes a speech recogniser (CTC) that takes 400 Hz recordings."""
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = directory / "vocab.json"
    vocabulary.write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(vocabulary))
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=400, do_normalize=True, return_attention_mask=False)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        initializer_range=INITIAL_STD,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), loading.quiet_libraries():
        torch.manual_seed(0)
        transformers.Wav2Vec2ForCTC(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    return directory


def save_sound_and_text(directory: Path) -> Path:
    """Writes a model (CLAP) that compares 16 kHz recordings with texts."""
    tokenizer = _roberta_tokenizer()
    extractor = transformers.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=16_000,
        max_length_s=2,
        hop_length=320,
        fft_window_size=512,
        truncation="rand_trunc",
    )
    config = transformers.ClapConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "pad_token_id": 1,
        },
        audio_config={
            "spec_size": 64,
            "patch_size": 2,
            "patch_stride": 2,
            "num_mel_bins": 16,
            "window_size": 4,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 32,
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "num_attention_heads": [2, 2],
        },
        projection_dim=8,
    )
    with torch.random.fork_rng(devices=[]), loading.quiet_libraries():
        torch.manual_seed(0)
        transformers.ClapModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    return directory


def _model(
    model_class: Any, family: str, vocabulary_size: int, positions: int, seed: int, config: dict[str, Any]
) -> Any:
    config_class = model_class.config_class
    rows = positions + 2 if family in _ROBERTA_TOKENIZED else positions
    special = {family: {"pad_token_id": 0} for family in _BERT_TOKENIZED}
    special |= {family: {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2} for family in _ROBERTA_TOKENIZED}
    ends = {"llama": {"bos_token_id": 1, "eos_token_id": 2}}.get(family, {"bos_token_id": 0, "eos_token_id": 0})
    values = {
        "vocab_size": vocabulary_size,
        **({} if family in _WITHOUT_POSITIONS else {"max_position_embeddings": rows}),
        "initializer_range": INITIAL_STD,
        **_CONFIGS[family],
        **special.get(family, ends),
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config_class(**values))


def build_tokenizer(family: str) -> Any:
    if family in _BERT_TOKENIZED:
        return _bert_tokenizer()
    if family in _ROBERTA_TOKENIZED:
        return _roberta_tokenizer()
    return _llama_tokenizer() if family == "llama" else _gpt_tokenizer()


def _byte_level(specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _bert_tokenizer() -> Any:
    # Listed, not trained: training a WordPiece vocabulary gives another one each time.
    letters = sorted({letter for text in TEXTS for letter in text.lower() if not letter.isspace()})
    words = sorted({word for text in TEXTS for word in re.findall(r"[a-z]{3,}", text.lower())})
    tokens = [*_BERT_SPECIALS, *letters, *(f"##{letter}" for letter in letters), *words[::2]]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _roberta_tokenizer() -> Any:
    tokenizer = _byte_level(_ROBERTA_SPECIALS)
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
        model_input_names=["input_ids", "attention_mask"],
    )


def _gpt_tokenizer() -> Any:
    # Like the real ones it has no token to pad with.
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(_GPT_SPECIALS),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        model_input_names=["input_ids", "attention_mask"],
    )


def _llama_tokenizer() -> Any:
    tokenizer = _byte_level(_LLAMA_SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )
