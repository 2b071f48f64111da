"""Git commands and their output. None of them uses the network or runs one of the user's hooks."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_llm.io.untrusted import printable, shown

TIMEOUT_S = 1800  # of one git command: a large repository on a slow network file system
GITLINK = "160000"

_SAFE = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.splitIndex": "false",  # its shared part would be written into the user's .git
    "core.untrackedCache": "false",
    "core.safecrlf": "false",
    "core.quotePath": "false",
    "core.looseCompression": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "advice.addEmbeddedRepo": "false",
}
_ISOLATED = {  # without the user's configuration, and with commits that depend on nothing but their tree
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": os.devnull,  # git before 2.32 does not know GIT_CONFIG_GLOBAL
    "XDG_CONFIG_HOME": os.devnull,
    **{f"GIT_{role}_NAME": "lightning-llm" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_DATE": "2000-01-01T00:00:00Z" for role in ("AUTHOR", "COMMITTER")},
}
_KEPT = re.compile(r"GIT_(CONFIG_.*|EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM)")


class GitError(ValueError):
    """A git command failed. The message is one line.

    Attributes:
        status: Its exit status; ``None``: it did not end by itself.
        output: What it printed on standard output.
    """

    def __init__(self, message: str, status: int | None = None, output: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.output = output


def git(
    folder: Path,
    *words: str,
    environment: Mapping[str, str] = {},
    config: Mapping[str, str] = {},
    given: bytes = b"",
    is_isolated: bool = False,
) -> bytes:
    """The output of a git command in a folder.

    Args:
        folder: The folder that it starts in.
        words: The command.
        environment: Variables besides those of this process. Git's own are not inherited.
        config: Settings that override all others.
        given: Its standard input.
        is_isolated: Whether it runs without the user's configuration.

    Raises:
        GitError: The command failed, or did not start.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or _KEPT.match(name)}
    if is_isolated:
        inherited = {name: value for name, value in inherited.items() if not name.startswith("GIT_CONFIG_")} | _ISOLATED
    fixed = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
    fixed |= {"GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C", "LANGUAGE": ""}
    options = [word for name, value in {**_SAFE, **config}.items() for word in ("-c", f"{name}={value}")]
    command = ["git", "-C", str(folder), *options, *words]
    try:
        process = subprocess.run(
            command, env={**inherited, **fixed, **environment}, input=given, capture_output=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH: install it to compare revisions") from None
    except OSError as error:
        raise GitError(f"git {words[0]} did not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {words[0]} took more than {TIMEOUT_S} s in {folder}") from None
    if process.returncode:
        lines = os.fsdecode(process.stderr).splitlines()
        text = "; ".join(line for line in lines if not line.startswith(("hint:", "warning:")))
        problem = f"git {words[0]} failed in {folder}: {printable(text)[:400] or process.returncode}"
        raise GitError(problem, process.returncode, process.stdout)
    return process.stdout


def text_of(output: bytes) -> str:
    """The text of an output of one line."""
    return os.fsdecode(output.removesuffix(b"\n"))


def names_in(output: bytes) -> list[str]:
    """The names in an output of ``-z``. Bytes that are not UTF-8 become surrogates."""
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def folders_of(paths: Iterable[str]) -> set[str]:
    """All folders above these relative paths."""
    found = set[str]()
    for path in paths:
        parent = os.path.dirname(path)
        while parent and parent not in found:
            found.add(parent)
            parent = os.path.dirname(parent)
    return found


def joined(names: Iterable[str]) -> bytes:
    """Names as the input of a command with ``-z``: the reverse of :func:`names_in`."""
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def listed(names: Sequence[str]) -> str:
    """Up to three names, for a message."""
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return printable(", ".join(names[:3])).replace("\n", r"\n") + more


def filters_of(folder: Path, environment: Mapping[str, str] = {}) -> list[str]:
    """The names of the filters that the configuration of a repository has programs for."""
    pattern = r"^filter\..*\.(clean|smudge|process)$"
    try:
        keys = names_in(git(folder, "config", "-z", "--name-only", "--get-regexp", pattern, environment=environment))
    except GitError:  # none
        return []
    return sorted({key.removeprefix("filter.").rpartition(".")[0] for key in keys})


def switched_off(filters: Iterable[str]) -> dict[str, str]:
    """The settings that switch filters off.

    Raises:
        ValueError: The name of a filter has a ``=``.
    """
    for name in filters:
        if "=" in name:  # git -c would read another key
            raise ValueError(f"the git filter {shown(name)} has a = in its name: rename it in your git configuration")
    switches = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {f"filter.{name}.{key}": value for name in filters for key, value in switches.items()}


def gitlinks_in(stages: bytes) -> dict[str, str]:
    """Path and commit of the submodules in an output of ``ls-files --stage``."""
    lines = [line.partition("\t") for line in names_in(stages) if line.startswith(GITLINK)]
    return {path: facts.split()[1] for facts, _, path in lines}


def alternate(objects: Path) -> str:
    """The entry of a folder of objects in a file of alternates, which lists the folders that a repository borrows."""
    text = str(objects)
    if not re.search(r'[:\n"\\]', text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def path_of(entry: str) -> str:
    """The path of an entry that :func:`alternate` returned."""
    if not entry.startswith('"'):
        return entry
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], entry[1:-1])
