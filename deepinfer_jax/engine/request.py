"""A request: one prompt, its parameters and its n completions; what is checked before it runs."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.completion import CompletionBuilder
from deepinfer_jax.engine.detokenize import Detokenizer
from deepinfer_jax.engine.drafting import plan_drafting
from deepinfer_jax.engine.output import RequestMetrics, RequestOutput, StreamDelta
from deepinfer_jax.engine.prompt import PromptImage, placed_images
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.loading import Model
from deepinfer_jax.model.forward import host_ids
from deepinfer_jax.model.vision.patches import grid_of, size_for
from deepinfer_jax.record.recorder import Recorder, make_recorder
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.random import child_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way. Times are those of the engine's clock.

    sink: called with every delta of every completion; None if nobody watches. prompt_scores:
    (log-probabilities [t - 1], ids [t - 1, k], theirs), while asked for. recorder: of the weights
    it runs with; None without records. warnings: what its grammar does not enforce.
    """

    request_id: str
    params: SamplingParams
    seed: int
    sequences: list[Sequence]
    submitted: float
    sink: Callable[[StreamDelta], None] | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    error: BaseException | None = None
    prompt_scores: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    recorder: Recorder | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether every completion has ended."""
        return all(sequence.phase is Phase.DONE for sequence in self.sequences)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's ids."""
        first = self.sequences[0]
        return tuple(first.ids[: first.prompt_len].tolist())

    def output(self) -> RequestOutput:
        """Returns the result of a request that is done."""
        first, ended = self.sequences[0], self.ended
        assert ended is not None
        scores, prompt = self.prompt_scores, self.prompt
        completions = tuple(sequence.output.completion() for sequence in self.sequences)
        make_record = None
        if self.recorder is not None:
            recorded = tuple(completion.recorded() for completion in completions)
            given = (prompt, self.params, self.seed, recorded, first.spans)
            make_record = partial(self.recorder.record, *given)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=prompt,
            outputs=completions,
            seed=self.seed,
            metrics=RequestMetrics(
                first_token_s=(self.first_token or ended) - self.submitted,
                total_s=ended - self.submitted,
                queued_s=(self.admitted or ended) - self.submitted,
                preemptions=sum(sequence.preemptions for sequence in self.sequences),
                cache_reason=first.output.cache_reason,
            ),
            cached_tokens=first.cached or 0,
            prompt_logprobs=None if scores is None else scores[0],
            prompt_top_logprobs=None if scores is None else top_rows(scores[1], scores[2]),
            make_record=make_record,
            warnings=self.warnings,
        )


def top_rows(ids: np.ndarray, values: np.ndarray) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Returns [n, k] ids and log-probabilities as pairs, best first."""
    return tuple(
        tuple(zip(one, two, strict=True))
        for one, two in zip(ids.tolist(), values.tolist(), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    """Checks requests and builds their sequences.

    drafts: of a round, 0 without drafting. recorder: of the weights in use, None without records.
    """

    config: ModelConfig
    runtime: RuntimeConfig
    tokenizer: "Tokenizer | None"
    max_len: int
    drafts: int
    recorder: Recorder | None = None

    def with_weights(self, model: Model) -> "RequestFactory":
        """Returns the factory of a model whose weights take the place of the ones before."""
        if self.recorder is not None:
            self.recorder.weights.release()
        return replace(self, recorder=make_recorder(model, self.runtime))

    def build(
        self,
        number: int,
        ids: Items[int],
        params: SamplingParams,
        *,
        request_id: str,
        root: bytes,
        seed: int,
        now: float,
        output_ids: Items[int] = (),
        images: tuple[PromptImage, ...] = (),
    ) -> Request:
        """Returns a request ready to be queued.

        Args:
            number: order of arrival.
            ids: of the prompt, with a row for every token of every image.
            params: what is asked for.
            request_id: its name.
            root: of the prefix tree.
            seed: in use.
            now: time of submission.
            output_ids: tokens it has produced before (a restored request of n = 1); produced
                again if hashes of their logits are to be recorded.
            images: of the prompt.

        Raises:
            InputError: something cannot be honoured.
            TokenizerError: text is needed and there is no tokenizer.
        """
        self._check(ids, params, request_id, images)
        room = min(params.max_tokens, self.max_len - len(ids))
        banned = self._banned(params)
        keeps_hashes = self.runtime.record == "logits"
        output_ids = () if keeps_hashes else output_ids
        sequences: list[Sequence] = []
        for child in range(params.n):
            buffer = np.zeros(len(ids) + room, np.int32)
            buffer[: len(ids)] = ids
            scored = params.prompt_logprobs is not None and child == 0 and len(ids) > 1
            output = CompletionBuilder(child, params, self._detokenizer(params), scored)
            output.logit_hashes = [] if keeps_hashes else None
            sequence = Sequence(
                number=number,
                child=child,
                params=params,
                prompt_len=len(ids),
                ids=buffer,
                room=room,
                seed=child_seed(seed, child),
                root=root,
                output=output,
                submitted=now,
                banned=banned,
                parent=sequences[0] if child else None,
                images=images,
            )
            sequence.append(output_ids)
            for token in output_ids:
                sequence.output.push(token)
            sequence.planned = sequence.produced
            sequences.append(sequence)
        request = Request(request_id, params, seed, sequences, now, recorder=self.recorder)
        if params.prompt_logprobs is not None:
            wide, count = min(params.prompt_logprobs, self.config.vocab_size), len(ids) - 1
            shape = (count, wide)
            request.prompt_scores = (
                np.zeros(count, np.float32),
                np.zeros(shape, np.int32),
                np.zeros(shape, np.float32),
            )
        return request

    def check(
        self, ids: Items[int], params: SamplingParams, request_id: str, images: Items[Any] = ()
    ) -> None:
        """Raises InputError or TokenizerError for a request that cannot be honoured.

        Arguments as `Engine.submit`.
        """
        expanded, placed = placed_images(self.config, ids, images)
        self._check(expanded, params, request_id, placed)

    def _check(
        self,
        ids: Items[int],
        params: SamplingParams,
        request_id: str,
        images: tuple[PromptImage, ...],
    ) -> None:
        vocab, runtime = self.config.vocab_size, self.runtime
        rows = sum(one.span.length for one in images)
        host_ids(self.config, ids, minimum=1, image_rows=rows)
        for one in images:
            size_for(self.config, grid_of(self.config, one.image.pixels))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token for token in getattr(params, name) or () if token >= vocab]
            if outside:
                raise InputError(f"{name} must be below {vocab}, got {outside}")
        scoring = params.max_tokens == 0
        if len(ids) + (not scoring) > self.max_len:
            raise InputError(
                f"prompt {request_id} has {len(ids)} tokens, and a sequence may have "
                f"{self.max_len} with at least one to generate: shorten it, or raise "
                "RuntimeConfig.max_len"
            )
        most = runtime.max_stop_ids - (not params.ignore_eos)
        if len(params.stop_token_ids) > most:
            raise InputError(
                f"at most {most} stop_token_ids fit beside the end token, got "
                f"{len(params.stop_token_ids)}: raise RuntimeConfig.max_stop_ids"
            )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > runtime.max_logprobs:
                raise InputError(
                    f"{name} must be at most RuntimeConfig.max_logprobs = "
                    f"{runtime.max_logprobs}, got {asked}"
                )
        if params.prompt_logprobs is not None and runtime.replay != "off":
            raise InputError(
                'prompt_logprobs need every row of the prompt: set RuntimeConfig.replay="off", '
                f"which is {runtime.replay!r}"
            )
        needs_text = [n for n in ("stop", "bad_words") if getattr(params, n)]
        if needs_text and self.tokenizer is None:
            raise TokenizerError(f"{needs_text[0]} needs tokenizer.json: use token ids")
        if params.stop and not params.detokenize:
            raise InputError("stop strings need text: detokenize=False excludes them")
        self._banned(params)
        self._check_drafts(params)
        if params.grammar is not None and jax.process_count() > 1:
            raise InputError(
                f"grammars run in one process, whose masks do not travel: this is a job of "
                f"{jax.process_count()}, leave grammar out"
            )
        if params.grammar is not None and self.tokenizer is None:
            raise TokenizerError("a grammar needs tokenizer.json, and this model has none")

    def _check_drafts(self, params: SamplingParams) -> None:
        if params.verify != "exact" and self.config.execution.determinism == "batch":
            raise InputError(
                f"verify={params.verify!r} gives tokens that depend on how rounds are cut: use "
                '"exact" at level "batch", or load the model with determinism="run"'
            )
        if params.max_draft is not None and params.max_draft > self.drafts:
            raise InputError(
                f"max_draft must be at most the {self.drafts} drafts of a round here, got "
                f"{params.max_draft}"
            )

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            keeps_stop=params.include_stop_str_in_output,
        )

    def _banned(self, params: SamplingParams) -> tuple[int, ...]:
        found: list[int] = []
        for word in params.bad_words:
            assert self.tokenizer is not None
            spellings = {
                tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
                for text in (word, f" {word}")
            }
            single = [ids[0] for ids in spellings if len(ids) == 1]
            if len(single) < len(spellings):
                raise InputError(
                    f"a bad word must be one token, alone and after a space; {word!r} is not in "
                    "this vocabulary. Use logit_bias or allowed_token_ids"
                )
            found += single
        return tuple(found)


def request_factory(
    model: Model, runtime: RuntimeConfig, *, records: bool = False
) -> RequestFactory:
    """Returns the factory of an engine of this model; records: as `RuntimeConfig.record` says.

    Raises:
        ConfigError: as `plan_drafting`.
    """
    drafting = plan_drafting(model, runtime)
    return RequestFactory(
        config=model.config,
        runtime=runtime,
        tokenizer=model.tokenizer,
        max_len=runtime.longest(model.config),
        drafts=drafting.size if drafting else 0,
        recorder=make_recorder(model, runtime) if records else None,
    )
