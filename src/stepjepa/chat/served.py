"""The prompts that a server makes from a saved folder, by plain ``apply_chat_template`` without code of stepjepa.

Prompts of training, evaluation and export are compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.base.common_beginning import common_length
from stepjepa.base.errors import UserError, one_line, shown
from stepjepa.chat.marks import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AROUND = 8  # tokens that a message shows before the first difference of two prompts


def trained_turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the messages of a chat that are trained."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1) != 0
    ]


def served_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Return the token ids that transformers, and servers that use it, make from a chat for its next turn.

    Args:
        tokenizer: as plain transformers loads it.
        messages: the chat so far, in the form that its template reads (``ChatTemplate.normalise``).
        tools: descriptions of functions.
        variables: of the template, ``chat_template_kwargs`` of a request.

    Raises:
        UserError: the template refuses the chat.
    """
    try:
        ids: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else list(tools),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(variables or {}),
        )
    except Exception as error:  # a template is a program and can raise any error
        raise UserError(f"plain apply_chat_template refuses the chat ({one_line(error)})") from None
    return [int(index) for index in ids]


def difference(
    tokenizer: PreTrainedTokenizerBase,
    served: Sequence[int],
    asked: Sequence[int],
    server: str = "plain apply_chat_template",
) -> str | None:
    """Describe where the prompt of a server and that of training or evaluation differ; None if they are equal.

    Args:
        tokenizer: decodes the tokens around the difference.
        served: tokens of the server's prompt.
        asked: tokens of the prompt of training or evaluation.
        server: the name of the server, for the description.
    """
    if list(served) == list(asked):
        return None
    begin = max(common_length(served, asked) - _AROUND, 0)
    ends = [_text(tokenizer, ids[begin : begin + 2 * _AROUND]) for ids in (served, asked)]
    if ends[0] == ends[1]:
        ends = [
            f"{end} as {list(ids[begin : begin + 2 * _AROUND])}" for end, ids in zip(ends, (served, asked), strict=True)
        ]
    return f"{server} gives {ends[0]} instead of {ends[1]}"


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return shown(str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)))
