"""Word problems in the shape of GSM8K, made on the spot: each step needs the result of the step before it.

A problem is a chain of operations on one amount. Only the numbers by which the amount changes are told; no result on
the way, the last one included, is a number of the question, so that no step and no answer can be copied from there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepjepa.tasks.stepmath_stories import (
    BOXES,
    NAMES,
    OPENINGS,
    QUESTIONS,
    THINGS,
    TURNS,
    Phrase,
    counted,
)

SYSTEM_PROMPT = "Solve the problem step by step. Put the answer in \\boxed{}."

OPERATIONS = ("add", "subtract", "multiply", "share", "double", "halve")
MAX_STEPS = 8

# Draws in a row that bring nothing new before the problems of a difficulty count as used up.
_PATIENCE = 2000

_RESULTS: dict[str, Callable[[int, int], int]] = {
    "add": lambda amount, number: amount + number,
    "subtract": lambda amount, number: amount - number,
    "multiply": lambda amount, number: amount * number,
    "share": lambda amount, number: amount // number,
    "double": lambda amount, number: amount * 2,
    "halve": lambda amount, number: amount // 2,
}
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "share": "/", "double": "*", "halve": "/"}


@dataclass(frozen=True)
class Difficulty:
    """How hard the problems are.

    Attributes:
        min_steps: fewest operations in a problem, 2 or more.
        max_steps: most operations in a problem, 8 at most.
        max_quantity: largest number by which an amount changes, 4 or more.
        max_amount: largest amount, at the start, on the way and as the answer; not below ``max_quantity``.
        operations: which operations there are, some of :data:`OPERATIONS`.

    Raises:
        ValueError: a field is outside its range.
    """

    min_steps: int = 2
    max_steps: int = 3
    max_quantity: int = 10
    max_amount: int = 50
    operations: tuple[str, ...] = OPERATIONS

    def __post_init__(self) -> None:
        """Check every field."""
        if self.min_steps < 2:
            raise ValueError(f"min_steps: expected 2 or more, got {self.min_steps}")
        if not self.min_steps <= self.max_steps <= MAX_STEPS:
            raise ValueError(f"max_steps: expected {self.min_steps} (min_steps) to {MAX_STEPS}, got {self.max_steps}")
        if self.max_quantity < 4:
            raise ValueError(f"max_quantity: expected 4 or more, got {self.max_quantity}")
        if self.max_amount < self.max_quantity:
            raise ValueError(f"max_amount: expected {self.max_quantity} (max_quantity) or more, got {self.max_amount}")
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(
                f"operations: expected different ones of {', '.join(OPERATIONS)}, "
                f"got {', '.join(self.operations) or 'none'}"
            )


class _Move(NamedTuple):
    """One operation: what it does to an amount, and the number told for it."""

    operation: str
    amount: int
    number: int

    @property
    def result(self) -> int:
        return _RESULTS[self.operation](self.amount, self.number)

    @property
    def equation(self) -> str:
        return f"{self.amount} {_SIGNS[self.operation]} {self.number}"


# What makes two problems the same whatever the story: their equations.
_Chain = tuple[str, ...]


def _numbers(operation: str, amount: int, difficulty: Difficulty) -> Iterator[_Move]:
    """The moves of an operation from an amount that stay whole, positive and within the difficulty."""
    if operation in ("double", "halve"):
        numbers = range(2, 3)
    else:
        # Twice and half have words of their own, so sharing among two and taking two times are left to them.
        numbers = range(1 if operation in ("add", "subtract") else 3, difficulty.max_quantity + 1)
    for number in numbers:
        move = _Move(operation, amount, number)
        if operation in ("share", "halve") and amount % number:
            continue
        if 1 <= move.result <= difficulty.max_amount:
            yield move


def _openings(difficulty: Difficulty) -> dict[str, list[_Move]]:
    """The first moves by operation: both numbers are told, and the result is neither."""
    moves: dict[str, list[_Move]] = {}
    for operation in difficulty.operations:
        # An amount that shrinks may start high.
        shrinks = operation in ("subtract", "share", "halve")
        amounts = range(2, (difficulty.max_amount if shrinks else difficulty.max_quantity) + 1)
        found = [move for amount in amounts for move in _numbers(operation, amount, difficulty)]
        found = [move for move in found if move.result not in (move.amount, move.number)]
        if found:
            moves[operation] = found
    return moves


def _draw_moves(draw: random.Random, openings: dict[str, list[_Move]], difficulty: Difficulty) -> list[_Move] | None:
    """A chain of moves; None where it ran into a dead end."""
    if not openings:
        return None
    count = draw.randint(difficulty.min_steps, difficulty.max_steps)
    moves = [draw.choice(openings[draw.choice(list(openings))])]
    told = {moves[0].amount, moves[0].number}
    results = {moves[0].result}
    while len(moves) < count:
        choices: dict[str, list[_Move]] = {}
        for operation in difficulty.operations:
            fitting = [
                move
                for move in _numbers(operation, moves[-1].result, difficulty)
                # No result may be told anywhere, nor come back: it would make the steps between superfluous.
                if move.number not in results and move.result not in told | results | {move.number}
            ]
            if fitting:
                choices[operation] = fitting
        if not choices:
            return None
        moves.append(draw.choice(choices[draw.choice(list(choices))]))
        told.add(moves[-1].number)
        results.add(moves[-1].result)
    return moves


def _tell(draw: random.Random, moves: list[_Move]) -> tuple[str, list[str]]:
    """A story for the moves: the question, and one sentence a step."""
    names = draw.sample(NAMES, len(NAMES))
    thing = draw.choice(THINGS)
    box = draw.choice(BOXES)
    holder = names.pop()
    sentences: list[str] = []
    steps: list[str] = []
    for position, move in enumerate(moves):
        phrase: Phrase = draw.choice((TURNS if position else OPENINGS)[move.operation])
        other = names.pop()
        owner = other if phrase.passes_on else holder
        words = {
            "who": holder,
            "other": other,
            "things": thing.plural,
            "box": box.singular,
            "a": move.amount,
            "a_things": counted(move.amount, thing),
            "a_boxes": counted(move.amount, box),
            "n": move.number,
            "n_things": counted(move.number, thing),
            "n_boxes": counted(move.number, box),
            "equation": f"{move.equation} = {counted(move.result, thing)}",
        }
        sentences.append(phrase.story.format(**words))
        steps.append(phrase.solution.format(**words))
        holder = owner
    sentences.append(draw.choice(QUESTIONS).format(who=holder, things=thing.plural))
    return " ".join(sentences), steps


def _record(question: str, steps: list[str], answer: int) -> dict[str, Any]:
    solution = "\n\n".join([*steps[:-1], f"{steps[-1]} The answer is \\boxed{{{answer}}}."])
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
            {"role": "assistant", "content": solution},
        ],
        "question": question,
        "answer": solution,
        "ground_truth": str(answer),
        "total_steps": len(steps),
    }


def _draw_records(
    size: int, draw: random.Random, difficulty: Difficulty, *, avoid: set[_Chain], once: bool, name: str
) -> tuple[list[dict[str, Any]], set[_Chain]]:
    """Records with different questions, and their chains.

    Args:
        size: how many.
        draw: where chance comes from.
        difficulty: of the problems.
        avoid: chains that none may have.
        once: whether every chain may occur only once, or again with another story.
        name: of the size, for the error message.
    """
    openings = _openings(difficulty)
    records: list[dict[str, Any]] = []
    questions: set[str] = set()
    chains: set[_Chain] = set()
    failures = 0
    while len(records) < size:
        moves = _draw_moves(draw, openings, difficulty)
        if moves is not None:
            chain = tuple(move.equation for move in moves)
            question, steps = _tell(draw, moves)
            if chain not in avoid and not (once and chain in chains) and question not in questions:
                records.append(_record(question, steps, moves[-1].result))
                questions.add(question)
                chains.add(chain)
                failures = 0
                continue
        failures += 1
        if failures == _PATIENCE:
            raise ValueError(
                f"{name}: expected a size that this difficulty has problems for, got {size} and found {len(records)}; "
                "ask for fewer, or allow more steps, larger numbers or more operations"
            )
    return records, chains


def _check_size(size: int, name: str) -> None:
    if size < 0:
        raise ValueError(f"{name}: expected 0 or more, got {size}")


def generate(size: int, seed: int, difficulty: Difficulty | None = None) -> list[dict[str, Any]]:
    """Make problems, no two with the same question.

    Args:
        size: how many.
        seed: the same seed gives the same records; a smaller size gives the first of them.
        difficulty: the default one if None.

    Returns:
        Records with ``messages``, ``question``, ``answer`` (the full solution), ``ground_truth`` and ``total_steps``.

    Raises:
        ValueError: the size is negative, or larger than the number of problems of that difficulty.
    """
    _check_size(size, "size")
    draw = random.Random(f"stepmath {seed}")
    records, _ = _draw_records(size, draw, difficulty or Difficulty(), avoid=set(), once=False, name="size")
    return records


def generate_split(
    train_size: int, test_size: int, seed: int, difficulty: Difficulty | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make problems to train on and problems to test with, none in both.

    Two problems are the same if their equations are, whatever the story: a test problem's chain of equations occurs
    in no training record, and in no other test record. The test records depend on ``test_size``, not on
    ``train_size``, so training sets of several sizes share one test set.

    Args:
        train_size: how many to train on.
        test_size: how many to test with.
        seed: the same seed gives the same records.
        difficulty: the default one if None.

    Returns:
        The training records and the test records.

    Raises:
        ValueError: a size is negative, or there are too few problems of that difficulty.
    """
    _check_size(train_size, "train_size")
    _check_size(test_size, "test_size")
    difficulty = difficulty or Difficulty()
    test, chains = _draw_records(
        test_size, random.Random(f"stepmath {seed} test"), difficulty, avoid=set(), once=True, name="test_size"
    )
    train, _ = _draw_records(
        train_size, random.Random(f"stepmath {seed} train"), difficulty, avoid=chains, once=False, name="train_size"
    )
    return train, test
