"""Prepared forests on disk: read back the same, missed when anything changes, harmless when damaged."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import tiny
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.forests import cache as module
from stepjepa.forests.cache import WITHOUT_EFFECT, ForestCache, cache_key, default_folder
from stepjepa.forests.preparation import Prepared, prepare

CONFIG = JepaConfig(mode="step-jepa", pairs="all")

# For every field another value that is allowed, with what else it needs.
OTHER: dict[str, dict[str, Any]] = {
    "mode": {"mode": "llm-jepa", "layout": "branched"},
    "layout": {"layout": "inplace"},
    "predictors": {"predictors": 3},
    "pairs": {"pairs": "first"},
    "front_pred": {"front_pred": True},
    "reverse_pred": {"reverse_pred": True},
    "last_token": {"last_token": -2},
    "pair_distance": {"pair_distance": 2},
    "pooling": {"pooling": "mean"},
    "plain": {"plain": True},
    "labels": {"labels": "all"},
    "step_separator": {"step_separator": "line"},
    "max_length": {"max_length": 211},
    "over_length": {"over_length": "skip"},
    "require_pairs": {"require_pairs": True},
    "jepa_layer": {"jepa_layer": -2},
    "predictor_head": {"predictor_head": "mlp"},
    "target_grad": {"target_grad": "stop"},
    "ema_decay": {"ema_decay": 0.5},
    "jepa_loss_type": {"jepa_loss_type": "l2"},
    "infonce_temperature": {"infonce_temperature": 0.5},
    "lbd": {"lbd": 0.7},
    "lbd_schedule": {"lbd_schedule": "cosine"},
    "lbd_warmup": {"lbd_warmup": 0.3},
    "sigreg": {"sigreg": 0.1},
    "variance": {"variance": 0.1},
    "covariance": {"covariance": 0.1},
    "stp": {"stp": 0.1},
    "gamma": {"gamma": 0.5},
    "jepa_ratio": {"jepa_ratio": 0.5},
    "encoding": {"encoding": "rows"},
}


class Notes(list[str]):
    """What a cache said."""

    def __call__(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def cache(tmp_path: Path, notes: Notes) -> ForestCache:
    return ForestCache(tmp_path / "cache", say=notes)


def stored(cache: ForestCache) -> list[Path]:
    return sorted(cache.folder.iterdir()) if cache.folder.exists() else []


def assert_same(first: Prepared, second: Prepared) -> None:
    assert (first.counts, first.tokens, first.template) == (second.counts, second.tokens, second.template)
    assert list(first.counts) == list(second.counts)
    assert first.describe() == second.describe()
    assert len(first.dataset) == len(second.dataset)
    for one, other in zip(first.dataset.forests, second.dataset.forests, strict=True):
        tiny.assert_same_forest(one, other)
        assert one.pooled is not None and other.pooled is not None
        assert one.pooled.tolist() == other.pooled.tolist()
    assert first.dataset.lengths == second.dataset.lengths
    assert first.dataset.text_lengths == second.dataset.text_lengths


def test_a_second_start_reads_what_the_first_wrote(
    cache: ForestCache, notes: Notes, trained_tokenizer: Any, monkeypatch: Any
) -> None:
    without = prepare(tiny.records(), trained_tokenizer, CONFIG)
    first = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache)
    assert notes == []
    (path,) = stored(cache)
    monkeypatch.setattr("stepjepa.forests.preparation._build", lambda *_: pytest.fail("prepared again"))
    second = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache, what="some data")
    assert_same(without, first)
    assert_same(first, second)
    (line,) = notes
    assert line == f"cache: some data as prepared before, from {path} (--no_cache prepares anew)"


def test_forests_from_the_cache_are_no_copies_and_survive_pickling(cache: ForestCache, trained_tokenizer: Any) -> None:
    prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache)
    found = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache).dataset
    base: Any = found.forests[0].input_ids
    assert not base.flags.owndata and not base.flags.writeable
    # As for a worker of a data loader that is started afresh; and when the file is gone.
    for path in stored(cache):
        path.unlink()
    again = pickle.loads(pickle.dumps(found))
    for one, other in zip(again.forests, found.forests, strict=True):
        tiny.assert_same_forest(one, other)


@pytest.mark.parametrize("name", [field.name for field in fields(JepaConfig)])
def test_a_change_of_any_field_that_makes_other_forests_misses(name: str, trained_tokenizer: Any) -> None:
    changed = JepaConfig(**{**CONFIG.to_dict(), **OTHER[name]})
    assert getattr(changed, name) != getattr(CONFIG, name)
    same = cache_key(tiny.records(), trained_tokenizer, changed) == cache_key(tiny.records(), trained_tokenizer, CONFIG)
    assert same == (name in WITHOUT_EFFECT)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_that_do_not_count_make_no_other_forests(name: str, trained_tokenizer: Any) -> None:
    changed = JepaConfig(**{**CONFIG.to_dict(), **OTHER[name]})
    assert_same(prepare(tiny.records(), trained_tokenizer, changed), prepare(tiny.records(), trained_tokenizer, CONFIG))


def changed_records() -> dict[str, list[Any]]:
    first, *rest = tiny.records()
    messages = first.messages
    return {
        "fewer": rest,
        "order": [*rest, first],
        "content": [replace(first, messages=(*messages[:-1], {**messages[-1], "content": "3"})), *rest],
        "role": [replace(first, messages=messages[1:]), *rest],
        "views": [replace(first, text="a", code="b"), *rest],
        "line": [replace(first, line=7), *rest],
    }


@pytest.mark.parametrize("records", changed_records().values(), ids=changed_records())
def test_other_records_miss(records: list[Any], trained_tokenizer: Any) -> None:
    assert cache_key(records, trained_tokenizer, CONFIG) != cache_key(tiny.records(), trained_tokenizer, CONFIG)


def test_where_the_records_lie_does_not_count(trained_tokenizer: Any) -> None:
    moved = [replace(record, path="elsewhere.jsonl", extra={"answer": 3}) for record in tiny.records()]
    assert cache_key(moved, trained_tokenizer, CONFIG) == cache_key(tiny.records(), trained_tokenizer, CONFIG)


def test_another_tokenizer_misses(trained_tokenizer: Any) -> None:
    keys = {cache_key(tiny.records(), trained_tokenizer, CONFIG)}
    changes = (
        lambda t: setattr(t, "chat_template", t.chat_template + " "),
        lambda t: t.add_tokens(["twelve"]),
        lambda t: setattr(t, "eos_token", "<|pad|>"),
        lambda t: (
            setattr(t.backend_tokenizer, "post_processor", None) or t.add_tokens(["<|one|>"], special_tokens=True)
        ),
    )
    for change in changes:
        tokenizer = copy.deepcopy(trained_tokenizer)
        change(tokenizer)
        keys.add(cache_key(tiny.records(), tokenizer, CONFIG))
    assert len(keys) == 1 + len(changes)
    assert cache_key(tiny.records(), copy.deepcopy(trained_tokenizer), CONFIG) in keys


def test_another_version_or_another_line_of_code_misses(trained_tokenizer: Any, monkeypatch: Any) -> None:
    keys = {cache_key(tiny.records(), trained_tokenizer, CONFIG)}
    with monkeypatch.context() as patch:
        patch.setattr(module, "version", lambda package: "0")
        keys.add(cache_key(tiny.records(), trained_tokenizer, CONFIG))
    monkeypatch.setattr(module, "_code", lambda: b"other")
    keys.add(cache_key(tiny.records(), trained_tokenizer, CONFIG))
    assert len(keys) == 3


def test_another_process_finds_it(cache: ForestCache, tmp_path: Path) -> None:
    script = (
        "import sys, tiny\n"
        "from stepjepa.config import JepaConfig\n"
        "from stepjepa.forests.cache import ForestCache\n"
        "from stepjepa.forests.preparation import prepare\n"
        "from stepjepa.models.presets import train_tokenizer\n"
        "from stepjepa.text.predictors import add_predictor_tokens\n"
        "tokenizer = train_tokenizer([m['content'] for r in tiny.records() for m in r.messages], 290)\n"
        "add_predictor_tokens(tokenizer, 2)\n"
        "print(prepare(tiny.records(), tokenizer, JepaConfig(), cache=ForestCache(sys.argv[1])).describe())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", script, str(cache.folder)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        said.append(run.stdout.splitlines())
    assert len(stored(cache)) == 1
    assert said[1][1:] == said[0]
    assert said[1][0].startswith("cache: training data as prepared before")


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if kind == "cut":
        data = data[:-5]
    elif kind == "flipped":
        data = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    elif kind == "empty":
        data = b""
    elif kind == "text":
        data = b"this is no file of numbers, and it is long enough for a header\n" * 9
    elif kind == "pickle":
        data = pickle.dumps({"input_ids": [3]})
    elif kind == "other key":
        header["__metadata__"]["key"] = "0" * 64
    elif kind == "no metadata":
        del header["__metadata__"]
    elif kind == "not counts":
        header["__metadata__"]["prepared"] = json.dumps({"counts": {"records": "3"}, "tokens": {}, "template": {}})
    elif kind == "offsets":
        header["input_ids"]["data_offsets"][1] -= 4
    elif kind == "dtype":
        header["input_ids"]["dtype"] = "F32"
    elif kind == "list":
        header = []
    if kind in ("other key", "no metadata", "not counts", "offsets", "dtype", "list"):
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    path.write_bytes(data)


KINDS = "cut flipped empty text pickle list dtype offsets"


@pytest.mark.parametrize("kind", [*KINDS.split(), "other key", "no metadata", "not counts"])
def test_a_damaged_or_foreign_file_is_prepared_anew_and_replaced(
    kind: str, cache: ForestCache, notes: Notes, trained_tokenizer: Any
) -> None:
    wanted = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache)
    (path,) = stored(cache)
    damage(path, kind)
    assert_same(prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache), wanted)
    (note,) = notes
    assert note.startswith(f"cache: {path} can't be used (")
    assert note.endswith("training data is prepared anew")
    assert "\n" not in note
    assert_same(prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache), wanted)
    assert "as prepared before" in notes[1]


def test_failures_are_not_kept(cache: ForestCache, trained_tokenizer: Any) -> None:
    for options, words in (
        ({"max_length": 19}, "more than max_length 19"),
        ({"max_length": 3, "over_length": "skip"}, "none of the 3 records can be trained on"),
        ({"require_pairs": True}, "no usable pair"),
        ({"step_separator": "=>"}, "has a pair"),
    ):
        config = JepaConfig(**{**CONFIG.to_dict(), **options})
        for _ in range(2):
            with pytest.raises(UserError, match=words):
                prepare(tiny.records(), trained_tokenizer, config, cache=cache)
    assert stored(cache) == []


def test_one_process_of_several_writes(tmp_path: Path, notes: Notes, trained_tokenizer: Any) -> None:
    reader, writer = (ForestCache(tmp_path, writes=writes, say=notes) for writes in (False, True))
    prepare(tiny.records(), trained_tokenizer, CONFIG, cache=reader)
    assert stored(reader) == []
    prepare(tiny.records(), trained_tokenizer, CONFIG, cache=writer)
    prepare(tiny.records(), trained_tokenizer, CONFIG, cache=reader)
    assert len(stored(writer)) == len(notes) == 1


def test_many_at_once(cache: ForestCache, notes: Notes, trained_tokenizer: Any) -> None:
    wanted = prepare(tiny.records(), trained_tokenizer, CONFIG)
    key = cache_key(tiny.records(), trained_tokenizer, CONFIG)
    found: list[Prepared] = []
    tokenizers = [copy.deepcopy(trained_tokenizer) for _ in range(5)]

    def start(tokenizer: Any) -> None:
        found.extend(prepare(tiny.records(), tokenizer, CONFIG, cache=cache) for _ in range(7))

    threads = [threading.Thread(target=start, args=(tokenizer,)) for tokenizer in tokenizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 35
    for one in found:
        assert_same(one, wanted)
    assert stored(cache) == [cache.path(key)]
    assert all("as prepared before" in note for note in notes)


def test_a_folder_that_can_not_be_written_costs_a_note(tmp_path: Path, notes: Notes, trained_tokenizer: Any) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    data = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=ForestCache(tmp_path / "file" / "cache", say=notes))
    assert len(data.dataset) == 3
    assert "--cache_dir names another folder, --no_cache does without" in notes[-1]


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, notes: Notes, trained_tokenizer: Any) -> None:
    roomy = ForestCache(tmp_path, say=notes)
    configs = [JepaConfig(**{**CONFIG.to_dict(), "max_length": length}) for length in (211, 223, 227, 229)]
    paths = [roomy.path(cache_key(tiny.records(), trained_tokenizer, config)) for config in configs]
    other = tmp_path / "notes.txt"
    other.write_text("not of this cache", encoding="utf-8")
    for age, config in zip((50, 90, 70), configs, strict=False):
        prepare(tiny.records(), trained_tokenizer, config, cache=roomy)
        newest = paths[configs.index(config)]
        os.utime(newest, (newest.stat().st_mtime - age,) * 2)
    # Reading counts as use.
    prepare(tiny.records(), trained_tokenizer, configs[1], cache=roomy)
    size = paths[0].stat().st_size
    prepare(tiny.records(), trained_tokenizer, configs[3], cache=ForestCache(tmp_path, limit=3 * size + 99, say=notes))
    assert [path.exists() for path in paths] == [True, True, False, True]
    prepare(tiny.records(), trained_tokenizer, configs[2], cache=ForestCache(tmp_path, limit=0, say=notes))
    assert [path.exists() for path in paths] == [False, False, True, False]
    assert other.exists()


def test_the_file_is_safetensors(cache: ForestCache, trained_tokenizer: Any) -> None:
    data = prepare(tiny.records(), trained_tokenizer, CONFIG, cache=cache)
    with safe_open(str(stored(cache)[0]), framework="np") as file:
        ids = file.get_tensor("input_ids")
    assert ids.dtype == np.int32
    assert ids.tolist() == [token for forest in data.dataset.forests for token in forest.input_ids.tolist()]


def test_the_folder_is_the_users(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "stepjepa"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache" / "stepjepa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "stepjepa"
