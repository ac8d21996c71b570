"""Images in the three protocols: read, counted, limited, and shown to a model that sees."""

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import deepinfer_jax as di
from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.errors import InputError
from deepinfer_jax.loading import read_tokenizer
from deepinfer_jax.serve.config import ServerConfig
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.images import ImageRules, mentions_image, read_images
from deepinfer_jax.serve.protocols import CHAT, MESSAGES, RESPONSES, convert, options_for
from deepinfer_jax.serve.tasks import Reader
from deepinfer_jax.vision.image import read_image

from ..vision.hostile import encode
from .conftest import in_process

pytestmark = pytest.mark.accept(12)
NAMES = ("tiny",)
RED, BLUE = (
    np.full((20, 28, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255))
)  # fmt: skip
PNG = encode(RED, "PNG")
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
OTHER = "data:image/png;base64," + base64.b64encode(encode(BLUE, "PNG")).decode()
HTTP = "https://example.org/a.png"


@pytest.fixture(scope="module")
def encoder(fixtures_dir):
    folder = fixtures_dir / "tiny_v41"
    return ChatEncoder(read_tokenizer(folder), read_config(folder))


@pytest.fixture(scope="module")
def reader(encoder):
    return Reader(encoder=encoder, options=options_for(encoder, NAMES), names=NAMES, max_len=512)


def chat(*parts, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}]} | fields


def image(url, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words):
    return {"type": "text", "text": words}


def block(url):
    _, _, data = url.partition(",")
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def messages(*parts):
    content = [{"role": "user", "content": list(parts)}]
    return {"model": "tiny", "max_tokens": 3, "messages": content}


def responses(*parts):
    return {"model": "tiny", "input": [{"role": "user", "content": list(parts)}]}


BODIES = [
    (CHAT, chat(image(URL), text("what?"), image(OTHER))),
    (MESSAGES, messages(block(URL), text("what?"), block(OTHER))),
    (RESPONSES, responses(
        {"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": OTHER},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "body"), BODIES, ids=["chat", "messages", "responses"])
def test_images_are_read_in_order_and_counted(protocol, body, reader, encoder):
    task = reader.chat_task(protocol, body)
    token = encoder.config.image_token_id
    expected = [read_image(one, encoder.config.vision) for one in (RED, BLUE)]
    assert [one.digest for one in task.images] == [one.digest for one in expected]
    assert task.token_ids.count(token) == 2
    rows = sum(one.plan.num_tokens for one in expected)
    assert task.prompt_ids.count(token) == rows
    assert len(task.prompt_ids) == len(task.token_ids) - 2 + rows
    assert reader.chat_ids(protocol, body) == task.prompt_ids


def test_the_spelling_of_the_token_is_text(reader, encoder):
    spelling = encoder.image_token
    body = chat(text(f"a {spelling} b"), image(URL), text(spelling))
    task = reader.chat_task(CHAT, body)
    assert task.token_ids.count(encoder.config.image_token_id) == 1
    assert len(task.images) == 1
    plain = reader.chat_task(CHAT, chat(text(spelling)))
    assert (plain.images, plain.token_ids) == ((), plain.prompt_ids)


def test_low_detail_is_smaller(reader, encoder):
    large = encode(np.zeros((300, 300, 3), np.uint8), "PNG")
    url = "data:image/png;base64," + base64.b64encode(large).decode()
    sizes = [
        reader.chat_task(CHAT, chat(image(url, detail=detail), text("x"))).images[0].plan.num_tokens
        for detail in ("low", "high", "auto")
    ]
    assert sizes[0] < sizes[1] == sizes[2]


BAD = [
    (CHAT, chat(image(HTTP)), r"^messages\[0\]: .*--allow-image-urls"),
    (CHAT, chat(text("a"), image("data:image/png;base64,AAAA")), r"messages\[0\]: .*must be a PNG"),
    (CHAT, chat(image("data:image/png;base64,@@@@")), r"^messages\[0\]: Invalid base64"),
    (CHAT, chat(image(URL[:-40])), "broken or cut short"),
    (CHAT, chat(image("ftp://example.org/a.png")), r"messages\[0\]: .*Unsupported"),
    (MESSAGES, messages(block("data:,AAAA")), r"messages\.0\.content\[0\]: .*must be a PNG"),
    (RESPONSES, responses({"type": "input_image", "image_url": HTTP}), r"input\[0\]: .*data URL"),
]


@pytest.mark.parametrize(("protocol", "body", "complaint"), BAD)
def test_bad_images_name_their_place(protocol, body, complaint, reader):
    with pytest.raises(ApiError, match=complaint) as caught:
        reader.chat_task(protocol, body)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert mentions_image(body)


def test_a_model_without_vision_names_the_field(encoder):
    blind = ChatEncoder(encoder.tokenizer, replace(encoder.config, vision=None))
    reader = Reader(encoder=blind, options=options_for(blind, NAMES), names=NAMES, max_len=512)
    with pytest.raises(ApiError, match=r"messages\[0\] must be text: .*no image encoder") as caught:
        reader.chat_task(CHAT, chat(image(URL)))
    assert (caught.value.status, caught.value.param) == (400, "messages[0]")


def conversation(encoder, *urls):
    options = options_for(encoder, NAMES)
    return convert(CHAT, chat(*map(image, urls)), options).conversation


def test_one_quota_holds_for_all_images_of_a_request(encoder):
    asked = []

    def fetch(url, limits):
        asked.append((url, limits.max_bytes))
        assert limits.seconds <= 10.0
        if limits.max_bytes < len(PNG):
            raise InputError(f"at most {limits.max_bytes} bytes")
        return PNG

    def read(*urls, **rules):
        return read_images(encoder, conversation(encoder, *urls), ImageRules(**rules), fetch)

    most = len(PNG) * 5 // 2
    assert len(read(URL, HTTP, allow_urls=True, max_bytes=most)) == 2
    assert asked == [(HTTP, most - len(PNG))]
    with pytest.raises(ApiError, match=f"at most {len(PNG) // 2} bytes"):
        read(URL, HTTP, HTTP, allow_urls=True, max_bytes=most)
    with pytest.raises(ApiError, match="at most 10 bytes"):
        read(URL, max_bytes=10)
    with pytest.raises(ApiError, match="may have 2 images, got 3"):
        read(URL, URL, URL, most=2)
    with pytest.raises(ApiError, match="within 0 s"):
        read(HTTP, allow_urls=True, seconds=0.0)


def test_twenty_images_are_taken(reader):
    assert len(reader.chat_task(CHAT, chat(*[image(URL)] * 20)).images) == 20


def test_bodies_that_mention_no_image():
    assert not mentions_image(chat(text("an image_url")))
    assert not mentions_image({"model": "x", "prompt": "image"})
    assert not mentions_image({"messages": "image"})


@pytest.fixture(scope="module")
def seeing(fixtures_dir):
    runtime = di.RuntimeConfig(
        max_seqs=2, max_tokens_per_step=32, max_len=256, block_tokens=16, drafting=False
    )
    llm = di.AsyncLLM(di.load(fixtures_dir / "tiny_v41", determinism="off"), runtime=runtime)
    config = ServerConfig(port=0, served_model_name=NAMES, max_body_bytes=500)
    yield lambda main: in_process(llm, config, main)
    asyncio.run(llm.close())


def test_a_server_answers_about_images_in_every_protocol(seeing, reader):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    url = "data:image/png;base64," + base64.b64encode(encode(noise, "PNG")).decode()
    given = chat(image(url), text("what?"), max_tokens=3, temperature=0, return_token_ids=True)
    assert len(url) > 500  # more than a body without images may have
    paths = {
        "/v1/chat/completions": given,
        "/v1/messages": messages(block(url), text("what?")) | {"temperature": 0},
        "/v1/responses": responses(
            {"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what?"}
        )
        | {"max_output_tokens": 3, "temperature": 0},
    }

    async def main(client, service):
        answers = [(await client.post(path, json=body)) for path, body in paths.items()]
        counted = await client.post("/v1/messages/count_tokens", json=messages(
            block(url), text("what?")))  # fmt: skip
        refused = await client.post("/v1/chat/completions", json=chat(text("x" * 600)))
        broken = await client.post(
            "/v1/chat/completions", json=chat(image("data:image/png;base64,AAAA"))
        )
        metrics = (await client.get("/metrics")).text
        return answers, counted.json(), refused.status_code, broken, metrics

    answers, counted, refused, broken, metrics = seeing(main)
    assert [answer.status_code for answer in answers] == [200] * 3, [a.text for a in answers]
    first, second, third = (answer.json() for answer in answers)
    expected = len(reader.chat_task(CHAT, given).prompt_ids)
    assert first["usage"]["prompt_tokens"] == expected
    assert len(first["deepinfer"]["prompt_token_ids"]) == expected
    without = reader.chat_task(MESSAGES, paths["/v1/messages"]).prompt_ids
    usage = second["usage"]
    seen = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert seen == counted["input_tokens"] == len(without)
    assert third["usage"]["input_tokens"] > 20
    assert refused == 413
    assert broken.status_code == 400
    assert broken.json()["error"]["param"] == "messages[0]"
    assert "deepinfer_images_total 3" in metrics


def test_chat_of_the_library_reads_images(encoder):
    spelling = encoder.image_token
    parts = [
        text(f"see {spelling}"), {"type": "image", "image": Image.fromarray(RED)}, image(OTHER),
    ]  # fmt: skip
    prompt = encoder.prepare([{"role": "user", "content": parts}], thinking=False)
    expected = [read_image(one, encoder.config.vision).digest for one in (RED, BLUE)]
    assert [one.digest for one in prompt.images] == expected
    assert prompt.token_ids.count(encoder.config.image_token_id) == 2
    for part, complaint in (
        (image(HTTP), r"messages\[0\]\.content\[0\]\.image_url\.url must be a data URL"),
        (image(URL, detail="low"), r"detail must be auto, high or original"),
        ({"type": "image"}, r"content\[0\]\.image must be an image"),
        ({"type": "image", "image": b"x"}, r"messages\[0\]\.content\[0\]: .*must be a PNG"),
        ({"type": "file"}, "files are not supported"),
    ):
        with pytest.raises(InputError, match=complaint):
            encoder.prepare([{"role": "user", "content": [part]}])
    with pytest.raises(InputError, match="images stand in user messages"):
        encoder.prepare([{"role": "system", "content": [image(URL)]}])
