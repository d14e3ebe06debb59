"""Messages from whose rendering the properties of a chat template are derived."""

from stepjepa.base.json_object import JsonObject
from stepjepa.chat.tool_calls import with_text_arguments

# Private-use characters: no template writes them and no ordinary text holds them. They have no case, so a template that
# changes the case of contents is refused where it changes a record's, not as one that leaves out messages.
ASKED, ANSWER, THOUGHT, OTHER = (f"\ue000{character}\ue001" for character in "\ue010\ue011\ue012\ue013")

FUNCTION = "name_of_a_function"
TOOL: JsonObject = {
    "type": "function",
    "function": {"name": FUNCTION, "description": "about", "parameters": {"type": "object", "properties": {}}},
}


def make_message(role: str, content: str) -> JsonObject:
    """Return a message."""
    return {"role": role, "content": content}


QUESTION, REPLY = make_message("user", ASKED), make_message("assistant", ANSWER)


def calling_message(*, as_text: bool) -> JsonObject:
    """Return a message that calls :data:`TOOL` with the argument :data:`OTHER`, as an object or as JSON text."""
    # Mistral's templates require an id of nine characters.
    call = {"type": "function", "id": "call00001", "function": {"name": FUNCTION, "arguments": {"key": OTHER}}}
    return {**make_message("assistant", ""), "tool_calls": [with_text_arguments(call) if as_text else call]}
