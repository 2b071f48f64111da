"""Sizes in bytes, times, and rounded numbers, as people write and read them."""

import math
import re

from lightning_llm.io.untrusted import shown

MIB, GIB = 2**20, 2**30
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def four_digits(value: float) -> float:
    """A number rounded to four digits, so that its text has its value bit for bit."""
    return float(f"{value:.4g}")


def byte_size(text: str, option: str = "") -> int:
    """``80GiB`` as bytes; ``option`` is what has it, for the message.

    Raises:
        ValueError: No number, or a unit that is not known.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        units = ", ".join(filter(None, UNITS))
        raise ValueError(f"{option} {text!r} is not a size: give a number with one of {units}, such as 80GiB".lstrip())
    return int(float(match[1]) * UNITS[match[2]])


def duration(text: str, option: str) -> float:
    """``30m`` in seconds.

    Args:
        text: A number and ``s``, ``m``, ``h`` or ``d``.
        option: That has it, for the message.

    Raises:
        ValueError: It is no time, or none at all.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text.strip())
    seconds = 0.0 if match is None else float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    if not seconds:
        raise ValueError(f"{option} {shown(text)} is no time: give a number above 0 with s, m, h, or d, such as 30m")
    return seconds


def shown_size(size: float) -> str:
    """Bytes in GiB, or in MiB below one; with its sign if it is a difference."""
    unit, name = (GIB, "GiB") if abs(size) >= GIB else (MIB, "MiB")
    return f"{size / unit:,.2f} {name}"


def shown_mib(size: float) -> str:
    """Bytes in MiB, for a column of figures."""
    return f"{size / MIB:,.2f} MiB"


def short_mib(size: float) -> str:
    """``12.3``: MiB without the unit; a decimal more for small ones, nothing for zero."""
    if not size:
        return ""
    digits = 1 if abs(size) >= MIB else min(4, 1 - math.floor(math.log10(abs(size) / MIB)))
    return f"{size / MIB:,.{digits}f}"


def decimal_size(size: float) -> str:
    """Bytes in GB or MB, as makers of memory and disks count."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def shown_duration(seconds: float) -> str:
    """A time in the unit that suits it, from milliseconds to days."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{float(f'{1000 * seconds:.3g}'):g} ms"
