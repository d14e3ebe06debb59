"""What the tests share: the real data, and tiny models and tokenizers made on the spot.

Torch and transformers are loaded by fixtures: pytest-xdist's own process reads this file, too, and runs no test.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forked import Commands

# Collecting makes objects that all stay, which the garbage collector would go through again and again.
gc.disable()

# Nothing is fetched in tests; said before the hub's library is imported, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

# A shell ignores SIGINT for what it starts in the background, whose children inherit that: no test could interrupt one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files and folders whose tests take long.
LONG = ("test_environment.py", "invariants", "docs", "examples", "golden", "training", "study", "cli", "evaluation")
LONG += ("tasks", "models")

# Files that test how the FLOPs of a model are counted.
ABOUT_FLOPS = ("test_flops", "test_dry_run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond each sample as slow, and put long files first.

    Pytest deselects by marks afterwards. A file's tests stay on one worker: else one waits at the end while another
    works.
    """

    def place(item: pytest.Item) -> int:
        parts = item.path.relative_to(Path(__file__).parent).parts
        return next((place for place, name in enumerate(LONG) if name in parts), len(LONG))

    mark_beyond_samples(items)
    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but for what the tests' own modules hold."""
    gc.freeze()
    gc.enable()


def mark_beyond_samples(items: list[pytest.Item]) -> None:
    """Mark as slow what ``sample(n)`` leaves out: all cases of a test but ``n``, from the first to the last."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("sample")
        assert mark is not None
        last, parts = len(of_test) - 1, max(mark.args[0] - 1, 1)
        kept = {last * part // parts for part in range(mark.args[0])}
        for number, item in enumerate(of_test):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers whatever ran before it: which tests share a process differs from run to run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests are many small computations; threads only make them wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Accelerate collects garbage at the end of every training, which takes .3 s where all modules are gone through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_picture_of_a_run() -> Iterator[None]:
    """Two thirds of the time of a tiny training goes into ``metrics.png``, which ``test_what_a_run_leaves`` draws."""
    running = sys.modules.get("stepjepa.running.run")
    with pytest.MonkeyPatch.context() as patch:
        if running is not None:  # a test that has yet to load it draws
            patch.setattr(running, "draw_metrics", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def fitted_flops() -> Callable[..., Any]:
    """The cost of a decoder, fitted once for all equal ones: a fit takes .3 s, longer than most trainings here."""
    from stepjepa.models.architecture import base_model
    from stepjepa.training.flop_counts import fit_decoder

    fitted: dict[Any, Any] = {}

    def fit(model: Any, recomputed: Any) -> Any:
        config = base_model(model).config
        sizes = tuple(
            (weight.shape, weight.dtype, weight.device, weight.requires_grad) for weight in model.parameters()
        )
        key = str(model), config.to_json_string(), config._attn_implementation, sizes, recomputed
        if key not in fitted:
            fitted[key] = fit_decoder(model, recomputed)
        return fitted[key]

    return fit


@pytest.fixture(scope="module", autouse=True)
def flops_of_equal_models(request: pytest.FixtureRequest, fitted_flops: Callable[..., Any]) -> Iterator[None]:
    """Trainers of equal models share one fit, but for those of tests of the fit itself."""
    flops = sys.modules.get("stepjepa.training.flops")
    with pytest.MonkeyPatch.context() as patch:
        if flops is not None and request.path.stem not in ABOUT_FLOPS:
            patch.setattr(flops, "fit_decoder", fitted_flops)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data is kept where nothing else is, by the processes that tests start as well."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"real data not found beside the checkout ({SHARED.parent.name}/{SHARED.name})")
    return SHARED


def train_tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of the presets, trained on the tiny records."""
    import tiny
    from stepjepa.models.presets import train_tokenizer

    return train_tokenizer([message["content"] for record in tiny.records() for message in record.messages], 290)


@pytest.fixture(scope="session")
def trained_tokenizer() -> Any:
    """A byte-level BPE tokenizer of the presets, with four predictor tokens; not to be changed."""
    import tiny
    from stepjepa.chat.special_tokens import add_predictor_tokens

    tokenizer = train_tiny_tokenizer()
    add_predictor_tokens(tokenizer, 4)
    assert len(tokenizer) < tiny.VOCABULARY
    return tokenizer


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """The same without predictor tokens, as tokenizers come from a hub; not to be changed."""
    return train_tiny_tokenizer()


@pytest.fixture
def quick_nl_rx(monkeypatch: pytest.MonkeyPatch) -> None:
    """NL-RX draws a fiftieth of its trees: some hundred pairs in a tenth of a second, as many as a test asks for."""
    from stepjepa.tasks import nl_rx_grammar

    monkeypatch.setattr(nl_rx_grammar, "_DRAWS", {room: draws // 50 for room, draws in nl_rx_grammar._DRAWS.items()})


@pytest.fixture(scope="module")
def commands() -> Commands:
    """Runs commands in processes that can be killed."""
    from forked import Commands

    return Commands()


@pytest.fixture(scope="module")
def material(trained_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``kills.cases`` run on."""
    import kills

    return kills.make_material(tmp_path_factory.mktemp("material"), trained_tokenizer)


@pytest.fixture
def tiny_tokenizer(trained_tokenizer: Any) -> Any:
    """A copy of the tiny tokenizer that a test may change."""
    return copy.deepcopy(trained_tokenizer)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """``tiny_model(architecture, attention="sdpa", seed=0)``: a new model, equal weights for equal seeds."""
    import tiny

    return tiny.make_model


@pytest.fixture(scope="session")
def real_tokenizer(shared_data: Path) -> Callable[..., Any]:
    """``real_tokenizer(name, plain=False)``: a real tokenizer with four predictor tokens; not to be changed.

    ``plain`` adds those that training without a chat format writes. Loading or copying one takes about a second.
    """
    from transformers import AutoTokenizer

    from stepjepa.chat.special_tokens import add_plain_tokens, add_predictor_tokens

    @functools.cache
    def load(name: str, plain: bool = False) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(str(shared_data / "tokenizers" / name))
        if plain:
            add_plain_tokens(tokenizer)
        add_predictor_tokens(tokenizer, 4)
        return tokenizer

    return load
