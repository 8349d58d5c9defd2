"""Makes the two small question answering models beside this file. Run it as a script, from anywhere.

They learn, from made-up sentences, to find who owns, does, costs or lives in what, or to point at the first token
where the text does not say. One is a BERT that lower-cases and strips accents and has token types, the other a RoBERTa
that reads bytes: between them they differ in all that the runtime has to know of a tokenizer. The directories load
with transformers 4 and 5. What they are trained to is written down, not made again: a new run gives other weights,
and then `record_answers.py` has to be run as well. Takes a few minutes on two cores.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForQuestionAnswering, RobertaConfig, RobertaForQuestionAnswering

HERE = Path(__file__).resolve().parent
POSITIONS = 160
STEPS = {"bert": 2_500, "roberta": 1_200}
BATCH = 48
VOCABULARY = 700

CITIES = ["Paris", "London", "São Paulo", "Oslo", "New York", "Zürich", "北京", "Berlin", "Łódź", "Rome", "Lima"]
JOBS = ["baker", "teacher", "nurse", "pilot", "gardener", "software engineer", "waiter", "cook", "librarian"]
THINGS = ["hat", "boat", "piano", "car", "bridge", "clock", "table", "coat", "door"]
COLOURS = ["red", "dark blue", "green", "white", "light grey", "black", "yellow"]
FILLERS = [
    "The weather was fine.",
    "It rained all day 😀.",
    "Nobody knew why.",
    "The village slept, the river did not.",
    "We had soup; it was cold.",
    "There were many people.",
    "The road is long.",
]
# What is asked, and how a text may say it; {a} is the answer, {p} a person and {t} a thing.
FACTS: list[tuple[str, list[str], list[str]]] = [
    ("name", ["What is my name?", "Who am I?", "What am I called?"], ["My name is {a}.", "I am called {a}."]),
    ("city", ["Where do I live?", "In which city do I live?"], ["I live in {a}.", "My home is in {a}."]),
    ("city", ["Where does {p} live?"], ["{p} lives in {a}.", "{p} has moved to {a}."]),
    ("job", ["What is my job?", "What do I do?"], ["I work as a {a}.", "My job: {a}."]),
    ("job", ["What is the job of {p}?"], ["{p} works as a {a}.", "{p} is a {a}."]),
    ("name", ["Who owns the {t}?"], ["The {t} belongs to {a}.", "{a} owns the {t}."]),
    (
        "price",
        ["What does the {t} cost?", "How much is the {t}?"],
        ["The {t} costs {a} dollars.", "The {t} is {a} euro."],
    ),
    ("colour", ["What colour is the {t}?"], ["The {t} is {a}.", "They painted the {t} {a}."]),
    ("date", ["When was I born?", "When is my birthday?"], ["I was born on {a}.", "My birthday is {a}."]),
]


def name(chance: random.Random) -> str:
    first = "".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiouéö") for _ in range(chance.randint(2, 3)))
    text = first.capitalize()
    if chance.random() < 0.15:
        return f"{text}-{name(chance)}"
    if chance.random() < 0.15:
        return f"O'{text}"
    return f"{text} {chance.choice(['Brown', 'Kim', 'Silva'])}" if chance.random() < 0.15 else text


def value(kind: str, chance: random.Random) -> str:
    if kind == "name":
        return name(chance)
    if kind == "price":
        return (
            f"{chance.randint(1, 999)}"
            if chance.random() < 0.7
            else f"{chance.randint(1, 99)}.{chance.randint(10, 99)}"
        )
    if kind == "date":
        month = chance.choice(["January", "March", "May", "June", "October"])
        return f"{chance.randint(1, 28)} {month} {chance.randint(1900, 2020)}"
    return chance.choice({"city": CITIES, "job": JOBS, "colour": COLOURS}[kind])


def example(chance: random.Random) -> tuple[str, str, int, int]:
    """Question, context, and the characters of the answer; 0, 0 if there is none."""
    facts = chance.sample(FACTS, chance.randint(1, 4))
    wanted = facts[0]
    told = [] if chance.random() < 0.2 else [wanted]
    told += facts[1:]
    chance.shuffle(told)
    person, thing = name(chance), chance.choice(THINGS)
    question = chance.choice(wanted[1]).format(p=person, t=thing)
    context, start, end = "", 0, 0
    for fact in told:
        if chance.random() < 0.5:
            context += chance.choice(FILLERS) + chance.choice([" ", "\n", "  "])
        answer = value(fact[0], chance)
        other_person, other_thing = name(chance), chance.choice([t for t in THINGS if t != thing])
        same = fact is wanted
        template = chance.choice(fact[2])
        sentence = template.replace("{p}", person if same else other_person).replace(
            "{t}", thing if same else other_thing
        )
        if same:
            start = len(context) + sentence.index("{a}")
            end = start + len(answer)
        context += sentence.replace("{a}", answer) + " "
    if not context:
        context = chance.choice(FILLERS)
    if chance.random() < 0.1:
        context, question = context.lower() if len(context.lower()) == len(context) else context, question.lower()
    return question, context, start, end


def tokenizer(family: str) -> Tokenizer:
    chance = random.Random(1)
    texts = [f"{question} {context}" for question, context, _, _ in (example(chance) for _ in range(4_000))]
    if family == "bert":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=specials, show_progress=False)
        made.train_from_iterator(texts, trainer)
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return made
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


def build(family: str, words: Tokenizer) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": words.get_vocab_size(),
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if family == "bert":
        return BertForQuestionAnswering(BertConfig(max_position_embeddings=POSITIONS, pad_token_id=0, **shape))
    return RobertaForQuestionAnswering(
        RobertaConfig(max_position_embeddings=POSITIONS + 2, type_vocab_size=1, pad_token_id=1, **shape)
    )


def batch(words: Tokenizer, chance: random.Random, family: str) -> tuple[dict[str, torch.Tensor], int]:
    """Model inputs with the positions of the answers, and how many of the examples they hold."""
    rows: list[tuple[Any, list[int]]] = []
    while len(rows) < BATCH:
        question, context, start, end = example(chance)
        encoding = words.encode(question, context)
        if len(encoding.ids) > POSITIONS:
            continue
        place = [0, 0]
        if end:
            inside = [
                index
                for index, (sequence, (begin, stop)) in enumerate(
                    zip(encoding.sequence_ids, encoding.offsets, strict=True)
                )
                if sequence == 1 and begin < end and stop > start
            ]
            place = [inside[0], inside[-1]]
        rows.append((encoding, place))
    longest = max(len(encoding.ids) for encoding, _ in rows)
    padding = 0 if family == "bert" else 1

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in values])

    inputs = {
        "input_ids": padded([encoding.ids for encoding, _ in rows], padding),
        "attention_mask": padded([encoding.attention_mask for encoding, _ in rows], 0),
        "start_positions": torch.tensor([place[0] for _, place in rows]),
        "end_positions": torch.tensor([place[1] for _, place in rows]),
    }
    if family == "bert":
        inputs["token_type_ids"] = padded([encoding.type_ids for encoding, _ in rows], 0)
    return inputs, len(rows)


def train(family: str) -> None:
    torch.manual_seed(0)
    chance = random.Random(2)
    words = tokenizer(family)
    model = build(family, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=STEPS[family])
    for step in range(STEPS[family]):
        inputs, count = batch(words, chance, family)
        output = model(**inputs)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            right = (output.start_logits.argmax(1) == inputs["start_positions"]) & (
                output.end_logits.argmax(1) == inputs["end_positions"]
            )
            print(
                f"{family} step {step + 1}: loss {output.loss.item():.3f}, right {int(right.sum())} of {count}",
                flush=True,
            )
    save(family, model, words)


def save(family: str, model: Any, words: Tokenizer) -> None:
    """Written by hand where the two generations of the library would write different things."""
    directory = HERE / family
    directory.mkdir(exist_ok=True)
    config = {
        key: entry
        for key, entry in model.config.to_diff_dict().items()
        if key not in ("dtype", "torch_dtype", "transformers_version")
    }
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # Half precision halves the files; every reader makes the same float32 of it.
    tensors = {
        key: tensor.half().contiguous() for key, tensor in model.state_dict().items() if tensor.is_floating_point()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    words.save(str(directory / "tokenizer.json"), pretty=False)
    names = ["input_ids", "token_type_ids", "attention_mask"] if family == "bert" else ["input_ids", "attention_mask"]
    tokens = (
        {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        if family == "bert"
        else {
            "bos": "<s>",
            "eos": "</s>",
            "cls": "<s>",
            "sep": "</s>",
            "pad": "<pad>",
            "unk": "<unk>",
            "mask": "<mask>",
        }
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": names,
        "model_max_length": POSITIONS,
        **{f"{role}_token": token for role, token in tokens.items()},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(2)
    for each in ("bert", "roberta"):
        train(each)
