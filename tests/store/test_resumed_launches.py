"""A run is resumed with the settings that it was begun with; what has changed is said and written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.config.jepa import JepaConfig
from stepjepa.store.record import (
    FURTHER_CALL,
    Change,
    Fingerprints,
    Launch,
    Lora,
    Order,
    Results,
    RunRecord,
    Source,
    Training,
    read_record,
    write_record,
)
from stepjepa.store.resume import FinishedError, launch_settings, resumed_launches

TRAINING = {"learning_rate": 2e-5, "optim": "adamw_torch", "lr_scheduler_type": "linear", "weight_decay": 0.0}
TRAINING |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": False}


def make(**parts: Any) -> RunRecord:
    """The record of a launch that begins; ``parts`` are fields of the record, or of ``TrainingArguments``."""
    names = RunRecord.__dataclass_fields__
    training = {name: parts.pop(name) for name in list(parts) if name not in names}
    length = {name: training.pop(name) for name in ("max_steps", "num_train_epochs") if name in training}
    record = RunRecord(
        **{
            "status": "interrupted",
            "model": "preset:tiny",
            "jepa": {"mode": "regular", "lbd": 0.5},
            "lora": Lora(rank=7),
            "loaded": {"dtype": "float32"},
            "data": {"train": Source(file="train.jsonl", sha256="d" * 64)},
            "order": Order(seed=3, records_per_micro_step=4),
            "training": Training(**{"num_train_epochs": 3.0, "max_steps": -1} | length, other={**TRAINING, **training}),
            "versions": {"torch": "2.13.0"},
            "machine": {"processes": 1, "threads": 2},
            **parts,
        }
    )
    launch = Launch(settings=launch_settings(record), versions=record.versions, machine=record.machine)
    return replace(record, launches=[launch])


def resume(folder: Path, now: RunRecord, *, allow_changes: bool = False, checkpoint: str | None = None) -> Any:
    """The changes of the launch that resumes, and the lines that are said of them."""
    output: list[str] = []
    checkpoint = str(folder / "checkpoint-5") if checkpoint is None else checkpoint
    *_, launch = resumed_launches(folder, checkpoint, now, allow_changes=allow_changes, say=output.append)
    return launch.changes, output


OTHER = {"train": Source(file="train.jsonl", sha256="e" * 64)}


def test_equal_settings_are_resumed_without_a_word(tmp_path: Path) -> None:
    write_record(tmp_path, make())
    assert resume(tmp_path, make()) == ([], [])
    assert len(resumed_launches(tmp_path, "checkpoint-5", make(), allow_changes=False, say=print)) == 2
    # Without a checkpoint it begins anew.
    assert resumed_launches(tmp_path, None, make(), allow_changes=False, say=print) == make().launches


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "preset:small"}, "`model_name`: preset:tiny -> preset:small"),
        ({"jepa": {"mode": "regular", "lbd": 0.25}}, "`lbd`: 0.5 -> 0.25"),
        ({"lora": Lora(rank=5)}, "`lora_rank`: 7 -> 5"),
        ({"lora": None}, "`lora`: True -> False"),
        ({"objective": {"object": "Objective", "sha256": "1"}}, "`objective`"),
        ({"loaded": {"dtype": "bfloat16"}}, "`dtype`: float32 -> bfloat16"),
        ({"data": OTHER}, "`train_file`: contents"),
        ({"data": {"train": Source(sha256="e" * 64)}}, "`train_dataset`: train.jsonl -> none"),
        ({"data": {"train": Source(file="a + b", other={"datasets": []})}}, "`dataset`: train.jsonl -> a \\+ b"),
        ({"order": Order(seed=5, records_per_micro_step=4)}, "`finetune_seed`: 3 -> 5"),
        ({"fingerprints": Fingerprints(records="2")}, "training records as tokens"),
        ({"fingerprints": Fingerprints(eval_records="2")}, "held-out records as tokens"),
        ({"fingerprints": Fingerprints(weights="2")}, "weights of the base model"),
    ],
    ids=str,
)
def test_what_must_not_change_is_refused_and_named(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_record(tmp_path, make(fingerprints=Fingerprints(records="1", eval_records="1", weights="1")))
    remedies = {"`train_file`: contents": "bring back the earlier contents of `train_file`"}
    remedies["weights of the base model"] = "bring back the earlier weights of the base model"
    remedy = remedies.get(named, "take those")
    with pytest.raises(
        UserError, match=rf"begun with other settings \({named}\); {remedy}, .*`allow_changes` resumes it"
    ):
        resume(tmp_path, make(**changed))
    changes, output = resume(tmp_path, make(**changed), allow_changes=True)
    assert changes and all(change.mixed for change in changes)
    assert output == [f"resumed with another {change}" for change in changes]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"eval_split": 0.2}, "`eval_split`: 0.1 -> 0.2; training records as tokens"),
        ({"split_seed": 5}, "`split_seed`: 3 -> 5; training records as tokens"),
        ({"split_by": "question"}, "`split_by`: record -> question; training records as tokens"),
        ({"sha256": "e" * 64}, "`data_file`: contents; training records as tokens"),
    ],
)
def test_another_split_of_a_file_is_refused_by_its_settings(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    was = Source(file="a.jsonl", sha256="d" * 64, eval_split=0.1, split_seed=3)
    write_record(tmp_path, make(data={"data": was}, fingerprints=Fingerprints(records="1")))
    now = make(data={"data": replace(was, **changed)}, fingerprints=Fingerprints(records="2"))
    remedy = "bring back the earlier contents of `data_file`, or name" if "sha256" in changed else "take those, or name"
    with pytest.raises(UserError, match=rf"begun with other settings \({named}\); {remedy}"):
        resume(tmp_path, now)


def test_every_changed_setting_is_named_old_and_new_and_the_file_that_has_the_old_ones(tmp_path: Path) -> None:
    was = {"mode": "llm-jepa", "lbd": 0.5, "max_length": 512, "chat_template_kwargs": {"open_thinking": True}}
    write_record(tmp_path, make(jepa=was, loaded={"dtype": "float32", "chat_template": None}))
    (tmp_path / "run.yaml").write_text("lbd: 0.5\n")
    now = was | {"max_length": 600, "lbd": 0.25, "chat_template_kwargs": {"open_thinking": False}}
    other = Source(file="other.jsonl", sha256="e" * 64)
    with pytest.raises(UserError) as error:
        resume(tmp_path, make(jepa=now, loaded={"dtype": "float32", "chat_template": "f" * 64}, data={"train": other}))
    text = str(error.value)
    for part in (
        "`lbd`: 0.5 -> 0.25",
        "`max_length`: 512 -> 600",
        "`chat_template_kwargs` open_thinking: True -> False",
        "`chat_template`: contents",
        "`train_file`: train.jsonl -> other.jsonl",
        "; bring back the earlier contents of `chat_template`; "
        f"`config {tmp_path / 'run.yaml'}` with `output_dir {tmp_path}` takes the rest, or name",
    ):
        assert part in text, text
    assert "eeee" not in text and "ffff" not in text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"learning_rate": 1e-4}, [("learning_rate: 2e-05 -> 0.0001", True)]),
        ({"optim": "sgd"}, [("optim: adamw_torch -> sgd", True)]),
        ({"lr_scheduler_type": "cosine"}, [("lr_scheduler_type: linear -> cosine", True)]),
        ({"weight_decay": 0.5}, [("weight_decay: 0.0 -> 0.5", True)]),
        ({"bf16": True}, [("bf16: False -> True", True)]),
        ({"num_train_epochs": 5.0}, [("num_train_epochs: 3.0 -> 5.0", True)]),
        ({"gradient_accumulation_steps": 4}, [("grad_accum: 2 -> 4", False), ("records_per_step: 8 -> 16", True)]),
        # As many records a step, on other machines.
        (
            {"per_device_train_batch_size": 2, "machine": {"processes": 2, "threads": 2}},
            [("batch_size: 4 -> 2", False), ("processes (machine): 1 -> 2", False)],
        ),
        ({"versions": {"torch": "2.14.0"}}, [("torch (version): 2.13.0 -> 2.14.0", False)]),
        ({"machine": {"processes": 1, "threads": 8}}, [("threads (machine): 2 -> 8", False)]),
    ],
    ids=str,
)
def test_what_may_change_is_said_and_written_down(
    changed: dict[str, Any], expected: list[tuple[str, bool]], tmp_path: Path
) -> None:
    write_record(tmp_path, make())
    changes, output = resume(tmp_path, make(**changed))
    assert [(str(change), change.mixed) for change in changes] == expected
    assert output == [f"resumed with another {words}" for words, _ in expected]
    # It is compared with the last launch, of which the record has the settings.
    both = resumed_launches(tmp_path, "checkpoint-5", make(**changed), allow_changes=False, say=print)
    write_record(tmp_path, replace(make(**changed), launches=both))
    assert read_record(tmp_path).launches == both
    assert resume(tmp_path, make(**changed)) == ([], [])


def test_a_longer_run_under_a_constant_rate_is_what_it_would_have_been(tmp_path: Path) -> None:
    write_record(tmp_path, make(lr_scheduler_type="constant", max_steps=5))
    (change,) = resume(tmp_path, make(lr_scheduler_type="constant", max_steps=7))[0]
    assert (str(change), change.mixed) == ("max_steps: 5 -> 7", False)
    rising = {"mode": "llm-jepa", "lbd": 0.5, "lbd_schedule": "warmup"}
    write_record(tmp_path, make(lr_scheduler_type="constant", max_steps=5, jepa=rising))
    (change,) = resume(tmp_path, make(lr_scheduler_type="constant", max_steps=7, jepa=rising))[0]
    assert change.mixed


def test_a_record_of_an_earlier_version_is_compared_by_its_settings(tmp_path: Path) -> None:
    """Its launches have steps and seconds alone, and it has no fingerprints."""
    old = replace(make(), launches=[Launch(seconds=1.0, to_step=5)])
    write_record(tmp_path, old)
    now = make(learning_rate=1e-4, fingerprints=Fingerprints(records="1", weights="1"))
    assert [str(change) for change in resume(tmp_path, now)[0]] == ["learning_rate: 2e-05 -> 0.0001"]


def test_options_that_an_earlier_version_lacked_have_the_values_that_it_acted_by(tmp_path: Path) -> None:
    """All had defaults of today, but for InfoNCE, which had pairs with equal partners among its negatives."""
    for loss, changes in (("cosine", []), ("infonce", ["jepa.infonce_negatives: all -> distinct"])):
        jepa = JepaConfig(jepa_loss_type=loss).to_dict()
        earlier = {name: value for name, value in jepa.items() if name not in ("infonce_negatives", "steps_from")}
        write_record(tmp_path, make(jepa=earlier))
        assert [str(change) for change in resume(tmp_path, make(jepa=jepa), allow_changes=True)[0]] == changes
        if changes:
            with pytest.raises(UserError, match=r"\(`infonce_negatives`: all -> distinct\)"):
                resume(tmp_path, make(jepa=jepa))


def test_the_checkpoint_of_another_run_is_of_the_same_settings(tmp_path: Path) -> None:
    run, new, earlier = tmp_path / "run", tmp_path / "new", Change(name="optim", before="a", now="b", mixed=True)
    first = replace(make().launches[0], changes=[earlier], from_step=0, to_step=5)
    write_record(run, replace(make(), launches=[first]))
    checkpoint = str(run / "checkpoint-5")
    # Its steps are part of this run, and so are its changes.
    assert resume(new, make(), checkpoint=checkpoint) == ([earlier], [])
    with pytest.raises(UserError, match=r"begun with other settings \(`train_file`: contents\)"):
        resume(new, make(data=OTHER), checkpoint=checkpoint)
    assert resume(new, make(), checkpoint=str(tmp_path / "unknown" / "checkpoint-5")) == ([], [])


def launch_of(record: RunRecord, from_step: int, to_step: int, *changes: Change) -> Launch:
    return replace(record.launches[0], from_step=from_step, to_step=to_step, changes=[*changes])


def saved(folder: Path, step: int) -> str:
    checkpoint = folder / f"checkpoint-{step}"
    write_json(checkpoint / "trainer_state.json", {"global_step": step})
    return str(checkpoint)


def test_a_launch_whose_steps_were_all_lost_has_changed_nothing(tmp_path: Path) -> None:
    """A launch with a wrong rate that ended before its first checkpoint leaves a clean seed of its arm."""
    wrong = make(learning_rate=7.0)
    rate = Change(name="learning_rate", before=2e-5, now=7.0, mixed=True)
    launches = [launch_of(make(), 0, 5), launch_of(wrong, 5, 7, rate)]
    write_record(tmp_path, replace(wrong, launches=launches))
    *before, now = resumed_launches(tmp_path, saved(tmp_path, 5), make(), allow_changes=False, say=print)
    assert [(each.from_step, each.to_step, each.trained) for each in before] == [(0, 5, True), (5, 5, False)]
    # The third launch is as the first one, which the second did not become.
    assert now.changes == [] and before[1].changes == [rate]
    # Had the second one saved a checkpoint, its rate would be part of the run; so it would if it was killed before
    # the record said so.
    for recorded in (7, 5):
        write_record(tmp_path, replace(wrong, launches=[launches[0], replace(launches[1], to_step=recorded)]))
        *before, now = resumed_launches(tmp_path, saved(tmp_path, 7), make(), allow_changes=False, say=print)
        assert before[1].trained and before[1].to_step == 7
        assert [str(each) for each in now.changes] == ["learning_rate: 7.0 -> 2e-05"]
    # Another run that begins with a checkpoint from before the change does not have it.
    new = tmp_path / "new"
    assert resume(new, make(), checkpoint=str(tmp_path / "checkpoint-5")) == ([], [])
    assert resume(new, make(), checkpoint=str(tmp_path / "checkpoint-7"))[0][0] == rate


def test_further_calls_of_train_number_their_checkpoints_anew(tmp_path: Path) -> None:
    anew = Change(name=FURTHER_CALL, before="as it was", now="begun anew at step 5", mixed=True)
    write_record(tmp_path, replace(make(), launches=[launch_of(make(), 0, 5), launch_of(make(), 5, 10, anew)]))
    *before, _ = resumed_launches(tmp_path, saved(tmp_path, 5), make(), allow_changes=False, say=print)
    assert [each.to_step for each in before] == [5, 10]
    # A checkpoint says since this version how many steps came before those of its call.
    output: list[str] = []
    for steps_before, step, to_steps in ((5, 3, [5, 8]), (0, 5, [5, 5]), (0, 2, [2, 2])):
        now = {"allow_changes": False, "say": output.append, "steps_before": steps_before}
        *before, _ = resumed_launches(tmp_path, saved(tmp_path, step), make(), **now)
        assert [each.to_step for each in before] == to_steps
    lost = "the call of train that began at step 5 had saved no checkpoint"
    assert output == [f"{lost}: checkpoint-{step} of the call before is resumed" for step in (5, 2)]


def test_a_finished_run_is_not_resumed_unless_it_is_longer_now(tmp_path: Path) -> None:
    write_record(tmp_path, make().finished(Results(steps=7)))
    with pytest.raises(FinishedError, match="the run is finished"):
        resume(tmp_path, make())
    assert resume(tmp_path, make(num_train_epochs=5.0))[0]


def test_a_launch_prints_on_one_line_with_what_it_changed() -> None:
    assert repr(Launch(seconds=1.0, to_step=5)) == "Launch(to 5 in 1.0 s)"
    changed = Launch(seconds=14.0, from_step=20, to_step=30, changes=[Change(name="max_steps", before=20, now=30)])
    assert repr(changed) == "Launch(steps 20 to 30 in 14 s; max_steps 20 -> 30)"
