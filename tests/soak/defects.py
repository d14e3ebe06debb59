"""Damage to the package itself, in memory, that a check must notice: a case is the damage, and the check.

Each check is also run without the damage, and must notice nothing then.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from safetensors.torch import load_file
from scipy import stats
from transformers.trainer_utils import rotate_checkpoints

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.batch import prepare as preparing
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.models import generation, generation_settings, lm_head
from stepjepa.models.fingerprint import weights_fingerprint
from stepjepa.models.presets import train_tokenizer
from stepjepa.store import resume
from stepjepa.store.record import Launch, RunRecord, Training, write_record
from stepjepa.study import statistics
from stepjepa.study.page import markup
from stepjepa.tasks import answers
from stepjepa.training import recording, saving
from stepjepa.training.resuming import ResumeCallback
from stepjepa.training.trainer import JepaTrainer

sys.path.append(str(Path(__file__).parents[1] / "models"))

from model_types import compare


class Defect(NamedTuple):
    """One case: ``damage`` patches the package, and ``notices`` says whether its check finds a fault."""

    damage: Callable[[pytest.MonkeyPatch], None]
    notices: Callable[[], bool]


def make_trainer(folder: Path, *, seed: int = 3, **arguments: Any) -> JepaTrainer:
    """A plain run that saves every step, at a constant rate."""
    texts = [message["content"] for record in tiny.records() for message in record.messages]
    fixed = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    return JepaTrainer(
        tiny.make_model("llama", seed=seed),
        tiny.arguments(folder, **{**fixed, **arguments}),
        JepaConfig(mode="regular"),
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=train_tokenizer(texts, 290),
    )


@contextlib.contextmanager
def quiet_folder() -> Iterator[Path]:
    """A folder of its own, in which nothing is printed."""
    with contextlib.ExitStack() as stack:
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        yield Path(stack.enter_context(tempfile.TemporaryDirectory()))


# -- 1: the LM loss ----------------------------------------------------------------------------------------------------


def ignore_layers_before_the_head(patch: pytest.MonkeyPatch) -> None:
    """The LM loss is computed with the LM head on the decoder's own states, whatever the model does with them."""
    patch.setattr(lm_head, "_try", lambda *_: lm_head.Around())


def a_lm_loss_differs() -> bool:
    """Of models with a scale, or layers, between decoder and LM head, and of one without."""
    return not all(compare(model_type).is_exact for model_type in ("minicpm3", "modernbert-decoder", "bert", "llama"))


# -- 2 and 5: checkpoints ----------------------------------------------------------------------------------------------


def keep_the_path_of_the_best_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The best checkpoint is looked for where it was when it was saved."""
    patch.setattr(ResumeCallback, "_find_best", lambda *_: None)


def a_moved_run_ends_with_other_weights_than_its_best() -> bool:
    """The highest loss on held-out records counts as the best, so it is the first checkpoint's."""
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "lm_loss", "greater_is_better": True, "learning_rate": 0.01}
    with quiet_folder() as folder:
        make_trainer(folder / "run", **best, max_steps=2).train()
        (folder / "run").rename(folder / "moved")
        weights = load_file(folder / "moved" / "checkpoint-1" / "model.safetensors")
        state = json.loads((folder / "moved" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["best_global_step"] == 1
        further = make_trainer(folder / "moved", **best, max_steps=3)
        further.train(resume_from_checkpoint=str(folder / "moved" / "checkpoint-2"))
        own = further.model.state_dict()
        return not all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def order_checkpoints_by_their_files(patch: pytest.MonkeyPatch) -> None:
    """The checkpoint that was written to longest ago is deleted first."""
    patch.setattr(saving, "remove_old_checkpoints", partial(rotate_checkpoints, use_mtime=True))


def a_clock_that_was_ahead_costs_the_new_checkpoint() -> bool:
    """What is saved after it is what a limit must leave."""
    with quiet_folder() as folder:
        make_trainer(folder, max_steps=2).train()
        for path in folder.glob("checkpoint-*"):
            os.utime(path, (4e9, 4e9))
        make_trainer(folder, save_total_limit=1).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return [path.name for path in folder.glob("checkpoint-*")] != ["checkpoint-4"]


# -- 3 and 4: what has changed when a run is resumed -------------------------------------------------------------------


def compare_no_launches(patch: pytest.MonkeyPatch) -> None:
    """Settings of a launch are not compared with those of the one before."""
    patch.setattr(resume, "launch_changes", lambda *_: [])


def another_rate_leaves_no_trace() -> bool:
    """Neither on the screen nor in the record."""
    training = Training(num_train_epochs=1.0, max_steps=-1, other={"learning_rate": 2e-5})
    before = RunRecord(status="interrupted", model="a", jepa={"mode": "regular"}, training=training)
    before = replace(before, launches=[Launch(settings=resume.launch_settings(before))])
    now = replace(before, training=replace(training, other={"learning_rate": 1e-3}))
    now = replace(now, launches=[Launch(settings=resume.launch_settings(now))])
    lines: list[str] = []
    with quiet_folder() as folder:
        write_record(folder, before)
        *_, launch = resume.resumed_launches(folder, "checkpoint-1", now, allow_changes=False, say=lines.append)
    return not lines or not launch.changes


def compare_no_fingerprints(patch: pytest.MonkeyPatch) -> None:
    """Data and base weights are those of the run if their files' names and settings are."""
    patch.setattr(resume, "FINGERPRINTED", {})


def other_columns_are_resumed() -> bool:
    """A run on one column of answers is resumed on another one of the same file."""
    with quiet_folder() as folder:
        rows = [{"question": f"What is {n} + 1?", "first": f"It is {n + 1}.", "second": f"Not {n}."} for n in range(6)]
        write_jsonl(folder / "rows.jsonl", rows)
        train = [
            "train",
            "--train_file",
            folder / "rows.jsonl",
            "--model_name",
            "preset:tiny",
            "--regular",
            "--use_cpu",
        ]
        train += ["--output_dir", folder / "run", "--batch_size", 2, "--grad_accum", 1, "--save_steps", 1, "--no_cache"]
        train += ["--report_to", "none", "--columns", "question"]
        assert main([str(each) for each in (*train, "first", "--max_steps", 1)]) == 0
        again = (*train, "second", "--max_steps", 2, "--resume_from_checkpoint", "last")
        return main([str(each) for each in again]) == 0


def give_all_weights_one_fingerprint(patch: pytest.MonkeyPatch) -> None:
    """A base model is known by its name."""
    patch.setattr(recording, "weights_fingerprint", lambda *_: "the same")


def a_replaced_base_is_resumed() -> bool:
    """Of the same architecture, with other weights under the same name."""
    with quiet_folder() as folder:
        first, second = (make_trainer(folder, seed=seed, max_steps=1 + seed) for seed in (1, 2))
        assert weights_fingerprint(first.model, first.processing_class) != weights_fingerprint(
            second.model, second.processing_class
        )
        first.train()
        try:
            second.train(resume_from_checkpoint=True)
        except UserError:
            return False
        return True


# -- 6: the cache of prepared data -------------------------------------------------------------------------------------


def trust_the_cache(patch: pytest.MonkeyPatch) -> None:
    """A table of the cache is used as it is read."""
    patch.setattr(preparing, "_checksum", lambda *_: "unread")


def a_flipped_bit_is_used() -> bool:
    """One bit of each of many places of the table."""
    texts = [message["content"] for record in tiny.records() for message in record.messages]
    tokenizer = train_tokenizer(texts, 290)
    with quiet_folder() as folder:

        def fingerprints() -> tuple[str, str]:
            config = JepaConfig(mode="regular")
            return preparing.prepare(tiny.records(), tokenizer, config, cache_dir=str(folder)).dataset.fingerprints()

        right = fingerprints()
        (file,) = folder.glob("*.arrow")
        whole = file.read_bytes()
        for place in range(len(whole) // 3, len(whole), max(len(whole) // 40, 1)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with contextlib.suppress(pa.ArrowInvalid, ValueError, IndexError):  # an error is no silent use
                if fingerprints() != right:
                    return True
    return False


def leave_settings_out_of_the_key(patch: pytest.MonkeyPatch) -> None:
    """The key of the cache has the vocabulary of a tokenizer alone."""
    patch.setattr(preparing, "_settings", lambda _: [])


def tokenizers_with_other_settings_share_an_entry() -> bool:
    """As one has that writes a token in front of every text."""
    texts = [message["content"] for record in tiny.records() for message in record.messages]
    first, config = train_tokenizer(texts, 290), JepaConfig(mode="regular")
    second = copy.deepcopy(first)
    second.init_kwargs["add_prefix_space"] = True
    keys = {preparing.cache_key(tiny.records(), each, config) for each in (first, second)}
    return len(keys) == 1


# -- 7: what a comparison could have shown -----------------------------------------------------------------------------


class NormalPower:
    """The noncentral t distribution as a shifted normal one."""

    @staticmethod
    def cdf(value: float, _: int, noncentrality: float) -> float:
        """Too steep for few seeds."""
        return float(stats.norm.cdf(value - noncentrality))


def take_the_noncentral_t_for_normal(patch: pytest.MonkeyPatch) -> None:
    """Power of few seeds as if the deviation were known."""
    patch.setattr(stats, "nct", NormalPower)


def the_power_is_not_what_is_said() -> bool:
    """Three seeds and four arms: the share of simulated comparisons that show the difference that is named."""
    seeds, arms, count = 3, 4, 40_000
    test = statistics.paired_t([1.0, 2.0, 4.0], [0.0, 0.5, 1.0])
    assert test.std is not None
    difference = statistics.detectable(test, "one", arms)
    assert difference is not None
    drawn = np.random.default_rng(7).normal(difference, test.std, (count, seeds))
    statistic = drawn.mean(1) / (drawn.std(1, ddof=1) / math.sqrt(seeds))
    power = float((statistic > stats.t.isf((1 - statistics.LEVEL) / arms, seeds - 1)).mean())
    return abs(power - statistics.POWER) > 0.01


# -- 8: small ones -----------------------------------------------------------------------------------------------------


def leave_control_characters(patch: pytest.MonkeyPatch) -> None:
    """Text of users reaches a page as it is."""
    patch.setattr(markup, "terminal", SimpleNamespace(visible_lines=str))


def an_escape_reaches_the_page() -> bool:
    """As code in a text of a template, such as the name of a run in a note."""
    return "\x1b" in str(markup.with_code("run\x1b[31m"))


def begin_log_lines_anew(patch: pytest.MonkeyPatch) -> None:
    """After a resume the next line covers the steps since then."""
    patch.setattr(ResumeCallback, "_restore_log_line", lambda *_: None)


def a_line_of_a_resumed_run_differs() -> bool:
    """A line every two steps, resumed after the third one."""
    lines = []
    with quiet_folder() as folder:
        for name, ends in (("whole", (4,)), ("resumed", (3, 4))):
            for number, steps in enumerate(ends):
                run = make_trainer(folder / name, logging_steps=2, max_steps=steps)
                run.train(resume_from_checkpoint=bool(number))
            logged = [line for line in run.state.log_history if "lm_loss" in line]
            lines.append([(line["step"], line["lm_loss"]) for line in logged])
    return lines[0][-1] != lines[1][-1]


def take_an_escaped_dollar_for_a_delimiter(patch: pytest.MonkeyPatch) -> None:
    """An amount in a formula loses its sign to the delimiters."""
    patch.setattr(answers, "_REPLACEMENTS", [each for each in answers._REPLACEMENTS if each[1] != answers._DOLLAR])


def eighteen_dollars_are_not_eighteen() -> bool:
    """Marked in a box, in a formula, with an escaped sign."""
    (marked,) = answers.marked_answers(r"So it is \boxed{$\$18$}.")
    number = answers.parse_number(marked)
    return number is None or number.value != 18


# -- 9: predictor tokens -----------------------------------------------------------------------------------------------


def suppress_no_tokens(patch: pytest.MonkeyPatch) -> None:
    """Nothing keeps a model from generating ids that are no text."""
    for module in (generation, generation_settings):
        patch.setattr(module, "never_generated", lambda *_: [])


def a_saved_model_may_generate_predictors() -> bool:
    """Sampled from the folder that a trainer saved, by plain transformers."""
    texts = [message["content"] for record in tiny.records() for message in record.messages]
    with quiet_folder() as folder:
        tokenizer = train_tokenizer(texts, 290)
        run = JepaTrainer(
            tiny.make_model("llama"),
            tiny.arguments(folder, max_steps=1, save_strategy="steps"),
            JepaConfig(predictors=4),
            train_dataset=tiny.records(),
            processing_class=tokenizer,
        )
        run.train()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        # As likely as everything else.
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drawn = model.generate(torch.ones(64, 1, dtype=torch.long), do_sample=True, max_new_tokens=40, top_k=0)
        return bool(torch.isin(drawn, torch.tensor(all_predictor_ids(tokenizer))).any())


DEFECTS: dict[str, Defect] = {
    "layers between decoder and LM head are left out": Defect(ignore_layers_before_the_head, a_lm_loss_differs),
    "the best checkpoint is looked for in the old folder": Defect(
        keep_the_path_of_the_best_checkpoint, a_moved_run_ends_with_other_weights_than_its_best
    ),
    "settings of launches are not compared": Defect(compare_no_launches, another_rate_leaves_no_trace),
    "fingerprints are not compared": Defect(compare_no_fingerprints, other_columns_are_resumed),
    "all weights have one fingerprint": Defect(give_all_weights_one_fingerprint, a_replaced_base_is_resumed),
    "checkpoints are ordered by time": Defect(
        order_checkpoints_by_their_files, a_clock_that_was_ahead_costs_the_new_checkpoint
    ),
    "the cache is not verified": Defect(trust_the_cache, a_flipped_bit_is_used),
    "the key of the cache has no settings": Defect(
        leave_settings_out_of_the_key, tokenizers_with_other_settings_share_an_entry
    ),
    "power by a normal distribution": Defect(take_the_noncentral_t_for_normal, the_power_is_not_what_is_said),
    "control characters are not escaped": Defect(leave_control_characters, an_escape_reaches_the_page),
    "open log lines are not restored": Defect(begin_log_lines_anew, a_line_of_a_resumed_run_differs),
    "an escaped dollar is a delimiter": Defect(
        take_an_escaped_dollar_for_a_delimiter, eighteen_dollars_are_not_eighteen
    ),
    "no token is suppressed": Defect(suppress_no_tokens, a_saved_model_may_generate_predictors),
}
