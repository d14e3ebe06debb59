"""Terms as one objective, each by hand, with weight and count; monitors of known matrices and by double loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.base.errors import UserError
from stepjepa.batch.micro_batch import Batch, BatchRecords
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.alignment import Alignment, Cosine, Covariance, InfoNCE, SIGReg, Variance
from stepjepa.objectives.monitors import MetricWindow, effective_rank, pair_similarity, ratio_column, retrieval_top1
from stepjepa.objectives.objective import Objective, averaged_counts
from stepjepa.objectives.term import Context, Term, load_term, term
from stepjepa.objectives.text import LMLoss, PromptLoss, SemanticTube


class ByHand:
    """What a term sees of a micro-batch: states in a plane, two pairs, a head that knows three tokens.

    Args:
        target: target embeddings; None for those of the examples below.
    """

    def __init__(self, target: Tensor | None = None) -> None:
        self.source = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)
        self.target = torch.tensor([[4.0, 3.0], [5.0, 0.0]], requires_grad=True) if target is None else target
        # A path with a right angle, then straight on, then back.
        self.states = torch.tensor([[0.0, 0], [1, 0], [1, 1], [1, 3], [1, 2]], requires_grad=True)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        return self.source, self.target

    def at(self, index: Tensor, layer: int = -1) -> Tensor:
        assert layer == -1
        return self.states[index]

    def token_loss(self, index: Tensor, token_ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Every token has a probability of its own: one half, one third, one quarter."""
        assert rows is not None
        assert len(rows) == len(token_ids)
        assert set(rows.tolist()) == set(range(len(index)))
        return torch.log(token_ids.float() + 2).sum() + 0 * self.states.sum()


def batch(**changes: Any) -> Batch:
    """Two pairs, labels 1, 0 and 0 at two places, five of the prompt at one of its own; one record of five tokens."""
    result = {
        "head_index": torch.tensor([1, 4]),
        "label_row": torch.tensor([0, 1, 1]),
        "label_ids": torch.tensor([1, 0, 0]),
        "prompt_index": torch.tensor([2]),
        "prompt_row": torch.tensor([0] * 5),
        "prompt_ids": torch.tensor([2] * 5),
        "source_index": torch.tensor([0, 1]),
        "target_index": torch.tensor([2, 3]),
        "source_key": torch.tensor([11, 12]),
        "target_key": torch.tensor([13, 14]),
        "records": BatchRecords(
            rng_keys=((0, 0),),
            paths=(np.arange(5),),
            isolated=(np.empty(0, np.int64),),
        ),
    }
    return Batch({**result, **changes})


def sums(
    *terms: Any, context: Context | None = None, encoded: ByHand | None = None, **changes: Any
) -> dict[str, Tensor]:
    return Objective(terms).sums(encoded or ByHand(), batch(**changes), context or Context())  # type: ignore[arg-type]


def test_counts_of_two_processes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 pairs here and 2 there the gradients that DDP averages are those of a mean over 3.5."""
    monkeypatch.setattr("stepjepa.objectives.objective.process_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda values: values.add_(torch.tensor([2.0, 11.0])))
    assert averaged_counts({"jepa_loss": 5.0, "lm_loss": 7.0}, torch.device("cpu")) == {
        "jepa_loss": 3.5,
        "lm_loss": 9.0,
    }


def test_losses_on_tokens_by_hand() -> None:
    result = sums(LMLoss(), PromptLoss())
    assert result["lm_loss"].item() == pytest.approx(math.log(3) + 2 * math.log(2))
    assert result["prompt_loss"].item() == pytest.approx(5 * math.log(4))
    assert Objective([LMLoss(), PromptLoss()]).counts([batch(), batch()]) == {"lm_loss": 6, "prompt_loss": 10}


def test_means_and_weights_by_hand() -> None:
    objective = Objective([LMLoss(0.5), Alignment(2.0, Cosine())])
    result = objective.sums(ByHand(), batch(), Context())  # type: ignore[arg-type]
    means = objective.means(result, objective.counts([batch()]))
    assert means["lm_loss"].item() == pytest.approx((math.log(3) + 2 * math.log(2)) / 3)
    assert means["jepa_loss"].item() == pytest.approx(1.04 / 2)
    assert means["loss"].item() == pytest.approx(0.5 * math.log(12) / 3 + 2.0 * 0.52)
    # Counts of a longer step; and nothing to count counts as one.
    assert objective.means(result, {"lm_loss": 8, "jepa_loss": 0})["jepa_loss"].item() == pytest.approx(1.04)


def test_a_mean_over_less_than_one_is_over_that() -> None:
    """Six pairs of eight processes are three quarters for each."""
    objective, sums = Objective([Alignment(weight=1.0)]), {"jepa_loss": torch.tensor(3.0)}
    assert objective.means(sums, {"jepa_loss": 0.75})["jepa_loss"].item() == 4.0
    assert objective.means(sums, {"jepa_loss": 0.0})["jepa_loss"].item() == 3.0


def test_a_layer_that_the_model_lacks_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="layer of a term: expected -3 to 2 for a model of 2 layers, got 5"):
        Objective([SemanticTube(layer=5)]).heads(tiny.make_model("llama").config)


def test_the_tube_by_hand() -> None:
    """Whatever is drawn, the places ascend; on a straight path the loss is 0, on this one it is that of the triple."""
    states = ByHand().states.detach()
    for seed in range(23):
        first, second, third = sorted(np.random.default_rng((seed, 0, 0)).choice(5, 3, replace=False).tolist())
        before = states[second] - states[first]
        after = states[third] - states[second]
        wanted = 1 - float(torch.cosine_similarity(after, before, dim=0))
        assert sums(SemanticTube(), context=Context(seed=seed))["stp_loss"].item() == pytest.approx(wanted, abs=1e-6)
    # Isolated tokens are left out; two tokens make no triple, three make one.
    members = batch().records
    few = BatchRecords(**{**vars(members), "isolated": (np.array([0, 1, 2]),)})
    assert SemanticTube().count(batch(records=few)) == 0
    assert sums(SemanticTube(), records=few)["stp_loss"].item() == 0
    three = BatchRecords(**{**vars(members), "isolated": (np.array([0, 1]),)})
    assert SemanticTube().count(batch(records=three)) == 1


def test_regularizers_count_every_pair() -> None:
    result = sums(Variance(), Covariance())
    # Source (3, 4), (0, 2): variances 4.5 and 2, covariance 3. Target (4, 3), (5, 0): 0.5 and 4.5, covariance -1.5.
    assert result["variance_loss"].item() == pytest.approx(2 * 0.5 * (1 - math.sqrt(0.5 + 1e-4)), rel=1e-5)
    assert result["covariance_loss"].item() == pytest.approx(2 * ((2 * 3**2) / 2 + (2 * 1.5**2) / 2), rel=1e-5)
    term, encoded, context = SIGReg(), ByHand(), Context(step=5, seed=3)
    both = (term.value(encoded.source, context) + term.value(encoded.target, context)) / 2
    assert sums(term, context=context)["sigreg_loss"].item() == pytest.approx(2 * both.item())


@pytest.mark.parametrize("through", [True, False])
def test_stop_gradient_keeps_the_alignment_loss_from_the_target(through: bool) -> None:
    for distance in (Cosine(), InfoNCE()):
        encoded = ByHand(torch.tensor([[4.0, 3.0], [5.0, 1.0]], requires_grad=True))
        sums(Alignment(1.0, distance, through), encoded=encoded)["jepa_loss"].backward()
        assert (encoded.target.grad is not None and bool(encoded.target.grad.any())) == through


def test_schedules_by_hand() -> None:
    def weights(schedule: Any) -> list[float]:
        term = Alignment(2.0, schedule=schedule, warmup=0.5)
        return [round(term.weight_at(progress), 6) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]

    assert weights("constant") == [2.0] * 5
    assert weights("warmup") == [0.0, 1.0, 2.0, 2.0, 2.0]
    half = math.sqrt(0.5)
    assert weights("cosine") == [2.0, round(1 + half, 6), 1.0, round(1 - half, 6), 0.0]
    assert Alignment(2.0, schedule="cosine").weight_at(None) == 2.0


def test_from_config() -> None:
    config = JepaConfig(jepa_loss_type="infonce", infonce_temperature=0.2, gamma=0.5, lbd=3.0)
    assert Objective.from_config(config).terms == {"lm_loss": LMLoss(0.5), "jepa_loss": Alignment(3.0, InfoNCE(0.2))}
    assert Objective.from_config(JepaConfig(mode="regular")).names == ["lm_loss"]
    every = JepaConfig(sigreg=0.1, variance=0.2, covariance=0.3, stp=0.4, target_grad="stop", prompt_loss_weight=0.5)
    objective = Objective.from_config(every)
    assert list(objective.terms.values()) == [
        LMLoss(),
        PromptLoss(0.5),
        Alignment(0.1, Cosine(), through_target=False),
        SIGReg(0.1),
        Variance(0.2),
        Covariance(0.3),
        SemanticTube(0.4),
    ]


def test_two_terms_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two terms are called 'lm_loss'"):
        Objective([LMLoss(), LMLoss()])
    with pytest.raises(ValueError, match="expected another name for a term than 'tokens'"):
        term("tokens")(LMLoss)


@pytest.mark.parametrize(
    ("address", "settings", "words"),
    [
        ("no_such_module:Term", {}, "can't load 'no_such_module:Term'"),
        ("stepjepa.objectives.text:Nothing", {}, "can't load"),
        ("folder/own_terms.py:Length", {}, "; write folder.own_terms:Length$"),
        ("stepjepa.objectives.alignment:Cosine", {}, "is no class derived from"),
        ("stepjepa.objectives.text:LMLoss", {"wait": 1}, "has no setting 'wait'; it has weight"),
        ("stepjepa.objectives.text:LMLoss", {"weight": -1.0}, "weight: expected 0 or more, got -1.0"),
    ],
)
def test_terms_that_can_not_be_loaded(address: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        load_term(address, settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(3, 11), (256, 64), (61, 257), (37, 37)])
def test_rank_is_that_of_singular_values(shape: tuple[int, int], centred: bool) -> None:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    # From all alike to falling off steeply.
    for decay in (0.0, 0.1, 1.0):
        scales = torch.exp(-decay * torch.arange(shape[1], dtype=torch.float32))
        values = torch.randn(shape, generator=generator) * scales + 0.3
        matrix = values.double() - values.double().mean(0) if centred else values.double()
        share = torch.linalg.svdvals(matrix)
        share = share / share.sum()
        expected = math.exp(-float((share * share.clamp_min(1e-300).log()).sum()))
        assert effective_rank(values, centred=centred) == pytest.approx(expected, rel=1e-6)


def test_rank_by_hand() -> None:
    for size in (1, 3, 7):
        assert effective_rank(5 * torch.eye(size)) == pytest.approx(size, rel=1e-5)
        assert effective_rank(torch.outer(torch.randn(size), torch.randn(5))) == pytest.approx(1, abs=1e-3)
    # Singular values 3 and 1: shares 3/4 and 1/4.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(math.exp(entropy), rel=1e-5)
    assert effective_rank(torch.empty(0, 5)) == effective_rank(torch.zeros(3, 5)) == 0
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.nan], [1.0, 1.0]])))
    # Centring hides a collapse to one vector.
    noise = torch.randn(40, 11, generator=torch.Generator().manual_seed(0))
    collapsed = 1000 + 0.1 * noise
    assert effective_rank(collapsed) < 1.1
    assert effective_rank(collapsed, centred=True) > 8


@pytest.mark.parametrize("pairs", [0, 1, 2, 7])
def test_similarity_against_a_double_loop(pairs: int) -> None:
    source, target = torch.randn(pairs, 5), torch.randn(pairs, 5)
    cosines = [[float(one @ other / one.norm() / other.norm()) for other in target] for one in source]
    matched = sum(cosines[index][index] for index in range(pairs))
    shuffled = sum(map(sum, cosines)) - matched
    result = pair_similarity(source, target)
    assert [value.item() for value in result] == pytest.approx([matched, shuffled], abs=1e-4)


def test_retrieval_by_hand() -> None:
    source = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    target = torch.tensor([[3.0, 0.1], [9.0, 1.0], [2.0, 2.0]])
    # The second source is nearest to the third target.
    assert retrieval_top1(source, target) == pytest.approx(2 / 3)
    assert retrieval_top1(source, source) == 1
    assert retrieval_top1(source[:0], target[:0]) == 0
    # A constant map finds one partner.
    assert retrieval_top1(torch.ones(5, 3), torch.ones(5, 3)) == pytest.approx(1 / 5)


def test_autocast_rounds_no_monitor() -> None:
    """A loop of one's own may read them inside the autocast around its loss."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn((101, 7), generator=generator) for _ in range(2))
    window = MetricWindow()
    window.add_pairs(source, target)
    with torch.autocast("cpu", torch.bfloat16):
        again = MetricWindow()
        again.add_pairs(source, target)
        assert again.monitors() == window.monitors()


def test_window_holds_sums_and_the_latest_pairs() -> None:
    window, rows = MetricWindow(keep=4), torch.randn(9, 5)
    expected = [pair_similarity(rows[at : at + 3], rows[at : at + 3].flip(0)) for at in (0, 3, 6)]
    for at in (0, 3, 6):
        window.add_pairs(rows[at : at + 3], rows[at : at + 3].flip(0))
    window.add(loss=torch.tensor(2.0, requires_grad=True), tokens=3)
    window.add(loss=torch.tensor(0.5), tokens=4)
    assert window.totals(["tokens", "loss", "other", "pairs", "crossings"]) == [7, 2.5, 0, 9, 18]
    sums = [sum(float(side[index]) for side in expected) for index in (0, 1)]
    assert window.totals(["matched", "shuffled"]) == pytest.approx(sums, abs=1e-5)
    geometry, target = window.geometry(), torch.cat([rows[3:6].flip(0), rows[6:].flip(0)])[2:]
    assert geometry["source_rank"] == pytest.approx(effective_rank(rows[5:]), rel=1e-5)
    assert geometry["target_rank_centred"] == pytest.approx(effective_rank(target, centred=True), rel=1e-5)
    assert geometry["retrieval_top1"] == retrieval_top1(rows[5:], target)
    assert geometry["rank_pairs"] == 4
    # The two latest batches hold just as many: the one before them goes.
    exact = MetricWindow(keep=4)
    for _ in range(3):
        exact.add_pairs(rows[:2], rows[2:4])
    assert exact.geometry()["rank_pairs"] == 4
    assert len(exact._pairs) == 2


def test_what_was_not_measured_is_not_there() -> None:
    assert ratio_column("shuffled_similarity", 0.0, 0.0) == {}
    assert ratio_column("shuffled_similarity", 3.0, 6.0) == {"shuffled_similarity": 0.5}
    window = MetricWindow()
    window.add_pairs(torch.ones(1, 3), torch.ones(1, 3))
    assert window.geometry() == {}


def an_unnamed_term() -> Any:
    class Bare(Term):
        def count(self, batch: Batch) -> int:
            return 1

        def __call__(self, encoded: Any, batch: Batch, context: Context) -> Tensor:
            return torch.zeros(())

    return Bare()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Objective(LMLoss()), r"terms: expected a list of terms, got LMLoss; write \[LMLoss\(\), \.\.\.\]"),
        (lambda: Objective([LMLoss]), r"terms: expected LMLoss\(\.\.\.\), got the class; call it"),
        (lambda: Objective([LMLoss(), print]), "terms: expected a stepjepa.Term, got builtin_function_or_method"),
        (lambda: Objective([an_unnamed_term()]), r"terms: Bare has no name; put @stepjepa.term\('my_loss'\) above"),
        (lambda: term("own")(print), "term: expected a class derived from stepjepa.Term, got 'print'"),
        (lambda: term(LMLoss), r"expected the name of the term in logs: @term\('my_loss'\)"),
        (lambda: Alignment(0.1, InfoNCE), "distance: expected one such as InfoNCE.*, got the class InfoNCE; write"),
        (lambda: Alignment(0.1, "infonce"), "distance: expected one such as InfoNCE.*, got 'infonce'; write Alignment"),
        (lambda: Alignment(InfoNCE(), 0.1), "distance: expected one such as InfoNCE.*, got 0.1; write Alignment"),
    ],
)
def test_what_is_no_term_is_named(make: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        make()


@pytest.mark.parametrize(
    ("value", "got"), [(0.5, "float"), (torch.zeros(3), r"shape \[3\]"), (torch.zeros(1), r"shape \[1\]")]
)
def test_a_term_returns_its_sum(value: Any, got: str) -> None:
    named = an_unnamed_term()
    type(named).name = "own"
    type(named).__call__ = lambda *_: value
    with pytest.raises(TypeError, match=f"term 'own': expected its sum over the batch, a tensor of .*, got {got}"):
        Objective([named]).sums(None, None, Context())  # type: ignore[arg-type]
