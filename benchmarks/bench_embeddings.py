"""Texts per second of ``Jepa.embed`` over sentence-transformers' own loop on the exported folder, in one process.

Both arms have the same weights, texts, batch size and threads, and their vectors are compared. The texts are cut into
rounds; in each of them both arms embed the same part, the one that begins in turn, and ratios are taken within a round.
The ratio of CPU time says more than that of wall-clock time where other programs run beside.

    python benchmarks/bench_embeddings.py

* ``short``: sentences of about a dozen words, each alone in the template.
* ``system prompt``: the same behind one system prompt of about 100 tokens (layout ``branched``).
* ``passages``: eight questions each begin with a passage of about 100 tokens, as the turns of a chat do.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from bench import Spread, free_name

from stepjepa.base.files import write_json

HERE = Path(__file__).resolve().parent
SUITES = {"short": 1.0, "system prompt": 1.5, "passages": 1.5}
"""Suite -> the ratio that was set as a target before measuring."""

SHARED_WORDS = 75  # about 100 tokens
QUESTIONS = 8  # of a passage


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--texts", type=int, default=100_000, help="embedded by each arm of a suite (default: %(default)s)")
    add("--rounds", type=int, default=10, help="parts of the texts (default: %(default)s)")
    add("--suites", nargs="+", default=[*SUITES], choices=[*SUITES], help="(default: all)")
    add("--batch_size", type=int, default=32, help="of both arms (default: sentence-transformers' %(default)s)")
    add("--model", default="preset:tiny", help="preset, folder or hub id (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="(default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-embeddings.json)")
    return options


def make_texts(suite: str, count: int) -> tuple[list[str], str | None]:
    """Distinct texts, and the system prompt in front of them."""
    from stepjepa.tasks import nl_rx_grammar

    draw = random.Random(7)
    sentences = [pair[0] for pair in nl_rx_grammar.generate_split(min(count, 10_000), 1, 0)[0]]
    texts = [f"{sentences[n % len(sentences)]}, number {n}" for n in range(count)]
    words = sorted({word for sentence in sentences for word in sentence.split()})

    def passage() -> str:
        return " ".join(draw.choices(words, k=SHARED_WORDS))

    if suite == "passages":
        passages = [passage() for _ in range(count // QUESTIONS + 1)]
        texts = [f"{passages[n // QUESTIONS]}. {text}" for n, text in enumerate(texts)]
    draw.shuffle(texts)
    return texts, passage() if suite == "system prompt" else None


def run_suite(suite: str, args: argparse.Namespace) -> dict[str, Any]:
    """Embed the texts of a suite by both arms."""
    import numpy as np
    from sentence_transformers import SentenceTransformer

    from stepjepa import Jepa, JepaConfig, load_model
    from stepjepa.evaluation.sentence_transformer import write_sentence_transformer

    texts, system = make_texts(suite, args.texts)
    model, tokenizer = load_model(args.model, texts=[*texts[:20_000], system or ""], predictors=2)
    config = JepaConfig(predictors=2, layout="branched" if system else "separate", max_length=1024)
    jepa = Jepa(model, tokenizer, config, device="cpu")
    jepa.system_prompt = system
    with tempfile.TemporaryDirectory() as folder:
        write_sentence_transformer(jepa, folder, "exported")
        other = SentenceTransformer(folder, device="cpu")
    size = {"batch_size": args.batch_size}
    arms = {
        "ours": lambda part: jepa.embed(part, **size),
        "sentence-transformers": lambda part: other.encode_query(part, show_progress_bar=False, **size),
    }
    for embed in arms.values():  # warm
        embed(texts[: args.batch_size])
    rounds: list[dict[str, float]] = []
    cpu: list[float] = []  # CPU time of sentence-transformers over ours, in each round
    length, farthest = -(-len(texts) // args.rounds), 0.0
    for number in range(args.rounds):
        part, seconds, worked, vectors = texts[number * length : (number + 1) * length], {}, {}, {}
        for name in [*arms][:: -1 if number % 2 else 1]:
            start, work = time.perf_counter(), time.process_time()
            vectors[name] = arms[name](part)
            seconds[name], worked[name] = time.perf_counter() - start, time.process_time() - work
        farthest = max(farthest, float(np.abs(np.subtract(*vectors.values())).max()))
        rounds.append({name: len(part) / each for name, each in seconds.items()})
        ratio = rounds[-1]["ours"] / rounds[-1]["sentence-transformers"]
        cpu.append(worked["sentence-transformers"] / worked["ours"])
        progress = f"{suite}, round {number + 1} of {args.rounds}: {ratio:.2f}, by CPU time {cpu[-1]:.2f}"
        print(progress, file=sys.stderr, flush=True)
    if farthest > 1e-5:
        raise SystemExit(f"{suite}: the arms' vectors differ by up to {farthest:.1e}")
    ids = tokenizer(texts[:1000], add_special_tokens=False)["input_ids"]
    return {
        "texts": len(texts),
        "tokens_of_a_text": sum(map(len, ids)) / len(ids),
        "tokens_of_the_system_prompt": len(tokenizer(system or "", add_special_tokens=False)["input_ids"]),
        "largest_difference": farthest,
        "aim": SUITES[suite],
        "over_sentence_transformers": Spread.of(
            [each["ours"] / each["sentence-transformers"] for each in rounds]
        )._asdict(),
        "over_sentence_transformers_by_cpu_time": Spread.of(cpu)._asdict(),
        "texts_per_second": {name: Spread.of([each[name] for each in rounds])._asdict() for name in arms},
        "rounds": rounds,
    }


def main() -> None:
    """Run the suites, print and write the results."""
    args = parser().parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import torch
    from sentence_transformers import __version__ as theirs
    from transformers import __version__ as transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    versions = {"torch": torch.__version__, "transformers": transformers, "sentence_transformers": theirs}
    results = {
        "date": f"{date.today()}",
        "threads": args.threads,
        "model": args.model,
        "batch_size": args.batch_size,
        "versions": versions,
        "suites": {suite: run_suite(suite, args) for suite in args.suites},
    }
    for suite, figures in results["suites"].items():
        ratio, speed = figures["over_sentence_transformers"], figures["texts_per_second"]["ours"]["median"]
        print(
            f"{suite}: {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] times sentence-transformers "
            f"(aim {figures['aim']}), by CPU time {figures['over_sentence_transformers_by_cpu_time']['median']:.2f}, "
            f"{speed:,.0f} texts a second"
        )
    path = args.output or free_name(HERE / "results" / f"{date.today()}-cpu-{args.threads}-embeddings.json")
    write_json(path, results)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
