"""``python -m benchmarks.gpu --part next --inputs DIR --out DIR``: what the pages say of a GPU, measured in parts.

It assumes little: one GPU, Python, torch, a copy of this repository, and no network. The folder of inputs may hold the
packages that are missing here (``wheels``), the text of part c (``tinyshakespeare.txt``), the commit of a copy without
git (``commit.txt``), and rows of an earlier start. Nothing is imported before it is known to be here.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from benchmarks.commands import environment

PARTS = {
    **{"next": "next_list", "second": "second_list", "third": "third_list"},
    **{"a": "operators", "b": "training", "c": "end_to_end"},
}
LIMIT_S = 570.0
# Modules, and what pip calls their packages.
REQUIRED = {
    **{"torch": "torch", "lightning": "lightning", "torchmetrics": "torchmetrics", "numpy": "numpy"},
    **{"tensorboard": "tensorboard", "tokenizers": "tokenizers", "safetensors": "safetensors", "rich": "rich"},
    **{"jsonargparse": "jsonargparse[signatures]", "docstring_parser": "jsonargparse[signatures]"},
    **{"matplotlib": "matplotlib", "scipy": "scipy", "msgspec": "msgspec", "jinja2": "jinja2"},
}
OPTIONAL = {"triton": "triton", "transformers": "transformers", "liger_kernel": "liger-kernel", "pytest": "pytest"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one part; returns 0 if all that can run here is measured, 1 if not, 2 for a mistake."""
    options = _parser().parse_args(argv)
    if not options.inputs.is_dir():
        return _mistake(f"--inputs {options.inputs} is no folder: make one, with {options.inputs}/wheels if need be")
    missing = _missing({**REQUIRED, **OPTIONAL})
    if not options.dry_run:
        missing = _install(missing, options.inputs / "wheels")
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    if needed := [package for package in missing if package in REQUIRED.values()]:
        return _mistake(f"{', '.join(needed)} must be installed: put the wheels into {options.inputs / 'wheels'}")
    with patch.dict(os.environ, _environment()):
        import torch

        from benchmarks.gpu.runner import Machine, Part, run_part

        if not (options.dry_run or torch.cuda.is_available()):
            return _mistake("there is no CUDA device: --dry-run runs all of it on the CPU, at toy sizes")
        machine = Machine(inputs=options.inputs, dry_run=options.dry_run, out=options.out, tests=options.tests)
        command = f"python -m benchmarks.gpu --part {options.part}{' --dry-run' if options.dry_run else ''}"
        part: Part = importlib.import_module(f"benchmarks.gpu.{PARTS[options.part]}").PART
        limits = {"limit_s": options.limit_s, "only": options.only}
        try:
            return run_part(part, machine, options.out, command=command, **limits)
        except ValueError as error:
            return _mistake(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    parts = "next, second, third: the lists of benchmarks/gpu/README.md; a: tests, operators, memory; "
    parts += "b: training steps; c: fit from end to end"
    add("--part", required=True, choices=PARTS, help=parts)
    add("--inputs", required=True, type=Path, metavar="DIR", help="folder of wheels and text (benchmarks/README.md)")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the rows and the plot; read at the start")
    add("--limit-s", type=float, default=LIMIT_S, metavar="S", help=f"end after S seconds (default: {LIMIT_S:.0f})")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="measure these, such as '124 M*' (default: all)")
    add("--tests", metavar="EXPR", help="run these tests marked gpu, as for pytest's -k (default: those of the part)")
    add("--dry-run", action="store_true", help="run all of it on the CPU, at toy sizes")
    return parser


def _mistake(line: str) -> int:
    print(f"python -m benchmarks.gpu: error: {line}", file=sys.stderr)
    return 2


def _missing(modules: dict[str, str]) -> list[str]:
    """The packages of the modules that cannot be found."""
    importlib.invalidate_caches()
    return list(dict.fromkeys(package for module, package in modules.items() if find_spec(module) is None))


def _install(packages: Iterable[str], wheels: Path) -> list[str]:
    """Install packages from a folder, one by one, since one that is not there ends a whole pip; returns the rest."""
    if wheels.is_dir():
        for package in packages:
            arguments = ["install", "--quiet", "--no-index", "--find-links", str(wheels), package]
            done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
            if done.returncode:
                lines = ["no output", *done.stderr.splitlines()]
                lines = [line for line in lines if line.startswith("ERROR")] or lines
                print(f"pip install {package}: {lines[-1]}", flush=True)
    return _missing({**REQUIRED, **OPTIONAL})


def _environment() -> dict[str, str]:
    """For all processes: the package from this folder, no network, and compiled code in a folder that can be written.

    That folder outlives the command, so that the next start finds what was compiled.
    """
    compiled = Path(tempfile.gettempdir(), "lightning-llm-gpu")
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "MPLCONFIGDIR": "matplotlib"}
    caches = {name: os.environ.get(name, str(compiled / folder)) for name, folder in folders.items()}
    # torch.cuda.is_available() then does not load CUDA, which must not be loaded before a process forks
    fork = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**caches, **fork, "PYTHONPATH": environment()["PYTHONPATH"], "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    sys.exit(main())
