"""``jepa.collate`` in worker processes: it takes no model along, whose weights and hooks have no place there."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stepjepa import Batch, Jepa, JepaConfig, RecordCollator
from tiny import make_model, records


def jepa_that_has_run(tokenizer: Any) -> Jepa:
    """transformers leaves a hook that can't be pickled on a model whose middle layers were read."""
    jepa = Jepa(make_model("llama"), tokenizer, JepaConfig())
    jepa.embed(["Why?"], layer=1)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(jepa.model)
    return jepa


def assert_equal_batches(first: Batch, second: Batch) -> None:
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.attention_mask, second.attention_mask)
    assert torch.equal(first.readouts("target").last, second.readouts("target").last)


def test_it_is_sent_without_the_model(tiny_tokenizer: Any) -> None:
    jepa = jepa_that_has_run(tiny_tokenizer)
    sent = pickle.dumps(jepa.collate)
    weights = sum(weight.numel() * weight.element_size() for weight in jepa.model.parameters())
    assert len(sent) < weights / 4
    collate: RecordCollator = pickle.loads(sent)
    assert_equal_batches(collate(records()), jepa.collate(records()))
    assert_equal_batches(collate(records(), views=False), jepa.collate(records(), views=False))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_make_the_batches_of_one_process(method: str, tiny_tokenizer: Any) -> None:
    """Slow for processes that import torch."""
    jepa, chats = jepa_that_has_run(tiny_tokenizer), records()
    loader = DataLoader(chats, batch_size=2, collate_fn=jepa.collate, num_workers=2, multiprocessing_context=method)
    batches = [*loader]
    assert len(batches) == -(-len(chats) // 2)
    for number, batch in enumerate(batches):
        assert_equal_batches(batch, jepa.collate(chats[2 * number : 2 * number + 2]))


OWN_LAYOUT = """
from stepjepa import layout
from stepjepa.views.layouts import separate

@layout("{name}", ("llm-jepa",))
def place(record, predictors, reading):
    return separate(record, predictors, reading)
"""


@pytest.mark.parametrize("address", [False, True])
def test_a_layout_of_ones_own_is_registered_where_it_is_sent(
    address: bool, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is spawned has imported nothing of the user's, whether the layout is called by name or address."""
    module = f"own_layout_{address}"
    (tmp_path / f"{module}.py").write_text(OWN_LAYOUT.format(name=module))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(module)
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(layout=f"{module}:place" if address else module))
    (tmp_path / "sent").write_bytes(pickle.dumps((jepa.collate, records())))
    code = (
        "import pickle, sys; sys.path.insert(0, sys.argv[1]); collate, records = pickle.load(open(sys.argv[2], 'rb'));"
        "print(collate(records).input_ids.tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "sent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(jepa.collate(records()).input_ids.tolist())
