"""Answer questions greedily, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

from stepjepa.base.arguments import check_number
from stepjepa.base.errors import UserError, naming_batch_size
from stepjepa.models.generation import Generator
from stepjepa.objectives.inputs import Question, note_without_use


def answer_all(generator: Generator, questions: Sequence[Question], batch_size: int) -> list[str]:
    """Answer questions by a model in evaluation mode; parts that its template does not read are noted.

    Args:
        generator: the model, with the most tokens of an answer.
        questions: chats up to the turn to be generated.
        batch_size: prompts at a time.

    Returns:
        The texts before the first stop token, without special tokens.

    Raises:
        UserError: the chat template refuses a chat, or the longest prompt with an answer exceeds the model's positions.
    """
    check_number("batch_size", batch_size)
    note_without_use(generator.template, questions)
    prompts = [generator.prompt_ids(*question) for question in questions]
    longest = max(map(len, prompts), default=0) + generator.sampling.max_new_tokens
    if generator.positions is not None and longest > generator.positions:
        message = f"prompt and answer have up to {longest} tokens, the model {generator.positions} positions"
        raise UserError(f"{message}; lower max_new_tokens or shorten the question")
    texts: list[str] = []
    with naming_batch_size(batch_size):
        for start in range(0, len(prompts), batch_size):
            answers = generator.answer(prompts[start : start + batch_size])
            texts += [samples[0].text for samples in answers]
    return texts
