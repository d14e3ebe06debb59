"""Invariant 8: every trained turn stands behind the prompt that plain transformers makes of the saved folder.

``python tests/invariants/test_trained_is_served.py`` writes the golden texts anew.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import served_forms
import tiny
from served_forms import FORMS, TOOLS, Form, Message, chat, with_call, with_thoughts
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.models.presets import train_tokenizer
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.setup import set_up
from stepjepa.views.sequences import SampledRecord, TokenizedRecord

GOLDEN = Path(__file__).parent / "served_texts.json"
REAL = ["minimind", "qwen2.5", "olmo2"]
_TRL = find_spec("trl")
OF_TRL = sorted(Path(str(_TRL.origin)).parent.glob("chat_templates/*.jinja")) if _TRL else []
# They take texts as parts alone, for processors of images.
PARTS_ALONE = ("idefics3", "llava_next", "smolvlm")

TEXTS = chat("a fish?", "Cod.", "a bird?", "Owl.", system="Be brief.")
THOUGHTS = with_thoughts("2+3?", "Two and three.", "5", "And 1?", "Five and one.", "6")
CALL = with_call("Is cod a fish?", "cod", "cod: a fish", "It is.")
ODD = {
    "line ends": chat("\n q \n", "\n\nCod.\n\n", "q\n\n\nr", " a "),
    # A template that looks at think tags would see others in the content; those of tokens are text in an answer.
    "special tokens": chat("<|im_end|><|eot_id|>?", "It is <|im_start|> </s> [INST].", "</s>", "<|user|>"),
    "characters": chat("cafe\u0301 🐟 中", "e\u0301 🐟🐟 \u00a0 中文 \u200b.", "\ufeff?", "ß"),
    "like the template": chat("user", "assistant", "assistant", "user", system="system"),
    "equal texts": chat("a", "a", "a", "a", system="a"),
}


@dataclass
class Saved:
    """A form as training has it, and as plain transformers loads it from a folder."""

    made: RecordTokenizer
    tokenizer: Any
    generation: GenerationConfig
    form: Form | None

    @property
    def stop_ids(self) -> set[int]:
        ends = self.generation.eos_token_id
        return {*ends} if isinstance(ends, list) else {ends}

    def record(self, messages: Sequence[Message], **fields: Any) -> Record:
        return parse_record({"messages": list(messages), **fields}, "memory.jsonl", 1)

    def tokenized(self, messages: Sequence[Message], **fields: Any) -> TokenizedRecord:
        (result,) = self.made.tokenize([self.record(messages, **fields)])
        return result

    def served(self, messages: Sequence[Message], tools: Any = None, chat_template_kwargs: Any = None) -> list[int]:
        """The ids of a prompt by plain transformers; messages in the form that the template reads."""
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        read = self.made.template.normalise(messages)
        return list(self.tokenizer.apply_chat_template(read, tools=tools, **options, **(chat_template_kwargs or {})))

    def text(self, ids: Any) -> str:
        return str(self.tokenizer.decode([*ids], clean_up_tokenization_spaces=False))


def saved(tokenizer: Any, folder: Path, form: Form | None = None) -> Saved:
    """Set a form up for training, and save it."""
    variables = dict(form.variables) if form else None
    config = JepaConfig(mode="regular", max_length=4096, chat_template_kwargs=variables)
    model = tiny.make_model("llama", vocab_size=max(len(tokenizer), tiny.VOCABULARY))
    set_up(model, tokenizer, config)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    made = RecordTokenizer(tokenizer, config)
    return Saved(made, AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder), form)


@pytest.fixture(scope="session")
def all_markers(plain_tokenizer: Any) -> Any:
    return served_forms.with_all_markers(plain_tokenizer)


@pytest.fixture(scope="session")
def of_form(all_markers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    known: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        if name not in known:
            folder = tmp_path_factory.mktemp("form")
            known[name] = saved(served_forms.in_form(all_markers, name), folder, FORMS[name])
        return known[name]

    return make


def runs(record: TokenizedRecord) -> Iterator[tuple[list[int], list[int]]]:
    """By hand: the ids in front of the first label of each turn, and those that are trained."""
    for text in record.texts:
        labels, ids = text.labels.tolist(), text.ids.tolist()
        first = 0
        for number, position in enumerate(labels):
            if number + 1 == len(labels) or labels[number + 1] != position + 1:
                yield ids[: labels[first] + 1], ids[labels[first] + 1 : position + 2]
                first = number + 1


def check(saved: Saved, messages: Sequence[Message], **fields: Any) -> list[tuple[list[int], list[int]]]:
    """Every trained turn of a chat: the served prompt, then an answer that ends at a stop and holds no other."""
    turns = list(runs(saved.tokenized(messages, **fields)))
    trained = [
        index for index, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight", 1) != 0
    ]
    assert len(turns) == len(trained)
    for index, (prompt, answer) in zip(trained, turns, strict=True):
        assert prompt == saved.served(messages[:index], **fields), saved.text(prompt)
        assert [index in saved.stop_ids for index in answer] == [False] * (len(answer) - 1) + [True]
        squeezed = "".join(saved.text(answer).split())
        for key in ("content", "reasoning_content", "thinking"):
            if text := messages[index].get(key):
                normal = saved.tokenizer.backend_tokenizer.normalizer
                normalised = (normal.normalize_str(text) if normal else text).replace("▁", " ")
                assert "".join(normalised.split()) in squeezed
    return turns


# -- forms of our own --------------------------------------------------------------------------------------------------


def chats_of(form: Form) -> dict[str, tuple[list[Message], dict[str, Any]]]:
    """The chats of a form that are golden, with what else is rendered."""
    chats: dict[str, tuple[list[Message], dict[str, Any]]] = {"texts": (TEXTS, {})}
    if form.thinks:
        chats["thoughts"] = (THOUGHTS, {})
    if form.calls:
        chats["call"] = (CALL, {"tools": TOOLS})
    return chats


def golden_texts(saved: Saved) -> dict[str, list[list[str]]]:
    """Of each chat of a form the turns as texts: prompt and answer."""
    assert saved.form is not None
    return {
        name: [[saved.text(part) for part in turn] for turn in runs(saved.tokenized(messages, **fields))]
        for name, (messages, fields) in chats_of(saved.form).items()
    }


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", FORMS)
def test_prompts_and_answers(name: str, of_form: Callable[[str], Saved]) -> None:
    """With and without system, thoughts, calls of tools; the texts are those of the golden file, written by hand."""
    form = of_form(name)
    for messages, fields in chats_of(FORMS[name]).values():
        check(form, messages, **fields)
    check(form, TEXTS[1:])
    check(form, TEXTS[1:3])
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden_texts(form) == golden[name]


@pytest.mark.sample(11)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", FORMS)
def test_odd_contents(name: str, odd: str, of_form: Callable[[str], Saved]) -> None:
    check(of_form(name), ODD[odd])


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", FORMS)
def test_context_is_not_trained(name: str, of_form: Callable[[str], Saved]) -> None:
    """An answer of weight 0, and messages behind the last trained answer."""
    messages = [*TEXTS, {"role": "user", "content": "and then?"}, {"role": "assistant", "content": "No.", "weight": 0}]
    messages[2] = {**messages[2], "weight": 0}
    form = of_form(name)
    ((prompt, answer),) = list(runs(form.tokenized(messages)))
    assert prompt == form.served(messages[:4])
    assert "Owl" in form.text(answer)
    assert not {"Cod", "then"} & {*form.text(answer).split()}


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.thinks])
def test_a_thought_that_the_template_does_not_write_is_refused(name: str, of_form: Callable[[str], Saved]) -> None:
    form = of_form(name)
    if form.made.template.opens_thought:
        check(form, THOUGHTS[:2])  # it is put in front of the answer
        return
    with pytest.raises(UserError, match="reasoning_content"):
        form.tokenized(THOUGHTS)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", FORMS)
def test_saving_twice_changes_nothing(name: str, of_form: Callable[[str], Saved], tmp_path: Path) -> None:
    form = of_form(name)
    assert form.tokenizer.chat_template == form.made.template.source
    again = saved(AutoTokenizer.from_pretrained(form.tokenizer.name_or_path), tmp_path, FORMS[name])
    assert again.tokenizer.chat_template == form.tokenizer.chat_template
    assert again.stop_ids == form.stop_ids


def test_a_variable_of_the_run_can_be_overridden(of_form: Callable[[str], Saved]) -> None:
    form, asked = of_form("Qwen3, no thinking"), TEXTS[:2]
    assert form.text(form.served(asked)).endswith("<think>\n\n</think>\n\n")
    assert not form.text(form.served(asked, chat_template_kwargs={"enable_thinking": True})).endswith("</think>\n\n")
    check(form, TEXTS, chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(UserError, match="the prompt closes the thought already"):
        form.tokenized(THOUGHTS)


# -- tokenizers and templates of others --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str, shared_data: Path, tmp_path: Path) -> None:
    form = saved(AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name), tmp_path)
    for messages in (TEXTS, TEXTS[1:], *ODD.values()):
        check(form, messages)


def with_template_of_trl(all_markers: Any, file: Path) -> Any:
    """The tokenizer with one of TRL's own templates, and the markers that it spells."""
    made, source = copy.deepcopy(all_markers), file.read_text(encoding="utf-8")
    spelt = re.findall(r"<\|?[A-Za-z_｜|:/]+[^<>\s'\"]*\|?>|\[/?[A-Z_]+\]", source)
    markers = sorted({each for each in spelt if "think" not in each and "{" not in each and len(each) < 40})
    made.add_special_tokens({"extra_special_tokens": markers}, replace_extra_special_tokens=False)
    made.bos_token, made.eos_token, made.chat_template = "<s>", "</s>", source
    return made


@pytest.mark.sample(7)
@pytest.mark.parametrize("file", OF_TRL, ids=[file.stem for file in OF_TRL])
def test_templates_of_trl(file: Path, all_markers: Any, tmp_path: Path) -> None:
    tokenizer = with_template_of_trl(all_markers, file)
    if file.stem.startswith(PARTS_ALONE):
        with pytest.raises(UserError, match=r"does not render a user|refuses these messages"):
            saved(tokenizer, tmp_path)
        return
    form = saved(tokenizer, tmp_path)
    for messages in (TEXTS, TEXTS[1:], TEXTS[1:3], ODD["equal texts"]):
        check(form, messages)
    try:
        check(form, THOUGHTS)
    except UserError as error:
        assert re.search(r"does not write 'reasoning_content'|the prompt closes the thought", str(error))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "file",
    [file for file in OF_TRL if file.stem.endswith("_training") and not file.stem.startswith(PARTS_ALONE)],
    ids=lambda file: file.stem.removesuffix("_training"),
)
def test_trl_marks_the_same_answer(file: Path, all_markers: Any) -> None:
    """TRL's templates for training mark what an assistant says, up to and behind the end of a turn, headers included.

    Ours is the end of that, up to the stop. Where the prompt opens a thought that the template leaves out, TRL trains
    none of it: then it is the content that is the same.
    """
    tokenizer = with_template_of_trl(all_markers, file)
    made = RecordTokenizer(tokenizer, JepaConfig(mode="regular", max_length=4096))
    (record,) = made.tokenize([parse_record({"messages": TEXTS[1:3]})])
    ((_, answer),) = runs(record)
    whole = tokenizer.apply_chat_template(
        TEXTS[1:3], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    both = zip(whole["input_ids"], whole["assistant_masks"], strict=True)
    marked = tokenizer.decode([index for index, is_marked in both if is_marked])
    ours = tokenizer.decode(answer)
    leaves_out = file.stem.startswith(("deepseek", "nemotron"))
    ours = ours.rpartition("</think>")[2].lstrip() if leaves_out else ours
    assert "Cod." in ours
    assert ours in marked
    assert not marked.partition(ours)[2].strip() or file.stem.startswith(("cohere2", "phi3"))


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", ["first", "every"])
@pytest.mark.parametrize(
    "name",
    [
        "Llama-2",
        "Mistral",
        "Phi-3",
        "Vicuna",
        "blank in front of answers",
        "Alpaca",
        "ChatML, ends that are not special",
    ],
)
def test_a_tokenizer_that_puts_a_blank_in_front_of_a_text(name: str, way: str, tmp_path: Path) -> None:
    """As sentencepiece does: neither the prompt nor an answer that is tokenised apart gets one of its own.

    A normaliser (``every``) does so behind every special token, and never finds an added token that is not special.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if way == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = [message["content"] for message in TEXTS + ODD["line ends"] + ODD["special tokens"]]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    made.train_from_iterator([*words * 3, "USER: ASSISTANT: ### Response: Instruction:"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    form = saved(served_forms.in_form(served_forms.with_all_markers(tokenizer), name), tmp_path, FORMS[name])
    for messages in (TEXTS, TEXTS[1:], ODD["line ends"], ODD["equal texts"]):
        check(form, messages)


# -- one model learns all of it by heart -------------------------------------------------------------------------------


def by_heart(form: Form) -> list[tuple[list[Message], dict[str, Any]]]:
    """Ten chats, with thoughts and calls where a form has them."""
    chats: list[tuple[list[Message], dict[str, Any]]] = [
        (chat("a fish?", "Cod."), {}),
        (chat("a tree?", "Elm.", system="Be brief."), {}),
        (chat("a city?", "Rom.", "one more", "Bonn."), {}),
        (chat("a bird? ", "An owl.\n\nOr a wren."), {}),
        (chat("cafe\u0301?", "e\u0301 🐟"), {}),
        (chat("say <|im_end|>", "I say <|eot_id|> so"), {}),
        (chat("no context", "", "which?", "None."), {}),
        (chat("red", "blue", "blue", "red", system="Swap."), {}),
        (
            with_thoughts("2+3?", "Two and three.", "5", "And 1?", "Five and one.", "6")
            if form.thinks
            else chat("1", "2"),
            {},
        ),
        (copy.deepcopy(CALL), {"tools": TOOLS}) if form.calls else (chat("ping", "pong"), {}),
    ]
    for message in (message for messages, _ in chats for message in messages if message["role"] == "user"):
        message["content"] += form.mark
    chats[6][0][1]["weight"] = 0
    chats[6][0][1]["content"] = "Wrong."
    return chats


@pytest.mark.slow
def test_one_model_says_every_turn_of_every_form(
    all_markers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten chats a form are trained; each turn is said exactly by plain ``generate`` from the exported folder."""
    config = {
        name: JepaConfig(mode="regular", chat_template_kwargs=dict(form.variables) or None)
        for name, form in FORMS.items()
    }
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    model = tiny.make_model("llama", vocab_size=len(all_markers), num_hidden_layers=3, **shape)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(0.1)
    tokenizers = {name: served_forms.in_form(all_markers, name) for name in FORMS}
    records = [
        record
        for name, form in FORMS.items()
        for record in RecordTokenizer(tokenizers[name], config[name]).tokenize(
            [parse_record({"messages": list(messages), **fields}) for messages, fields in by_heart(form)]
        )
    ]
    answers: dict[tuple[int, ...], list[int]] = {}
    for prompt, answer in (turn for record in records for turn in runs(record)):
        assert answers.setdefault(tuple(prompt), answer) == answer, "the same prompt has two answers"
    jepa = Jepa(model, tokenizers["ChatML"], config["ChatML"])
    steps, order = 400, torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randperm(len(records), generator=order)[:48].tolist()
        loss = jepa.loss(model, jepa.collator(SampledRecord(records[index]) for index in chosen)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    wrong = []
    for name, form in FORMS.items():
        run, exported = tmp_path / f"{name} run", tmp_path / name
        # Each form has a folder of its own, with no stop token of another one.
        model.generation_config = GenerationConfig()
        Jepa(model, tokenizers[name], config[name]).save(run)
        assert main(["export", "--model_path", str(run), "--output_dir", str(exported)]) == 0
        wrong += list(_said_wrongly(exported, name, by_heart(form)))
    assert not wrong, f"{len(wrong)} turns, LM loss {float(loss.detach()):.4f}: {wrong[:3]}"


def _said_wrongly(folder: Path, name: str, chats: Sequence[tuple[list[Message], dict[str, Any]]]) -> Iterator[str]:
    """The turns that plain transformers does not say from a folder, all of a form in one batch."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    known = saved(served_forms.in_form(tokenizer, name), folder.with_name(f"{name} again"), FORMS[name])
    asked, expected = [], []
    for messages, fields in chats:
        read = known.made.template.normalise(messages)
        for index, (_, answer) in zip(
            [at for at, each in enumerate(messages) if each["role"] == "assistant" and each.get("weight", 1)],
            runs(known.tokenized(messages, **fields)),
            strict=True,
        ):
            asked.append(
                tokenizer.apply_chat_template(read[:index], add_generation_prompt=True, return_dict=False, **fields)
            )
            expected.append(answer)
    tokenizer.padding_side, tokenizer.pad_token_id = "left", 0
    batch = tokenizer.pad({"input_ids": asked}, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=max(map(len, expected)) + 5, do_sample=False, pad_token_id=0)
    for prompt, answer, row in zip(asked, expected, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
        # Behind its end a row of a batch is padded.
        if row[: len(answer)] != answer or any(row[len(answer) :]):
            yield f"{name}: {tokenizer.decode(prompt)} => {tokenizer.decode(row)}"


if __name__ == "__main__":
    import tempfile

    texts = [message["content"] for record in tiny.records() for message in record.messages]
    markers = served_forms.with_all_markers(train_tokenizer(texts, 290))
    with tempfile.TemporaryDirectory() as place:
        forms = {
            name: golden_texts(saved(served_forms.in_form(markers, name), Path(place), form))
            for name, form in FORMS.items()
        }
    write_json(GOLDEN, forms)
    sys.exit(0)
