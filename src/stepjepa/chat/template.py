"""Chat templates: render messages as they will be served, and find each message's content in the text.

Properties that differ between models are derived from the template, not from the model's name: whether it has a system
role, whether it accepts a lone assistant turn, which tokens end a turn, how an answer begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.chat import source as sources
from stepjepa.chat.beginnings import Beginnings
from stepjepa.chat.forms import Forms
from stepjepa.chat.marks import REASONING_KEYS, Message, Span, contents, locate
from stepjepa.chat.probes import (
    ANSWER,
    ASKED,
    FUNCTION,
    OTHER,
    QUESTION,
    REPLY,
    THOUGHT,
    TOOL,
    calling_message,
    make_message,
)
from stepjepa.chat.renderer import Renderer
from stepjepa.chat.served import trained_turns
from stepjepa.chat.source import PINNED_DATE
from stepjepa.chat.special_tokens import check_special_tokens
from stepjepa.chat.thought import is_left_to_model, last_tag, opening_tag, thought_in
from stepjepa.chat.tokens import check_fast
from stepjepa.chat.tool_calls import argument_names, with_text_arguments
from stepjepa.chat.turn_ends import TurnEnds
from stepjepa.chat.turn_text import Rendered, Tools, Turn, Variables
from stepjepa.chat.turns import TurnError, make_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplate:
    """The chat template of a fast tokenizer as it is served, with properties derived from it.

    Its methods take ``messages`` in the form of :class:`stepjepa.data.record.Record`, ``tools`` in OpenAI's form, and
    ``variables`` of the template, which one chat sets beside those of the run.

    Args:
        tokenizer: has a chat template; not changed.
        variables: of the template, fixed for the run (``chat_template_kwargs``).

    Attributes:
        renderer: renders messages by the template with the values that a run fixes.
        ends: the tokens that end a turn.
        stop_tokens: their texts.
        stop_ids: their ids.
        closer: the text that the template writes between a content and the stop token.
        header: the beginning of an answer that a run adds for a generation prompt; empty if the template writes it.
        variables: names of the variables that a caller may set.
        has_date: whether the template writes today's date, which a run pins.
        has_system_role: whether it writes system messages; otherwise they are put into the first user message.
        has_developer_role: whether it writes developer messages; otherwise they are rendered as system messages.
        lone_assistant: whether it accepts a chat that is one assistant message.
        reasoning_key: the key of a message's thought that it reads; None if it reads none.
        opens_thought: whether its prompts end in the opening tag of a thought.
        closing: the text that it writes between thought and content; None if it does not write both.
        writes_tools: whether it writes descriptions of tools.
        arguments_as_text: whether it expects the arguments of tool calls as JSON text, not as an object.

    Raises:
        UserError: the template can't be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Variables = None) -> None:
        check_fast(tokenizer)
        check_special_tokens(tokenizer)
        self._bos_token, self._special_tokens = tokenizer.bos_token, dict(tokenizer.special_tokens_map)
        original, self._templates = sources.template_of(tokenizer), tokenizer.chat_template
        self.has_date = "strftime_now" in original or "date_string" in original
        self._defaults, self.has_system_role, self.header = variables or {}, True, ""
        self._alone: dict[str, tuple[str, str]] = {}  # role -> text before and behind the content of a lone message
        self.variables = Renderer(original, self._special_tokens).variables  # that a caller may set
        self.renderer = self._fixed_renderer(original)
        self._learn_roles(original)
        self._learn_header(original)
        self._learn_thoughts()
        self._learn_tools()
        self.ends = TurnEnds(tokenizer, self.renderer.attempt, self._call)
        self.stop_tokens, self.stop_ids, self.closer = self.ends.tokens, self.ends.ids, self.ends.closer
        slow_turns = partial(self._turns, tools=None, variables=None)
        self._forms = Forms(self.renderer.render, slow_turns, only_adds_text=self.renderer.only_adds_text)

    @property
    def source(self) -> str:
        """The template with the values that a run fixes, see ``chat.source``: date, variables, system role, header."""
        return self.renderer.source

    def check_variables(self) -> None:
        """Raise ``UserError`` for a variable without effect, for a new run; earlier versions accepted them.

        A special token has a value in every chat, so that a default would do nothing.
        """
        sources.check_variables(self._defaults, self.variables - {*self._special_tokens})

    # -- rendering -----------------------------------------------------------------------------------------------------

    def normalise(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Return messages in the form that the template reads, to be passed to ``apply_chat_template``."""
        return [self._normalised(message) for message in messages]

    def _normalised(self, message: Message) -> JsonObject:
        if len(message) == 2 and message["role"] != "developer":
            return dict(message)  # role and content
        fields = {key: value for key, value in message.items() if key not in ("weight", *REASONING_KEYS)}
        if fields["role"] == "developer" and not self.has_developer_role:
            fields["role"] = "system"
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if reasoning is not None:
            fields[self.reasoning_key or REASONING_KEYS[0]] = reasoning
        if self.arguments_as_text and fields.get("tool_calls"):
            fields["tool_calls"] = [with_text_arguments(call) for call in fields["tool_calls"]]
        return fields

    def prompt(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> str:
        """Return the prompt that a server makes for the next turn: the chat so far, with a generation prompt."""
        return self.renderer.render(self.normalise(messages), prompt=True, tools=tools, variables=variables)

    def prompt_own(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        """Return the spans of a prompt in which special tokens are plain text: none, as in a server."""
        return ()

    def turns(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> list[Turn]:
        """Return each trained turn of the assistant behind its own served prompt; UserError if that is impossible."""
        chat, indices = self.normalise(messages), trained_turns(messages)
        filled = self._forms.turns(chat, indices) if tools is None and not variables else None
        return self._turns(chat, indices, tools, variables) if filled is None else filled

    def last_turn(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> Turn:
        """Return the last message, the assistant's, behind its served prompt."""
        (turn,) = self._turns(self.normalise(messages), [len(messages) - 1], tools, variables)
        return turn

    def _turns(self, chat: Sequence[Message], indices: Sequence[int], tools: Tools, variables: Variables) -> list[Turn]:
        until = chat[: max(indices, default=-1) + 1]
        render = partial(self.renderer.render, tools=tools, variables=variables)
        texts = Beginnings(until, render, len(indices), only_adds_text=self.renderer.only_adds_text)
        return [self._turn(chat, index, texts) for index in indices]

    def _turn(self, chat: Sequence[Message], index: int, texts: Beginnings) -> Turn:
        """Make a turn with :func:`make_turn`; its errors name the message."""
        try:
            self._check_argument_names(chat[index])
            return make_turn(self, chat, index, texts)
        except UserError as error:
            raise TurnError(str(error), index) from None

    def _check_argument_names(self, message: Message) -> None:
        """Raise ``UserError`` for an argument name that spells a token: names are not marked, so it can end a turn."""
        for name in argument_names(message):
            if (token := self.ends.added_token.search(name)) is not None:
                fault = f"'tool_calls' has an argument {shown(name)}, whose name spells the token {shown(token[0])}"
                raise UserError(f"{fault}; rename it")

    def render(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> Rendered:
        """Render a whole chat as one text; UserError if the template refuses it, or rewrites a content."""
        chat = self.normalise(messages)

        render = partial(self.renderer.render, tools=tools, variables=variables)
        text = render(chat)
        spans = contents(locate(render, chat, text, range(len(chat))), len(chat))
        for message, span in zip(messages, spans, strict=True):
            if span is None and message["content"].strip():
                fault = "the chat template cuts or rewrites a message, so that its content can't be found"
                remedy = "remove what it treats specially, such as think tags, from the content"
                raise UserError(f"{fault}; {remedy}, or use a `chat_template` that writes contents as they are")
        return Rendered(text, tuple(span or (0, 0) for span in spans))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message alone, as a view that sees nothing else."""
        role = "user" if role == "assistant" and not self.lone_assistant else role
        message = make_message(role, content)
        if role not in self._alone:
            # Most templates write the same text around every content.
            before, separator, behind = (self.renderer.attempt([make_message(role, OTHER)]) or "").rpartition(OTHER)
            self._alone[role] = (before, behind) if separator else ("", "")
        if role == "user" or thought_in(content) is None:
            before, behind = self._alone[role]
            text = self.renderer.render([message])
            for part in filter(None, (content, content.strip())):
                if text == f"{before}{part}{behind}":
                    return Rendered(text, ((len(before), len(before) + len(part)),))
        return self.render([message])

    def describe(self) -> dict[str, str]:
        """Return properties derived from the template, for reports."""
        bos = self._bos_token
        begins = bos is not None and self.renderer.render([QUESTION], prompt=True).startswith(bos)
        ends = ", ".join(map(repr, self.stop_tokens))
        facts = {
            "system role": "yes" if self.has_system_role else "no: put before the first user message",
            "lone assistant turn": "yes" if self.lone_assistant else "no: rendered as a user turn",
            "end of turn": ends + (" (appended)" if self.ends.appended else ""),
            "begin of text": repr(bos) if begins else "none",
            "date": f"pinned to {PINNED_DATE}" if self.has_date else "none",
        }
        if self.header:
            facts["answer begins with"] = f"{self.header!r} (written into the saved template)"
        if self.reasoning_key or self.opens_thought:
            facts["reasoning"] = (
                "the prompt opens the thought" if self.opens_thought else f"read from {self.reasoning_key}"
            )
        return facts

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes calls of tools."""
        return self._call is not None

    @property
    def writes_thoughts(self) -> bool:
        """Whether the template writes the thought of a message, or opens one in the prompt."""
        return self.reasoning_key is not None or self.opens_thought

    def leaves_thought(self, *, opened: bool = False) -> str | None:
        """Return the variables, as JSON, by which a prompt leaves the thought to the model; None if none do.

        Every variable that changes the prompt is tried alone, first those that are named after thoughts.

        Args:
            opened: the prompt must open the thought.
        """

        def order(name: str) -> tuple[bool, str]:
            return ("think" not in name and "reason" not in name, name)

        asked = self.renderer.attempt([QUESTION], prompt=True)
        for name in sorted(self.renderer.variables - {*self._special_tokens}, key=order):
            prompts = {
                json.dumps({name: value}): self.renderer.attempt([QUESTION], prompt=True, variables={name: value})
                for value in (True, False, "high")
            }
            if {*prompts.values()} <= {asked, None}:
                continue
            for variables, prompt in prompts.items():
                if prompt is not None and is_left_to_model(prompt, opened=opened):
                    return variables
        return None

    @property
    def saved(self) -> str | dict[str, str]:
        """The chat template to save: ``source``, or all templates of the tokenizer by their names.

        It renders the prompts of training in plain transformers.
        """
        named = self._templates
        return sources.with_served(named, self._fixed) if isinstance(named, dict) else self.source

    def _fixed(self, template: str) -> str:
        """Return a template with the values that the run fixes, as far as they are known."""
        folds = not self.has_system_role
        return sources.with_values(template, self._defaults, folds_system=folds, header=self.header)

    # -- derived properties --------------------------------------------------------------------------------------------

    def _fixed_renderer(self, original: str) -> Renderer:
        return Renderer(self._fixed(original), self._special_tokens)

    def _learn_roles(self, original: str) -> None:
        """Determine which roles the template writes; without a system role it is put into the first user message."""
        system, developer = make_message("system", OTHER), make_message("developer", OTHER)
        self.has_system_role = self._writes(OTHER, [system, QUESTION], prompt=True)
        if not self.has_system_role:
            self.renderer = self._fixed_renderer(original)
        # Cohere's templates have the word in a sentence, and leave out a message of that role.
        self.has_developer_role = "developer" in original and self._writes(OTHER, [developer, QUESTION], prompt=True)
        self.lone_assistant = self._writes(ANSWER, [REPLY])

    def _learn_header(self, original: str) -> None:
        """If the template writes nothing for a generation prompt, add its own header of an answer there."""
        pair = self.renderer.render([QUESTION, REPLY])
        asked, answer = pair.find(ASKED), pair.find(ANSWER)
        if missing := [role for role, place in (("a user", asked), ("an assistant", answer)) if place < 0]:
            fault = f"the chat template does not render {' and '.join(missing)} message"
            raise UserError(f"{fault}; use a `chat_template` that writes the contents of both as they are")
        if answer < asked:
            fault = "the chat template writes an answer in front of its question"
            raise UserError(f"{fault}; use a `chat_template` that writes messages in their order")
        self.header = self._missing_header(pair)
        if self.header:
            self.renderer = self._fixed_renderer(original)

    def _learn_thoughts(self) -> None:
        """Determine the field of a thought, whether the prompt opens one, and the text that closes one."""
        self.reasoning_key = next(
            (key for key in REASONING_KEYS if self._writes(THOUGHT, [QUESTION, {**REPLY, key: THOUGHT}])), None
        )
        self.opens_thought = opening_tag(self.renderer.attempt([QUESTION], prompt=True) or "") is not None
        self.closing = self._between_thought_and_content()

    def _learn_tools(self) -> None:
        """Determine whether the template writes tools, and tool calls with arguments as an object or as JSON text."""
        self.writes_tools = self._writes(FUNCTION, [QUESTION], prompt=True, tools=[TOOL])
        self.arguments_as_text = False
        self._call: JsonObject | None = None
        for as_text in (False, True):
            message = calling_message(as_text=as_text)
            if self._writes(OTHER, [QUESTION, message], tools=[TOOL]):
                self.arguments_as_text, self._call = as_text, message
                return

    def _writes(self, text: str, messages: Sequence[Message], *, prompt: bool = False, tools: Tools = None) -> bool:
        """Return whether the template accepts messages and writes a text of theirs."""
        return text in (self.renderer.attempt(messages, prompt=prompt, tools=tools) or "")

    def _missing_header(self, pair: str) -> str:
        """Return the text between prompt and answer, if the template adds nothing for a generation prompt."""
        prompt, without = self.renderer.attempt([QUESTION], prompt=True), self.renderer.attempt([QUESTION])
        if prompt is None or without is None or not without.startswith(prompt) or not pair.startswith(prompt):
            return ""
        header = pair[len(prompt) : pair.index(ANSWER)]
        tag = last_tag(header)
        # An empty thought belongs to the answer; so does a blank, which may begin the answer's first token.
        return (header if tag is None else header[: tag.start]).rstrip(" ")

    def _between_thought_and_content(self) -> str | None:
        """Return the text that the template writes between reasoning and content; None if it does not write both."""
        if self.reasoning_key is None:
            return None
        text = self.renderer.attempt([QUESTION, {**REPLY, self.reasoning_key: THOUGHT}]) or ""
        start, end = text.find(THOUGHT), text.find(ANSWER)
        return text[start + len(THOUGHT) : end] if -1 < start < end else None
