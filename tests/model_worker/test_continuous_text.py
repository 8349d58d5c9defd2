"""Text in pieces: whole characters only, nothing lost, nothing of a stop string shown."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from model_worker.runtimes.continuous.text import StopWatch, TextStream, decoding

TEXT = "Ein Kellner 👩‍👩‍👧 läuft: 你好，世界 — cafe\N{COMBINING ACUTE ACCENT} 🏴󠁧󠁢󠁥󠁮󠁧󠁿  naïve\n\n\tкот ก็ 𝔘 end"
PROMPT = "Say it"


def byte_level(merges: int) -> Any:
    """As GPT-2 and Llama 3 have it: without merges, one token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, PROMPT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentence_piece() -> Any:
    """As Llama 2 and Mistral have it: words begin with a mark, and what is not in the vocabulary goes byte by byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"Einlufcardts:", "▁l", "nd", "▁Ke", "ll"]
    merges = [("▁", "l"), ("n", "d"), ("l", "l")]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"bytes": byte_level(0), "merged bytes": byte_level(40), "sentence pieces": sentence_piece()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces(tokenizer: Any, prompt_ids: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(decoding(tokenizer, skip_special_tokens=True), prompt_ids)
    return [*(stream.push(token) for token in ids), stream.finish()]


def test_pieces_are_the_text_at_every_split_into_prompt_and_answer(tokenizer: Any) -> None:
    ids = encoded(tokenizer, TEXT)
    assert tokenizer.decode(ids) == TEXT
    for split in range(len(ids)):
        head = tokenizer.decode(ids[:split])
        found = "".join(pieces(tokenizer, ids[:split], ids[split:]))
        if "\N{REPLACEMENT CHARACTER}" in head:
            assert found == tokenizer.decode(ids[split:])
        else:
            assert head + found == TEXT


def test_every_piece_is_made_of_whole_characters(tokenizer: Any) -> None:
    ids = encoded(tokenizer, TEXT)
    found = pieces(tokenizer, encoded(tokenizer, PROMPT), ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)
    assert len([piece for piece in found if piece]) > len(TEXT) // 4
    # A character is shown with the very token that completes it.
    for count in range(1, len(ids)):
        shown, whole = "".join(found[:count]), tokenizer.decode(ids[:count])
        assert shown.strip() == whole.rstrip("\N{REPLACEMENT CHARACTER}").strip() or whole.endswith(
            "\N{REPLACEMENT CHARACTER}"
        )


def test_the_space_before_the_first_word_is_the_answers(tokenizer: Any) -> None:
    ids = encoded(tokenizer, "Ein End")
    behind = next(count for count in range(len(ids), 0, -1) if tokenizer.decode(ids[:count]) == "Ein")
    assert "".join(pieces(tokenizer, ids[:behind], ids[behind:])) == " End"


def test_what_is_left_of_a_character_at_the_end_is_not_dropped(tokenizer: Any) -> None:
    ids = encoded(tokenizer, "ab 👩")
    for cut in range(1, len(ids)):
        assert "".join(pieces(tokenizer, [], ids[:cut])) == tokenizer.decode(ids[:cut])


def test_bytes_that_make_no_character_are_not_held_back_for_ever() -> None:
    tokenizer = TOKENIZERS["bytes"]
    continuation = encoded(tokenizer, "é")[1]
    woman = encoded(tokenizer, "👩")
    ids = [continuation] * 100 + woman + encoded(tokenizer, "x") * 50
    found = pieces(tokenizer, [], ids)
    assert max(len(list(group)) for empty, group in itertools.groupby(found, key=bool) if not empty) <= 16
    assert "".join(found) == tokenizer.decode(ids) == "\N{REPLACEMENT CHARACTER}" * 100 + "👩" + "x" * 50


def test_random_tokens_lose_nothing() -> None:
    chance = random.Random(0)
    for name in ("bytes", "merged bytes"):
        tokenizer = TOKENIZERS[name]
        for _ in range(40):
            ids = [chance.randrange(1, len(tokenizer)) for _ in range(60)]
            assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_a_long_answer_is_decoded_in_a_window_of_bounded_length(tokenizer: Any) -> None:
    lengths = []
    decode = decoding(tokenizer, skip_special_tokens=True)

    def measured(ids: Any) -> str:
        lengths.append(len(ids))
        return decode(ids)

    ids = encoded(tokenizer, TEXT * 20)
    stream = TextStream(measured, [])
    assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == TEXT * 20
    assert max(lengths) <= 33 + 16
    assert len(lengths) < 1.3 * len(ids)


def test_special_tokens_are_shown_only_to_those_who_want_them() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = [*encoded(tokenizer, "hi"), tokenizer.eos_token_id]
    for skip, expected in ((True, "hi"), (False, "hi<|end|>")):
        stream = TextStream(decoding(tokenizer, skip_special_tokens=skip), [])
        assert "".join(stream.push(token) for token in ids) + stream.finish() == expected


def test_a_tokenizer_without_a_quick_way_is_asked_itself() -> None:
    class Slow:
        def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert skip_special_tokens
            assert not clean_up_tokenization_spaces
            return "".join(chr(97 + token) for token in ids)

    assert pieces(Slow(), [1], [2, 3]) == ["c", "d", ""]


STOPS = ("END", "\n\n", "E你", "aab")


@pytest.mark.parametrize(
    "text", ["tell me. END of it", "aaab", "a\nb\n\nc", "xE你 END", "ENENEND", "no stop EN", "aa\n"]
)
def test_stop_strings_are_found_at_every_split(text: str) -> None:
    places = [place for stop in STOPS if (place := text.find(stop)) >= 0]
    expected = text[: min(places)] if places else text
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, len(text)), count) for count in (0, 1, 2)
    ):
        borders = [0, *cuts, len(text)]
        watch, shown = StopWatch(STOPS), ""
        for begin, end in itertools.pairwise(borders):
            shown += watch.push(text[begin:end])
            assert expected.startswith(shown), "something was shown that turned out to be a stop string"
            if watch.is_found:
                break
        assert watch.is_found == bool(places)
        assert shown + ("" if watch.is_found else watch.finish()) == expected


def test_no_more_is_held_back_than_may_be_the_beginning_of_a_stop_string() -> None:
    watch = StopWatch(STOPS)
    assert [watch.push(letter) for letter in "waNENx"] == ["w", "", "aN", "", "", "ENx"]
