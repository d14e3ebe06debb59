"""Folders for sentence-transformers: its embeddings equal those of ``Jepa.embed``, and it needs no code of ours."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from chat_templates import FORMS, in_form
from exported_folders import TEXTS, export, sentence_transformer
from stepjepa import Jepa, JepaConfig, fit_linear_map, fit_projection_heads
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.objectives.fitted import Fitted
from stepjepa.objectives.inputs import EmbedOptions, options_behind
from tiny import make_model

# How Llama 3 and Qwen split a text into words: line ends stay together.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(
    ("architecture", "settings", "system"),
    [
        ("llama", {"predictors": 3}, None),
        ("gpt2", {"predictors": 1, "layout": "branched"}, "Add."),
        ("qwen3", {"predictors": 2, "layout": "branched"}, None),
        ("llama", {"predictors": 2, "reverse_pred": True}, None),
        ("llama", {"predictors": 2, "reverse_pred": True, "layout": "branched"}, "Add."),
        ("gpt2", {"predictors": 2, "front_pred": True}, None),
        ("llama", {"predictors": 0}, None),
        ("gemma3_window", {"predictors": 2}, None),
    ],
    ids=str,
)
def test_its_embeddings_are_ours(
    architecture: str, settings: dict[str, Any], system: str | None, padding: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    jepa = Jepa(make_model(architecture), tiny_tokenizer, JepaConfig(**settings))
    jepa.system_prompt = system
    model = sentence_transformer(export(jepa, tmp_path / "st"))
    assert model.tokenizer.padding_side == "right"
    if architecture == "gpt2" and padding == "left":
        pytest.skip("learned positions are counted from the padding on; the folder pads on the right")
    model.tokenizer.padding_side = padding
    for batch_size in (1, 32):
        queries = model.encode_query(TEXTS, batch_size=batch_size)
        documents = model.encode_document(TEXTS, batch_size=batch_size)
        np.testing.assert_allclose(queries, jepa.embed(TEXTS), atol=1e-5)
        np.testing.assert_allclose(documents, jepa.embed(TEXTS, "target"), atol=1e-5)
        np.testing.assert_array_equal(model.encode(TEXTS, batch_size=batch_size), documents)
    assert np.abs(queries - documents).max() > 1e-3
    assert model.similarity(queries, documents).shape == (7, 7)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("layout", ["separate", "branched"])
@pytest.mark.parametrize("split", ["GPT-2", "Llama 3"])
def test_every_template_is_rendered_as_in_training_or_refused(
    name: str, layout: str, split: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A mean needs the same tokens in front of every text; GPT-2 splits two line ends by what comes behind them."""
    tokenizer, refused = in_form(tiny_tokenizer, FORMS[name]), list[str]()
    if split == "Llama 3":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    for settings in ({"predictors": 2}, {"predictors": 0}, {"predictors": 0, "pooling": "mean"}):
        jepa = Jepa(make_model("llama"), copy.deepcopy(tokenizer), JepaConfig(layout=layout, **settings))
        try:
            folder = export(jepa, tmp_path / f"st{len(refused)}")
        except UserError as error:
            assert "no SentenceTransformer can be written" in str(error)
            refused.append(str(settings))
            continue
        refused.append("")
        model = sentence_transformer(folder)
        np.testing.assert_allclose(model.encode_query(TEXTS), jepa.embed(TEXTS), atol=1e-5)
        np.testing.assert_allclose(model.encode_document(TEXTS), jepa.embed(TEXTS, "target"), atol=1e-5)
    _, last, mean = refused
    assert split == "GPT-2" or bool(mean) <= bool(last)


def test_a_template_that_looks_into_the_text_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    odd = "{% if message['content'].endswith('.') %}<|im_start|>{% endif %}"
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("{{ '<|im_start|>'", odd + "{{ '<|im_start|>'")
    assert odd in tiny_tokenizer.chat_template
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=1))
    with pytest.raises(
        UserError, match="no SentenceTransformer can be written: the chat template and the tokenizer join an end"
    ):
        export(jepa, tmp_path / "st")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "step-jepa"}, "step-jepa embeds steps behind their chat"),
        ({"pooling": "mean", "predictors": 1}, "with predictor tokens, its modules can't average"),
        ({"pooling": "mean", "predictors": 2, "front_pred": True}, "with predictor tokens, its modules can't average"),
        ({"last_token": -2}, "last_token -2 is read inside the template"),
        ({"plain": True}, "a model without a chat format"),
    ],
)
def test_other_readings_are_refused_with_the_reason(
    settings: dict[str, Any], told: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(**settings))
    with pytest.raises(UserError, match=f"no SentenceTransformer can be written: .*{told}"):
        export(jepa, tmp_path / "st")


def test_a_model_without_an_objective_needs_a_readout(tiny_tokenizer: Any, tmp_path: Path) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(mode="regular"))
    with pytest.raises(UserError, match=r"the model has no JEPA objective.*pass `pooling mean`"):
        export(jepa, tmp_path / "st")


MEANS: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("llama", {"predictors": 0, "pooling": "mean"}, {}, None),
    ("gpt2", {"predictors": 0, "pooling": "mean", "layout": "branched"}, {}, "Add."),
    ("gemma3_window", {"predictors": 0, "pooling": "mean", "jepa_layer": 1}, {}, None),
    ("qwen3", {"predictors": 0, "pooling": "mean"}, {}, None),
    ("llama", {"predictors": 0, "pooling": "mean", "reverse_pred": True}, {}, None),
    ("llama", {"mode": "regular"}, {"pooling": "mean"}, None),
    ("gpt2", {"mode": "regular"}, {"pooling": "mean", "layer": 1}, None),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("architecture", "settings", "options", "system"), MEANS, ids=str)
def test_means_are_ours(
    architecture: str,
    settings: dict[str, Any],
    options: EmbedOptions,
    system: str | None,
    padding: str,
    tiny_tokenizer: Any,
    tmp_path: Path,
) -> None:
    """What is in front of a text is no part of the mean, also where it is long and has special tokens."""
    jepa = Jepa(make_model(architecture), tiny_tokenizer, JepaConfig(**settings))
    jepa.system_prompt = system
    model = sentence_transformer(export(jepa, tmp_path / "st", **options))
    if architecture == "gpt2" and padding == "left":
        pytest.skip("learned positions are counted from the padding on; the folder pads on the right")
    model.tokenizer.padding_side = padding
    for batch_size in (1, 32):
        queries = model.encode_query(TEXTS, batch_size=batch_size)
        documents = model.encode_document(TEXTS, batch_size=batch_size)
        np.testing.assert_allclose(queries, jepa.embed(TEXTS, **options), atol=1e-5)
        np.testing.assert_allclose(documents, jepa.embed(TEXTS, "target", **options), atol=1e-5)
        np.testing.assert_array_equal(model.encode(TEXTS, batch_size=batch_size), documents)
    assert np.abs(queries - documents).max() > 1e-3
    with pytest.raises(Exception, match="this model embeds a text alone"):
        model.encode(["Why?"], prompt="Represent: ")


@pytest.mark.parametrize("layer", [0, 1, -2, 2])
def test_any_layer_can_be_read(layer: int, tiny_tokenizer: Any, tmp_path: Path) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(jepa_layer=layer, predictors=3 if layer else 0))
    model = sentence_transformer(export(jepa, tmp_path / "st"))
    np.testing.assert_allclose(model.encode_query(TEXTS), jepa.embed(TEXTS), atol=1e-5)
    np.testing.assert_allclose(model.encode_document(TEXTS), jepa.embed(TEXTS, "target"), atol=1e-5)
    other = jepa.embed(TEXTS, layer=2 if layer != 2 else 1)
    assert np.abs(model.encode_query(TEXTS) - other).max() > 1e-3


def pairs_of_numbers() -> list[dict[str, Any]]:
    def chat(number: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"What is {number}+{number}?"},
            {"role": "assistant", "content": f"It is {2 * number}."},
        ]

    return [{"messages": chat(number)} for number in range(31)]


@pytest.mark.parametrize(
    ("fit", "settings", "options"),
    [
        (fit_linear_map, {"predictors": 2}, {}),
        (fit_linear_map, {"mode": "regular"}, {}),
        (fit_linear_map, {"mode": "regular"}, {"layer": 1, "pooling": "mean"}),
        (fit_linear_map, {"predictors": 0, "pooling": "mean"}, {"layer": 0}),
        (fit_projection_heads, {"predictors": 2}, {"layer": 1}),
        (fit_projection_heads, {"mode": "regular"}, {"layer": 1, "pooling": "mean"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_map_is_in_the_folder(
    fit: Callable[..., Fitted], settings: dict[str, Any], options: EmbedOptions, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(**settings))
    fitted = fit(jepa, pairs_of_numbers(), **options)
    behind = options_behind(fitted)
    model = sentence_transformer(export(jepa, tmp_path / "st", **behind))
    queries, documents = jepa.embed(TEXTS, **behind), jepa.embed(TEXTS, "target", **behind)
    np.testing.assert_allclose(model.encode_query(TEXTS), queries, atol=1e-4)
    np.testing.assert_allclose(model.encode_document(TEXTS), documents, atol=1e-4)
    np.testing.assert_allclose(model.encode(TEXTS), documents, atol=1e-4)
    np.testing.assert_allclose(model.encode(TEXTS, task="query"), queries, atol=1e-4)  # as LangChain calls it
    model.save_pretrained(str(tmp_path / "saved"))
    np.testing.assert_allclose(sentence_transformer(tmp_path / "saved").encode_query(TEXTS), queries, atol=1e-4)
    readme = (tmp_path / "st" / "README.md").read_text()
    records = 31 if fit is fit_linear_map else 28  # three of them choose the epochs
    assert f"behind {fitted.kind} fitted on {records} records" in readme
    assert "A server that reads the last token of the last layer, as vLLM does, gives other vectors" in readme


def test_the_last_layer_by_its_number_is_the_last_layer(tiny_tokenizer: Any, tmp_path: Path) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(jepa_layer=2))
    np.testing.assert_allclose(
        sentence_transformer(export(jepa, tmp_path / "st")).encode_query(TEXTS), jepa.embed(TEXTS), atol=1e-5
    )


def test_the_command_writes_a_folder_that_needs_no_code_of_ours(
    tiny_tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=2, layout="branched"))
    jepa.save(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**record, "system_prompts": ["Add.", "Count."]}))
    command = ["export", "--embeddings", "--model_path", str(tmp_path / "run"), "--output_dir", str(tmp_path / "st")]
    assert main(command) == 2
    assert "several system prompts ('Add.', 'Count.'); choose one by --system_prompt" in capsys.readouterr().err
    assert not (tmp_path / "st").exists()
    assert main([*command, "--system_prompt", "Count."]) == 0
    assert "load it with sentence_transformers.SentenceTransformer" in capsys.readouterr().out
    assert main([*command, "--system_prompt", "Count."]) == 2
    readme = (tmp_path / "st" / "README.md").read_text()
    for part in ('query_encode_kwargs={"task": "query"}', "SentenceTransformerEncoderWrapper", "Count."):
        assert part in readme
    again = Jepa.from_pretrained(tmp_path / "run", device="cpu")
    again.system_prompt = "Count."
    expected = again.embed(["Why?"])
    # Nobody can import this package any more.
    for name in [name for name in sys.modules if name.partition(".")[0] == "stepjepa"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "stepjepa", None)
    with pytest.raises(ImportError):
        importlib.import_module("stepjepa.objectives.jepa")
    np.testing.assert_allclose(sentence_transformer(tmp_path / "st").encode_query(["Why?"]), expected, atol=1e-5)


@pytest.mark.slow
def test_another_process_loads_it(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Slow for the libraries alone: nothing that this package registers with transformers is there."""
    pytest.importorskip("sentence_transformers", reason="needs the extra 'embeddings'")
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=2, layout="branched"))
    code = "import sys; from sentence_transformers import SentenceTransformer as S; m = S(sys.argv[1]); "
    code += "print(m.encode_query(['Why?'])[0, :3].tolist()); assert 'stepjepa' not in sys.modules"
    command = [sys.executable, "-c", code, str(export(jepa, tmp_path / "st"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_allclose(json.loads(done.stdout), jepa.embed(["Why?"])[0, :3], atol=1e-5)


def test_a_prompt_of_sentence_transformers_is_refused_and_not_ignored(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = sentence_transformer(export(Jepa(make_model("llama"), tiny_tokenizer, JepaConfig()), tmp_path / "st"))
    with pytest.raises(Exception, match="this model embeds a text alone"):
        model.encode(["Why?"], prompt="Represent: ")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--system_prompt", "x"], "--system_prompt does nothing without --embeddings"),
        (["--embeddings", "--system_prompt", "x"], "--system_prompt does nothing: the model reads each question alone"),
    ],
)
def test_a_system_prompt_without_effect_is_refused(
    flags: list[str], told: str, tiny_tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    Jepa(make_model("llama"), tiny_tokenizer, JepaConfig()).save(tmp_path / "run")
    command = ["export", "--model_path", str(tmp_path / "run"), "--output_dir", str(tmp_path / "st"), *flags]
    assert main(command) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "st").exists()


def test_the_command_exports_another_readout_and_a_map(tiny_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    """As vectors of ``stepjepa embed`` with the same flags, of a base model, which has no record of a training."""
    base, records = tmp_path / "base", tmp_path / "pairs.jsonl"
    make_model("llama").save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    write_jsonl(records, pairs_of_numbers())
    command = ["export", "--embeddings", "--model_path", str(base), "--output_dir"]
    assert main([*command, str(tmp_path / "none")]) == 2
    assert "pass --pooling mean (the mean" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "mean"), "--pooling", "mean", "--layer", "1"]) == 0
    assert main([*command, str(tmp_path / "map"), "--linear_map", str(records)]) == 0
    assert "the linear map is fitted on 31 records of" in capsys.readouterr().err
    heads_flags = ["--linear_map", str(records), "--projection_heads", "--layer", "1", "--pooling", "mean"]
    assert main([*command, str(tmp_path / "heads"), *heads_flags]) == 0
    assert "the projection heads are trained on 28 records of" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "half"), *heads_flags, "--dtype", "bfloat16"]) == 2
    assert "with projection heads behind means can be written in bfloat16: a mean" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "mean", "map", "heads", "pairs.jsonl"}
    assert "trained without a joint-embedding loss" in (tmp_path / "map" / "README.md").read_text()
    jepa = Jepa.from_pretrained(base, device="cpu")
    fitted = fit_linear_map(jepa, pairs_of_numbers())
    heads = fit_projection_heads(jepa, pairs_of_numbers(), layer=1, pooling="mean")
    for folder, options in {
        "mean": {"pooling": "mean", "layer": 1},
        "map": {"linear_map": fitted},
        "heads": {"projection_heads": heads},
    }.items():
        queries = sentence_transformer(tmp_path / folder).encode_query(TEXTS)
        np.testing.assert_allclose(queries, jepa.embed(TEXTS, **options), atol=1e-4)


@pytest.mark.parametrize("flags", [["--layer", "1"], ["--pooling", "mean"], ["--linear_map", "x.jsonl"]], ids=str)
def test_a_readout_without_embeddings_is_refused(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    command = ["export", "--model_path", str(tmp_path), "--output_dir", str(tmp_path / "st"), *flags]
    assert main(command) == 2
    assert f"{flags[0]} does nothing without --embeddings" in capsys.readouterr().err


def test_weights_in_bfloat16_are_read_as_ours(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """All modules have the dtype of the model: none raises an error, and the mean is one of float32."""
    jepa = Jepa(make_model("llama").bfloat16(), tiny_tokenizer, JepaConfig(mode="regular"))
    fitted = fit_linear_map(jepa, pairs_of_numbers(), pooling="mean")
    model = sentence_transformer(export(jepa, tmp_path / "st", linear_map=fitted))
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.bfloat16"}
    cosines = (model.encode_query(TEXTS) * jepa.embed(TEXTS, linear_map=fitted)).sum(1)
    assert cosines.min() > 0.98
    heads = fit_projection_heads(jepa, pairs_of_numbers(), pooling="mean")
    with pytest.raises(UserError, match="can be written in bfloat16: a mean is float32 there"):
        export(jepa, tmp_path / "heads", projection_heads=heads)


def test_the_command_writes_heads_of_a_model_in_bfloat16_in_float32(tiny_tokenizer: Any, tmp_path: Path) -> None:
    make_model("llama").bfloat16().save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    write_jsonl(tmp_path / "pairs.jsonl", pairs_of_numbers())
    command = ["export", "--embeddings", "--model_path", str(tmp_path / "base"), "--output_dir", str(tmp_path / "st")]
    heads_flags = ["--linear_map", str(tmp_path / "pairs.jsonl"), "--projection_heads", "--pooling", "mean"]
    assert main([*command, *heads_flags]) == 0
    model = sentence_transformer(tmp_path / "st")
    assert {str(weight.dtype) for weight in model.parameters()} == {"torch.float32"}
    jepa = Jepa.from_pretrained(tmp_path / "base", device="cpu", dtype="float32")
    heads = fit_projection_heads(jepa, pairs_of_numbers(), pooling="mean")
    np.testing.assert_allclose(model.encode_query(TEXTS), jepa.embed(TEXTS, projection_heads=heads), atol=1e-4)


def test_the_model_is_as_before(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Its input embeddings have rows of copies only in the folder."""
    jepa = Jepa(make_model("llama"), tiny_tokenizer, JepaConfig(predictors=0, pooling="mean"))
    rows, size = jepa.model.get_input_embeddings().weight, jepa.model.config.vocab_size
    words, before = len(jepa.tokenizer), rows.detach().clone()
    export(jepa, tmp_path / "st")
    assert jepa.model.get_input_embeddings().weight is rows
    assert (jepa.model.config.vocab_size, len(jepa.tokenizer)) == (size, words)
    np.testing.assert_array_equal(rows.detach(), before)
