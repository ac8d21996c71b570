"""Keeps the memory of a process that does nothing but serve from growing."""

import contextlib
import ctypes
import gc
import sys

_M_ARENA_MAX = -8  # of mallopt, in glibc's malloc.h
_ARENAS = 2


def share_arenas() -> None:
    """Has threads share the arenas of glibc's malloc; where there is no glibc, does nothing.

    Every thread gets an arena of its own otherwise, which keeps what it once held: with the threads
    of XLA, of tokenizers and of grammars that is a fifth of the process, and grows for minutes. To
    be called before those threads begin.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def keep_what_is_there() -> None:
    """Takes all objects there are out of the garbage collector's care.

    A full collection is due when objects have come that are a quarter of those it went through
    last. Behind a million of traces and modules that is minutes of requests, whose circles grow
    the process meanwhile, and the collection then stops every stream for a second.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # the quarter is of what it goes through now
