"""``lightning-llm dashboard``: started as a user does, read over HTTP, looked at in a browser, stopped by a signal."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from unittest.mock import ANY
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from PIL import Image

from docs import screenshot
from lightning_llm.__main__ import main
from lightning_llm.training.callbacks.dashboard import LAYOUT
from tests.patience import HANGS_S

CALLBACKS = [
    {"class_path": "lightning_llm.training.callbacks.Dashboard"},
    {
        "class_path": "lightning_llm.training.callbacks.SampleText",
        "init_args": {"every_n_steps": 3, "prompt": "Abc", "max_new_tokens": 20},
    },
]
NAMES = ["mlp=swiglu", "mlp=memory_optimized_swiglu"]
MEASURED = [group for group in LAYOUT if group != "loss by data source"]  # charts without curves are not shown


@pytest.fixture
def runs(tiny):
    """Two runs, in ``runs`` below the current folder."""
    for name in NAMES:
        tiny("fit", **{"model.architecture.mlp": name.partition("=")[2], "trainer.callbacks": CALLBACKS})


@contextmanager
def dashboard(*words):
    """The command in a process of its own, its address, and what it prints before."""
    command = [sys.executable, "-u", "-m", "lightning_llm", "dashboard", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if address := re.search(r"http://\S+(?= until)", line):
                    yield process, address[0], lines
                    break
            else:
                pytest.fail(process.stderr.read())
        finally:
            process.kill()


def ask(address, path, body=None):
    headers = {"Content-Type": "application/json"}
    request = Request(address + path, headers=headers, data=None if body is None else json.dumps(body).encode())
    with urlopen(request, timeout=HANGS_S) as answer:
        return json.loads(answer.read())


def until(look, is_there):
    """Look again until it is there."""
    deadline = time.monotonic() + HANGS_S
    while not is_there(found := look()):
        assert time.monotonic() < deadline, found
    return found


def test_the_data_come_over_http(runs):
    with dashboard("runs", "--port", "0") as (process, address, lines):
        assert f"{address}?smoothing=0#custom_scalars{screenshot.UNSMOOTHED}" in process.stdout.readline()
        tags = until(
            lambda: ask(address, "data/plugin/scalars/tags"),
            lambda tags: len(tags) == 2 and all("val_loss" in of_run for of_run in tags.values()),
        )
        assert set(tags) == set(NAMES)
        assert any(line.startswith(NAMES[0]) and "runs/run/version_0" in line for line in lines)
        for name in NAMES:
            curve = ask(address, f"data/plugin/scalars/scalars?run={quote(name)}&tag=train_loss")
            assert [step for _, step, _ in curve] == [1, 2, 3, 4, 5, 6]
            texts = ask(address, f"data/plugin/text/text?run={quote(name)}&tag=samples/text_summary")
            assert [text["step"] for text in texts] == [3, 6]
            assert "Abc" in texts[0]["text"]
        layout = ask(address, "data/plugin/custom_scalars/layout")
        assert [group["title"] for group in layout["category"]] == MEASURED
        chart = f"data/plugin/custom_scalars/scalars?run={quote(NAMES[0])}&tag={quote('^val_loss$')}"
        assert list(ask(address, chart)["tag_to_events"]) == ["val_loss"]
        filters = {"startIndex": 0, "sliceSize": 10, "colParams": [], "allowedStatuses": ["STATUS_SUCCESS"]}
        groups = ask(address, "data/plugin/hparams/session_groups", filters)["sessionGroups"]
        assert {group["hparams"]["mlp"] for group in groups} == {"swiglu", "memory_optimized_swiglu"}
        summaries = [json.loads(path.read_text()) for path in Path("runs/run").glob("*/summary.json")]
        metrics = [each for group in groups for each in group["metricValues"]]
        losses = sorted(each["value"] for each in metrics if each["name"]["tag"] == "val_loss")
        assert losses == pytest.approx(sorted(summary["val_loss"] for summary in summaries))


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_nothing_is_left(make_events, number, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    try:
        with dashboard(str(make_events), "--port", "0") as (process, _, _):
            assert list(temporary.glob("lightning-llm-dashboard-*/*/*"))
            process.send_signal(number)
            assert process.wait(HANGS_S) == 0
            assert "Traceback" not in process.stderr.read()
        assert not list(temporary.glob("lightning-llm-dashboard-*"))
    finally:
        del os.environ["TMPDIR"]


@pytest.fixture
def make_events(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    run = tmp_path / "by-hand" / "first"
    with SummaryWriter(run) as writer:
        writer.add_scalar("train_loss", 1.0, 1)
    return run


def write_scalars(run, **points):
    """A run with so many points of each scalar."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run) as writer:
        for tag, number in points.items():
            for step in range(1, number + 1):
                writer.add_scalar(tag, 1.0 / step, step)
        charts = {"both": ["Multiline", ["^curve$", "^single$"]], "one": ["Multiline", ["^single$"]]}
        writer.add_custom_scalars({"group": charts, "empty": {"none": ["Multiline", ["^nothing$"]]}})
    return run


def test_no_chart_has_one_point(tmp_path):
    write_scalars(tmp_path / "a", curve=3, single=1, in_b=1)
    write_scalars(tmp_path / "b", curve=3, single=1, in_b=2)
    with dashboard(str(tmp_path), "--port", "0") as (_, address, _):
        tags = until(lambda: ask(address, "data/plugin/scalars/tags"), lambda tags: len(tags) == 2)
        assert [set(of_run) for of_run in tags.values()] == [{"curve", "in_b"}] * 2  # one run is enough
        series = ask(address, "data/plugin/timeseries/tags")["scalars"]["runTagInfo"]
        assert [set(of_run) for of_run in series.values()] == [{"curve", "in_b"}] * 2
        (group,) = ask(address, "data/plugin/custom_scalars/layout")["category"]
        assert [chart["title"] for chart in group["chart"]] == ["both"]
        run = quote(next(iter(tags)))
        points = ask(address, f"data/plugin/custom_scalars/scalars?run={run}&tag=single")["tag_to_events"]["single"]
        assert [step for _, step, _ in points] == [1]  # in a chart with curves


def test_a_run_that_has_just_begun_shows_its_first_points(tmp_path):
    write_scalars(tmp_path / "a", curve=1, single=1)
    with dashboard(str(tmp_path), "--port", "0") as (_, address, _):
        (tags,) = until(lambda: ask(address, "data/plugin/scalars/tags"), len).values()
        assert set(tags) == {"curve", "single"}
        layout = ask(address, "data/plugin/custom_scalars/layout")
        assert [group["title"] for group in layout["category"]] == ["group"]


def test_a_deleted_run_disappears(tmp_path):
    runs = [write_scalars(tmp_path / "a" / name, curve=2) for name in ("first", "second")]
    with dashboard(str(tmp_path), "--port", "0") as (_, address, _):
        until(lambda: ask(address, "data/runs"), lambda names: names == ["a/first", "a/second"])
        shutil.rmtree(runs[0])
        until(lambda: ask(address, "data/runs"), lambda names: names == ["a/second"])
        assert ask(address, "data/plugin/scalars/tags") == {"a/second": {"curve": ANY}}


def test_the_plain_address_leads_to_the_one_without_smoothing(make_events):
    with dashboard(str(make_events), "--port", "0") as (_, address, _), urlopen(address, timeout=HANGS_S) as page:
        assert page.url == f"{address}?smoothing=0"
        assert b"<html" in page.read()


def test_runs_of_experiments_are_shown(tmp_path):
    experiment = tmp_path / "runs" / "mlp"
    for name in ("baseline,seed=0", "gelu,seed=0"):
        write_scalars(experiment / "runs" / name, curve=2)
    (experiment / "plan.json").write_text("{}")
    write_scalars(tmp_path / "runs" / "a" / "version_0", curve=2)
    names = ["baseline,seed=0", "gelu,seed=0"]
    with dashboard(str(experiment), "--port", "0") as (_, address, _):
        until(lambda: ask(address, "data/runs"), lambda found: sorted(found) == names)
    with dashboard(str(tmp_path / "runs"), "--port", "0") as (_, address, _):
        expected = ["a/version_0", *(f"mlp/{name}" for name in names)]
        until(lambda: ask(address, "data/runs"), lambda found: sorted(found) == expected)


def test_a_run_of_a_stranger_stays_in_the_folder(make_events, tmp_path, monkeypatch):
    secret, temporary = tmp_path / "secret.txt", tmp_path / "temporary"
    secret.write_text("nobody's business\n")
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    other = shutil.copytree(make_events, make_events.with_name("second"))
    make_events.joinpath("config.yaml").write_text(json.dumps({"../../escape": "/etc\n\x1b[2J", "/absolute": "../.."}))
    other.joinpath("config.yaml").write_text("seed_everything: 1\n")
    other.joinpath("events.out.tfevents.9.host").symlink_to(secret)
    projector = f'embeddings {{ tensor_name: "a" tensor_path: "{secret}" metadata_path: "{secret}" }}\n'
    other.joinpath("projector_config.pbtxt").write_text(projector)
    before = {path for path in tmp_path.rglob("*") if path != temporary}
    with dashboard(str(make_events), str(other), "--port", "0") as (_, address, lines):
        tags = until(lambda: ask(address, "data/plugin/scalars/tags"), lambda tags: len(tags) == 2)
        (links,) = temporary.iterdir()
        assert sorted(path.name for path in links.iterdir()) == sorted(tags)
        files = [path for path in links.rglob("*") if not path.is_dir() or path.is_symlink()]
        assert {"tfevents" in path.name and path.is_symlink() for path in files} == {True}
        assert {path for path in tmp_path.rglob("*") if temporary not in path.parents} - {temporary} == before
        (name,) = [name for name in tags if "escape" in name]
        assert "escape=etc\\n\\x1b[2J" in name
        assert any(line.startswith(f"{name}  ") for line in lines)
        run = quote(next(tag for tag in tags if tag != name))
        for path in (f"metadata?run={run}&name=a", f"tensor?run={run}&name=a", "runs", f"info?run={run}"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"{address}data/plugin/projector/{path}", timeout=HANGS_S)


def other_addresses():
    """Of this machine, beside the one that means itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which address would be used
        except OSError:
            return []
        return [probe.getsockname()[0]]


def test_it_listens_on_this_machine_only(make_events):
    with dashboard(str(make_events), "--port", "0") as (_, address, _):
        host, port = re.fullmatch(r"http://(.+):(\d+)/", address).groups()
        assert host == "127.0.0.1"
        for other in other_addresses():
            with socket.socket() as client:
                assert client.connect_ex((other, int(port))) != 0, other


def test_it_answers_only_requests_that_name_this_machine(make_events):
    """The name of another machine may come from a web page whose address was pointed at this one."""
    with dashboard(str(make_events), "--port", "0") as (_, address, _):
        port = int(re.search(r":(\d+)/", address)[1])

        def status(host, path="/data/runs"):
            connection = HTTPConnection("127.0.0.1", port, timeout=HANGS_S)
            connection.putrequest("GET", path, skip_host=True)
            if host is not None:
                connection.putheader("Host", host)
            connection.endheaders()
            with connection.getresponse() as answer:
                return answer.status, answer.read()

        for host in (
            f"localhost:{port}",
            "localhost:16006",
            "LocalHost",
            f"127.0.0.1:{port}",
            f"[::1]:{port}",
            "[::1]",
        ):
            assert status(host)[0] == 200, host
        evil = f"localhost.evil.example:{port}"
        for host in (
            "evil.example",
            evil,
            "evil.example:localhost",
            "localhost:6006@evil.example",
            "10.0.0.1",
            "",
            None,
        ):
            found, text = status(host)
            assert found == 403, host
            assert text.count(b"\n") == 1
        assert status("evil.example", "/")[0] == status("evil.example", "/data/plugin/text/tags")[0] == 403


@pytest.mark.filterwarnings("ignore:html5lib")  # TensorBoard loads it
def test_a_busy_port_is_one_line(make_events, error_line):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["dashboard", str(make_events), "--port", str(port)]) == 2
    assert f"--port {port}: " in (line := error_line())
    assert "already in use" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: RUNS"),
        (["nowhere"], "nowhere: no such directory"),
        (["empty"], "empty: no run in it"),
        (["silent"], "silent: no TensorBoard events in it"),
        (["silent", "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["silent", "--port", "-1"], "--port must be from 0 to 65535, got -1"),
        (["silent", "--port", "high"], "high"),
        (["silent", "--host", "0.0.0.0"], "--host"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch, error_line):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("silent").mkdir()
    Path("silent/config.yaml").write_text("seed_everything: 1\n")
    assert main(["dashboard", *words]) == 2
    line = error_line()
    assert line.startswith("lightning-llm dashboard: error: ")
    assert says in line


# -- the page in a browser --------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path):
    try:
        browser = screenshot.Browser(screenshot.find_chromium(), tmp_path / "browser")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    yield browser
    browser.close()


@pytest.mark.slow
def test_the_page_shows_the_charts(runs, browser):
    with dashboard("runs", "--port", "0") as (_, address, _):
        until(
            lambda: ask(address, "data/plugin/scalars/tags"),
            lambda tags: len(tags) == 2 and all("val_loss" in of_run for of_run in tags.values()),
        )
        layout = ask(address, "data/plugin/custom_scalars/layout")
        titles = [chart["title"] for group in layout["category"] for chart in group["chart"]]
        page = browser.page_text(f"{address}#custom_scalars", [*MEASURED, *titles, *NAMES, "Matches (4)"])
        assert "validation, nats/token (needs data.mixture)" not in page
        assert page.index("training and validation") < page.index("learning rate") < page.index("tokens per second")
        scalars = browser.page_text(f"{address}#timeseries", ["train_loss", "grad_norm", "learning_rate", *NAMES])
        assert "No scalar data" not in scalars
        samples = browser.page_text(f"{address}#text", ["samples", "step 6", "Abc", *NAMES])
        assert "No text data" not in samples
        browser.page_text(f"{address}#hparams", ["Hyperparameters", "hidden_size", "val_loss", "val_bits_per_byte"])


@pytest.mark.slow
def test_the_screenshot_has_two_charts_and_the_lists_of_their_curves(runs, browser, tmp_path):
    with dashboard("runs", "--port", "0") as (_, address, _):
        until(lambda: ask(address, "data/plugin/scalars/tags"), lambda tags: len(tags) == 2)
        session = browser.open(address + screenshot.PAGE)
        charts = browser.evaluate(session, screenshot.CHARTS)
        (tmp_path / "charts.png").write_bytes(browser.screenshot(session, charts))
    assert len(charts) == 2
    picture = Image.open(tmp_path / "charts.png").convert("RGB")
    lists = picture.crop((0, picture.height * 2 // 3, *picture.size))
    count = {color: number for number, color in lists.getcolors(lists.width * lists.height)}
    assert all(count.get(color, 0) > 1000 for color in ((255, 112, 67), (0, 119, 187)))  # those of the two runs
