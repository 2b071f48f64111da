"""Memory in use on GPUs, as NVIDIA's driver reports it. No torch."""

import shutil
import subprocess

from lightning_llm.io.units import MIB

LONGEST_S = 10.0  # that the driver may take to answer


def used_bytes(gpus: str) -> int | None:
    """Bytes in use on some GPUs together, by any program; ``None``: the driver does not tell.

    Args:
        gpus: Their indices or UUIDs, separated by commas, as in ``CUDA_VISIBLE_DEVICES``.
    """
    program = shutil.which("nvidia-smi")
    if not gpus or program is None:
        return None
    command = [program, f"--id={gpus}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST_S, check=True
        )
        return sum(map(int, done.stdout.split())) * MIB
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
