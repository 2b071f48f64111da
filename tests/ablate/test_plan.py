"""A frozen plan and its snapshot: what was changed after the start is refused."""

import json
import os

import pytest

from lightning_llm.ablate.next_runs import Added
from lightning_llm.ablate.plan import CODE, CONFIGS, PLAN, Plan, digest

SIDE = {"steps": 6, "tokenizer": "t", "config": "0" * 64}
TUNE = {"option": "model.x", "factors": [1, 2, 3], "seeds": 1}
VARIANTS = {"a": {"effect": -0.5}}


def test_a_plan_is_read_back_as_it_was_frozen(experiment):
    plan = experiment(VARIANTS)
    again = Plan.read(plan.out)
    assert again == plan
    assert len(plan.content["hash"]) == 64
    assert again.experiment.variants == {"a": {}}
    assert again.arms.keys() == {"baseline", "baseline-again", "null", "a"}
    assert again.config("baseline-again") == again.config("baseline")
    again.add(Added(2))
    again.add(Added(3, ["a"]))
    assert Plan.read(plan.out).added == [Added(2), Added(3, ["a"])]
    assert Plan.read(plan.out).content["hash"] == plan.content["hash"]


@pytest.mark.parametrize("part", ["plan", "config", "code", "main"])
def test_what_was_changed_after_the_start_is_refused(experiment, part):
    plan = experiment(VARIANTS)
    content = json.loads((plan.out / PLAN).read_text())
    path, text = {
        "plan": (plan.out / PLAN, json.dumps({**content, "alpha": 0.2})),
        "config": (plan.out / CONFIGS / "a.yaml", "effect: -1.0\n"),
        "code": (plan.out / CODE / "lightning_llm" / "__init__.py", "x = 1\n"),
        "main": (plan.out / CODE / "fit.py", "x = 1\n"),
    }[part]
    path.write_text(text)
    with pytest.raises(ValueError, match="was changed after the start: restore it, or begin an experiment in another"):
        Plan.read(plan.out)


def test_a_folder_without_a_plan_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"holds no plan\.json: give the folder of an experiment"):
        Plan.read(tmp_path)


def test_another_experiment_differs_in_words(experiment):
    plan = experiment(VARIANTS)
    asked = {field: plan.content[field] for field in plan.content}
    assert plan.differs(asked) == ""
    assert plan.differs({**asked, "alpha": 0.1}) == "alpha (0.05, now 0.1)"
    assert plan.differs({**asked, "code": "0" * 64}) == "code"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"variants": {}}, "variants is {}, expected at least one by name"),
        ({"looks": []}, "looks is [], expected at most 20 increasing numbers"),
        ({"looks": [2**40]}, "looks is [1099511627776], expected at most 20 increasing numbers"),
        ({"looks": [6, 4]}, "looks is [6, 4], expected"),
        ({"seen": {"x": 3}}, "seen.x is 3, expected a list"),
        ({"seen": {"x": [10**400]}}, "0, expected a whole number from 0 to 9007199254740992"),
        ({"sides": {}}, "sides is {}, expected at least one by name"),
        ({"sides": {"baseline": 1}}, "sides.baseline is 1, expected an object"),
        ({"sides": {"baseline": {"tokenizer": "t", "config": "0" * 64}}}, "sides.baseline.steps is missing"),
        ({"sides": {"baseline": SIDE}}, "sides and variants differ in 'a'"),
        ({"sides": dict.fromkeys(("baseline", "null", "a", "../../x"), SIDE)}, "differ in '../../x'"),
        ({"sides": {"baseline": {**SIDE, "chance": "x"}}}, "sides.baseline.chance is 'x', expected a number"),
        ({"sides": {"baseline": {**SIDE, "parameters": 0}}}, "sides.baseline.parameters is 0, expected a whole"),
        ({"variants": {"../x": {}}}, "must be the name of a folder"),
        ({"variants": {"a": [1]}}, "variants.a is [1], expected options by dotted name"),
        ({"variants": {f"v{n}": {} for n in range(30_000)}}, "ask for 150010 runs, expected at most 100000"),
        ({"variants": {f"v{n}": {} for n in range(501)}}, "has 501 variants, expected at most 500"),
        ({"alpha": 1e308}, "alpha is 1e+308, expected a number above 0 and below 0.5"),
        ({"delta": -1}, "delta is -1, expected a number above 0"),
        ({"first_seed": 2**53}, "first_seed is 9007199254740992, expected a whole number from 0 to 2147483648"),
        ({"match": "x"}, "match is 'x', expected 'tokens' or"),
        ({"asked_configs": {"a": [[]]}}, "asked_configs.a is [[]], expected 64 hex digits"),
        ({"tune": {**TUNE, "seeds": 1001}}, "tune.seeds is 1001, expected a whole number from 1 to 1000"),
        ({"tune": {**TUNE, "factors": [0, 1]}}, "tune.factors is [0, 1], expected at least three increasing"),
        ({"tune": {**TUNE, "factors": [1.02**n for n in range(900)], "seeds": 100}}, "expected at most 100000"),
        ({"tune": TUNE}, "sides.baseline.tuned is no number"),
    ],
)
def test_a_plan_that_somebody_else_wrote_is_one_line(experiment, change, says):
    plan = experiment(VARIANTS)
    content = {key: value for key, value in {**plan.content, **change}.items() if key != "hash"}
    (plan.out / PLAN).write_text(json.dumps({**content, "hash": digest(content)}))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        Plan.read(plan.out)
    assert says in str(error.value)


def test_what_the_code_of_a_plan_may_hold_is_bounded(experiment, monkeypatch):
    plan = experiment(VARIANTS)
    with open(plan.out / CODE / "zeros.py", "wb") as file:
        file.truncate(6 << 30)  # sparse
    monkeypatch.setattr("lightning_llm.ablate.plan.file_hash", lambda path: pytest.fail("it is read"))
    with pytest.raises(ValueError, match=r"the code of the runs has 64\d+ bytes, expected at most 268435456"):
        Plan.read(plan.out)


def test_pairs_are_added_a_bounded_number_of_times(experiment):
    plan = experiment(VARIANTS)
    (plan.out / "added.json").write_text(json.dumps({"added": [{"pairs": 1, "variants": []}] * 201}))
    with pytest.raises(ValueError, match="expected a list of at most 200"):
        _ = plan.added


def test_added_pairs_of_an_unknown_variant_are_refused(experiment):
    plan = experiment(VARIANTS)
    plan.add(Added(2, ["b"]))
    with pytest.raises(ValueError, match=r"added\.json: the plan has no variant b"):
        _ = plan.added


def named_outside(plan):
    content = json.loads((plan.out / PLAN).read_text())
    content["sides"]["../../outside"] = content["sides"]["a"]
    (plan.out.parent / "outside.yaml").write_text((plan.out / CONFIGS / "a.yaml").read_text())
    content["hash"] = digest({name: value for name, value in content.items() if name != "hash"})
    (plan.out / PLAN).write_text(json.dumps(content))


def instead_of(place, put):
    def change(plan):
        (plan.out / place).unlink(missing_ok=True)
        put(plan.out / place)

    return change


def sparse(path):
    path.touch()
    os.truncate(path, 6 << 30)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (named_outside, "sides and variants differ in '../../outside'"),
        (instead_of("configs/a.yaml", os.mkfifo), r"configs/a\.yaml is a FIFO, expected a file"),
        (instead_of("configs/a.yaml", lambda path: path.symlink_to("/dev/zero")), "points outside the folder"),
        (instead_of("configs/a.yaml", sparse), "has 6442450944 bytes, expected at most"),
        (instead_of("code/x.py", os.mkfifo), r"code/x\.py is a FIFO, expected a file"),
        (instead_of("code/x.py", lambda path: path.symlink_to("/dev/zero")), r"code/x\.py is a device"),
        (instead_of("code/x.py", sparse), r"the code of the runs has 64\d+ bytes, expected at most"),
    ],
)
def test_what_is_no_file_of_the_snapshot_is_one_line_at_once(experiment, change, says):
    plan = experiment(VARIANTS)
    change(plan)
    with pytest.raises(ValueError, match=says):
        Plan.read(plan.out)
