"""The audit of a log: how it is read, and what is said of it."""

import json
import math

import numpy as np
import pytest
from scipy import stats

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
    assert "So chance alone may give this number of keeps." in said
    assert "nothing about a single step can be tested. If you know it: --noise SD." in said
    assert "--read 'val_bpb: {number}' --metric val_bpb --revisions a1 a5 --pairs 5 --first-seed 1000" in said
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
    assert given.at_noise(0.1).shown == given.steps
    assert given.at_noise(1.0).shown == []
    assert "these single steps are shown: c2 (0.5)" in str(given)
    assert "looks larger than it is, on average" in str(given)
    assert "looks larger" not in str(audit(path, metric="val_bpb", noise=1.0))  # no step is shown


def test_higher_is_better_with_a_minus(log):
    path = log("trial,accuracy,status\n1,0.80,keep\n2,0.85,keep\n3,0.83,discard\n", "log.csv")
    found = audit(path, metric="-accuracy")
    assert (found.first, found.last, found.keeps) == (0.80, 0.85, 1)
    assert found.gain == pytest.approx(0.05)
    assert "accuracy, higher is better" in str(found)
    assert "--metric -accuracy --revisions FIRST LAST" in str(found)
    assert audit(path).last == 0.80  # lower is better unless it is said


def test_without_a_status_the_best_is_kept(log):
    found = audit(log("run,loss\n1,3.0\n2,3.1\n3,2.9\n5,2.8\n", "log.csv"))
    assert (found.keeps, found.unlike_rule, found.missing) == (2, 0, 1)
    assert "does not say what was kept" in str(found)
    assert "1 number of a run is missing" in str(found)
    assert "--revisions FIRST LAST" in str(found)


def test_more_keeps_than_chance_are_said(log):
    found = audit(log(rows(*np.linspace(2, 1, 12))), metric="val_bpb")
    assert found.keeps == 11
    said = str(found)
    assert "chance alone does not explain the keeps (p below 0.0001); which ones are true, the log does not say" in said
    assert "at most 4 with 2 true gains, 5 with 5, 1 with 10." in said


def test_a_log_of_another_rule_is_judged_with_a_reservation(log):
    text = rows(*np.linspace(2, 1, 12)) + "x\t0.9\t1\tdiscard\t\n"
    said = str(audit(log(text), metric="val_bpb"))
    assert "If every try is there and followed that rule, chance alone does not explain the keeps" in said
    missing = "run,loss\n" + "".join(f"{place + (place > 3)},{2 - place / 20}\n" for place in range(12))
    assert "If every try is there" in str(audit(log(missing, "log.csv")))


def test_keeps_of_another_rule_are_said(log):
    text = rows(1.0, 1.1) + "c2\t0.9\t1\tdiscard\t\n"
    assert "2 tries were decided otherwise" in str(audit(log(text), metric="val_bpb"))


def test_json_lines_and_numbers(log):
    lines = [{"commit": "a", "loss": 2.0, "status": "keep"}, {"commit": "b", "loss": None, "status": "crash"}]
    lines.append({"commit": "c", "loss": 1.9, "status": "keep"})
    found = audit(log("\n".join(map(json.dumps, lines)), "log.jsonl"), noise=0.05)
    assert (found.tries, found.failed) == (1, 1)
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["chance_keeps"]["mean"] == pytest.approx(0.5)
    assert numbers["revisions"] == ["a", "c"]
    (level,) = numbers["at_noise"]
    assert level["sd"] == 0.05
    assert level["p_of_gain"] == pytest.approx(stats.norm.sf(2**0.5))  # of one try: the difference of two runs
    assert level["p_of_steps"] == pytest.approx([stats.norm.sf(2**0.5)])
    assert level["remaining_gain"] == pytest.approx(0.1 - 0.05 / math.sqrt(math.pi))
    assert level["shown_from"] == pytest.approx(0.05 * math.sqrt(2) * stats.norm.isf(0.05))
    assert level["shown"] == []


def test_what_names_no_code_is_no_rerun(log):
    text = HEAD + "a\t1.0\t1\tkeep\t\n" + "-\t1.1\t1\tdiscard\tx\n-\t1.2\t1\tdiscard\ty\n"
    found = audit(log(text + "0000000\t1.3\t1\tdiscard\t\n0000000\t1.4\t1\tdiscard\t\n"), metric="val_bpb")
    assert (found.tries, found.reruns, found.noise) == (4, [], None)
    without_code = audit(log("seed,loss\n0,2.0\n0,1.9\n", "log.csv"))
    assert (without_code.tries, without_code.last_name) == (1, "run 0")


def test_reruns_that_are_alike_show_no_noise(log):
    path = log(rows(1.0, 1.0, 0.9).replace("c1", "c0"))
    found = audit(path, metric="val_bpb")
    assert (found.reruns, found.noise) == (["c0"], None)
    assert "All runs of c0 have the same value, perhaps with the same seed" in str(found)
    assert "No code ran twice" not in str(found)


def test_rows_of_a_code_with_other_descriptions_are_in_doubt(log):
    text = HEAD + "a\t1.0\t1\tkeep\tbaseline\na\t0.98\t1\tdiscard\twider\nb\t0.9\t1\tkeep\tdeeper\n"
    found = audit(log(text), metric="val_bpb")
    assert found.unlike_reruns == ["a"]
    assert "The rows of a have different descriptions" in str(found)
    same = audit(log(text.replace("wider", "baseline")), metric="val_bpb")
    assert same.noise == found.noise
    assert "different descriptions" not in str(same)


def test_statuses_that_are_not_known_are_said(log):
    text = rows(1.0, 0.9) + "c2\t0.8\t1\tTentative\t\nc3\t0.00\t1\tdiscard\t\n"
    found = audit(log(text), metric="val_bpb")
    assert (found.keeps, found.failed, found.zeros, found.other_statuses) == (1, 1, 1, ["tentative"])
    assert "These statuses count as not kept: tentative." in str(found)
    assert "1 value is 0 without the status of a failure, and counted as one." in str(found)
    crashed = audit(log(text.replace("discard", "crash")), metric="val_bpb")
    assert (crashed.failed, crashed.zeros) == (1, 0)


@pytest.mark.parametrize(
    "text", ["random_seed 43", "SEED=7", "reseeded", "eval_tokens / 2", "longer evaluation", "val set"]
)
def test_a_changed_seed_or_evaluation_is_suspect(log, text):
    assert audit(log(rows(1.0, 0.9) + f"x\t0.8\t1\tkeep\t{text}\n"), metric="val_bpb").suspects == [text]


@pytest.mark.parametrize(
    "text", ["value embeddings", "medieval text", "symmetric init", "val_bpb improved", "parametrics"]
)
def test_other_words_are_not(log, text):
    assert audit(log(rows(1.0, 0.9) + f"x\t0.8\t1\tkeep\t{text}\n"), metric="val_bpb").suspects == []


def test_names_of_groups_are_no_revisions(log):
    found = audit(log("group,loss\nwide,2.0\ndeep,1.9\n", "log.csv"))
    assert found.revisions is None
    assert "wide and deep" in str(found)
    assert "--revisions FIRST LAST" in str(found)


def test_without_a_keep_there_is_no_gain(log):
    text = rows(1.0) + "c1\t1.1\t1\tdiscard\t\n"
    said = str(audit(log(text), metric="val_bpb", noise=0.1))
    assert "there is no gain" in said
    assert "ablate run" not in said
    assert "standard deviation" not in said


def test_names_of_a_log_do_no_harm(log):
    said = str(audit(log("commit,loss\na;rm -rf /,2\n\x1b[31mred,1\n", "log.csv")))
    assert "\x1b" not in said
    assert "'a;rm -rf /'" in said
    path = log("commit,\x1b[31mloss\na,2\nb,1\n", "log.csv")
    assert "\x1b" not in repr(audit(path))
    assert r"\x1b[31mloss" in repr(audit(path))
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
        (rows(1, 2, status="improved"), {"metric": "val_bpb"}, "no status that is known, but improved: expected keep"),
        (rows(*range(1, 10_003)), {"metric": "val_bpb"}, "has 10002 runs with a value, expected at most 10000"),
        ("", {}, "is empty, expected CSV, TSV, or JSON lines with a row for each run"),
        ("commit\tbpb\na\t1\nb\tabc\nc\t2\n", {}, "line 3, column 'bpb': 'abc' is not a number"),
    ],
)
def test_wrong_logs_are_one_line(log, text, options, problem):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as found:
        audit(log(text), **options)
    assert problem in str(found.value)


def test_a_log_that_names_no_code_says_so_and_not_that_none_ran_twice(tmp_path):
    rows = ["trial,loss,status", "1,3.0,keep", "2,2.9,keep", "3,2.95,discard"]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    assert "The log does not name the code of its runs, so this" in str(audit(tmp_path / "log.csv"))
    (tmp_path / "log.csv").write_text("\n".join(rows).replace("trial", "commit"))
    assert "No code ran twice, so this" in str(audit(tmp_path / "log.csv"))
