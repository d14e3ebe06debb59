"""``stepjepa inspect``, ``verify`` and ``analyze``: tokens of records, checks, embeddings of a model."""

import argparse
import sys
from dataclasses import asdict, dataclass

from stepjepa.base.counting import counted
from stepjepa.base.errors import one_line, visible
from stepjepa.base.files import check_output_file, claimed_output
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, spelled
from stepjepa.chat.unused import NOT_USED
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import RECORDS_MODEL_OBJECTIVE, JsonFlags, add_records_model_objective, run_config
from stepjepa.cli.parser import Parser, from_args
from stepjepa.config.option import FROM_ONE, option
from stepjepa.inspection.analysis import AnalysisSettings


@dataclass
class ShowFlags:
    """The records to show, and the form of the output."""

    index: int = option(0, "the first record, counted from 0", metavar="I")
    records: int = option(1, "number of records to show, as one micro-batch from there on", allowed=FROM_ONE)
    json: bool = option(False, "one JSON document on standard output instead of text")
    png: str | None = option(None, "write tree and attention matrix as a picture", metavar="FILE", path=True)
    overwrite: bool = option(False, "let --png replace a file")


def inspect(args: argparse.Namespace) -> JsonObject:
    """Show some records."""
    from stepjepa.inspection.inputs import training_records, training_tokenizer
    from stepjepa.inspection.record import inspect_records
    from stepjepa.inspection.record_text import as_text, title

    run = run_config(args, RECORDS_MODEL_OBJECTIVE)
    if args.png is not None:
        from stepjepa.study.plot import check_picture

        check_picture(args.png, "png")
        check_output_file(args.png, args.overwrite)
    records = training_records(run)
    inspection = inspect_records(records, args.index, training_tokenizer(run, records), run.jepa, args.records)
    if (unused := inspection.template.get(NOT_USED)) is not None:
        note(f"{NOT_USED}: {unused}")
    for record in inspection.left_out:
        note(f"{visible(inspection.path)}:{record['line']} is not shown: {record['reason']}")
    if inspection.refused is not None:
        note(f"would be refused by train: {one_line(inspection.refused)}")
    if not args.json:
        # In one write, so that a reader of the first lines, such as `head`, does not break a second one.
        print(f"{as_text(inspection)}\n", end="")
    if args.png is not None:
        from stepjepa.inspection.tree_picture import write_png

        with claimed_output(args.png, args.overwrite):
            write_png(inspection, args.png, title(inspection))
        print(f"wrote {args.png}", file=sys.stderr)
    return {"model": str(run.model_name), **asdict(inspection)}


def add_flags(parser: Parser) -> None:
    """Add the flags of records, model and objective; the model is required."""
    add_records_model_objective(parser)
    parser.required += ["model_name"]


INSPECT = Command(
    inspect,
    add=add_flags,
    flags=((ShowFlags, "what to show"),),
    common="train_file dataset columns max_length model_name chat_template regular step_jepa layout predictors pairs "
    "step_separator labels plain index records json png overwrite",
    epilog="example: stepjepa inspect --train_file data.jsonl --model_name preset:tiny --step_jepa",
)


@dataclass
class VerifyFlags:
    """Size and seed of the checks, and whether with an adapter."""

    lora: bool = option(False, "check the optimisation step with a LoRA adapter")
    max_records: int = option(32, "number of records to check", allowed=FROM_ONE)
    finetune_seed: int = option(42, "seed of random weights", names=("seed",))


def run_checks(args: argparse.Namespace) -> JsonObject:
    """Print one line per check."""
    run = run_config(args, RECORDS_MODEL_OBJECTIVE)
    config = run.jepa
    from stepjepa.evaluation.answering import spread
    from stepjepa.inspection.inputs import generated_records, name_of_data, training_records, training_subject
    from stepjepa.inspection.verification import verify

    seed, name, data = args.finetune_seed, run.model_name or "preset:tiny", name_of_data(run)
    records = generated_records(run, seed) if data is None else training_records(run)
    print(f"model {name}, data {data or 'built-in problems'}, mode {config.mode}, layout {config.layout}")
    sample = spread(records, args.max_records)
    print(f"{len(sample):,} of {len(records):,} records looked at, spread over all (--max_records)")
    subject = training_subject(run, name, records, sample, seed=seed, lora=args.lora)
    if (unused := subject.jepa.record_tokenizer.describe().get(NOT_USED)) is not None:
        note(f"{NOT_USED}: {unused}")
    checks = []
    for check in verify(subject):
        checks.append(check)
        outcome = "PASS" if check["passed"] else "FAIL"
        print(f"{outcome}  {check['name']}: {visible(spelled(check['detail']))}", flush=True)
    failed = sum(not check["passed"] for check in checks)
    print("all checks passed" if not failed else f"{counted(failed, 'check')} failed")
    facts = {"model": name, "data": data, "mode": config.mode, "layout": config.layout}
    return {**facts, "passed": not failed, "checks": checks}


VERIFY = Command(
    run_checks,
    add=add_records_model_objective,
    flags=((VerifyFlags, "verify"), (JsonFlags, "verify")),
    common="train_file dataset columns max_length model_name chat_template lora regular step_jepa layout predictors "
    "labels plain jepa_loss_type max_records json finetune_seed",
    epilog="example: stepjepa verify --train_file data.jsonl --model_name preset:tiny --step_jepa",
)


def analyze(args: argparse.Namespace) -> int:
    """Analyse the models, write the files and print the numbers."""
    from stepjepa.inspection import analysis

    models = analysis.analyze_models(from_args(AnalysisSettings, args))
    for model in models:
        source, target = model.views
        tokens = counted(model.config.used_predictors, "predictor token")
        sides = f"source {source} read behind {tokens}, target {target}"
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
