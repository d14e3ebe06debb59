"""A trained turn behind its served prompt: the five rules, what ends it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import served_forms
from served_forms import FORMS, TOOLS, chat, with_call, with_thoughts
from stepjepa.base.errors import UserError
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.template import ChatTemplate
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import parse_record

ASK = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def markers(plain_tokenizer: Any) -> Any:
    return served_forms.with_all_markers(plain_tokenizer)


@pytest.fixture(scope="module")
def template(markers: Any) -> Callable[..., ChatTemplate]:
    """A form by its name, or a template of its own on the same tokenizer."""

    def make(name: str, source: str | None = None, **variables: Any) -> ChatTemplate:
        tokenizer = served_forms.in_form(markers, name)
        tokenizer.chat_template = source or tokenizer.chat_template
        return ChatTemplate(tokenizer, variables)

    return make


def parts(made: ChatTemplate, messages: Any, tools: Any = None) -> list[tuple[str, str]]:
    """Prompt and answer of each trained turn."""
    return [(turn.text[: turn.answer], turn.text[turn.answer :]) for turn in made.turns(messages, tools)]


# -- the five rules ----------------------------------------------------------------------------------------------------


def test_1_the_answer_is_the_rest_of_the_chat(template: Any) -> None:
    assert parts(template("ChatML"), chat("q", "a\n")) == [(ASK, "a\n<|im_end|>")]
    # An empty thought that the template writes is part of the answer.
    assert parts(template("Qwen3"), chat("q", "a")) == [(ASK, "<think>\n\n</think>\n\na<|im_end|>")]


def test_2_a_text_that_moves_to_the_last_question(template: Any) -> None:
    made = template("Mistral-Nemo")
    assert parts(made, chat("q", "a", "r", "b", system="S")) == [
        ("<s>[INST]S\n\nq[/INST]", "a</s>"),
        ("<s>[INST]q[/INST]a</s>[INST]S\n\nr[/INST]", "b</s>"),
    ]


def test_2_a_thought_that_goes_once_there_is_an_answer(template: Any) -> None:
    """As gpt-oss and Kimi do with the thought of a call: prompt and chat differ in front of the last content."""
    messages = with_call("q", "cod", "a fish", "Yes.")
    messages[1]["thinking"] = "Look."
    (_, call), (prompt, answer) = parts(template("harmony"), messages, TOOLS)
    assert call.startswith("<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.look_up")
    assert "<|channel|>analysis<|message|>Look.<|end|>" in prompt
    assert prompt.endswith("<|message|>a fish<|end|><|start|>assistant")
    assert answer == "<|channel|>final<|message|>Yes.<|return|>"


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"content": "a"}, "\n</think>\n\na<|end_of_sentence|>"),
        ({"content": "a", "reasoning_content": "b"}, "b\n</think>\n\na<|end_of_sentence|>"),
        ({"content": "a", "thinking": "b"}, "b\n</think>\n\na<|end_of_sentence|>"),
        ({"content": "b</think>a"}, "b\n</think>\n\na<|end_of_sentence|>"),
        ({"content": "<think>b</think>\n\na"}, "b\n</think>\n\na<|end_of_sentence|>"),
    ],
)
def test_3_a_prompt_that_opens_the_thought(message: Any, answer: str, template: Any) -> None:
    """The template leaves thoughts out of the chat: they are put behind the prompt."""
    made = template("DeepSeek-R1")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **message}]
    (turn,) = made.turns(messages)
    assert turn.text[: turn.answer] == "<|begin_of_sentence|><|User|>q<|Assistant|><think>\n"
    assert turn.text[turn.answer :] == answer
    assert turn.text[slice(*turn.spans[-1])] == "a"
    assert turn.text[slice(*turn.reasoning)] == answer.partition("\n</think>")[0]


def test_3_the_template_closes_the_thought_in_its_own_way(template: Any) -> None:
    assert parts(template("QwQ"), with_thoughts("q", "b", "a")) == [(f"{ASK}<think>\n", "b\n</think>\n\na<|im_end|>")]


def test_3_a_prompt_that_opens_the_thought_in_words(template: Any) -> None:
    """Apriel's form: the chat has the thought without the words in front of it."""
    made, ask = template("Apriel"), "<|begin_user|>\nq\n<|begin_assistant|>\nHere are my reasoning steps:\n"
    assert parts(made, with_thoughts("q", "b", "a")) == [(ask, "b\n[BEGIN FINAL RESPONSE]\na\n<|end|>")]
    assert parts(made, chat("q", "a")) == [(ask, "\n[BEGIN FINAL RESPONSE]\na\n<|end|>")]


def test_3_a_content_does_not_stay_in_the_thought(template: Any) -> None:
    """Nemotron-Nano's form: the chat begins with the prompt, and nothing ends the thought in front of the content."""
    made, ask = template("Nemotron-Nano"), "<SPECIAL_11>User\nq\n<SPECIAL_11>Assistant\n<think>\n\n"
    assert parts(made, chat("q", "a")) == [(ask, "\n</think>\n\na\n<SPECIAL_12>")]
    (turn,) = made.turns(with_thoughts("q", "b", "a"))
    assert turn.text[turn.answer :] == "b\n</think>\n\na\n<SPECIAL_12>"
    assert (turn.text[slice(*turn.reasoning)], turn.text[slice(*turn.spans[-1])]) == ("b", "a")
    # A call without a content does not, either.
    written = "{{ '<think>\n\n' }}{% endif %}"
    calls = "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    made = template("Nemotron-Nano", FORMS["Nemotron-Nano"].template.replace(written, written + calls))
    messages = with_call("q", "cod", "a fish", "Yes.")[:2]
    ((_, answer),) = parts(made, messages, TOOLS)
    assert answer.startswith('\n</think>\n\n{"name": "look_up"')
    messages[1]["reasoning_content"] = "Look."
    ((_, answer),) = parts(made, messages, TOOLS)
    assert answer.startswith('Look.\n</think>\n\n{"name": "look_up"')


def test_3_a_call_is_not_begun_as_a_content(template: Any) -> None:
    """Cohere's form: a mark behind the thought begins a content, and none stands in front of a call."""
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        "{% if message.content %}{{ '<answer>' + message.content }}{% endif %}"
        "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    )
    made, call = template("ChatML", source), '{"name": "look_up", "arguments": {"word": "cod"}}'
    messages = with_call("q", "cod", "a fish", "Yes.")
    assert [answer for _, answer in parts(made, messages)] == [
        f"</think>{call}<|im_end|>",
        "</think><answer>Yes.<|im_end|>",
    ]
    messages[1]["reasoning_content"] = "Look."
    assert parts(made, messages)[0][1] == f"Look.</think>{call}<|im_end|>"


def test_3_the_tag_of_another_thought_is_text(template: Any) -> None:
    """Only the closing tag of the thought that the prompt opens ends it; any other one was lost, once."""
    source = FORMS["DeepSeek-R1"].template.replace("<think>", "<|START_THINKING|>")
    source = source.replace("text.split('</think>')[-1]", "text")
    ((_, answer),) = parts(template("DeepSeek-R1", source), chat("q", "Use </think>."))
    assert answer == "\n<|END_THINKING|>\n\nUse </think>.<|end_of_sentence|>"
    ((_, answer),) = parts(template("DeepSeek-R1", source), chat("q", "b<|END_THINKING|>a"))
    assert answer == "b<|END_THINKING|>a<|end_of_sentence|>"  # as the template writes it


def test_4_an_empty_thought_that_only_the_prompt_has(template: Any) -> None:
    """Seed-OSS's and Hunyuan's form: the prompt closes a thought that the chat leaves out."""
    source = FORMS["Seed-OSS"].template.replace(
        "{{ '<seed:bos>assistant\n' }}", "{{ '<seed:bos>assistant\n<seed:think>\n</seed:think>\n' }}"
    )
    made, ask = template("Seed-OSS", source), "<seed:bos>user\nq<seed:eos><seed:bos>assistant\n"
    empty = "<seed:think>\n</seed:think>\n"
    assert parts(made, chat("q", "\na", "q", "b")) == [
        (f"{ask}{empty}", "\na<seed:eos>"),
        (f"{ask}\na<seed:eos>{ask}{empty}", "b<seed:eos>"),
    ]
    with pytest.raises(UserError, match="the prompt closes the thought already"):
        made.turns(with_thoughts("q", "t", "a"))
    # The chat has its closing tag alone, which the prompt has already.
    closing = source.replace("{{ message['content']", "{{ '</seed:think>' + message['content']")
    closing = closing.replace("+ '<seed:eos>' }}", "+ '<seed:eos>' }}", 1)
    assert closing != source
    ((prompt, answer),) = parts(template("Seed-OSS", closing), chat("q", "a"))
    assert (prompt, answer) == (
        f"<seed:bos>user\n</seed:think>q<seed:eos><seed:bos>assistant\n{empty}",
        "a<seed:eos>",
    )
    # The chat has an empty thought, and another one than the prompt.
    other = source.replace(
        "{% if message['role'] == 'assistant' and",
        "{% if message['role'] == 'assistant' %}"
        "{{ '<seed:think></seed:think>' }}{% elif message['role'] == 'assistant' and",
    )
    with pytest.raises(UserError, match=r"ends in .*, the chat continues with"):
        template("Seed-OSS", other).turns(chat("q", "a"))


def test_4_a_prompt_that_closes_the_thought_and_a_message_with_one(template: Any) -> None:
    made = template("Qwen3, no thinking", enable_thinking=False)
    assert parts(made, chat("q", "a")) == [(f"{ASK}<think>\n\n</think>\n\n", "a<|im_end|>")]
    for message in ({"content": "a", "reasoning_content": "b"}, {"content": "<think>b</think>a"}):
        with pytest.raises(UserError, match=r"the prompt closes the thought already .*, and the message") as raised:
            made.turns([{"role": "user", "content": "q"}, {"role": "assistant", **message}])
        assert "<think>" in str(raised.value)
        assert """leave the thought to the model with `chat_template_kwargs '{"enable_thinking": true}'`""" in str(
            raised.value
        )
    # The variable is the template's own, with the value that opens the thought.
    source = (
        FORMS["Qwen3"]
        .template.replace("enable_thinking", "no_thoughts")
        .replace("no_thoughts is false", "not no_thoughts is false")
    )
    assert "no_thoughts" in source
    made = template("Qwen3", source)
    assert made.leaves_thought() == '{"no_thoughts": false}'


def test_4_a_prompt_that_only_closes_the_thought(template: Any) -> None:
    """Laguna's form: the prompt ends in the closing tag alone."""
    source = FORMS["Qwen3"].template.replace("'<think>\n\n</think>\n\n'", "'</think>'")
    source = source.replace("is defined and enable_thinking is false", "is not defined")
    assert source != FORMS["Qwen3"].template
    with pytest.raises(
        UserError, match=r"closes the thought already \('</think>'\), .* `chat.*enable_thinking"
    ) as told:
        template("Qwen3", source).turns(with_thoughts("q", "b", "a"))
    assert "true" in str(told.value)


def test_a_variable_that_does_not_change_the_prompt_is_no_remedy(template: Any) -> None:
    """A template reads names that are no setting, as those that it sets in one branch alone."""
    source = (
        "{% if nothing %}{% set content = 1 %}{% endif %}{{ '' if content else '' }}" + FORMS["Nemotron-Nano"].template
    )
    assert template("Nemotron-Nano", source).leaves_thought(opened=True) is None
    effort = FORMS["Qwen3"].template.replace("enable_thinking is defined and enable_thinking is false", "not effort")
    effort = effort.replace("not effort", "effort != 'high'")
    assert template("Qwen3", effort).leaves_thought() == '{"effort": "high"}'


def test_5_a_prompt_that_does_not_begin_the_answer(template: Any) -> None:
    source = FORMS["ChatML"].template.replace(
        '{% if add_generation_prompt %}{{ "<|im_start|>assistant', '{% if add_generation_prompt %}{{ "<|im_start|>bot'
    )
    assert source != FORMS["ChatML"].template
    with pytest.raises(UserError) as raised:
        template("ChatML", source).turns(chat("q", "a"))
    message = str(raised.value)
    assert "the prompt that a server will send ends in '" in message
    assert "bot" in message
    assert "the chat continues with '" in message


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_cannot_be_marked(thinking: bool, template: Any) -> None:
    """MiniCPM5's form: lists as Python writes them. The description of the tool has texts of the call, too."""
    written = "{%- for name, value in call.function.arguments | items %}{{- name ~ '=' ~ value }}{%- endfor %}"
    source = FORMS["Gemma-4"].template.replace(" + call.function.arguments | tojson", " }}" + written + "{{- ''")
    made = template("Gemma-4", source, enable_thinking=thinking)
    messages = with_call("q", "cod", "a fish", "Yes.")
    messages[1]["tool_calls"][0]["function"]["arguments"]["words"] = ["eel", "ray"]
    (_, call), (_, answer) = parts(made, messages, TOOLS)
    assert call == "<|tool_call>call:look_upword=codwords=['eel', 'ray']<tool_call|><turn|>"
    assert answer == "Yes.<turn|>"


# -- where a turn ends -------------------------------------------------------------------------------------------------


def test_two_ends(template: Any) -> None:
    made = template("harmony")
    assert made.stop_tokens == ["<|return|>", "<|call|>"]
    messages = with_call("q", "cod", "a fish", "Yes.")
    assert [turn.stop for turn in made.turns(messages, TOOLS)] == ["<|call|>", "<|return|>"]
    # Earlier answers end in <|end|> where they are history, and in <|return|> where they are trained.
    assert [answer.rpartition("<|")[2] for _, answer in parts(made, chat("q", "a", "r", "b"))] == ["return|>"] * 2


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Command-R7B", "<|END_OF_TURN_TOKEN|>"),
        ("Kimi-K3", "<|end_of_msg|>"),
        ("Phi-3", "<|end|>"),  # behind the last turn it writes the end of text, too
        ("Nemotron-Nano", "<SPECIAL_12>"),
    ],
)
def test_of_several_tokens_behind_a_content_the_one_that_ends_every_turn(name: str, end: str, template: Any) -> None:
    made = template(name)
    assert made.stop_tokens == [end]
    assert [turn.text[-len(end) :] for turn in made.turns(chat("q", "a", "r", "b"))] == [end, end]
    if made.writes_calls:
        messages = with_call("q", "cod", "a fish", "Yes.")
        assert [turn.stop for turn in made.turns(messages, TOOLS)] == [end, end]


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_a_token_that_begins_the_next_turn_does_not_end_one(eos: str, markers: Any) -> None:
    """Phi-4-mini's form, which writes the header of an answer whether it is asked to or not."""
    tokenizer = served_forms.in_form(markers, "ChatML")
    tokenizer.eos_token = eos
    tokenizer.chat_template = FORMS["ChatML"].template.replace("{% if add_generation_prompt %}", "{% if true %}")
    made = ChatTemplate(tokenizer)
    assert made.stop_tokens == ["<|im_end|>"]
    assert parts(made, chat("q", "a")) == [(ASK, "a<|im_end|>")]


def test_no_end(template: Any) -> None:
    """GLM's form: the marker of the next role ends a turn, of the last one the user's; it is a label alone."""
    made = template("GLM")
    source = made.source
    messages = [*with_call("q", "cod", "a fish", "Yes."), *chat("r", "b")]
    messages[1] = {"role": "assistant", "content": "look"}
    result = made.turns(messages)
    assert [turn.stop for turn in result] == ["<|observation|>", "<|user|>", "<|user|>"]
    assert [turn.text[turn.answer :] for turn in result] == ["look<|observation|>", "Yes.<|user|>", "b<|user|>"]
    assert made.source == source


def test_a_stop_inside_an_answer_is_refused(markers: Any) -> None:
    """Here by a template that ends a thought and the answer with the same token."""
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.thinking %}{{ message.thinking + '<|im_end|>' }}{% endif %}{{ message.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = served_forms.in_form(markers, "ChatML")
    tokenizer.chat_template = source
    made = RecordTokenizer(tokenizer, JepaConfig(mode="regular"))
    record = parse_record({"messages": with_thoughts("q", "b", "a")}, "data.jsonl", 7)
    fault = r"data.jsonl:7: the answer holds '<\|im_end\|>', at which generation stops, .*; the chat template writes it"
    with pytest.raises(UserError, match=fault):
        made.tokenize([record])
    # Spelt by the record itself it is text.
    made.tokenize([parse_record({"messages": chat("q", "a <|im_end|> b")}, "data.jsonl", 7)])


# -- what never reaches the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ChatML", "Llama-3", "Gemma-2", "Mistral-Nemo"])
def test_a_thought_that_is_not_written(name: str, template: Any) -> None:
    for key in ("reasoning_content", "thinking"):
        messages = chat("q", "a")
        messages[1][key] = "b"
        with pytest.raises(UserError, match=r"does not write 'reasoning_content' \(or 'thinking'\), so that"):
            template(name).turns(messages)
        # Of a turn that is context it may be missing.
        messages[1]["weight"] = 0
        (turn,) = template(name).turns([*messages, *chat("r", "c")])
        assert turn.text.endswith(turn.stop)


def test_a_thought_that_a_variable_of_the_prompt_opens(template: Any) -> None:
    """DeepSeek-V3.1's form: the prompt ends in a closing tag, or in an opening one where the caller asks for it."""
    source = FORMS["DeepSeek-V3"].template.replace("'<|Assistant|>' + text", "'<|Assistant|></think>' + text")
    source = source.replace("'<|Assistant|>' }}", "'<|Assistant|>' + ('<think>' if thinking else '</think>') }}")
    messages = with_thoughts("q", "Hm.", "a")
    with pytest.raises(
        UserError, match=r"'reasoning_content' .* beside this prompt; set `.*_kwargs '{\"thinking\": true}'`"
    ):
        template("DeepSeek-V3", source).turns(messages)
    ((prompt, answer),) = parts(template("DeepSeek-V3", source, thinking=True), messages)
    assert (prompt[-18:], answer) == ("<|Assistant|><think>"[-18:], "Hm.</think>a<|end_of_sentence|>")


@pytest.mark.parametrize("name", ["Mistral-Nemo", "Llama-3.1"])
def test_content_beside_a_call_that_is_not_written(name: str, template: Any) -> None:
    messages = with_call("q", "cod", "a fish", "Yes.")
    messages[1]["content"] = "Let me look."
    with pytest.raises(UserError, match="leaves out, cuts or rewrites 'content' beside tool calls"):
        template(name).turns(messages, TOOLS)


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_a_text_that_is_written_in_another_way(key: str, template: Any) -> None:
    """The place of the text is known, and its characters are others: another answer would be trained."""
    text = f"message.{key} or ''"
    made = template("Qwen3", FORMS["Qwen3"].template.replace(text, f"({text}).replace('.', '!')", 1))
    messages = chat("q.", "a")
    messages[1] |= {"reasoning_content": "t"}
    assert len(made.turns(messages)) == 1
    messages[1][key] = "One. Two"
    with pytest.raises(UserError, match="rewrites 'content'" if key == "content" else "not write 'reasoning_content'"):
        made.turns(messages)


def test_one_of_two_calls_that_is_not_written(template: Any) -> None:
    messages = with_call("q", "cod", "a fish", "Yes.")
    messages[1]["tool_calls"] *= 2
    with pytest.raises(UserError, match=r"leaves out a part of 'tool_calls' .*; write one call a message"):
        template("Llama-3.1").turns(messages, TOOLS)


def test_calls_that_are_not_written(template: Any) -> None:
    with pytest.raises(UserError, match=r"writes no 'tool_calls', so that .* trained \(nor .*FILE` that does"):
        template("ChatML").turns(with_call("q", "cod", "a fish", "Yes."), TOOLS)


def test_the_template_of_the_examples_writes_tools_calls_and_thoughts(template: Any) -> None:
    file = Path(__file__).parents[2] / "examples" / "templates" / "chatml-tools-thoughts.jinja"
    made = template("ChatML", file.read_text(encoding="utf-8"))
    assert made.writes_tools and made.writes_calls and made.writes_thoughts and made.has_system_role
    messages = with_call("q", "cod", "a fish", "Yes.")
    messages[1]["reasoning_content"] = "Look."
    (prompt, call), (after, answer) = parts(made, messages, TOOLS)
    assert prompt.startswith("<|im_start|>system\nYou may call") and prompt.endswith(ASK)
    assert call == (
        '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {"word": "cod"}}'
        "\n</tool_call><|im_end|>"
    )
    assert after == f"{prompt}{call}\n<|im_start|>tool\na fish<|im_end|>\n<|im_start|>assistant\n"
    assert answer == "Yes.<|im_end|>"
    assert parts(made, chat("q", "a", system="S")) == [("<|im_start|>system\nS<|im_end|>\n" + ASK, "a<|im_end|>")]


def test_arguments_are_passed_as_the_template_reads_them(template: Any) -> None:
    as_text = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made = template("ChatML", as_text)
    assert made.arguments_as_text
    messages = with_call("q", 'cod "x" é', "a fish", "Yes.")
    assert parts(made, messages, TOOLS)[0] == (ASK, 'look_up{"word": "cod \\"x\\" é"}<|im_end|>')
    assert not template("Qwen3").arguments_as_text


def test_an_end_of_text_within_an_answer_is_refused(markers: Any) -> None:
    """It ends no turn here, but a saved model stops at it, too."""
    thoughts = (
        "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' + end }}{% endif %}"
    )
    made = served_forms.in_form(markers, "ChatML")
    made.eos_token, records = "</s>", [parse_record({"messages": with_thoughts("q", "t", "a")}, "data.jsonl", 7)]
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        + thoughts
        + "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    made.chat_template = "{% set end = '' %}" + source
    assert RecordTokenizer(made, JepaConfig(mode="regular")).tokenize(records)
    made.chat_template = "{% set end = '</s>' %}" + source
    with pytest.raises(UserError, match=r"data.jsonl:7: the answer holds '</s>', at which generation stops, before"):
        RecordTokenizer(made, JepaConfig(mode="regular")).tokenize(records)


def test_a_name_of_an_argument_that_spells_a_token_is_refused(template: Any) -> None:
    """The turn ended in the name, and the rest of the call was lost."""
    messages = with_call("q", "cod", "a fish", "Yes.")
    for arguments in ({"a<|im_end|>": 1}, {"a": [{"<tool_call>": "b"}]}):
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        with pytest.raises(UserError, match=r"has an argument '.*', whose name spells the token '<.*>'; rename it"):
            template("Qwen3").turns(messages, TOOLS)
        messages[1]["weight"] = 0  # context
        assert len(parts(template("Qwen3"), messages, TOOLS)) == 1
        del messages[1]["weight"]


def test_a_developer_is_a_system_where_the_template_lacks_the_role(template: Any) -> None:
    messages = [{"role": "developer", "content": "S"}, *chat("q", "a")]
    assert parts(template("Llama-2"), messages)[0][0] == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]"
    known = FORMS["ChatML"].template + "{# developer #}"
    assert parts(template("ChatML", known), messages)[0][0].startswith("<|im_start|>developer\nS")
    # As in Cohere's templates, which spell the word and leave out a message of that role.
    unread = (
        "{% for message in messages if message['role'] in ('system', 'user', 'assistant') %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# the developer's #}"
    )
    assert parts(template("ChatML", unread), messages) == [(f"<|im_start|>system\nS<|im_end|>\n{ASK}", "a<|im_end|>")]


def test_two_thoughts_of_one_message_are_not_made_one(template: Any) -> None:
    """Where the prompt opens the thought, only one of them would be trained."""
    made, messages = template("DeepSeek-R1"), chat("q", "<think>one</think>a")
    messages[-1]["reasoning_content"] = "one"
    assert parts(made, messages)[0][1].startswith("one")
    messages[-1]["reasoning_content"] = "two"
    with pytest.raises(UserError, match=r"'reasoning_content' and the thought in 'content' differ"):
        made.turns(messages)
