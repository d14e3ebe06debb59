"""Our LM loss is the model's own, in value and gradient: some model types here, all of them in tests/soak."""

from __future__ import annotations

import re

import pytest
import transformers
from model_types import DIFFERS, MARK, MODEL_TYPES, compare, main, table

import page_tables

# Models with layers or a scale between decoder and LM head.
CHANGE_STATES = [
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_text", "megatron-bert", "minicpm3",
    "modernbert-decoder", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
]  # fmt: skip
PLAIN = ["llama", "qwen3", "gpt2", "phi", "gemma2", "granite", "cohere", "gpt_neo", "mamba", "bart", "bloom", "lfm2"]


def known(model_type: str) -> str:
    if model_type not in MODEL_TYPES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return model_type


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", CHANGE_STATES + PLAIN)
def test_the_lm_loss_is_the_models_own(model_type: str) -> None:
    compared = compare(known(model_type))
    assert compared.is_exact, compared
    assert compared.changes_states == (model_type in CHANGE_STATES)


@pytest.mark.slow
def test_minicpm3_and_decoders_of_bert_stay_trees() -> None:
    for model_type in ("minicpm3", "bert", "modernbert-decoder", "electra"):
        assert compare(known(model_type)).encoding == "tree"


@pytest.mark.slow
def test_a_wrong_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is needed: with the head on the decoder's own states the losses differ, and the table says it."""
    from stepjepa.models import lm_head

    monkeypatch.setattr(lm_head, "_try", lambda *_: lm_head.Around())
    wrong = [compare(known(name)) for name in ("minicpm3", "bert")]
    assert all(each.loss > 1e-3 and each.gradient > 1 for each in wrong)
    assert f"| {DIFFERS} | **2**: minicpm3, bert |" in table(wrong)


def names_by_kind(markdown: str) -> dict[str, set[str]]:
    """Model types of each row of the table, without reasons."""
    rows = re.findall(r"^\| (.+?) \| \*\*\d+\*\*: (.+?) \| ", markdown, re.MULTILINE)
    return {kind: set(re.sub(r" \(.*?\)(?=,|$)", "", names).split(", ")) for kind, names in rows}


def test_the_page_lists_every_model_type() -> None:
    page = page_tables.read(MARK)
    written = names_by_kind(page)
    listed = [name for names in written.values() for name in names]
    assert DIFFERS not in written
    assert len(listed) == len(set(listed)) > 150
    message = re.search(r"transformers (\S+): (\d+) of (\d+) model types", page)
    assert message is not None
    assert int(message[3]) == len(listed)
    if message[1] == transformers.__version__:
        assert set(listed) == set(MODEL_TYPES)
    assert {
        name for name in CHANGE_STATES if any(name in names for kind, names in written.items() if "makes of" in kind)
    }


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["llama"])
    output = capsys.readouterr().out
    assert "1 of 1 model types are compared and agree" in output
    assert "| run as trees; the LM head reads the decoder's states | **1**: llama |" in output
