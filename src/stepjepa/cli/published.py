"""Translate command lines of the published scripts into those of stepjepa, before they are parsed.

The published programs are ``finetune.py``, ``stp.py`` and ``evaluate.py`` of LLM-JEPA (arXiv 2509.14252) and the
training script of Step-JEPA. docs/published.md describes each of their flags. Flags that mean the same here pass
through. Free of torch and of argparse.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stepjepa.base.errors import UserError
from stepjepa.config.jepa import DEFAULTS

PUBLISHED_TEMPERATURE = 0.07
"""Temperature of the published InfoNCE, pinned: a published command keeps it, whatever the default here is."""

FALSE = ("false", "0", "no", "off")
"""Values that switch a flag off, as the parser reads them."""

SPAN_TERM = "examples/terms/random_span.py, the published formula as a term"


@dataclass
class Flag:
    """A flag as the command line has it: its name without dashes, and the words that are its value."""

    name: str
    words: list[str]  # as written: "--lbd", "0.1" or "--lbd=0.1"

    @property
    def value(self) -> str | None:
        """The value as one text, or None for a flag without one."""
        inline = self.words[0].partition("=")
        return inline[2] if inline[1] else " ".join(self.words[1:]) or None


@dataclass
class CommandLine:
    """A command line that is translated flag by flag.

    Attributes:
        flags: the remaining flags of the command line, in its order.
        defaults: arguments in front of them, which named flags override.
        notes: messages for the user, one line each.
    """

    flags: list[Flag]
    defaults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, arguments: Iterable[str]) -> CommandLine:
        """Split arguments into flags; dashes inside names are underscores already."""
        flags: list[Flag] = []
        for word in arguments:
            if word.startswith("--") and len(word) > len("--"):
                flags.append(Flag(word[2:].partition("=")[0], [word]))
            elif flags:
                flags[-1].words.append(word)
            else:
                flags.append(Flag("", [word]))
        return cls(flags)

    def arguments(self) -> list[str]:
        """Return the translated command line."""
        return [*self.defaults, *(word for flag in self.flags for word in flag.words)]

    def has(self, *names: str) -> bool:
        """Return whether a flag of one of these names is given."""
        return any(flag.name in names for flag in self.flags)

    def value(self, *names: str) -> str | None:
        """Return the value of the last flag of these names; None if there is none."""
        return next((flag.value for flag in reversed(self.flags) if flag.name in names), None)

    def is_on(self, *names: str) -> bool:
        """Return whether a switch of one of these names is given and not switched off."""
        last = next((flag for flag in reversed(self.flags) if flag.name in names), None)
        return last is not None and (last.value or "true").lower() not in FALSE

    def remove(self, *names: str) -> None:
        """Remove all flags of these names."""
        self.flags = [flag for flag in self.flags if flag.name not in names]

    def take(self, name: str) -> str | None:
        """Remove a flag and return its value; None if it is not given."""
        value = self.value(name)
        self.remove(name)
        return value

    def take_switch(self, name: str) -> bool:
        """Remove a switch, and return whether it was on."""
        is_on = self.is_on(name)
        self.remove(name)
        return is_on

    def add(self, name: str, value: object) -> None:
        """Add ``--name=value`` at the end."""
        self.flags.append(Flag(name, [f"--{name}={value}"]))

    def add_agreeing(self, published: str, name: str, value: str) -> None:
        """Add ``--name=value``, which a published flag stands for; ``UserError`` if another value is named, too."""
        if self.value(name) not in (None, value):
            raise UserError(f"--{published} means --{name} {value}, and another --{name} is named too; leave one out")
        self.remove(name)
        self.add(name, value)

    def note_idle(self, *names: str, reason: str) -> None:
        """Remove flags without effect here, and say so on one line."""
        idle = [name for name in names if self.has(name)]
        flags = [f"--{name}" for name in idle if self.is_on(name)]
        self.remove(*idle)
        if flags:
            self.notes.append(f"{', '.join(flags)}: no effect here; {reason}")

    def refuse(self, name: str, reason: str, *, without_effect: Callable[[str], bool] = lambda value: False) -> None:
        """Remove a flag that has no effect in the published program; raise ``UserError`` if it has one.

        Args:
            name: of the flag, without dashes.
            reason: why it is refused, and what to do.
            without_effect: whether a value has no effect in the published program.
        """
        if not self.has(name):
            return
        value = self.value(name)
        if self.is_on(name) and not without_effect(value or ""):
            raise UserError(f"--{name}{'' if value is None else f' {value}'}: {reason}")
        self.remove(name)


def translate_train(arguments: Sequence[str], eval_split: float = 0.2) -> tuple[list[str], list[str]]:
    """Translate the arguments of a published training script into those of ``stepjepa train``.

    Args:
        arguments: with underscores in the names of flags, those of a configuration file first.
        eval_split: the default of ``--eval_split``, for the note.

    Returns:
        The arguments for our parser, and notes on what was translated, one line each.

    Raises:
        UserError: a flag has no counterpart here, or contradicts another one.
    """
    line = CommandLine.of(arguments)
    _preset(line)
    _tube(line)
    _schedules(line)
    _views(line)
    _answers(line, eval_split)
    _reporting(line)
    return line.arguments(), line.notes


def _preset(line: CommandLine) -> None:
    """Translate ``--preset paper`` to the published defaults, where they differ, in front of named flags."""
    regular, preset = line.is_on("regular"), line.value("preset")
    if line.is_on("infonce") and not regular:
        line.defaults.append(f"--infonce_temperature={PUBLISHED_TEMPERATURE}")
    if not line.has("preset"):
        return
    if preset != "paper":
        raise UserError(f"--preset: expected one of paper, got '{preset or ''}'")
    line.remove("preset")
    defaults = {} if line.is_on("train_all", "trainall") else {"labels": "reference"}
    defaults["over_length"] = "truncate"
    if not regular and (line.is_on("infonce") or line.value("jepa_loss_type") == "infonce"):
        defaults["infonce_negatives"] = "all"
    if line.is_on("step_jepa"):
        defaults |= {"predictors": "1", "max_length": "1024"}
    elif not regular and not line.has("linear"):
        defaults |= {"predictors": "0", "layout": "separate"}
    line.defaults[:0] = [f"--{name}={value}" for name, value in defaults.items()]


def _tube(line: CommandLine) -> None:
    """Translate ``--linear random_span`` and the flags of its spans to Semantic Tube Prediction."""
    line.refuse("linear_predictor", "Semantic Tube Prediction has no predictor layer here; leave it out")
    line.refuse("load_lp", "Semantic Tube Prediction has no predictor layer to load here; leave it out")
    line.refuse("curvature_sign", "there is no signed curvature here; --stp is nearest")
    for name in ("random_span_mask", "random_span_mask_recover"):
        line.refuse(name, "no masked spans are trained here; a custom term can (docs/design.md); leave it out")
    line.refuse("random_span_zero", f"--stp draws all places of a span; nearest is {SPAN_TERM}")
    line.refuse("length_adjustment", f"--stp does not weigh spans by their length; nearest is {SPAN_TERM}")
    line.refuse("random_span_times", f"--stp draws once a record; nearest is {SPAN_TERM}", without_effect="1".__eq__)
    infinite = "--stp has no longest span; nearest is " + SPAN_TERM
    line.refuse("random_span_max_length", infinite, without_effect="-1".__eq__)
    spans = (f"random_span_{kind}" for kind in ("all", "e2e", "uniform", "draw_both"))
    line.note_idle(*spans, reason="--stp draws from the whole text")
    layer, mode = line.take("random_span_layer"), line.take("linear")
    if mode is None:
        if layer not in (None, "-1"):
            line.notes.append("--random_span_layer: no effect here; only --linear random_span reads it")
        return
    if mode != "random_span":
        raise UserError(f"--linear: expected random_span, got '{mode}'; the other forms are not here, --stp is nearest")
    if others := [name for name in ("regular", "step_jepa", "stp") if line.is_on(name)]:
        raise UserError(f"--linear random_span means --regular --stp; leave --{others[0]} out, or --linear")
    weight = line.take("lbd") or str(DEFAULTS["lbd"])
    line.add("regular", "true")
    if layer in (None, "-1"):
        line.add("stp", weight)
        equivalent = f"--stp {weight}"
    else:
        settings = json.dumps({"weight": _number("lbd", weight), "layer": int(_number("random_span_layer", layer))})
        line.add("term", "stepjepa.objectives.text:SemanticTube")
        line.add("term_args", settings)
        equivalent = f"--term stepjepa.objectives.text:SemanticTube --term_args '{settings}'"
    line.notes.append(f"--linear random_span --lbd {weight} is --regular {equivalent}")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--{name}: expected a number, got '{text}'") from None


def _schedules(line: CommandLine) -> None:
    """Translate the published schedules of ``lbd`` and of the learning rate."""
    if line.has("lbd_warmup") and line.value("lbd_warmup") in (None, "True", "true"):
        line.remove("lbd_warmup")
        line.add_agreeing("lbd_warmup", "lbd_schedule", "warmup")
        line.add("lbd_warmup", 1)
        line.notes.append("--lbd_warmup is --lbd_schedule warmup --lbd_warmup 1")
    elif line.has("lbd_warmup") and not line.is_on("lbd_warmup"):
        line.remove("lbd_warmup")
    difference = "lbd rises from 0 here; leave it out"
    line.refuse("min_lbd", difference, without_effect=lambda value: _number("min_lbd", value) == 0)
    if line.take_switch("constant_lr"):
        line.add_agreeing("constant_lr", "lr_scheduler_type", "constant")


def _views(line: CommandLine) -> None:
    """Translate flags of predictor tokens and readouts that only the published programs have."""
    idle = line.is_on("regular")
    predictors = line.value("predictors") or ("2" if line.is_on("step_jepa") else "1")
    is_single = idle or _number("predictors", predictors) <= 1
    difference = "each predictor token has a row of its own here; nearest is --predictors 1"
    line.refuse("same_predictor", difference, without_effect=lambda _: is_single)
    line.refuse("avg_encoding", "no such average here; nearest is --pooling mean", without_effect=lambda _: idle)
    plain = "views have the format of the text here; nearest is --plain"
    line.refuse("plain_jepa", plain, without_effect=lambda _: idle)
    line.note_idle("enable_save", reason="--save_steps says how often a checkpoint is saved")
    line.note_idle("unmask_assistant_special_tokens", reason="the end of turn is trained anyway")
    line.note_idle("use_default_data_collator", reason="records have a collator of their own")


def _answers(line: CommandLine, eval_split: float) -> None:
    """Translate ``--eval_accuracy``, which holds out a share of the training file and answers some of its records."""
    if not line.take_switch("eval_accuracy"):
        return
    count, held_out = line.value("eval_generate", "max_eval_samples") or "50", ""
    if line.has("train_file") and not line.has("eval_file"):
        seed = line.value("finetune_seed", "seed") or "42"
        data_file = line.take("train_file")
        line.remove("split_seed")
        line.add("data_file", data_file)
        line.add("split_seed", seed)
        share = line.value("eval_split") or eval_split
        held_out = f"--data_file {data_file} --eval_split {share} --split_seed {seed} "
    line.remove("eval_generate", "max_eval_samples")
    line.add("eval_generate", count)
    line.notes.append(f"--eval_accuracy is {held_out}--eval_generate {count}")


def _reporting(line: CommandLine) -> None:
    """Translate flags of the destination of logs, and of saving checkpoints."""
    if line.take_switch("wandb"):
        line.add_agreeing("wandb", "report_to", "wandb")
    if (name := line.take("wandb_run_name")) is not None:
        line.add_agreeing("wandb_run_name", "run_name", name)
    if line.take_switch("no_save"):
        line.add_agreeing("no_save", "save_strategy", "no")
    if (project := line.take("wandb_project")) is not None:
        # The library of wandb reads this variable.
        os.environ["WANDB_PROJECT"] = project


IDLE_IN_EVALUATION = (
    *("original_model_name", "split_tune_untune", "nosplit_data", "device_map", "device", "use_lora", "no_lora"),
    *("max_length", "do_sample", "debug"),
)
"""Flags of the published evaluations without effect here: their choice is detected, or never made."""

OF_ANALYZE = {
    "t_sne": "false",
    "t_sne_type": "",
    "embedding_layer": "-1",
    "embedding_pooling": "last",
    "start_index": "1",
}
"""Flags of the published evaluation that draw pictures of embeddings, with the values that change nothing."""


OF_DECODING = {
    "repetition_penalty": (("1.0", "1.1", "1"), "answers have no penalty on repetition"),
    "num_beams": (("1",), "answers are greedy, or samples"),
}
"""Flags of decoding that have no counterpart here -> accepted values, and what is done instead."""


def translate_evaluate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate the arguments of a published evaluation into those of ``stepjepa evaluate``; as for training."""
    line = CommandLine.of(arguments)
    is_unsplit = line.is_on("nosplit_data")
    for name in ("train_file", "test_size", "split_seed", "process_split"):
        reason = "a test file is never split here; split with 'stepjepa train --data_file', or pass --nosplit_data"
        line.refuse(name, reason, without_effect=lambda _: is_unsplit)
    for name, default in OF_ANALYZE.items():
        line.refuse(name, "'stepjepa analyze' draws embeddings", without_effect=default.__eq__)
    for name, (harmless, difference) in OF_DECODING.items():
        if line.has(name):
            if (value := line.take(name)) not in harmless:
                raise UserError(f"--{name} {value}: {difference} here; leave it out")
            line.notes.append(f"--{name}: no effect here; {difference}")
    line.note_idle(*IDLE_IN_EVALUATION, reason="see docs/published.md")
    return line.arguments(), line.notes
