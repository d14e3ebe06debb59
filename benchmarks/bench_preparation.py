"""Records per second of preparation: ours, without and with the cache, against the search token by token.

The other arm does what the published preparation does with a record, written anew: the template for the whole chat, for
the user and for the assistant alone; each of the three tokenised and padded; every token of the padded input and of the
answer decoded by itself; the decoded answer looked for position by position to set the labels. It stores nothing, as
ours does without the cache. Every arm has the same records and the same tokenizer in every round; rounds are
interleaved and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_table import Spread, free_name

from stepjepa.errors import UserError
from stepjepa.files import write_json

if TYPE_CHECKING:
    from stepjepa.config import JepaConfig
    from stepjepa.data.records import Record

HERE = Path(__file__).resolve().parent
SEARCH = "search token by token"
FIRST = "ours, no cache"
WRITING = "ours, first start"
READING = "ours, second start"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--train_file", help="JSON lines (default: generated sentences and regular expressions)")
    add("--tokenizer", help="folder or hub id (default: one trained on the records, as of preset:tiny)")
    add("--mode", default="llm-jepa", choices=["llm-jepa", "step-jepa"], help="of ours (default: %(default)s)")
    add("--step_separator", default="blank", help="of steps (default: %(default)s)")
    add("--records", type=int, default=8000, help="at most (default: %(default)s)")
    add("--max_length", type=int, default=512, help="to which the published rows are padded (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of every arm (default: %(default)s)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-preparation.json)")
    return options


def search(records: Sequence[Record], tokenizer: Any, max_length: int) -> list[list[int]]:
    """Labels of every record, found by comparing decoded tokens."""
    found = []
    for record in records:
        chat = [dict(message) for message in record.messages]
        users = [message for message in chat if message["role"] == "user"][:1]
        whole, _, _ = (
            tokenizer(
                tokenizer.apply_chat_template(part, tokenize=False),
                truncation=True,
                max_length=max_length,
                padding="max_length",
            )
            for part in (chat, users, chat[-1:])
        )
        ids, mask = whole["input_ids"], whole["attention_mask"]
        labels = [-100] * len(ids)
        answer = tokenizer.encode(record.answer, add_special_tokens=False)
        wanted = [tokenizer.decode(token) for token in answer]
        shown = [tokenizer.decode(token) for token in ids]
        for start in range(len(ids) - len(answer) + 1):
            if mask[start] and shown[start : start + len(answer)] == wanted:
                labels[start : start + len(answer)] = ids[start : start + len(answer)]
                break
        found.append(labels)
    return found


def load(args: argparse.Namespace) -> tuple[list[Record], Any, JepaConfig]:
    """Records, tokenizer, and the configuration of our arms."""
    from stepjepa.config import JepaConfig
    from stepjepa.data.records import as_records, read_records
    from stepjepa.models.loading import load_tokenizer
    from stepjepa.models.presets import preset_tokenizer
    from stepjepa.tasks.nl_rx import make_record
    from stepjepa.tasks.nl_rx_grammar import generate_split
    from stepjepa.text.predictors import add_predictor_tokens

    if args.train_file is None:
        train, _ = generate_split(args.records, 1, 0)
        records = list(as_records(make_record(*pair) for pair in train))
    else:
        records = read_records(args.train_file)[: args.records]
    if args.tokenizer is None:
        texts = (message["content"] for record in records for message in record.messages)
        _, tokenizer = preset_tokenizer("preset:tiny", texts)
    else:
        tokenizer = load_tokenizer(args.tokenizer)
    # Longer records are cut by both.
    config = JepaConfig(
        mode=args.mode, step_separator=args.step_separator, max_length=args.max_length, over_length="truncate"
    )
    add_predictor_tokens(tokenizer, config.predictors or 0)
    return records, tokenizer, config


def bench(args: argparse.Namespace) -> Path:
    """Measure, print the table, write the results; returns their file."""
    from stepjepa.forests.cache import ForestCache
    from stepjepa.forests.preparation import prepare

    records, tokenizer, config = load(args)
    # The published arm pads, which changes the tokenizer; a copy keeps ours as it is.
    padding = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
    if padding.pad_token is None:
        padding.pad_token = padding.eos_token
    times: dict[str, list[float]] = {name: [] for name in (SEARCH, FIRST, WRITING, READING)}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
            cache = ForestCache(folder, say=lambda line: None)
            arms: dict[str, Callable[[], Any]] = {
                SEARCH: lambda: search(records, padding, args.max_length),
                FIRST: lambda: prepare(records, tokenizer, config),
                # One after the other: the second finds what the first stored.
                WRITING: partial(prepare, records, tokenizer, config, cache=cache),
                READING: partial(prepare, records, tokenizer, config, cache=cache),
            }
            order = [SEARCH, FIRST, WRITING, READING] if number % 2 == 0 else [FIRST, WRITING, READING, SEARCH]
            for arm in order:
                began = time.perf_counter()
                arms[arm]()
                times[arm].append(time.perf_counter() - began)
                rate = len(records) / times[arm][-1]
                print(f"[{number + 1}/{args.rounds}] {arm}: {rate:.0f} records/s", file=sys.stderr, flush=True)
    figures = {
        arm: {
            "seconds": Spread.of(values)._asdict(),
            "over_search": Spread.of([s / v for s, v in zip(times[SEARCH], values, strict=True)])._asdict(),
        }
        for arm, values in times.items()
    }
    print(f"{len(records)} records\n\n| arm | seconds | times as fast as the search |\n| --- | --- | --- |")
    for arm, found in figures.items():
        taken, over = found["seconds"], found["over_search"]
        print(
            f"| {arm} | {taken['median']:.2f} [{taken['low']:.2f}, {taken['high']:.2f}] "
            f"| {over['median']:.1f} [{over['low']:.1f}, {over['high']:.1f}] |"
        )
    machine = f"cpu-{os.cpu_count() or 1}"
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-preparation.json")
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "train_file", "tokenizer")}
    for name in ("train_file", "tokenizer"):
        value = getattr(args, name)
        settings[name] = None if value is None else Path(value).name
    write_json(
        path, {"machine": machine, "settings": settings, "records": len(records), "arms": figures, "all_seconds": times}
    )
    return path


def main() -> int:
    """Run the benchmark; an error that the user can put right takes one line."""
    try:
        path = bench(parser().parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nresults: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
