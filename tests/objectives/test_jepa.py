"""``Jepa``: losses outside the trainer, embeddings and answers against plain passes, saving and reading back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stepjepa
from stepjepa import Alignment, InfoNCE, Jepa, JepaConfig, JepaTrainer, LMLoss, LoraSettings, Objective, add_lora
from stepjepa.base.errors import UserError
from stepjepa.batch.mask import Kernel
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.cli.main import main
from stepjepa.models.architecture import find_heads
from stepjepa.models.token_rows import adapter_ids
from tiny import (
    VOCABULARY,
    arguments,
    assert_same,
    assert_same_gradients,
    gradients,
    make_model,
    make_record,
    records,
    write_material,
)

CONFIG = {"mode": "step-jepa", "pairs": "all", "lbd": 0.7}


def prepared(tokenizer: Any, **changes: Any) -> tuple[Any, Jepa]:
    model = make_model("llama")
    return model, Jepa(model, tokenizer, JepaConfig(**CONFIG | changes))


def test_accumulated_batches_give_the_gradient_of_one(tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer)
    whole = gradients(model, jepa(model, jepa.collate(records())).loss)
    parts = [jepa.collate(records()[:1]), jepa.collate(records()[1:])]
    counts = jepa.counts(parts)
    losses = [jepa(model, part, counts).loss for part in parts]
    assert_same_gradients(gradients(model, torch.stack(losses).sum()), whole)


@pytest.mark.parametrize("name", ["sigreg", "stp"])
def test_a_call_is_a_step_counted_from_0_unless_it_names_one(name: str, tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer, **{name: 0.5})
    batch = jepa.collate(records())

    def drawn(**named: int) -> float:
        # What it draws depends on the step.
        return jepa(model, batch, **named).parts[f"{name}_loss"].item()

    result = [drawn() for _ in range(3)]
    assert [drawn(step=step) for step in range(3)] == result
    assert len(set(result)) == 3


def test_the_seed_and_the_progress_are_those_that_it_was_told(tiny_tokenizer: Any) -> None:
    model = make_model("llama")
    settings = CONFIG | {"lbd_schedule": "cosine", "stp": 0.5}
    first, other = (Jepa(model, tiny_tokenizer, JepaConfig(**settings), seed=seed) for seed in (5, 7))
    batch = first.collate(records())
    begin, half, end = (first(model, batch, step=0, progress=progress) for progress in (0.0, 0.5, 1.0))
    others = begin.parts["lm_loss"].item() + 0.5 * begin.parts["stp_loss"].item()
    weights = [(each.loss.item() - others) / each.parts["jepa_loss"].item() for each in (begin, half, end)]
    assert weights == pytest.approx([0.7, 0.35, 0.0], abs=1e-4)
    assert other(model, batch, step=0).parts["stp_loss"].item() != begin.parts["stp_loss"].item()


def test_rows_are_packed_for_the_accelerator_that_the_model_will_move_to(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared(tiny_tokenizer)[1].collator.costs is not None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert prepared(tiny_tokenizer)[1].collator.costs is None


@pytest.mark.slow
# torch.compile looks at gradients of tensors that have none, and its own code uses what is deprecated.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kernel", ["mask", "varlen"])
def test_a_compiled_model_gives_the_same_loss_and_gradients(kernel: Kernel, tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer)
    jepa.__dict__["collator"] = replace(jepa.collator, kernel=kernel, costs=None)
    batch = jepa.collate(records()[:4])
    loss = jepa.loss(model, batch, step=0).loss
    expected = gradients(model, loss)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    same = jepa.loss(compiled, batch, step=0).loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_same_gradients(gradients(model, same), expected)
    assert_same(same.detach(), loss.detach())
    torch._dynamo.reset()


def test_without_views_a_batch_trains_the_lm_loss_alone(tiny_tokenizer: Any) -> None:
    model, jepa = prepared(tiny_tokenizer)
    batch = jepa.collate([{"messages": list(record.messages)} for record in records()], views=False)
    out = jepa(model, batch)
    assert (out.monitors, out.parts["jepa_loss"].item()) == ({}, 0.0)
    full = jepa(model, jepa.collate(records()))
    assert out.parts["lm_loss"].item() == pytest.approx(full.parts["lm_loss"].item(), rel=1e-5)
    assert full.monitors["matched_similarity"] == pytest.approx(1 - full.parts["jepa_loss"].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"jepa_ratio": 0.5}, "jepa_ratio: use 1.0, .*views=False"),
        ({"jepa_epochs": 2.0}, "jepa_epochs: use None, .*views=False"),
        ({"target_grad": "ema"}, "JepaTrainer"),
    ],
)
def test_a_loop_is_refused_what_only_the_trainer_does(
    tiny_tokenizer: Any, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    model, jepa = prepared(tiny_tokenizer, **changes)
    with pytest.raises(ValueError, match=told):
        jepa.loss(model, jepa.collate(records()))
    JepaTrainer(make_model("llama"), arguments(tmp_path), jepa.config, processing_class=tiny_tokenizer)


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"mode": "regular", "lbd": 0.3}, "lbd"),
        ({"lbd": 0.0, "predictor_head": "mlp"}, "predictor_head"),
        ({"infonce_temperature": 0.1}, "infonce_temperature"),
    ],
)
def test_a_loop_is_refused_settings_that_do_nothing(tiny_tokenizer: Any, changes: dict[str, Any], idle: str) -> None:
    model = make_model("llama")
    jepa = Jepa(model, tiny_tokenizer, JepaConfig(**changes))
    with pytest.raises(UserError, match=f"`{idle}` does nothing"):
        jepa.loss(model, jepa.collate(records()))
    # Other terms may read what the head and the averages change.
    own = Jepa(model, tiny_tokenizer, JepaConfig(lbd=0.0, predictor_head="mlp"), objective=Objective([LMLoss()]))
    own.loss(model, own.collate(records()))


def test_without_heads_the_loss_names_the_missing_one(tiny_tokenizer: Any) -> None:
    model, config = make_model("llama"), JepaConfig(predictor_head="mlp")
    jepa = Jepa(model, tiny_tokenizer, config, heads=False)
    with pytest.raises(ValueError, match=r"expected a model with predictor_head, got one without; .* heads=True"):
        jepa.loss(model, jepa.collate(records()))
    Jepa(model, tiny_tokenizer, config)
    assert find_heads(model) is not None
    assert jepa.loss(model, jepa.collate(records())).loss.isfinite()


def test_without_rows_the_model_must_have_its_tokens(plain_tokenizer: Any) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"expected a tokenizer with <\|predictor_1\|>"):
        Jepa(model, plain_tokenizer, JepaConfig(), rows=False)
    assert "<|predictor_1|>" not in plain_tokenizer.get_vocab()


def test_it_is_public_under_both_names_and_prints_on_one_line(tiny_tokenizer: Any) -> None:
    assert stepjepa.JepaLoss is stepjepa.Jepa
    model, jepa = prepared(tiny_tokenizer)
    assert repr(jepa) == "Jepa(LlamaForCausalLM, step-jepa, layout branched, 2 predictor tokens, encoding tree)"
    assert repr(Jepa(model, tiny_tokenizer, JepaConfig(mode="regular"))) == (
        "Jepa(LlamaForCausalLM, regular, encoding tree)"
    )


# -- embeddings --------------------------------------------------------------------------------------------------------


def plain_state(model: Any, tokenizer: Any, text: str, layer: int = -1) -> torch.Tensor:
    """``[D]``: the hidden state of a text's last token, by transformers alone."""
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        state: torch.Tensor = model(input_ids=ids, output_hidden_states=True).hidden_states[layer][0, -1]
    return state


def alone(tokenizer: Any, role: str, content: str) -> str:
    """A message alone in the template, up to the end of its content."""
    text: str = tokenizer.apply_chat_template([{"role": role, "content": content}], tokenize=False)
    return text[: text.index(content) + len(content)]


def first_step(tokenizer: Any, record: Any, target: bool) -> str:
    """The text that the first step of a record is read in: behind the chat before it, or alone as a target."""
    steps = record.answer.split("\n\n")
    if target:
        return alone(tokenizer, "assistant", record.answer)[: -len(record.answer)] + steps[1]
    text: str = tokenizer.apply_chat_template(list(record.messages), tokenize=False)
    return text[: text.index(steps[0]) + len(steps[0])]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"mode": "llm-jepa", "predictors": 2}),
        ("gpt2", {"mode": "llm-jepa", "predictors": 0, "jepa_layer": 1}),
        ("qwen3", {"mode": "regular"}),
        ("llama", {"mode": "llm-jepa", "predictors": 1, "predictor_head": "linear", "over_length": "skip"}),
    ],
)
def test_embed_is_one_plain_pass_for_each_record(
    architecture: str, settings: dict[str, Any], side: str, tiny_tokenizer: Any
) -> None:
    config = JepaConfig(**settings)
    jepa = Jepa(make_model(architecture), tiny_tokenizer, config)
    many = [*records(), make_record("", "An odd one: {x}", "Yes, it is.", line=5)]
    predictors = "".join(f"<|predictor_{number + 1}|>" for number in range(config.used_predictors))
    plain = make_model(architecture)
    slow = []
    for record in many:
        question, answer = record.messages[-2]["content"], record.answer
        text = alone(tiny_tokenizer, "user", question + predictors)
        text = alone(tiny_tokenizer, "assistant", answer) if side == "target" else text
        slow.append(plain_state(plain, tiny_tokenizer, text, config.jepa_layer).numpy())
    layer = None if config.uses_views else -1  # no objective says where a plainly trained model is read
    options: dict[str, Any] = {"batch_size": 3, "raw": True, "layer": layer}
    embeddings = jepa.embed([{"messages": list(record.messages)} for record in many], side, **options)  # type: ignore[arg-type]
    assert embeddings.dtype == np.float32
    assert embeddings.shape == (4, plain.config.hidden_size)
    np.testing.assert_allclose(embeddings, slow, atol=1e-4 * np.abs(slow).max())


def test_every_step_is_embedded_as_in_its_pairs(tiny_tokenizer: Any) -> None:
    _, jepa = prepared(tiny_tokenizer)
    some = records()[:2]
    pairs = jepa.embed_pairs(some)
    assert len(pairs.record) > len(some)
    for side in ("source", "target"):
        # Step n predicts step n + 1; the last one predicts none, and is a row all the same.
        rows = jepa.embed_steps(some, side, raw=True)  # type: ignore[arg-type]
        places = [*zip(rows.index.tolist(), rows.step.tolist(), strict=True)]
        steps = pairs.pair + (side == "target")
        chosen = [places.index(place) for place in zip(pairs.record.tolist(), steps.tolist(), strict=True)]
        expected = getattr(pairs, side)
        np.testing.assert_allclose(rows.vectors[chosen], expected, atol=1e-5 * np.abs(expected).max())
        assert len(places) == len(pairs.record) + len(some)
        unit = jepa.embed(some, side)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(unit * np.linalg.norm(rows.vectors, axis=1)[:, None], rows.vectors, atol=1e-5)
    assert jepa.embed([]).shape == (0, 33)


def test_targets_are_the_same_by_their_own_tokens_whatever_chat_they_stand_in(tiny_tokenizer: Any) -> None:
    answers = "One.\n\nTwo.\n\nThree.", "Four.\n\nTwo.\n\nFive."
    some = [make_record("Add.", question, answer) for question, answer in zip(("1?", "And 2?"), answers, strict=True)]
    for reverse, expected in ((False, [0, 1, 0, 3]), (True, [0, 1, 2, 1])):
        pairs = prepared(tiny_tokenizer, reverse_pred=reverse)[1].embed_pairs(some)
        assert (pairs.record.tolist(), pairs.pair.tolist()) == ([0, 0, 1, 1], [1, 2, 1, 2])
        assert pairs.same_target.tolist() == expected


def test_embedding_leaves_a_model_in_training_as_it_is(tiny_tokenizer: Any) -> None:
    model = make_model("gpt2", resid_pdrop=0.5)
    jepa = Jepa(model, tiny_tokenizer, JepaConfig())
    expected = jepa.embed(records())
    model.train()
    model.get_input_embeddings().eval()
    np.testing.assert_array_equal(jepa.embed(records()), expected)
    assert jepa.answer("Add 1 and 2", max_new_tokens=3) == jepa.answer("Add 1 and 2", max_new_tokens=3)
    assert model.training
    assert not model.get_input_embeddings().training
    # Nothing that was computed without gradients is kept for a step with them.
    jepa.loss(model, jepa.collate(records())).loss.backward()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"max_length": 11, "over_length": "skip"},
            "memory.jsonl:1: the record has .*more than max_length 11",
        ),
    ],
)
def test_a_record_without_the_view_is_named(settings: dict[str, Any], told: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=told):
        Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(**settings)).embed(records())


def test_a_record_with_an_empty_view_is_named(tiny_tokenizer: Any) -> None:
    some = [*records(), make_record("", "Why?", "So.", line=7, views=[["  ", "So."]])]
    with pytest.raises(UserError, match=r"memory.jsonl:7: the record has no pair .* no source view to embed"):
        Jepa(make_model("llama"), tiny_tokenizer, JepaConfig()).embed(some)


def test_a_side_that_does_not_exist_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="side: expected 'source' or 'target', got 'both'"):
        prepared(tiny_tokenizer)[1].embed(records(), "both")  # type: ignore[arg-type]


# -- answers -----------------------------------------------------------------------------------------------------------


def plain_answer(folder: Path, messages: list[dict[str, str]], count: int) -> str:
    """Greedy generation by transformers alone, from a saved folder."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    ends = model.generation_config.eos_token_id
    new = output[0, ids.shape[1] :].tolist()
    stops = {*ends} if isinstance(ends, list) else {ends}
    new = new[: next((place for place, each in enumerate(new) if each in stops), None)]
    text: str = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_answers_are_those_of_plain_generate_on_the_served_prompt(
    architecture: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    jepa = Jepa(make_model(architecture), tiny_tokenizer, JepaConfig())
    jepa.save(tmp_path)
    chats: list[Any] = ["Name a colour", "What is 3+4+5?"]
    chats += [
        [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "So"}, {"role": "user", "content": "?"}]
    ]
    lists = [[{"role": "user", "content": chat}] if isinstance(chat, str) else chat for chat in chats]
    expected = [plain_answer(tmp_path, messages, 17) for messages in lists]
    assert len({*expected, ""}) == 4
    assert jepa.answers(chats, max_new_tokens=17, batch_size=2) == expected
    assert [jepa.answer(chat, max_new_tokens=17) for chat in chats] == expected


def test_a_question_gets_the_system_prompt_of_training_unless_it_has_one(tiny_tokenizer: Any, tmp_path: Path) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    jepa.system_prompt = "Add."
    jepa.save(tmp_path)
    again, user = Jepa.from_pretrained(tmp_path, device="cpu"), {"role": "user", "content": "And 1+1 then?"}
    own = {"role": "system", "content": "Count backwards."}
    expected = plain_answer(tmp_path, [{"role": "system", "content": "Add."}, user], 19)
    assert again.answer("And 1+1 then?", max_new_tokens=19) == again.answer([user], max_new_tokens=19) == expected
    other = plain_answer(tmp_path, [own, user], 19)
    assert again.answer([own, user], max_new_tokens=19) == other != expected


def test_messages_are_read_as_those_of_records(tiny_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    """Parts of text were written as Python's form of a list; a developer got the system prompt beside his own."""
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    jepa.system_prompt = "Add."
    jepa.save(tmp_path)
    expected = plain_answer(
        tmp_path, [{"role": "system", "content": "Count."}, {"role": "user", "content": "And 1+1?"}], 19
    )
    assert expected != jepa.answer("And 1+1?", max_new_tokens=19)
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "1+1?"}]
    for role in ("system", "developer"):
        for user in ({"role": "user", "content": parts}, {"from": "human", "value": "And 1+1?", "id": 3}):
            chat = [{"role": role, "content": "Count."}, user]
            assert jepa.answer(chat, max_new_tokens=19) == expected
    assert capsys.readouterr().err.splitlines()[-1] == "note: not used: question[].id"
    with pytest.raises(UserError, match=r"question\[0\] \(user\) has no content"):
        jepa.answer([{"role": "user"}])


def test_an_answer_longer_than_the_model_is_refused(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    with pytest.raises(UserError, match="the model 509 positions; lower max_new_tokens"):
        jepa.answer("Name a colour", max_new_tokens=500)


def test_what_is_no_list_of_questions_is_refused(tiny_tokenizer: Any) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig())
    # Its letters would be answered one by one.
    with pytest.raises(ValueError, match="questions: expected a list of questions, got one text"):
        jepa.answers("Name a colour")
    for system_prompt in ("Add.", None):
        jepa.system_prompt = system_prompt
        with pytest.raises(ValueError, match="question: expected a text or messages, got an empty list"):
            jepa.answer([])
    with pytest.raises(
        ValueError, match="question: expected a text or messages, got a list of questions; pass it to a"
    ):
        jepa.answer(["Name a colour"])
    assert jepa.answers([]) == []


# -- saving and reading back -------------------------------------------------------------------------------------------


@pytest.fixture
def base(tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """A folder with ``base``, a model whose generation settings know no end of turn, and ``data.jsonl``."""
    write_material(tmp_path, tiny_tokenizer)
    return tmp_path


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_saved_folder_embeds_and_answers_as_before(base: Path, adapter: bool) -> None:
    model, tokenizer = stepjepa.load_model(str(base / "base"), predictors=2)
    if adapter:
        model = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=False))
    settings = {"mode": "llm-jepa", "predictors": 2, "layout": "branched", "predictor_head": "linear", "max_length": 97}
    jepa = Jepa(model, tokenizer, JepaConfig(**settings))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):
        jepa.loss(model, jepa.collate(records())).loss.backward()
        optimizer.step()
    before, answer = jepa.embed(records()), jepa.answer("Name a colour", max_new_tokens=13)
    jepa.save(base / "run")
    again = Jepa.from_pretrained(base / "run", device="cpu")
    assert again.config == jepa.config
    np.testing.assert_allclose(again.embed(records()), before, atol=1e-4 * np.abs(before).max())
    assert again.answer("Name a colour", max_new_tokens=13) == answer
    with pytest.raises(ValueError, match="expected a model with predictor_head"):
        again.loss(again.model, again.collate(records()))
    # Saving again changes nothing but the files of the model.
    jepa.save(base / "run")
    with pytest.raises(UserError, match="holds a run with other settings; name another folder"):
        Jepa(model, tokenizer, JepaConfig()).save(base / "run")


def test_an_objective_of_ones_own_is_not_replaced_by_another(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model, objective = make_model("llama"), Objective([LMLoss(), Alignment(0.3, InfoNCE())])
    jepa = Jepa(model, tiny_tokenizer, JepaConfig(), objective=objective)
    assert jepa.loss(model, jepa.collate(records())).loss.isfinite()
    jepa.save(tmp_path)
    again = Jepa.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="an objective that was passed in Python"):
        again.loss(again.model, again.collate(records()))


def test_a_model_without_a_record_is_read_at_the_end_of_the_message(base: Path, tiny_tokenizer: Any) -> None:
    jepa = Jepa.from_pretrained(base / "base", device="cpu")
    slow = [plain_state(make_model("llama"), tiny_tokenizer, alone(tiny_tokenizer, "user", "Name a colour"))]
    with pytest.raises(UserError, match=r"no JEPA objective, .*; pass `pooling mean` "):
        jepa.embed(records()[2:])
    embeddings = jepa.embed(records()[2:], layer=-1, raw=True)
    np.testing.assert_allclose(embeddings, torch.stack(slow).numpy(), atol=1e-4 * np.abs(embeddings).max())


# -- generation settings, by every way of saving -----------------------------------------------------------------------


def saved_settings(folder: Path) -> tuple[list[int], list[int]]:
    """Suppressed ids and stop tokens that plain transformers reads from a folder."""
    settings = stepjepa.load_for_inference(folder, device="cpu")[0].generation_config
    ends = settings.eos_token_id
    return settings.suppress_tokens, ends if isinstance(ends, list) else [ends]


def by_command(base: Path, *flags: str) -> Path:
    shared = ["--train_file", str(base / "data.jsonl"), "--model_name", str(base / "base"), "--max_steps", "1"]
    run = base / "run"
    assert main(["train", *shared, "--output_dir", str(run), "--use_cpu", "true", *flags]) == 0
    return run


def test_a_model_with_an_adapter_and_without_its_wrapper_is_refused(base: Path) -> None:
    """As ``get_base_model()`` gives it, or transformers' ``from_pretrained`` of an adapter."""
    model, tokenizer = stepjepa.load_model(str(base / "base"), predictors=2)
    inner = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=False)).get_base_model()
    message = r"expected a model or its PEFT wrapper, got a \w+ with an adapter and no wrapper; pass the PeftModel"
    with pytest.raises(ValueError, match=message):
        Jepa(inner, tokenizer, JepaConfig())
    with pytest.raises(ValueError, match=message):
        JepaTrainer(inner, arguments(base / "run"), train_dataset=records(), processing_class=tokenizer)


def by_trainer(base: Path, adapter: bool = False) -> Path:
    model, tokenizer = stepjepa.load_model(str(base / "base"), predictors=2)
    if adapter:
        model = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=False))
    run = base / "run"
    trainer = JepaTrainer(
        model, arguments(run, max_steps=1), JepaConfig(), train_dataset=records(), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
    return run


def by_jepa(base: Path, adapter: bool = False) -> Path:
    model, tokenizer = stepjepa.load_model(str(base / "base"), predictors=2)
    if adapter:
        model = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=False))
    Jepa(model, tokenizer, JepaConfig()).save(base / "run")
    return base / "run"


def by_export(base: Path) -> Path:
    assert main(["export", "--model_path", str(by_command(base, "--lora")), "--output_dir", str(base / "whole")]) == 0
    return base / "whole"


WAYS = {
    "train": by_command,
    "train --lora": lambda base: by_command(base, "--lora"),
    "JepaTrainer": by_trainer,
    "JepaTrainer with an adapter": lambda base: by_trainer(base, adapter=True),
    "Jepa.save": by_jepa,
    "Jepa.save with an adapter": lambda base: by_jepa(base, adapter=True),
    "export of an adapter": by_export,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_saving_lets_generate_produce_what_is_no_text(way: str, base: Path) -> None:
    folder = WAYS[way](base)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    suppressed, ends = saved_settings(folder)
    assert len(tokenizer) < VOCABULARY
    assert suppressed == sorted({*all_predictor_ids(tokenizer), *range(len(tokenizer), VOCABULARY)})
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert not {*ends} & {*suppressed}


def test_ids_that_became_tokens_are_generated_again(tiny_tokenizer: Any) -> None:
    model = make_model("llama")
    Jepa(model, tiny_tokenizer, JepaConfig(mode="regular"))
    first = len(tiny_tokenizer)
    assert model.generation_config.suppress_tokens[-1] == VOCABULARY - 1
    assert first in model.generation_config.suppress_tokens
    tiny_tokenizer.add_tokens(["<call>"])
    # Its own tokens are two more ends of a turn and its beginning.
    Jepa(model, tiny_tokenizer, JepaConfig(plain=True))
    suppressed = model.generation_config.suppress_tokens
    assert suppressed == [*all_predictor_ids(tiny_tokenizer), *range(len(tiny_tokenizer), VOCABULARY)]
    assert first not in suppressed
    assert tiny_tokenizer.convert_tokens_to_ids("<|eot_id|>") in model.generation_config.eos_token_id


def test_arguments_of_another_kind_are_named(tiny_tokenizer: Any) -> None:
    model = make_model("llama")
    for arguments_, told in (
        (("preset:tiny", tiny_tokenizer), r"model: got str, expected a model, as load_model\(NAME\) returns one"),
        ((tiny_tokenizer, model), "model: got TokenizersBackend, expected a model"),
        ((model, "preset:tiny"), "tokenizer: got str, expected the tokenizer of the model"),
        ((model, tiny_tokenizer, {"lbd": 0.1}), r"config: got dict, expected JepaConfig\(\.\.\.\)"),
    ):
        with pytest.raises(TypeError, match=told):
            Jepa(*arguments_)  # type: ignore[arg-type]
