"""Options of the server, and the rules they keep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from deepinfer_jax.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in and how much it takes.

    host, port: where it listens; port 0 takes a free one.
    served_model_name: what clients may call the model; the first is the one it reports. None is the
    source of the model.
    api_key: keys that let a client in; none lets everybody in. admin_key: the one of /abort,
    /server_info and /metrics; None is any API key. insecure: allow a host other than loopback
    without a key.
    max_body_bytes: of a request without images; max_image_body_bytes: of one with, where the model
    sees. max_images: of a request. allow_image_urls: download images that clients name by URL, from
    public addresses; image_timeout_s: for all of a request.
    max_waiting: sequences that may wait for a place in the batch; beyond it the answer is 429.
    deadline_s: of requests that give none; None is no deadline.
    stream_stall_timeout_s: how long a client may leave a stream unread. heartbeat_s: between signs
    of life on a silent stream. request_timeout_s: for a client to send a whole request.
    drain_seconds: how long running requests may go on after SIGTERM.
    tool_grammar: which calls of tools are held to a grammar: "strict", those of bodies that promise
    something about them (a strict tool, a required call, one call at most), or "auto", all.
    deepseek_api_parity: temperature and top_p as DeepSeek's own API treats them (1.0 with thinking,
    top_p always 1.0) instead of as the client asks.

    Raises:
        ConfigError: a value outside its range, or a host that everybody can reach without a key.
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, and says what is legal

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] = ()
    admin_key: str | None = None
    insecure: bool = False
    max_body_bytes: int = 32 * 2**20
    max_image_body_bytes: int = 64 * 2**20
    max_images: int = 64
    allow_image_urls: bool = False
    image_timeout_s: float = 10.0
    max_waiting: int = 256
    deadline_s: float | None = None
    stream_stall_timeout_s: float = 30.0
    heartbeat_s: float = 15.0
    request_timeout_s: float = 60.0
    drain_seconds: float = 30.0
    tool_grammar: str = "strict"
    deepseek_api_parity: bool = False

    def __post_init__(self) -> None:
        for name, (is_legal, rule) in _RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise ConfigError(f"ServerConfig.{name} must be {rule}, got {value!r}")
        if self.host not in LOOPBACK and not self.api_key and not self.insecure:
            raise ConfigError(
                f"host={self.host!r} lets other machines in, and there is no API key: give "
                "--api-key, or --insecure if that is meant"
            )


def _number(low: float, *, is_above: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return low < value if is_above else low <= value

    return check


def _texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)


_SECONDS = (_number(0.0, is_above=True), "a number of seconds > 0")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "host": (lambda v: isinstance(v, str) and v != "", "a host name or address"),
    "port": (lambda v: type(v) is int and 0 <= v < 2**16, "an integer in 0..65535"),
    "served_model_name": (
        lambda v: v is None or (_texts(v) and v != ()),
        "None or a tuple of at least one name",
    ),
    "api_key": (_texts, "a tuple of keys that are not empty"),
    "admin_key": (lambda v: v is None or (isinstance(v, str) and v != ""), "None or a key"),
    **{
        name: (lambda v: type(v) is int and v > 0, "an integer > 0")
        for name in ("max_body_bytes", "max_image_body_bytes", "max_images")
    },
    "max_waiting": (lambda v: type(v) is int and v >= 0, "an integer >= 0"),
    "deadline_s": (lambda v: v is None or _SECONDS[0](v), "None or a number of seconds > 0"),
    "stream_stall_timeout_s": _SECONDS,
    "heartbeat_s": _SECONDS,
    "request_timeout_s": _SECONDS,
    "image_timeout_s": _SECONDS,
    "tool_grammar": (lambda v: v in ("strict", "auto"), '"strict" or "auto"'),
    "drain_seconds": (_number(0.0), "a number of seconds >= 0"),
    **{
        name: (lambda v: isinstance(v, bool), "True or False")
        for name in ("insecure", "deepseek_api_parity", "allow_image_urls")
    },
}
