"""Terms on pairs of embeddings: values worked out by hand, what they push towards, and zero, never NaN, for nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from own_term import Margin
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.alignment import (
    L2,
    MSE,
    Alignment,
    Cosine,
    Covariance,
    Distance,
    InfoNCE,
    Regularizer,
    SIGReg,
    Variance,
    equal_partners,
    make_distance,
)
from stepjepa.objectives.cosine import SHORTEST, cosine_distance, unit_vectors
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.objectives.text import tube
from stepjepa.views.sequences import SampledRecord

SOURCE = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
TARGET = torch.tensor([[4.0, 3.0], [5.0, 0.0]])
HAND = torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.0, 0.0], [3.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("distance", "wanted"),
    [
        # 1 - 24/25 and 1 - 0; |(-1, 1)| and |(-5, 2)|; (1 + 1) / 2 and (25 + 4) / 2
        (Cosine(), 0.04 + 1.0),
        (L2(), math.sqrt(2) + math.sqrt(29)),
        (MSE(), 1.0 + 14.5),
    ],
)
def test_distances_by_hand(distance: Distance, wanted: float) -> None:
    assert distance(SOURCE, TARGET).item() == pytest.approx(wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.07])
def test_infonce_by_hand(temperature: float) -> None:
    # Cosines: (3,4)/5 with (4,3)/5 is 0.96 and with (1,0) is 0.6; (0,1) with them 0.6 and 0.
    first = math.log(math.exp(0.96 / temperature) + math.exp(0.6 / temperature)) - 0.96 / temperature
    second = math.log(math.exp(0.6 / temperature) + 1) - 0
    result = make_distance("infonce", temperature)(SOURCE, TARGET)
    assert result.item() == pytest.approx(first + second, rel=1e-5)


# Unit vectors, so that the cosine of two is the cosine of the angle between them: 0, 60, 90 and 180 degrees.
DIRECTIONS = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(3) / 2], [0.0, 1.0], [-1.0, 0.0]])
# Pairs 0 and 2 have one source, pairs 0 and 3 one target; pair 1 has nothing of the others.
KEYS = torch.tensor([[11, 5], [12, 6], [11, 7], [13, 5]])


def nce(own: float, *others: float) -> float:
    """The loss of one source at temperature 1, of the cosines with its own target and with the negatives."""
    return math.log(sum(math.exp(each) for each in (own, *others))) - own


def test_equal_partners_by_hand() -> None:
    rows = equal_partners(KEYS, Context()).tolist()
    assert rows == [[False, False, True, True], [False] * 4, [True, False, False, False], [True, False, False, False]]


def test_equal_partners_are_no_negatives_of_infonce_by_hand() -> None:
    source = target = DIRECTIONS
    # Cosines of each with 0, 60, 90 and 180 degrees.
    half, root = 0.5, math.sqrt(3) / 2
    distinct = nce(1, half) + nce(1, half, root, -half) + nce(1, root, -1 + 1) + nce(1, -half, 0)
    everything = nce(1, half, 0, -1) + nce(1, half, root, -half) + nce(1, 0, root, 0) + nce(1, -1, -half, 0)
    batch = Batch(source_key=KEYS[:, 0], target_key=KEYS[:, 1])
    encoded: Any = SimpleNamespace(pairs=(source, target))
    for distance, wanted in (
        (make_distance("infonce", 1.0), distinct),
        (make_distance("infonce", 1.0, "all"), everything),
    ):
        assert Alignment(1.0, distance)(encoded, batch, Context()).item() == pytest.approx(wanted, rel=1e-6)


def test_equal_partners_of_other_processes_are_no_negatives_by_hand() -> None:
    """Two processes of two pairs each, together as above: the sum of both is that of one process with all four."""
    wanted = 0.0
    for rank, own in enumerate((slice(0, 2), slice(2, 4))):
        batch = Batch(source_key=KEYS[own, 0], target_key=KEYS[own, 1])
        encoded: Any = SimpleNamespace(pairs=(DIRECTIONS[own], DIRECTIONS[own]))

        def gather(rows: torch.Tensor, first: int = 2 * rank) -> tuple[torch.Tensor, int]:
            return (DIRECTIONS if rows.is_floating_point() else KEYS), first

        wanted += Alignment(1.0, InfoNCE(1.0))(encoded, batch, Context(gather=gather)).item()
    whole: Any = SimpleNamespace(pairs=(DIRECTIONS, DIRECTIONS))
    batch = Batch(source_key=KEYS[:, 0], target_key=KEYS[:, 1])
    assert Alignment(1.0, InfoNCE(1.0))(whole, batch, Context()).item() == pytest.approx(wanted, rel=1e-6)


def test_a_batch_of_equal_pairs_has_no_negatives() -> None:
    """Neither a loss nor a gradient, where all that is left is the partner."""
    batch = Batch(source_key=torch.tensor([4, 4, 4]), target_key=torch.tensor([1, 2, 3]))
    source = DIRECTIONS[:3].clone().requires_grad_()
    encoded: Any = SimpleNamespace(pairs=(source, DIRECTIONS[1:]))
    loss = Alignment(1.0, InfoNCE(0.07))(encoded, batch, Context())
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, source)[0].any()


@pytest.mark.parametrize("encoding", ["tree", "rows"])
@pytest.mark.parametrize("layout", ["separate", "branched", "inplace"])
def test_pairs_have_equal_keys_where_their_readouts_see_equal_tokens(
    layout: str, encoding: str, trained_tokenizer: Any
) -> None:
    if layout == "inplace" and encoding == "rows":
        pytest.skip("rows can't express it")
    config = JepaConfig(mode="llm-jepa" if layout == "separate" else "step-jepa", layout=layout)
    first, second, *_ = tiny.records()

    def answered(record: Any, content: str) -> Any:
        return replace(record, messages=(*record.messages[:-1], {"role": "assistant", "content": content}))

    # The first and the last have all in common, the first two the question, the second and the third the answer.
    answers = ["2 + 3 = 5.\n\nSo 5.", "3 + 2 = 5.\n\nSo 5."]
    records = [answered(first, answers[0]), answered(first, answers[1]), answered(second, answers[1])]
    records.append(records[0])
    collator = tiny.collator(trained_tokenizer, config, encoding=encoding)
    samples = [SampledRecord(each) for each in tiny.tokenized(trained_tokenizer, config, records)]
    keys = collator(samples).pair_keys.tolist()
    observed: list[dict[str, tuple[int, ...]]] = []
    for sample in samples:
        sides: dict[str, tuple[int, ...]] = {}
        for sequence in collator.sequences(sample):
            for readout in sequence.readouts:
                start = 0 if sequence.start is None else int(sequence.start[readout.end - 1])
                sides[readout.kind] = tuple(sequence.ids[start : readout.end].tolist())
        observed.append(sides)
    assert len(keys) == len(records)
    for one, other in itertools.product(range(len(records)), repeat=2):
        for column, kind in enumerate(("source", "target")):
            assert (keys[one][column] == keys[other][column]) == (observed[one][kind] == observed[other][kind]), (
                one,
                other,
            )
    targets = [key[1] for key in keys]
    assert targets[1] == targets[2] and targets[0] == targets[3]
    # Step-JEPA's source is a step of the answer, behind the question.
    assert (keys[0][0] == keys[1][0]) == (layout == "separate")


def test_a_constant_map_minimises_all_but_infonce() -> None:
    constant = torch.ones(5, 3)
    for name in ("cosine", "l2", "mse"):
        assert make_distance(name)(constant, constant).item() == pytest.approx(0, abs=1e-5)
    assert InfoNCE()(constant, constant).item() == pytest.approx(5 * math.log(5))


def test_variance_and_covariance_by_hand() -> None:
    # Variances 4, 0 and 1, so that only the second dimension is below 1: 1 - sqrt(1e-4) = 0.99 over 3 dimensions.
    assert Variance().value(HAND, Context()).item() == pytest.approx(0.99 / 3, rel=1e-5)
    # Centred columns (0, -2, 2) and (1, -1, 0): covariance (0 + 2 + 0) / 2 = 1, counted twice, over 3 dimensions.
    assert Covariance().value(HAND, Context()).item() == pytest.approx(2 / 3, rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 13), (13, 5)])
def test_covariance_against_a_loop(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix = torch.cov(values.T)
    slow = sum(float(matrix[i, j]) ** 2 for i in range(shape[1]) for j in range(shape[1]) if i != j) / shape[1]
    assert Covariance().value(values, Context()).item() == pytest.approx(slow, rel=1e-4)


def test_sigreg_by_hand() -> None:
    """One dimension, where every direction is the same up to its sign: two points at 0 and at pi."""
    points = torch.tensor([[0.0], [math.pi]])
    # mean cos = (1 + cos(pi t)) / 2, mean sin = sin(pi t) / 2; the trapezoidal rule at 33 points over -3 to 3.
    total = 0.0
    for index in range(33):
        t = -3 + 6 * index / 32
        apart = ((1 + math.cos(math.pi * t)) / 2 - math.exp(-t * t / 2)) ** 2 + (math.sin(math.pi * t) / 2) ** 2
        total += apart * math.exp(-t * t / 2) * (6 / 32) * (0.5 if index in (0, 32) else 1.0)
    assert SIGReg(directions=3).value(points, Context()).item() == pytest.approx(2 * total, rel=1e-5)


def test_sigreg_is_least_for_a_standard_normal() -> None:
    normal = torch.randn((257, 11), generator=torch.Generator().manual_seed(0))
    least = SIGReg().value(normal, Context()).item()
    for other in (normal * 3, normal * 0.3, normal + 1, torch.ones_like(normal), normal[:, :1].repeat(1, 11)):
        assert SIGReg().value(other, Context()).item() > 3 * least


def test_sigreg_draws_by_seed_and_step() -> None:
    values = torch.randn((7, 11)) * 2
    first, again, step, seed = (
        SIGReg().value(values, Context(step=step, seed=seed)) for step, seed in [(2, 5), (2, 5), (3, 5), (2, 6)]
    )
    assert torch.equal(first, again)
    assert first not in (step, seed)


@pytest.mark.parametrize("name", ["cosine", "l2", "mse", "infonce", "sigreg", "variance", "covariance"])
def test_autocast_rounds_no_term(name: str) -> None:
    """Terms run inside the model's forward pass, and so in its autocast."""
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randn(11, 7, generator=generator).requires_grad_() for _ in range(2))
    terms: dict[str, Regularizer] = {"sigreg": SIGReg(directions=5), "variance": Variance(), "covariance": Covariance()}

    def value() -> torch.Tensor:
        return terms[name].value(source, Context()) if name in terms else make_distance(name)(source, target)

    exact = value()
    gradient = torch.autograd.grad(exact, source)[0]
    with torch.autocast("cpu", torch.bfloat16):
        result = value()
    assert torch.equal(result, exact)
    assert torch.equal(torch.autograd.grad(result, source)[0], gradient)


SEEDS = range(60)
ALIGNMENTS = ["cosine", "l2", "mse", "infonce"]
REGULARIZERS: list[Regularizer] = [SIGReg(directions=7), Variance(), Covariance()]


class Drawn:
    """Pairs of embeddings ``[P, D]`` of a drawn size and scale; ``zero`` says where one of the two is zero."""

    def __init__(self, seed: int, *, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        pairs, width = number(0, 8), number(1, 14)
        scale = 10.0 ** number(-4, 5)
        zeros = torch.rand((2, pairs), generator=generator) < 0.3
        sides = [
            torch.randn((pairs, width), generator=generator).mul(scale).masked_fill(zeros[side][:, None], 0)
            for side in (0, 1)
        ]
        if number(0, 4) == 0:  # both views are the same
            sides[1], zeros[1] = sides[0].clone(), zeros[0]
        self.source, self.target = (side.to(dtype).requires_grad_() for side in sides)
        self.zero = zeros.any(0)


@pytest.mark.parametrize("name", ALIGNMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alignment_is_finite_and_a_pair_without_a_direction_adds_nothing(name: str, dtype: torch.dtype) -> None:
    """Neither to the loss nor to the gradient of either side; what it is compared with stays as it was."""
    for seed in SEEDS:
        drawn = Drawn(seed, dtype=dtype)
        loss = make_distance(name)(drawn.source, drawn.target)
        source, target = torch.autograd.grad(loss, [drawn.source, drawn.target])
        assert loss.dtype == torch.float32
        assert all(bool(torch.isfinite(value).all()) for value in (loss, source, target)), seed
        if name not in ("cosine", "infonce"):
            continue
        assert not source[drawn.zero].any(), seed
        if name == "cosine":
            assert not target[drawn.zero].any(), seed
            alone = make_distance(name)(drawn.source[~drawn.zero], drawn.target[~drawn.zero])
            assert loss.item() == pytest.approx(alone.item(), rel=1e-6, abs=1e-7), seed
        else:
            # A target is compared with other sources, too; one without a direction is not moved by them.
            assert not target[drawn.target.norm(dim=-1) == 0].any(), seed
        if bool(drawn.zero.all()):
            assert loss.item() == 0, seed


def test_by_hand() -> None:
    first = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    second = torch.tensor([[4.0, 3.0], [1.0, 2.0], [0.0, 0.0]])
    # 1 - 24/25; the others have no direction on one side.
    assert cosine_distance(first, second).tolist() == pytest.approx([0.04, 0, 0])
    result, there = unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0], [SHORTEST / 2, 0.0], [math.nan, 1.0]]))
    assert result[:3].flatten().tolist() == pytest.approx([0.6, 0.8, 0, 0, 0, 0])
    assert result[3].isnan().all()
    assert there.tolist() == [True, False, False, True]
    # Three sources, the second without a direction, and three targets, the third without: what is left is the first,
    # with cosines 0.96, 11 / (5 sqrt 5) and 0.
    cosines = [0.96, 11 / (5 * math.sqrt(5)), 0.0]
    wanted = math.log(sum(math.exp(cosine / 0.5) for cosine in cosines)) - 0.96 / 0.5
    assert InfoNCE(0.5)(first, second).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("term", REGULARIZERS, ids=lambda term: term.name)
def test_regularizers_are_finite_forward_and_backward(term: Regularizer) -> None:
    """Drawn ones, and sets of equal embeddings."""
    equal = [torch.full((count, 3), value, requires_grad=True) for count in (2, 5) for value in (0.0, 1.0, -1e4)]
    for number, embeddings in enumerate([*(Drawn(seed).source for seed in SEEDS), *equal]):
        value = term.value(embeddings, Context(step=number))
        assert bool(torch.isfinite(value)), number
        (gradient,) = torch.autograd.grad(value, [embeddings])
        assert bool(torch.isfinite(gradient).all()), number
        if len(embeddings) < 2:
            assert value.item() == 0, number
            assert not gradient.any(), number


def test_a_tube_through_one_point() -> None:
    """Where two of the three places hold the same state there is no direction: exactly 0."""
    triples = torch.randn((4, 3, 5), generator=torch.Generator().manual_seed(0))
    triples[0, 1], triples[1, 2], triples[2] = triples[0, 0], triples[1, 1], 0.0
    triples.requires_grad_()
    assert tube(triples[:3]).item() == 0
    (gradient,) = torch.autograd.grad(tube(triples), [triples])
    assert not gradient[:3].any()
    assert gradient[3].any()
    assert bool(torch.isfinite(gradient).all())


def test_what_is_not_finite_stays_so() -> None:
    """It must be found, not hidden as an embedding without a direction."""
    for wrong in (math.nan, math.inf):
        source, target = torch.ones(3, 5), torch.ones(3, 5)
        source[1, 2] = wrong
        for name in ALIGNMENTS:
            assert not math.isfinite(make_distance(name)(source, target).item()), (name, wrong)
        assert not math.isfinite(tube(source[None]).item())


EVERYTHING: dict[str, Any] = {"sigreg": 0.3, "variance": 0.5, "covariance": 0.2, "stp": 0.7, "prompt_loss_weight": 0.1}


@pytest.mark.parametrize("loss", ALIGNMENTS)
@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_a_model_on_a_batch_of_nothing(loss: str, encoding: str, trained_tokenizer: Any) -> None:
    """No record at all, as at the end of an epoch: every weight takes part, and none is moved."""
    model = tiny.make_model("llama")
    enable_trees(model)
    config = JepaConfig(mode="step-jepa", jepa_loss_type=loss, **EVERYTHING)  # type: ignore[arg-type]
    objective = Objective.from_config(config)
    options = {"encoding": encoding, "prompt_labels": True}
    result = jepa_loss(model, tiny.collator(trained_tokenizer, config, **options)([None]), objective)
    assert result.loss.item() == 0
    assert all(part.item() == 0 for part in result.parts.values())
    model.zero_grad()
    result.loss.backward()
    assert not any(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters())
    # One record without a pair, and one pair alone.
    for record in [*tiny.records()[2:], *tiny.records()[:1]]:
        batch = tiny.batch_of(trained_tokenizer, config, [record], **options)
        result = jepa_loss(model, batch, objective)
        assert all(bool(torch.isfinite(part)) for part in result.parts.values())
        if not batch.pairs or loss == "infonce":
            assert result.parts["jepa_loss"].item() == 0
        gradients = tiny.gradients(model, result.loss)
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        assert any(bool(gradient.any()) for gradient in gradients.values())


def test_a_distance_says_whether_it_compares_pairs() -> None:
    assert [make_distance(name).compares_pairs for name in ("cosine", "l2", "mse", "infonce")] == [False] * 3 + [True]

    def own(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (source - target).square().sum()

    with pytest.raises(ValueError, match=r"distance: expected 'own' to have the attribute 'compares_pairs', True .*"):
        Alignment(0.1, own)  # type: ignore[arg-type]
    own.compares_pairs = False  # type: ignore[attr-defined]
    assert not Objective([Alignment(0.1, own)]).compares_pairs  # type: ignore[arg-type]


def test_a_contrastive_distance_of_ones_own_gets_the_targets_of_all_processes() -> None:
    encoded, batch = SimpleNamespace(pairs=(SOURCE, TARGET)), Batch()
    other = torch.tensor([[-3.0, 4.0]])
    context = Context(gather=lambda rows: (torch.cat([other, rows]), 1))
    assert Objective([Alignment(1.0, Margin())]).compares_pairs
    # Cosines of the sources with the candidates (-3, 4), (4, 3), (5, 0): .28, .96, .6 and .8, .6, 0.
    wanted = (0.32 + 0.64) / 2 + (1.8 + 1.6) / 2
    assert Alignment(1.0, Margin())(encoded, batch, context).item() == pytest.approx(wanted, rel=1e-6)  # type: ignore[arg-type]
    # Every other distance gets its own pairs alone.
    assert Alignment(1.0, Cosine())(encoded, batch, context).item() == pytest.approx(1.04, rel=1e-6)  # type: ignore[arg-type]


def test_distances_fit_their_protocol_for_every_type_checker() -> None:
    """Pyright refused ``Alignment(0.1, InfoNCE())``: a property of a protocol is no ``ClassVar``."""
    for kind in (Cosine, L2, MSE, InfoNCE):
        assert "compares_pairs" not in kind.__annotations__
        assert [field.name for field in dataclasses.fields(kind)] == [*kind.__annotations__]
