"""Runs become arms, arms are paired with the baseline by seed; what can't be compared is refused, and named."""

import shutil
from pathlib import Path

import pytest
from test_sections import say

from made_up_runs import PROTOCOL, change, evaluate, make_run
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.config.jepa import JepaConfig
from stepjepa.store.fingerprint import model_fingerprint
from stepjepa.study.comparison import compare
from stepjepa.study.run_report import report

LLM = {"mode": "llm-jepa", "lbd": 0.5}


def test_three_seeds_by_hand(runs):
    result = compare(runs)
    assert [arm.name for arm in result.arms] == ["regular", "llm-jepa"]
    regular, jepa = result.arms
    assert result.baseline is regular
    assert [run.seed for run in jepa.runs] == ["23", "37", "82"]
    assert regular.spread("headline") == (3, pytest.approx(2 / 8), pytest.approx(1 / 8))
    assert jepa.spread("headline") == (3, pytest.approx(4 / 8), 0)
    assert (jepa.spread("tokens").mean, jepa.spread("gold_loss").mean) == (1500, 0.5)
    difference = result.differences["llm-jepa"]
    # Differences 2, 1, 3 eighths: mean 2, std 1, t = 2 sqrt 3.
    test = difference.measures["headline"]
    assert (test.mean, test.std, test.t) == (pytest.approx(2 / 8), pytest.approx(1 / 8), pytest.approx(12**0.5))
    assert difference.holm == test.p_greater == pytest.approx(0.0371, abs=1e-4)
    assert difference.seeds == ("23", "37", "82")
    assert difference.token_ratio == pytest.approx(1.5)
    assert {seed: each[:2] for seed, each in difference.by_seed.items()} == {"23": (2, 0), "37": (1, 0), "82": (3, 0)}
    # Net over seeds, example by example: 0 1 1+1 1+1 0 1 0 0; all gains, so one of 2^4 assignments is as far out.
    assert difference.by_example == (6, 0, pytest.approx(1 / 16), pytest.approx(1 / 8))
    assert difference.by_example_holm == pytest.approx(1 / 16)
    assert result.notes[0] == "optimizer steps: regular 10; llm-jepa 10"
    assert not any("skipped" in note for note in result.notes)


def test_two_tails_and_two_arms_are_corrected(runs, tmp_path):
    for seed, right in {23: "11010000", 37: "11100010", 82: "11000000"}.items():
        runs.append(make_run(tmp_path / f"step-{seed}", right, seed=seed, jepa={"mode": "step-jepa"}))
    for tails, name in (("one", "p_greater"), ("two", "p_two_sided")):
        result = compare(runs, tails=tails)
        llm, step = result.differences.values()
        # Every seed of step-jepa has one more than its baseline: no variance, no p, but still a second arm tested.
        assert step.measures["headline"].t is None
        assert (llm.holm, step.holm) == (pytest.approx(2 * getattr(llm.measures["headline"], name)), None)
        p_values = [getattr(each.by_example, name) for each in (llm, step)]
        assert p_values[0] < p_values[1]
        assert [llm.by_example_holm, step.by_example_holm] == pytest.approx(
            [min(1, 2 * p_values[0]), min(1, max(2 * p_values[0], p_values[1]))]
        )


def test_seeds_without_a_partner_are_shown_and_left_out(runs, tmp_path):
    runs.append(make_run(tmp_path / "jepa-4", "11111111", seed=4, jepa=LLM))
    runs.append(make_run(tmp_path / "regular-9", "00000000", seed=9))
    result, before = compare(runs), compare(runs[:-2])
    assert result.differences == before.differences
    assert [run.seed for run in result.arms[1].runs] == ["4", "23", "37", "82"]
    assert result.arms[1].spread("headline").mean == pytest.approx((4 * 3 + 8) / 8 / 4)
    assert "llm-jepa and regular don't both have the seeds 4, 9; skipped in the differences" in result.notes


def test_does_the_gain_come_from_stopping(tmp_path):
    regular = make_run(tmp_path / "a", "1000", lenient="1110", stopped="1001")
    jepa = make_run(tmp_path / "b", "1111", lenient="1111", stopped="1111", jepa=LLM)
    result = compare([regular, jepa]).differences["llm-jepa"]
    means = {name: test.mean for name, test in result.measures.items()}
    assert means == {"headline": 0.75, "lenient": 0.25, "stopped": 0.5}
    # Of three examples gained, the baseline had two but ran on.
    assert (result.by_example.gained, result.gained_lenient_before) == (3, 2)


def test_what_is_not_known_is_none(tmp_path):
    folders = [make_run(tmp_path / "a", "1100"), make_run(tmp_path / "b", "1110", jepa=LLM)]
    say(folders[0], stopped=None, scores=[{"exact": exact, "prefix": 2 * exact} for exact in (0.5, 0.5, 0, 0)])
    summary = folders[0] / "test.summary.json"
    change(summary, "scores", "exact", "mean", to=0.25)
    change(summary, "gold_loss", to=float("nan"))
    result = compare(folders)
    difference = result.differences["llm-jepa"]
    assert difference.measures["stopped"] is difference.by_example is difference.gained_lenient_before is None
    assert result.arms[0].spread("stopped") is result.arms[0].spread("gold_loss") is None
    assert difference.measures["headline"].mean == pytest.approx(0.5)


def test_compute_is_compared_by_seed(tmp_path):
    """By hand: twice and once the baseline's compute, so one and a half; 2 % is equal, 3 % is not."""
    for seed, flops in {3: 5e12, 5: 7e12}.items():
        make_run(tmp_path / f"r{seed}", "1100", seed=seed, flops=flops)
        make_run(tmp_path / f"a{seed}", "1110", seed=seed, flops=10e12 if seed == 3 else 7e12, jepa=LLM)
        for name, ratio, k in (("b", 1.019, 2), ("c", 0.97, 3)):
            jepa = {**LLM, "predictors": k}
            make_run(tmp_path / f"{name}{seed}", "1110", seed=seed, flops=ratio * flops, jepa=jepa, steps=11)
    folders = {name: [tmp_path / f"{name}{seed}" for seed in (3, 5)] for name in "rabc"}
    result = compare([folder for pair in folders.values() for folder in pair])
    differences = list(result.differences.values())
    assert [each.flops_ratio for each in differences] == pytest.approx([1.5, 1.019, 0.97])
    assert [each.equal for each in differences] == [("steps",), ("FLOPs",), ()]
    steps = "regular 10; llm-jepa K=1 10; llm-jepa K=2 11; llm-jepa K=3 11"
    assert result.notes[0] == f"optimizer steps: {steps}"
    assert not any("nothing here is comparable" in note for note in result.notes)
    without = compare([folder for name in "rac" for folder in folders[name]]).notes
    remedy = "nothing here is comparable at equal FLOPs (within 2% of regular); add runs trained with `same_flop`"
    assert any(note.startswith(remedy) for note in without)
    assert all(each.token_ratio == 1 for each in differences)
    change(folders["b"][0] / "run.json", "results", "tokens", to=None)
    # One run that does not know them, and the arm has none. Nothing is made of tokens instead.
    change(folders["b"][1] / "run.json", "results", "flops", to=None)
    result = compare([*folders["r"], *folders["b"]])
    assert result.differences["llm-jepa"].flops_ratio is None and result.differences["llm-jepa"].equal == ()
    assert result.differences["llm-jepa"].token_ratio is None


def test_one_folder_is_no_list_of_letters(tmp_path):
    """A folder alone is that of a sweep, mostly; here of one run, which has nothing to be compared with."""
    folder = make_run(tmp_path / "a", "1100")
    for given in (folder, str(folder), [folder]):
        with pytest.raises(UserError, match="the runs differ in nothing but their seeds"):
            compare(given)


def test_runs_may_come_from_a_generator_and_others_are_named(runs):
    """A generator had no length; what is no run had no folder."""
    assert compare(run for run in runs).verdict == compare(runs).verdict
    assert repr(compare(runs).arms) == "(Arm('regular', 3 runs), Arm('llm-jepa', 3 runs))"
    for wrong, got in [(None, "None"), ([3], "int"), ([runs[0], {}], "dict")]:
        with pytest.raises(TypeError, match=f"^runs: expected run folders, or runs of stepjepa.run, got {got}$"):
            compare(wrong)
    with pytest.raises(ValueError, match="expected run folders to compare, got none"):
        compare(run for run in [])


def test_doubtful_runs_are_named(runs):
    loaded = {"dtype": "float32", "chat_template": "{% for %}\n" * 20, "attn_implementation": None}
    change(runs[1] / "run.json", "loaded", to=loaded)
    change(runs[3] / "run.json", "loaded", to={**loaded, "dtype": "bfloat16", "chat_template": "x"})
    change(runs[1] / "run.json", "versions", "stepjepa", to="0.2.0")
    change(runs[4] / "test.summary.json", "trained_on", to={"exact": 0.25, "normalised": 0.5})
    change(runs[2] / "test.summary.json", "settings", "model", to=model_fingerprint(runs[0]))
    # What is in the folder is asked, unless its weights have been removed to save space.
    with pytest.raises(UserError, match="is of another model than the one in the folder") as caught:
        compare(runs)
    assert str(caught.value).startswith(f"{runs[2] / 'test.summary.json'}: ")
    (runs[2] / "model.safetensors").unlink()
    notes = compare(runs).notes
    # Where they ran makes no difference, and older runs don't say how they were loaded.
    assert [note for note in notes if note.startswith("the runs differ in ")] == [
        "the runs differ in version of stepjepa: 0.1.0; 0.2.0",
        "the runs differ in dtype: bfloat16; float32",
        "the runs differ in chat_template: x; {% for %} {% for %} {% for %} {% for %} {% for %} {% for %} ",
    ]
    share = "25.0% of the test prompts were trained on (50.0% but for case and blanks)"
    assert f"{runs[4]}: {share}; what is right there may be learnt by heart" in notes
    for run in runs:
        change(run / "test.summary.json", "trained_on", to={"exact": 0.25, "normalised": 0.5})
    assert [note for note in compare(runs).notes if "trained on" in note] == [
        f"every run: {share}; what is right there may be learnt by heart"
    ]


NAMES = [
    (
        [{"mode": "llm-jepa", "predictors": 1, "lbd": 0.5}, {"mode": "step-jepa", "lbd": 2.0}, {"mode": "regular"}],
        ["llm-jepa separate K=1 lbd=0.5", "step-jepa branched K=2 lbd=2", "regular"],
    ),
    (
        [{"mode": "step-jepa", "step_separator": "\n"}, {"mode": "step-jepa", "step_separator": "line"}],
        ['step-jepa step_separator="\\n"', "step-jepa step_separator=line"],
    ),
]


@pytest.mark.parametrize(("configs", "names"), NAMES, ids=[" | ".join(names) for _, names in NAMES])
def test_arms_are_named_by_what_differs(configs, names, tmp_path):
    folders = [make_run(tmp_path / str(place), "10", jepa=config) for place, config in enumerate(configs)]
    result = compare(folders, baseline=names[0])
    assert [arm.name for arm in result.arms] == names


def test_arms_of_an_older_version_that_lack_a_setting_have_names_of_their_own(tmp_path):
    folders = [make_run(tmp_path / name, "10", training={} if name == "a" else {"newer": 1}) for name in "ab"]
    assert [arm.name for arm in compare(folders, baseline="regular (2)").arms] == ["regular (2)", "regular (1)"]


def test_other_settings_make_arms_too(tmp_path):
    adapter = {"rank": 16, "alpha": None, "dropout": 0.0}
    folders = [
        make_run(tmp_path / "a", "10"),
        make_run(tmp_path / "b", "10", training={"learning_rate": 1e-3}),
        make_run(tmp_path / "c", "10", lora=adapter),
        make_run(tmp_path / "d", "10", seed=2, lora={**adapter, "alpha": 32}),
        make_run(tmp_path / "e", "10", lora={**adapter, "rank": 8, "alpha": 32}),
        make_run(tmp_path / "f", "10", model="/models/other", order={"records_per_micro_step": 8}),
        make_run(tmp_path / "g", "10", loaded={"pretrain": True, "train_tokenizer": 500, "quantized": None}),
        make_run(tmp_path / "h", "10", seed=2, loaded={"pretrain": False, "train_tokenizer": None, "dtype": "float32"}),
    ]
    result = compare(folders, baseline="regular model=preset:tiny learning_rate=2e-05 batch_size=4")
    assert {arm.name: [run.folder.name for run in arm.runs] for arm in result.arms} == {
        "regular model=preset:tiny learning_rate=2e-05 batch_size=4": ["a", "h"],
        "regular model=preset:tiny learning_rate=0.001 batch_size=4": ["b"],
        # An alpha left out is twice the rank.
        "regular lora lora_rank=16 model=preset:tiny learning_rate=2e-05 batch_size=4": ["c", "d"],
        "regular lora lora_rank=8 model=preset:tiny learning_rate=2e-05 batch_size=4": ["e"],
        "regular model=other learning_rate=2e-05 batch_size=8": ["f"],
        "regular model=preset:tiny pretrain train_tokenizer=500 learning_rate=2e-05 batch_size=4": ["g"],
    }


def test_what_leaves_the_weights_alone_makes_no_arm(tmp_path):
    quiet = {"logging_steps": 99, "save_strategy": "epoch", "report_to": ["tensorboard"], "eval_steps": 3}
    idle = {"mode": "regular", "lbd": 0.7, "infonce_temperature": 0.5, "step_separator": "line"}
    older = {name: value for name, value in JepaConfig(mode="regular").to_dict().items() if name != "gamma"}
    folders = [
        make_run(tmp_path / "a", "10"),
        make_run(tmp_path / "b", "10", seed=2, training=quiet),
        make_run(tmp_path / "c", "10", seed=3, jepa=idle),
        make_run(tmp_path / "d", "10", seed=4),
        make_run(tmp_path / "e", "10", jepa=LLM),
    ]
    change(folders[3] / "run.json", "jepa", to=older)
    assert [len(arm.runs) for arm in compare(folders).arms] == [4, 1]
    # Of two lengths the number of steps decides.
    counted = [
        make_run(tmp_path / f"s{n}", "10", training={"max_steps": 5, "num_train_epochs": n}, seed=n) for n in (1, 2)
    ]
    assert [len(arm.runs) for arm in compare([*counted, folders[4]]).arms] == [2, 1]
    # Of equal compute neither: it follows from the epochs of the regular run.
    spent = {"steps": 7, "checkpoints": [7], "flops": 1.0, "regular_flops": 1.0}
    for n in (1, 2):
        training = {"max_steps": 6 + n}
        counted.append(
            make_run(tmp_path / f"f{n}", "10", training=training, seed=n, same_flop={**spent, "steps": 6 + n})
        )
    arms = compare([*counted, folders[4]], baseline="llm-jepa max_steps=-1").arms
    assert [len(arm.runs) for arm in arms] == [1, 2, 2]
    # But a checkpoint is chosen by what is evaluated when.
    best = {"load_best_model_at_end": True, "eval_steps": 3}
    more = [make_run(tmp_path / str(n), "10", training={**best, "eval_steps": n}, seed=n) for n in (1, 2)]
    assert len(compare([*folders, *more], baseline="llm-jepa").arms) == 4


def test_seeds_of_order_and_weights(tmp_path):
    both = {"data_seed": 7}
    folders = [make_run(tmp_path / f"{n}", "10", seed=n, training={"data_seed": n}) for n in (3, 10)]
    folders += [make_run(tmp_path / f"b{n}", "10", seed=n, training=both, jepa=LLM) for n in (3, 10)]
    result = compare(folders)
    assert [[run.seed for run in arm.runs] for arm in result.arms] == [["3", "10"], ["3/7", "10/7"]]
    assert result.differences["llm-jepa"].seeds == ()


def test_the_baseline(runs, tmp_path):
    result = compare(runs, baseline="llm-jepa")
    assert [arm.name for arm in result.arms] == ["llm-jepa", "regular"]
    assert result.differences["regular"].measures["headline"].mean == pytest.approx(-2 / 8)
    with pytest.raises(UserError, match="`baseline`: no arm 'regulr'; choose one of regular; llm-jepa"):
        compare(runs, baseline="regulr")
    with pytest.raises(UserError, match=r"differ in nothing but their seeds"):
        compare(runs[:3])
    again = make_run(tmp_path / "again", "1" * 8, seed=23)
    with pytest.raises(UserError, match=rf"again: is of the same arm and seed \(23\) as {runs[0]}; leave one out, or"):
        compare([*runs, again])
    quick = make_run(tmp_path / "quick", "1" * 8, training={"learning_rate": 1e-3})
    with pytest.raises(UserError, match=r"2 arms are regular.*one of regular learning_rate=2e-05; "):
        compare([*runs, quick])


def test_one_run_twice_is_compared_by_folder_and_weights(tmp_path):
    shell, python = (make_run(tmp_path / name, right, jepa=LLM) for name, right in (("shell", "110"), ("py", "100")))
    result = compare([shell, python])
    assert [arm.name for arm in result.arms] == ["shell", "py"]
    assert result.differences["py"].by_example[:2] == (0, 1)
    assert result.verdict == (
        "these are one run, trained 2 times with the same settings, seed and data; its trained weights differ; "
        "py is right on 0 where shell is wrong, and wrong on 1 where that is right"
    )
    assert not any("FLOPs" in note for note in result.notes)
    assert result.verdict in " ".join(str(result).split())
    assert compare([shell, python], baseline="py").baseline.name == "py"
    third = make_run(tmp_path / "third", "111", jepa=LLM)
    for folder in (shell, python, third):
        (folder / "model.safetensors").write_text("weights")
        evaluate(folder, "110")
    assert "trained 3 times" in compare([shell, python, third]).verdict
    assert compare([shell, python, third]).verdict.endswith(
        "its trained weights are equal bit for bit; py is right on the same examples as shell; "
        "third is right on the same examples as shell"
    )
    (third / "model.safetensors").unlink()
    assert "weights are not in every folder, so they are not compared; " in compare([shell, python, third]).verdict
    other = make_run(tmp_path / "other", "110", jepa=LLM, seed=2)
    with pytest.raises(UserError, match=r"py: is of the same arm and seed \(1\) as .*shell; leave one out, or compare"):
        compare([shell, python, other])


def test_arms_of_a_sweep_that_were_loaded_differently_are_told_apart(tmp_path):
    """How a model is loaded is no setting of an arm: the runs had the same arm and seed, or were taken for one run."""
    loaded = {"pretrain": False, "train_tokenizer": None}
    rights = {
        "regular": ("1000", "1100"),
        "jepa_dtype-float32": ("1100", "1110"),
        "jepa_dtype-bfloat16": ("1000", "1111"),
    }
    trials = []
    for label, each in rights.items():
        dtype, jepa = label.rpartition("-")[2] if "-" in label else "float32", None if label == "regular" else LLM
        for seed, right in enumerate(each, start=1):
            make_run(tmp_path / label / f"seed{seed}", right, seed=seed, jepa=jepa, loaded={**loaded, "dtype": dtype})
            trials.append({"name": f"{label}/seed{seed}", "arm": label.partition("_")[0], "label": label})
    write_json(tmp_path / "sweep.json", {"grid": {"baseline": "regular"}, "trials": trials})
    result = compare(tmp_path)
    assert [(arm.name, [run.seed for run in arm.runs]) for arm in result.arms] == [
        (name, ["1", "2"]) for name in rights
    ]
    assert [each.measures["headline"].mean for each in result.differences.values()] == [0.25, 0.25]
    assert "the runs differ in dtype: bfloat16; float32" in result.notes
    # One seed of each, and none in common: they are two arms still.
    write_json(tmp_path / "sweep.json", {"grid": {"baseline": "regular"}, "trials": trials[2::2]})
    assert compare(tmp_path, baseline="jepa_dtype-float32").one_run is None
    write_json(tmp_path / "sweep.json", {"grid": {"baseline": "regular"}, "trials": [trials[2], trials[5]]})
    assert compare(tmp_path, baseline="jepa_dtype-float32").differences["jepa_dtype-bfloat16"].seeds == ()
    # One that is kept out is named by its own arm.
    launch = {"from_step": 3, "to_step": 10, "changes": [{"name": "learning_rate", "mixed": True}]}
    change(tmp_path / trials[3]["name"] / "run.json", "launches", to=[launch])
    write_json(tmp_path / "sweep.json", {"grid": {"baseline": "regular"}, "trials": trials})
    assert [each.arm for each in compare(tmp_path).kept_out] == ["jepa_dtype-float32"]
    # Outside of a sweep they have no names; it is said in what they are not the same.
    first, second = (tmp_path / trials[place]["name"] for place in (2, 4))
    same = "trained 2 times with the same settings, seed and data, but another `dtype`; its trained weights differ; "
    assert same in compare([first, second]).verdict


def test_of_several_evaluations_of_a_trial_that_of_its_sweep_is_read(runs, tmp_path):
    trials = []
    for arm, folder in zip(("regular", "jepa"), (runs[0], runs[-1]), strict=True):
        trials.append({"name": f"{arm}/seed1", "label": arm, "arm": arm})
        shutil.copytree(folder, tmp_path / "sweep" / arm / "seed1")
        evaluate(tmp_path / "sweep" / arm / "seed1", "10000001", name="long")
    write_json(tmp_path / "sweep" / "sweep.json", {"grid": {"baseline": "regular"}, "trials": trials})
    assert compare(tmp_path / "sweep").test["evaluation"] == "test"
    assert compare(tmp_path / "sweep", evaluation="long").test["evaluation"] == "long"
    # A sweep of which one arm is finished is no comparison yet.
    change(tmp_path / "sweep" / "jepa" / "seed1" / "run.json", "status", to="running")
    with pytest.raises(UserError, match=r"differ in nothing but their seeds.*: 1 of 2 trials is not finished"):
        compare(tmp_path / "sweep")


def test_one_of_several_evaluations_is_chosen(runs):
    for folder in runs:
        evaluate(folder, "10000001", name="long.v2")
    with pytest.raises(
        UserError, match=r"holds several evaluations \(there is long.v2, test\); pass `evaluation NAME`"
    ):
        compare(runs)
    for name in ("long.v2", "long.v2.jsonl", "long.v2.summary.json"):
        assert compare(runs, evaluation=name).arms[1].spread("headline").mean == 0.25
    assert compare(runs, evaluation="test").differences["llm-jepa"].by_example.gained == 6
    rows = report(runs, evaluation="long.v2")
    assert [row["accuracy"] for row in rows] == [0.25] * len(runs)
    with pytest.raises(UserError, match=r"no finished evaluation 'other' \(there is long.v2, test\)"):
        compare(runs, evaluation="other")


DIFFERENT = [
    ("run.json", ("data", "train", "sha256"), "e" * 64, r"training data \(sha256\) is e+\.\.\. instead of d"),
    ("run.json", ("data", "train", "split_seed"), 2, "split seed is 2 instead of unknown"),
    ("test.summary.json", ("test_fingerprint",), "0" * 64, r"test file \(sha256\) is 0+\.\.\. instead of f"),
    ("test.summary.json", ("settings", "max_new_tokens"), 32, "max new tokens is 32 instead of 16"),
    (
        "test.summary.json",
        ("settings", "prompt"),
        {"system": "x", "plain": False},
        r"prompt: system is x instead of Add\.;",
    ),
    (
        "test.summary.json",
        ("settings", "task_options"),
        {"time_limit": 5},
        "task options: time_limit is 5 instead of unknown",
    ),
    ("test.summary.json", ("settings",), {"missing": "wrong"}, "task options is unknown instead of {}"),
]


@pytest.mark.parametrize(("file", "path", "value", "words"), DIFFERENT, ids=[words for *_, words in DIFFERENT])
def test_what_is_different_is_refused_and_named(file, path, value, words, runs):
    change(runs[4] / file, *path, to=value)
    with pytest.raises(UserError, match=words) as caught:
        compare(runs)
    assert str(caught.value).startswith(f"{runs[4]}: can't be compared with {runs[0]}: ")


def test_long_values_are_cut_where_they_differ(runs):
    rules = "Answer in one word, and name no source. " * 5
    for run, end in zip(runs, ("Be brief.", "Be kind."), strict=False):
        change(run / "test.summary.json", "settings", "prompt", to={"system": f"{rules}{end} Thanks.", "plain": False})
    words = r"prompt: system is \.\.\. name no source\. Be kind\. Thanks\. instead of \.\.\. name no source\. Be brief"
    with pytest.raises(UserError, match=words):
        compare(runs[:2])


def test_records_that_a_task_leaves_out(runs):
    before = compare(runs)
    for folder in runs:
        say(folder, index=[0, 2, 3, 4, 5, 6, 8, 9])
    assert compare(runs).differences == before.differences
    say(runs[5], index=[0, 2, 3, 4, 5, 7, 8, 9])
    with pytest.raises(UserError, match="it was evaluated on other examples") as caught:
        compare(runs)
    assert str(caught.value).startswith(f"{runs[5]}: can't be compared with {runs[0]}")


def test_what_may_differ_between_evaluations(runs):
    for name, value in {"similarity": "llm-jepa", "batch_size": 3, "seed": 5, "base_model": "other"}.items():
        assert PROTOCOL[name] is None
        change(runs[4] / "test.summary.json", "settings", name, to=value)
    assert compare(runs).differences


BROKEN = [
    ("run.json", None, "is no run folder"),
    ("run.json", '{"status": "running"}', r"the run is not finished \(status 'running'\)"),
    ("run.json", '{"status": "finished"}', r"run.json: 'results' is missing, expected an object; restore"),
    ("test.jsonl", None, "test.jsonl: no such file of answers"),
    ("test.jsonl", '{"index": 0}\n', "has 1 line for the 8 examples of test.summary.json"),
]


@pytest.mark.parametrize(("file", "content", "words"), BROKEN, ids=[f"{file} {words}" for file, _, words in BROKEN])
def test_broken_folders_are_refused(file, content, words, runs):
    broken: Path = runs[1] / file
    broken.unlink() if content is None else broken.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        compare(runs)
    assert str(runs[1]) in str(caught.value)


def test_a_table_has_answers_that_were_made_alike(runs):
    for folder, value in zip(runs, (None, 16, 32), strict=False):
        change(folder / "run.json", "data", "train", "sha256", to=folder.name)
        change(folder / "test.summary.json", "settings", "max_new_tokens", to=value)
    # Of another program's answers it is not known; what they were trained on does not matter.
    assert [row["accuracy"] for row in report(runs[:2])] == [0.25, 0.375]
    with pytest.raises(UserError, match="max new tokens is 32 instead of 16"):
        report(runs[:3])


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="runs: expected run folders to compare, got none"):
        compare([])
