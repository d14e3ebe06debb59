"""Records of a suite, real or made up, and a tokenizer with a large vocabulary."""

from __future__ import annotations

import json
import random
from typing import Any

from bench_arms import GENERATED

from stepjepa.data.records import Record, parse_record, read_records

# Characters of the question, characters of the answer, steps of the answer at every twentieth of the real training
# files, sorted by length: what made-up records are as long as.
_REAL: dict[str, tuple[list[int], list[int], list[int]]] = {
    "synth": (
        [28, 49, 54, 60, 56, 55, 62, 66, 55, 54, 69, 71, 73, 64, 75, 78, 75, 76, 83, 90, 116],
        [4, 15, 16, 14, 22, 26, 21, 19, 33, 36, 22, 22, 22, 34, 25, 25, 33, 38, 37, 37, 50],
        [1] * 21,
    ),
    "spider": (
        [46, 63, 62, 76, 88, 64, 91, 99, 85, 115, 86, 101, 92, 140, 98, 99, 115, 100, 79, 131, 130],
        [21, 39, 55, 52, 49, 82, 63, 64, 87, 66, 106, 102, 123, 86, 141, 152, 150, 183, 228, 216, 577],
        [1] * 21,
    ),
    "gsm8k": (
        [42, 135, 122, 179, 189, 186, 224, 248, 267, 116, 192, 214, 398, 232, 315, 245, 333, 255, 359, 427, 461],
        [82, 121, 171, 141, 155, 181, 167, 164, 169, 344, 292, 296, 139, 336, 286, 393, 347, 478, 448, 485, 1228],
        [3, 7, 3, 3, 3, 3, 4, 4, 5, 6, 5, 4, 3, 7, 5, 6, 6, 5, 6, 5, 7],
    ),
}
LENGTHS = {name: list(zip(*columns, strict=True)) for name, columns in _REAL.items()}
LENGTHS["vocabulary"] = LENGTHS["synth"]
SYSTEM = {
    "synth": "Convert natural language to regular expression.",
    "spider": "Convert natural language to SQL.",
    "gsm8k": "Answer the math question, show steps.",
}
SYSTEM["vocabulary"] = SYSTEM["synth"]

_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "ze", "chor", "lin", "stran", "wick")


def suite_records(suite: str, train_file: str, count: int, seed: int) -> list[Record]:
    """Records of a suite.

    Args:
        suite: key of ``LENGTHS``.
        train_file: a file, or ``generated``.
        count: how many to make up; a file is read whole.
        seed: of what is made up.

    Raises:
        UserError: the file is missing or wrong.
    """
    if train_file != GENERATED:
        return read_records(train_file)
    return [parse_record(value) for value in made_up(suite, count, seed)]


def made_up(suite: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Records of meaningless words, questions and answers as long as those of the real file, steps as many.

    Args:
        suite: key of ``LENGTHS``.
        count: how many.
        seed: of everything.
    """
    draw = random.Random(f"{suite} {seed}")
    words = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(400)]
    separator = "\n" if suite == "gsm8k" else "\n\n"
    records = []
    for _ in range(count):
        question, answer, steps = draw.choice(LENGTHS[suite])
        parts = [_words(draw, words, max(answer // steps, 1)) for _ in range(steps)]
        contents = {"system": SYSTEM[suite], "user": _words(draw, words, question), "assistant": separator.join(parts)}
        records.append({"messages": [{"role": role, "content": text} for role, text in contents.items()]})
    return records


def _words(draw: random.Random, words: list[str], characters: int) -> str:
    text = draw.choice(words)
    while len(text) < characters:
        text += f" {draw.choice(words)}"
    return text[:characters].rstrip()


def fill_vocabulary(tokenizer: Any, size: int, seed: int) -> Any:
    """The same tokenizer in a larger vocabulary: its tokens keep their texts and get random ids below ``size``.

    The other ids belong to tokens that no text gives.

    Args:
        tokenizer: fast, byte-level BPE, its special tokens in the vocabulary (as those of the presets).
        size: of the new vocabulary.
        seed: of the ids.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    known = state["model"]["vocab"]
    ids = random.Random(seed).sample(range(size), size)
    moved = dict(zip(known, ids, strict=False))
    unused = {f"<|unused_{index}|>": index for index in ids[len(known) :]}
    state["model"]["vocab"] = moved | unused
    for token in state["added_tokens"]:
        token["id"] = moved[token["content"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )
