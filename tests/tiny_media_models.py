"""Models of a few kilobytes with random weights that see, hear, speak and read tables; for the tests.

Owns one model for each such task of transformers' pipelines, with processors that need no more than Pillow and numpy.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from model_worker.runtimes import loading
from tests import tiny_models
from tests.tiny_models import INITIAL_STD

SIDE = 32
_RATE_HZ = 400
_TEXT_LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_VISION_LAYERS: dict[str, Any] = {**_TEXT_LAYERS, "initializer_range": INITIAL_STD}
_LABELS = {0: "cat", 1: "dog", 2: "fox"}
_SQUARE = {"height": SIDE, "width": SIDE}


def save(directory: Path, kind: str) -> Path:
    """Writes the model called `kind`, one of `KINDS`, with all that its pipeline loads."""
    model_class, config, parts = KINDS[kind]()
    with torch.random.fork_rng(devices=[]), loading.quiet_libraries():
        torch.manual_seed(0)
        getattr(transformers, model_class)(config).save_pretrained(directory)
        for part in parts:
            part.save_pretrained(directory)
    return directory


Recipe = tuple[str, Any, list[Any]]


def _labelled(config_class: Any, **values: Any) -> Any:
    return config_class(id2label=_LABELS, label2id={label: index for index, label in _LABELS.items()}, **values)


def _pictures(name: str, **values: Any) -> Any:
    return getattr(transformers, name)(**{"size": _SQUARE, **values})


def _vit(head: str) -> Recipe:
    config = _labelled(transformers.ViTConfig, image_size=SIDE, patch_size=8, **_VISION_LAYERS)
    return head, config, [_pictures("ViTImageProcessorPil")]


def _yolos() -> Recipe:
    config = _labelled(
        transformers.YolosConfig, image_size=[SIDE, SIDE], patch_size=8, num_detection_tokens=5, **_VISION_LAYERS
    )
    return "YolosForObjectDetection", config, [_pictures("YolosImageProcessorPil")]


def _segformer() -> Recipe:
    config = _labelled(
        transformers.SegformerConfig,
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, initializer_range=INITIAL_STD,
    )  # fmt: skip
    return "SegformerForSemanticSegmentation", config, [_pictures("SegformerImageProcessorPil")]


def _glpn() -> Recipe:
    config = transformers.GLPNConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, initializer_range=INITIAL_STD,
    )  # fmt: skip
    return "GLPNForDepthEstimation", config, [transformers.GLPNImageProcessorPil(size_divisor=8)]


def _clip() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("roberta")
    config = transformers.CLIPConfig(
        text_config={**_TEXT_LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 64,
                     "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
        vision_config={**_VISION_LAYERS, "image_size": SIDE, "patch_size": 8},
        projection_dim=8,
    )  # fmt: skip
    pictures = _pictures("CLIPImageProcessorPil", size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    return "CLIPModel", config, [tokenizer, pictures]


def _owlvit() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("bert")
    config = transformers.OwlViTConfig(
        text_config={**_TEXT_LAYERS, "vocab_size": len(tokenizer), "max_position_embeddings": 64,
                     "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0},
        vision_config={**_VISION_LAYERS, "image_size": SIDE, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    pictures = _pictures("OwlViTImageProcessorPil", crop_size=_SQUARE, do_center_crop=False)
    return "OwlViTForObjectDetection", config, [tokenizer, pictures]


def _sam() -> Recipe:
    config = transformers.SamConfig(
        vision_config={"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": SIDE, "patch_size": 8, "window_size": 2, "global_attn_indexes": [0],
                       "mlp_dim": 16, "num_pos_feats": 4, "initializer_range": INITIAL_STD},
        prompt_encoder_config={"hidden_size": 8, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                             "iou_head_hidden_dim": 8, "iou_head_depth": 2},
    )  # fmt: skip
    pictures = transformers.SamImageProcessorPil(size={"longest_edge": SIDE}, pad_size=_SQUARE)
    return "SamModel", config, [pictures]


def _superglue() -> Recipe:
    config = transformers.SuperGlueConfig(
        keypoint_detector_config={
            "model_type": "superpoint", "encoder_hidden_sizes": [8, 8, 8, 8], "decoder_hidden_size": 8,
            "keypoint_decoder_dim": 65, "descriptor_decoder_dim": 16, "keypoint_threshold": 0.0, "max_keypoints": 20,
        },
        hidden_size=16, keypoint_encoder_sizes=[8, 16], gnn_layers_types=["self", "cross"], num_attention_heads=2,
        sinkhorn_iterations=5, matching_threshold=0.0,
    )  # fmt: skip
    return "SuperGlueForKeypointMatching", config, [_pictures("SuperGlueImageProcessorPil")]


def _videomae() -> Recipe:
    config = _labelled(
        transformers.VideoMAEConfig, image_size=SIDE, patch_size=8, num_frames=4, tubelet_size=2,
        decoder_num_attention_heads=2, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_intermediate_size=16, **_VISION_LAYERS,
    )  # fmt: skip
    pictures = _pictures("VideoMAEImageProcessorPil", size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    return "VideoMAEForVideoClassification", config, [pictures]


def _layoutlm() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("bert")
    tokenizer.model_max_length = 64
    config = transformers.LayoutLMConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=INITIAL_STD, **_TEXT_LAYERS
    )
    return "LayoutLMForQuestionAnswering", config, [tokenizer]


def _donut() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("roberta")
    encoder = transformers.DonutSwinConfig(
        image_size=[SIDE, SIDE], patch_size=4, depths=[1, 1], num_heads=[2, 2], window_size=4, embed_dim=8,
        initializer_range=INITIAL_STD,
    )  # fmt: skip
    decoder = transformers.MBartConfig(
        vocab_size=len(tokenizer), d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32,
        max_position_embeddings=384, init_std=INITIAL_STD, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    pictures = _pictures("DonutImageProcessorPil", do_align_long_axis=False, do_thumbnail=False, do_pad=False)
    return "VisionEncoderDecoderModel", config, [tokenizer, pictures]


def _llava() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<unk>"})
    tokenizer.chat_template = None
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=SIDE, patch_size=8, **_VISION_LAYERS),
        text_config=transformers.LlamaConfig(
            vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0,
            **_VISION_LAYERS,
        ),
        image_token_index=image_token, image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip
    pictures = _pictures("CLIPImageProcessorPil", size={"shortest_edge": SIDE}, crop_size=_SQUARE)
    processor = transformers.LlavaProcessor(
        image_processor=pictures, tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_MEDIA_CHAT_TEMPLATE,
    )  # fmt: skip
    return "LlavaForConditionalGeneration", config, [processor]


def _qwen2_audio() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("llama")
    specials = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials, "pad_token": "<unk>"})
    config = transformers.Qwen2AudioConfig(
        audio_config={"num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
                      "encoder_ffn_dim": 16, "max_source_positions": 50, "init_std": INITIAL_STD},
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), "num_key_value_heads": 1,
                     "max_position_embeddings": 256, "pad_token_id": 0, **_VISION_LAYERS},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=16_000, hop_length=160, chunk_length=1, n_fft=400
    )
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=extractor, tokenizer=tokenizer, chat_template=_MEDIA_CHAT_TEMPLATE
    )
    return "Qwen2AudioForConditionalGeneration", config, [processor]


def _wav2vec2() -> Recipe:
    config = _labelled(
        transformers.Wav2Vec2Config, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, classifier_proj_size=8, **_VISION_LAYERS,
    )  # fmt: skip
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=_RATE_HZ)
    return "Wav2Vec2ForSequenceClassification", config, [extractor]


def _whisper() -> Recipe:
    vocabulary = json.loads(tiny_models.build_tokenizer("roberta").backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in vocabulary["merges"]]
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary["vocab"], merges=merges)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_source_positions=50, max_target_positions=40, init_std=INITIAL_STD, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, sampling_rate=16_000, chunk_length=1)
    return "WhisperForConditionalGeneration", config, [tokenizer, extractor]


def _vits() -> Recipe:
    letters = {letter: index for index, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz'")}
    tokenizer = transformers.VitsTokenizer(
        _vocabulary_file(json.dumps(letters)), pad_token="_", unk_token=" ", phonemize=False
    )
    config = transformers.VitsConfig(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window_size=2, ffn_dim=16,
        flow_size=16, spectrogram_bins=9, prior_encoder_num_flows=2, prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=2, duration_predictor_flow_bins=4,
        depth_separable_num_layers=1, upsample_initial_channel=16, upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]], wavenet_dilation_rate=1,
        noise_scale=0.0, noise_scale_duration=0.0, sampling_rate=_RATE_HZ,
    )  # fmt: skip
    return "VitsModel", config, [tokenizer]


def _tapas() -> Recipe:
    words = sorted(tiny_models.build_tokenizer("bert").get_vocab().items(), key=lambda entry: entry[1])
    tokenizer = transformers.TapasTokenizer(
        _vocabulary_file("\n".join([*(word for word, _ in words), "[EMPTY]"])), model_max_length=64
    )
    config = transformers.TapasConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, type_vocab_sizes=[3, 64, 64, 2, 8, 8, 4],
        num_aggregation_labels=2, aggregation_labels={0: "NONE", 1: "SUM"}, initializer_range=INITIAL_STD,
        **_TEXT_LAYERS,
    )  # fmt: skip
    return "TapasForQuestionAnswering", config, [tokenizer]


def _vocabulary_file(text: str) -> str:
    """For tokenizers that are made of a file alone; they keep what they read."""
    path = Path(tempfile.mkdtemp()) / "vocabulary"
    path.write_text(text)
    return str(path)


def _gpt2_decision() -> Recipe:
    tokenizer = tiny_models.build_tokenizer("gpt2")
    # Answers are read off the next token, so each is one.
    tokenizer.add_tokens(["Yes", "No", *"ABCDEFGH"])
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=16, n_layer=1, n_head=2, initializer_range=INITIAL_STD,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return "GPT2LMHeadModel", config, [tokenizer]


_MEDIA_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'audio' %}<|AUDIO|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

KINDS: dict[str, Callable[[], Recipe]] = {
    "vit": lambda: _vit("ViTForImageClassification"),
    "vit-body": lambda: _vit("ViTModel"),
    "yolos": _yolos,
    "segformer": _segformer,
    "glpn": _glpn,
    "clip": _clip,
    "owlvit": _owlvit,
    "sam": _sam,
    "superglue": _superglue,
    "videomae": _videomae,
    "layoutlm": _layoutlm,
    "donut": _donut,
    "llava": _llava,
    "qwen2-audio": _qwen2_audio,
    "wav2vec2": _wav2vec2,
    "whisper": _whisper,
    "gpt2-decision": _gpt2_decision,
    "vits": _vits,
    "tapas": _tapas,
}
