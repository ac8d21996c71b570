"""The bridge library through ctypes: found, checked against the installed headers, called."""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from native_ascend.errors import AscendError, AscendUnavailable, error_of

#: Where `make ascend` puts the library. Git ignores it and the wheel leaves it out.
LIBRARY = Path(__file__).parent / "lib" / "libdij_ascend.so"
BUILD_HINT = "build it in a checkout with `make ascend` (needs g++ and cmake)"

_I64, _INT, _TEXT = ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
_WORDS, _HANDLES = ctypes.POINTER(_I64), ctypes.POINTER(ctypes.c_uint32)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dij_message": (_TEXT, []),
    "dij_ffi_api_version": (_INT, []),
    "dij_abi_checked": (_INT, []),
    "dij_load": (_INT, [_TEXT, _INT, _TEXT, _TEXT]),
    "dij_close": (_INT, []),
    "dij_unpoison": (_INT, [_I64]),
    "dij_facts": (
        _INT,
        [_TEXT, _TEXT, _I64, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(_INT)],
    ),
    "dij_signature": (_TEXT, [_TEXT]),
    "dij_has_operator": (_INT, [_TEXT]),
    "dij_buffer_create": (_INT, [_INT, _INT, _WORDS, _I64, _HANDLES]),
    "dij_buffer_write": (_INT, [_HANDLES, ctypes.c_void_p, _I64]),
    "dij_buffer_read": (_INT, [_HANDLES, ctypes.c_void_p, _I64]),
    "dij_buffer_free": (_INT, [_HANDLES]),
    "dij_live_buffers": (_I64, []),
    "dij_plan_keep": (_INT, [_WORDS, _I64, _TEXT, _WORDS]),
    "dij_plan_drop": (_INT, [_I64]),
    "dij_plan_run": (_INT, [_I64, _INT, _HANDLES, _I64, _I64]),
}


def header_version() -> tuple[int, int]:
    """Returns the FFI API version, major and minor, of the installed jaxlib's headers."""
    import jax

    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = re.search(r"XLA_FFI_API_MAJOR (\d+).*?XLA_FFI_API_MINOR (\d+)", text, re.DOTALL)
    if found is None:
        raise AscendUnavailable("the installed jaxlib's headers do not state an FFI API version")
    return int(found.group(1)), int(found.group(2))


@cache
def open_library(path: Path) -> ctypes.CDLL:
    """Returns the bridge library.

    Raises:
        AscendUnavailable: it does not exist, cannot be loaded, or speaks a newer FFI API than the
            installed jaxlib, which would refuse it (and, registered early, refuse to start).
    """
    if not path.is_file():
        raise AscendUnavailable(f"there is no bridge library at {path}: {BUILD_HINT}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise AscendUnavailable(f"the bridge library cannot be loaded: {error}") from error
    version = library.dij_ffi_api_version()
    built, installed = divmod(version, 1000), header_version()
    if built[0] != installed[0] or built[1] > installed[1]:
        raise AscendUnavailable(
            f"the bridge was built for FFI API {built[0]}.{built[1]}, the installed jaxlib has "
            f"{installed[0]}.{installed[1]}: {BUILD_HINT}"
        )
    for name, (result, parameters) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Calls a function that returns 0 or leaves a message.

    Raises:
        AscendError: it failed; of the kind that its status says.
    """
    if getattr(library, name)(*arguments) == 0:
        return
    text = library.dij_message().decode()
    raise error_of(text) or AscendError(text)
