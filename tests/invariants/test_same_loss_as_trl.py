"""The LM loss of a trained turn is that of TRL's prompt and completion, wherever TRL's prompt is the served one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, pre_tokenizers

import served_forms
import tiny
from served_forms import FORMS, chat, with_thoughts
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.objectives.jepa import Jepa

trl = pytest.importorskip("trl", reason="TRL is not installed (extra bench)")

PLAIN = [chat("a fish?", "Cod.", system="Be brief."), chat("a bird?", "An owl, or\n\na wren."), chat("c?", "Rome.")]
THOUGHTS = [with_thoughts("2+3?", "Two and three.", "5"), with_thoughts("9-4?", "Nine less four.", "5")]
# Name of a form, chats, and what the template writes behind the stop token: TRL trains that, too.
CASES = {
    "ChatML": ("ChatML", PLAIN, "\n"),
    "Llama-3": ("Llama-3", PLAIN, ""),
    "Qwen3, with thoughts": ("Qwen3", THOUGHTS, "\n"),
    "Qwen3, without": ("Qwen3", PLAIN, "\n"),
    "Qwen3, thinking switched off": ("Qwen3, no thinking", PLAIN, "\n"),
}


# Of Llama-3 and Qwen: line ends are pieces of their own. Where GPT-2's rule leaves the last of them to the text that
# follows, no prompt in Llama-3's form begins prompt and answer, and TRL asks with another one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def markers(plain_tokenizer: Any) -> Any:
    made = served_forms.with_all_markers(plain_tokenizer)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, words])
    return made


def of_trl(model: Any, tokenizer: Any, chats: Any, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """TRL's trainer of some chats, and its rows."""
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in chats]
    settings = trl.SFTConfig(
        str(folder), max_length=None, completion_only_loss=True, use_cpu=True, bf16=False, report_to="none"
    )
    trainer = trl.SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    return trainer, list(trainer.train_dataset)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_equal(name: str, markers: Any, tmp_path: Path) -> None:
    form, chats, behind = CASES[name]
    config = JepaConfig(mode="regular", chat_template_kwargs=dict(FORMS[form].variables) or None)
    tokenizer = served_forms.in_form(markers, form)
    model = tiny.make_model("llama", vocab_size=len(tokenizer))
    jepa = Jepa(model, tokenizer, config)
    records = [parse_record({"messages": messages}) for messages in chats]
    ours = jepa.loss(model, jepa.collate(records)).loss
    # The tokenizer has the saved template by now: with Llama-3's own the date would be that of today.
    trainer, rows = of_trl(model, tokenizer, chats, tmp_path)
    batch = trainer.data_collator(rows)
    rest = tokenizer(behind, add_special_tokens=False)["input_ids"]
    for number, (row, tokenized) in enumerate(zip(rows, jepa.record_tokenizer.tokenize(records), strict=True)):
        assert row["input_ids"] == [*tokenized.ids, *rest]
        length = len(tokenized.ids)
        trained = [place for place, label in enumerate(batch["labels"][number].tolist()) if label != -100]
        assert trained == [*(tokenized.labels + 1), *range(length, length + len(rest))]
        batch["labels"][number, length:] = -100
    with torch.no_grad():
        theirs = trainer.compute_loss(model, dict(batch))
    assert abs(float(ours.detach()) - float(theirs)) <= 1e-5


@pytest.mark.parametrize("name", ["DeepSeek-R1", "QwQ"])
@pytest.mark.filterwarnings("ignore")
def test_where_trl_takes_another_prompt(name: str, markers: Any, tmp_path: Path) -> None:
    """TRL takes the tokens that prompt and chat have in common: its model answers a prompt that no server sends.

    DeepSeek-R1's prompt opens a thought that the chat leaves out. The line end behind QwQ's ``<think>`` makes one token
    with that of an empty thought.
    """
    tokenizer = served_forms.in_form(markers, name)
    model = tiny.make_model("llama", vocab_size=len(tokenizer))
    jepa = Jepa(model, tokenizer, JepaConfig(mode="regular"))
    (messages,) = chats = [chat("a fish?", "Cod.")]
    (tokenized,) = jepa.record_tokenizer.tokenize([parse_record({"messages": messages})])
    served = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert served == tokenized.ids[: tokenized.labels[0] + 1].tolist()
    _, (row,) = of_trl(model, tokenizer, chats, tmp_path)
    first = next(place for place, label in enumerate(row["labels"]) if label != -100)
    asked, answer = row["input_ids"][:first], tokenizer.decode(row["input_ids"][first:])
    assert asked == served[: len(asked)]
    assert len(asked) < len(served)
    assert answer == ("Cod.<|end_of_sentence|>" if name == "DeepSeek-R1" else "\n\n</think>\n\nCod.<|im_end|>\n")
    assert tokenizer.decode(tokenized.ids[len(served) :]).startswith("\n</think>\n\nCod.")


def test_make_sure_that_it_is_the_served_prompt(markers: Any) -> None:
    """Of the cases above: were it not, the comparison would be with another prompt."""
    for form, chats, _ in CASES.values():
        config = JepaConfig(mode="regular", chat_template_kwargs=dict(FORMS[form].variables) or None)
        made = RecordTokenizer(served_forms.in_form(markers, form), config)
        for messages in chats:
            (turn,) = made.turns(parse_record({"messages": messages}))
            assert turn.text[: turn.answer] == made.template.prompt(messages[:-1])
