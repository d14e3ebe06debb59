"""``stepjepa prepare nl-rx``: sentences and regular expressions, generated or from the published pair of files."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepjepa.commands.preparation import (
    Job,
    Preparation,
    add_overwrite,
    check_target,
    print_counts,
    write_files,
    write_records,
)
from stepjepa.data.records import Record, read_records
from stepjepa.errors import UserError
from stepjepa.files import existing_file
from stepjepa.preparing.conversion import convert_rows
from stepjepa.tasks.nl_rx import make_record
from stepjepa.tasks.nl_rx_grammar import Pair, generate_split
from stepjepa.tasks.nl_rx_marginals import format_comparison

_SIZE, _SEED = 10_000, 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    generated = parser.add_argument_group("generated from the grammar")
    generated.add_argument("--size", type=int, metavar="N", help=f"records ({_SIZE})")
    generated.add_argument("--seed", type=int, metavar="N", help=f"the same seed gives the same files ({_SEED})")
    generated.add_argument("--test_size", type=int, metavar="N", help="further records to test with; needs --test_file")
    generated.add_argument("--test_file", metavar="FILE", help="where those go")
    generated.add_argument(
        "--compare",
        metavar="FILE",
        help="print how often things occur, beside this file of records (synth_train.jsonl)",
    )
    published = parser.add_argument_group("from the published pair of files instead, line by line")
    published.add_argument("--source_file", metavar="FILE", help="sentences (NL-RX-Synth.src.txt)")
    published.add_argument("--target_file", metavar="FILE", help="their regular expressions (NL-RX-Synth.targ.txt)")
    parser.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    add_overwrite(parser)


def _run(args: argparse.Namespace) -> int:
    of_one, of_other = (
        [name for name in names if getattr(args, name) is not None]
        for names in (("size", "seed", "test_size", "test_file", "compare"), ("source_file", "target_file"))
    )
    if of_one and of_other:
        raise UserError(f"--{of_one[0]} is for generated records, --{of_other[0]} for published ones; leave one out")
    if len(of_other) == 1:
        raise UserError("the published files come in pairs; give both --source_file and --target_file")
    if (args.test_size is None) != (args.test_file is None):
        raise UserError("give both --test_size and --test_file, or neither")
    return _convert(args) if of_other else _generate(args)


def _generate(args: argparse.Namespace) -> int:
    size, test_size = _SIZE if args.size is None else args.size, args.test_size
    for name, value in (("size", size), ("test_size", test_size)):
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected 1 or more, got {value}")
    names = [args.output_file] if args.test_file is None else [args.output_file, args.test_file]
    targets = [check_target(name, args.overwrite) for name in names]
    if len({target.resolve() for target in targets}) < len(targets):
        raise UserError("is both --output_file and --test_file; name another", path=targets[0])
    other = None if args.compare is None else [_pair(record) for record in read_records(args.compare)]
    try:
        parts = generate_split(size, test_size or 0, _SEED if args.seed is None else args.seed)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    write_files(targets, [[make_record(*pair) for pair in pairs] for pairs in parts[: len(targets)]])
    print_counts([(f"written to {target}", len(pairs)) for target, pairs in zip(targets, parts, strict=False)])
    if other is not None:
        print(format_comparison({"generated": parts[0], "file": other}))
    return 0


def _pair(record: Record) -> Pair:
    return record.messages[-2]["content"], record.answer


def _convert(args: argparse.Namespace) -> int:
    sentences, regexes = (_read_lines(args, name) for name in ("source_file", "target_file"))
    if Path(args.source_file).samefile(args.target_file):
        raise UserError("is both --source_file and --target_file; name the other one", path=args.source_file)
    if len(sentences) != len(regexes):
        raise UserError(
            f"has {len(sentences)} lines, but {args.target_file} has {len(regexes)}; give two files of one data set",
            path=args.source_file,
        )
    if 2 * sum(" " in regex for regex in regexes) > len(regexes) > 2 * sum(" " in sentence for sentence in sentences):
        raise UserError("holds words where expressions are expected; are the two files swapped?", path=args.target_file)
    target = check_target(args.output_file, args.overwrite)
    rows = enumerate(({"sentence": s, "regex": r} for s, r in zip(sentences, regexes, strict=True)), start=1)
    records, counts = convert_rows(rows, lambda _, row: make_record(**row), path=args.source_file)
    write_records(Job(args.source_file, rows, target, None), records, counts.read, counts.dropped)
    return 0


def _read_lines(args: argparse.Namespace, name: str) -> list[str]:
    """The lines of a text file that a flag names; the flag for its output must not name the same."""
    path = existing_file(getattr(args, name), "text file")
    if Path(args.output_file).exists() and path.samefile(args.output_file):
        raise UserError("is both input and output; name another --output_file", path=path)
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text; convert the file to UTF-8", path=path) from None


NL_RX = Preparation(
    "sentences and regular expressions: generated, or from the published files of NL-RX", _add_arguments, _run
)
