"""A forest is cut into what its segments see, and attention over the pieces is attention under the mask."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tiny
from stepjepa.forests.masks import Visibility, batch_visibility, visible
from stepjepa.models import pieces
from stepjepa.models.attention import enable_forest
from stepjepa.models.pieces import Piece, attend, cut

HEADS, GROUPS, WIDTH = 6, 3, 5


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALL_COST", -(10**9))


def slowly_seen(row: tuple[Piece, ...], length: int) -> torch.Tensor:
    """``[T, T]``, token by token."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for piece in row:
        for query in range(piece.start, piece.end):
            for key in range(length):
                own = piece.start <= key <= query
                seen[query, key] = own or any(start <= key < end for start, end in piece.seen)
    return seen


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(11))
def test_pieces_show_what_the_mask_shows(seed: int) -> None:
    forests = [tiny.random_forest(seed + 100 * row, isolated=bool(seed % 2)) for row in range(3)]
    length = max(map(len, forests)) + 2
    visibility = batch_visibility(forests, length)
    found = cut(visibility)
    assert found is not None
    for row, forest, allowed in zip(found.rows, forests, visible(visibility), strict=True):
        assert torch.equal(slowly_seen(row, length)[: len(forest)], allowed[: len(forest)])


def test_by_hand() -> None:
    # Seven tokens of main text, a branch of two behind its third token, a root of five, one of padding.
    visibility = Visibility(
        torch.tensor([[0] * 7 + [1] * 2 + [2] * 5 + [3]]),
        torch.tensor([[*range(7), 0, 1, *range(5), 0]]),
        torch.tensor([[[0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]),
        torch.zeros(1, 15, dtype=torch.long),
    )
    # 15 * 15 pairs with a mask; in pieces 7 * 7 + 2 * 5 + 5 * 5 = 84, in three calls.
    saved = 15 * 15 - 84
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CALL_COST", (saved - 1) / 3)
        found = cut(visibility)
        assert found is not None
        assert found.rows == ((Piece(0, 7, ()), Piece(7, 9, ((0, 3),)), Piece(9, 14, ())),)
        assert [piece.keys for piece in found.rows[0]] == [7, 5, 5]
        patch.setattr(pieces, "CALL_COST", saved / 3)
        assert cut(visibility) is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(5))
def test_attention_and_gradients_are_those_under_the_mask(seed: int) -> None:
    forests = [tiny.random_forest(seed + 100 * row) for row in range(2)]
    length = max(map(len, forests)) + 3
    visibility = batch_visibility(forests, length)
    found = cut(visibility)
    assert found is not None
    module = nn.Module()
    module.num_key_value_groups = HEADS // GROUPS
    draw = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]
    fast, weights = attend(module, *inputs, found, scaling=0.3, dropout=0.0)
    slow, _ = sdpa_attention_forward(module, *inputs, visible(visibility)[:, None], scaling=0.3)
    assert weights is None
    assert fast.shape == (2, length, HEADS, WIDTH)
    real = torch.zeros(2, length, 1, 1)
    for row, forest in enumerate(forests):
        real[row, : len(forest)] = 1
        assert not fast[row, len(forest) :].any()
    probe = torch.randn(fast.shape, generator=draw) * real
    torch.testing.assert_close(fast * real, slow * real, atol=1e-5, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad((fast * probe).sum(), inputs),
        torch.autograd.grad((slow * probe).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("always")
def test_a_row_of_padding_alone_and_tensors_without_values() -> None:
    forest = tiny.random_forest(1)
    visibility = batch_visibility([forest], len(forest) + 1)
    empty = Visibility(torch.full_like(visibility.segment_ids, visibility.seen_lengths.shape[1] - 1), *visibility[1:])
    found = cut(empty)
    assert found is not None
    assert found.rows == ((),)
    shape = (1, HEADS, len(forest) + 1, WIDTH)
    module = nn.Module()
    assert not attend(module, *(torch.ones(shape) for _ in range(3)), found)[0].any()
    with FakeTensorMode() as mode:
        fake = Visibility(*(mode.from_tensor(tensor) for tensor in visibility))
        assert cut(fake) is None


def test_short_rows_keep_their_mask_and_long_ones_do_not() -> None:
    def forest_of(length: int) -> Visibility:
        return Visibility(
            torch.tensor([[0] * length + [1] * (length // 2)]),
            torch.tensor([[*range(length), *range(length // 2)]]),
            torch.zeros(1, 3, 3, dtype=torch.long),
            torch.zeros(1, length + length // 2, dtype=torch.long),
        )

    assert cut(forest_of(64)) is None
    assert cut(forest_of(1024)) is not None


@pytest.mark.usefixtures("always")
def test_recomputed_blocks_know_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = pieces.attend
    monkeypatch.setattr(
        "stepjepa.models.attention.attend", lambda *args, **kw: calls.append(1) or original(*args, **kw)
    )
    forest = tiny.random_forest(2)
    found = []
    for checkpointing in (False, True):
        model = tiny.make_model("llama").train()
        enable_forest(model)
        if checkpointing:
            # The newer name, where transformers has it already.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        calls.clear()
        states = tiny.forest_states(model, forest)
        found.append(tiny.gradients(model, states.square().sum()))
        layers = model.config.num_hidden_layers
        assert len(calls) == (2 * layers if checkpointing else layers)
    tiny.assert_same_gradients(found[1], found[0])
