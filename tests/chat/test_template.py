"""Chat templates: where the contents stand in the text, and what is learnt from a template."""

from __future__ import annotations

import copy
import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import chat_templates
from stepjepa.base.errors import UserError
from stepjepa.chat.source import PINNED_DATE
from stepjepa.chat.template import ChatTemplate

REAL = ["minimind", "qwen2.5", "olmo2"]
CHAT = [
    ("system", "Be brief."),
    ("user", "Who?\n\nYou."),
    ("assistant", "I.\n\nMe."),
    ("user", "Yes"),
    ("assistant", "No"),
]


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def with_template(tokenizer: Any, template: str, tokens: list[str] | None = None, **fields: Any) -> ChatTemplate:
    if tokens:
        tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    for name, value in fields.items():
        setattr(tokenizer, name, value)
    return ChatTemplate(tokenizer)


@pytest.fixture
def gemma_like(tiny_tokenizer: Any) -> ChatTemplate:
    return with_template(tiny_tokenizer, chat_templates.GEMMA_LIKE, chat_templates.GEMMA_TOKENS)


def check(template: ChatTemplate, chat: list[dict[str, str]]) -> None:
    rendered = template.render(chat)
    assert [rendered.text[a:b] for a, b in rendered.spans] == [m["content"].strip() for m in chat]
    assert list(rendered.spans) == sorted(rendered.spans)
    for turn in template.turns(chat):
        assert turn.text[: turn.answer] == template.prompt(chat[: turn.message])
        assert [turn.text[a:b].strip() for a, b in turn.spans] == [
            m["content"].strip() for m in chat[: turn.message + 1]
        ]
        assert turn.text[turn.spans[-1][1] :] == turn.stop == template.stop_tokens[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REAL)
def test_spans_of_real_templates(name: str, real_tokenizer: Callable[[str], Any]) -> None:
    template = ChatTemplate(real_tokenizer(name))
    for chat in (CHAT[:3], CHAT, CHAT[1:]):
        check(template, messages(*chat))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REAL)
def test_contents_that_look_like_the_template(name: str, real_tokenizer: Callable[[str], Any]) -> None:
    """Searching for the text would find the role names, the default system prompt or the other message first."""
    template = ChatTemplate(real_tokenizer(name))
    for user, assistant in [("user", "assistant"), ("assistant", "a"), ("helpful", "You"), ("A", "A"), ("s", "end")]:
        chat = messages(("user", user), ("assistant", assistant))
        rendered = template.render(chat)
        slow = template.renderer.render(messages(("user", "\ue000"), ("assistant", "\ue001")))
        start = slow.index("\ue000")
        second = slow.index("\ue001") - 1 + len(user)
        assert rendered.spans == ((start, start + len(user)), (second, second + len(assistant)))


# -- no system role, no lone assistant turn ----------------------------------------------------------------------------


def test_system_text_goes_before_the_first_user_text(gemma_like: ChatTemplate) -> None:
    rendered = gemma_like.render(messages(*CHAT))
    assert rendered.text == (
        "<start_of_turn>user\nBe brief.\n\nWho?\n\nYou.<end_of_turn>\n<start_of_turn>model\nI.\n\nMe.<end_of_turn>\n"
        "<start_of_turn>user\nYes<end_of_turn>\n<start_of_turn>model\nNo<end_of_turn>\n"
    )
    check(gemma_like, messages(*CHAT))
    check(gemma_like, messages(("system", " S "), ("user", " S\n"), ("assistant", "\nS ")))
    rendered = gemma_like.render(messages(("system", " "), *CHAT[1:]))
    assert rendered.text.startswith("<start_of_turn>user\nWho?")
    assert rendered.spans[0] == (0, 0)
    assert rendered.spans[1:] == gemma_like.render(messages(*CHAT[1:])).spans


def test_lone_assistant_becomes_a_user_turn(gemma_like: ChatTemplate) -> None:
    assert gemma_like.render_alone("assistant", "Hi") == gemma_like.render_alone("user", "Hi")
    assert gemma_like.render_alone("assistant", "Hi").text == "<start_of_turn>user\nHi<end_of_turn>\n"


@pytest.mark.parametrize("template", [chat_templates.LLAMA_LIKE, "{{ date_string }}" + chat_templates.HALF_TRIMMING])
def test_no_text_depends_on_today(template: str, tiny_tokenizer: Any) -> None:
    made = with_template(tiny_tokenizer, template, chat_templates.LLAMA_TOKENS)
    text = made.render(messages(*CHAT)).text
    assert "26 Jul 2024" in text
    assert datetime.date.today().strftime("%d %b %Y") not in text


# -- other ways to write a chat ----------------------------------------------------------------------------------------


def test_eos_is_appended_where_nothing_ends_a_turn(tiny_tokenizer: Any) -> None:
    template = with_template(tiny_tokenizer, chat_templates.OPEN_ENDED)
    assert template.ends.appended
    assert template.stop_tokens == [tiny_tokenizer.eos_token] == ["<|im_end|>"]
    (turn,) = template.turns(messages(("user", "q"), ("assistant", "a")))
    assert turn.text == "user: q\nassistant: a<|im_end|>"
    assert turn.text[: turn.answer] == "user: q\nassistant:"


@pytest.mark.parametrize(
    ("user", "assistant"), [("q ", "\n\na"), ("\nq", "a "), (" q ", "\na\n"), ("user", "\n\nend\n"), ("q", "a")]
)
def test_trimming_may_differ_by_role(user: str, assistant: str, tiny_tokenizer: Any) -> None:
    template = with_template(tiny_tokenizer, chat_templates.HALF_TRIMMING)
    rendered = template.render(messages(("user", user), ("assistant", assistant)))
    assert [rendered.text[a:b] for a, b in rendered.spans] == [user, assistant.lstrip("\n")]


def test_think_tags_are_refused_where_the_template_moves_them(real_tokenizer: Callable[[str], Any]) -> None:
    template = ChatTemplate(real_tokenizer("minimind"))
    with pytest.raises(UserError, match=r"rewrites a message, .*think tags"):
        template.render(messages(("user", "q"), ("assistant", "before <think>\nhm\n</think>\n\nafter")))


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REFUSED: dict[str | None, str] = {
    None: "no chat template; ",
    "{{ messages[0]['content'] }}": "does not render an assistant message; use a `chat_template` that",
    "{{ messages[-1]['content'] }}": "does not render a user message; ",
    "{{ bos_token }}": "does not render a user and an assistant message; ",
    LOOP.replace("in messages", "in messages | reverse"): "writes an answer in front of its question; use",
    # It can't be read.
    "\n\n{% for %}": "can't be read: line 3: ",
    "{{ x | no_such_filter }}": "No filter named 'no_such_filter'",
    # It raises.
    "a\n{{ 1/0 }}": "(division by zero)",
    "{{ raise_exception('no') }}": "(no)",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth",
    # Jinja's sandbox.
    "{{ range(10**9) | list }}": "Range too big",
    "{% include 'other' %}": "no loader",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__'",
    "{{ messages.append('a') }}": "access to attribute 'append'",
}


def _of_all(content: str) -> str:
    """A template that writes the expression ``content`` of every message ``m``."""
    return LOOP.replace("m.content", content) + ASK


SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
)
CHANGED = {
    "upper case": (
        _of_all("m.content | upper"),
        "rewrites 'content' (it writes 'TWO. THREE.' for 'Two. Three.'), so that it can't be trained",
    ),
    "upper case of answers in a generation block": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | upper + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}{% endfor %}" + ASK,
        "rewrites 'content' (it writes 'TWO. THREE.' for 'Two. Three.')",
    ),
    "a character is appended": (
        _of_all("m.content | replace('Three.', 'Three.!')"),
        "rewrites 'content' (it writes 'Two. Three.!' for 'Two. Three.')",
    ),
    "cut": (_of_all("m.content[:9]"), "leaves out, cuts or rewrites 'content', so that it"),
    "twice": (
        _of_all("(m.content + m.content if m.role == 'assistant' else m.content)"),
        "writes 'content' more than once, so that a served answer would repeat it; use a `chat_template` that",
    ),
    "system last": (SYSTEM_LAST + ASK, "writes the system message behind the answer, so that no prompt ends there"),
    "system behind the prompt": (
        SYSTEM_LAST.replace("{% endfor %}", "{% endfor %}" + ASK, 1),
        "writes the system message behind the answer, so that no prompt ends there",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_template_that_changes_messages_is_refused_for_its_own_reason(name: str, tiny_tokenizer: Any) -> None:
    source, fault = CHANGED[name]
    template = with_template(tiny_tokenizer, source)
    with pytest.raises(UserError, match=re.escape(f"the chat template {fault}")):
        template.turns(messages(("system", "Be kind."), ("user", "One?"), ("assistant", "Two. Three.")))


def test_the_error_shows_the_end_of_a_long_content_that_is_changed_there(tiny_tokenizer: Any) -> None:
    template = with_template(tiny_tokenizer, _of_all("m.content | replace(' END', '')"))
    answer = f"{'Two. Three. ' * 12}Four END"
    with pytest.raises(UserError, match=r"\(it writes '[^']+ Four' for '[^']+ Four END'\)"):
        template.turns(messages(("user", "One?"), ("assistant", answer)))


@pytest.mark.parametrize("change", ["m.content | upper", "m.content + m.content"])
def test_what_a_template_makes_of_questions_is_trained_as_it_is_served(change: str, tiny_tokenizer: Any) -> None:
    template = with_template(tiny_tokenizer, _of_all(f"({change} if m.role == 'user' else m.content)"))
    asked = messages(("user", "One?"), ("assistant", "Two."))
    (turn,) = template.turns(asked)
    assert turn.text[: turn.answer] == template.prompt(asked[:1])
    assert turn.text[turn.answer :] == "Two.<|im_end|>"


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
@pytest.mark.parametrize("unknown", [False, True])
def test_a_special_token_that_the_vocabulary_lacks_is_refused(name: str, unknown: bool, tiny_tokenizer: Any) -> None:
    """It raised a TypeError; with a token for unknown characters, that one became the stop token."""
    made = copy.deepcopy(tiny_tokenizer)
    if unknown:
        made.add_special_tokens({"unk_token": "<unk>"})
    setattr(made, name, "<own>")
    fault = f"the tokenizer's {name} '<own>' is not in its vocabulary; add it with tokenizer.add_special_tokens("
    with pytest.raises(UserError, match=re.escape(f"{fault}{{'{name}': '<own>'}})")):
        with_template(made, chat_templates.OPEN_ENDED)
    made.add_special_tokens({name: "<own>"})
    assert with_template(made, chat_templates.OPEN_ENDED).stop_tokens == [made.eos_token]


@pytest.mark.parametrize("source", REFUSED)
def test_what_is_wrong_with_a_template_is_one_line(source: str | None, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = source
    with pytest.raises(UserError) as result:
        ChatTemplate(tiny_tokenizer)
    assert REFUSED[source] in str(result.value)


def test_no_end_of_turn_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="set eos_token"):
        with_template(tiny_tokenizer, chat_templates.OPEN_ENDED, eos_token=None)


def test_a_template_may_refuse_some_records(tiny_tokenizer: Any) -> None:
    template = with_template(tiny_tokenizer, "{% if messages[0].content == 'cat' %}{{ 1/0 }}{% endif %}" + LOOP)
    with pytest.raises(UserError, match=r"refuses these messages \(division by zero\)"):
        template.render(messages(("user", "cat"), ("assistant", "dog")))


# -- what is told of a template ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", chat_templates.FORMS)
def test_contents_are_found_in_every_form(family: str, tiny_tokenizer: Any) -> None:
    tokenizer = chat_templates.in_form(tiny_tokenizer, chat_templates.FORMS[family])
    template = ChatTemplate(tokenizer)
    check(template, messages(*CHAT))
    text = template.render(messages(*CHAT)).text
    begins = text.count(tokenizer.bos_token) if tokenizer.bos_token else 0
    assert begins == ("bos_token" in tokenizer.chat_template or "<|begin_of_text|>" in tokenizer.chat_template)


def test_several_templates_without_a_default_are_refused(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = {"tool_use": LOOP, "rag": LOOP}
    with pytest.raises(UserError, match=r"several chat templates \(rag, tool_use\) and none is the default; .*FILE"):
        ChatTemplate(tiny_tokenizer)
    tiny_tokenizer.chat_template = {"rag": "{{ 1/0 }}", "default": LOOP}
    assert ChatTemplate(tiny_tokenizer).stop_tokens == ["<|im_end|>"]


def test_named_templates_are_saved_as_they_were(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The default and that for tools get what the run fixes; others, which callers name, stay as they are."""
    dated = "{{ strftime_now('%Y') }}" + LOOP + ASK + "{{ style }}"
    templates = {"default": dated, "tool_use": dated.replace("user", "human"), "rag": dated, "odd name": "{{ 1/0 }}"}
    tiny_tokenizer.chat_template = dict(templates)
    template = ChatTemplate(tiny_tokenizer, {"style": "brief"})
    tiny_tokenizer.chat_template = template.saved
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == template.saved and loaded.chat_template.keys() == templates.keys()
    assert {name: loaded.chat_template[name] for name in ("rag", "odd name")} == {"rag": dated, "odd name": "{{ 1/0 }}"}
    for name in ("default", "tool_use"):
        assert "style is not defined" in loaded.chat_template[name]
        text = loaded.apply_chat_template(messages(*CHAT[1:2]), chat_template=name, tokenize=False)
        assert text.startswith(str(PINNED_DATE.year))
    assert ChatTemplate(loaded, {"style": "brief"}).saved == template.saved


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_thinkin", "'enable_thinkin' that can be set; did you mean enable_thinking?"),
        ("style", "'style' that can be set; leave it out"),
        # These have a value in every chat, so that a default would do nothing.
        ("messages", "'messages'"),
        ("tools", "'tools'"),
        ("eos_token", "'eos_token'"),
        ("raise_exception", "'raise_exception'"),
    ],
)
def test_a_variable_that_would_do_nothing_is_refused(name: str, words: str, tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = LOOP + ASK + "{{ eos_token if enable_thinking is defined and tools }}"
    fixed = ChatTemplate(tiny_tokenizer, {"enable_thinking": False})
    fixed.check_variables()
    tiny_tokenizer.chat_template = fixed.saved
    assert ChatTemplate(tiny_tokenizer, {"enable_thinking": True}).source != fixed.source
    with pytest.raises(UserError, match="chat_template_kwargs: the chat template has no variable") as error:
        ChatTemplate(tiny_tokenizer, {"enable_thinking": False, name: True}).check_variables()
    assert words in str(error.value)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_template_for_tools_is_saved_beside_the_default(end: str, tiny_tokenizer: Any) -> None:
    """Transformers takes the template ``tool_use`` for chats with tools; so does training."""
    tiny_tokenizer.chat_template = {"default": f"\n{LOOP}{ASK}\n{end}", "tool_use": f"\n{chat_templates.THINKING}{end}"}
    chat, options = messages(*CHAT[1:2]), {"tokenize": False, "add_generation_prompt": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    expected = [tiny_tokenizer.apply_chat_template(chat, tools=each, **options) for each in (None, tools)]
    template = ChatTemplate(tiny_tokenizer)
    tiny_tokenizer.chat_template = template.saved
    assert template.writes_tools and '"name": "f"' in expected[1]
    assert [tiny_tokenizer.apply_chat_template(chat, tools=each, **options) for each in (None, tools)] == expected
    assert [template.prompt(chat, each) for each in (None, tools)] == expected
    assert set(template.saved) == {"default", "tool_use"} and ChatTemplate(tiny_tokenizer).saved == template.saved
    # The thought that only chats with tools have.
    answers = [
        template.last_turn(messages(*CHAT[1:3]), each).text[len(expected[bool(each)]) :] for each in (None, tools)
    ]
    assert answers == ["I.\n\nMe.<|im_end|>", "<think>\n\n</think>\n\nI.\n\nMe.<|im_end|>"]
