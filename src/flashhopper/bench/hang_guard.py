"""A way out of a kernel that never ends: nothing but the end of its process stops it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HANG_SECONDS = 90.0  # the first launch of a kernel that is not cached compiles it, in up to 30 s


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # sys.exit would wait for the card


@contextmanager
def hang_guard(
    name: str, seconds: float = HANG_SECONDS, on_hang: Callable[[str], None] = _end_process
) -> Iterator[None]:
    """End the process, and say which configuration was on the card, if the block takes over ``seconds``."""
    message = f"error: {name} has not ended after {seconds:.0f} s: it hangs the card. Leave it out of the next run."
    timer = threading.Timer(seconds, on_hang, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
