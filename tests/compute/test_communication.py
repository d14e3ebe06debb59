"""What a step sends, worked out by hand."""

from __future__ import annotations

import torch
from torch import nn

from stepjepa.compute.communication import Transfer, total, transfers
from stepjepa.compute.memory import Sharding

# 7 x 5 trained weights and 3 x 11 frozen ones.
TRAINED, ALL = 7 * 5, 7 * 5 + 3 * 11


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.ModuleList([nn.Linear(5, 7, bias=False), nn.Linear(11, 3, bias=False)]).to(dtype)
    layers[1].requires_grad_(False)
    return layers


def sent(sharding: Sharding, **options: object) -> dict[str, int]:
    settings = {"processes": 4, "micro_batches": 3, **options}
    return {one.name: one.bytes for one in transfers(model(), sharding, **settings)}  # type: ignore[arg-type]


def test_one_process_sends_nothing() -> None:
    assert transfers(model(), Sharding(), processes=1, micro_batches=3, gathered=13) == []


def test_ddp_sums_gradients_up_once_a_step_in_the_dtype_of_the_weights() -> None:
    # A ring: 3/4 of them to scatter the sums, as much to gather them.
    assert sent(Sharding()) == {"gradients, summed up": 2 * TRAINED * 4 * 3 // 4}
    assert sent(Sharding(), mixed=torch.bfloat16) == sent(Sharding())


def test_fsdp_gathers_for_every_pass_and_scatters_once() -> None:
    sharding = Sharding("FSDP", 4, 4, 4)
    assert sent(sharding, mixed=torch.bfloat16) == {
        "gradients, scattered": round(TRAINED * 2 * 0.75),
        # Frozen weights are gathered too; forward and backward, three micro-batches.
        "weights, gathered": 6 * ALL * 2 * 3 // 4,
    }
    assert sent(sharding, synced=True)["gradients, scattered"] == 3 * TRAINED * 4 * 3 // 4
    whole = Sharding("FSDP", 4, 4, 4, stays_whole=True)
    assert sent(whole)["weights, gathered"] == 3 * ALL * 4 * 3 // 4


def test_stages_of_deepspeed() -> None:
    def of(stage: int) -> dict[str, int]:
        weights, gradients, states = (4 if stage >= least else 1 for least in (3, 2, 1))
        return sent(Sharding(f"DeepSpeed ZeRO-{stage}", weights, gradients, states))

    once = TRAINED * 4 * 3 // 4
    assert of(0) == {"gradients, summed up": 2 * once}
    assert of(1) == {"gradients, scattered": once, "weights, gathered": once}
    assert of(2) == {"gradients, scattered": 3 * once, "weights, gathered": once}
    assert of(3) == {"gradients, scattered": 3 * once, "weights, gathered": 6 * ALL * 4 * 3 // 4}


def test_embeddings_go_to_every_other_process_and_their_gradients_come_back() -> None:
    found = transfers(model(), Sharding(), processes=4, micro_batches=1, gathered=100)
    # 100 bytes to three others; the gradients of all 400 bytes are summed up by a ring.
    assert found[-1].bytes == 3 * 100 + 2 * 400 * 3 // 4
    assert total(found) == found[0].bytes + found[1].bytes
    assert total([Transfer("a", 3, ""), Transfer("b", 5, "")]) == 8
