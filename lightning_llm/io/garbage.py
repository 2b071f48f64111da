"""Python's garbage collector, paused while a file is read or a step is traced.

Such work makes up to a million objects and no cycles among them. The collector looks at all of them again and again,
which takes up to two thirds of the time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect nothing inside the block; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
