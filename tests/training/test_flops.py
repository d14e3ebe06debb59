"""FLOPs: by hand, and derived equal to counted for architectures, adapters, encodings, checkpointing, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from stepjepa.batch.collate import Collator
from stepjepa.batch.costs import Costs
from stepjepa.batch.micro_batch import Batch
from stepjepa.config.lora import LoraSettings
from stepjepa.models.architecture import attach_heads, find_decoder, without_heads
from stepjepa.models.attention import enable_trees
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.lm_head import LMHead
from stepjepa.models.loading import add_lora
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.pair_cache import cache_pairs
from stepjepa.objectives.term import Context
from stepjepa.objectives.text import LMLoss, PromptLoss
from stepjepa.training import flop_counts
from stepjepa.training.flop_counter import counting
from stepjepa.training.flops import FlopModel, Shape
from stepjepa.training.recomputation import Recomputation
from stepjepa.views.sequences import Pair, SampledRecord, TokenizedRecord, View

pytestmark = [
    # PEFT knows the names of experts in other versions of a family, and says that it did not find them.
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),
    # It says that it has noticed the transposed layers of GPT-2.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

# Cosines multiply no matrices, so that all that is counted is derived.
OBJECTIVE = Objective([LMLoss(), Alignment()])


def measure(function: Callable[[], Any]) -> int:
    """FLOPs of a call by torch's counter."""
    with counting() as counter:
        function()
    return int(counter.get_total_flops())


def random_record(seed: int) -> TokenizedRecord:
    """A record with a system prompt of 5 tokens that all have, and a pair of two pieces of it."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(11, 23))
    ids = np.concatenate([np.arange(5), generator.integers(5, 380, size)]).astype(np.int32)
    middle, length = int(generator.integers(8, 12)), len(ids)
    places = np.arange(length, dtype=np.int32)
    pair = Pair(View(ids, 5, middle, True), View(ids, middle, length - 2, True))
    return TokenizedRecord(ids, places[middle - 1 : length - 1], places[4 : middle - 1], (pair,))


RECORDS = [random_record(seed) for seed in range(5)]


def batch(encoding: Any = "tree", *, views: bool = True, layout: str = "separate", prompt: bool = False) -> Batch:
    predictors = np.array([386, 387], np.int32)
    segments = {"kernel": "calls", "costs": Costs(1.0, 1.0, call=300.0)} if encoding == "segments" else {}
    encoding = "rows" if encoding == "rows" else "tree"
    collator = Collator(layout, predictors, encoding=encoding, row_length=97, prompt_labels=prompt, **segments)
    return collator(SampledRecord(record, views) for record in RECORDS)


def run(model: Any, given: Batch, objective: Objective = OBJECTIVE, context: Context | None = None) -> None:
    jepa_loss(model, given, objective, context=context).loss.backward()


def prepared(name: str, attention: str = "sdpa", adapter: str = "none", encoding: str = "tree") -> Any:
    """A model that has been tried out as its first pass does it, which is not to be counted."""
    model = tiny.make_model(name, attention)
    if encoding != "rows":
        enable_trees(model, segments=encoding == "segments")
    if adapter != "none":
        rows: Any = [7, 11] if adapter == "with token rows" else []
        rows = {"embed_tokens": [7, 11], "lm_head": [11]} if adapter == "with rows of the head" else rows
        model = add_lora(model, LoraSettings(3), rows)
    LMHead(model)
    return model.train()


def test_one_matrix_by_hand() -> None:
    layer = nn.Linear(7, 5, bias=False)
    values = torch.ones(3, 7)
    assert measure(lambda: layer(values)) == 2 * 3 * 7 * 5
    # The weight's gradient, and none of an input that needs none.
    assert measure(lambda: layer(values).sum().backward()) == 2 * (2 * 3 * 7 * 5)


def test_products_of_experts_by_hand() -> None:
    # The operation wants widths that are multiples of 8.
    experts = torch.ones(3, 16, 24, dtype=torch.bfloat16)
    rows = torch.ones(7, 16, dtype=torch.bfloat16)
    ends = torch.tensor([2, 5, 7], dtype=torch.int32)
    assert measure(lambda: torch._grouped_mm(rows, experts, offs=ends)) == 2 * 7 * 16 * 24
    # Five rows of each expert.
    apart = torch.ones(3, 5, 16, dtype=torch.bfloat16)
    assert measure(lambda: torch._grouped_mm(apart, experts)) == 3 * 2 * 5 * 16 * 24


def test_a_pass_by_hand() -> None:
    model = tiny.make_model("llama", "eager")
    flops = FlopModel.of(model)
    # Two layers of width 33: queries and output 30, key and value 10 each, an MLP of 37.
    matrices = 2 * (33 * 30 + 2 * 33 * 10 + 30 * 33 + 3 * 33 * 37)
    assert matrices == 12606
    # Three heads of size 10: scores, then values.
    square = 2 * 3 * (10 + 10)
    # The backward pass costs twice the forward pass.
    assert flops == FlopModel(token=3 * 2 * matrices, square=3 * 2 * square, label=3 * 2 * 33 * 389)
    # Two rows of 7 tokens, 3 labels.
    shape = Shape(14, 98, 3, 0)
    assert flops.of_shape(shape) == 3 * (14 * 25212 + 98 * 240 + 3 * 25674) == 3 * 453_510
    # A fused kernel computes the scores a second time.
    fused = FlopModel.of(tiny.make_model("llama", "sdpa"))
    assert fused.of_shape(shape) == 3 * 453_510 + 98 * 2 * 2 * 3 * 10


def test_shapes_by_hand() -> None:
    # Main text, source and target of each record; rows of one sequence each, none a beginning of another.
    rows = Shape.of(batch("rows"))
    longest, labels = max(len(record.ids) for record in RECORDS), sum(len(record.labels) for record in RECORDS)
    assert rows == Shape(15 * longest, 15 * longest**2, labels, 5)
    assert Shape.of(batch("rows", views=False)) == Shape(5 * longest, 5 * longest**2, labels, 0)
    assert Shape.of(batch("rows", prompt=True)).labels == labels + sum(len(record.prompt) for record in RECORDS)
    # What follows the system prompt is read at one position for all records of a row.
    assert Shape.of(batch(prompt=True)).labels < Shape.of(batch("rows", prompt=True)).labels
    tree = Shape.of(batch())
    assert tree.labels == labels
    assert tree.tokens < rows.tokens
    assert tree.squares == tree.tokens * batch()["input_ids"].shape[1]
    # A process that an uneven last step leaves empty still runs a token.
    assert Shape.of(Collator("separate", np.array([1], np.int32))([None])) == Shape(1, 1, 0, 0)


BOTH = ("none", "with token rows")
CASES = [
    *(("llama", attention, adapter, "tree") for attention in ("sdpa", "eager") for adapter in BOTH),
    *(("qwen3", "sdpa", "none", "rows"), ("gpt2", "eager", BOTH[1], "tree"), ("gpt2", "sdpa", "none", "rows")),
    *(("gemma2_window", "eager", "none", "tree"), ("qwen3_moe", "sdpa", BOTH[1], "tree")),
    *(("qwen3_moe", "eager", "none", "rows"),),
    *((name, "sdpa", BOTH[1], "segments") for name in ("llama", "gpt2", "gemma3_window")),
    ("qwen3", "sdpa", "with rows of the head", "tree"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "attention", "adapter", "encoding"), CASES)
def test_derived_equals_counted(name: str, attention: str, adapter: str, encoding: str) -> None:
    model = prepared(name, attention, adapter, encoding)
    flops = FlopModel.of(model)
    for views in (True, False):
        given = batch(encoding, views=views)
        assert flops.of_batch(given) == measure(lambda: run(model, given))  # noqa: B023  # called at once


def made(name: str, **changes: Any) -> Any:
    if name != "modernbert-decoder":
        return tiny.make_model(name, "eager", **changes)
    shape = {"hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = AutoConfig.for_model(name, vocab_size=tiny.VOCABULARY, **ids, **shape, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", ["bert", "modernbert-decoder", "minicpm3"])
def test_layers_between_decoder_and_head_are_counted(name: str, adapter: bool) -> None:
    """A dense layer of BERT and ModernBERT; MiniCPM3 scales, which takes no product."""
    model = made(name, tie_word_embeddings=not adapter)
    enable_trees(model, segments=False)
    if adapter:
        model = add_lora(model, LoraSettings(3), [])
    assert LMHead(model).around.before
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flops = FlopModel.of(model.train())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for prompt in (False, True):
        given = batch(prompt=prompt)
        objective = Objective([LMLoss(), *[PromptLoss()] * prompt, Alignment()])
        assert flops.of_batch(given) == measure(lambda: run(model, given, objective))  # noqa: B023  # called at once


def test_a_dense_layer_before_the_head_by_hand() -> None:
    model = tiny.make_model("bert", "eager")
    vocabulary, width = model.get_input_embeddings().weight.shape
    # Forward, gradient of the input, gradient of the weight.
    assert FlopModel.of(model).label == 3 * 2 * (vocabulary * width + width * width)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_convolutions_pad_so_that_the_count_is_a_little_off(name: str) -> None:
    model, given = prepared(name, encoding="rows"), batch("rows")
    assert FlopModel.of(model).of_batch(given) == pytest.approx(measure(lambda: run(model, given)), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_passes_with_and_without_values_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = FlopModel.of(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    monkeypatch.setattr(flop_counts, "_SMALL", 0)
    assert FlopModel.of(model) == small


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("kind", ["none", "with token rows", "frozen below"])
def test_a_few_layers_say_what_all_of_them_cost(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly; where layers differ, or have another name, all are run."""

    model = tiny.make_model(name, "eager", num_hidden_layers=7)
    if kind == "with token rows":
        model = add_lora(model, LoraSettings(3), [7, 11])
    elif kind == "frozen below":
        for parameter in [*model.parameters()][:30]:
            parameter.requires_grad_(False)
    passes: list[int] = []
    count = flop_counts._count
    monkeypatch.setattr(flop_counts, "_count", lambda *given: passes.append(1) or count(*given))
    few = FlopModel.of(model)
    assert len(passes) == (6 if name in ("llama", "qwen3") and kind != "frozen below" else 3)
    monkeypatch.setattr(flop_counts, "_FEWEST", 99)
    assert FlopModel.of(model) == few


def test_labels_of_the_prompt() -> None:
    model = prepared("qwen3")
    given = batch(prompt=True)
    objective = Objective([LMLoss(), PromptLoss(), Alignment()])
    assert FlopModel.of(model).of_batch(given) == measure(lambda: run(model, given, objective))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter", "reentrant"),
    [
        *(("llama", "with token rows", reentrant) for reentrant in (False, True)),
        ("gpt2", "none", True),
        ("qwen3_moe", "none", False),
    ],
)
def test_gradient_checkpointing(name: str, adapter: str, reentrant: bool) -> None:
    model = prepared(name, "eager", adapter)
    flops, once = FlopModel.of(model, recomputed=Recomputation(reentrant=reentrant)), FlopModel.of(model)
    # The older name warns in the newest version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    given = batch()
    assert flops.of_batch(given) == measure(lambda: run(model, given))
    assert once.of_batch(given) < flops.of_batch(given)


def enable_checkpointing(model: Any, options: dict[str, Any], every_n_layers: int) -> None:
    # The older name warns in the newest version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options, every_n_layers=every_n_layers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("adapter", BOTH)
@pytest.mark.parametrize("layers", [6, 7, 11])
@pytest.mark.parametrize("every_n_layers", [1, 2, 3, 13])
def test_every_so_many_layers_are_counted_twice(
    every_n_layers: int, layers: int, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were counted so, and a few layers said too much or too little of the others."""
    model = tiny.make_model("llama", "eager", num_hidden_layers=layers)
    enable_trees(model, segments=False)
    model = model if adapter == "none" else add_lora(model, LoraSettings(3), [7, 11])
    LMHead(model.train())
    recomputed = Recomputation(every_n_layers)
    numbers: list[int] = []
    count = flop_counts._count

    def counted(copied: Any, length: int) -> Any:
        numbers.append(len(find_decoder(copied).layers))
        return count(copied, length)

    monkeypatch.setattr(flop_counts, "_count", counted)
    flops = FlopModel.of(model, recomputed=recomputed)
    enable_checkpointing(model, {"use_reentrant": False}, every_n_layers)
    given = batch()
    assert flops.of_batch(given) == measure(lambda: run(model, given))
    # A few layers are run in place of all, where they take less time.
    few = {1: {2, 3}, 2: {2 + layers % 2, 4 + layers % 2}, 3: {2 + (layers - 2) % 3, 5 + (layers - 2) % 3}}
    fewer = few.get(every_n_layers, {99})
    assert {*numbers} == (fewer if sum(fewer) < layers else {layers})


def test_layers_that_a_model_checkpoints_by_itself_are_counted_twice() -> None:
    """Enabled on the model, which the arguments do not name."""
    model = prepared("llama", "eager")
    enable_checkpointing(model, {"use_reentrant": False}, 2)
    given = batch()
    assert FlopModel.of(model).of_batch(given) == measure(lambda: run(model, given))
    # The arguments come first, as in Trainer.
    flops = FlopModel.of(model, recomputed=Recomputation())
    enable_checkpointing(model, {"use_reentrant": False}, 1)
    assert flops.of_batch(given) == measure(lambda: run(model, given))


def test_a_variable_length_call_counts_as_its_segments_do() -> None:
    """With grouped heads, which torch 2.11 refuses to count; the kernel itself runs on a GPU alone."""
    queries, keys, heads, groups, size = (3, 1, 4), (5, 1, 6), 6, 2, 8
    counter = counting()
    with counter:
        for several, more in zip(queries, keys, strict=True):
            of_query = torch.randn(1, heads, several, size, requires_grad=True)
            of_key, of_value = (torch.randn(1, groups, more, size, requires_grad=True) for _ in range(2))
            forward = counter.get_total_flops()
            attention = F.scaled_dot_product_attention(of_query, of_key, of_value, enable_gqa=True)
            forward = counter.get_total_flops() - forward
            assert forward == 2 * heads * several * more * 2 * size
            attention.sum().backward()
    bounds = [torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32) for sizes in (queries, keys)]
    query, key = torch.empty(sum(queries), heads, size), torch.empty(sum(keys), groups, size)
    formulas = counter.flop_registry
    result = formulas[torch.ops.aten._flash_attention_forward](query, key, key, *bounds, 4, 6, 0.0, True, out_val=())
    result += formulas[torch.ops.aten._flash_attention_backward](
        query, query, key, key, query, query, *bounds, 4, 6, 0.0, True, query, query, out_val=()
    )
    assert result == counter.get_total_flops() == 2 * heads * (15 + 1 + 24) * 7 * size


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_predictor_head(kind: str) -> None:
    model = prepared("qwen3")
    without = FlopModel.of(model)
    objective = Objective([LMLoss(), Alignment(head=kind)])
    # A module of somebody's own term is left out.
    attach_heads(model, {**objective.heads(model.config), "own_head": nn.Linear(33, 7)})
    flops = FlopModel.of(model)
    assert flops.pair == 3 * 2 * 33 * 33 * (1 if kind == "linear" else 4)
    given = batch()
    assert flops.of_batch(given) == measure(lambda: run(model, given, objective))
    assert flops.regular() == without


def test_averaged_decoder_runs_where_there_are_pairs() -> None:
    model = prepared("llama")
    attach_heads(model, Objective([Alignment(head="linear")]).heads(model.config))
    flops = FlopModel.of(model, ema=True)
    with without_heads(model):
        encoder = EmaEncoder(model, 0.9)
    context = Context(ema_states=encoder.states)
    given, plain = batch(), batch(views=False)
    assert flops.of_batch(given) == measure(lambda: run(model, given, context=context))
    counted = measure(lambda: run(model, plain, context=context))
    assert flops.of_batch(plain) == flops.regular().of_batch(plain) == counted


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_first_pass_of_a_step_runs_where_there_are_pairs(name: str) -> None:
    model = prepared(name)
    objective = Objective([LMLoss(), Alignment(head="mlp")])
    attach_heads(model, objective.heads(model.config))
    flops = FlopModel.of(model, first_pass=True)
    given, plain = batch(), batch(views=False)

    def step() -> None:
        (cached,) = cache_pairs(model, [given], {}, Context())
        run(model, given, objective, Context(cached=cached))

    assert flops.of_batch(given) == measure(step)
    assert flops.of_batch(plain) == flops.regular().of_batch(plain)


@pytest.mark.slow
def test_regular_training_trains_no_token_rows() -> None:
    # Tied weights: the two rows of width 33 are in the head, too, with a forward product and two backward ones.
    flops = FlopModel.of(prepared("llama", "sdpa", "with token rows"))
    regular = FlopModel.of(prepared("llama", "sdpa", "plain"))
    assert flops.token_rows == 3 * 2 * 33 * 2
    assert flops.regular() == regular
    assert flops.regular(trains_rows=True) == flops
    # Untied ones leave the head alone.
    assert FlopModel.of(prepared("qwen3", "sdpa", "with token rows")).token_rows == 0
    # Their own rows of an untied head are labels, which regular training trains, too.
    head = FlopModel.of(prepared("qwen3", "sdpa", "with rows of the head"))
    assert head.regular() == head
