"""``lightning-llm ablate verdict``: from a file to the verdicts, and mistakes in one line."""

import subprocess
import sys

import msgspec
import pytest
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report

BASELINE, GELU = [3.21, 3.18, 3.25, 3.2, 3.22, 3.17], [3.22, 3.2, 3.26, 3.22, 3.25, 3.18]
WIDE = "seed,none,gelu\n" + "".join(f"{n},{b},{g}\n" for n, (b, g) in enumerate(zip(BASELINE, GELU, strict=True)))
LONG = "variant,seed,steps,loss\n" + "".join(
    f"{name},{seed},100,{value}\n"
    for name, values in {"gelu": GELU, "baseline": BASELINE}.items()
    for seed, value in enumerate(values)
)


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """The status, and what is printed to each stream, for a file with this content."""
    monkeypatch.chdir(tmp_path)

    def run(content, *options, name="losses.csv"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        capsys.readouterr()
        return main(["ablate", "verdict", name, *options]), *capsys.readouterr()

    return run


def test_a_table_has_a_verdict(said):
    status, out, err = said(WIDE, "--baseline", "none", "--delta", "0.05")
    assert (status, err) == (0, "")
    assert out.startswith("losses.csv: loss of gelu, compared with none\nDelta 0.05 loss; ")
    assert "\ngelu: worse, by less than 0.05; difference +0.0167 (+0.0081 to +0.0252) loss after 6 pairs" in out


def test_options_reach_the_verdict(said):
    status, out, _ = said(LONG, "--metric", "loss", "--alpha", "0.1", "--format", "json")
    found = msgspec.json.decode(out, type=Report)
    row = found["gelu"]
    assert (status, found.alpha, row.runs_of_sides) == (0, 0.1, None)
    assert [pair.seed for pair in row.by_seed] == [0, 1, 2, 3, 4, 5]
    assert row.interval == pytest.approx([*stats.ttest_rel(GELU, BASELINE).confidence_interval(0.9)])
    assert (row.by_seed[2].baseline, row.by_seed[2].variant) == (3.25, 3.26)
    _, out, _ = said(LONG, "--metric=-loss", "--unpaired", "--format", "json")
    found = msgspec.json.decode(out, type=Report)
    row = found["gelu"]
    truth = stats.ttest_ind(GELU, BASELINE, equal_var=False)  # in the metric's own values
    assert row.interval == pytest.approx([*truth.confidence_interval(0.95)])
    assert (found.metric, found.higher_is_better, found.delta) == ("loss", True, None)
    assert (row.direction, row.runs_of_sides, row.by_seed) == ("not shown", (6, 6), [])
    assert row.difference > 0


def test_the_table_is_printed_for_papers_and_programs(said):
    for format, begin in {
        "markdown": "| gelu | 6 | +0.0167 | +0.0081 to +0.0252 |",
        "latex": r"gelu & 6 & $+0.0167$ & $+0.0081$ to $+0.0252$ &",
        "csv": "gelu,none,result,,loss,loss,6,3.20",
    }.items():
        status, out, err = said(WIDE, "--baseline", "none", "--format", format)
        assert (status, err) == (0, "")
        assert any(line.startswith(begin) for line in out.splitlines()), out


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        (WIDE, (), "baseline (--baseline) must be one of none, gelu: losses.csv has no variant 'baseline'"),
        (
            LONG,
            (),
            "losses.csv has several columns: give metric (--metric) as one of steps, loss, with a minus before it",
        ),
        (LONG, ("--metric", "bpb"), "metric must be one of steps, loss: losses.csv has no column 'bpb'"),
        (LONG, ("--metric", "loss", "--alpha", "5"), "alpha must be above 0 and below 0.5, got 5.0"),
        (LONG, ("--metric", "loss", "--delta", "nan"), "delta must be above 0, got nan"),
        ("", (), "losses.csv is empty, "),
        (b"\x93NUMPY", (), "losses.csv is not UTF-8 text: byte 0"),
        ("baseline,gelu\n3.2,3.1\n", (), "losses.csv has one seed per variant, "),
        ("baseline,gelu\n3.2,3.1\n3.3,\n", (), "losses.csv has 1 run of 'gelu' and 2 of 'baseline', "),
    ],
)
def test_mistakes_are_one_line_and_status_2(said, content, options, line):
    status, out, err = said(content, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"lightning-llm ablate: error: {line}")
    assert err.count("\n") == 1


def test_a_missing_file_is_one_line(said):
    assert main(["ablate", "verdict", "missing.csv"]) == 2
    status, _, err = said(LONG, "--metrics", "loss")
    assert (status, "did you mean --metric?" in err) == (2, True)


def test_control_characters_do_not_reach_the_terminal(said):
    hostile = WIDE.replace("gelu", "\x1b[31mgelu\x1b]0;x\x07")
    for options in (("--baseline", "none"), ("--baseline", "other"), ("--baseline", "none", "--metric", "\x1bm")):
        _, out, err = said(hostile, *options)
        assert "\x1b" not in out + err
        assert "gelu" in out + err


def test_it_loads_no_torch(tmp_path):
    (tmp_path / "losses.csv").write_text(WIDE)
    code = "import sys; from lightning_llm.__main__ import main; status = main(sys.argv[1:])"
    check = "sys.exit(status or bool({'torch', 'lightning', 'matplotlib'} & {*sys.modules}))"
    command = [sys.executable, "-c", f"{code}; {check}", "ablate", "verdict", "losses.csv", "--baseline", "none"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
