"""vLLM, and other servers of embeddings, give the vectors of ``Jepa.embed`` from a folder of ``export --embeddings``.

``STEPJEPA_TEST_EMBEDDING_SERVER`` is the command of a server with ``{folder}`` and ``{port}``; it names the model
``exported``::

    python -m vllm.entrypoints.openai.api_server --runner pooling --model {folder} --port {port} ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_other_servers import serving
from test_sentence_transformer import TEXTS, export

from stepjepa import Jepa, JepaConfig
from stepjepa.models.presets import preset_config, train_tokenizer

VARIABLE = "STEPJEPA_TEST_EMBEDDING_SERVER"
COMMAND = os.environ.get(VARIABLE, "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason=f"{VARIABLE} names no command of a server with {{folder}} and {{port}}"),
]


@pytest.mark.parametrize(("layout", "system"), [("separate", None), ("branched", "Add the numbers.")])
def test_a_server_embeds_as_we_do(layout: str, system: str | None, tmp_path: Path) -> None:
    """As messages, with the task as a variable of the template, and as texts in the form of the folder's README."""
    httpx = pytest.importorskip("httpx", reason="needs the extra 'server'")
    jepa = make_jepa(layout)
    jepa.system_prompt = system
    expected = {"query": jepa.embed(TEXTS), "document": jepa.embed(TEXTS, "target")}
    rendered = jepa.embedder("source").tokenizer
    with serving(export(jepa, tmp_path / "folder"), tmp_path / "log", COMMAND) as address:

        def embed(**request: Any) -> list[list[float]]:
            reply = httpx.post(f"{address}/embeddings", json={"model": "exported", **request}, timeout=120)
            assert reply.status_code == 200, reply.text
            return [row["embedding"] for row in reply.json()["data"]]

        for task, vectors in expected.items():
            for text, vector in zip(TEXTS, vectors, strict=True):
                messages = [{"role": "user", "content": text}]
                (row,) = embed(messages=messages, chat_template_kwargs={"task": task})
                np.testing.assert_allclose(row, vector, atol=1e-5)
        texts = ["".join(rendered.render_text(text, "source")) for text in TEXTS]
        np.testing.assert_allclose(embed(input=texts), expected["query"], atol=1e-5)
        assert np.abs(np.asarray(embed(input=TEXTS)) - expected["query"]).max() > 1e-3


def make_jepa(layout: str) -> Jepa:
    """A model of random weights, of the sizes of ``preset:tiny``: servers refuse unusual head sizes."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer(TEXTS, 400)
    config = preset_config("preset:tiny")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    return Jepa(model, tokenizer, JepaConfig(layout=layout, predictors=3))
