"""Word problems in the shape of GSM8K, generated: each step needs the result of the step before it.

A problem is a chain of operations on one amount. Only the numbers by which the amount changes are told; no result on
the way, the last one included, is a number of the question, so that no step and no answer can be copied from there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepjepa.tasks.base import chat_record, task
from stepjepa.tasks.boxed import BoxedTask
from stepjepa.tasks.stepmath_stories import BOXES, NAMES, OPENINGS, QUESTIONS, THINGS, TURNS, counted

MAX_STEPS = 8

# Draws in a row that bring nothing new before the problems of a difficulty count as used up.
_PATIENCE = 2000


@task("stepmath")
class StepmathTask(BoxedTask):
    """The problems of ``stepjepa prepare stepmath``: as ``boxed``, known by their system prompt."""

    system_prompt = "Solve the problem step by step. Put the answer in \\boxed{}."

    @classmethod
    def recognises(cls, record: Any) -> bool:
        return cls.is_of_data_set(record)


class _Operation(NamedTuple):
    sign: str
    apply: Callable[[int, int], int]
    shrinks: bool = False


_OPERATIONS = {
    "add": _Operation("+", lambda amount, number: amount + number),
    "subtract": _Operation("-", lambda amount, number: amount - number, shrinks=True),
    "multiply": _Operation("*", lambda amount, number: amount * number),
    "share": _Operation("/", lambda amount, number: amount // number, shrinks=True),
    "double": _Operation("*", lambda amount, number: amount * number),
    "halve": _Operation("/", lambda amount, number: amount // number, shrinks=True),
}
OPERATIONS = tuple(_OPERATIONS)


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
            got = ", ".join(self.operations) or "none"
            raise ValueError(f"operations: expected different ones of {', '.join(OPERATIONS)}, got {got}")


class _Move(NamedTuple):
    """One operation: what it does to an amount, and the number told for it."""

    operation: str
    amount: int
    number: int

    @property
    def result(self) -> int:
        return _OPERATIONS[self.operation].apply(self.amount, self.number)

    @property
    def equation(self) -> str:
        return f"{self.amount} {_OPERATIONS[self.operation].sign} {self.number}"


def _moves_from(operation: str, amount: int, difficulty: Difficulty) -> Iterator[_Move]:
    """The moves of an operation from an amount that stay whole, positive and within the difficulty."""
    if operation in ("double", "halve"):
        numbers = range(2, 3)
    else:
        # Twice and half have words of their own, so sharing among two and taking two times are left to them.
        numbers = range(1 if operation in ("add", "subtract") else 3, difficulty.max_quantity + 1)
    for number in numbers:
        move = _Move(operation, amount, number)
        whole = operation not in ("share", "halve") or amount % number == 0
        if whole and 1 <= move.result <= difficulty.max_amount:
            yield move


def _first_moves(difficulty: Difficulty) -> dict[str, list[_Move]]:
    """The first moves by operation: both numbers are told, and the result is neither."""
    moves = {}
    for operation in difficulty.operations:
        # An amount that shrinks may start high.
        most = difficulty.max_amount if _OPERATIONS[operation].shrinks else difficulty.max_quantity
        found = [move for amount in range(2, most + 1) for move in _moves_from(operation, amount, difficulty)]
        moves[operation] = [move for move in found if move.result not in (move.amount, move.number)]
    return {operation: found for operation, found in moves.items() if found}


def _draw_move(draw: random.Random, choices: dict[str, list[_Move]]) -> _Move | None:
    return draw.choice(choices[draw.choice(list(choices))]) if choices else None


def _draw_moves(draw: random.Random, first: dict[str, list[_Move]], difficulty: Difficulty) -> list[_Move] | None:
    """A chain of moves; None where it ran into a dead end."""
    if not first:
        return None
    count = draw.randint(difficulty.min_steps, difficulty.max_steps)
    moves: list[_Move] = []
    move = _draw_move(draw, first)
    while move is not None:
        moves.append(move)
        if len(moves) == count:
            return moves
        told = {moves[0].amount, *(each.number for each in moves)}
        results = {each.result for each in moves}
        choices = {
            operation: [
                each
                for each in _moves_from(operation, move.result, difficulty)
                # No result may be told anywhere, nor come back: it would make the steps between superfluous.
                if each.number not in results and each.result not in told | results | {each.number}
            ]
            for operation in difficulty.operations
        }
        move = _draw_move(draw, {operation: found for operation, found in choices.items() if found})
    return None


def _tell(draw: random.Random, moves: list[_Move]) -> tuple[str, list[str]]:
    """A story for the moves: the question, and one sentence a step."""
    names = draw.sample(NAMES, len(NAMES))
    thing = draw.choice(THINGS)
    box = draw.choice(BOXES)
    holder = names.pop()
    sentences: list[str] = []
    steps: list[str] = []
    for position, move in enumerate(moves):
        phrase = draw.choice((TURNS if position else OPENINGS)[move.operation])
        other = names.pop()
        words = {
            "who": holder,
            "other": other,
            "things": thing.plural,
            "box": box.singular,
            "n": move.number,
            "a_things": counted(move.amount, thing),
            "n_things": counted(move.number, thing),
            "n_boxes": counted(move.number, box),
            "equation": f"{move.equation} = {counted(move.result, thing)}",
        }
        sentences.append(phrase.story.format(**words))
        steps.append(phrase.solution.format(**words))
        holder = other if phrase.passes_on else holder
    sentences.append(draw.choice(QUESTIONS).format(who=holder, things=thing.plural))
    return " ".join(sentences), steps


def _make_record(question: str, steps: list[str], answer: int) -> dict[str, Any]:
    solution = "\n\n".join([*steps[:-1], f"{steps[-1]} The answer is \\boxed{{{answer}}}."])
    fields = {"question": question, "answer": solution, "ground_truth": str(answer), "total_steps": len(steps)}
    return chat_record(StepmathTask.system_prompt, question, solution, **fields)


# What makes two problems the same whatever the story: their equations.
_Chain = tuple[str, ...]


def _draw_records(
    size: int, chance: str, difficulty: Difficulty, name: str, *, avoid: Collection[_Chain] = (), once: bool = False
) -> tuple[list[dict[str, Any]], set[_Chain]]:
    """Records with different questions, and their chains of equations.

    Args:
        size: how many.
        chance: seed of the draws.
        difficulty: of the problems.
        name: of the size, for the error message.
        avoid: chains that none may have.
        once: every chain may occur only once, not again with another story.

    Raises:
        ValueError: the size is negative, or larger than the number of problems of that difficulty.
    """
    if size < 0:
        raise ValueError(f"{name}: expected 0 or more, got {size}")
    draw = random.Random(chance)
    first = _first_moves(difficulty)
    records: list[dict[str, Any]] = []
    questions: set[str] = set()
    chains: set[_Chain] = set()
    failures = 0
    while len(records) < size:
        moves = _draw_moves(draw, first, difficulty)
        if moves is not None:
            chain = tuple(move.equation for move in moves)
            question, steps = _tell(draw, moves)
            if chain not in avoid and not (once and chain in chains) and question not in questions:
                records.append(_make_record(question, steps, moves[-1].result))
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
    return _draw_records(size, f"stepmath {seed}", difficulty or Difficulty(), "size")[0]


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
    level = difficulty or Difficulty()
    test, chains = _draw_records(test_size, f"stepmath {seed} test", level, "test_size", once=True)
    train, _ = _draw_records(train_size, f"stepmath {seed} train", level, "train_size", avoid=chains)
    return train, test
