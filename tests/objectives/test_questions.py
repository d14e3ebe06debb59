"""Questions to ``Jepa.answer`` that are records: with tools, variables of the template, results of tools."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa import Jepa, JepaConfig, read_records
from stepjepa.base.errors import UserError
from stepjepa.models.generation import Generator
from stepjepa.models.sampling import Answer
from tiny import make_model

TEMPLATE = Path(__file__).parents[2] / "examples" / "templates" / "chatml-tools-thoughts.jinja"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain in Bonn?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
]
ANSWER = {"role": "assistant", "content": "No."}


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that a generator is passed; it answers each with an empty text."""
    passed: list[list[int]] = []

    def answer(self: Generator, batch: Any, batch_number: int = 0) -> list[list[Answer]]:
        passed.extend(batch)
        return [[Answer("", True, 0)] for _ in batch]

    monkeypatch.setattr(Generator, "answer", answer)
    return passed


def made(tokenizer: Any, template: str | None = None) -> Jepa:
    own = copy.deepcopy(tokenizer)
    if template is not None:
        own.chat_template = template
    return Jepa(make_model("llama"), own, JepaConfig())


def test_a_record_is_asked_with_its_tools(tiny_tokenizer: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """Tools were an unknown argument or key, so that an agent could not be asked as it was trained."""
    jepa = made(tiny_tokenizer, TEMPLATE.read_text())
    (tmp_path / "agent.jsonl").write_text('{"question": "Rain in Bonn?", "answer": "No.", "tools": [{"name": "a"}]}\n')
    (from_file,) = read_records(tmp_path / "agent.jsonl")
    values = [
        {"from": "human", "value": "Rain in Bonn?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
    ]
    cases: list[tuple[Any, Any, Any]] = [
        ({"messages": ASKED[:1], "tools": TOOLS}, ASKED[:1], TOOLS),
        ({"messages": ASKED, "tools": TOOLS, "id": 3}, ASKED, TOOLS),
        ({"messages": [*ASKED, ANSWER], "tools": TOOLS}, ASKED, TOOLS),  # its answer is left out, as in evaluate
        ({"conversations": [*values, {"from": "observation", "value": "no"}], "tools": TOOLS}, ASKED, TOOLS),
        ({"question": "Rain in Bonn?", "tools": TOOLS}, ASKED[:1], TOOLS),
        (from_file, ASKED[:1], [{"type": "function", "function": {"name": "a"}}]),
        (ASKED, ASKED, None),
    ]
    jepa.answers([chat for chat, _, _ in cases], max_new_tokens=8)
    expected = [
        jepa.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        for _, messages, tools in cases
    ]
    assert len({tuple(ids) for ids in expected}) == 4
    assert prompts == expected


def test_a_record_has_variables_of_the_template(tiny_tokenizer: Any, prompts: list[list[int]]) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant{% if warm %} warm{% endif %}{% endif %}"
    jepa = made(tiny_tokenizer, template)
    jepa.answer({"messages": ASKED[:1], "chat_template_kwargs": {"warm": True}})
    assert jepa.tokenizer.decode(prompts[0]).endswith("<|im_start|>assistant warm")


def test_the_system_prompt_of_training_is_in_front_of_a_record(tiny_tokenizer: Any, prompts: list[list[int]]) -> None:
    jepa = made(tiny_tokenizer)
    jepa.system_prompt = "Add."
    own = {"role": "system", "content": "Count."}
    jepa.answers([{"messages": ASKED[:1]}, ASKED[:1], {"messages": [own, *ASKED[:1]]}])
    assert prompts[0] == prompts[1] and "Add." in jepa.tokenizer.decode(prompts[0])
    assert "Count." in (text := jepa.tokenizer.decode(prompts[2])) and "Add." not in text


def test_tools_that_the_template_does_not_write_are_named(
    tiny_tokenizer: Any, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    made(tiny_tokenizer).answers([{"messages": ASKED[:1], "tools": TOOLS}] * 2)
    assert capsys.readouterr().err.splitlines() == ["note: not used: tools; the template writes none"]


def test_what_is_no_question_is_refused(tiny_tokenizer: Any) -> None:
    jepa = made(tiny_tokenizer)
    with pytest.raises(ValueError, match="questions: expected a list of questions, got one record"):
        jepa.answers({"messages": ASKED})
    with pytest.raises(UserError, match="role"):
        jepa.answer({"messages": [{"role": "usr", "content": "Rain?"}]})
