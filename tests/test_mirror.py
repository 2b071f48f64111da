"""``tests/`` mirrors the package: ``tests/optim/test_muon.py`` tests ``lightning_llm/optim/muon.py``."""

from collections.abc import Collection
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_llm"
# Modules whose tests stand elsewhere, and where. The table may only shrink: a test fails once a name is not needed.
WITHOUT = {
    "__main__.py": "cli/test_commands.py",
    "accounting/estimate.py": "cli/test_estimate.py",
    "accounting/plan_report.py": "cli/test_plan.py",
    "accounting/symbolic.py": "accounting/test_symbolic_ops.py",
    "accounting/symbolic_model.py": "accounting/test_memory.py",
    "checkpoints/compatibility.py": "training/test_initial_weights.py",
    "checkpoints/loop_state.py": "test_private_interfaces.py",
    "cli/ablate_arm.py": "cli/test_size.py",
    "cli/command_line.py": "cli/test_parser_words.py",
    "cli/convert.py": "cli/test_export.py",
    "interop/config_json.py": "interop/test_reader.py",
    "interop/hf_mapping.py": "interop/test_writer.py",
    "interop/weights.py": "interop/test_reader.py",
    "model/context.py": "model/test_attention.py",
    "ops/autograd.py": "ops/test_swiglu.py",
    "ops/checks.py": "ops/test_swiglu.py",
    "ops/loss_chunks.py": "ops/test_losses.py",
    "ops/score_mod_attention.py": "model/test_attention_formulas.py",
    "ops/swiglu_tiles.py": "ops/test_swiglu.py",
}


def mirror_faults(package: Path, tests: Path, without: Collection[str]) -> list[str]:
    faults, unused = [], set(without)
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        test = tests / place.parent / f"test_{place.stem.strip('_')}.py"
        if place.name == "__init__.py":
            continue
        if not test.is_file() and place.as_posix() not in without:
            faults.append(f"{place} has no tests/{test.relative_to(tests)}")
        if not test.is_file():
            unused.discard(place.as_posix())
    return faults + [f"{name} in WITHOUT has its test, or is gone: take it from the table" for name in sorted(unused)]


def test_each_module_has_a_test_of_its_name():
    assert len(list(PACKAGE.rglob("*.py"))) > 100  # the path is right
    tests = Path(__file__).parent
    assert [path for path in WITHOUT.values() if not (tests / path).is_file()] == []
    faults = mirror_faults(PACKAGE, tests, WITHOUT)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("without", "faults"),
    [
        ([], ["optim/muon.py has no tests/optim/test_muon.py"]),
        (["optim/muon.py"], []),
        (["optim/muon.py", "optim/adamw.py"], ["optim/adamw.py in WITHOUT has its test, or is gone: take it"]),
        (["optim/muon.py", "gone.py"], ["gone.py in WITHOUT has its test, or is gone: take it"]),
    ],
)
def test_a_module_without_a_test_is_found(tmp_path, without, faults):
    for name in ("house/__init__.py", "house/__main__.py", "house/optim/adamw.py", "house/optim/muon.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("tests/test_main.py", "tests/optim/test_adamw.py", "tests/optim/test_more.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = mirror_faults(tmp_path / "house", tmp_path / "tests", without)
    assert len(found) == len(faults)
    assert all(fault.startswith(start) for fault, start in zip(found, faults, strict=True))
