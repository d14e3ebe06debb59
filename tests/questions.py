"""Questions to ask tiny models, and a way to make a model say what a test needs."""

from collections.abc import Sequence
from typing import Any

import torch

from stepjepa.chat.special_tokens import add_predictor_tokens
from stepjepa.data.record import Record
from stepjepa.models.presets import train_tokenizer
from tiny import make_model, make_record

QUESTIONS = ["2+2?", "Say a colour, any colour at all, but just one", "1+1", "Why?\nBecause of the rain, or not?", "Go"]
ANSWERS = ["4", "Red é ☂", "2", "Because it rained.", "Stop there"]
# Most tokens of an answer.
NEW = 11


def question_records() -> Sequence[Record]:
    """The questions with a system prompt and their answers."""
    return [
        make_record("Answer.", question, answer, line=line)
        for line, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True), start=1)
    ]


def make_tokenizer() -> Any:
    """A tokenizer for the questions, with two predictor tokens."""
    tokenizer = train_tokenizer([*QUESTIONS, *ANSWERS], 331)
    add_predictor_tokens(tokenizer, 2)
    return tokenizer


def push(model: Any, token: int, strength: float) -> Any:
    """A copy of a model whose head has a bias towards a token, or away from it."""
    other = make_model("llama", vocab_size=model.config.vocab_size)
    other.load_state_dict(model.state_dict())
    head = torch.nn.Linear(*reversed(other.lm_head.weight.shape))
    with torch.no_grad():
        head.weight.copy_(other.lm_head.weight)
        head.bias.zero_()
        head.bias[token] = strength
    other.lm_head = head
    return other
