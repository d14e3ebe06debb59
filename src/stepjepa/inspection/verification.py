"""Checks on a user's own model and data: is what will be trained what was meant?

Each check compares a fast path with a slow, obvious one on the very model, tokenizer and records that training would
use, and returns a line that says what was compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import IGNORE, Forest, Segment, path
from stepjepa.forests.masks import batch_visibility, visible
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.architecture import find_decoder
from stepjepa.models.probe import choose_encoding
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.alignment import L2, MSE, Cosine, InfoNCE
from stepjepa.objectives.objective import Objective
from stepjepa.text.predictors import predictor_ids

# A whole float32 forward pass in another order of additions: relative to the largest number compared.
TOLERANCE = 1e-4


class Result(NamedTuple):
    """One line of the report.

    Attributes:
        name: what was checked.
        passed: how it went.
        detail: what was compared, with figures.
    """

    name: str
    passed: bool
    detail: str


class CheckError(Exception):
    """A check did not hold; the message says how."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckError(message)


@dataclass
class Subject:
    """What is verified.

    Attributes:
        model: float32, in evaluation mode, with predictor tokens.
        tokenizer: with predictor tokens.
        config: mode, layout and objective.
        records: some records, each within ``max_length``.
        lora: wrap a copy of the model for the check of the optimisation step; None trains all weights.
    """

    model: Any
    tokenizer: Any
    config: JepaConfig
    records: Sequence[Record]
    lora: Callable[[Any], nn.Module] | None = None

    def __post_init__(self) -> None:
        self.builder = ForestBuilder(self.tokenizer, replace(self.config, over_length="truncate"))
        self.forests = self.builder.build(self.records)
        self.encoding, self.why = choose_encoding(self.model, self.config.encoding)
        if self.encoding == "forest":
            enable_forest(self.model)


def check_format(subject: Subject) -> str:
    """Every record has become a forest with something to learn."""
    _require(len(subject.forests) > 0, "no record can be trained on")
    labelled = sum(int((forest.shift_labels != IGNORE).sum()) for forest in subject.forests)
    return f"{len(subject.forests)} of {len(subject.records)} records, {labelled} labelled tokens"


def check_pairs(subject: Subject) -> str:
    """Views are found, and the readouts are where they should be."""
    if not subject.config.uses_views:
        return "regular training has no views"
    with_pairs = [forest for forest in subject.forests if len(forest.pairs)]
    _require(bool(with_pairs), "no record has a pair of views; check --step_separator")
    last = predictor_ids(subject.tokenizer, subject.config.predictors or 0)[-1:]
    if last and subject.config.last_token is None and not subject.config.front_pred:
        for forest in with_pairs:
            read = set(forest.input_ids[forest.pairs[:, 0]].tolist())
            _require(read == set(last), f"line {forest.line}: the source is not read at the last predictor token")
    count = sum(len(forest.pairs) for forest in with_pairs)
    return f"{len(with_pairs)} of {len(subject.forests)} records have pairs, {count} in all"


def check_end_of_turn(subject: Subject) -> str:
    """The labels are the assistant's content and the token that ends its turn."""
    if subject.config.labels != "assistant":
        return f"labels '{subject.config.labels}' were asked for"
    tokenizer, end = subject.tokenizer, subject.builder.template.end_of_turn_ids[0]
    compared = 0
    shown = {forest.line: forest for forest in subject.forests}
    for record in subject.records:
        forest = shown.get(record.line)
        if forest is None or len(forest.without_views()) >= subject.config.max_length:
            continue
        compared += 1
        labels = forest.shift_labels[forest.shift_labels != IGNORE].tolist()
        _require(labels[-1] == end, f"line {record.line}: the last label is not the end of turn")
        answers = [m["content"].strip() for m in record.messages if m["role"] == "assistant"]
        wanted = answers[-1] if subject.config.plain else "".join(answers)
        taught = tokenizer.decode([index for index in labels if index != end], clean_up_tokenization_spaces=False)
        _require(
            "".join(taught.split()) == "".join(wanted.split()),
            f"line {record.line}: the labels read {taught[:60]!r}, the assistant says {wanted[:60]!r}",
        )
    _require(compared > 0, "every record looked at is cut by max_length, so no end of turn is left; raise it")
    return (
        f"{compared} records: assistant content and {subject.builder.template.end_of_turn!r} are trained, nothing else"
    )


def _sees(forest: Forest, query: int, key: int) -> bool:
    """The rule in its plainest form: up the parents, token by token."""
    segment = next(s for s in forest.segments if s.start <= query < s.end)
    if segment.start <= key < segment.end:
        return key <= query
    while not segment.isolated and segment.parent >= 0:
        parent = forest.segments[segment.parent]
        if parent.start <= key < parent.start + segment.attachment:
            return True
        # What a segment sees of its parent's parents does not depend on whether the parent itself is isolated.
        segment = Segment(parent.start, parent.end, parent.kind, parent.parent, parent.attachment)
    return False


def check_mask(subject: Subject) -> str:
    """The mask tensor is that of a double loop over tokens."""
    compared = 0
    # A double loop in Python: the shortest will do.
    for forest in sorted(subject.forests, key=len)[:8]:
        mask = visible(batch_visibility([forest], len(forest)))[0]
        slow = torch.tensor([[_sees(forest, query, key) for key in range(len(forest))] for query in range(len(forest))])
        _require(bool((mask == slow).all()), f"line {forest.line}: {int((mask != slow).sum())} entries differ")
        compared += mask.numel()
    return f"{compared} entries equal"


@torch.no_grad()
def check_forest(subject: Subject) -> str:
    """Embeddings of the batch equal those of one plain forward pass for each view."""
    if not subject.config.uses_views:
        return "regular training has no views"
    if subject.config.layout == "inplace":
        return "layout 'inplace' has no separate passes to compare with; its mask is checked above"
    forests = [forest for forest in subject.forests if len(forest.pairs)][:8]
    device = subject.model.device
    batch = {key: value.to(device) for key, value in ForestCollator(0, subject.encoding)(forests).items()}
    outputs = forward(subject.model, batch)
    decoder = find_decoder(subject.model)
    worst, scale, row = 0.0, 0.0, 0
    for forest in forests:
        for pair in forest.pairs:
            for readout, fast in zip(pair, (outputs.source[row], outputs.target[row]), strict=True):
                index = next(i for i, s in enumerate(forest.segments) if s.start <= readout < s.end)
                tokens = path(forest, index)
                alone = torch.as_tensor(forest.input_ids[tokens], dtype=torch.long, device=device)[None]
                place = int(np.flatnonzero(tokens == readout)[0])
                slow = decoder(input_ids=alone, use_cache=False)[0][0, place]
                worst, scale = max(worst, float((fast - slow).abs().max())), max(scale, float(slow.abs().max()))
            row += 1
    _require(worst <= TOLERANCE * max(scale, 1.0), f"largest difference {worst:.1e} at scale {scale:.1f}")
    return (
        f"{2 * row} embeddings, largest difference {worst:.1e} at scale {scale:.1f} ({subject.encoding}: {subject.why})"
    )


@torch.no_grad()
def check_lm_loss(subject: Subject) -> str:
    """The LM loss is the one that transformers computes on the main text alone."""
    if subject.config.layout == "inplace":
        return "layout 'inplace' changes the main text by design"
    forests = subject.forests[:4]
    device = subject.model.device
    batch = {key: value.to(device) for key, value in ForestCollator(0, subject.encoding)(forests).items()}
    sums = Objective(None).sums(forward(subject.model, batch))
    ours = sums["lm_loss"] / len(batch["label_ids"])
    total, count = 0.0, 0
    for forest in forests:
        main = forest.without_views()
        ids = torch.as_tensor(main.input_ids, dtype=torch.long, device=device)[None]
        labels = torch.as_tensor(main.shift_labels, dtype=torch.long, device=device)
        logits = subject.model(input_ids=ids, use_cache=False).logits[0].float()
        total += float(F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"))
        count += int((labels != IGNORE).sum())
    difference = abs(float(ours) - total / count)
    _require(difference <= TOLERANCE * max(total / count, 1.0), f"{float(ours):.6f} against {total / count:.6f}")
    return f"{float(ours):.4f} nats per token, difference {difference:.1e}"


def check_losses(subject: Subject) -> str:
    """Each alignment loss gives a value worked out by hand."""
    del subject
    source, target = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[4.0, 3.0], [0.0, 2.0]])
    # cosines 24/25 and 0; differences (-1, 1) and (1, -2); InfoNCE logits [[.96, .8], [.8, 0]] at temperature 1.
    wanted: list[tuple[str, Tensor, float]] = [
        ("cosine", Cosine()(source, target), 0.04 + 1.0),
        ("l2", L2()(source, target), 2**0.5 + 5**0.5),
        ("mse", MSE()(source, target), 1.0 + 2.5),
        ("infonce", InfoNCE(1.0)(source, target), 0.6163408 + 1.1711007),
    ]
    for name, value, by_hand in wanted:
        _require(abs(float(value) - by_hand) < 1e-5, f"{name}: {float(value):.6f} against {by_hand:.6f} by hand")
    return "cosine, l2, mse and infonce as worked out by hand"


def check_step(subject: Subject) -> str:
    """One optimisation step moves the predictor rows and all that should move, and nothing else."""
    model: Any = copy.deepcopy(subject.model)
    model = subject.lora(model) if subject.lora is not None else model
    model.train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    objective = Objective.from_config(replace(subject.config, lbd=max(subject.config.lbd, 0.1)))
    # LoRA starts with one factor at zero, so that the other moves only in the second step.
    for _ in range(2):
        batch = ForestCollator(0, subject.encoding)(subject.forests[:4])
        batch = {key: value.to(model.device) for key, value in batch.items()}
        counts = torch.tensor([len(batch[name]) for name in ("label_ids", "source_index", "triple_index")])
        sums = objective.sums(forward(model, batch))
        objective.parts(sums, counts)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    # Experts that no token was sent to have no gradient.
    stuck = {name for name in expected - moved if "expert" not in name}
    _require(not stuck, f"{len(stuck)} trained parameters did not move, such as {min(stuck, default='')}")
    _require(not moved - expected, f"frozen parameters moved, such as {min(moved - expected, default='')}")
    ids = predictor_ids(subject.tokenizer, (subject.config.predictors or 0) if subject.config.uses_views else 0)
    if ids and any(len(forest.pairs) for forest in subject.forests[:4]):
        rows = torch.tensor(ids, device=subject.model.device)
        after = model.get_input_embeddings()(rows)
        still = (after == subject.model.get_input_embeddings()(rows)).all(-1)
        _require(not bool(still.any()), f"{int(still.sum())} of {len(ids)} predictor rows did not move")
    return (
        f"{len(moved)} of {len(before)} parameter tensors moved, as they should, {len(ids)} predictor rows among them"
    )


CHECKS: tuple[tuple[str, Callable[[Subject], str]], ...] = (
    ("data format", check_format),
    ("pairs of views", check_pairs),
    ("end of turn is trained", check_end_of_turn),
    ("mask against double loop", check_mask),
    ("batch against separate passes", check_forest),
    ("LM loss against transformers", check_lm_loss),
    ("alignment losses by hand", check_losses),
    ("one optimisation step", check_step),
)


def verify(subject: Subject) -> Iterator[Result]:
    """Run all checks, one result each as it comes."""
    for name, check in CHECKS:
        try:
            yield Result(name, True, check(subject))
        except (CheckError, UserError, ValueError, RuntimeError) as error:
            yield Result(name, False, str(error))
