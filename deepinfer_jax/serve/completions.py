"""`/v1/completions`: raw prompts, in OpenAI's older form."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from deepinfer_jax.async_llm.call import Event, Grown
from deepinfer_jax.engine.output import Completion, RequestOutput
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.serve.answers import FAILURES, failed_completion
from deepinfer_jax.serve.body import aside, read_object
from deepinfer_jax.serve.completion_tasks import CompletionTask, read_task
from deepinfer_jax.serve.conversations import check_record, deliver, service_of
from deepinfer_jax.serve.errors import ApiError, as_api_error
from deepinfer_jax.serve.legacy_logprobs import legacy_logprobs, prompt_logprobs
from deepinfer_jax.serve.service import Live, Service
from deepinfer_jax.serve.sse import (
    DONE,
    PING,
    frame,
)


async def completions(request: Request) -> Response:
    """Continues prompts."""
    service = service_of(request)
    config = service.config
    body, size = await read_object(request, config.max_body_bytes, config.request_timeout_s)
    task = await aside(size, lambda: read_task(service, body))
    check_record(service, task.extras)
    answer = CompletionAnswer(service, task)
    headers = {"x-request-id": task.id}
    return await deliver(request, answer, answer.close, headers, is_stream=task.is_stream)


class CompletionAnswer:
    """The completions of all prompts of a request; number `prompt * n + child`."""

    def __init__(self, service: Service, task: CompletionTask) -> None:
        """Sends the requests; none runs if one is refused."""
        self._service, self._task = service, task
        self._tokenizer = service.reader.encoder.tokenizer
        self._created = service.created_now()
        self._lives: list[Live] = []
        try:
            for number, (ids, params) in enumerate(zip(task.prompts, task.params, strict=True)):
                name = f"{task.id}#{number}" if number else task.id
                self._lives.append(service.start(ids, params, name))
        except BaseException:
            self.close()
            raise
        self._outputs: list[RequestOutput | None] = [None] * len(task.prompts)

    def close(self) -> None:
        """Aborts what runs."""
        for live in self._lives:
            live.close()

    async def whole(self) -> dict[str, Any]:
        """Returns the response."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        choices = []
        for number, output in enumerate(self._outputs):
            assert output is not None
            for child, one in enumerate(output.outputs):
                choices.append(self._choice(number, child, one, output))
        return self._head() | {
            "choices": choices,
            "usage": self._usage(),
            "deepinfer": await self._known(),
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yields the events; an error is the last one."""
        task = self._task
        try:
            if task.echo:
                for number, ids in enumerate(task.prompts):
                    for child in range(task.params[0].n):
                        yield frame(None, self._chunk(number, child, self._spell(ids), None, None))
            async with aclosing(self._events()) as events:
                async for found in events:
                    if found is None:
                        yield PING
                        continue
                    number, event = found
                    if isinstance(event, Grown):
                        yield frame(None, self._grown(number, event))
            last = self._head() | {"choices": [], "deepinfer": await self._known()}
            yield frame(None, last | ({"usage": self._usage()} if task.has_usage else {}))
        except (ApiError, DeepInferError) as error:
            yield frame(None, as_api_error(error).envelope(is_anthropic=False))
            return
        except Exception as error:
            yield frame(None, as_api_error(error).envelope(is_anthropic=False))
            raise
        yield DONE

    async def _events(self) -> AsyncGenerator[tuple[int, Event] | None, None]:
        """Yields what happens to any prompt, None for a time without news, until all have ended."""
        reads = {asyncio.ensure_future(live.read()): n for n, live in enumerate(self._lives)}
        try:
            while reads:
                done, _ = await asyncio.wait(
                    reads,
                    timeout=self._service.config.heartbeat_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    yield None
                for read in done:
                    number = reads.pop(read)
                    live = self._lives[number]
                    for event in read.result():
                        self._check(event, live)
                        if isinstance(event, RequestOutput):
                            self._outputs[number] = event
                            live.done()
                        yield number, event
                    if self._outputs[number] is None:
                        reads[asyncio.ensure_future(live.read())] = number
        finally:
            for read in reads:
                read.cancel()

    def _check(self, event: Event, live: Live) -> None:
        reason = event.delta.finish_reason if isinstance(event, Grown) else None
        if isinstance(event, Grown) and reason in FAILURES:
            raise failed_completion(reason, live.error or event.delta.stop_reason)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._task.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._task.model,
            "system_fingerprint": self._service.fingerprint,
        }

    def _grown(self, number: int, event: Grown) -> dict[str, Any]:
        delta = event.delta
        logprobs = None
        if delta.logprobs is not None:
            top = event.top_logprobs
            logprobs = legacy_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, top)
        data = self._chunk(number, delta.index, delta.text, logprobs, delta.finish_reason)
        if delta.stop_reason is not None:
            data["choices"][0]["stop_reason"] = delta.stop_reason
        return data

    def _chunk(
        self, number: int, child: int, text: str, logprobs: object, reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": number * self._task.params[0].n + child,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": _said(reason),
        }
        return self._head() | {"choices": [choice]}

    def _choice(
        self, number: int, child: int, one: Completion, output: RequestOutput
    ) -> dict[str, Any]:
        text, logprobs = one.text, None
        offset = 0
        if self._task.echo:
            prompt = self._spell(output.prompt_token_ids)
            text, offset = prompt + text, len(prompt)
        if one.logprobs is not None:
            top = one.top_logprobs or ()
            logprobs = legacy_logprobs(
                self._tokenizer, one.token_ids, one.logprobs.tolist(), top, offset
            )
            if self._task.echo:
                before = prompt_logprobs(self._tokenizer, output)
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        found = self._chunk(number, child, text, logprobs, one.finish_reason)["choices"][0]
        return found | {"stop_reason": one.stop_reason}

    def _usage(self) -> dict[str, Any]:
        outputs = [output for output in self._outputs if output is not None]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in outputs)},
        }

    async def _known(self) -> dict[str, Any]:
        outputs = [output for output in self._outputs if output is not None]
        completions = [one for output in outputs for one in output.outputs]
        known: dict[str, Any] = {
            "seed": self._task.params[0].seed,
            "finish_reasons": [one.finish_reason for one in completions],
        }
        if len(self._task.params) > 1:
            known["seeds"] = [one.seed for one in self._task.params]
        warnings = dict.fromkeys(text for output in outputs for text in output.warnings)
        if warnings:
            known["warnings"] = list(warnings)
        if self._task.extras.token_ids:
            known["prompt_token_ids"] = self._task.prompts
            known["token_ids"] = [list(one.token_ids) for one in completions]
        if self._task.extras.record:
            records = await asyncio.to_thread(lambda: [output.record for output in outputs])
            known["records"] = [orjson.loads(one.to_json()) for one in records if one is not None]
        return known

    def _spell(self, ids: list[int] | tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _said(reason: str | None) -> str | None:
    """Returns the finish reason in OpenAI's words, which are two here."""
    return reason if reason in (None, "stop") else "length"
