"""Downloads of images that clients name by URL, from public addresses only (io.md 6).

Every hop is checked: its scheme, and every address that its host resolves to. The connection goes
to the address that was checked, so a name cannot resolve to another one in between.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from deepinfer_jax.errors import InputError

MAX_REDIRECTS = 3
_CHUNK = 64 * 2**10
_REDIRECTS = (301, 302, 303, 307, 308)

#: (host, port) -> its addresses as texts.
Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """How much of a host is waited for. seconds: for all hops together, names included."""

    max_bytes: int
    seconds: float


def is_public(address: str) -> bool:
    """Says whether an IP address is one of the open internet.

    Loopback, private, link-local (metadata services), shared, multicast and reserved addresses are
    not; an IPv6 address that carries an IPv4 one is as public as that.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64 or found in _COMPATIBLE:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


def addresses_of(host: str, port: int) -> list[str]:
    """Returns the addresses that a host name resolves to, in the system's order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def fetch_image(
    url: str,
    limits: FetchLimits,
    *,
    allows: Callable[[str], bool] = is_public,
    resolve: Resolve = addresses_of,
) -> bytes:
    """Returns the bytes behind a URL.

    Args:
        url: http or https, without user or password.
        limits: of bytes and time.
        allows: which addresses may be connected to; tests allow their own server.
        resolve: names to addresses.

    Raises:
        InputError: another scheme, a host that is not public, too many redirects, too large, too
            slow, or any answer but 200.
    """
    end = time.monotonic() + limits.seconds
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url)
        address = _address(parts, end, allows, resolve)
        found = _get(parts, address, limits, end)
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise InputError(f"an image URL may redirect {MAX_REDIRECTS} times, this one goes on")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"an image URL must be a URL, got {url[:80]!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise InputError(f"an image URL must be http or https and name a host, got {url[:80]!r}")
    if parts.username is not None or parts.password is not None:
        raise InputError("an image URL must not hold a user or password: leave them out")
    if any(ord(letter) <= 32 or ord(letter) > 126 for letter in url):
        raise InputError("an image URL must be printable ASCII: encode other letters in it")
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _address(
    parts: SplitResult, end: float, allows: Callable[[str], bool], resolve: Resolve
) -> str:
    """Returns the address to connect to; all of a name's must be allowed."""
    host = parts.hostname or ""
    found: list[list[str]] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            found.append(resolve(host, _port(parts)))
        except (OSError, UnicodeError) as error:
            errors.append(error)

    # A resolver has no time limit of its own; a thread that is left behind ends with it.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(end - time.monotonic(), 0.0))
    if thread.is_alive():
        raise _too_slow()
    if errors or not found or not found[0]:
        raise InputError(f"the host of an image URL must resolve, {host[:80]!r} does not")
    if not all(allows(address) for address in found[0]):
        # Which address it was is not told: that would answer questions about this network.
        raise InputError(
            f"an image URL must lead to public addresses alone, {host[:80]!r} does not: send the "
            "image itself, as a data URL"
        )
    return found[0][0]


class _Pinned(http.client.HTTPConnection):
    """A connection to a checked address that names the host of the URL."""

    def __init__(self, host: str, port: int, address: str, end: float, is_tls: bool) -> None:
        super().__init__(host, port)
        self._address, self._end, self._is_tls = address, end, is_tls

    def connect(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock = socket.create_connection((self._address, self.port), timeout=left)
        if self._is_tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)


def _get(parts: SplitResult, address: str, limits: FetchLimits, end: float) -> bytes | str:
    """Returns the body of an answer, or where it redirects to."""
    host, port = parts.hostname or "", _port(parts)
    connection = _Pinned(host, port, address, end, parts.scheme == "https")
    # A socket's own limit begins anew with every byte; this one does not.
    stop = threading.Timer(max(end - time.monotonic(), 0.0), _cut, [connection])
    stop.daemon = True
    stop.start()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
    try:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            if answer.status in _REDIRECTS and answer.headers.get("location"):
                return str(answer.headers["location"])
            if answer.status != 200:
                raise InputError(f"an image URL must answer with status 200, got {answer.status}")
            return _body(answer, limits, end)
    except InputError:
        raise
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
        # AttributeError: http.client on a socket that `_cut` closed under it.
        if time.monotonic() >= end:
            raise _too_slow() from error
        raise InputError(
            f"an image URL must be reachable, {host[:80]!r} failed: {type(error).__name__}"
        ) from error
    finally:
        stop.cancel()
        connection.close()


def _body(answer: http.client.HTTPResponse, limits: FetchLimits, end: float) -> bytes:
    if (answer.length or 0) > limits.max_bytes:
        raise _too_large(limits)
    parts, size = [], 0
    while part := answer.read1(_CHUNK):
        size += len(part)
        if size > limits.max_bytes:
            raise _too_large(limits)
        parts.append(part)
    if time.monotonic() >= end:
        raise _too_slow()
    if answer.length:  # what was promised and has not come
        raise InputError(
            "an image URL must answer with the whole image, the connection ended early"
        )
    return b"".join(parts)


def _cut(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _too_slow() -> InputError:
    return InputError("an image URL must answer in time, and this one was too slow: send the image")


def _too_large(limits: FetchLimits) -> InputError:
    return InputError(f"an image URL must lead to at most {limits.max_bytes} bytes, got more")
