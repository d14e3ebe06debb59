"""``stepjepa verify``: print PASS or FAIL for each check of the user's own model and data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from stepjepa.arguments import JsonFlags, ModelFlags, add_training_data, jepa_config
from stepjepa.commands import Command
from stepjepa.errors import UserError, visible
from stepjepa.options import FROM_ONE, option


@dataclass
class VerifiedModel(ModelFlags):
    """Which model, and whether with an adapter."""

    lora: bool = option(False, "check the optimisation step with a LoRA adapter")
    lora_rank: int = option(16, "rank of the adapter", metavar="R", allowed=FROM_ONE)


@dataclass
class VerifyFlags:
    """Size and seed of the checks."""

    max_records: int = option(32, "records looked at", allowed=FROM_ONE)
    finetune_seed: int = option(42, "seed of random weights", names=("seed",))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print one line per check."""
    config = jepa_config(args)
    from stepjepa.data.records import bad_records, parse_record, tell_bad_records
    from stepjepa.data.sources import read_records
    from stepjepa.inspection.verification import Subject, verify
    from stepjepa.models.loading import LoraSettings, add_lora, load_model
    from stepjepa.models.token_rows import adapter_ids
    from stepjepa.tasks.stepmath import Difficulty, generate

    if args.train_file is not None:
        bad = bad_records(args.bad_records)
        records = read_records(args.train_file, bad=bad, columns=args.columns)
        tell_bad_records(bad)
    else:
        made = generate(size=200, seed=args.finetune_seed, difficulty=Difficulty())
        records = [parse_record(value, "built-in problems", line) for line, value in enumerate(made, start=1)]
    name = args.model_name or "preset:tiny"
    print(f"model {name}, data {args.train_file or 'built-in problems'}, mode {config.mode}, layout {config.layout}")
    # Evenly spaced over the file, which may consist of several data sets.
    count = min(len(records), args.max_records)
    looked_at = [records[place * len(records) // count] for place in range(count)]
    print(f"{len(looked_at):,} of {len(records):,} records looked at, spread over all (--max_records)")
    model, tokenizer = load_model(
        name,
        texts=(message["content"] for record in records for message in record.messages),
        predictors=(config.predictors or 0) if config.uses_views else 0,
        seed=args.finetune_seed,
        chat_template=args.chat_template,
        trust_remote_code=args.trust_remote_code,
        gguf_file=args.gguf_file,
        plain=config.plain,
    )
    try:
        settings, trained = LoraSettings(args.lora_rank), adapter_ids(tokenizer, plain=config.plain)
        lora = (lambda base: add_lora(base, settings, trained)) if args.lora else None
        subject = Subject(model.eval(), tokenizer, config, looked_at, lora=lora)
    except ValueError as error:
        raise UserError(str(error)) from None
    checks = []
    for check in verify(subject):
        checks.append(check)
        print(f"{'PASS' if check['passed'] else 'FAIL'}  {check['name']}: {visible(check['detail'])}", flush=True)
    failed = sum(not check["passed"] for check in checks)
    print("all checks passed" if not failed else f"{failed} check(s) failed")
    about = {"model": name, "data": args.train_file, "mode": config.mode, "layout": config.layout}
    return {**about, "passed": not failed, "checks": checks}


VERIFY = Command(
    run,
    add=lambda parser: add_training_data(parser, VerifiedModel),
    flags=((VerifyFlags, "verify"), (JsonFlags, "verify")),
    common="train_file max_length model_name chat_template lora regular step_jepa layout predictors labels plain "
    "jepa_loss_type max_records json finetune_seed",
    epilog="example: stepjepa verify --train_file data.jsonl --model_name preset:tiny --step_jepa",
)
