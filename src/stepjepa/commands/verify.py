"""``stepjepa verify``: PASS or FAIL for each check on the user's own model and data."""

from __future__ import annotations

import argparse
from typing import Any

from stepjepa.arguments import (
    add_data_group,
    add_loss_group,
    add_model_group,
    add_objective_group,
    add_switch,
    jepa_config,
)
from stepjepa.errors import UserError, visible
from stepjepa.terminal import lines_to_stderr, print_json

SUMMARY = "check model, data, masks and losses against slow and obvious computations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shared flags, all optional here, and how much to look at."""
    add_data_group(parser, required=False)
    model = add_model_group(parser, required=False)
    add_switch(model, "--lora", help="check the optimisation step with a LoRA adapter")
    model.add_argument("--lora_rank", type=int, default=16, metavar="R", help="(16)")
    add_objective_group(parser)
    add_loss_group(parser)
    group = parser.add_argument_group("verify")
    group.add_argument("--max_records", type=int, default=32, metavar="N", help="records looked at (32)")
    group.add_argument(
        "--json", action="store_true", help="the checks as JSON on standard output, lines on standard error"
    )
    group.add_argument("--finetune_seed", "--seed", type=int, default=42, metavar="N", help="of random weights (42)")


def run(args: argparse.Namespace) -> int:
    """Print one line per check; 1 if any failed."""
    with lines_to_stderr(args.json):
        found = _verify(args)
    if args.json:
        print_json(found)
    return 0 if found["passed"] else 1


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    config = jepa_config(args)
    if args.max_records < 1:
        raise UserError(f"--max_records: expected 1 or more, got {args.max_records}")
    from stepjepa.chat.system_prompts import describe_system_prompts
    from stepjepa.data.records import bad_records, parse_record, read_records, tell_bad_records
    from stepjepa.inspection.verification import Subject, verify
    from stepjepa.models.loading import LoraSettings, add_lora, load_model
    from stepjepa.models.token_rows import adapter_ids
    from stepjepa.tasks.stepmath import Difficulty, generate

    if args.train_file is not None:
        bad = bad_records(args.bad_records)
        records = read_records(args.train_file, bad=bad)
        tell_bad_records(bad)
    else:
        made = generate(size=200, seed=args.finetune_seed, difficulty=Difficulty())
        records = [parse_record(value, "built-in problems", line) for line, value in enumerate(made, start=1)]
    name = args.model_name or "preset:tiny"
    print(f"model {name}, data {args.train_file or 'built-in problems'}, mode {config.mode}, layout {config.layout}")
    # Spread over the file, which may be put together from several sources.
    count = min(len(records), args.max_records)
    looked_at = [records[place * len(records) // count] for place in range(count)]
    print(f"{len(looked_at):,} of {len(records):,} records looked at, spread over all (--max_records)")
    prompts = describe_system_prompts(records)
    if prompts is not None:
        print(f"note: system prompts: {prompts}")
    model, tokenizer = load_model(
        name,
        texts=(message["content"] for record in records for message in record.messages),
        predictors=(config.predictors or 0) if config.uses_views else 0,
        seed=args.finetune_seed,
        chat_template=args.chat_template,
        trust_remote_code=args.trust_remote_code,
        plain=config.plain,
    )
    try:
        settings, trained = LoraSettings(args.lora_rank), adapter_ids(tokenizer, plain=config.plain)
        subject = Subject(
            model.eval(),
            tokenizer,
            config,
            looked_at,
            lora=(lambda base: add_lora(base, settings, trained)) if args.lora else None,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    checks = []
    for result in verify(subject):
        checks.append({"name": result.name, "passed": result.passed, "detail": str(result.detail)})
        print(f"{'PASS' if result.passed else 'FAIL'}  {result.name}: {visible(str(result.detail))}", flush=True)
    failed = sum(not check["passed"] for check in checks)
    print("all checks passed" if not failed else f"{failed} check(s) failed")
    about = {"model": name, "data": args.train_file, "mode": config.mode, "layout": config.layout}
    return {**about, "passed": not failed, "checks": checks}
