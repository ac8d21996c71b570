"""Where two run records differ: in what was run, and in what came out."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_jax.record.run_record import RecordedOutput, RunRecord

#: Ends that depend on time or on the host: what came out before them is a beginning.
_CUT_SHORT = ("abort", "deadline", "error")


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Returns the first field that differs, by name, with both values; None if all are equal."""
    return next(differences(expected, found), None)


def differences(expected: Any, found: Any, name: str = "") -> Iterator[str]:
    """Yields "name: the record has x, here it is y" for every field that differs."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted({*expected, *found}):
            inner = f"{name}.{key}" if name else str(key)
            yield from differences(expected.get(key), found.get(key), inner)
    elif expected != found:
        yield f"{name}: the record has {expected!r}, here it is {found!r}"


def output_difference(expected: RunRecord, found: RunRecord) -> str | None:
    """Returns the first place where the outputs of a record and of its replay differ.

    A completion that was aborted, or ended by a deadline or an error, is compared up to there.
    """
    if len(expected.outputs) != len(found.outputs):
        return f"the record has {len(expected.outputs)} completions, here {len(found.outputs)}"
    for number, pair in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        difference = _completion_difference(*pair)
        if difference is not None:
            return f"completion {number}, {difference}"
    return None


def _completion_difference(expected: RecordedOutput, found: RecordedOutput) -> str | None:
    wanted, got = _tokens(expected), _tokens(found)
    if wanted and wanted[0][1] is None:
        got = [(token, None) for token, _ in got]  # the record has no hashes to compare
    is_cut = expected.finish_reason in _CUT_SHORT
    for place in range(len(wanted) if is_cut else max(len(wanted), len(got))):
        one = wanted[place] if place < len(wanted) else None
        two = got[place] if place < len(got) else None
        if one != two:
            return f"token {place}: expected {_describe(one)}, got {_describe(two)}"
    ends = [(o.finish_reason, o.stop_reason) for o in (expected, found)]
    if not is_cut and ends[0] != ends[1]:
        return f"after token {len(wanted)}: expected the end {ends[0]}, got {ends[1]}"
    return None


def _tokens(output: RecordedOutput) -> list[tuple[int, str | None]]:
    hashes = output.logit_hashes or (None,) * len(output.token_ids)
    return list(zip(output.token_ids, hashes, strict=True))


def _describe(token: tuple[int, str | None] | None) -> str:
    if token is None:
        return "no token"
    return f"id {token[0]}" + ("" if token[1] is None else f" (logits {token[1]})")
