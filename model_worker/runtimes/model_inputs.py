"""What the pipelines feed to a model, as far as batching has to know it: length, likeness, and padding.

Owns the rules by which model inputs share a batch and look, cut apart again, as if each had been computed alone.
Refuses to tokenise and to compute. Main thread, and the prepare stage for the lengths.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Mapping, MutableMapping
from typing import Any

import torch

# What torch's convolutions, pools and paddings, and the libraries' models say of an input that is too small, or not of
# the only size that they take.
_ABOUT_SIZE = re.compile(
    r"Kernel size can't be greater than actual input size|Output size is too small"
    r"|Padding size should be less than the corresponding input dimension|Expected more than 1 value per channel"
    r"|Input image size .* doesn't match model|non-zero size for"
)


def text_length(chunk: Any) -> int | None:
    """Tokens of one model input; None if it is no text."""
    ids = chunk.get("input_ids") if hasattr(chunk, "get") else None
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) and ids.ndim >= 2 else None


def length(chunk: Any) -> int:
    """Padded units of one model input: tokens of text, 1 for anything else."""
    return text_length(chunk) or 1


def signature(chunk: Any) -> Hashable:
    """Equal for model inputs that may share a batch without changing one another's results."""
    if not hasattr(chunk, "items"):
        return type(chunk).__name__
    can_pad = "attention_mask" in chunk
    entries: list[Hashable] = []
    for key, value in sorted(chunk.items()):
        if not isinstance(value, torch.Tensor):
            # Of what is no tensor itself the pipelines use the first row's for the whole batch where it holds tensors
            # (the encoded labels of a request); the rest is carried along, row by row.
            entries.append((key, value is None, _tensors_in(value)))
        elif can_pad and value.ndim >= 2 and not value.is_floating_point():
            entries.append((key, value.ndim, tuple(value.shape[2:])))
        else:
            # Sound and pictures: padding would be heard and seen, so only equal shapes go together.
            entries.append((key, tuple(value.shape)))
    return tuple(entries)


def _tensors_in(value: Any) -> Hashable:
    """The content of every tensor inside, at any depth; empty if there is none."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, Mapping):
        value = [entry for _, entry in sorted(value.items())]
    inside = [_tensors_in(entry) for entry in value] if isinstance(value, (list, tuple)) else []
    return tuple(entry for entry in inside if entry)


def unpadded(output: Any, chunk: Any, padded_length: int, side: str) -> Any:
    """Takes the padding out of one row of a batch's output, so that it looks as if computed alone."""
    tokens = text_length(chunk)
    if tokens is None or tokens == padded_length or not hasattr(output, "items"):
        return output
    own = slice(None, tokens) if side == "right" else slice(padded_length - tokens, None)
    for key, value in list(output.items()):
        per_token = isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == padded_length
        # Of outputs that the model made, those per token have three dimensions: two are one score per label.
        if per_token and (key in chunk or value.ndim == 3):
            output[key] = value[:, own]
    return output


def fill_padding(batch: MutableMapping[str, Any], pad_token_id: int | None) -> int | None:
    """Fills the padding of a batch with the id that the model takes for padding, and returns that id.

    Heads that read the last token of a text find it as the last one that is no padding. For a model that knows no
    such id (None) it is one that ends none of these texts, whatever stands in them; None if the batch is no text.
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor) or ids.shape != mask.shape:
        return pad_token_id
    if pad_token_id is None:
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1, keepdim=True)
        ends = set(ids.gather(1, last).flatten().tolist())
        pad_token_id = next(token_id for token_id in itertools.count() if token_id not in ends)
    batch["input_ids"] = ids.masked_fill(mask == 0, pad_token_id)
    return pad_token_id


def holds_nan(output: Any) -> bool:
    """Whether a model computed numbers that are none."""
    values = output.values() if isinstance(output, Mapping) else [output]
    return any(
        isinstance(each, torch.Tensor) and each.is_floating_point() and bool(each.isnan().any()) for each in values
    )


def least_samples(config: Any) -> int | None:
    """How many samples a recording must have for one frame to come out of a model's convolutions; None: not known.

    Wav2Vec 2 and its kin name the kernels and strides of theirs in their configuration.
    """
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if not isinstance(kernels, (list, tuple)) or not isinstance(strides, (list, tuple)):
        return None
    samples = 1
    for kernel, stride in reversed(list(zip(kernels, strides, strict=False))):
        samples = (samples - 1) * stride + kernel
    return samples


def samples_in(chunk: Any) -> int | None:
    """Samples of one recording's model input; None if it is none, or no longer made of samples."""
    values = chunk.get("input_values") if hasattr(chunk, "get") else None
    return int(values.shape[-1]) if isinstance(values, torch.Tensor) and values.ndim == 2 else None


def is_about_size(error: BaseException) -> bool:
    """Whether a model failed because its input, sound or a picture, is too small, or not of the only size it takes."""
    return isinstance(error, (RuntimeError, ValueError)) and _ABOUT_SIZE.search(str(error)) is not None


def sizes(chunk: Any) -> str:
    """The shapes of the sound and the pictures in a model input, for an error."""
    tensors = chunk.values() if isinstance(chunk, Mapping) else []
    shapes = [tuple(each.shape[1:]) for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return ", ".join(str(shape) for shape in shapes)
