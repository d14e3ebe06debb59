"""Generate word problems in the form of GSM8K: each step needs the result of the step before it.

A problem is a chain of operations on one amount. The question states only the numbers by which the amount changes. No
result, the last one included, is a number of the question, so neither a step nor the answer can be copied from it.
The words of the stories are in ``stepmath.yaml``.
"""

import operator
import random
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import yaml

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.config.option import FROM_TWO, check_values, option
from stepjepa.data.record import Record
from stepjepa.tasks.generic import BoxedTask
from stepjepa.tasks.raw_values import chat_record

MAX_STEPS = 8
# Draws in a row without a new problem after which the problems of a difficulty count as exhausted.
_PATIENCE = 2000

_WORDS = yaml.safe_load(resources.files("stepjepa.tasks").joinpath("stepmath.yaml").read_text("utf-8"))
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "share": "/", "double": "*", "halve": "/"}
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class StepmathTask(BoxedTask):
    """The problems of ``stepjepa prepare stepmath``: as ``boxed``, recognised by their system prompt."""

    name = "stepmath"
    detection_order = 0  # recognised by its prompt, not by its answers as BoxedTask
    system_prompt = "Solve the problem step by step. Put the answer in \\boxed{}."

    @classmethod
    def recognises(cls, record: Record) -> bool:
        return super(BoxedTask, cls).recognises(record)


@dataclass(frozen=True)
class Difficulty:
    """Difficulty of the problems; limits of amounts apply to the first, the intermediate and the last one."""

    min_steps: int = option(2, "fewest steps of a problem", metavar="N", allowed=FROM_TWO)
    max_steps: int = option(3, "most steps of a problem", metavar="N")
    max_quantity: int = option(10, "largest number by which an amount changes", metavar="N")
    max_amount: int = option(50, "largest amount, also as a result", metavar="N")

    def __post_init__(self) -> None:
        check_values(self)
        if not self.min_steps <= self.max_steps <= MAX_STEPS:
            raise UserError(f"max_steps: expected {self.min_steps} (min_steps) to {MAX_STEPS}, got {self.max_steps}")


class _Move(NamedTuple):
    """One operation on an amount, with the number that the question states for it."""

    operation: str
    amount: int
    number: int

    @property
    def result(self) -> int:
        return int(_APPLY[_SIGNS[self.operation]](self.amount, self.number))

    @property
    def equation(self) -> str:
        return f"{self.amount} {_SIGNS[self.operation]} {self.number}"


def _choices(level: Difficulty, moves: list[_Move]) -> dict[str, list[_Move]]:
    """Return the possible next moves, by operation, after the given moves (which may be none).

    Amounts stay whole, positive and within the difficulty. No result may be stated in the question or occur twice: the
    steps between would be superfluous.
    """
    results = {move.result for move in moves}
    used = results | {move.number for move in moves} | {move.amount for move in moves[:1]}
    choices = {}
    for operation, sign in _SIGNS.items():
        # A first amount that shrinks may be high.
        amounts = range(2, (level.max_amount if sign in "-/" else level.max_quantity) + 1)
        # Multiplying and dividing by two are separate operations, double and halve.
        numbers = range(1 if sign in "+-" else 3, level.max_quantity + 1)
        choices[operation] = [
            move
            for amount in ([moves[-1].result] if moves else amounts)
            for number in ([2] if operation in ("double", "halve") else numbers)
            if (sign != "/" or amount % number == 0)
            and 1 <= (move := _Move(operation, amount, number)).result <= level.max_amount
            and number not in results
            and move.result not in {*used, amount, number}
        ]
    return {operation: candidates for operation, candidates in choices.items() if candidates}


def _draw_moves(draw: random.Random, first: dict[str, list[_Move]], level: Difficulty) -> list[_Move] | None:
    """Draw a chain of moves that begins with one of ``first``; None if it reaches a dead end."""
    count = draw.randint(level.min_steps, level.max_steps)
    moves: list[_Move] = []
    while choices := _choices(level, moves) if moves else first:
        moves.append(draw.choice(choices[draw.choice(list(choices))]))
        if len(moves) == count:
            return moves
    return None


def _tell(draw: random.Random, moves: list[_Move]) -> tuple[str, str]:
    """Write a story for the moves: the question, and a solution with one sentence per step."""
    names = draw.sample(_WORDS["names"], len(_WORDS["names"]))
    thing, box = draw.choice(_WORDS["things"]), draw.choice(_WORDS["boxes"])
    who = names.pop()
    sentences, steps = [], []

    def counted(number: int, noun: str) -> str:
        return f"{number} {noun if number == 1 else plural(noun)}"

    def plural(noun: str) -> str:
        return str(_WORDS["plurals"].get(noun, f"{noun}s"))

    for position, move in enumerate(moves):
        story, _, solution = draw.choice(_WORDS["turns" if position else "openings"][move.operation]).partition(" | ")
        words = {"who": who, "other": names.pop(), "things": plural(thing), "box": box, "n": move.number}
        words |= {"a_things": counted(move.amount, thing), "n_things": counted(move.number, thing)}
        words |= {"n_boxes": counted(move.number, box)}
        sentences.append(story.format(**words))
        steps.append(f"{solution.format(**words)}: {move.equation} = {counted(move.result, thing)}.")
        if solution.startswith("{other}"):
            who = words["other"]
    sentences.append(draw.choice(_WORDS["questions"]).format(who=who, things=plural(thing)))
    return " ".join(sentences), "\n\n".join(steps) + f" The answer is \\boxed{{{moves[-1].result}}}."


def _draw_records(
    size: int, seed: str, level: Difficulty, name: str, *, avoid: Collection[str] = (), once: bool = False
) -> tuple[list[JsonObject], set[str]]:
    """Draw records with unique questions, no chain of ``avoid``, and with ``once`` unique chains; and the chains."""
    draw = random.Random(seed)
    first = _choices(level, [])
    records: dict[str, JsonObject] = {}
    chains: set[str] = set()
    failures = 0
    while len(records) < size and failures < _PATIENCE:
        failures += 1
        moves = _draw_moves(draw, first, level)
        if moves is None:
            continue
        chain = ", ".join(move.equation for move in moves)
        question, solution = _tell(draw, moves)
        if chain in avoid or (once and chain in chains) or question in records:
            continue
        fields = {"question": question, "answer": solution, "ground_truth": str(moves[-1].result)}
        prompt = StepmathTask.system_prompt
        records[question] = chat_record(prompt, question, solution, **fields, total_steps=len(moves))
        chains.add(chain)
        failures = 0
    if len(records) < size:
        fault = f"{name}: this difficulty gives only {len(records)} different problems, and {size} were asked for"
        raise UserError(f"{fault}; ask for fewer, or allow more steps or larger numbers")
    return list(records.values()), chains


def generate(size: int, seed: int, difficulty: Difficulty | None = None) -> list[JsonObject]:
    """Generate records of unique problems; a larger set begins with a smaller one. UserError if there are too few.

    Args:
        size: number of records.
        seed: the same seed gives the same records.
        difficulty: number of steps and sizes of numbers; None for the default.
    """
    return _draw_records(size, f"stepmath {seed}", difficulty or Difficulty(), "size")[0]


def generate_split(
    train_size: int, test_size: int, seed: int, difficulty: Difficulty | None = None
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Generate training and test records; the chain of equations of a test record occurs in no other record.

    The test records do not depend on ``train_size``, so training sets of several sizes share one test set.

    Args:
        train_size: number of training records.
        test_size: number of test records.
        seed: of the problems.
        difficulty: None for the defaults.

    Raises:
        UserError: this difficulty has fewer different problems.
    """
    level = difficulty or Difficulty()
    test, chains = _draw_records(test_size, f"stepmath {seed} test", level, "test_size", once=True)
    return _draw_records(train_size, f"stepmath {seed} train", level, "train_size", avoid=chains)[0], test
