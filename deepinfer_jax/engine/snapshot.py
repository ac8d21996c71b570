"""Unfinished requests as plain values, for JSON, and back."""

from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_jax.engine.prompt import PromptImage, pack_image, unpack_image
from deepinfer_jax.engine.request import Request
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """What a request needs to continue."""

    request_id: str
    ids: list[int]
    output: list[int]
    params: SamplingParams
    seed: int
    images: tuple[PromptImage, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """What the engine needs to know beside prompt and parameters."""
        return {"request_id": self.request_id, "seed": self.seed, "output_ids": self.output}


def pack_request(request: Request) -> dict[str, Any]:
    """Returns a request as plain values; the output so far counts for n = 1 only."""
    first = request.sequences[0]
    fields = asdict(request.params)
    alone = request.params.n == 1 and request.params.prompt_logprobs is None
    alone = alone and request.params.logprobs is None
    return {
        "request_id": request.request_id,
        "ids": list(request.prompt),
        "output": first.output_ids if alone else [],
        "params": fields | {"seed": request.seed},
        "seed": request.seed,
        "images": [pack_image(one) for one in first.images],
    }


def unpack_request(saved: dict[str, Any]) -> SavedRequest:
    """Returns the request that `pack_request` wrote, also after a round trip through JSON."""
    fields = dict(saved["params"])
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if fields[name] is not None:
            fields[name] = tuple(fields[name])
    if fields["logit_bias"] is not None:
        fields["logit_bias"] = {int(k): v for k, v in fields["logit_bias"].items()}
    if fields["grammar"] is not None:
        fields["grammar"] = Grammar.from_fields(fields["grammar"])
    return SavedRequest(
        request_id=saved["request_id"],
        ids=[int(token) for token in saved["ids"]],
        output=[int(token) for token in saved["output"]],
        params=SamplingParams(**fields),
        seed=int(saved["seed"]),
        images=tuple(unpack_image(one) for one in saved.get("images", ())),
    )
