"""Render messages by a compiled chat template, without the tokenizer's method, whose overhead is larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepjepa.base.errors import UserError
from stepjepa.chat.compiling import compile_template, jinja_message
from stepjepa.chat.turn_text import Tools, Variables


class Renderer:
    """Renders messages by a chat template with the special tokens of a tokenizer.

    Args:
        source: the template.
        special_tokens: name of a variable, such as ``bos_token`` -> text of the token.

    Raises:
        UserError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, object]) -> None:
        self.source, self._special_tokens, self._compiled = source, special_tokens, compile_template(source)

    @property
    def only_adds_text(self) -> bool:
        """Whether the text of every chat begins with that of the chat's beginning, see ``chat.growth``."""
        return self._compiled.marked is not None

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads and a caller may set, special tokens included."""
        return self._compiled.variables

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        prompt: bool = False,
        tools: Tools = None,
        variables: Variables = None,
        marked: bool = False,
    ) -> str:
        """Render messages.

        Args:
            messages: in the form that the template reads, see ``ChatTemplate.normalise``.
            prompt: add a generation prompt.
            tools: descriptions of functions.
            variables: values of the template's variables.
            marked: write ``growth.MARK`` around each message; no effect unless ``only_adds_text``.

        Raises:
            UserError: the template refuses the messages.
        """
        template, with_marks = self._compiled.template, self._compiled.marked
        if marked and with_marks is not None:
            template = with_marks
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
            fault = f"the chat template refuses these messages ({jinja_message(error)})"
            raise UserError(f"{fault}; change them, or name another `chat_template`") from None

    def attempt(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        prompt: bool = False,
        tools: Tools = None,
        variables: Variables = None,
    ) -> str | None:
        """Render messages as :meth:`render`; None if the template refuses them."""
        try:
            return self.render(messages, prompt=prompt, tools=tools, variables=variables)
        except UserError:
            return None
