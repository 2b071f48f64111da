"""A checkpoint as a folder: each process writes its own rows of every sharded tensor, and any process can read all.

    step-00000500.ckpt/checkpoint.pt     everything but shards: progress, schedules, callbacks, hyperparameters
    step-00000500.ckpt/shard-00000.pt    the rows of process 0: {name: {"start": first row, "rows": tensor}}
    step-00000500.ckpt/shard-00001.pt    the rows of process 1

In place of each sharded tensor, ``checkpoint.pt`` has ``{"__shards__": name, "shape": …}``. Put together, the content
has the same names as a checkpoint in one file. So it loads into any number of processes, sharded or not.

``torch.distributed.checkpoint`` is not used: its ``.metadata`` is a pickle that is read with ``pickle.load``
(torch/distributed/checkpoint/filesystem.py), which runs any code in it.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.checkpoints.archives import is_intact_file, read_archive, write_atomically
from lightning_llm.checkpoints.schema import COUNT, TENSOR, mapping
from lightning_llm.io.atomic import flush_folder, remove_path, replace_path
from lightning_llm.io.schema import TEXT, list_of, open_record, validate
from lightning_llm.io.untrusted import shown

MAIN = "checkpoint.pt"
MARK, PROCESSES = "__shards__", "__processes__"
SHARDED = open_record({MARK: TEXT, "shape": list_of(COUNT)})
SHARD = mapping(TEXT, open_record({"start": COUNT, "rows": TENSOR}))
Shard = dict[str, dict[str, Any]]
Agree = Callable[[bool], bool]


class LazyShardedTensor:
    """A tensor in one or several files, of which only the rows that are asked for are read.

    Args:
        shape: Of the whole.
        pieces: First row and rows of each part, in order.
    """

    def __init__(self, shape: tuple[int, ...], pieces: list[tuple[int, Tensor]]) -> None:
        self.shape = shape
        self.pieces = pieces

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of each element."""
        return self.pieces[0][1].dtype

    def between(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` up to ``stop``, (stop - start, …)."""
        parts = [
            piece[max(0, start - first) : max(0, stop - first)]
            for first, piece in self.pieces
            if first < stop and start < first + piece.shape[0]
        ]
        return torch.cat(parts) if parts else self.pieces[0][1].new_empty((0, *self.shape[1:]))

    def whole(self) -> Tensor:
        """The rows of all pieces as one tensor."""
        return self.between(0, self.shape[0])


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint in this form, even a damaged one."""
    return path.is_dir() and (path.suffix == ".ckpt" or (path / MAIN).is_file())


def main_file(path: Path) -> Path:
    """The file of a folder that has everything but shards."""
    return _no_link(path / MAIN)


def split(content: Any, shards: Shard, name: str = "") -> Any:
    """``content`` with a mark in place of each ``DTensor``, whose local rows are added to ``shards``."""
    if hasattr(content, "to_local"):
        start, rows = local_rows(content)
        shards[name] = {"start": start, "rows": rows}
        return {MARK: name, "shape": list(content.shape)}
    if isinstance(content, dict):
        return {key: split(value, shards, f"{name}/{key}" if name else str(key)) for key, value in content.items()}
    if isinstance(content, list | tuple):
        parts = (split(value, shards, f"{name}/{number}") for number, value in enumerate(content))
        return list(parts) if isinstance(content, list) else tuple(parts)
    return content


def local_rows(tensor: Any) -> tuple[int, Tensor]:
    """The first row that this process has of a tensor sharded by rows (``DTensor``), and its rows."""
    rows: Tensor = tensor.detach().to_local()
    (placement,) = tensor.placements
    assert placement.is_shard(dim=0), placement
    each = -(-tensor.shape[0] // tensor.device_mesh.size())  # as torch.chunk cuts
    start = min(tensor.shape[0], each * tensor.device_mesh.get_local_rank())
    assert rows.shape[0] == min(each, tensor.shape[0] - start)
    return start, rows


def write_sharded(
    content: dict[str, Any], shards: Shard, path: Path, *, process: int, processes: int, agree: Agree
) -> None:
    """Write a checkpoint together with the other processes; it appears once all are done, or not at all.

    Args:
        content: The content that :func:`split` returned; the first process writes it.
        shards: Of this process.
        path: The folder.
        process: Rank of this process.
        processes: Number of processes.
        agree: Called three times by each process with whether it failed; returns whether any did.

    Raises:
        OSError: Writing failed here or in another process; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")

    def begin() -> None:
        remove_path(temporary)
        temporary.mkdir(parents=True)

    def write() -> None:
        if not temporary.is_dir():
            raise OSError(None, "cannot save the checkpoint: not all hosts share this folder", str(path.parent))
        write_atomically(shards, temporary / _shard(process))
        if process == 0:
            write_atomically({**content, PROCESSES: processes}, temporary / MAIN)

    def finish() -> None:
        flush_folder(temporary)
        replace_path(temporary, path)

    for action, is_mine in ((begin, process == 0), (write, True), (finish, process == 0)):
        failure: OSError | None = None
        try:
            if is_mine:
                action()
        except OSError as error:
            failure = error
        if agree(failure is not None):
            if process == 0:
                with suppress(OSError):
                    remove_path(temporary)
            first = failure or OSError("cannot save the checkpoint: another process failed to write its part")
            raise OSError(first.errno, first.strerror or str(first), str(path)) from failure


def read_sharded(path: Path, map_location: Any | None = None, *, mmap: bool = False) -> dict[str, Any]:
    """The content of a folder, in the form of a checkpoint in one file.

    Args:
        path: The folder.
        map_location: Where tensors go.
        mmap: Leave the shards in their files; sharded tensors become :class:`LazyShardedTensor`.

    Raises:
        ValueError: A file is missing or damaged; the message names it.
    """
    main = read_archive(main_file(path), map_location, mmap=mmap)
    files = _shard_files(path, main.pop(PROCESSES, 1))
    shards = [read_archive(file, map_location, mmap=True) for file in files]
    for number, shard in enumerate(shards):
        validate({_shard(number): shard}, mapping(TEXT, SHARD), f"checkpoint {path}")
    cache: dict[tuple[Any, ...], Tensor] = {}  # a weight that two modules share stays one

    def tensor(mark: dict[str, Any]) -> LazyShardedTensor | Tensor:
        validate(mark, SHARDED, f"checkpoint {path}: a sharded tensor")
        name = mark[MARK]
        shape = tuple(mark["shape"])
        rows = LazyShardedTensor(shape, [(its["start"], its["rows"]) for shard in shards if (its := shard.get(name))])
        if not _is_gapless(rows):
            raise ValueError(f"checkpoint {path} lacks rows of {name[:60]}: use an earlier one")
        if mmap:
            return rows
        key = (shape, rows.dtype, *(piece.data_ptr() for _, piece in rows.pieces))
        if key not in cache:
            cache[key] = rows.whole()
        return cache[key]

    def put_together(part: Any) -> Any:
        if isinstance(part, dict):
            return tensor(part) if MARK in part else {key: put_together(value) for key, value in part.items()}
        return type(part)(map(put_together, part)) if isinstance(part, list | tuple) else part

    return dict(put_together(main))


def is_intact_folder(path: Path) -> bool:
    """Whether every file of a checkpoint is there and whole."""
    try:
        files = _shard_files(path, read_archive(main_file(path), mmap=True).get(PROCESSES, 1))
    except ValueError:
        return False
    return all(map(is_intact_file, files))


def _is_gapless(rows: LazyShardedTensor) -> bool:
    """Whether the pieces are all rows of a tensor, in order, each once."""
    end = 0
    for start, piece in rows.pieces:
        form = piece.ndim, tuple(piece.shape[1:]), piece.dtype
        if start != end or form != (len(rows.shape), rows.shape[1:], rows.dtype):
            return False
        end += piece.shape[0]
    return rows.shape[:1] == (end,) and bool(rows.pieces)


def _shard(process: int) -> str:
    return f"shard-{process:05d}.pt"


def _shard_files(path: Path, processes: Any) -> list[Path]:
    """The files of the shards."""
    there = sum(1 for _ in path.iterdir())
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"checkpoint {path}: {PROCESSES} is {shown(processes)}, expected a whole number of shards")
    files = [path / _shard(process) for process in range(min(processes, there + 1))]  # one that is missing is enough
    return [_no_link(file) for file in files]


def _no_link(file: Path) -> Path:
    """Reject a link: it could lead to another folder."""
    if file.is_symlink():
        raise ValueError(f"checkpoint {file.parent} is rejected: {file.name} is a link")
    return file
