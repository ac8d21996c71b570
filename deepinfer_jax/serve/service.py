"""The server's side of a model: who may send requests, how many run, and when it stops."""

import asyncio
import hmac
import time
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

from deepinfer_jax.async_llm import AsyncLLM
from deepinfer_jax.async_llm.call import Admitted, Event, Grown, RequestStream
from deepinfer_jax.engine.output import RequestOutput
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.record.recorder import Recorder
from deepinfer_jax.record.run_record import json_hash
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.serve.config import ServerConfig
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.images import ImageRules
from deepinfer_jax.serve.metrics import Metrics
from deepinfer_jax.serve.protocols import options_for
from deepinfer_jax.serve.tasks import Reader
from deepinfer_jax.vision.image import ImageInput

State = Literal["loading", "ready", "draining", "failed"]
#: A step that takes longer means that the engine is stuck.
STUCK_S = 30.0
_RETRY_S = 1


class Service:
    """One model behind a server. `start` sends a request; `drain` ends all."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        """Keeps the model; `warm_up` makes it ready."""
        self.llm, self.config = llm, config
        self.names = config.served_model_name or (llm.model.source,)
        self.metrics = Metrics()
        self.created = int(time.time())  # of the model, as /v1/models says
        self.live: set[Live] = set()
        self._is_warm = self._is_draining = False

    @cached_property
    def reader(self) -> Reader:
        """Reads bodies of the conversation protocols."""
        encoder = self.llm.chat_encoder
        return Reader(
            encoder=encoder,
            options=options_for(encoder, self.names),
            names=self.names,
            max_len=self.llm.max_len,
            parity=self.config.deepseek_api_parity,
            binds_calls=self.config.tool_grammar == "auto",
            deadline_s=self.config.deadline_s,
            rules=ImageRules(
                most=self.config.max_images,
                max_bytes=self.config.max_image_body_bytes,
                seconds=self.config.image_timeout_s,
                allow_urls=self.config.allow_image_urls,
            ),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Names all but the weights and the seed that outputs depend on (OpenAI's word for it)."""
        facts = Recorder(self.llm.model, self.llm.runtime).facts
        known = {name: facts[name] for name in ("model", "execution", "options", "environment")}
        return f"di-{version('deepinfer-jax')}-{json_hash(known)[:12]}"

    @staticmethod
    def created_now() -> int:
        """Returns the time that a response says it was made at."""
        return int(time.time())

    @property
    def state(self) -> State:
        """What the server can do now."""
        if self.llm.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        return "ready" if self._is_warm else "loading"

    @property
    def is_healthy(self) -> bool:
        """Whether requests are answered: it is ready, and no step hangs."""
        return self.state == "ready" and self.llm.busy_s <= STUCK_S

    async def warm_up(self) -> None:
        """Makes the engine, which compiles everything it can need."""
        await self.llm.stats()
        if self.llm.runtime.warm_grammars and self.llm.model.tokenizer is not None:
            await self._warm_grammars()
        # What is slow the first time, too.
        await asyncio.to_thread(lambda: (self.reader.encoder.recipe_tokenizer, self.fingerprint))
        self._is_warm = True

    async def _warm_grammars(self) -> None:
        """Runs a constrained request: the first one reads the vocabulary, which takes a second."""
        params = SamplingParams(temperature=0, max_tokens=1, grammar=Grammar.choice(["a"]))
        stream = self.llm.submit([self.llm.model.config.bos_token_id], params, request_id="warm-up")
        try:
            while not any(isinstance(event, RequestOutput) for event in await stream.read()):
                pass
        finally:
            stream.close()

    async def stats(self) -> EngineStats | None:
        """Returns the engine's counters; None if it does not answer soon or has failed."""
        if self.state in ("loading", "failed") or self.llm.busy_s > STUCK_S:
            return None
        return await self.llm.stats()

    def abort(self, name: str) -> bool:
        """Ends the completions of a response early; returns whether there were any."""
        found = [live for live in self.live if live.name.partition("#")[0] == name]
        for live in found:
            self.llm.abort(live.name)
        return bool(found)

    def check_key(self, headers: Mapping[str, str], *, is_admin: bool) -> None:
        """Raises ApiError 401 unless the headers hold a key that opens this route."""
        keys = self.config.api_key
        if is_admin and self.config.admin_key is not None:
            keys = (self.config.admin_key,)
        if not keys:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All are compared, so that time tells nothing about which one is near.
        found = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
        if not any(found):
            raise ApiError(
                401,
                "the request needs a valid key, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.llm.model.config.vision is not None

    def start(
        self,
        token_ids: list[int],
        params: SamplingParams,
        name: str,
        images: tuple[ImageInput, ...] = (),
    ) -> "Live":
        """Sends a request; `close` what is returned in the end. images: one for each image token.

        Raises:
            ApiError: 429 too many wait, 503 not ready.
            InputError: it cannot be honoured.
        """
        self._check_room(params.n)
        more: dict[str, Any] = {"images": images} if images else {}
        stream = self.llm.submit(token_ids, params, request_id=name, **more)
        self.metrics.prompt_tokens += len(token_ids)
        self.metrics.prompt_tokens += sum(image.plan.num_tokens - 1 for image in images)
        self.metrics.images += len(images)
        live = Live(self, stream, name, params.n)
        self.live.add(live)
        return live

    def _check_room(self, count: int) -> None:
        if self.state != "ready":
            raise ApiError(
                503, f"the server is {self.state}: try again later", code=self.state,
                retry_after_s=_RETRY_S,
            )  # fmt: skip
        most = self.llm.runtime.max_seqs + self.config.max_waiting
        running = sum(live.count for live in self.live)
        if running + count > most:
            raise ApiError(
                429,
                f"{running} completions run or wait, {most} may: try again later",
                code="too_many_requests",
                retry_after_s=_RETRY_S,
            )

    async def drain(self) -> None:
        """Takes no more requests, lets the running ones end for a while, then aborts them."""
        self._is_draining = True
        end = time.monotonic() + self.config.drain_seconds
        while self.live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for live in tuple(self.live):
            self.llm.abort(live.name)
        while self.live and self.llm.failure is None:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Frees the engine."""
        self.metrics.close()
        await self.llm.close()


class Live:
    """A request that runs for a client. count: of completions. It measures what it sees."""

    def __init__(self, service: Service, stream: RequestStream, name: str, count: int) -> None:
        """Starts the clock."""
        self._service, self._stream = service, stream
        self.name, self.count = name, count
        self._started = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    async def read(self) -> list[Event]:
        """As `RequestStream.read`."""
        events = await self._stream.read()
        now, metrics = time.perf_counter(), self._service.metrics
        for event in events:
            if isinstance(event, Admitted):
                metrics.queue.observe(now - self._started)
            elif isinstance(event, Grown) and event.delta.token_ids:
                self._tokens += len(event.delta.token_ids)
                if self._first is None:
                    self._first = now
                    metrics.first_token.observe(now - self._started)
        return events

    @property
    def error(self) -> BaseException | None:
        """As `RequestStream.error`."""
        return self._stream.error

    def done(self) -> None:
        """Measures a request that was answered to its end."""
        now, metrics = time.perf_counter(), self._service.metrics
        metrics.total.observe(now - self._started)
        if self._first is not None and self._tokens > self.count:
            metrics.per_token.observe((now - self._first) / (self._tokens / self.count - 1))

    def close(self) -> None:
        """Aborts it unless it has ended, and gives its place back."""
        self._stream.close()
        self._service.live.discard(self)
