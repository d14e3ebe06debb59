"""Examples per second of ``stepjepa evaluate``: batches against one prompt at a time, on the same model and records.

A model is trained first, on generated records, so that it stops as a real one does and not always at the limit. Every
arm answers the same records in every round; rounds are interleaved and ratios are taken within a round. The plain arm
calls ``generate`` on each prompt and does nothing else, as the published script does; ours also measure the loss on the
right answers, score, and write files. So each of ours is held against the plain loop, and against the same work of ours
with one prompt at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench import Spread, free_name

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json

HERE = Path(__file__).resolve().parent
PLAIN = "plain loop"
ALONE = ", generation alone"
TRAIN_RECORDS = 8000


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--model", default="preset:tiny", help="preset, folder or hub id (default: %(default)s)")
    add("--data", default="nl-rx", choices=["nl-rx", "stepmath"], help="short or long answers (default: %(default)s)")
    add("--steps", type=int, default=300, help="of training beforehand (default: %(default)s)")
    add("--examples", type=int, default=192, help="answered by every arm (default: %(default)s)")
    add("--max_new_tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    add("--batch_sizes", type=int, nargs="+", default=[1, 16, 64], help="arms of ours (default: 1 16 64)")
    add("--rounds", type=int, default=3, help="runs of every arm (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of the whole (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-evaluation.json)")
    return options


def make_lines(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records to train on, and others to answer."""
    from stepjepa.tasks import nl_rx_grammar, stepmath
    from stepjepa.tasks.nl_rx import NlRxTask
    from stepjepa.tasks.raw_values import chat_record

    if args.data == "stepmath":
        return stepmath.generate_split(TRAIN_RECORDS, args.examples, 0)
    train, test = nl_rx_grammar.generate_split(TRAIN_RECORDS, args.examples, 0)
    prompt = NlRxTask.system_prompt
    return [chat_record(prompt, *pair) for pair in train], [chat_record(prompt, *pair) for pair in test]


def make_model(args: argparse.Namespace, lines: list[dict[str, Any]]) -> tuple[Any, Any]:
    """A model that was trained for a while on some records."""
    from transformers import TrainingArguments

    from stepjepa.config.jepa import JepaConfig
    from stepjepa.data.records import as_records
    from stepjepa.models.loading import load_model
    from stepjepa.training.trainer import JepaTrainer

    records = list(as_records(lines))
    texts = (message["content"] for record in records for message in record.messages)
    model, tokenizer = load_model(args.model, texts=texts)
    with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
        training = TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=not sys.stderr.isatty(),
            dataloader_pin_memory=False,
            logging_steps=100,
        )
        config = JepaConfig(mode="regular", over_length="skip")
        JepaTrainer(model, training, config, train_dataset=records, processing_class=tokenizer).train()
    return model.eval(), tokenizer


def answer_plainly(model: Any, tokenizer: Any, test_file: Path, max_new_tokens: int) -> list[str]:
    """One ``generate`` for each prompt, greedy."""
    import torch

    from stepjepa.chat.template import ChatTemplate
    from stepjepa.data.sources import read_records

    template, said = ChatTemplate(tokenizer), []
    for record in read_records(test_file):
        prompt = template.prompt(record.messages[:-1])
        inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(template.stop_ids),
                pad_token_id=tokenizer.pad_token_id,
            )
        said.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return said


def answer_in_batches(model: Any, tokenizer: Any, test_file: Path, size: int, args: argparse.Namespace) -> list[str]:
    """A whole evaluation; the texts are read back from its file."""
    from stepjepa.base.files import read_jsonl
    from stepjepa.evaluation.run import Evaluation
    from stepjepa.evaluation.settings import EvaluationSettings
    from stepjepa.models.sampling import Sampling

    with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
        output = Path(folder) / "out.jsonl"
        sampling = Sampling(max_new_tokens=args.max_new_tokens)
        settings = EvaluationSettings(
            model_path="-", test_file=test_file, output_file=output, task="generic", batch_size=size, sampling=sampling
        )
        Evaluation(settings).run(lambda: (model, tokenizer))
        return [line["generated"] for _, line in read_jsonl(output)]


def generate_in_batches(model: Any, tokenizer: Any, test_file: Path, size: int, max_new_tokens: int) -> list[str]:
    """The generation of an evaluation alone, as the plain loop has it: no losses, no scores, no files."""
    from stepjepa.data.sources import read_records
    from stepjepa.evaluation.prompts import make_examples
    from stepjepa.models.generation import Generator
    from stepjepa.models.sampling import Sampling

    generator = Generator(model, tokenizer, Sampling(max_new_tokens=max_new_tokens))
    examples = make_examples(enumerate(read_records(test_file)), tokenizer, generator.template)
    examples.sort(key=lambda example: -len(example.prompt_ids))
    said = {}
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        for example, answers in zip(batch, generator.answer([each.prompt_ids for each in batch]), strict=True):
            said[example.index] = answers[0].text
    return [said[index] for index in range(len(examples))]


def one_at_a_time(arm: str) -> str:
    """The arm that does the same with batches of one."""
    return PLAIN if arm == PLAIN else f"batch 1{ALONE if arm.endswith(ALONE) else ''}"


def over(slow: Sequence[float], quick: Sequence[float]) -> dict[str, float] | None:
    """Ratios of seconds, round by round; None where nothing was measured."""
    return Spread.of([s / q for s, q in zip(slow, quick, strict=True)])._asdict() if slow else None


def bench(args: argparse.Namespace) -> Path:
    """Measure, print the table, write the results; returns their file."""
    import torch

    from stepjepa.base.files import write_jsonl

    torch.set_num_threads(args.threads)
    train, lines = make_lines(args)
    model, tokenizer = make_model(args, train)
    arms = {f"batch {size}{rest}": size for size in args.batch_sizes for rest in (ALONE, "")}
    times: dict[str, list[float]] = {name: [] for name in (PLAIN, *arms)}
    differing: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
        test_file = Path(folder) / "test.jsonl"
        write_jsonl(test_file, lines)
        for number in range(args.rounds):
            said: dict[str, list[str]] = {}
            for arm in list(times) if number % 2 == 0 else list(reversed(times)):
                began = time.perf_counter()
                if arm == PLAIN:
                    said[arm] = answer_plainly(model, tokenizer, test_file, args.max_new_tokens)
                elif arm.endswith(ALONE):
                    said[arm] = generate_in_batches(model, tokenizer, test_file, arms[arm], args.max_new_tokens)
                else:
                    said[arm] = answer_in_batches(model, tokenizer, test_file, arms[arm], args)
                times[arm].append(time.perf_counter() - began)
                rate = len(lines) / times[arm][-1]
                print(f"[{number + 1}/{args.rounds}] {arm}: {rate:.1f} examples/s", file=sys.stderr, flush=True)
            differing = {arm: sum(map(str.__ne__, texts, said[PLAIN])) for arm, texts in said.items()}
    figures: dict[str, dict[str, Any]] = {
        arm: {
            "examples_per_second": Spread.of([len(lines) / value for value in values])._asdict(),
            "over_plain": over(times[PLAIN], values),
            # The same work with one prompt at a time, where that was among the arms.
            "over_one": over(times.get(one_at_a_time(arm), []), values),
            "answers_unlike_plain": differing[arm],
        }
        for arm, values in times.items()
    }
    print(
        "| arm | examples/s | over the plain loop | over the same with batch 1 | answers unlike the plain loop's |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for arm, figure in figures.items():
        cells = [figure[name] for name in ("examples_per_second", "over_plain", "over_one")]
        shown = ["" if each is None else "{median:.2f} [{low:.2f}, {high:.2f}]".format(**each) for each in cells]
        print(f"| {arm} | {' | '.join(shown)} | {figure['answers_unlike_plain']} |")
    machine = f"cpu-{args.threads}"
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-evaluation.json")
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    write_json(path, {"machine": machine, "settings": settings, "arms": figures, "seconds": times})
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
