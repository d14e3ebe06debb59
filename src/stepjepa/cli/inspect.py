"""``stepjepa inspect``, ``verify`` and ``analyze``: tokens of records, checks, embeddings of a model."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from stepjepa.base.errors import one_line, raising_user_errors, visible
from stepjepa.base.files import check_output_file
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, spelled
from stepjepa.chat.template import NOT_USED
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import RECORDS_MODEL_OBJECTIVE, JsonFlags, add_records_model_objective, run_config
from stepjepa.cli.parser import Parser, from_args
from stepjepa.config.option import FROM_ONE, option
from stepjepa.config.run import RunConfig
from stepjepa.data.records import BadRecords, Record, describe_columns, parse_record, tell_unused
from stepjepa.data.sources import read_records
from stepjepa.inspection.analysis import AnalysisSettings
from stepjepa.models.presets import PREFIX, preset_config, train_tokenizer
from stepjepa.running.data import check_chat_template


@dataclass
class ShowFlags:
    """The records to show, and the form of the output."""

    index: int = option(0, "the first record, counted from 0", metavar="I")
    records: int = option(1, "how many to show, as one micro-batch from there on", allowed=FROM_ONE)
    json: bool = option(False, "one JSON document on standard output instead of text")
    png: str | None = option(None, "write tree and attention matrix as a picture", metavar="FILE")
    overwrite: bool = option(False, "let --png replace a file")


def _records(run: RunConfig) -> list[Record]:
    """Read the records of the training file."""
    bad = BadRecords(run.bad_records)
    records = read_records(str(run.train_file), bad=bad, columns=run.columns)
    bad.tell()
    if (columns := describe_columns(records[0])) is not None:
        note(f"columns: {columns}")
    tell_unused(records)
    return records


def _loading(run: RunConfig) -> JsonObject:
    return {"chat_template": run.chat_template, "trust_remote_code": run.trust_remote_code}


def _texts(records: Sequence[Record]) -> Iterator[str]:
    return (message["content"] for record in records for message in record.messages)


def inspect(args: argparse.Namespace) -> JsonObject:
    """Show some records."""
    from stepjepa.inspection.record import as_text, inspect_records, title

    run = run_config(args, RECORDS_MODEL_OBJECTIVE)
    config, name = run.jepa, str(run.model_name)
    if args.png is not None:
        from stepjepa.study.plot import check_picture

        check_picture(args.png, "png")
        check_output_file(args.png, args.overwrite)
    check_chat_template(run)
    records = _records(run)
    if name.startswith(PREFIX):
        vocabulary = preset_config(name).vocab_size
        tokenizer = train_tokenizer(_texts(records), vocabulary, run.chat_template)
    else:
        from stepjepa.models.loading import load_tokenizer

        tokenizer = load_tokenizer(name, **_loading(run))
    if config.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, config.predictors or 0)
    inspection = inspect_records(records, args.index, tokenizer, config, args.records)
    if (unused := inspection.template.get(NOT_USED)) is not None:
        note(f"{NOT_USED}: {unused}")
    if inspection.refused is not None:
        note(f"would be refused by train: {one_line(inspection.refused)}")
    if not args.json:
        # In one write, so that a reader of the first lines, such as `head`, does not break a second one.
        print(f"{as_text(inspection)}\n", end="")
    if args.png is not None:
        from stepjepa.inspection.plots import write_png

        write_png(inspection, args.png, title(inspection))
        print(f"wrote {args.png}", file=sys.stderr)
    return {"model": name, **asdict(inspection)}


def add_flags(parser: Parser) -> None:
    """Add the flags of data, of which two are required here, and model."""
    add_records_model_objective(parser)
    parser.required += ["train_file", "model_name"]


INSPECT = Command(
    inspect,
    add=add_flags,
    flags=((ShowFlags, "what to show"),),
    common="train_file max_length model_name chat_template regular step_jepa layout predictors pairs step_separator "
    "labels plain index records json png overwrite",
    epilog="example: stepjepa inspect --train_file data.jsonl --model_name preset:tiny --step_jepa",
)


@dataclass
class VerifyFlags:
    """Size and seed of the checks, and whether with an adapter."""

    lora: bool = option(False, "check the optimisation step with a LoRA adapter")
    max_records: int = option(32, "records looked at", allowed=FROM_ONE)
    finetune_seed: int = option(42, "seed of random weights", names=("seed",))


def verify(args: argparse.Namespace) -> JsonObject:
    """Print one line per check."""
    run = run_config(args, RECORDS_MODEL_OBJECTIVE)
    config = run.jepa
    import torch

    from stepjepa.config.lora import LoraSettings
    from stepjepa.evaluation.answering import spread
    from stepjepa.inspection import verification
    from stepjepa.models.loading import add_lora, load_model
    from stepjepa.models.token_rows import adapter_rows
    from stepjepa.tasks.stepmath import Difficulty, generate

    check_chat_template(run)
    if run.train_file is not None:
        records = _records(run)
    else:
        generated = generate(size=200, seed=args.finetune_seed, difficulty=Difficulty())
        records = [parse_record(value, "built-in problems", line) for line, value in enumerate(generated, start=1)]
    name = run.model_name or "preset:tiny"
    print(f"model {name}, data {run.train_file or 'built-in problems'}, mode {config.mode}, layout {config.layout}")
    looked_at = spread(records, args.max_records)
    print(f"{len(looked_at):,} of {len(records):,} records looked at, spread over all (--max_records)")
    loading = {"predictors": config.used_predictors, "seed": args.finetune_seed, "plain": config.plain, **_loading(run)}
    model, tokenizer = load_model(name, texts=_texts(records), **loading)
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    with raising_user_errors():
        trained = adapter_rows(model, tokenizer, plain=config.plain)
        lora = (lambda base: add_lora(base, LoraSettings(), trained)) if args.lora else None
        subject = verification.Subject(model.eval(), tokenizer, config, looked_at, lora=lora)
    if (unused := subject.jepa.record_tokenizer.describe().get(NOT_USED)) is not None:
        note(f"{NOT_USED}: {unused}")
    checks = []
    for check in verification.verify(subject):
        checks.append(check)
        print(
            f"{'PASS' if check['passed'] else 'FAIL'}  {check['name']}: {visible(spelled(check['detail']))}", flush=True
        )
    failed = sum(not check["passed"] for check in checks)
    print("all checks passed" if not failed else f"{failed} check(s) failed")
    facts = {"model": name, "data": run.train_file, "mode": config.mode, "layout": config.layout}
    return {**facts, "passed": not failed, "checks": checks}


VERIFY = Command(
    verify,
    add=add_records_model_objective,
    flags=((VerifyFlags, "verify"), (JsonFlags, "verify")),
    common="train_file max_length model_name chat_template lora regular step_jepa layout predictors labels plain "
    "jepa_loss_type max_records json finetune_seed",
    epilog="example: stepjepa verify --train_file data.jsonl --model_name preset:tiny --step_jepa",
)


def analyze(args: argparse.Namespace) -> int:
    """Analyse the models, write the files and print the numbers."""
    from stepjepa.inspection import analysis

    models = analysis.analyze_models(from_args(AnalysisSettings, args))
    for model in models:
        source, target = model.views
        sides = f"source {source} read behind {model.config.predictors} predictor tokens, target {target}"
        print(f"{model.model_path}: {model.config.mode} views, {sides}")
    print(f"\n{analysis.as_table(models)}\n")
    for remark in analysis.notes(models):
        print(f"note: {visible(remark)}")
    print(f"written: {', '.join(map(str, analysis.output_files(args.output_dir)))}")
    return 0


ANALYZE = Command(
    analyze,
    flags=((AnalysisSettings, "files"),),
    common="model_path test_file output_dir overwrite views pairs layer pooling t_sne_type max_examples "
    "batch_size dtype",
    epilog="Embeds the two views of each test record where training read them (docs/how-to/representations.md).",
)
