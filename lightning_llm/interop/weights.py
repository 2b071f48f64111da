"""Folders of tensors, one tensor at a time: safetensors in one or several files, and pickles without code.

A safetensors file is 8 bytes with the length of a header, the header (JSON: dtype, shape and byte range of each
tensor), then the tensors. Several files come with an index of which tensor is in which file. This file writes them
without the library, which needs all tensors of a file at once and copies them.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_llm.checkpoints.archives import read_archive
from lightning_llm.io.atomic import write_json
from lightning_llm.io.schema import TEXT, by_name, open_record, validate
from lightning_llm.io.untrusted import MIB, check_regular, file_in, read_json, shown

SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX, PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
LARGEST_INDEX = 64 * MIB
DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}


class Outgoing(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: In the file.
        shape: Its shape.
        dtype: One of ``DTYPE_NAMES``.
        make: Makes it when it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(tensors: Sequence[Outgoing], folder: Path, max_shard_bytes: int) -> None:
    """Write tensors in order, into as few files as the limit allows.

    Args:
        tensors: All of them.
        folder: Existing folder.
        max_shard_bytes: Bytes of tensors in a file; a larger tensor has a file of its own.
    """
    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.size for t in shards[-1]) + tensor.size > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]
    for shard, name in zip(shards, names, strict=True):
        _write_file(shard, folder / name)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.size for tensor in tensors)}
        files = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": total, "weight_map": files})


def _write_file(tensors: Sequence[Outgoing], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers 4 rejects a file without it
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    words = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    words += b" " * (-len(words) % 8)  # so that tensors begin at a multiple of 8
    with path.open("xb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors:
            made = tensor.make().detach().cpu().contiguous()
            assert (tuple(made.shape), made.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(made.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: Its shape.
        dtype: As safetensors calls it.
        read: Reads it; the result may be a view of the whole file.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def stored_weights(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name, each read on request.

    Args:
        folder: With ``model.safetensors``, or several such files and their index, or ``pytorch_model.bin`` likewise.

    Raises:
        ValueError: There are none, a file is missing, truncated or damaged, or a pickle would have to run code.
    """
    found: dict[str, Stored] = {}
    for path in _files(folder):
        check_regular(path)
        for name, tensor in (_in_pickle if path.suffix == ".bin" else _in_safetensors)(path):
            if name in found:
                raise ValueError(f"{folder} has tensor {shown(name)} twice")
            found[name] = tensor
    return found


def _files(folder: Path) -> Iterator[Path]:
    for single, index in ((SINGLE, INDEX), (PICKLE, PICKLE_INDEX)):
        if file_in(folder, single).exists():
            return iter([folder / single])
        if file_in(folder, index).exists():
            return _listed(folder / index)
    raise ValueError(f"{folder} has no weights: there is neither {SINGLE} nor {INDEX} nor {PICKLE}")


def _listed(index: Path) -> Iterator[Path]:
    content = read_json(index, LARGEST_INDEX)
    validate(content, open_record({"weight_map": by_name(TEXT)}), index, "get it again")
    for name in sorted(set(content["weight_map"].values())):
        path = file_in(index.parent, name)
        if not path.exists():
            raise ValueError(f"{path} is missing, {index.name} names it: get all files")
        yield path


def _in_safetensors(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        source: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or damaged, or not safetensors ({error}): get it again") from error
    for name in source.keys():  # noqa: SIM118 - it cannot be iterated over
        tensor = source.get_slice(name)
        yield name, Stored(tuple(tensor.get_shape()), str(tensor.get_dtype()), partial(source.get_tensor, name))


def _in_pickle(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        content = read_archive(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{error}; get the model as safetensors") from error
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} contains something other than named tensors")
        yield name, Stored(tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.detach)
