"""Chats of which only a question is read, although its answer has what the chat template can't write."""

from stepjepa.base.json_object import JsonObject
from stepjepa.chat.marks import REASONING_KEYS
from stepjepa.chat.thought import thought_in
from stepjepa.chat.turns import TurnError
from stepjepa.views.layouts import message_text


def before_unread_answer(messages: tuple[JsonObject, ...], error: TurnError) -> tuple[JsonObject, ...] | None:
    """Return a chat up to the answer that can't be trained; None if its questions need that answer.

    They don't if it answers the last question, by a tool call or with a thought. A template that can't write a text
    alone is at fault itself.

    Args:
        messages: the whole chat.
        error: of its answer.
    """
    answer, behind = messages[error.message], messages[error.message + 1 :]
    more_than_text = answer.get("tool_calls") or any(answer.get(key) for key in REASONING_KEYS)
    is_asked_again = any(message["role"] == "user" and message_text(message) for message in behind)
    if is_asked_again or not (more_than_text or thought_in(str(answer["content"]))):
        return None
    return messages[: error.message]
