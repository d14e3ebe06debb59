"""Same seed, same weights, bit for bit: however records are loaded, kept, or tokenised beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from stepjepa.base.files import fingerprint, write_jsonl
from stepjepa.cli.main import main

FLAGS = "--model_name preset:tiny --step_jepa --max_steps 5 --batch_size 3 --grad_accum 1 --jepa_ratio 0.6 --use_cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("same_seed") / "data.jsonl"
    write_jsonl(path, [{"messages": list(record.messages)} for record in (tiny.records() * 5)[:13]])
    return path


def weights(data: Path, name: str, flags: str) -> str:
    folder = data.parent / name
    arguments = ["--train_file", str(data), "--output_dir", str(folder), *FLAGS.split(), *flags.split()]
    assert main(["train", *arguments]) == 0
    return fingerprint(folder / "model.safetensors")


@pytest.fixture(scope="module")
def expected(data: Path) -> str:
    return weights(data, "expected", "--no_cache")


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(
    "flags",
    [
        "--no_cache",
        "--no_cache --dataloader_num_workers 3 --dataloader_prefetch_factor 1",
        "--cache_dir {}/cache",
        "--cache_dir {}/cache --dataloader_num_workers 2 --dataloader_persistent_workers",
        "--no_cache --save_steps 2 --logging_steps 1",
    ],
)
def test_what_does_not_decide_the_numbers_changes_none(flags: str, data: Path, expected: str, tmp_path: Path) -> None:
    assert weights(data, tmp_path.name, flags.format(data.parent)) == expected


def test_another_seed_is_another_run(data: Path, expected: str) -> None:
    assert weights(data, "another", "--no_cache --seed 43") != expected
