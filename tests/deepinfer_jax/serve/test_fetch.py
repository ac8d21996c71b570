"""Downloads of images: which addresses, how much, and how long."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.serve.fetch import FetchLimits, addresses_of, fetch_image, is_public

LIMITS = FetchLimits(max_bytes=1000, seconds=20.0)
pytestmark = pytest.mark.accept(12)


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.headers["host"], self.path))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "go":
            self.send_response(302)
            self.send_header("location", rest if "//" in rest else f"/{rest}")
            self.send_header("content-length", "0")
            self.end_headers()
        elif kind == "wait":
            self.server.release.wait()
        elif kind == "drip":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.server.release.wait()
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(5000))
        elif kind == "short":
            self.send_response(200)
            self.send_header("content-length", "900")
            self.end_headers()
            self.wfile.write(bytes(10))
        elif kind == "status":
            self.send_response(int(rest))
            self.send_header("content-length", "0")
            self.end_headers()
        else:
            self.send_response(200)
            self.send_header("content-length", rest or "3")
            self.end_headers()
            self.wfile.write(bytes(int(rest or 3)))
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    found.seen, found.release = [], threading.Event()
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.release.set()
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def fetch(server):
    """Fetches from the server as if public.test were it and public; inner.test is private."""

    def resolve(host, port):
        if host == "nowhere.test":
            raise OSError("no such host")
        names = {"public.test": ["127.0.0.1"], "mixed.test": ["127.0.0.1", "10.0.0.7"]}
        return names.get(host, ["10.0.0.7"])

    def run(path, limits=LIMITS, host="public.test"):
        url = path if not path.startswith("/") else f"http://{host}:{server.server_port}{path}"
        return fetch_image(url, limits, allows=lambda one: one == "127.0.0.1", resolve=resolve)

    return run


@contextmanager
def refused(complaint):
    with pytest.raises(InputError, match=complaint):
        yield


def test_an_image_comes_with_the_hosts_name(fetch, server):
    assert fetch("/a?b=c") == bytes(3)
    assert server.seen[-1] == (f"public.test:{server.server_port}", "/a?b=c")
    assert fetch("/go/go/bytes/7") == bytes(7)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "10.1.2.3", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "::7f00:1",
        "2002:7f00:1::", "2001:0:7f00:1::", "192.0.2.1", "198.18.0.1", "240.0.0.1", "ff02::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost:8000/", "http://[::1]/", "http://2130706433/",
        "http://0x7f000001/", "http://169.254.169.254/latest/meta-data", "http://10.0.0.1/x.png",
        "https://192.168.0.1/", "http://[::ffff:127.0.0.1]/",
    ],
)  # fmt: skip
def test_private_hosts_are_refused_before_anything_is_sent(url):
    with refused("public addresses alone"):
        fetch_image(url, LIMITS)


def test_this_machine_resolves_to_loopback():
    assert set(addresses_of("localhost", 80)) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://public.test/", "http or https"), ("file:///etc/passwd", "http or https"),
        ("http:///x", "http or https"), ("http://a:b@public.test/", "user or password"),
        ("http://public.test:99999/", "must be a URL"), ("http://public.test/\r\nX: y", "ASCII"),
        ("gopher://public.test/", "http or https"), ("http://nowhere.test/", "does not"),
        ("http://inner.test/", "public addresses alone"),
        ("http://mixed.test/", "public addresses alone"),
    ],
)  # fmt: skip
def test_other_urls_are_refused(fetch, url, complaint):
    with refused(complaint):
        fetch(url)


def test_every_hop_is_checked(fetch, server):
    before = len(server.seen)
    for target in ("http://inner.test/a", "http://169.254.169.254/", "file:///etc/passwd"):
        with refused("public addresses alone|http or https"):
            fetch(f"/go/{target}")
    assert len(server.seen) == before + 3  # the first hop, and no more
    with refused("may redirect 3 times"):
        fetch("/go/go/go/go/a")
    assert fetch("/go/go/go/a") == bytes(3)


def test_size_is_limited(fetch):
    assert fetch("/bytes/1000") == bytes(1000)
    for path in ("/bytes/1001", "/endless"):
        with refused("at most 1000 bytes"):
            fetch(path)
    with refused("ended early|IncompleteRead"):
        fetch("/short")


def test_time_is_limited_though_bytes_come(fetch):
    for path in ("/wait", "/drip"):
        with refused("too slow"):
            fetch(path, FetchLimits(max_bytes=1000, seconds=0.3))


@pytest.mark.parametrize("status", [204, 404, 500])
def test_other_answers_are_refused(fetch, status):
    with refused(f"status 200, got {status}"):
        fetch(f"/status/{status}")


def test_nobody_listens(fetch):
    with refused("must be reachable"):
        fetch("http://public.test:1/")
