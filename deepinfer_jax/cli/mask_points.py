"""What a grammar costs on the host: time to the first mask, and between masks (io.md 2.2, 7.4)."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.errors import GrammarError, InputError
from deepinfer_jax.grammar.masks import fill_masks
from deepinfer_jax.grammar.spec import Grammar
from deepinfer_jax.grammar.template import Template, compile_grammar, grammar_gate
from deepinfer_jax.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance
    from tokenizers import Tokenizer

#: Instances of one schema that are replayed, at most.
_INSTANCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskCase:
    """A JSON schema, and instances: (whether it is valid, the value)."""

    name: str
    schema: Any
    instances: tuple[tuple[bool, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPoint:
    """What was measured of one schema.

    refused: why it is not compiled; None if it is. instances: that there are. accepted: invalid
    ones that the grammar allows; rejected: valid ones that it does not. first_ms: to compile it,
    its first mask included. mask_us: of every token of the valid instances, to take it and to make
    the mask behind it.
    """

    name: str
    first_ms: float
    refused: str | None = None
    instances: int = 0
    accepted: int = 0
    rejected: int = 0
    mask_us: tuple[float, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether all its instances were told apart, and there are some."""
        return bool(self.instances) and not (self.accepted or self.rejected or self.refused)


def read_cases(folder: Path, most: int, seed: int) -> list[MaskCase]:
    """Returns a sample of the schemas in a folder of MaskBench's layout.

    Each file is a JSON object with a schema and tests: objects with valid (true or false) and data.

    Args:
        folder: with the files.
        most: schemas that are taken.
        seed: of the sample.

    Raises:
        InputError: there are none, or a file is not of that layout.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"--data must be a folder of JSON files as MaskBench has them: {folder}")
    chosen = random.Random(seed).sample(paths, min(most, len(paths)))
    return [_read_case(path) for path in sorted(chosen)]


def _read_case(path: Path) -> MaskCase:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        tests = tuple((bool(one["valid"]), one["data"]) for one in found.get("tests", ()))
        return MaskCase(name=path.stem, schema=found["schema"], instances=tests)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} must be a JSON object with schema and tests (valid, data): {error!r}"
        ) from error


def own_cases() -> list[MaskCase]:
    """Returns a few schemas of kinds that differ in cost, for when there is no folder."""
    text, number = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 150}
    shapes = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, kind: text},
            "required": ["kind", kind],
            "additionalProperties": False,
        }
        for kind in ("circle", "square", "line", "point")
    ]
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": text,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    many = {"type": "object", "properties": {f"field{n}": number for n in range(30)}}
    person = {
        "type": "object",
        "properties": {
            "name": text | {"maxLength": 40},
            "age": number,
            "born": text | {"format": "date"},
        },
        "required": ["name", "age", "born"],
        "additionalProperties": False,
    }
    ann = {"name": "Ann Smith", "age": 42, "born": "1982-03-14"}
    words = [f"option number {n}" for n in range(1000)]
    leaf = {"name": "leaf", "children": []}
    return [
        MaskCase(
            name="object of three",
            schema=person,
            instances=((True, ann), (False, ann | {"age": 151}), (False, ann | {"born": "May"})),
        ),
        MaskCase(name="any object", schema={"type": "object"}, instances=((True, ann), (False, 5))),
        MaskCase(
            name="one of four",
            schema={"anyOf": shapes},
            instances=(
                (True, {"kind": "line", "line": "from a to b"}),
                (False, {"kind": "line", "point": "a"}),
            ),
        ),
        MaskCase(
            name="tree",
            schema=tree,
            instances=((True, {"name": "root", "children": [leaf, leaf]}), (False, {"name": "a"})),
        ),
        MaskCase(
            name="thirty optional fields",
            schema=many,
            instances=((True, {"field3": 5, "field20": 150}), (False, {"field3": "5"})),
        ),
        MaskCase(
            name="enum of a thousand",
            schema={"enum": words},
            instances=((True, words[737]), (False, "option number 1000")),
        ),
        MaskCase(
            name="long text",
            schema=text | {"minLength": 10, "maxLength": 4000},
            instances=((True, "a long way " * 20), (False, "short")),
        ),
    ]


def measure(
    cases: list[MaskCase], vocabulary: Vocabulary, tokenizer: "Tokenizer"
) -> Iterator[MaskPoint]:
    """Yields what each case costs, one after the other on one thread, as it comes."""
    import llguidance

    executor = llguidance.LLExecutor(1)
    for case in cases:
        begin = time.perf_counter()
        refused, template = None, None
        try:
            grammar = Grammar.json_schema(json.dumps(case.schema, ensure_ascii=False))
            template = compile_grammar(grammar, vocabulary)
        except GrammarError as error:
            refused = str(error)
        seconds = time.perf_counter() - begin
        point = MaskPoint(
            name=case.name,
            first_ms=1e3 * seconds,
            refused=refused,
            instances=len(case.instances[:_INSTANCES]),
        )
        yield point if template is None else _replay(case, point, template, tokenizer, executor)


def _replay(
    case: MaskCase,
    point: MaskPoint,
    template: Template,
    tokenizer: "Tokenizer",
    executor: "llguidance.LLExecutor",
) -> MaskPoint:
    gate = grammar_gate(Grammar.json_object(), template.vocabulary)
    times: list[float] = []
    accepted = rejected = 0
    for is_valid, value in case.instances[:_INSTANCES]:
        text = json.dumps(value, ensure_ascii=False)
        matcher, is_legal, own = template.matcher(gate), True, []
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            begin = time.perf_counter()
            row = fill_masks(executor, template.vocabulary.width, [(0, matcher)]).words[0]
            is_legal = bool(row[token // 32] >> (token % 32) & 1)
            if not is_legal:
                break
            matcher.accept([token])
            own.append(1e6 * (time.perf_counter() - begin))
        is_legal = is_legal and matcher.can_end
        accepted += is_legal and not is_valid
        rejected += is_valid and not is_legal
        times += own if is_valid else []
    return replace(
        point,
        accepted=accepted,
        rejected=rejected,
        mask_us=tuple(times),
    )


def summary(points: list[MaskPoint]) -> dict[str, Any]:
    """Returns counts, and percentiles of the times: first_ms by schema, mask_us by token."""
    firsts = [point.first_ms for point in points]
    masks = [value for point in points for value in point.mask_us]
    return {
        "schemas": len(points),
        "with_instances": sum(point.instances > 0 for point in points),
        "right": sum(point.is_right for point in points),
        "refused": sum(point.refused is not None for point in points),
        "accept_invalid": sum(point.accepted > 0 for point in points),
        "reject_valid": sum(point.rejected > 0 for point in points),
        "tokens": len(masks),
        "first_ms": _spread(firsts),
        "mask_us": _spread(masks),
    }


def as_record(point: MaskPoint) -> dict[str, Any]:
    """Returns a point as JSON types, its times as percentiles."""
    return asdict(replace(point, mask_us=())) | {"mask_us": _spread(list(point.mask_us))}


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(np.asarray(values), [50, 90, 99, 100])
    return {
        name: round(float(value), 2)
        for name, value in zip(("p50", "p90", "p99", "max"), found, strict=True)
    }
