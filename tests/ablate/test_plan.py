"""A frozen plan: what is read back, and what is no plan of this version."""

import json

import msgspec
import pytest

from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.next_runs import Extension
from lightning_llm.ablate.plan import CODE, Plan, code_hash, freeze

VARIANTS = {"a": {"effect": -0.5}}


def test_a_plan_is_read_back_as_it_was_frozen(experiment):
    plan = experiment(VARIANTS)
    again = Plan.read(plan.out)
    assert again == plan
    assert len(plan.hash) == 64
    assert again.experiment.variants == {"a": {}}
    assert again.variants.keys() == {"baseline", "baseline-again", "null", "a"}
    assert again.config("baseline-again") == again.config("baseline")
    again.extend(Extension(2))
    again.extend(Extension(3, ("a",)))
    assert Plan.read(plan.out).extensions == [Extension(2), Extension(3, ("a",))]
    assert Plan.read(plan.out).hash == plan.hash


def test_the_hash_is_that_of_all_of_it(experiment):
    plan = experiment(VARIANTS)
    other = Plan(plan.out, msgspec.structs.replace(plan.record, threads=2))
    assert other.hash != plan.hash


def test_a_folder_without_a_plan_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"holds no plan\.json: give the folder of an experiment"):
        Plan.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads": "two"}, r"plan\.json is no file of this program: Expected `int`, got `str` - at `\$\.threads`"),
        ({"variants": {"baseline": 1}}, r"Expected `object`, got `int`"),
        ({"experiment": {}}, "Object missing required field `name`"),
    ],
)
def test_a_plan_with_other_fields_is_one_line(experiment, change, says):
    plan = experiment(VARIANTS)
    content = json.loads((plan.out / PLAN).read_text())
    (plan.out / PLAN).write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=says) as error:
        Plan.read(plan.out)
    assert "\n" not in str(error.value)


def test_a_torn_plan_is_one_line(experiment):
    plan = experiment(VARIANTS)
    (plan.out / PLAN).write_text('{"version": 2, "exper')
    with pytest.raises(ValueError, match=r"plan\.json is no file of this program: Input data was truncated$"):
        Plan.read(plan.out)


@pytest.mark.parametrize("version", [{}, {"version": 1}, {"version": 3}])
def test_a_plan_of_another_version_is_one_line_that_says_what_continues_it(experiment, version):
    plan = experiment(VARIANTS)
    (plan.out / PLAN).write_text(json.dumps({"name": "old", "sides": {}, **version}))
    number = version.get("version", 1)
    says = rf"plan\.json has version {number}, and this lightning-llm reads version 2: its own copy of the code"
    with pytest.raises(ValueError, match=rf"{says} continues it \(python \S+/code/fit\.py ablate run "):
        Plan.read(plan.out)


def test_code_that_is_edited_while_it_is_copied_is_no_snapshot(experiment, tmp_path):
    plan = experiment(VARIANTS)
    path = tmp_path / "own.py"
    path.write_text("x = 1\n")
    record = msgspec.structs.replace(plan.record, code=code_hash({"own.py": path}))
    path.write_text("x = 2\n")
    out = tmp_path / "other"
    out.mkdir()
    with pytest.raises(ValueError, match="the code was edited while it was copied: give the same command again"):
        freeze(out, record, {}, {"own.py": path})
    assert not (out / PLAN).exists()
    assert not (out / CODE).exists()
