"""What the pickle of a checkpoint may do, checked before it runs, and what may come of it, checked afterwards.

A small pickle can cost hours or all memory: by lists that contain each other, a tensor of 10^12 elements over one
number, one text that is encoded a thousand times. So each operation is checked: what it is applied to, and how much
work it makes. Then the values are counted. Their types are exact: an attribute of a dict could hide its content. The
list of names that a pickle may use is ours: it ignores what ``torch.serialization.add_safe_globals`` has added in this
process.
"""

import pickletools
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_llm.io.untrusted import shown

MOST_PICKLE_BYTES = 2**26  # a tokenizer.json of 48 MiB; in memory, a character takes up to four bytes
MOST_OPERATIONS = 1_250_000  # 35,000 tensors
MOST_WORK = 2**27  # bytes that the operations hash or copy, in total
TENSOR_WORK = 3500  # of making one: as long as copying this many bytes
EMPTY_WORK = 300  # of making a list or dict
ITEM_WORK = 128  # of a value in a set or a Counter
ODD_KEY_WORK = 20_000  # of other keys than text and small numbers: thousands of these may have one hash
MOST_VALUES = 500_000
MOST_DEPTH = 100
MOST_VIEWS = 64  # bytes of all tensors for each byte of the file: tensors may share a storage

_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
_ITEM_BYTES |= {"Char": 1, "Byte": 1, "Bool": 1}
_STORAGES = {f"torch {kind}Storage": size for kind, size in _ITEM_BYTES.items()} | {"torch.storage UntypedStorage": 1}
_SMALL, _STORAGE = "a small number", "a storage"  # kinds of values besides types
_EASY_KEYS = (str, _SMALL)
# What a pickle may call: the kinds of the first arguments, the most arguments, the kind that is made
_CALLED: dict[str, tuple[list[Any], int, Any]] = {
    "collections OrderedDict": ([], 0, OrderedDict),
    "collections Counter": ([dict], 1, Counter),
    "builtins set": ([list], 1, set),
    "torch Size": ([tuple], 1, None),
    "torch device": ([str], 2, None),
    "_codecs encode": ([str, str], 2, None),  # bytes
    "torch._utils _rebuild_tensor_v2": ([_STORAGE], 7, Tensor),
    "torch._utils _rebuild_tensor_v3": ([_STORAGE], 8, Tensor),  # of dtypes without storage, such as uint16
    "torch._utils _rebuild_parameter": ([Tensor], 3, Tensor),
}
_CONSTANTS: dict[str, Any] = dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"), _SMALL)
_CONSTANTS |= {"LONG1": int, "BINFLOAT": float, "BINUNICODE": str, "SHORT_BINSTRING": bytes}
_CONSTANTS |= {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
# operations on several values: how many; None: all since the mark
_TAKEN: dict[str, int | None] = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": None}
_TAKEN |= {"SETITEM": 2, "SETITEMS": None, "BUILD": 1}
_CHANGED = {"APPEND": (list,), "SETITEM": (dict, OrderedDict), "BUILD": (OrderedDict,)}  # the kinds they apply to
# those that torch writes
_NAMES = {*_CONSTANTS, *_TAKEN, "PROTO", "STOP", "MARK", "GLOBAL", "BINPERSID", "REDUCE"}
_NAMES |= {"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
_PLAIN = {bool, int, float, torch.dtype, torch.device, type(None)}


class Rejected(Exception):
    """A file is complete, but its content is not safe to load."""


class _Item:
    """What is known of a value without making it.

    Args:
        kind: What it is, where that matters: a type, ``_SMALL`` or ``_STORAGE``.
        value: Of a number, a text or an imported name; of a tuple, its items.
        work: Bytes to hash or copy, of the value or, once it is a set or a Counter, of what it contains.
        depth: Of a tuple.
    """

    __slots__ = ("depth", "kind", "value", "work")

    def __init__(self, kind: Any = None, value: Any = None, work: int = 1, depth: int = 0) -> None:
        self.kind, self.value, self.work, self.depth = kind, value, work, depth


class _Name(str):
    """The name of an object that the pickle imports."""


def check_pickle(content: bytes, sizes: Mapping[str, int]) -> None:
    """Check each operation of a pickle without running it.

    Args:
        content: The pickle.
        sizes: Bytes of each part of its archive, by name.

    Raises:
        Rejected: It calls something other than torch's own constructors, claims more bytes than a tensor's part has,
            or would expand without bounds.
    """
    if len(content) > MOST_PICKLE_BYTES:
        raise Rejected(f"its values other than tensors take more than {MOST_PICKLE_BYTES} bytes")
    try:
        _check_operations(content, sizes)
    except (IndexError, KeyError, ValueError) as error:
        raise Rejected("its pickle is not one that torch writes") from error


def _check_operations(content: bytes, sizes: Mapping[str, int]) -> None:
    stack: list[_Item] = []
    marked: list[list[_Item]] = []
    memo: dict[Any, _Item] = {}
    numbers: dict[Any, _Item] = {}
    work = 0
    argument: Any
    for number, (operation, argument, _) in enumerate(pickletools.genops(content), start=1):
        name = operation.name
        kind = _CONSTANTS.get(name)
        if name not in _NAMES:
            raise ValueError(f"torch does not write {name}")
        if number > MOST_OPERATIONS or work > MOST_WORK:
            raise Rejected(f"its pickle has more than {MOST_OPERATIONS} operations, or they take too much work")
        if name == "BINPUT" or name == "LONG_BINPUT":
            memo[argument] = stack[-1]
        elif kind is _SMALL:
            stack.append(numbers.get(argument) or numbers.setdefault(argument, _Item(kind, argument)))
        elif kind:
            stack.append(_Item(kind, argument, len(argument) if kind is str or kind is bytes else 1))
            work += EMPTY_WORK if kind is list or kind is dict else 0
        elif name == "BINGET" or name == "LONG_BINGET":
            stack.append(memo[argument])
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in _TAKEN:
            if count := _TAKEN[name]:
                items = stack[-count:]
                del stack[-count:]
            else:
                items, stack = stack, marked.pop()
            if name.startswith("TUPLE"):
                stack.append(_tuple_of(items))
            else:
                work += _put_into(stack[-1], name, items)
        elif name == "GLOBAL":
            stack.append(_Item(value=_allowed(argument)))
        elif name == "BINPERSID":
            _check_storage(stack.pop(), sizes)
            stack.append(_Item(_STORAGE))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop().value
            stack.append(_made_by(called, arguments))
            work += stack[-1].work + (TENSOR_WORK if stack[-1].kind is Tensor else EMPTY_WORK)


def _tuple_of(items: list[_Item]) -> _Item:
    depth = 1 + max([item.depth for item in items], default=0)
    if depth > MOST_DEPTH:
        raise Rejected(f"it holds tuples more than {MOST_DEPTH} inside one another")
    return _Item(tuple, items, _sum_of(items) + 1, depth)


def _sum_of(items: list[_Item]) -> int:
    """The work of several values, as far as it matters: of values in one another, it doubles with each."""
    return min(sum([item.work for item in items]), MOST_WORK + 1)


def _put_into(target: _Item, operation: str, items: list[_Item]) -> int:
    """Note what a list or dict gets. Returns the work of hashing the keys."""
    if target.kind not in _CHANGED[operation.removesuffix("S")] or (operation == "BUILD" and items[0].kind is not dict):
        raise Rejected(f"its pickle has the operation {operation} where torch does not write it")
    if operation == "BUILD":
        return items[0].work
    keys = items if target.kind is list else items[::2]
    added = _sum_of(keys) + ODD_KEY_WORK * sum([item.kind not in _EASY_KEYS for item in keys])
    target.work = min(target.work + added + ITEM_WORK * len(keys), MOST_WORK + 1)
    return 0 if target.kind is list else added


def _made_by(called: Any, arguments: _Item) -> _Item:
    if not isinstance(called, _Name) or called not in _CALLED:
        raise Rejected(f"its pickle calls {shown(called)}")
    kinds, most, made = _CALLED[called]
    values = arguments.value or [] if arguments.kind is tuple else [arguments] * (most + 1)
    if [item.kind for item in values[: len(kinds)]] != kinds or len(values) > most:
        raise Rejected(f"its pickle calls {called} with other values than torch does")
    if called == "_codecs encode" and values[1].value != "latin1":
        raise Rejected("its pickle calls _codecs encode with another encoding than latin1")
    copied = 8 if called == "torch Size" else 1  # a pointer for each value
    return _Item(made, None, copied * _sum_of(values), arguments.depth)  # of now: a list grows after its tuple is made


def _allowed(argument: Any) -> _Name:
    name = _Name(argument.replace("__builtin__ ", "builtins "))  # as Python 2 had it, and pickles of protocol 2 do
    module, _, last = name.rpartition(" ")
    kind = getattr(torch, last, None) if module == "torch" else None
    is_dtype = isinstance(kind, torch.dtype) and not kind.is_complex and not last.startswith("q")
    if name not in _CALLED and name not in _STORAGES and not is_dtype:
        made = f"objects that only running its code could make ({last[:60]} of {module[:60]})"
        raise Rejected(f"it holds {made}; nothing in it was executed")
    return name


def _check_storage(identity: _Item, sizes: Mapping[str, int]) -> None:
    if identity.kind is not tuple:
        raise ValueError("no storage")
    word, kind, key, _, count = (item.value for item in identity.value or ())
    if word != "storage" or not isinstance(kind, _Name) or kind not in _STORAGES or not isinstance(count, int):
        raise Rejected("its pickle refers to something other than tensors")
    if f"data/{key}" not in sizes:
        raise zipfile.BadZipFile("a part is missing")
    if sizes[f"data/{key}"] != count * _STORAGES[kind]:
        raise Rejected(f"tensor data {str(key)[:60]} has {sizes[f'data/{key}']} bytes, not {count} numbers")


def check_values(content: Any, file_bytes: int) -> None:
    """Count the values in a file, each as often as it is referred to.

    Raises:
        Rejected: It holds something other than plain values and tensors, more of them than a run saves, or tensors
            that are larger than their part of the file.
    """
    todo, seen, total = [(content, 0)], 0, 0
    while todo:
        value, depth = todo.pop()
        seen += 1
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            size = value.numel() * value.element_size()
            total += size
            if size > value.untyped_storage().nbytes() or total > MOST_VIEWS * file_bytes or value._backward_hooks:
                raise Rejected(f"a tensor of shape {tuple(value.shape)} is larger than its data in the file")
        elif kind in (dict, OrderedDict, Counter):
            attributes = {} if kind is dict else vars(value)
            if attributes.keys() - {"_metadata"}:  # as of nn.Module.state_dict
                raise Rejected("it holds a dict with attributes")
            todo += [(each, depth + 1) for pair in (*value.items(), *attributes.items()) for each in pair]
        elif kind in (list, tuple, set, torch.Size):
            todo += [(each, depth + 1) for each in value]
        elif kind in (str, bytes):
            seen += len(value) // 1000
        elif kind not in _PLAIN:
            raise Rejected(f"it holds {kind.__name__}, which is not a plain value")
        if seen + len(todo) > MOST_VALUES or depth > MOST_DEPTH:
            raise Rejected(f"it holds more than {MOST_VALUES} values, or {MOST_DEPTH} inside one another")
