"""Image files that nobody should trust, by seed: what they are, and what must come of them."""

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
#: Words of the error that a broken file of any kind may give.
BROKEN = "broken|of another kind|at least 1 x 1|at most"
KINDS = (
    "whole", "truncated", "flipped", "magic", "bomb", "thin", "mode", "animated", "foreign",
    "chunk", "header",
)  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """A file. size: of the image that must come of it; None: `error` must; both: either."""

    name: str
    data: bytes
    size: tuple[int, int] | None = None
    error: str | None = None


def hostile_files(count, seed=0):
    """Returns `count` files, all kinds in turn."""
    files = []
    for index in range(count):
        draw = np.random.default_rng([seed, index])
        kind = KINDS[index % len(KINDS)]
        files.append(_MAKERS[kind](draw, f"{kind}-{index}"))
    return [Hostile("empty", b"", error="empty"), *files[: count - 1]]


def encode(array, kind, **options):
    buffer = io.BytesIO()
    picture = array if isinstance(array, Image.Image) else Image.fromarray(array)
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _noise(draw, width, height):
    return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)


def _size(draw):
    return tuple(int(side) for side in draw.integers(1, 90, 2))


def _whole(draw, name):
    size = _size(draw) if draw.random() < 0.8 else (1, 1)
    kind = str(draw.choice(FORMATS))
    return Hostile(f"{name}-{kind}", encode(_noise(draw, *size), kind), size=size)


def _truncated(draw, name):
    kind, size = str(draw.choice(FORMATS)), (64, 48)
    data = encode(_noise(draw, *size), kind)
    cut = int(draw.integers(1, len(data) * 9 // 10))
    return Hostile(f"{name}-{kind}", data[:cut], error=BROKEN)


def _flipped(draw, name):
    kind, size = str(draw.choice(FORMATS)), (64, 48)
    data = bytearray(encode(_noise(draw, *size), kind))
    for place in draw.integers(0, len(data), int(draw.integers(1, 30))):
        data[place] ^= 1 << int(draw.integers(8))
    return Hostile(f"{name}-{kind}", bytes(data), size=(-1, -1), error=BROKEN)


def _magic(draw, name):
    kind = str(draw.choice(FORMATS))
    data = encode(_noise(draw, 20, 20), kind)
    wrong = (b"%PDF-1.7", b"GIF12a", b"<svg xm", b"\0\0\0\0", b"II*\0", b"RIFX")[
        int(draw.integers(6))
    ]
    return Hostile(f"{name}-{kind}", wrong + data[len(wrong) :], error="of another kind")


def png_header(width, height, *, bits=8, colour=2):
    """Returns a PNG file of this size whose data are a few compressed zeros."""
    body = b"\x89PNG\r\n\x1a\n"
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(100_000))),
        (b"IEND", b""),
    )
    for name, data in parts:
        crc = zlib.crc32(name + data)
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)
    return body


def _bomb(draw, name):
    width, height = (int(x) for x in draw.integers(20_000, 2**31 - 1, 2))
    kind = int(draw.integers(5))
    if kind == 0:
        data = png_header(width, height)
    elif kind == 1:
        data = b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)
        data += b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x4c\x01\x00;"
    elif kind == 2:
        data = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 1000, 0, 0, 54, 40, width, height,
                                   1, 24, 0, 0, 0, 0, 0, 0)  # fmt: skip
    elif kind == 3:
        size = (2**24 - 1).to_bytes(3, "little") + (255).to_bytes(3, "little")
        data = b"RIFF" + struct.pack("<I", 1000) + b"WEBPVP8X" + struct.pack("<I", 10)
        data += bytes(4) + size + bytes(100)
    else:
        data = bytearray(encode(_noise(draw, 16, 16), "JPEG"))
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = struct.pack(">HH", 65_000, 65_000)
        data = bytes(data)
    return Hostile(f"{name}-{kind}", data, error="at most")


def _thin(draw, name):
    long = int(draw.choice([10_000, 16_000]))
    size = (1, long) if draw.random() < 0.5 else (long, 1)
    kind = str(draw.choice(["PNG", "JPEG", "GIF", "BMP"]))
    return Hostile(f"{name}-{kind}", encode(_noise(draw, *size), kind), size=size)


def _mode(draw, name):
    width, height = _size(draw)
    kind = int(draw.integers(6))
    pixels = _noise(draw, width, height)
    if kind == 0:
        data = encode(Image.fromarray(pixels).convert("CMYK"), "JPEG")
    elif kind == 1:
        data = encode(draw.integers(0, 2**16, (height, width), dtype=np.uint16), "PNG")
    elif kind == 2:
        data = encode(Image.fromarray(pixels).convert("1"), "PNG")
    elif kind == 3:
        palette = Image.fromarray(pixels).quantize(16)
        data = encode(palette, "PNG", transparency=bytes(range(0, 160, 10)))
    elif kind == 4:
        data = encode(Image.fromarray(pixels).convert("LA"), "PNG")
    else:
        data = encode(Image.fromarray(pixels).convert("RGBA"), "WEBP")
    return Hostile(f"{name}-{kind}", data, size=(width, height))


def _animated(draw, name):
    size, kind = _size(draw), str(draw.choice(["GIF", "WEBP", "PNG"]))
    frames = [Image.fromarray(_noise(draw, *size)) for _ in range(4)]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    return Hostile(f"{name}-{kind}", data, size=size)


def _foreign(draw, name):
    kind = str(draw.choice(["TIFF", "ICO", "PPM", "TGA", "text", "zeros", "random"]))
    if kind == "text":
        data = b"<!DOCTYPE html><html><body>404</body></html>"
    elif kind == "zeros":
        data = bytes(int(draw.integers(1, 5000)))
    elif kind == "random":
        data = b"\0" + draw.bytes(int(draw.integers(1, 5000)))
    else:
        data = encode(_noise(draw, 32, 32), kind)
    return Hostile(f"{name}-{kind}", data, error="of another kind")


def _chunk(draw, name):
    """A PNG with a text that unpacks to 100 MB, before or after its pixels."""
    data = encode(_noise(draw, 16, 16), "PNG")
    text = b"a\0\0" + zlib.compress(bytes(100_000_000 if draw.random() < 0.2 else 5_000_000))
    chunk = (
        struct.pack(">I", len(text))
        + b"zTXt"
        + text
        + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    )
    place = 33 if draw.random() < 0.5 else len(data) - 12
    return Hostile(name, data[:place] + chunk + data[place:], size=(16, 16), error=BROKEN)


def _header(draw, name):
    """Sizes of nothing, depths that do not exist, lengths that lie."""
    kind = int(draw.integers(4))
    if kind == 0:
        data = png_header(0, int(draw.integers(0, 5)))
    elif kind == 1:
        data = png_header(10, 10, bits=int(draw.choice([3, 5, 7])))
    elif kind == 2:
        data = b"GIF89a" + bytes(7) + b"," + bytes(9) + b"\x02\x00;"
    else:
        data = b"RIFF\xff\xff\xff\xffWEBPVP8L" + draw.bytes(30)
    return Hostile(f"{name}-{kind}", data, error=BROKEN)


_MAKERS = {
    "whole": _whole, "truncated": _truncated, "flipped": _flipped, "magic": _magic, "bomb": _bomb,
    "thin": _thin, "mode": _mode, "animated": _animated, "foreign": _foreign, "chunk": _chunk,
    "header": _header,
}  # fmt: skip
