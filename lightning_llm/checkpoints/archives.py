"""Archives of tensors, as ``torch.save`` writes them: written atomically, read without running code.

Reading always uses ``torch.load(weights_only=True)``: Lightning's default leaves that to an environment variable and,
for a URL, to the pickle (lightning/fabric/utilities/cloud_io.py).

A small file can cost hours or all memory: by parts that overlap, lists that contain each other, a tensor of 10^12
elements over one number. So the index is compared with the form that torch gives it, each operation of the pickle is
checked before it runs, and the values are counted. The list of names that a pickle may use is ours: it ignores what
``torch.serialization.add_safe_globals`` has added in this process.
"""

import os
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.io.atomic import atomic_file
from lightning_llm.io.untrusted import open_regular

Source = str | os.PathLike[str] | IO[bytes]
TENSORS = "/data/"  # in the names of the parts that hold tensors
BEGINNING, SUFFIXES = b"PK\3\4", (".ckpt", ".pt")  # of files that torch.save has written; names of checkpoints
FOLDER = 0x10  # MS-DOS's mark in the attributes of a part
BLOCK = 2**20  # bytes that are read at once

MOST_INDEX_BYTES = 2**24  # about 200,000 tensors
MOST_PICKLE_BYTES = 2**27  # a tokenizer.json of 128 MiB
MOST_OPERATIONS = 2_000_000  # 60,000 tensors
MOST_VALUES = 1_000_000
MOST_IN_TUPLE = 1000  # the key of a dict, which is hashed whole, may be a tuple
MOST_DEPTH = 100
MOST_VIEWS = 64  # bytes of all tensors for each byte of the file: tensors may share a storage

_ENTRY = re.compile(r"(\w[\w.-]*)/(data\.pkl|data/\d+|version|byteorder|\.[\w/]+)", re.ASCII)
_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
_ITEM_BYTES |= {"Char": 1, "Byte": 1, "Bool": 1}
_STORAGES = {f"torch {kind}Storage": size for kind, size in _ITEM_BYTES.items()} | {"torch.storage UntypedStorage": 1}
_CALLED = {"collections OrderedDict", "collections Counter", "builtins set", "torch Size", "torch device"}
_CALLED |= {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "_codecs encode"}  # encode: bytes
_CALLED.add("torch._utils _rebuild_tensor_v3")  # of dtypes without a storage of their own, such as uint16
_CONSTANTS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_CONSTANTS |= {"SHORT_BINSTRING", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_INTO_THE_TOP = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class Rejected(Exception):
    """A file is complete, but its content is not safe to load."""


# ---- writing and reading


def write_atomically(content: object, path: str | os.PathLike[str]) -> None:
    """``torch.save`` to a temporary name in the same folder, then rename.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the file at ``path`` is unchanged.
    """
    try:
        with atomic_file(Path(path), durable=True) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as a RuntimeError of its zip writer, with the cause only in the text or context
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if not isinstance(cause, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        number, reason = (cause.errno, cause.strerror) if isinstance(cause, OSError) else (None, None)
        message = f"cannot save the checkpoint: {reason or 'the disk is full'}; earlier checkpoints are untouched"
        raise OSError(number, message, str(path)) from error


def read_archive(
    source: Source, map_location: Any | None = None, *, mmap: bool = False, of_tensors: bool = True
) -> dict[str, Any]:
    """The content of a file, without executing anything in it.

    Args:
        source: A path or an open file.
        map_location: Where tensors go, as in ``torch.load``; default: host memory.
        mmap: Leave the tensors in the file until they are used.
        of_tensors: Compare the checksums of the tensors too. False if no tensor will be used.

    Raises:
        ValueError: The file does not exist, is truncated, is not a checkpoint, or holds code.
    """
    name = str(source) if isinstance(source, str | os.PathLike) else "the given file"
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true"):
        raise ValueError("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set and would run code from checkpoints: unset it")
    if isinstance(source, str | os.PathLike) and not Path(source).is_file():  # a pipe or device would never end
        raise ValueError(f"checkpoint {name} {'is not a file' if Path(source).exists() else 'does not exist'}")
    try:
        _check_archive(source, of_tensors)
        content = torch.load(source, map_location=map_location or "cpu", weights_only=True, mmap=mmap)
        with _opened(source) as file:
            check_values(content, file.seek(0, os.SEEK_END))
    except Rejected as error:
        raise ValueError(f"checkpoint {name} is rejected: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch builds what the pickle says: a view beyond its storage, a dict without an item
        if not _may_have_been_one(source):
            raise ValueError(f"{name} is not a checkpoint: give one that lightning-llm fit has saved") from error
        problem = "is truncated or damaged, or not a checkpoint: use an earlier one"
        raise ValueError(f"checkpoint {name} {problem}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a checkpoint: it holds a {type(content).__name__}")
    return content


def _may_have_been_one(source: Source) -> bool:
    if isinstance(source, str | os.PathLike) and Path(source).suffix in SUFFIXES:
        return True
    with _opened(source) as file:
        return file.read(len(BEGINNING)) in (BEGINNING, b"")


def is_whole_file(path: str | os.PathLike[str]) -> bool:
    """Whether every part of a file matches its checksum and torch can open it.

    The checksums take about 1 s per GB. Opening reads no tensor and takes milliseconds. A file that holds code, or
    absurd sizes, counts as whole; ``read_archive`` rejects it.
    """
    try:
        if not Path(path).is_file():
            return False
        _check_archive(path)
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Rejected:
        return True
    except Exception:  # whatever the reader makes of a damaged index: no step can be read from such a file
        return False
    return True


def _check_archive(source: Source, of_tensors: bool = True) -> None:
    """Check the index, the checksum of every part, and the pickle.

    A truncated file lacks the index, which is at the end. torch itself does not detect flipped bits, so the checksums
    are compared here. torch compresses nothing. It reads by the compressed size, and treats a part with the mark of a
    folder as empty; zipfile ignores both.

    Raises:
        Rejected: See :func:`check_pickle`.
        Exception: The file is truncated or damaged: whatever zipfile makes of it.
    """
    with _opened(source) as file, open_index(file) as archive:
        for entry in archive.infolist():
            is_stored = (entry.compress_type, entry.compress_size) == (zipfile.ZIP_STORED, entry.file_size)
            if not is_stored or entry.external_attr & FOLDER:
                raise zipfile.BadZipFile("a compressed part, or a folder")
            with archive.open(entry) as part:
                while (of_tensors or TENSORS not in entry.filename) and part.read(BLOCK):
                    pass
        check_pickle(archive)


@contextmanager
def _opened(source: Source) -> Iterator[IO[bytes]]:
    if isinstance(source, str | os.PathLike):
        with open_regular(source) as file:
            yield file
        return
    position = source.tell()
    try:
        yield source
    finally:
        source.seek(position)


# ---- limits


def open_index(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a file that has the form that ``torch.save`` gives it.

    Raises:
        zipfile.BadZipFile: It has another form: data after or before the index, parts with unknown or repeated names,
            parts that together are larger than the file, an oversized index.
    """
    start = file.read(len(BEGINNING))
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 98))
    tail = file.read()  # the end of the index: a record and a pointer of 64-bit archives (76 bytes), one of all (22)
    if start != BEGINNING or tail[-22:-18] != b"PK\5\6":
        raise zipfile.BadZipFile("not an archive, or truncated")
    size, first = struct.unpack("<LL", tail[-10:-2])
    is_long = tail[-42:-38] == b"PK\6\7"
    if is_long:
        size, first = struct.unpack("<QQ", tail[-58:-42])
    if first + size + (98 if is_long else 22) != end or size > MOST_INDEX_BYTES:
        raise zipfile.BadZipFile("an index of another size")
    archive = zipfile.ZipFile(file)
    parts = archive.infolist()
    names = [_ENTRY.fullmatch(part.orig_filename) for part in parts]
    known = {name[0].lower() for name in names if name}  # torch's reader ignores case
    if len(known) < len(parts) or len({name[1] for name in names if name}) != 1:
        raise zipfile.BadZipFile("parts with other names")
    if sum(part.file_size for part in parts) > end:
        raise zipfile.BadZipFile("parts that overlap")
    return archive


def check_pickle(archive: zipfile.ZipFile) -> None:
    """Check each operation of an archive's pickle without running it.

    Raises:
        Rejected: It calls something other than torch's own constructors, claims more bytes than a tensor's part has,
            or would expand without bounds.
    """
    parts = {part.filename.partition("/")[2]: part for part in archive.infolist()}
    sizes = {name: part.file_size for name, part in parts.items()}
    if sizes["data.pkl"] > MOST_PICKLE_BYTES:
        raise Rejected(f"its values other than tensors take more than {MOST_PICKLE_BYTES} bytes")
    try:
        _check_operations(archive.read(parts["data.pkl"]), sizes)
    except (IndexError, KeyError, ValueError) as error:
        raise Rejected("its pickle is not one that torch writes") from error


class _Item(NamedTuple):
    """What is known of a value without making it. Lists and dicts count as one: their content may change later."""

    size: int = 1
    depth: int = 0
    value: Any = None  # of numbers, strings, tuples; of an imported name, the name itself


class _Name(str):
    """The name of an object that the pickle imports."""


def _check_operations(content: bytes, sizes: Mapping[str, int]) -> None:
    stack: list[_Item] = []
    marked: list[list[_Item]] = []
    memo: dict[Any, _Item] = {}
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        name = operation.name
        if number > MOST_OPERATIONS:
            raise Rejected(f"its pickle has more than {MOST_OPERATIONS} operations")
        if name in _CONSTANTS:
            stack.append(_Item(value=() if name == "EMPTY_TUPLE" else argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, marked.pop()
            if name == "TUPLE":
                stack.append(_tuple_of(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [_tuple_of(stack[-count:])]
        elif name in _INTO_THE_TOP:
            del stack[-_INTO_THE_TOP[name] :]
        elif name == "GLOBAL":
            stack.append(_Item(value=_allowed(argument)))
        elif name == "BINPERSID":
            _check_storage(stack.pop().value, sizes)
            stack.append(_Item())
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop().value
            if not isinstance(called, _Name) or called not in _CALLED:
                raise Rejected(f"its pickle calls {called}")
            if called == "_codecs encode" and arguments.value[1:] != ("latin1",):
                raise Rejected("its pickle calls _codecs encode with another encoding than latin1")
            stack.append(_Item(arguments.size, arguments.depth))
        elif name not in ("PROTO", "STOP"):
            raise Rejected(f"its pickle has the operation {name}, which torch does not write")


def _tuple_of(items: list[_Item]) -> _Item:
    size, depth = 1 + sum(item.size for item in items), 1 + max((item.depth for item in items), default=0)
    if size > MOST_IN_TUPLE or depth > MOST_DEPTH:
        raise Rejected(f"it holds a tuple of more than {MOST_IN_TUPLE} values, or {MOST_DEPTH} deep")
    return _Item(size, depth, tuple(item.value for item in items))


def _allowed(argument: Any) -> _Name:
    name = _Name(argument.replace("__builtin__ ", "builtins "))  # as Python 2 had it, and pickles of protocol 2 do
    module, _, last = name.rpartition(" ")
    kind = getattr(torch, last, None) if module == "torch" else None
    is_dtype = isinstance(kind, torch.dtype) and not kind.is_complex and not last.startswith("q")
    if name not in _CALLED and name not in _STORAGES and not is_dtype:
        made = f"objects that only running its code could make ({last[:60]} of {module[:60]})"
        raise Rejected(f"it holds {made}; nothing in it was executed")
    return name


def _check_storage(identity: Any, sizes: Mapping[str, int]) -> None:
    word, kind, key, _, count = identity
    if word != "storage" or not isinstance(kind, _Name) or kind not in _STORAGES or not isinstance(count, int):
        raise Rejected("its pickle refers to something other than tensors")
    if f"data/{key}" not in sizes:
        raise zipfile.BadZipFile("a part is missing")
    if sizes[f"data/{key}"] != count * _STORAGES[kind]:
        raise Rejected(f"tensor data {str(key)[:60]} has {sizes[f'data/{key}']} bytes, not {count} numbers")


def check_values(content: object, file_bytes: int) -> None:
    """Count the values in a file, each as often as it is referred to.

    Raises:
        Rejected: It holds something other than plain values and tensors, more of them than a run saves, or tensors
            that are larger than their part of the file.
    """
    todo, seen, total = [(content, 0)], 0, 0
    while todo:
        value, depth = todo.pop()
        seen += 1
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            total += size
            if size > value.untyped_storage().nbytes() or total > MOST_VIEWS * file_bytes or value._backward_hooks:
                raise Rejected(f"a tensor of shape {tuple(value.shape)} is larger than its data in the file")
        elif isinstance(value, dict):
            if type(value) is OrderedDict and vars(value).keys() - {"_metadata"}:  # as of nn.Module.state_dict
                raise Rejected("it holds a dict with attributes")
            todo += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple | set):
            todo += [(each, depth + 1) for each in value]
        elif isinstance(value, str | bytes):
            seen += len(value) // 1000
        elif not isinstance(value, _PLAIN):
            raise Rejected(f"it holds {type(value).__name__}, which is not a plain value")
        if seen + len(todo) > MOST_VALUES or depth > MOST_DEPTH:
            raise Rejected(f"it holds more than {MOST_VALUES} values, or {MOST_DEPTH} inside one another")
