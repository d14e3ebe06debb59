"""Attention under the mask of trees: dense masks, FlexAttention, and plain attention outside of trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import tiny
from slow_trees import batch_of, random_sequences, row_mask, separate_states
from stepjepa.batch.mask import BLOCK, Trees, dense, padded, static_length
from stepjepa.batch.pack import Rows, pack
from stepjepa.config.jepa import JepaConfig
from stepjepa.models import attention
from stepjepa.models.attention import (
    EAGER,
    FLEX,
    FLEX_UNFUSED,
    SDPA,
    block_mask,
    enable_trees,
    flex_forward,
    tree_mask,
)
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import TokenSequence

ModelFactory = Callable[..., Any]

ARCHITECTURES = [name for name in tiny.ATTENTION_ONLY if name != "gpt2"]


def packed(seed: int, *, isolated: bool = False, longest: int = 2 * BLOCK // 3) -> tuple[list[TokenSequence], Rows]:
    """Sequences in rows of several blocks."""
    sequences = random_sequences(seed, isolated=isolated, longest=longest)
    sequences += random_sequences(seed + 100, isolated=isolated, longest=longest)
    return sequences, pack(sequences, row_length=3 * BLOCK)


def trees_of(rows: Rows) -> Trees:
    trees = batch_of(rows).trees
    assert trees is not None
    return trees


@pytest.mark.parametrize(
    ("architecture", "given", "wanted"),
    [
        ("llama", "sdpa", SDPA),
        ("llama", "eager", EAGER),
        ("llama", "flex_attention", FLEX),
        ("gemma2_window", "eager", EAGER),
        ("gemma2_window", "flex_attention", FLEX_UNFUSED),
        ("gpt2", "sdpa", SDPA),
    ],
)
def test_outside_the_block_the_model_is_plain(
    architecture: str, given: str, wanted: str, tiny_model: ModelFactory
) -> None:
    """Generation and evaluation run the same model without trees, padding on the left included; gradients, too."""
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, given)
    for _ in range(2):
        enable_trees(model)
        assert model.config._attn_implementation == wanted
    ids = torch.randint(0, tiny.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    first, second = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (model, plain))
    tiny.assert_same(first, second)
    gradients = [tiny.gradients(each, logits.square().sum()) for each, logits in ((model, first), (plain, second))]
    tiny.assert_same_gradients(*gradients)
    answers = [each.generate(ids[:1], max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", [SDPA, EAGER])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_numbers_and_show_what_the_sequences_see(kind: str, window: int | None) -> None:
    """A boolean mask would be added to the scores by eager attention: silently wrong."""
    sequences = random_sequences(2, isolated=True)
    rows = pack(sequences, row_length=17)
    rule = {} if window is None else {"mask_function": sliding_window_causal_mask_function(window)}
    with tree_mask(Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), isolates=True)):
        mask = AttentionMaskInterface()[kind](dtype=torch.bfloat16, **rule)
    count, length = rows.ids.shape
    assert (mask.shape, mask.dtype) == ((count, 1, length, length), torch.bfloat16)
    observed = row_mask(sequences, rows, lambda query, key: window is None or query - key < window)
    here = torch.arange(length) < torch.from_numpy(rows.lengths)[:, None]
    real = here[:, :, None] & here[:, None, :]
    assert torch.equal((mask[:, 0] == 0) & real, observed)
    hidden = mask[:, 0][real & ~observed]
    assert (hidden == (-torch.inf if kind == SDPA else torch.finfo(torch.bfloat16).min)).all()


def test_layers_of_another_dtype_than_the_model(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Under autocast the mask follows the queries."""
    model = tiny_model("llama")
    enable_trees(model)
    batch = tiny.batch_of(trained_tokenizer, JepaConfig())
    with torch.no_grad():
        exact = tiny.hidden_states(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = tiny.hidden_states(model, batch)
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        None,
        causal_mask_function,
        sliding_window_causal_mask_function(41),
        chunked_causal_mask_function(53, torch.zeros(9, dtype=torch.long)),
    ],
    ids=["trees", "causal", "window", "chunks"],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_block_mask_is_the_dense_mask(seed: int, rule: Callable[..., Tensor] | None, isolated: bool) -> None:
    """Entry by entry by its rule, and block by block as torch finds them; with a further rule none is missing."""
    _, rows = packed(seed, isolated=isolated)
    result, trees = block_mask(trees_of(rows), rule), trees_of(rows)
    trees = padded(trees, static_length(rows.ids.shape[1]))
    count, length = trees.start.shape
    assert result.seq_lengths == (length, length)
    place = torch.arange(length)
    places = torch.arange(count)[:, None, None, None], torch.tensor(0), place[:, None], place
    assert torch.equal(result.mask_mod(*places), dense(trees, rule))
    evaluated = torch_flex.create_block_mask(result.mask_mod, count, None, length, length, device="cpu")
    assert result.shape == evaluated.shape
    if rule is not None or isolated:
        looked_at, needed = result.to_dense(), evaluated.to_dense()
        assert (looked_at >= needed).all()
        assert not result.full_kv_num_blocks.any()
        return
    for kind in ("kv", "q", "full_kv", "full_q"):
        numbers, indices = (
            [getattr(mask, f"{kind}_{part}") for mask in (result, evaluated)] for part in ("num_blocks", "indices")
        )
        assert torch.equal(*numbers)
        used = torch.arange(indices[0].shape[-1]) < numbers[0][..., None]
        assert torch.equal(indices[0][used], indices[1][used])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("architecture", "isolated"), [("qwen3", True), *((architecture, False) for architecture in ARCHITECTURES)]
)
def test_flex_equals_separate_passes(architecture: str, isolated: bool, tiny_model: ModelFactory) -> None:
    """Windows, soft caps, grouped keys, scales of their own; over several blocks."""
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "flex_attention")
    enable_trees(model)
    assert model.config._attn_implementation in (FLEX, FLEX_UNFUSED)
    sequences, rows = packed(2, isolated=isolated)
    with torch.no_grad():
        states = tiny.hidden_states(model, batch_of(rows))
        for sequence, path in zip(sequences, rows.paths, strict=True):
            tiny.assert_same(states[path], separate_states(plain, sequence), 3e-5)


def test_attention_sinks() -> None:
    """A sink is a key whose score is its own and whose value is zero."""
    _, rows = packed(1)
    trees = trees_of(rows)
    count, length = trees.start.shape
    with torch.no_grad():
        query, key, value = torch.randn((3, count, 3, length, 5), generator=torch.Generator().manual_seed(3))
        sinks = torch.randn(3, generator=torch.Generator().manual_seed(5))
        result, _ = flex_forward(torch.nn.Identity(), query, key, value, block_mask(trees), s_aux=sinks)
        scores = (query @ key.mT / 5**0.5).masked_fill(~dense(trees), -torch.inf)
        scores = torch.cat([scores, sinks[None, :, None, None].expand(count, 3, length, 1)], -1)
        wanted = scores.softmax(-1)[..., :-1] @ value
    tiny.assert_same(result, wanted.transpose(1, 2))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel goes through torch.compile, which counts and generates no code."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    kernel = torch.compile(torch_flex.flex_attention, dynamic=False, backend=counter)
    monkeypatch.setattr(attention, "_compiled", lambda: kernel)
    monkeypatch.setattr(attention, "_on_cpu", lambda _: False)
    yield counter
    torch._dynamo.reset()


@pytest.mark.slow
def test_batches_of_one_size_are_compiled_once(counted: Any, tiny_model: ModelFactory) -> None:
    """Other trees, other lengths: only a length of another size, or another number of rows, is compiled anew."""
    model = tiny_model("gemma2_window", "flex_attention")
    enable_trees(model)

    def frames(seed: int, longest: int) -> int:
        rows = pack(random_sequences(seed, longest=longest), row_length=10 * BLOCK)
        assert len(rows.ids) == 1
        with torch.no_grad():
            tiny.hidden_states(model, batch_of(rows))
        return int(counted.frame_count)

    before = frames(2, 5)
    assert before >= 1
    assert frames(3, 4) == before
    assert frames(5, 6) == before
    assert frames(2, 2 * BLOCK) > before


def test_training_on_a_cpu_is_refused(tiny_model: ModelFactory, tiny_tokenizer: Any, tmp_path: Any) -> None:
    given = {"args": tiny.arguments(tmp_path), "processing_class": tiny_tokenizer}
    with pytest.raises(ValueError, match="no backward pass on a CPU; train with `attn_implementation sdpa`"):
        JepaTrainer(tiny_model("llama", "flex_attention"), train_dataset=tiny.records(), **given)
    losses = []
    for kind in ("sdpa", "flex_attention"):
        trainer = JepaTrainer(tiny_model("llama", kind), eval_dataset=tiny.records(), **given)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_dropout_is_refused(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama", "flex_attention", attention_dropout=0.25)
    enable_trees(model)
    with pytest.raises(ValueError, match=r"no dropout, got 0\.25"):
        tiny.hidden_states(model.train(), batch_of(packed(1)[1]))


# On a GPU (pytest -m cuda), before anything is measured there. The compiled kernel takes heads of 16 and more.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2_window": {"hidden_size": 48, "sliding_window": 41},
    "gemma2_window": {"head_dim": 16, "sliding_window": 41},
}
KINDS = [(name, kind) for name in SHAPES for kind in ("sdpa", "eager", "flex_attention")]
KINDS.remove(("gemma2_window", "sdpa"))  # transformers refuses it: soft cap


def states_and_gradients(model: Any, *, together: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of trees, or of a plain pass for each sequence, and the gradients of a scalar."""
    sequences, rows = packed(1)
    if together:
        flat = tiny.hidden_states(model, batch_of(rows).to("cuda"))
        result = torch.cat([flat[torch.from_numpy(path).to("cuda")] for path in rows.paths])
    else:
        ids = [torch.from_numpy(each.ids).long()[None].to("cuda") for each in sequences]
        passes = [model.get_decoder()(input_ids=each, use_cache=False).last_hidden_state[0] for each in ids]
        result = torch.cat(passes)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(7)).to(result)
    return result.detach().float(), tiny.gradients(model, (result * weights).sum())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# torch.compile looks at gradients, and its own code uses what is deprecated.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_on_cuda(architecture: str, kind: str, tiny_model: ModelFactory) -> None:
    """Equal to separate passes, and in half precision as far from them as separate passes in half precision are."""
    plain = tiny_model(architecture, "eager", **SHAPES[architecture]).to("cuda")
    model = tiny_model(architecture, kind, **SHAPES[architecture]).to("cuda")
    enable_trees(model)
    wanted, gradients = states_and_gradients(plain, together=False)
    found, other = states_and_gradients(model, together=True)
    tiny.assert_same(found, wanted, 1e-4)
    tiny.assert_same_gradients(other, gradients, 3e-4)

    def errors(states: Tensor, found: dict[str, Tensor]) -> list[float]:
        both = torch.cat([(found[name].float() - value).flatten() for name, value in gradients.items()])
        size = torch.cat([value.flatten() for value in gradients.values()]).norm()
        return [float((states - wanted).norm() / wanted.norm()), float(both.norm() / size)]

    ours = errors(*states_and_gradients(model.bfloat16(), together=True))
    theirs = errors(*states_and_gradients(plain.bfloat16(), together=False))
    assert all(0 < mine < 1.5 * other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
