"""What the device must know of a sequence that starts: one row of the packed plan."""

import numpy as np

from deepinfer_jax.cache.hit import HitRule, first_decoder_row
from deepinfer_jax.engine.layout import ADMIT_FLOATS, ADMIT_INTS
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.sampling.params import GREEDY_BELOW
from deepinfer_jax.speculative.verify import EXACT, RULES

_LARGEST = float(np.finfo(np.float32).max)


def write_admission(
    entry: np.ndarray, sequence: Sequence, rule: HitRule, eos: int, drafts: int
) -> None:
    """Writes the words of `layout.ADMIT_INTS`, `ADMIT_FLOATS` and the stop ids."""
    params, first = sequence.params, sequence.first
    cold = params.temperature < GREEDY_BELOW
    before = [int(t) for t in sequence.ids[max(0, first - 3) : first]]
    before = [0] * (3 - len(before)) + before
    values = {
        "slot": sequence.slot,
        "generation": sequence.generation,
        "length": sequence.reused,
        "first": first,
        "floor": first_decoder_row(rule, sequence.prompt_len, sequence.count),
        "produced": sequence.produced,
        "most": sequence.room,
        "least": params.min_tokens,
        "key_high": np.uint32(sequence.seed >> 32).view(np.int32),
        "key_low": np.uint32(sequence.seed & 0xFFFFFFFF).view(np.int32),
        "top_k": -1 if params.top_k <= 0 else min(params.top_k, 2**31 - 1),
        "edited": sequence.has_edits,
        "processed": params.logprobs_mode == "processed",
        "most_drafts": drafts if params.max_draft is None else params.max_draft,
        # All rules give the same tokens at temperature 0; this one is the cheapest.
        "rule": EXACT if cold else RULES.index(params.verify),
        **{f"before_{place}": token for place, token in enumerate(before)},
    }
    reals = {name: float(getattr(params, name)) for name in ADMIT_FLOATS}
    reals["temperature"] = 0.0 if cold else min(reals["temperature"], _LARGEST)
    first = len(ADMIT_INTS)
    entry[:first] = [values[name] for name in ADMIT_INTS]
    words = np.asarray([reals[name] for name in ADMIT_FLOATS], np.float32).view(np.int32)
    entry[first : first + len(words)] = words
    stops = entry[first + len(words) :]
    known = [*params.stop_token_ids, *(() if params.ignore_eos else (eos,))]
    stops[:] = -1
    stops[: len(known)] = known
