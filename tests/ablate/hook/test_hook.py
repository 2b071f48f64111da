"""The start-up hook: seeds move as if the program had others, files are recorded, and nothing else is changed."""

import json
import os
import subprocess
import sys
import venv
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from lightning_llm.ablate.hook.sitecustomize import MODULES, RESEED, ROOTS
from lightning_llm.ablate.hooked import HOOK, environment, errors_in, modules_in

N = 3

# How programs set their seeds. `S` is what they would have to add to each seed to do what the hook does with N.
SEEDS = {
    "nanoGPT": "torch.manual_seed(1337 + S); out = torch.rand(2)",
    "nanochat": """
torch.manual_seed(42 + S)
torch.cuda.manual_seed(42 + S)
torch.cuda.default_generators, torch.cuda.random.current_device = (torch.Generator(),), lambda: 0
torch.cuda._lazy_seed_tracker.get_calls()[-1][0]()  # what PyTorch does when the program first uses the GPU
generator = torch.Generator().manual_seed(7 + S)
out = torch.rand(2), torch.cuda.default_generators[0].initial_seed(), torch.rand(2, generator=generator)
""",
    "all libraries": """
random.seed(1 + S)
np.random.seed(1 + S)
torch.manual_seed(1 + S)
torch.cuda.manual_seed_all(1 + S)
out = random.random(), np.random.rand(2), torch.rand(2)
""",
    "objects of random": "out = random.Random(5 + S).random(), random.Random(-9 + S).random()",
    "objects of numpy": """
state = np.random.RandomState(5 + S)
first = state.rand()
state.seed(6 + S)
children = np.random.SeedSequence(7 + S).spawn(2)
out = first, state.rand(), np.random.default_rng(8 + S).random(), np.random.default_rng(children[1]).random()
""",
    "numpy's numbers": """
out = np.random.default_rng(np.int64(4 + S)).random(), np.random.Generator(np.random.Philox(2**70 + S)).random()
np.random.seed(np.array([3 + S]))
out = *out, np.random.rand()
""",
    "random_split and shuffle": """
parts = data.random_split(range(20), [10, 10], generator=torch.Generator().manual_seed(3 + S))
loader = data.DataLoader(parts[0], shuffle=True, generator=torch.Generator().manual_seed(4 + S))
out = [int(row) for row in loader]
""",
    "derived by PyTorch": """
class Rows(data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, row):
        return row, torch.rand(()), random.random(), np.random.rand()

torch.manual_seed(5 + S)
out = [[float(x) for x in row] for row in data.DataLoader(Rows(), shuffle=True, batch_size=None, num_workers=1)]
""",
    "sampler of several processes": """
out = list(data.DistributedSampler(range(20), num_replicas=2, rank=1, seed=9 + S))
""",
    "last seeds": """
torch.manual_seed((2**64 - 2 + S) % 2**64)
np.random.seed((2**32 - 2 + S) % 2**32)
out = torch.rand(2), np.random.rand(2), torch.manual_seed(-1 + S).initial_seed()
""",
    "errors of the program": """
out = []
for function, seed in ((np.random.seed, -1), (np.random.seed, 2**32), (torch.manual_seed, 2**64), (random.seed, ())):
    try:
        function(seed)
    except Exception as error:
        out.append(f"{type(error).__name__}: {error}")
""",
    "classes": """
out = [isinstance(torch.default_generator, torch.Generator), isinstance(np.random.mtrand._rand, np.random.RandomState)]
""",
    "none": """
for seed in (random.seed, np.random.seed):
    seed(None)
numbers = random.random(), np.random.rand(), np.random.default_rng().random(), random.Random().random()
out = [0 < number < 1 for number in numbers]
""",
}
# Seeds that are no number, and the same with what N makes of them
OTHERS = {
    "a text": ("random.Random('a').random()", f"random.Random('a + {N}').random()"),
    "bytes": ("random.Random(b'a').random()", f"random.Random(b'a + {N}').random()"),
    "a float": ("random.Random(1.5).random()", f"random.Random(hash(1.5) + {N}).random()"),
    "a list": ("np.random.RandomState([1, 2]).rand()", f"np.random.RandomState([1, 2, {N}]).rand()"),
    "entropy": ("np.random.default_rng([1, 2]).random()", f"np.random.default_rng([1, 2, {N}]).random()"),
}
RUN_ALL = """
import json, random, sys
import numpy as np
import torch
from torch.utils import data

torch.set_num_threads(1)
found = {}
for name, (code, S) in json.loads(sys.argv[1]).items():
    names = {**globals(), "S": S}
    exec(code, names)
    found[name] = names["out"]
print(json.dumps(found, default=lambda value: value.tolist()))
"""


def run(python, folder, *words, hook=None, **more):
    """A Python process in this folder; ``hook``: the arguments of ``environment``, ``None``: it has no hook."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    added = {} if hook is None else environment(others, **hook)
    command = [python, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=others | added, capture_output=True, text=True, check=False)


def printed(*arguments, **options):
    process = run(*arguments, **options)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python without packages: some import modules at its start."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """The numbers of all programs: with their own seeds, with seeds moved by hand, with the hook and 0, and with N."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "all.py").write_text(RUN_ALL)
    own = {name: (code, 0) for name, code in SEEDS.items()}
    own |= {name: (f"out = {code}", 0) for name, (code, _) in OTHERS.items()}
    moved = {name: (code, N) for name, code in SEEDS.items()}
    moved |= {name: (f"out = {code}", 0) for name, (_, code) in OTHERS.items()}
    both = {f"own {name}": case for name, case in own.items()} | {f"moved {name}": case for name, case in moved.items()}
    record = folder / "record"

    def found(cases, hook):
        words = ("-W", "ignore", "all.py", json.dumps(cases))
        return json.loads(printed(sys.executable, folder, *words, hook=hook))

    hooks = [None, {"reseed": 0, "modules": record}, {"reseed": N, "modules": record}]
    with ThreadPool() as pool:
        without, hook_0, hook_n = pool.starmap(found, zip((both, own, own), hooks, strict=True))
    assert errors_in(record) == []
    result = {kind: {name: without[f"{kind} {name}"] for name in own} for kind in ("own", "moved")}
    return result | {"hook 0": hook_0, "hook N": hook_n}


@pytest.mark.parametrize("name", [*SEEDS, *OTHERS])
def test_seeds_move_once(numbers, name):
    assert numbers["hook 0"][name] == numbers["own"][name]
    assert numbers["hook N"][name] == numbers["moved"][name]
    is_fixed = name in ("errors of the program", "classes", "none")
    assert is_fixed == (numbers["moved"][name] == numbers["own"][name])


LIBRARIES = """
import random, sys
import numpy as np
import torch
from lightning import seed_everything
from transformers import set_seed

for seed in (seed_everything, set_seed):
    seed(int(sys.argv[1]))
    print(random.random(), np.random.rand(), torch.rand(()))
"""


@pytest.mark.slow
def test_seeds_that_libraries_set_move_once(tmp_path):
    (tmp_path / "train.py").write_text(LIBRARIES)
    moved = run(sys.executable, tmp_path, "train.py", 1 + N)
    hooked = run(sys.executable, tmp_path, "train.py", 1, hook={"reseed": N, "modules": tmp_path / "record"})
    assert hooked.stdout == moved.stdout
    assert len(moved.stdout.split()) == 6
    assert errors_in(tmp_path / "record") == []


def test_the_start_imports_nothing_and_leaves_no_trace(bare, tmp_path):
    (tmp_path / "train.py").write_text("import atexit, sys; print(sorted(sys.modules), sys.path, len(sys.meta_path))")
    without = printed(bare, tmp_path, "train.py")
    hooked = printed(bare, tmp_path, "train.py", hook={"modules": tmp_path / "record", "roots": [tmp_path]})
    assert hooked.replace("'__future__', ", "").replace("'sitecustomize', ", "") == without
    (tmp_path / "torch.py").write_text("")  # of the program
    finders = "import sys{}; print(any(type(finder).__module__ == 'sitecustomize' for finder in sys.meta_path))"
    for imports, is_left in (("", True), (", random, torch", True), (", random, torch, numpy.random", False)):
        output = printed(sys.executable, tmp_path, "-c", finders.format(imports), hook={"reseed": N})
        assert output == f"{is_left}\n", imports


def test_a_library_that_was_imported_before_the_hook_is_changed(tmp_path):
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin/python"
    assert "random" not in printed(python, tmp_path, "-c", "import sys; print(list(sys.modules))")
    (packages,) = tmp_path.glob("lib/*/site-packages")
    (packages / "early.pth").write_text("import random\n")
    assert "random" in printed(python, tmp_path, "-c", "import sys; print(list(sys.modules))")
    words = ("-c", "import random; print(random.Random(1).random())")
    moved = ("-c", f"import random; print(random.Random(1 + {N}).random())")
    assert printed(python, tmp_path, *words, hook={"reseed": N}) == printed(python, tmp_path, *moved)


@pytest.mark.parametrize("name", ["random", "types", "ctypes", "contextlib", "operator"])
def test_modules_of_the_program_with_names_of_the_library_are_its_own(bare, tmp_path, name):
    (tmp_path / f"{name}.py").write_text("seed = print\n")
    (tmp_path / "train.py").write_text(f"import {name}\n{name}.seed({name}.__file__)\n")
    record = tmp_path / "record"
    expected = f"{tmp_path / name}.py\n"
    assert printed(bare, tmp_path, "train.py") == expected
    assert printed(bare, tmp_path, "train.py", hook={"reseed": N, "modules": record, "roots": [tmp_path]}) == expected
    assert modules_in(record) == {tmp_path / "train.py", tmp_path / f"{name}.py"}
    assert errors_in(record) == []


@pytest.mark.parametrize("code", ["import sys; print(__name__, sys.path)", "1 / 0", "import missing", None])
def test_the_users_own_sitecustomize_runs(bare, tmp_path, code):
    own = tmp_path / "own"
    own.mkdir()
    if code is not None:
        (own / "sitecustomize.py").write_text(code)
    (tmp_path / "train.py").write_text(
        "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', '').replace(sys.argv[1], ''))"
    )
    words = ("train.py", HOOK / "sitecustomize.py")
    without = run(bare, tmp_path, *words, PYTHONPATH=str(own))
    hooked = run(bare, tmp_path, *words, PYTHONPATH=str(own), hook={"reseed": N})
    assert (hooked.stdout, hooked.stderr) == (without.stdout, without.stderr)
    assert (str(own) in without.stdout) == (code is not None and code.startswith("import sys"))
    assert ("Error" in without.stderr) == (code in ("1 / 0", "import missing"))


def test_processes_that_the_program_starts_have_the_hook(bare, tmp_path):
    (tmp_path / "train.py").write_text(
        """
import multiprocessing, random, subprocess, sys
import part

if __name__ == "__main__":
    command = [sys.executable, "-c", "import random; print(random.Random(1).random())"]
    print(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(part.number))
"""
    )
    (tmp_path / "part.py").write_text("import random\ndef number():\n    return random.Random(1).random()\n")
    number = "import random; print(random.Random(1 + 3).random())"
    assert printed(bare, tmp_path, "train.py", hook={"reseed": N}) == 2 * printed(bare, tmp_path, "-c", number)


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)]
)
def test_imported_files_are_recorded_at_the_end(bare, tmp_path, end, status):
    for name in ("program/pkg", "elsewhere", "program-2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("program/pkg/__init__", "program/pkg/a", "program/unused", "elsewhere/other", "program-2/near"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "program/linked.py").symlink_to(tmp_path / "elsewhere/other.py")
    (tmp_path / "link").symlink_to(tmp_path / "program")
    imports = "import os, sys\nimport pkg.a, near, linked\nsys.modules['odd'] = 7\nos.chdir('/')\n"
    (tmp_path / "program/train.py").write_text(imports + end)
    record = tmp_path / "record"
    hook = {"modules": record, "roots": [tmp_path / "link", tmp_path / "nowhere"]}
    process = run(bare, tmp_path, "link/train.py", hook=hook, PYTHONPATH=str(tmp_path / "program-2"))
    assert process.returncode == status
    expected = {tmp_path / "program" / name for name in ("train.py", "pkg/__init__.py", "pkg/a.py")}
    assert modules_in(record) == (expected if status >= 0 else set())
    hook["roots"] = [tmp_path / "elsewhere"]
    printed(bare, tmp_path, "-c", "import other", hook=hook, PYTHONPATH="elsewhere")
    assert modules_in(record) - expected == {tmp_path / "elsewhere/other.py"}  # appended


FIRST = """
import sys
from importlib.machinery import PathFinder

sys.meta_path.insert(0, PathFinder)
import random
"""
BAD_SEED = """
import random
class Odd(int):
    def __add__(self, other):
        raise OSError("two\\nlines")
random.seed(Odd(3))
"""


@pytest.mark.parametrize(
    ("code", "variables", "error"),
    [
        ("", {RESEED: "²"}, f"start: ValueError: {RESEED}=², expected a whole number from 0"),
        ("", {RESEED: "-1"}, f"start: ValueError: {RESEED}=-1, expected a whole number from 0"),
        (FIRST, {RESEED: "1"}, "random: ImportError: another import hook came first, and no seeds were moved"),
        (FIRST, {RESEED: "0"}, None),
        (BAD_SEED, {RESEED: "1"}, "seed: OSError: two lines"),
        ("", {MODULES: "/"}, None),
        ("", {MODULES: "/nowhere/record", RESEED: "x"}, None),
    ],
)
def test_the_program_sees_no_error_of_the_hook(bare, tmp_path, code, variables, error):
    (tmp_path / "train.py").write_text(f"{code}\nprint('trained')")
    record = tmp_path / "record"
    added = environment({}, modules=record, roots=[tmp_path]) | variables
    assert printed(bare, tmp_path, "train.py", **added) == "trained\n"
    assert errors_in(record) == ([error] if error else [])


def test_the_users_pythonpath_comes_after_the_hook(tmp_path):
    hook = str(HOOK)
    assert (HOOK / "sitecustomize.py").is_file()
    for own, expected in (("a:/b", f"{hook}:a:/b"), ("", hook), (f"a:{hook}", f"{hook}:a"), ("a:", f"{hook}:a:")):
        assert environment({"PYTHONPATH": own})["PYTHONPATH"] == expected
    assert environment({}) == {"PYTHONPATH": hook, RESEED: "0", MODULES: "", ROOTS: ""}
    record = Path(os.path.relpath(tmp_path / "record"))
    added = environment({}, reseed=7, modules=record, roots=[tmp_path, tmp_path / "b"])
    assert added == {
        "PYTHONPATH": hook,
        RESEED: "7",
        MODULES: str(tmp_path / "record"),
        ROOTS: f"{tmp_path}:{tmp_path}/b",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reseed": -1}, "^reseed is -1, expected a number from 0: give a seed that is not negative$"),
        ({"roots": [Path("/a:b")]}, "^/a:b contains ':', which separates folders in PYTHONPATH: rename it$"),
    ],
)
def test_what_the_hook_cannot_be_told(options, message):
    with pytest.raises(ValueError, match=message):
        environment({}, **options)


def test_a_record_of_any_program_can_be_read(tmp_path):
    record = tmp_path / "record"
    assert (modules_in(record), errors_in(record)) == (set(), [])
    record.write_bytes(b"/a/\xff.py\nerror: seed: \x1b[0m\n/a/\xff.py\nerror: seed: \x1b[0m\n/b/c.py\n")
    assert modules_in(record) == {Path(os.fsdecode(b"/a/\xff.py")), Path("/b/c.py")}
    assert errors_in(record) == [r"seed: \x1b[0m"]
