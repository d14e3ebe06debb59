"""Find the content of a generated answer: the text behind a thought, or in harmony's final channel."""

import re

from stepjepa.chat.thought import has_tag, last_tag, opening_tag, thought_in

# It ends before the next such header, so that a model that repeats one takes linear time.
_FINAL = re.compile(r"<\|channel\|>final\b(?:(?!<\|message\|>|<\|channel\|>final\b).)*<\|message\|>", re.DOTALL)
_END = re.compile(r"<\|(?:return|end|start|call)\|>")
# Harmony's format decoded without its special tokens, as by other programs.
_BARE = re.compile(r"\A\s*(?:analysis|commentary).*assistantfinal", re.DOTALL)


def content_part(text: str, *, in_thought: bool = False) -> str:
    """Return the content of an answer; empty if its thought has no end.

    Args:
        text: the generated text.
        in_thought: the prompt has opened a thought, as DeepSeek-R1's ends in ``<think>``.
    """
    if (final := list(_FINAL.finditer(text))) or "<|channel|>" in text:
        return _END.split(text[final[-1].end() :], maxsplit=1)[0] if final else ""
    if (bare := _BARE.match(text)) is not None:
        return text[bare.end() :]
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    if (thought := thought_in(text, opened=in_thought)) is not None:
        return text[thought.answer :]
    tag = last_tag(text)
    begins = tag is not None and tag.is_open and not text[: tag.start].strip()
    return "" if in_thought or begins else text


def separates_thought(text: str) -> bool:
    """Return whether a text separates thoughts from content; if special tokens do so, decoding must keep them."""
    return has_tag(text) or "<|channel|>" in text


def opens_thought(prompt: str | None) -> bool:
    """Return whether a prompt ends inside a thought."""
    return prompt is not None and opening_tag(prompt) is not None
