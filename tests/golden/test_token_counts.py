"""Golden counts of tokens: chats of one row, and templates that rewrite earlier turns."""

from __future__ import annotations

from typing import Any

import pytest
import record

import served_forms
from stepjepa.batch.dataset import count_tokens
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record

CONFIG = JepaConfig(mode="regular", max_length=4096)

# The 64 chats of ``record.records("chat")``, eight with two turns: tokens of their trees, of the last text of each chat
# alone, and of a row for each trained turn. Where a chat is one row, the first two are equal.
COUNTS = {
    "ChatML": (5169, 5169, 5509),
    "Qwen3": (5537, 5425, 5797),
    "DeepSeek-R1": (4437, 4317, 4573),
    "Llama-2": (4689, 4689, 4973),
    "Llama-3": (9685, 9685, 10597),
    "Mistral-Nemo": (4071, 3997, 4213),
    "Gemma-3": (4725, 4725, 5021),
    "Phi-3": (4317, 4317, 4565),
    "GLM": (4241, 4241, 4485),
    "harmony": (5507, 5499, 5877),
}
# Four reasoned turns a chat: what Qwen3's form leaves out of earlier turns makes four texts of them.
REASONED = {
    "Qwen3": (3532, 2211, 6089),
    "DeepSeek-R1": (2604, 1283, 3817),
    "harmony": (5116, 2739, 7817),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return served_forms.with_all_markers(record.make_tokenizer())


def counted(tokenizer: Any, form: str, chats: list[Record]) -> tuple[int, int, int]:
    made = RecordTokenizer(served_forms.in_form(tokenizer, form), CONFIG).tokenize(chats)
    counts = count_tokens(made, CONFIG)
    return counts["tree"], counts["chat"], counts["turns"]


def chats() -> list[Record]:
    return [parse_record(each, "chat.jsonl", line) for line, each in enumerate(record.records("chat"), start=1)]


def reasoned_chats() -> list[Record]:
    found = []
    for start in range(16):
        texts = []
        for number in range(start, start + 4):
            texts += [f"{number} and {start}?", f"The sum of {number} and {start}.", str(number + start)]
        found.append(parse_record({"messages": served_forms.with_thoughts(*texts)}, "reasoned.jsonl", start + 1))
    return found


@pytest.mark.parametrize("form", COUNTS)
def test_chats_cost_the_tokens_that_they_cost(form: str, tokenizer: Any) -> None:
    assert counted(tokenizer, form, chats()) == COUNTS[form]


@pytest.mark.parametrize("form", ["ChatML", "Llama-3"])
def test_a_chat_of_one_row_costs_what_its_template_writes(form: str, tokenizer: Any) -> None:
    """Counted with plain transformers: the whole chat, up to and with the token that ends its last turn."""
    made = served_forms.in_form(tokenizer, form)
    ends = made.convert_tokens_to_ids({"ChatML": "<|im_end|>", "Llama-3": "<|eot_id|>"}[form])
    total = 0
    for chat in chats():
        ids = made.apply_chat_template(chat.messages, tokenize=True, return_dict=False, date_string="26 Jul 2024")
        total += len(ids) - ids[::-1].index(ends)
    tree, row, turns = COUNTS[form]
    assert tree == row == total < turns


@pytest.mark.parametrize("form", REASONED)
def test_reasoned_turns_as_a_tree_beside_separate_rows(form: str, tokenizer: Any) -> None:
    tree, row, turns = counted(tokenizer, form, reasoned_chats())
    assert (tree, row, turns) == REASONED[form]
    assert row < tree < turns
