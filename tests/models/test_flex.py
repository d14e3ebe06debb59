"""FlexAttention over forests: against separate passes, and its mask against the dense one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import tiny
from stepjepa.compute.shapes import empty_batch, running
from stepjepa.config import JepaConfig
from stepjepa.forests.blocks import BLOCK, padded, static_length
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import Forest, Segment
from stepjepa.forests.masks import batch_visibility, visible
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models import flex
from stepjepa.models.architecture import choose_encoding
from stepjepa.models.attention import FLEX, FLEX_UNFUSED, enable_forest, forest_visibility
from stepjepa.models.embeddings import forward
from stepjepa.models.flex import block_mask, flex_forward, refuse_flex_training
from stepjepa.training.trainer import JepaTrainer

ModelFactory = Callable[..., Any]

CONFIGURATIONS = {
    "step branched": JepaConfig(mode="step-jepa", predictors=2, pairs="all"),
    "step in place": JepaConfig(mode="step-jepa", layout="inplace", predictors=2, pairs="all"),
    "llm separate": JepaConfig(mode="llm-jepa", layout="separate", predictors=1),
    "llm branched": JepaConfig(mode="llm-jepa", layout="branched", predictors=1),
}
NO_FLEX = {"gpt2"}
ARCHITECTURES = [name for name in tiny.ATTENTION_ONLY if name not in NO_FLEX]


@pytest.fixture
def gradients_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's uncompiled kernel has a backward pass on the CPU; two checks keep users from it."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_refuse_gradient", lambda _: None)


def long_forests(*seeds: int) -> list[Forest]:
    """Forests of several blocks, without isolated segments."""
    forests = [tiny.random_forest(seed, isolated=False, longest=2 * BLOCK // 3) for seed in seeds]
    assert max(map(len, forests)) > 2 * BLOCK
    return forests


# -- the mask ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        causal_mask_function,
        sliding_window_causal_mask_function(41),
        chunked_causal_mask_function(53, torch.zeros(3, dtype=torch.long)),
    ],
    ids=["causal", "window", "chunks"],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_block_mask_is_the_dense_mask(seed: int, rule: Callable[..., Tensor]) -> None:
    """Entry by entry by its rule, and block by block as torch finds them by evaluating it."""
    forests = [tiny.random_forest(3 * seed + index, longest=BLOCK) for index in range(3)]
    visibility = batch_visibility(forests, max(map(len, forests)) + 31)
    found = block_mask(visibility, rule)
    visibility = padded(visibility, static_length(visibility.segment_ids.shape[1]))
    length = visibility.segment_ids.shape[1]
    assert found.seq_lengths == (length, length)
    batch, query, key = (torch.arange(size) for size in (3, length, length))
    places = batch[:, None, None], torch.tensor(0), query[:, None], key
    position = visibility.position_ids
    by_position = rule(batch[:, None, None], torch.tensor(0), position[:, :, None], position[:, None, :])
    assert torch.equal(found.mask_mod(*places), visible(visibility) & by_position)

    evaluated = torch_flex.create_block_mask(found.mask_mod, 3, None, length, length, device="cpu")
    assert found.shape == evaluated.shape
    for kind in ("", "full_"):
        for side in ("kv", "q"):
            count, wanted = getattr(found, f"{kind}{side}_num_blocks"), getattr(evaluated, f"{kind}{side}_num_blocks")
            assert torch.equal(count, wanted)
            assert count.dtype == torch.int32
            indices = getattr(found, f"{kind}{side}_indices"), getattr(evaluated, f"{kind}{side}_indices")
            used = torch.arange(indices[0].shape[-1]) < count[..., None]
            assert torch.equal(indices[0][used], indices[1][used])


def test_blocks_are_skipped() -> None:
    """Two roots of two blocks each: of 10 blocks on and below the diagonal 6 are looked at, 2 of them whole."""
    size = 4 * BLOCK
    segments = (Segment(0, 2 * BLOCK), Segment(2 * BLOCK, size, "target"))
    zeros = np.zeros(size, np.int32)
    forest = Forest(
        zeros, np.tile(np.arange(2 * BLOCK, dtype=np.int32), 2), zeros, segments, np.empty((0, 2), np.int32)
    )
    found = block_mask(batch_visibility([forest], size))
    assert found.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert found.full_kv_num_blocks.tolist() == [[[0, 1, 0, 1]]]
    assert found.sparsity() == 100 * (1 - 6 / 16)


# -- forward and gradient ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step branched", "llm separate", "llm branched"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flex_equals_separate_passes(
    architecture: str, name: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "flex_attention")
    enable_forest(model)
    assert model.config._attn_implementation in (FLEX, FLEX_UNFUSED)
    forest = ForestBuilder(trained_tokenizer, CONFIGURATIONS[name]).build(tiny.records())[0]
    with torch.no_grad():
        slow = tiny.separate_states(plain, forest)
        tiny.assert_same(tiny.forest_states(model, forest), slow, what="hidden states")
        outputs = forward(model, ForestCollator(0)([forest]))
    tiny.assert_same(outputs.source, slow[forest.pairs[:, 0]], what="source embeddings")
    tiny.assert_same(outputs.target, slow[forest.pairs[:, 1]], what="target embeddings")


@pytest.mark.parametrize("architecture", ["llama", "qwen2_window", "gemma2_window"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.usefixtures("gradients_on_the_cpu")
def test_gradients_over_several_blocks(architecture: str, tiny_model: ModelFactory) -> None:
    """A batch of trees, each longer than two blocks, beside separate passes; grouped keys, windows, soft caps."""
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "flex_attention")
    enable_forest(model)
    forests = long_forests(1, 2)
    states = tiny.hidden_states(model, ForestCollator(3)(forests))
    slow = [tiny.separate_states(plain, forest) for forest in forests]
    for row, wanted in zip(states, slow, strict=True):
        tiny.assert_same(row[: len(wanted)], wanted, 3e-5)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(7))
    pairs = [
        (row[: len(wanted)] * w[: len(wanted)]).sum() for row, wanted, w in zip(states, slow, weights, strict=True)
    ]
    expected = [(wanted * w[: len(wanted)]).sum() for wanted, w in zip(slow, weights, strict=True)]
    tiny.assert_same_gradients(
        tiny.gradients(model, torch.stack(pairs).sum()), tiny.gradients(plain, torch.stack(expected).sum()), 3e-5
    )


def test_in_place_equals_sdpa(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Isolated segments have no separate pass."""
    dense, model = tiny_model("qwen3"), tiny_model("qwen3", "flex_attention")
    for each in (dense, model):
        enable_forest(each)
    forests = ForestBuilder(trained_tokenizer, CONFIGURATIONS["step in place"]).build(tiny.records())
    with torch.no_grad():
        wanted = tiny.hidden_states(dense, ForestCollator(0)(forests))
        found = tiny.hidden_states(model, ForestCollator(0)(forests))
    for row, other, forest in zip(found, wanted, forests, strict=True):
        tiny.assert_same(row[: len(forest)], other[: len(forest)])


def test_half_precision(tiny_model: ModelFactory) -> None:
    """As far from single precision as sdpa is."""
    (forest,) = long_forests(1)
    errors = []
    with torch.no_grad():
        wanted = tiny.separate_states(tiny_model("llama"), forest)
        for attention in ("sdpa", "flex_attention"):
            model = tiny_model("llama", attention)
            enable_forest(model)
            found = tiny.forest_states(model.bfloat16(), forest).float()
            errors.append(float((found - wanted).norm() / wanted.norm()))
    assert 0 < errors[1] < 1.5 * errors[0] < 0.1


@pytest.mark.usefixtures("gradients_on_the_cpu")
def test_attention_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink is a key whose score is its own and whose value is zero."""
    (forest,) = long_forests(1)
    visibility = batch_visibility([forest], len(forest))
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 3, len(forest), 5, generator=draw) for _ in range(3))
    sinks = torch.randn(3, generator=draw)
    found, _ = flex_forward(torch.nn.Identity(), query, key, value, block_mask(visibility), s_aux=sinks)
    scores = (query @ key.mT / 5**0.5).masked_fill(~visible(visibility)[:, None], -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 3, len(forest), 1)], -1)
    wanted = scores.softmax(-1)[..., :-1] @ value
    tiny.assert_same(found, wanted.transpose(1, 2))


# -- compilation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel goes through torch.compile, which counts and generates no code."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "_on_cpu", lambda _: False)
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("architecture", ["llama", "qwen2_window", "gemma2_window"])
def test_batches_of_one_size_are_compiled_once(architecture: str, counted: Any, tiny_model: ModelFactory) -> None:
    """Other forests, other lengths, other numbers of segments: only a length of another size is compiled anew."""
    model = tiny_model(architecture, "flex_attention")
    enable_forest(model)

    def compiled(*seeds: int, longest: int) -> int:
        forests = [tiny.random_forest(seed, longest=longest) for seed in seeds]
        with torch.no_grad():
            tiny.hidden_states(model, ForestCollator(0)(forests))
        return int(counted.frame_count)

    before = compiled(1, 2, longest=5)
    assert before >= 1
    assert compiled(2, 5, longest=4) == before
    assert compiled(3, 4, longest=6) == before
    assert compiled(1, 2, longest=50) > before


def test_many_lengths_do_not_run_uncompiled(counted: Any) -> None:
    """Torch gives up compiling after eight shapes unless it is told otherwise."""
    before = 0
    for blocks in range(1, 12):
        size = blocks * BLOCK
        forest = tiny.random_forest(1, longest=3)
        states = torch.randn(1, 1, size, 4)
        flex_forward(torch.nn.Identity(), states, states, states, block_mask(batch_visibility([forest], size)))
        assert counted.frame_count > before
        before = counted.frame_count


def test_many_lengths_on_a_cpu() -> None:
    """There rows are as long as they are."""
    forest = tiny.random_forest(1, longest=3)
    for size in range(40, 60):
        states = torch.randn(1, 1, size, 4)
        mask = block_mask(batch_visibility([forest], size))
        assert flex_forward(torch.nn.Identity(), states, states, states, mask)[0].shape == (1, size, 1, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_the_compiled_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch, tiny_model: ModelFactory) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_on_cpu", lambda _: False)
    plain, model = tiny_model("llama"), tiny_model("llama", "flex_attention")
    enable_forest(model)
    (forest,) = long_forests(1)
    with torch.no_grad():
        tiny.assert_same(tiny.forest_states(model, forest), tiny.separate_states(plain, forest))


# -- choice, errors, plain rows ----------------------------------------------------------------------------------------


def test_flex_is_taken_where_it_is_asked_for(tiny_model: ModelFactory) -> None:
    for name, wanted in (("llama", FLEX), ("gemma2_window", FLEX_UNFUSED)):
        model = tiny_model(name, "flex_attention")
        assert choose_encoding(model, "auto")[0] == choose_encoding(model, "forest")[0] == "forest"
        enable_forest(model)
        assert model.config._attn_implementation == wanted
        enable_forest(model)
        assert model.config._attn_implementation == wanted
        assert choose_encoding(model, "auto")[0] == "forest"


@pytest.mark.parametrize("architecture", ["llama", "gemma2_window", "gemma3_window"])
def test_plain_rows_are_plain(architecture: str, tiny_model: ModelFactory) -> None:
    """As generation runs them, padded on the left, and with a gradient on the CPU."""
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, "flex_attention")
    enable_forest(model)
    ids = torch.randint(0, tiny.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    first, second = model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
    tiny.assert_same(first[mask.bool()], second[mask.bool()])
    found = tiny.gradients(model, first[mask.bool()].square().sum())
    tiny.assert_same_gradients(found, tiny.gradients(plain, second[mask.bool()].square().sum()))
    answers = [each.generate(ids[:1], max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*answers)


def test_training_on_a_cpu_is_refused(tiny_model: ModelFactory, tiny_tokenizer: Any, tmp_path: Any) -> None:
    given = {"args": tiny.arguments(tmp_path), "processing_class": tiny_tokenizer}
    for mode in ("llm-jepa", "regular"):
        with pytest.raises(ValueError, match="no backward pass on a CPU; train with attention implementation 'sdpa'"):
            JepaTrainer(
                tiny_model("llama", "flex_attention"), jepa=JepaConfig(mode=mode), train_dataset=tiny.records(), **given
            )
    losses = []
    for attention in ("sdpa", "flex_attention"):
        trainer = JepaTrainer(tiny_model("llama", attention), eval_dataset=tiny.records(), **given)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_what_flex_can_not_do_is_said(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama", "flex_attention", attention_dropout=0.25)
    enable_forest(model)
    with pytest.raises(ValueError, match="set attention_dropout to 0"):
        refuse_flex_training(model, torch.device("cuda"))
    (forest,) = long_forests(1)
    with pytest.raises(ValueError, match=r"no dropout, got 0\.25"):
        tiny.forest_states(model.train(), forest)
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        tiny.forest_states(model.eval(), forest)
    refuse_flex_training(tiny_model("llama"), torch.device("cpu"))
    refuse_flex_training(tiny_model("llama", "flex_attention"), torch.device("cuda"))


def test_a_dry_run_takes_the_memory_of_a_fused_kernel(tiny_model: ModelFactory) -> None:
    """Shapes alone, gradients included, on a CPU that could not train it."""
    model = tiny_model("llama", "flex_attention")
    enable_forest(model)
    batch = ForestCollator(3)(long_forests(1, 2))
    with running(model):
        (given,) = empty_batch([batch])
        outputs = forward(model, given)
        assert outputs.source.shape == (len(batch["source_index"]), model.config.hidden_size)
        outputs.source.sum().backward()


def test_outside_a_forest_there_is_no_block_mask(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama", "flex_attention")
    enable_forest(model)
    ids = torch.arange(7)[None]
    with forest_visibility(None), torch.no_grad():
        tiny.assert_same(model(ids).logits, tiny_model("llama")(ids).logits)
