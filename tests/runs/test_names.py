"""What the configs of several runs differ in, and the names that come of it."""

import yaml

from lightning_llm.io.untrusted import LONGEST_NAME, printable
from lightning_llm.runs.event_files import EVENT_FILES
from lightning_llm.runs.find import Run, find_runs
from lightning_llm.runs.names import differences, distinctions, run_names

BASE = {
    "seed_everything": 1,
    "trainer": {"max_steps": 10, "default_root_dir": "runs", "logger": None},
    "model": {"architecture": {"mlp": "swiglu"}, "schedule": None},
    "data": {"corpus": "stdlib"},
}


def make(folder, config=BASE, events=True):
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if events:
        (folder / "events.out.tfevents.1.host").write_bytes(b"")
    return folder


def changed(**changes):
    """BASE with options by dotted names, ``__`` for the dot."""
    config = yaml.safe_load(yaml.safe_dump(BASE))
    for name, value in changes.items():
        *sections, option = name.split("__")
        place = config
        for section in sections:
            place = place[section]
        place[option] = value
    return config


def found(*folders):
    return find_runs([str(folder) for folder in folders], EVENT_FILES, "no events")


def test_runs_are_named_by_what_differs(tmp_path):
    folders = [
        make(tmp_path / "a" / "version_0"),
        make(tmp_path / "a" / "version_1", changed(model__architecture__mlp="gelu")),
        make(tmp_path / "b" / "version_0", changed(trainer__max_steps=20, trainer__default_root_dir="elsewhere")),
        make(tmp_path / "b" / "version_1", changed(seed_everything=2)),
        make(tmp_path / "b" / "version_2", changed(model__schedule={"class_path": "x.Constant", "init_args": {}})),
    ]
    assert differences(found(*folders)) == ["mlp", "schedule", "trainer.max_steps", "seed_everything"]
    assert run_names(found(*folders)) == [
        "mlp=swiglu, schedule=null, max_steps=10, seed=1",
        "mlp=gelu, schedule=null, max_steps=10, seed=1",
        "mlp=swiglu, schedule=null, max_steps=20, seed=1",
        "mlp=swiglu, schedule=null, max_steps=10, seed=2",
        "mlp=swiglu, schedule=Constant, max_steps=10, seed=1",
    ]


def test_runs_of_the_same_config_are_named_by_their_place(tmp_path):
    assert run_names(found(make(tmp_path / "a" / "version_0"))) == ["a/version_0"]
    first, second = make(tmp_path / "b" / "version_0"), make(tmp_path / "b" / "version_1")
    assert run_names(found(first, second)) == ["b/version_0", "b/version_1"]


def test_repetitions_get_their_version_then_their_folder(tmp_path):
    other = make(tmp_path / "a" / "version_7", changed(seed_everything=2))
    same = [make(tmp_path / folder / "version_0") for folder in ("a", "b")] + [make(tmp_path / "a" / "version_1")]
    assert run_names(found(other, *same)) == [
        "seed=2",
        "seed=1 (version_0) in a",
        "seed=1 (version_0) in b",
        "seed=1 (version_1)",
    ]


def test_values_of_paths_make_no_folders(tmp_path):
    first = make(tmp_path / "a" / "version_0", changed(data__path="/texts/one.txt"))
    second = make(tmp_path / "a" / "version_1", changed(data__path="/texts/two.txt"))
    assert run_names(found(first, second)) == ["path=one.txt", "path=two.txt"]


def test_many_differences_are_told_within_a_config(tmp_path):
    wide = {f"model__architecture__option_of_the_model_{n}": n for n in range(10)}
    folders = [
        make(tmp_path / "small" / "version_0"),
        make(tmp_path / "large" / "version_0", changed(**wide)),
        make(tmp_path / "large" / "version_1", changed(**wide, seed_everything=2)),
    ]
    assert run_names(found(*folders)) == ["small", "large: seed=1", "large: seed=2"]


def test_a_name_with_many_options_has_the_first_ones_and_the_number_of_the_others(tmp_path):
    """Seven options differ within one config, so its name alone does not tell its runs apart."""

    def wide(folder, factor):
        options = {f"model__architecture__option_{letter}": n * factor for n, letter in enumerate("abcdefg", 1)}
        return make(tmp_path / "a" / folder, changed(**options))

    folders = [wide("version_0", 1), wide("version_1", 2)]
    shown = ", ".join(f"option_{letter}={n}" for n, letter in enumerate("abcd", 1))
    assert run_names(found(*folders))[0] == f"a: {shown}, and 3 more"
    same_start = make(tmp_path / "a" / "version_2", yaml.safe_load((folders[0] / "config.yaml").read_text()))
    config = yaml.safe_load((same_start / "config.yaml").read_text())
    config["model"]["architecture"]["option_g"] = 0
    (same_start / "config.yaml").write_text(yaml.safe_dump(config))
    names = run_names(found(*folders, same_start))
    assert [name.endswith("(version_2)") for name in names] == [False, False, True]
    assert len(set(names)) == 3


def test_names_are_short_enough_for_folders(tmp_path):
    wide = {f"model__architecture__option_of_the_model_{n}": n for n in range(40)}
    names = run_names(found(make(tmp_path / "a" / "v0"), make(tmp_path / "a" / "v1", changed(**wide))))
    assert len(set(names)) == 2
    assert max(map(len, names)) <= LONGEST_NAME


def test_names_from_configs_lead_nowhere(tmp_path):
    options = ["../../escape", "/absolute", "a\0b\n\x1b[2J", "x" * 300, "漢" * 200, "..", "a/b", "a∕b"]
    folders = [make(tmp_path / f"{n}" / "v", {**BASE, option: option}) for n, option in enumerate(options)]
    for runs_found in (found(folders[0], folder) for folder in folders[1:]):
        for name in run_names(runs_found):
            assert (tmp_path / name).resolve().parent == tmp_path
            assert "\n" not in printable(name) == name
            assert len(name.encode()) <= LONGEST_NAME
    names = run_names(found(*folders))
    assert len(set(names)) == len(options)


def test_no_name_leads_into_another_run(tmp_path):
    bare = make(tmp_path / "seed=1" / "seed=1", config=None)
    one, two = make(tmp_path / "a" / "v0"), make(tmp_path / "a" / "v1", changed(seed_everything=2))
    assert run_names(found(one, two, bare)) == [
        "seed=1",
        "seed=2",
        "seed=1∕seed=1 #2",
    ]
    assert run_names(found(bare, one, two)) == [
        "seed=1/seed=1",
        "seed=1 #2",
        "seed=2",
    ]


def experiment(folder, *runs, mark="plan.json", seed=1):
    """The runs of an experiment, by the names of their folders."""
    folder.mkdir(parents=True)
    (folder / mark).write_text("{}")
    options = changed(seed_everything=seed)
    return [make(folder / "runs" / run, {**options, "data": {"corpus": "stdlib", "seed": seed}}) for run in runs]


def names_of(*folders):
    return run_names(find_runs([str(folder) for folder in folders], EVENT_FILES, "no events", with_experiments=True))


def test_runs_of_an_experiment_have_the_names_of_their_folders(tmp_path, monkeypatch):
    experiment(tmp_path / "runs" / "mlp", "baseline,seed=0", "gelu,seed=0")
    alone = ["baseline,seed=0", "gelu,seed=0"]
    assert names_of(tmp_path / "runs") == names_of(tmp_path / "runs" / "mlp") == alone
    monkeypatch.chdir(tmp_path / "runs" / "mlp" / "runs")
    assert names_of(".") == alone
    make(tmp_path / "runs" / "a" / "version_0")
    assert names_of(tmp_path / "runs") == ["a/version_0", *(f"mlp/{name}" for name in alone)]
    experiment(tmp_path / "runs" / "norm", "baseline,seed=0")
    assert names_of(tmp_path / "runs" / "mlp", tmp_path / "runs" / "norm")[-1] == "norm/baseline,seed=0"
    experiment(tmp_path / "others" / "norm", "baseline,seed=0")
    assert names_of(tmp_path / "runs" / "norm", tmp_path / "others" / "norm") == [
        "runs/norm/baseline,seed=0",
        "others/norm/baseline,seed=0",
    ]


def test_a_folder_named_runs_without_a_plan_is_no_experiment(tmp_path):
    runs = [make(tmp_path / "runs" / name, changed(seed_everything=n)) for n, name in enumerate("ab")]
    assert run_names(found(*runs)) == ["seed=0", "seed=1"]


def test_equal_seeds_are_one(tmp_path):
    def seeded(name, weights, data):
        config = {**changed(seed_everything=weights), "data": {"corpus": "stdlib", "seed": data}}
        return make(tmp_path / "a" / name, config)

    one, two = seeded("v1", 1, 1), seeded("v2", 2, 2)
    assert run_names(found(one, two)) == ["seed=1", "seed=2"]
    other_data = seeded("v3", 2, 3)
    assert run_names(found(one, two, other_data))[2] == "data.seed=3, seed_everything=2"
    assert run_names(found(two, other_data)) == ["data.seed=2", "data.seed=3"]


def test_options_with_the_same_last_word_keep_all_words(tmp_path):
    configs = [changed(model__a={"lr": n}, trainer__lr=n, trainer__max_steps=n) for n in (1, 2)]
    runs = [make(tmp_path / "a" / f"v{n}", config) for n, config in enumerate(configs)]
    assert run_names(found(*runs)) == ["a.lr=1, trainer.lr=1, max_steps=1", "a.lr=2, trainer.lr=2, max_steps=2"]


def test_thousands_of_runs_get_names(tmp_path):
    runs = [Run(tmp_path / f"{number % 3}" / f"version_{number}", {"mlp": "swiglu"}) for number in range(3000)]
    names = run_names(runs)
    assert len(set(names)) == 3000
    assert names[4] == "1/version_4"


def test_runs_without_a_config_are_named_by_their_place(tmp_path):
    bare = make(tmp_path / "by-hand" / "first", config=None)
    one, two = make(tmp_path / "a" / "version_0"), make(tmp_path / "a" / "version_1", changed(seed_everything=2))
    assert run_names(found(bare, one, two)) == ["by-hand/first", "seed=1", "seed=2"]


def test_options_of_a_class_that_other_runs_do_not_have_say_nothing_more(tmp_path):
    own = {"data": {"class_path": "mine.Digits", "digits": 3, "seed": 7}}
    runs = found(
        make(tmp_path / "a" / "0"),
        make(tmp_path / "a" / "1", changed(seed_everything=2)),
        make(tmp_path / "a" / "2", {**BASE, **own}),
        make(tmp_path / "a" / "3", {**BASE, "data": {**own["data"], "digits": 4}}),
    )
    assert differences(runs) == ["data", "data.digits", "seed_everything"]
    assert distinctions(runs) == [
        "seed_everything=1",
        "seed_everything=2",
        "data=Digits, data.digits=3, seed_everything=1",
        "data=Digits, data.digits=4, seed_everything=1",
    ]
    older = found(make(tmp_path / "b" / "0"), make(tmp_path / "b" / "1", changed(data__new=1)))
    assert differences(older) == ["data.new"]  # of one class
