"""``stepjepa search``: the texts of a corpus that are nearest to queries."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, visible
from stepjepa.base.files import check_output_file, claimed_output, existing_file, write_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import JsonFlags
from stepjepa.cli.parser import from_args
from stepjepa.config.option import FROM_ONE, check_effects, option
from stepjepa.data.bad_records import BadRecords
from stepjepa.evaluation.model_reading import ReadingSettings, make_embedder

EPILOG = """\
example: stepjepa search --model_path runs/a --corpus answers.jsonl \\
  --query "How many singers do we have?"
The embeddings of the corpus are kept beside it, and renewed when model or
corpus change. docs/how-to/embeddings.md says more."""


@dataclass
class SearchFlags:
    """The corpus to search, and the queries."""

    model_path: str = option(help="run or checkpoint folder, or hub id", metavar="PATH", path="or name", group="files")
    corpus: str = option(
        help="JSON lines, CSV, TSV, Parquet or Arrow with the texts to find", metavar="FILE", path=True, group="files"
    )
    column: str | None = option(
        None, "column of the corpus' texts (an answer, or the last one of a chat)", metavar="NAME", group="files"
    )
    bad_records: Literal["error", "skip"] = option(
        "error", "lines of the corpus without a text: error; or skip and report how many", group="files"
    )
    query: list[str] | None = option(None, "texts to search for", metavar="TEXT", group="search")
    queries: str | None = option(None, "file of texts to search for", metavar="FILE", path=True, group="search")
    query_column: str | None = option(
        None,
        "column of the texts in `queries` (a question, or the last one of a chat)",
        metavar="NAME",
        only_with="queries",
    )
    k: int = option(10, "maximum number of texts per query", allowed=FROM_ONE, group="search")
    side: Literal["target", "source"] = option(
        "target", "the side of the corpus; queries are on the other one", group="search"
    )
    output_file: str | None = option(None, "JSON lines, one a query", metavar="FILE", path=True, group="files")
    overwrite: bool = option(False, "let --output_file replace a file", group="files", only_with="output_file")
    no_cache: bool = option(
        False,
        "neither read nor write the embeddings beside the corpus, and the map or the heads of --linear_map",
        group="files",
    )


def run(args: argparse.Namespace) -> JsonObject:
    """Search and print."""
    _check_files(args)
    from stepjepa.evaluation.corpus import corpus_index, read_texts
    from stepjepa.evaluation.stored_map import reading_options
    from stepjepa.objectives.inputs import Text

    reading = from_args(ReadingSettings, args)
    config = reading.check(args.model_path)
    if config.mode == "step-jepa":
        fault = "a model of step-jepa searches by steps behind their chat, not by bare texts"
        remedy = "in Python jepa.index(texts).search(records) does"
        raise UserError(f"{fault}; {remedy}", path=args.model_path)
    of_answers = "source" if config.reverse_pred else "target"
    bad, map_bad = (BadRecords(args.bad_records, settings=("bad_records",)) for _ in range(2))
    corpus = read_texts(args.corpus, args.column, answers=args.side == of_answers, bad=bad)
    queries = [Text(text, "--query", number) for number, text in enumerate(args.query or (), start=1)]
    if args.queries is not None:
        answers = args.side != of_answers
        queries = read_texts(args.queries, args.query_column, answers=answers, setting="query_column")
    jepa, cache = reading.load(args.model_path), not args.no_cache
    options = reading_options(reading, jepa, args.model_path, bad=map_bad, cache=cache)
    make_embedder(jepa, args.side, options)  # refuses wrong settings before anything is embedded
    index = corpus_index(jepa, args.model_path, args.corpus, corpus, args.side, cache=cache, **options)
    results: list[JsonObject] = [
        {"query": query.text, "hits": [{**asdict(hit), "line": corpus[hit.index].line} for hit in row]}
        for query, row in zip(queries, index.search(queries, args.k), strict=True)
    ]
    if args.output_file is not None:
        with claimed_output(args.output_file, args.overwrite):
            write_jsonl(args.output_file, results)
        searched = "1 query" if len(results) == 1 else f"{len(results):,} queries"
        print(f"{searched} in {counted(len(index.texts), 'distinct text')}; written: {args.output_file}")
    else:
        for result in results:
            print(visible(result["query"]))
            for hit in result["hits"]:
                print(f"  {hit['score']:6.3f}  line {hit['line']:<6} {visible(hit['text'])}")
    return {"corpus": args.corpus, "texts": len(index.texts), "results": results}


def _check_files(args: argparse.Namespace) -> None:
    """Raise ``UserError`` unless there are queries, both files of texts exist, and the output can be written."""
    check_effects(vars(args), SearchFlags)
    if (args.query is None) == (args.queries is None):
        raise UserError("expected queries; pass either --query or --queries")
    for name in filter(None, (args.corpus, args.queries)):
        existing_file(name, "file of texts")
    if args.output_file is not None:
        output = check_output_file(args.output_file, args.overwrite)
        if output.suffix != ".jsonl":
            raise UserError("`output_file` holds JSON lines; end its name in .jsonl", path=output)
        for name in filter(None, (args.corpus, args.queries, args.linear_map)):
            if output.resolve() == Path(name).resolve():
                raise UserError("`output_file` is a file of texts to be read; name another", path=output)


SEARCH = Command(
    run,
    flags=((SearchFlags, "search"), (ReadingSettings, "model"), (JsonFlags, "files")),
    common="model_path corpus column bad_records query queries k linear_map projection_heads json",
    epilog=EPILOG,
)
