"""What a file of tensors may be, decided before and right after torch reads it: what ``torch.save`` writes, no more.

A small file may cost hours or all memory: by parts that overlap, lists that hold each other, tensors of 10^12 elements
over one number. So the index is compared with the form that torch gives it, each operation of the pickle is looked at
before it runs, and the values are counted. The list of names that a pickle may use is ours: what
``torch.serialization.add_safe_globals`` has added in this process is not in it.
"""

import os
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

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
_CALLED = {
    "collections OrderedDict",
    "collections Counter",
    "builtins set",
    "torch Size",
    "torch device",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",  # of dtypes without a storage of their own, such as uint16
    "torch._utils _rebuild_parameter",
    "_codecs encode",  # bytes
}
_CONSTANTS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_CONSTANTS |= {"SHORT_BINSTRING", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_INTO_THE_TOP = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class Refused(ValueError):
    """A file that is whole, and is not read all the same."""


class _Item(NamedTuple):
    """What is known of a value without making it. Lists and dicts count as one: what is in them may change later."""

    size: int = 1
    depth: int = 0
    value: Any = None  # of numbers, texts, tuples; of a name, the name itself


class _Name(str):
    """Of something to import."""


def open_index(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a file of the form that ``torch.save`` gives it, at its beginning.

    Raises:
        zipfile.BadZipFile: It has another form: more behind or before the index, names of other parts or twice the
            same, parts that together are larger than the file, an index that is out of all proportion.
    """
    start = file.read(4)
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 98))
    tail = file.read()  # the end of the index: a record and a pointer of 64-bit archives (76 bytes), one of all (22)
    if start != b"PK\3\4" or tail[-22:-18] != b"PK\5\6":
        raise zipfile.BadZipFile("no archive, or cut short")
    size, first = struct.unpack("<LL", tail[-10:-2])
    is_long = tail[-42:-38] == b"PK\6\7"
    if is_long:
        size, first = struct.unpack("<QQ", tail[-58:-42])
    if first + size + (98 if is_long else 22) != end or size > MOST_INDEX_BYTES:
        raise zipfile.BadZipFile("an index of another size")
    archive = zipfile.ZipFile(file)
    parts = archive.infolist()
    names = [_ENTRY.fullmatch(part.orig_filename) for part in parts]
    known = {name[0].lower() for name in names if name}  # torch's reader takes no notice of case
    if len(known) < len(parts) or len({name[1] for name in names if name}) != 1:
        raise zipfile.BadZipFile("parts with other names")
    if sum(part.file_size for part in parts) > end:
        raise zipfile.BadZipFile("parts that overlap")
    return archive


def check_pickle(archive: zipfile.ZipFile) -> None:
    """Look at each operation of an archive's pickle without running it.

    Raises:
        Refused: It names what only running code could make, or more bytes than a tensor's part has, or is a bomb.
    """
    parts = {part.filename.partition("/")[2]: part for part in archive.infolist()}
    if "data.pkl" not in parts:
        raise zipfile.BadZipFile("without values")
    if parts["data.pkl"].file_size > MOST_PICKLE_BYTES:
        raise Refused(f"its values beside tensors take more than {MOST_PICKLE_BYTES} bytes")
    try:
        _walk(archive.read(parts["data.pkl"]), {name: part.file_size for name, part in parts.items()})
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused("its pickle is not one that torch writes") from error


def _walk(content: bytes, sizes: Mapping[str, int]) -> None:
    stack: list[_Item] = []
    marked: list[list[_Item]] = []
    memo: dict[Any, _Item] = {}
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        name = operation.name
        if number > MOST_OPERATIONS:
            raise Refused(f"its pickle has more than {MOST_OPERATIONS} operations")
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
        elif name in _TUPLES:
            count = _TUPLES[name]
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
                raise Refused(f"its pickle calls {called}")
            if called == "_codecs encode" and arguments.value[1:] != ("latin1",):
                raise Refused("its pickle calls _codecs encode with another encoding than latin1")
            stack.append(_Item(arguments.size, arguments.depth))
        elif name not in ("PROTO", "STOP"):
            raise Refused(f"its pickle has the operation {name}, which torch does not write")


def _tuple_of(items: list[_Item]) -> _Item:
    size, depth = 1 + sum(item.size for item in items), 1 + max((item.depth for item in items), default=0)
    if size > MOST_IN_TUPLE or depth > MOST_DEPTH:
        raise Refused(f"it holds a tuple of more than {MOST_IN_TUPLE} values, or {MOST_DEPTH} deep")
    return _Item(size, depth, tuple(item.value for item in items))


def _allowed(argument: Any) -> _Name:
    name = _Name(argument.replace("__builtin__ ", "builtins "))  # as Python 2 had it, and pickles of protocol 2 do
    module, _, last = name.rpartition(" ")
    kind = getattr(torch, last, None) if module == "torch" else None
    is_dtype = isinstance(kind, torch.dtype) and not kind.is_complex and not last.startswith("q")
    if name not in _CALLED and name not in _STORAGES and not is_dtype:
        raise Refused(
            f"it holds objects that only running its code could make ({last[:60]} of {module[:60]}); "
            "nothing in it was executed"
        )
    return name


def _check_storage(identity: Any, sizes: Mapping[str, int]) -> None:
    word, kind, key, _, count = identity
    if word != "storage" or not isinstance(kind, _Name) or kind not in _STORAGES or not isinstance(count, int):
        raise Refused("its pickle refers to something else than tensors")
    if f"data/{key}" not in sizes:
        raise zipfile.BadZipFile("a part is missing")
    if sizes[f"data/{key}"] != count * _STORAGES[kind]:
        raise Refused(f"tensor data {str(key)[:60]} is of {sizes[f'data/{key}']} bytes, not of {count} numbers")


def check_values(content: object, file_bytes: int) -> None:
    """Count what a file holds, each part as often as it is referred to.

    Raises:
        Refused: It holds something else than plain values and tensors, more of them than a run saves, or tensors that
            are larger than their part of the file.
    """
    todo, seen, total = [(content, 0)], 0, 0
    while todo:
        value, depth = todo.pop()
        seen += 1
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            total += size
            if size > value.untyped_storage().nbytes() or total > MOST_VIEWS * file_bytes or value._backward_hooks:
                raise Refused(f"a tensor of shape {tuple(value.shape)} is larger than what the file holds of it")
        elif isinstance(value, dict):
            if type(value) is OrderedDict and vars(value).keys() - {"_metadata"}:  # as of nn.Module.state_dict
                raise Refused("it holds a dict with attributes")
            todo += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple | set):
            todo += [(each, depth + 1) for each in value]
        elif isinstance(value, str | bytes):
            seen += len(value) // 1000
        elif not isinstance(value, _PLAIN):
            raise Refused(f"it holds {type(value).__name__}, which is no plain value")
        if seen + len(todo) > MOST_VALUES or depth > MOST_DEPTH:
            raise Refused(f"it holds more than {MOST_VALUES} values, or {MOST_DEPTH} inside one another")
