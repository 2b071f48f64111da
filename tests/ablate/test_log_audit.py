"""The audit of a log: how it is read, and what is said of it."""

import json

import numpy as np
import pytest

from lightning_llm.ablate import audit

HEAD = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"


@pytest.fixture
def log(tmp_path):
    def write(text, name="results.tsv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def rows(*values, status="keep"):
    return HEAD + "".join(f"c{place}\t{value}\t1.0\t{status}\t\n" for place, value in enumerate(values))


def test_a_log_is_read(log):
    text = (
        HEAD
        + "a1\t1.00\t4.0\tkeep\tbaseline\n"
        + "a2\t0.98\t4.0\tkeep\twider\n"
        + "a3\t0.00\t0.0\tcrash\ttoo wide\n"
        + "a4\t0.99\t4.0\tdiscard\tnew seed\n"
        + "a5\t0.97\t4.0\tkeep\tdeeper\n"
    )
    found = audit(log(text), metric="val_bpb")
    assert (found.tries, found.failed, found.keeps, found.unlike_rule) == (3, 1, 2, 0)
    assert (found.first, found.last, found.first_name, found.last_name) == (1.0, 0.97, "a1", "a5")
    assert found.gain == pytest.approx(0.03)
    assert [(step.name, round(step.gain, 6)) for step in found.steps] == [("a2", 0.02), ("a5", 0.01)]
    assert found.noise is None
    assert found.suspects == ["new seed"]
    said = str(found)
    assert "3 tries give 1.1 on average, and at most 2 in 95% of logs" in said
    assert "one that chance alone may give" in said
    assert "nothing about a single step can be tested. If you know it: --noise SD." in said
    assert "--revisions a1 a5 --pairs 5" in said
    assert "1 description speaks of the seed" in said


def test_the_noise_is_that_of_code_that_ran_again_or_given(log):
    path = log(rows(1.0, 0.9, 0.5).replace("c1\t0.9", "c0\t0.98"))
    found = audit(path, metric="val_bpb")
    assert found.reruns == ["c0"]
    assert found.tries == 1  # the rerun is no try
    assert found.noise.sd == pytest.approx(np.std([1.0, 0.98], ddof=1))
    assert str(found).count("With a standard deviation of") == 3  # and at both ends of its interval
    given = audit(path, metric="val_bpb", noise=0.1)
    assert "Noise, as given: 0.1." in str(given)
    assert given.shown_steps(0.1) == given.steps
    assert given.shown_steps(1.0) == []
    assert "these single steps are shown: c2 (0.5)" in str(given)
    assert "smaller in truth" in str(given)


def test_higher_is_better_with_a_minus(log):
    path = log("trial,accuracy,status\n1,0.80,keep\n2,0.85,keep\n3,0.83,discard\n", "log.csv")
    found = audit(path, metric="-accuracy")
    assert (found.first, found.last, found.keeps) == (0.80, 0.85, 1)
    assert found.gain == pytest.approx(0.05)
    assert "accuracy, higher is better" in str(found)
    assert audit(path).last == 0.80  # lower is better unless it is said


def test_without_a_status_the_best_is_kept(log):
    found = audit(log("run,loss\n1,3.0\n2,3.1\n3,2.9\n5,2.8\n", "log.csv"))
    assert (found.keeps, found.unlike_rule, found.missing) == (2, 0, 1)
    assert "does not say what was kept" in str(found)
    assert "1 number is missing" in str(found)
    assert "--revisions FIRST LAST" in str(found)


def test_more_keeps_than_chance_are_said(log):
    found = audit(log(rows(*np.linspace(2, 1, 12))), metric="val_bpb")
    assert found.keeps == 11
    assert "chance alone does not explain the log (p below 0.0001); which keeps are true, the log does not say" in str(
        found
    )
    assert "beside 5" in str(found)


def test_keeps_of_another_rule_are_said(log):
    text = rows(1.0, 1.1) + "c2\t0.9\t1\tdiscard\t\n"
    assert "2 tries were decided otherwise" in str(audit(log(text), metric="val_bpb"))


def test_json_lines_and_numbers(log):
    lines = [{"commit": "a", "loss": 2.0, "status": "keep"}, {"commit": "b", "loss": None, "status": "crash"}]
    lines.append({"commit": "c", "loss": 1.9, "status": "keep"})
    found = audit(log("\n".join(map(json.dumps, lines)), "log.jsonl"))
    assert (found.tries, found.failed) == (1, 1)
    assert json.loads(json.dumps(found.to_dict()))["chance_keeps"]["mean"] == pytest.approx(0.5)


def test_names_of_a_log_do_no_harm(log):
    said = str(audit(log("commit,loss\na;rm -rf /,2\n\x1b[31mred,1\n", "log.csv")))
    assert "\x1b" not in said
    assert "'a;rm -rf /'" in said
    assert "FIRST LAST" in str(audit(log("commit,loss\n--exec,2\nb,1\n", "log.csv")))


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (rows(1.0, 0.9), {}, "has several columns with numbers: give metric (--metric) as one of val_bpb, memory_gb"),
        (rows(1.0, 0.9), {"metric": "loss"}, "metric (--metric) must be one of val_bpb, memory_gb"),
        ("commit\tstatus\na\tkeep\n", {}, "has no column with a metric: its columns are commit, status"),
        (rows(1.0), {"metric": "val_bpb"}, "has one run with a value in 'val_bpb': an audit needs two or more"),
        (rows(0.0, "nan"), {"metric": "val_bpb"}, "has no run with a value"),
        (rows("x", 1), {"metric": "val_bpb"}, "line 2, column 'val_bpb': 'x' is not a number"),
        (rows(1, 2), {"metric": "val_bpb", "noise": 0.0}, "noise (--noise) must be above 0, got 0.0"),
        (rows(1, 2), {"metric": "val_bpb", "noise": float("nan")}, "noise (--noise) must be above 0"),
        (rows(1, 2).replace("c1", "c0"), {"metric": "val_bpb"}, "runs of one code alone ('c0')"),
        ("", {}, "is empty"),
    ],
)
def test_wrong_logs_are_one_line(log, text, options, problem):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as found:
        audit(log(text), **options)
    assert problem in str(found.value)
