"""Random weights from a configuration, new tokenizers, the tokens of the form without a chat, and both stages."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepjepa.models.pretraining import chat_form
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import chat_templates
import tiny
from stepjepa.chat.plain_template import END_OF_TURN, PERCEPTION, PlainTemplate
from stepjepa.chat.template import ChatTemplate
from stepjepa.cli import main
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.models.loading import LoraSettings, add_lora, load_for_inference, load_model
from stepjepa.models.presets import CHAT_TEMPLATE, CHATML, SPARE_ROWS, train_tokenizer, vocabulary_rows
from stepjepa.models.token_rows import adapter_ids, give_plain_tokens

TEXTS = [message["content"] for record in tiny.records() for message in record.messages]
STRANGE = ["12345 + 67.8%", "It's DON'T  I'll\n\n\n x", "Größe, 中文 é", "a\tb\r\n  c", "<|perception|>A<|eot_id|>"]


def save_config(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A folder with a configuration and nothing else."""
    family, shape = tiny.ARCHITECTURES[name]
    AutoConfig.for_model(family, **{"vocab_size": tiny.VOCABULARY, **shape, **changes}).save_pretrained(folder)
    return folder


def pretrain(folder: Path, **options: Any) -> tuple[Any, Any]:
    return load_model(str(folder), pretrain=True, texts=TEXTS, **options)


def assert_equal_weights(first: Any, second: Any) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return save_config(tmp_path / "bare")


@pytest.fixture
def base(tmp_path: Path, plain_tokenizer: Any) -> Path:
    """A trained model with its tokenizer."""
    tiny.make_model("llama", seed=5).save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_depend_on_the_seed_alone(bare: Path) -> None:
    """So they are equal on all processes, whose generators may stand anywhere."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, _ = pretrain(bare, train_tokenizer=290, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    again, _ = pretrain(bare, train_tokenizer=290, seed=3)
    assert_equal_weights(first, again)
    other, _ = pretrain(bare, train_tokenizer=290, seed=4)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert first.training


def test_trained_weights_are_left_aside(base: Path) -> None:
    trained, _ = load_model(str(base))
    model, _ = pretrain(base)
    assert type(model) is type(trained)
    assert model.config.hidden_size == trained.config.hidden_size
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, trained.model.layers[0].mlp.up_proj.weight)
    # As the family draws them: 0.02 by its initializer_range, far from the 0.3 of the trained ones.
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_dtypes(tmp_path: Path) -> None:
    folder = save_config(tmp_path / "half", dtype="bfloat16")
    for dtype, expected in [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]:
        assert pretrain(folder, train_tokenizer=290, dtype=dtype)[0].dtype == expected
    assert pretrain(save_config(tmp_path / "none"), train_tokenizer=290, dtype="auto")[0].dtype == torch.float32
    with pytest.raises(ValueError, match="dtype: expected one of"):
        pretrain(folder, train_tokenizer=290, dtype="float8")


def test_a_preset_has_random_weights_anyway() -> None:
    usual, tokenizer = load_model("preset:tiny", texts=TEXTS)
    asked, same = load_model("preset:tiny", texts=TEXTS, pretrain=True)
    assert_equal_weights(usual, asked)
    assert tokenizer.get_vocab() == same.get_vocab()


# -- vocabulary and special ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "expected"), [(389, 389), (317, 384), (7, 384)])
def test_rows_for_the_tokenizer_of_the_folder(known: int, expected: int, tmp_path: Path, plain_tokenizer: Any) -> None:
    """A configuration with rows enough for it and 32 to spare keeps them."""
    assert 384 - 64 < len(plain_tokenizer) + SPARE_ROWS + 2 <= 384
    assert len(plain_tokenizer) + SPARE_ROWS > 320
    folder = save_config(tmp_path / "folder", vocab_size=known)
    plain_tokenizer.save_pretrained(folder)
    shapes = set()
    for options in ({}, {"predictors": 2}, {"predictors": 31}):
        model, tokenizer = pretrain(folder, **options)
        shapes.add(tuple(model.get_input_embeddings().weight.shape))
        assert len(tokenizer) == len(plain_tokenizer) + options.get("predictors", 0)
        assert model.config.vocab_size == expected
    assert shapes == {(expected, 33)}


def test_special_ids_are_those_of_the_tokenizer(tmp_path: Path, plain_tokenizer: Any) -> None:
    stale = {"eos_token_id": [5, 377], "bos_token_id": 381, "pad_token_id": 388}
    folder = save_config(tmp_path / "folder", **stale)
    plain_tokenizer.save_pretrained(folder)
    for options in ({}, {"train_tokenizer": 290}):
        model, tokenizer = pretrain(folder, **options)
        for settings in (model.config, model.generation_config):
            assert settings.eos_token_id == tokenizer.eos_token_id == 2
            assert settings.pad_token_id == tokenizer.pad_token_id == 0
            assert settings.bos_token_id is None


def test_padding_has_no_row_in_common_with_the_end_of_a_turn(tmp_path: Path, plain_tokenizer: Any) -> None:
    """A padding row is zero at first and gets no gradient from what it is looked up for."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    folder = save_config(tmp_path / "folder")
    tokenizer.save_pretrained(folder)
    model, _ = pretrain(folder)
    assert model.config.pad_token_id is None
    assert bool(model.get_input_embeddings().weight[tokenizer.eos_token_id].abs().sum() > 0)
    model, new = pretrain(folder, train_tokenizer=290)
    assert new.pad_token == "<|pad|>"
    assert model.config.pad_token_id == new.pad_token_id != new.eos_token_id


def test_generation_stops_at_every_end(tmp_path: Path, plain_tokenizer: Any) -> None:
    """Also where the template closes a turn with another token than the eos token."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": chat_templates.GEMMA_TOKENS})
    tokenizer.chat_template = chat_templates.GEMMA_LIKE
    folder = save_config(tmp_path / "folder")
    tokenizer.save_pretrained(folder)
    model, same = pretrain(folder)
    assert model.generation_config.eos_token_id == [
        same.convert_tokens_to_ids("<end_of_turn>"),
        same.convert_tokens_to_ids("<|im_end|>"),
    ]


# -- new tokenizers ----------------------------------------------------------------------------------------------------


def test_a_configuration_alone_is_enough(bare: Path) -> None:
    assert [file.name for file in bare.iterdir()] == ["config.json"]
    model, tokenizer = pretrain(bare, train_tokenizer=283)
    assert len(tokenizer) == 283
    assert model.config.vocab_size == vocabulary_rows(tokenizer) == 320
    assert tokenizer.get_vocab() == train_tokenizer(TEXTS, 283).get_vocab()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("7315")["input_ids"] == [tokenizer.convert_tokens_to_ids(digit) for digit in "7315"]
    for text in STRANGE[:4]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_size_of_a_presets_tokenizer() -> None:
    model, tokenizer = load_model("preset:tiny", texts=TEXTS, train_tokenizer=277)
    assert len(tokenizer) == 277
    assert model.config.vocab_size == 320


def test_training_a_tokenizer_twice_gives_the_same(plain_tokenizer: Any) -> None:
    form = chat_form(plain_tokenizer)
    assert train_tokenizer(TEXTS, 290, form).get_vocab() == train_tokenizer(TEXTS, 290, form).get_vocab()


@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind"])
def test_the_template_of_the_old_tokenizer_is_kept(
    name: str, shared_data: Path, tmp_path: Path, real_tokenizer: Callable[[str], Any]
) -> None:
    folder = save_config(tmp_path / name)
    AutoTokenizer.from_pretrained(str(shared_data / "tokenizers" / name)).save_pretrained(folder)
    model, tokenizer = pretrain(folder, train_tokenizer=331)
    old, new = ChatTemplate(real_tokenizer(name)), ChatTemplate(tokenizer)
    assert len(tokenizer) <= 331
    assert tokenizer.eos_token == real_tokenizer(name).eos_token
    assert new.describe() == old.describe()
    for record in tiny.records():
        assert new.render(record.messages) == old.render(record.messages)
        text = new.render(record.messages).text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert ids.count(new.end_of_turn_ids[0]) == text.count(new.end_of_turn)
    assert new.end_of_turn_ids[0] in torch.tensor(model.generation_config.eos_token_id).reshape(-1).tolist()


def test_what_a_template_writes_is_frequent(real_tokenizer: Callable[[str], Any]) -> None:
    form = chat_form(real_tokenizer("olmo2"))
    assert form.special == ("<|pad|>", "<|endoftext|>")
    assert form.frequent == ("<|system|>\n", "\n<|user|>\n", "\n<|assistant|>\n")
    assert (form.eos, form.bos, form.pad) == ("<|endoftext|>", "<|endoftext|>", "<|pad|>")


def test_without_a_usable_template_it_is_chatml(plain_tokenizer: Any) -> None:
    assert chat_form(None) is CHATML
    tokenizer = copy.deepcopy(plain_tokenizer)
    for template in (None, "{{ messages[0]['content'] }}"):
        tokenizer.chat_template = template
        assert chat_form(tokenizer) is CHATML
    same = chat_form(plain_tokenizer)
    assert same.template == CHATML.template
    assert set(same.special) == set(CHATML.special)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_template_file_wins(with_tokenizer: bool, bare: Path, tmp_path: Path, plain_tokenizer: Any) -> None:
    if with_tokenizer:
        plain_tokenizer.save_pretrained(bare)
    (tmp_path / "own.jinja").write_text(chat_templates.OPEN_ENDED, encoding="utf-8")
    _, tokenizer = pretrain(bare, train_tokenizer=290, chat_template=str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == chat_templates.OPEN_ENDED
    assert ChatTemplate(tokenizer).end_of_turn == "<|im_end|>"


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gpt2", "gemma3_window"])
def test_what_is_saved_is_loaded_again_as_it_was(name: str, tmp_path: Path) -> None:
    """Transformers gives some families' tokenizers a way of their own to cut texts into words, whatever was saved."""
    model, tokenizer = pretrain(save_config(tmp_path / "bare", name), train_tokenizer=307, plain=True, predictors=2)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    again, same = load_for_inference(tmp_path / "run", device="cpu")
    plainly = AutoTokenizer.from_pretrained(str(tmp_path / "run"))
    for text in [*STRANGE, *TEXTS]:
        ids = tokenizer(text)["input_ids"]
        assert same(text)["input_ids"] == plainly(text)["input_ids"] == ids
    with torch.no_grad():
        tiny.assert_same(again(torch.tensor([ids])).logits, model.eval()(torch.tensor([ids])).logits)
    whole = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run"))
    assert whole.generation_config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN) in whole.generation_config.eos_token_id


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_trained_weights_know_their_own_tokenizer_only(base: Path) -> None:
    with pytest.raises(UserError, match=r"--train_tokenizer needs random weights.*add --pretrain"):
        load_model(str(base), texts=TEXTS, train_tokenizer=290)


def test_a_tokenizer_without_room_for_bytes_is_refused(bare: Path) -> None:
    with pytest.raises(UserError, match=r"of 258 tokens is too small: expected 259 or more, 256 bytes and 3 special"):
        pretrain(bare, train_tokenizer=258)
    with pytest.raises(UserError, match="expected 259 or more"):
        load_model("preset:tiny", texts=TEXTS, train_tokenizer=12)
    assert len(pretrain(bare, train_tokenizer=259)[1]) == 259


def test_no_tokenizer_anywhere(bare: Path) -> None:
    for plain in (True, False):
        with pytest.raises(UserError, match=r"bare: holds no tokenizer; .*--train_tokenizer SIZE"):
            pretrain(bare, plain=plain)


def test_no_template_and_no_plain(base: Path, plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.chat_template = None
    (base / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(base)
    with pytest.raises(UserError, match=r"no chat template; .*--plain"):
        pretrain(base)
    assert PlainTemplate(pretrain(base, plain=True)[1]).end_of_turn == END_OF_TURN


def test_no_configuration(tmp_path: Path, plain_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        pretrain(tmp_path / "missing")
    plain_tokenizer.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="can't load a configuration from"):
        pretrain(tmp_path / "words", train_tokenizer=290)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is an adapter; training starts from a whole model"):
        pretrain(tmp_path / "adapter")


def test_no_foreign_code_runs_unasked(tmp_path: Path, plain_tokenizer: Any) -> None:
    folder = tmp_path / "foreign"
    plain_tokenizer.save_pretrained(folder)
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    for options in ({}, {"train_tokenizer": 290}):
        with pytest.raises(UserError, match="trust_remote_code"):
            pretrain(folder, **options)
    assert not (tmp_path / "ran").exists()


# -- tokens of the form without a chat ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_plain_tokens_take_spare_rows_first(name: str, plain_tokenizer: Any) -> None:
    """Of a tied and of a separate head; the rows that are there keep their values."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    model = tiny.make_model(name)
    before = model.get_input_embeddings().weight.detach().clone()
    ids = give_plain_tokens(model, tokenizer)
    after = model.get_input_embeddings().weight.detach()
    assert after.shape == before.shape
    assert ids == [len(plain_tokenizer), len(plain_tokenizer) + 1]
    assert torch.equal(after[: ids[0]], before[: ids[0]])
    assert model.generation_config.eos_token_id == [2, ids[1]]
    assert give_plain_tokens(model, tokenizer) == ids
    assert model.generation_config.eos_token_id == [2, ids[1]]


def test_plain_tokens_get_rows_where_there_are_none_to_spare(plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    model = tiny.make_model("qwen3", vocab_size=len(plain_tokenizer))
    ids = give_plain_tokens(model, tokenizer)
    rows = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    assert len(rows) == len(head) == len(tokenizer) == ids[1] + 1
    assert float((rows[ids[0]] - rows[ids[1]]).norm()) > 0.5 * float(rows[: ids[0]].std(0).norm())
    tiny.assert_same(head[ids], head[: ids[0]].mean(0).expand(2, -1))


def test_tokens_that_a_model_has_keep_their_rows(plain_tokenizer: Any) -> None:
    """As in Llama-3, whose end of turn is this very token."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": [END_OF_TURN]}, replace_extra_special_tokens=False)
    known = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model = tiny.make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[known:] = 0.0
    ids = give_plain_tokens(model, tokenizer)
    assert ids == [known + 1, known]
    rows = model.get_input_embeddings().weight
    assert bool((rows[known] == 0).all())
    assert bool((rows[ids[0]] != 0).any())


def test_load_model_adds_them(base: Path) -> None:
    model, tokenizer = load_model(str(base), plain=True, predictors=3)
    assert PlainTemplate(tokenizer).end_of_turn == END_OF_TURN
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert model.generation_config.eos_token_id == [2, end]
    assert tokenizer.convert_tokens_to_ids(PERCEPTION) == end - 1
    assert tokenizer.convert_tokens_to_ids("<|predictor_1|>") == end + 1
    model, tokenizer = load_model(str(base))
    assert PERCEPTION not in tokenizer.get_vocab()
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("options", [{}, {"train_tokenizer": 290}])
def test_new_models_of_that_form_stop_at_its_end(options: dict[str, Any], base: Path) -> None:
    model, tokenizer = pretrain(base, plain=True, **options)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert model.generation_config.eos_token_id == [end, tokenizer.eos_token_id]
    assert model.config.vocab_size >= len(tokenizer) + SPARE_ROWS
    preset, tokenizer = load_model("preset:tiny", texts=TEXTS, plain=True)
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN) in preset.generation_config.eos_token_id


@pytest.mark.parametrize("rows", [tiny.VOCABULARY, 290])
def test_an_adapter_carries_them(rows: int, tmp_path: Path, plain_tokenizer: Any) -> None:
    """Spare rows that were drawn anew, and rows that were not there, are those of training when it is loaded again."""
    base = tiny.make_model("qwen3", vocab_size=rows)
    if rows > 290:
        with torch.no_grad():
            base.get_input_embeddings().weight[290:] = 0.0
    base.save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(str(tmp_path / "base"), plain=True, predictors=2)
    ids = adapter_ids(tokenizer, plain=True)
    assert ids == [290, 291, 292, 293]
    assert adapter_ids(tokenizer, plain=False) == [292, 293]
    wrapped = add_lora(model, LoraSettings(3), ids)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, same = load_for_inference(tmp_path / "adapter", device="cpu")
    inputs = torch.tensor([same("2+2?<|perception|>4<|predictor_1|><|predictor_2|><|eot_id|>")["input_ids"]])
    with torch.no_grad():
        tiny.assert_same(again(inputs).logits, wrapped.eval()(inputs).logits)


# -- both stages through the command line ------------------------------------------------------------------------------

FAST = "--max_steps 3 --batch_size 2 --grad_accum 1 --save_strategy no --use_cpu true --report_to none"


def run(line: str) -> int:
    return main(line.split())


def pretraining_file(folder: Path) -> Path:
    pairs = [("The film is fun", "A fun film"), ("A fun film", "What fun it is"), ("It is dull", "How dull it is")]
    chats = [
        [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
        for pair in pairs
    ]
    write_jsonl(folder / "paraphrases.jsonl", [{"messages": chat} for chat in chats * 3])
    return folder / "paraphrases.jsonl"


def labelled_file(folder: Path) -> Path:
    system = {"role": "system", "content": "Determine whether the comment is positive or negative"}
    said = [("The film is fun", "Good"), ("It is dull", "Bad"), ("What fun it is", "Good")]
    chats = [
        [system, {"role": "user", "content": text}, {"role": "assistant", "content": label}] for text, label in said
    ]
    write_jsonl(folder / "labelled.jsonl", [{"messages": chat} for chat in chats * 3])
    return folder / "labelled.jsonl"


@pytest.mark.parametrize("mode", ["--regular", "--predictors 2", "--layout branched"])
def test_two_stages(mode: str, tmp_path: Path, bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert not run(
        f"train --train_file {pretraining_file(tmp_path)} --model_name {bare} --pretrain --train_tokenizer 277 --plain "
        f"--trainall --output_dir {first} {mode} {FAST}"
    )
    facts_of_first = json.loads((first / "run.json").read_text(encoding="utf-8"))
    assert facts_of_first["jepa"]["labels"] == "all"
    assert facts_of_first["jepa"]["plain"]
    assert facts_of_first["template"]["form"] == "plain: user <|eot_id|>"
    labelled = labelled_file(tmp_path)
    assert not run(f"train --train_file {labelled} --model_name {first} --plain --regular --output_dir {second} {FAST}")
    facts = json.loads((second / "run.json").read_text(encoding="utf-8"))
    assert facts["template"]["form"] == "plain: user <|perception|> answer <|eot_id|>"
    one, other = (AutoTokenizer.from_pretrained(str(folder)) for folder in (first, second))
    assert one.get_vocab() == other.get_vocab()
    shown = [f"{text}{END_OF_TURN}" for text in ("The film is fun", "A fun film", "It is dull")]
    assert facts_of_first["tokens"]["main"] == 3 * sum(len(one(text)["input_ids"]) for text in shown)
    weights = [AutoModelForCausalLM.from_pretrained(str(folder)) for folder in (first, second)]
    end = one.convert_tokens_to_ids(END_OF_TURN)
    assert all(end in model.generation_config.eos_token_id for model in weights)
    # Stage two goes on from stage one: three steps do not lead far from where it stood.
    start, moved = (model.model.layers[0].mlp.up_proj.weight.detach() for model in weights)
    assert 0 < float((moved - start).norm()) < 0.1 * float(start.norm())
    capsys.readouterr()
    assert not run(
        f"evaluate --model_path {second} --test_file {labelled} --output_file {tmp_path}/said.jsonl --plain "
        "--startswith --max_new_tokens 5"
    )
    assert "task sentiment" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines[:2]] == ["The film is fun<|perception|>", "It is dull<|perception|>"]


def test_what_fits_not_together_is_said_in_one_line(
    tmp_path: Path, base: Path, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pretraining_file(tmp_path)
    wrong = {
        f"--model_name {base} --train_tokenizer 290": "--train_tokenizer needs random weights",
        f"--model_name {bare} --pretrain": "holds no tokenizer",
        f"--model_name {bare} --pretrain --train_tokenizer 12": "expected 259 or more",
        f"--model_name {base} --pretrain --lora": "--lora adapts a trained model",
        f"--model_name {base} --plain --train_all --step_jepa": "which has no steps; use labels 'assistant'",
        f"--model_name {base} --train_all --labels assistant": "leave one out",
    }
    for flags, message in wrong.items():
        assert run(f"train --train_file {data} --output_dir {tmp_path}/run {flags} {FAST}") == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert len(error.splitlines()) == 1
        assert not (tmp_path / "run").exists()


def test_inspection_and_verification(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = pretraining_file(tmp_path)
    for labels, form in (("all", "plain: user"), ("assistant", "plain: user <|perception|> answer")):
        flags = f"--train_file {data} --model_name {base} --plain --labels {labels}"
        assert not run(f"inspect {flags} --json")
        assert json.loads(capsys.readouterr().out)["template"]["form"] == f"{form} <|eot_id|>"
        assert not run(f"verify {flags}")
        assert "all checks passed" in capsys.readouterr().out
