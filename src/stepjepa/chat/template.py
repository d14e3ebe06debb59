"""Chat templates: render messages as they will be served, and find each message's content in the text.

Properties that differ between models are derived from the template, not from the model's name: whether it has a system
role, whether it accepts a lone assistant turn, which tokens end a turn, how an answer begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.chat import source as sources
from stepjepa.chat.beginnings import Beginnings
from stepjepa.chat.forms import Forms
from stepjepa.chat.marks import REASONING_KEYS, Message, Span, argument_names, contents, locate
from stepjepa.chat.served import trained_turns
from stepjepa.chat.source import PINNED_DATE
from stepjepa.chat.special_tokens import matched_tokens
from stepjepa.chat.thought import ends_in_thought, last_tag, thought_in
from stepjepa.chat.tokens import check_fast
from stepjepa.chat.turn_text import Rendered, Tools, Turn, Variables
from stepjepa.chat.turns import make_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters: no template writes them and no ordinary text holds them.
_ASKED, _ANSWER, _THOUGHT, _OTHER = "\ue000q\ue001", "\ue000a\ue001", "\ue000t\ue001", "\ue000o\ue001"
_NAME = "name_of_a_function"
_TOOL: JsonObject = {
    "type": "function",
    "function": {"name": _NAME, "description": "about", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """The chat template of a fast tokenizer as it is served, with properties derived from it.

    Its methods take ``messages`` in the form of :class:`stepjepa.data.records.Record`, ``tools`` in OpenAI's form, and
    ``variables``, those of the template that one chat sets beside the run's.

    Args:
        tokenizer: has a chat template; not changed.
        variables: of the template, fixed for the run (``chat_template_kwargs``).

    Attributes:
        source: the template with the values that a run fixes (see ``chat.source``): a date, the variables, a system
            role, the header of an answer.
        saved: the template that is saved with the model; it renders the prompts of training in plain transformers.

    Raises:
        UserError: the template can't be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Variables = None) -> None:
        check_fast(tokenizer)
        self._tokenizer = tokenizer
        original, self._templates = sources.template_of(tokenizer), tokenizer.chat_template
        self.has_date = "strftime_now" in original or "date_string" in original
        # Templates are rendered without the tokenizer's method, whose overhead is larger than the rendering.
        self._special_tokens: JsonObject = dict(tokenizer.special_tokens_map)
        self._alone: dict[str, tuple[str, str]] = {}  # role -> text before and behind the content of a lone message
        self._defaults, self.has_system_role, self.header = variables or {}, True, ""
        self._use(original)
        self.variables = self._compiled.variables  # that a caller may set
        self._use(self._fixed(original))
        self.arguments_as_text = False
        self.has_system_role = _OTHER in (
            self._try([_message("system", _OTHER), _message("user", _ASKED)], prompt=True) or ""
        )
        if not self.has_system_role:
            self._use(self._fixed(original))
        # Cohere's templates have the word in a sentence, and leave out a message of that role.
        developer = [_message("developer", _OTHER), _message("user", _ASKED)]
        self.has_developer_role = "developer" in original and _OTHER in (self._try(developer, prompt=True) or "")
        question, answer = _message("user", _ASKED), _message("assistant", _ANSWER)
        pair = self._apply([question, answer])
        if not -1 < pair.find(_ASKED) < pair.find(_ANSWER):
            raise UserError("the chat template does not render a user and an assistant message; check it")
        # If the template writes nothing for a generation prompt, its own header of an answer is added there.
        self.header = self._missing_header(pair)
        if self.header:
            self._use(self._fixed(original))
        self.lone_assistant = _ANSWER in (self._try([answer]) or "")
        self.reasoning_key = next(
            (key for key in REASONING_KEYS if _THOUGHT in (self._try([question, {**answer, key: _THOUGHT}]) or "")),
            None,
        )
        self.opens_thought = ends_in_thought(self._try([question], prompt=True) or "")
        self.closing = self._between_thought_and_content(question, answer)
        self._learn_tools(question)
        self._learn_ends(pair, question, answer)
        slow_turns = partial(self._turns, tools=None, variables=None)
        self._forms = Forms(self._apply, slow_turns, only_adds_text=self._compiled.marked is not None)

    def check_variables(self) -> None:
        """Raise ``UserError`` for a variable of a new run that would do nothing; earlier versions took them.

        A special token has a value in every chat, so that a default would do nothing.
        """
        sources.check_variables(self._defaults, self.variables - {*self._special_tokens})

    # -- rendering -----------------------------------------------------------------------------------------------------

    def normalise(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Return messages in the form that the template reads, to be passed to ``apply_chat_template``."""
        return [self._normalised(message) for message in messages]

    def prompt(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> str:
        """Return the prompt that a server makes for the next turn: the chat so far, with a generation prompt."""
        return self._apply(self.normalise(messages), prompt=True, tools=tools, variables=variables)

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
        def render(part: Sequence[Message], *, prompt: bool = False) -> str:
            return self._apply(part, prompt=prompt, tools=tools, variables=variables)

        def render_marked(part: Sequence[Message], *, prompt: bool = False) -> str:
            return self._apply(part, prompt=prompt, tools=tools, variables=variables, marked=True)

        for index in indices:
            self._check_argument_names(chat[index])
        until = chat[: max(indices, default=-1) + 1]
        texts = Beginnings(until, render, render_marked if self._compiled.marked is not None else None, len(indices))
        return [make_turn(self, chat, index, texts) for index in indices]

    def _check_argument_names(self, message: Message) -> None:
        """Raise ``UserError`` for a name that spells a token: names are not marked, so that it could end the turn."""
        for name in argument_names(message):
            if (token := self._added.search(name)) is not None:
                fault = f"'tool_calls' has an argument {shown(name)}, whose name spells the token {shown(token[0])}"
                raise UserError(f"{fault}; rename it")

    def render(self, messages: Sequence[Message], tools: Tools = None, variables: Variables = None) -> Rendered:
        """Render a whole chat as one text; UserError if the template refuses it, or rewrites a content."""
        chat = self.normalise(messages)

        def render(part: Sequence[Message]) -> str:
            return self._apply(part, tools=tools, variables=variables)

        text = render(chat)
        spans = contents(locate(render, chat, text, range(len(chat))), len(chat))
        for message, span in zip(messages, spans, strict=True):
            if span is None and message["content"].strip():
                fault = "the chat template rewrites a message, so that its content can't be found"
                raise UserError(f"{fault}; remove what it treats specially, such as think tags, from the content")
        return Rendered(text, tuple(span or (0, 0) for span in spans))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message alone, as a view that sees nothing else."""
        role = "user" if role == "assistant" and not self.lone_assistant else role
        message = _message(role, content)
        if role not in self._alone:
            # Most templates write the same text around every content.
            before, separator, behind = (self._try([_message(role, _OTHER)]) or "").rpartition(_OTHER)
            self._alone[role] = (before, behind) if separator else ("", "")
        if role == "user" or thought_in(content) is None:
            before, behind = self._alone[role]
            text = self._apply([message])
            for part in filter(None, (content, content.strip())):
                if text == f"{before}{part}{behind}":
                    return Rendered(text, ((len(before), len(before) + len(part)),))
        return self.render([message])

    def describe(self) -> dict[str, str]:
        """Return properties derived from the template, for reports."""
        bos = self._tokenizer.bos_token
        begins = bos is not None and self._apply([_message("user", _ASKED)], prompt=True).startswith(bos)
        ends = ", ".join(map(repr, self.stop_tokens))
        facts = {
            "system role": "yes" if self.has_system_role else "no: put before the first user message",
            "lone assistant turn": "yes" if self.lone_assistant else "no: rendered as a user turn",
            "end of turn": ends + (" (appended)" if self.appends_end_of_turn else ""),
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
        return self._called is not None

    @property
    def writes_thoughts(self) -> bool:
        """Whether the template writes the thought of a message, or opens one in the prompt."""
        return self.reasoning_key is not None or self.opens_thought

    def leaves_thought(self, *, opened: bool = False) -> str | None:
        """Return the variables, as JSON, by which a prompt leaves the thought to the model; None if none do.

        With ``opened`` the prompt must open it. Each variable of the template's own is tried in turn, those that are
        named after thoughts first.
        """
        names = self._compiled.variables - {*self._special_tokens}
        for name in sorted(
            names, key=lambda variable: ("think" not in variable and "reason" not in variable, variable)
        ):
            for value in (True, False):
                try:
                    prompt = self._apply([_message("user", _ASKED)], prompt=True, variables={name: value})
                except UserError:
                    continue
                tag = last_tag(prompt)
                if tag.is_open if tag is not None else not opened:
                    return json.dumps({name: value})
        return None

    @property
    def saved(self) -> str | dict[str, str]:
        """The chat template to save: ``source``, or all templates of the tokenizer by their names."""
        named = self._templates
        return sources.with_served(named, self._fixed) if isinstance(named, dict) else self.source

    def _fixed(self, template: str) -> str:
        """Return a template with the values that the run fixes, as far as they are known."""
        folds = not self.has_system_role
        return sources.with_values(template, self._defaults, folds_system=folds, header=self.header)

    # -- derived properties --------------------------------------------------------------------------------------------

    def _use(self, source: str) -> None:
        self.source, self._compiled = source, sources.compiled(source)

    def _apply(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        tools: Tools = None,
        variables: Variables = None,
        marked: bool = False,
    ) -> str:
        template = (self._compiled.marked if marked else None) or self._compiled.template
        try:
            return str(
                template.render(
                    **{**self._special_tokens, **(variables or {})},
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                )
            )
        except Exception as error:  # a template is a program and can raise any error
            fault = f"the chat template refuses these messages ({sources.jinja_message(error)})"
            raise UserError(f"{fault}; change them, or name another `chat_template`") from None

    def _try(self, messages: Sequence[Message], *, prompt: bool = False, tools: Tools = None) -> str | None:
        try:
            return self._apply(messages, prompt=prompt, tools=tools)
        except UserError:
            return None

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
            fields["tool_calls"] = [_with_text(call) for call in fields["tool_calls"]]
        return fields

    def _missing_header(self, pair: str) -> str:
        """Return the text between prompt and answer, if the template adds nothing for a generation prompt."""
        question = [_message("user", _ASKED)]
        prompt, without = self._try(question, prompt=True), self._try(question)
        if prompt is None or without is None or not without.startswith(prompt) or not pair.startswith(prompt):
            return ""
        header = pair[len(prompt) : pair.index(_ANSWER)]
        tag = last_tag(header)
        # An empty thought belongs to the answer; so does a blank, which may begin the answer's first token.
        return (header if tag is None else header[: tag.start]).rstrip(" ")

    def _between_thought_and_content(self, question: Message, answer: Message) -> str | None:
        """Return the text that the template writes between reasoning and content; None if it does not write both."""
        if self.reasoning_key is None:
            return None
        text = self._try([question, {**answer, self.reasoning_key: _THOUGHT}]) or ""
        start, end = text.find(_THOUGHT), text.find(_ANSWER)
        return text[start + len(_THOUGHT) : end] if -1 < start < end else None

    def _learn_tools(self, question: Message) -> None:
        """Determine whether the template writes tools, and tool calls with arguments as an object or as JSON text."""
        self.writes_tools = _NAME in (self._try([question], prompt=True, tools=[_TOOL]) or "")
        self._called: JsonObject | None = None
        function = {"name": _NAME, "arguments": {"key": _OTHER}}
        # Mistral's templates require an id of nine characters.
        call = {"type": "function", "id": "call00001", "function": function}
        for as_text in (False, True):
            message = {**_message("assistant", ""), "tool_calls": [_with_text(call) if as_text else call]}
            if _OTHER in (self._try([question, message], tools=[_TOOL]) or ""):
                self.arguments_as_text, self._called = as_text, message
                return

    def _learn_ends(self, pair: str, question: Message, answer: Message) -> None:
        """Determine the tokens that end a turn: behind a text, behind a call, or the marker of the following role."""
        tokenizer = self._tokenizer
        # Without added tokens, (?!) matches nothing.
        self._added = re.compile("|".join(map(re.escape, matched_tokens(tokenizer))) or "(?!)")
        closing = self._added.search(pair, pair.index(_ANSWER) + len(_ANSWER))
        self.end_of_turn: str | None = closing[0] if closing else None
        # For a template that closes no turn: role of the next message -> the token that follows an answer.
        self._followers: dict[str, str] = {}
        self.appends_end_of_turn = self.end_of_turn is None
        if self.end_of_turn is None:
            for role in ("user", "tool"):
                text = self._try([question, answer, _message(role, _OTHER)]) or ""
                start, end = text.find(_ANSWER) + len(_ANSWER), text.find(_OTHER)
                marker = self._added.match(text[start:end].lstrip()) if start < end else None
                if marker is not None:
                    self._followers[role] = marker[0]
            self.appends_end_of_turn = "user" not in self._followers
        ends = [self.end_of_turn or self.follower("user"), *self._followers.values()]
        if self._called is not None:
            text = self._try([question, self._called], tools=[_TOOL]) or ""
            ends.append(self.turn_end(text, text.rindex(_OTHER) + len(_OTHER), "tool")[1])
        self.stop_tokens = list(dict.fromkeys(ends))
        self.stop_ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in self.stop_tokens]
        own_end = pair.index(_ANSWER) + len(_ANSWER)
        text, stop = self.turn_end(pair, own_end, "user")
        # The text between a content and the stop token, without a token of its own.
        self.closer = text[own_end:].removesuffix(stop)

    def follower(self, role: str | None) -> str:
        """Return the token that ends a turn that the template does not close.

        Args:
            role: of the next message; None behind the last one.

        Raises:
            UserError: neither the template nor the tokenizer has such a token.
        """
        marker = self._followers.get(role or "user", self._tokenizer.eos_token)
        if marker is None:
            raise UserError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        return str(marker)

    def turn_end(self, text: str, own_end: int, following: str | None) -> tuple[str, str]:
        """Return the text of a chat up to the stop token of its last turn, and this token.

        Args:
            text: the chat up to the turn.
            own_end: the end of the message's texts in it.
            following: the role of the next message; None behind the last one.
        """
        behind = list(self._added.finditer(text, own_end)) if self.end_of_turn else []
        if behind:
            closing = next((token for token in behind if token[0] == self.end_of_turn), behind[-1])
            return text[: closing.end()], closing[0]
        stop = self.follower(following)
        if stop == self._tokenizer.eos_token and stop not in self._followers.values():
            text = text[: max(own_end, len(text.rstrip()))]
        return text + stop, stop


def _message(role: str, content: str) -> JsonObject:
    return {"role": role, "content": content}


def _with_text(call: Message) -> JsonObject:
    """Return a tool call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
