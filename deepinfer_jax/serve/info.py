"""The routes that answer questions about the server, its model and its tokenizer."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version as package_version
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deepinfer_jax.serve.body import aside, read_object
from deepinfer_jax.serve.completion_tasks import prompt_ids
from deepinfer_jax.serve.conversations import json_response, read_conversation, service_of
from deepinfer_jax.serve.errors import ApiError, bad_field
from deepinfer_jax.serve.fields import BOOLEAN, CHAT, IDS, TEXT, checked
from deepinfer_jax.serve.protocols import CHAT as CHAT_PROTOCOL
from deepinfer_jax.serve.service import Service

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_TOKENIZE = {**CHAT, "prompt": TEXT, "add_special_tokens": BOOLEAN}
_DETOKENIZE = {"model": TEXT, "tokens": IDS}


async def models(request: Request) -> Response:
    """Lists the names of the model, in OpenAI's and Anthropic's form at once."""
    service = service_of(request)
    data = [_describe(service, name) for name in service.names]
    return json_response(
        {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": data[0]["id"],
            "last_id": data[-1]["id"],
        }
    )


async def model(request: Request) -> Response:
    """Describes the model under one of its names."""
    service, name = service_of(request), request.path_params["name"]
    if name not in service.names:
        raise ApiError(404, f"no model is named {name[:80]!r}", param="model")
    return json_response(_describe(service, name))


def _describe(service: Service, name: str) -> dict[str, Any]:
    from datetime import UTC, datetime

    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "display_name": name,
        "owned_by": "deepinfer-jax",
        "root": service.llm.model.source,
        "max_model_len": service.llm.max_len,
        "aliases": [other for other in service.names if other != name],
    }


async def health(request: Request) -> Response:
    """Answers 200 while requests are answered, 503 otherwise."""
    service = service_of(request)
    status = 200 if service.is_healthy else 503
    failure = service.llm.failure
    return json_response(
        {
            "state": service.state,
            "step_s": round(service.llm.busy_s, 3),
            "error": None if failure is None else repr(failure),
        },
        status,
    )


async def live(request: Request) -> Response:
    """Answers 200 as long as the process does."""
    return json_response({"state": service_of(request).state})


async def metrics(request: Request) -> Response:
    """Answers counters and histograms as Prometheus text."""
    service = service_of(request)
    return PlainTextResponse(service.metrics.text(await service.stats()), media_type=_PROMETHEUS)


async def version(_: Request) -> Response:
    """Answers the package's version."""
    return json_response({"version": package_version("deepinfer-jax")})


async def server_info(request: Request) -> Response:
    """Describes model, runtime and server; keys are left out."""
    service = service_of(request)
    config = {k: v for k, v in asdict(service.config).items() if k not in ("api_key", "admin_key")}
    execution = service.llm.model.config.execution
    return json_response(
        {
            "version": package_version("deepinfer-jax"),
            "state": service.state,
            "model": service.llm.model.source,
            "system_fingerprint": service.fingerprint,
            "execution": {
                "numerics": execution.numerics,
                "determinism": execution.determinism,
                "replay": service.llm.runtime.replay,
            },
            "runtime": asdict(service.llm.runtime),
            "server": config,
        }
    )


async def abort(request: Request) -> Response:
    """Ends a response that runs, by its id."""
    service = service_of(request)
    body = await _object(request, {"request_id": TEXT})
    if "request_id" not in body:
        raise ApiError(400, "request_id is missing", param="request_id")
    if not service.abort(body["request_id"]):
        raise ApiError(404, f"no response {body['request_id'][:80]!r} runs", param="request_id")
    return json_response({"aborted": body["request_id"]})


async def tokenize(request: Request) -> Response:
    """Answers the token ids of a prompt or of a conversation."""
    service = service_of(request)
    body, size = await read_conversation(request)
    ids = await aside(size, lambda: _tokenize(service, body))
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.llm.max_len})


def _tokenize(service: Service, body: Mapping[str, Any]) -> list[int]:
    given = checked(body, _TOKENIZE)
    given.setdefault("model", service.names[0])
    if ("prompt" in given) == ("messages" in given):
        raise ApiError(400, "one of prompt and messages is needed", param="prompt")
    if "prompt" in given:
        service.reader.check_model(given)
        return prompt_ids(service, given["prompt"], given.get("add_special_tokens", True))
    given.pop("add_special_tokens", None)
    return service.reader.chat_ids(CHAT_PROTOCOL, given)


async def detokenize(request: Request) -> Response:
    """Answers the text of token ids."""
    service = service_of(request)
    given = await _object(request, _DETOKENIZE)
    ids, vocab = given.get("tokens"), service.llm.model.config.vocab_size
    if ids is None:
        raise ApiError(400, "tokens is missing", param="tokens")
    if not all(0 <= one < vocab for one in ids):
        raise bad_field("tokens", f"ids in 0..{vocab - 1}", ids)
    tokenizer = service.reader.encoder.tokenizer
    text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return json_response({"prompt": text})


async def _object(request: Request, rules: Mapping[str, Any]) -> dict[str, Any]:
    config = service_of(request).config
    body, _ = await read_object(request, config.max_body_bytes, config.request_timeout_s)
    return checked(body, rules)
