"""Host side of per-request logit edits: counts, token sets and biases as rows of the device."""

import numpy as np

from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import BANNED, IN_PROMPT, null_marks


def edit_rows(sequence: Sequence, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (marks [v], bias ids, bias values) of a sequence about to start or start again."""
    marks, bias_ids, bias_values = null_marks(vocab_size)
    params, start = sequence.params, sequence.prompt_len
    np.add.at(marks, sequence.ids[start : sequence.count], 1)
    marks[sequence.ids[:start]] |= IN_PROMPT
    if params.allowed_token_ids is not None:
        is_banned = np.ones(vocab_size, bool)
        is_banned[list(params.allowed_token_ids)] = False
        marks[is_banned] |= BANNED
    marks[list(sequence.banned)] |= BANNED
    for place, (token, value) in enumerate(sorted((params.logit_bias or {}).items())):
        bias_ids[place], bias_values[place] = token, value
    return marks, bias_ids, bias_values
