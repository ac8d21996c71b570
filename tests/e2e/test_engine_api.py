"""The engine's surface: bad values, life cycle of requests, resilience, observability (7.1)."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.errors import CapacityError
from tests.e2e.lab import BASE, GREEDY, alone, assert_same, make_engine, model, run

pytestmark = pytest.mark.accept(5)
PROMPT = np.random.default_rng(3).integers(3, 500, 40).tolist()
LONG = replace(GREEDY, max_tokens=30)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Returns the time."""
        return self.now


# -- what is refused ------------------------------------------------------------------------------

BAD_RUNTIME = (
    *(("max_seqs", value) for value in (0, -1, True, 1.5, "4", None)),
    *(("max_tokens_per_step", value) for value in (0, None, 2.0)),
    *(("max_len", value) for value in (0, -4, "x")),
    *(("block_tokens", value) for value in (0, 8, 17, 128.0)),
    *(("cache_bytes", value) for value in (0, -1, 1e9)),
    *(("prefix_cache", value) for value in (1, None)),
    *(("prefix_restore", value) for value in ("", None, "exact")),
    ("checkpoint_bytes", -1),
    *(("replay", value) for value in (None, "on", True)),
    ("replay_keep_tokens", 0),
    *(("async_depth", value) for value in (-1, 3, True, 1.0)),
    *(("drafting", value) for value in (1, "yes")),
    *(("draft_policy", value) for value in (None, "always")),
    *(("draft_length", value) for value in (-1, 3, True, 2.0)),
    *(("draft_threshold", value) for value in (-0.1, 1.1, 0.5, 1, float("nan"))),
    ("max_logprobs", -1),
    ("max_stop_ids", 0),
    ("check", 1),
)


@pytest.mark.parametrize(("name", "value"), BAD_RUNTIME)
def test_a_bad_option_names_itself_and_its_value(name, value):
    with pytest.raises(di.ConfigError, match=re.escape(name)) as caught:
        di.RuntimeConfig(**{name: value})
    assert repr(value) in str(caught.value)


EDGES = (
    {"max_len": 1},
    {"prefix_restore": "halo"},
    {"checkpoint_bytes": 0},
    {"async_depth": 0},
    {"async_depth": 2},
    {"drafting": True},
    {"draft_policy": "fixed", "draft_length": 0},
    {"draft_policy": "threshold", "draft_threshold": 0.0},
    {"draft_policy": "threshold", "draft_threshold": 1.0},
    {"max_logprobs": 0},
)


@pytest.mark.parametrize("options", EDGES, ids=lambda options: str(options))
def test_edges_of_options_are_accepted(options):
    assert replace(BASE, **options) != BASE


def test_unknown_keywords_name_the_nearest_one():
    with pytest.raises(TypeError, match=r"max_seq'; did you mean 'max_seqs'"):
        di.RuntimeConfig(max_seq=3)
    with pytest.raises(TypeError, match=r"max_new_tokens'; did you mean 'max_tokens'"):
        di.SamplingParams(max_new_tokens=3)
    for name in ("best_of", "stop_regex", "structural_tag", "return_hidden_states"):
        with pytest.raises(TypeError, match=name):
            di.SamplingParams(**{name: 1})


#: Legal alone, refused by this engine: (field, value, words of the message).
REFUSED = (
    ("stop_token_ids", (512,), r"stop_token_ids must be below 512, got \[512\]"),
    ("allowed_token_ids", (3, 900), r"allowed_token_ids must be below 512, got \[900\]"),
    ("logit_bias", {512: 1.0}, r"logit_bias must be below 512, got \[512\]"),
    ("stop_token_ids", tuple(range(3, 20)), "at most 16 stop_token_ids.*got 17"),
    ("logprobs", 21, "logprobs must be at most .* 20, got 21"),
    ("prompt_logprobs", 21, "prompt_logprobs must be at most .* 20, got 21"),
    ("bad_words", ("fox",), "fox"),
    ("verify", "block", "verify='block'"),
    ("verify", "rejection", "verify='rejection'"),
    ("max_draft", 3, "max_draft must be at most the 0 drafts .* got 3"),
)


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_what_cannot_be_honoured_raises_and_runs_nothing(engine, name, value, words):
    before = engine.stats().counters
    with pytest.raises(di.InputError, match=words):
        engine.submit(PROMPT, replace(GREEDY, **{name: value}))
    assert engine.stats().counters == before
    assert not engine.has_work


def test_stop_strings_without_text_name_both_fields(engine):
    with pytest.raises(di.InputError, match=r"stop.*detokenize=False"):
        engine.submit(PROMPT, replace(GREEDY, stop=("x",), detokenize=False))


@pytest.mark.parametrize("field", [{"stop": ("x",)}, {"bad_words": ("x",)}])
def test_text_features_without_a_tokenizer_raise(field):
    bare = di.LLM(replace(model(), tokenizer=None), runtime=BASE)
    with pytest.raises(di.DeepInferError, match=next(iter(field))):
        bare.generate([PROMPT], replace(GREEDY, **field), progress=False)
    (output,) = bare.generate([PROMPT], GREEDY, progress=False)
    assert (output.token_ids, output.text) == (alone(PROMPT, GREEDY).token_ids, "")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least 1"),
        ([5, 512], "512 at position 1"),
        ([5, -1], "-1 at position 1"),
        ([502], "images"),
        (list(range(3, 259)), "256"),
    ],
)
def test_bad_prompts_raise_and_run_nothing(engine, ids, words):
    with pytest.raises(di.InputError, match=words):
        engine.submit(ids, GREEDY)
    assert not engine.has_work


def test_a_name_in_use_is_refused_and_can_be_used_again(engine):
    engine.submit(PROMPT, GREEDY, request_id="mine")
    with pytest.raises(di.InputError, match="'mine' is"):
        engine.submit(PROMPT, GREEDY, request_id="mine")
    engine.drain()
    assert run(engine, PROMPT, GREEDY, request_id="mine").request_id == "mine"


def test_a_drawn_name_avoids_names_in_use():
    engine = make_engine()
    taken = engine.submit(PROMPT, GREEDY, request_id="1")
    other = engine.submit(PROMPT, GREEDY)
    assert other.request_id != taken.request_id
    engine.drain()


def test_too_little_memory_names_both_sizes():
    with pytest.raises(CapacityError, match=r"needs at least \d+ bytes.*available are 1000"):
        make_engine(replace(BASE, cache_bytes=1000))


# -- life cycle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 12])
def test_abort_in_every_phase(depth, steps):
    engine = make_engine(replace(BASE, async_depth=depth))
    long = (PROMPT * 5)[:190]  # three chunks
    victim = engine.submit(long, LONG, request_id="victim")
    mate = engine.submit(PROMPT, LONG)
    for _ in range(steps):
        engine.step()
    assert engine.abort("victim")
    engine.drain()
    output, whole = victim.output(), alone(long, LONG)
    assert output.finish_reason == "abort"
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert_same(mate.output(), alone(PROMPT, LONG))
    assert not engine.abort("victim")
    assert engine.stats().cache.referenced == 0
    assert engine.stats().counters["finished_abort"] == 1


def test_abort_of_what_is_done_or_unknown_does_nothing(engine):
    output = run(engine, PROMPT, GREEDY, request_id="done")
    assert not engine.abort("done")
    assert not engine.abort("never")
    assert output.finish_reason == "length"


def test_abort_of_a_queued_request():
    engine = make_engine()
    requests = [engine.submit(PROMPT, LONG) for _ in range(6)]  # four slots
    engine.step()
    assert engine.abort(requests[5].request_id)
    engine.drain()
    assert [r.output().finish_reason for r in requests] == ["length"] * 5 + ["abort"]
    assert requests[5].output().token_ids == ()


def test_deadlines_end_queued_and_running_requests():
    clock = Clock()
    engine = make_engine(clock=clock)
    running = engine.submit(PROMPT, replace(LONG, deadline_s=5.0))
    mates = [engine.submit(PROMPT, LONG) for _ in range(3)]
    queued = engine.submit(PROMPT, replace(LONG, deadline_s=3.0))
    for _ in range(6):
        engine.step()
    clock.now += 4
    engine.step()
    assert (queued.output().finish_reason, queued.output().token_ids) == ("deadline", ())
    assert running.ended is None
    clock.now += 1
    engine.drain()
    output = running.output()
    assert output.finish_reason == "deadline"
    assert 0 < len(output.token_ids) < 30
    assert output.token_ids == alone(PROMPT, LONG).token_ids[: len(output.token_ids)]
    for mate in mates:
        assert_same(mate.output(), alone(PROMPT, LONG))


def test_metrics_are_seconds_of_the_clock():
    clock = Clock()
    engine = make_engine(replace(BASE, async_depth=0), clock=clock)
    request = engine.submit(PROMPT[:9], replace(GREEDY, max_tokens=3))
    clock.now += 2  # queued
    engine.step()
    clock.now += 1
    engine.step()
    clock.now += 1
    engine.drain()
    metrics = request.output().metrics
    assert (metrics.queued_s, metrics.first_token_s, metrics.total_s) == (2.0, 2.0, 4.0)


@pytest.mark.parametrize("at", [1, 2, 30])
def test_an_error_in_a_sink_ends_that_request_only(at):
    engine = make_engine()
    calls = []

    def sink(delta: di.StreamDelta) -> None:
        calls.append(delta)
        if len(calls) == at:
            raise RuntimeError("the reader is gone")

    bad = engine.submit(PROMPT, LONG, sink=sink)
    good = engine.submit(PROMPT, LONG)
    engine.drain()
    assert isinstance(bad.error, RuntimeError)
    assert bad.output().finish_reason == ("error" if at < 30 else "length")
    assert bad.output().token_ids == alone(PROMPT, LONG).token_ids[:at]
    assert good.error is None
    assert_same(good.output(), alone(PROMPT, LONG))


def test_nothing_to_generate_ends_at_once(engine):
    output = run(engine, PROMPT, replace(GREEDY, max_tokens=0))
    assert (output.token_ids, output.finish_reason, output.text) == ((), "length", "")


def test_a_full_sequence_ends_with_capacity(engine):
    ids = (PROMPT * 7)[:250]
    output = run(engine, ids, LONG)
    assert (len(output.token_ids), output.finish_reason) == (6, "capacity")
    exact = run(engine, ids, replace(LONG, max_tokens=6))
    assert (exact.token_ids, exact.finish_reason) == (output.token_ids, "length")
    full = run(engine, (PROMPT * 7)[:255], LONG)
    assert (len(full.token_ids), full.finish_reason) == (1, "capacity")


def test_priorities_are_served_first():
    engine = make_engine(replace(BASE, max_seqs=4))
    for number, priority in enumerate((0, 0, 0, 0, -1, 5, 1)):
        params = replace(LONG, priority=priority)
        engine.submit(PROMPT, params, request_id=f"{priority}/{number}")
    done = [request.request_id for request in engine.drain()]
    assert done[:2] == ["5/5", "1/6"]
    assert done[-1] == "-1/4"


def test_a_fork_continues_from_what_was_read():
    engine = make_engine(replace(BASE, async_depth=0))
    parent = engine.submit(PROMPT, LONG, request_id="parent")
    for _ in range(10):
        engine.step()
    with pytest.raises(di.InputError, match="'nobody'"):
        engine.fork("nobody", LONG)
    with pytest.raises(di.InputError, match="parent"):
        engine.fork("parent", LONG, child=1)
    child = engine.fork("parent", replace(LONG, max_tokens=5), request_id="child")
    engine.drain()
    count = len(child.prompt) - len(PROMPT)
    assert count > 0
    whole = alone(PROMPT, LONG).token_ids
    assert child.output().token_ids == whole[count : count + 5]
    assert child.output().cached_tokens > 0
    assert_same(parent.output(), alone(PROMPT, LONG))


# -- the whole ------------------------------------------------------------------------------------

KINDS = (
    LONG,
    replace(LONG, temperature=1.0, seed=7, presence_penalty=0.5, logit_bias={9: 2.0}),
    replace(LONG, temperature=1.0, seed=8, n=3),
    replace(LONG, temperature=1.0, seed=9, logprobs=1, stop=("q",), allowed_token_ids=(5, 6, 7)),
    replace(LONG, prompt_logprobs=1, bad_words=("a",), min_tokens=2, stop_token_ids=(9,)),
    replace(LONG, temperature=1.0),
)


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
def test_a_snapshot_continues_in_another_engine(steps):
    engine = make_engine()
    requests = [engine.submit(PROMPT[i:], kind) for i, kind in enumerate(KINDS)]
    for _ in range(steps):
        engine.step()
    saved = json.loads(json.dumps(engine.snapshot()))
    other = make_engine()
    restored = other.restore(saved)
    assert [r.request_id for r in restored] == [r.request_id for r in requests]
    fresh = other.submit(PROMPT, GREEDY)  # its name must not clash with a restored one
    other.drain()
    engine.drain()
    for one, two in zip(requests, restored, strict=True):
        assert one.output().prompt_token_ids == two.output().prompt_token_ids
        assert one.output().seed == two.output().seed
        for a, b in zip(one.output().outputs, two.output().outputs, strict=True):
            assert_same(b, a)
    assert_same(fresh.output(), alone(PROMPT, GREEDY))


def test_close_gives_the_engine_up_and_the_next_call_makes_one():
    with di.LLM(model(), runtime=BASE) as llm:
        first = llm.engine
        llm.generate([PROMPT], GREEDY, progress=False)
        pending = first.submit(PROMPT, LONG)
    assert not first.has_work
    assert pending.output().finish_reason == "abort"
    (output,) = llm.generate([PROMPT], GREEDY, progress=False)
    assert llm.engine is not first
    assert output.cached_tokens == 0
    assert not llm.abort("nobody")
    llm.close()


METRIC = re.compile(r'[a-z_]+(\{[a-z_]+="[^"\\\n]*"\})? -?\d+(\.\d+)?')
TYPE = re.compile(r"# TYPE ([a-z_]+) (counter|gauge)")


def test_prometheus_text_has_the_exposition_format():
    engine = make_engine()
    for kind in KINDS[:3]:
        run(engine, PROMPT, kind)
    text = engine.stats().prometheus()
    assert text.endswith("\n")
    typed: list[str] = []
    for line in text.splitlines():
        header = TYPE.fullmatch(line)
        if header:
            typed.append(header[1])
        else:
            assert METRIC.fullmatch(line), line
            assert re.match("[a-z_]+", line)[0] == typed[-1]
    assert len(typed) == len(set(typed))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert samples["deepinfer_requests_total"] == "3"
    assert samples["deepinfer_tokens_total"] == "150"
    assert samples['deepinfer_finished_total{reason="length"}'] == "5"
    assert samples["deepinfer_blocks_referenced"] == "0"


def test_a_trace_is_valid_json_with_the_spans_of_a_step(tmp_path):
    engine = make_engine()
    run(engine, PROMPT, GREEDY)
    assert engine.trace.spans == []
    engine.trace.is_on = True
    run(engine, PROMPT, GREEDY)
    engine.trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"plan", "dispatch", "wait", "commit"}
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    dispatched = [event["args"] for event in events if event["name"] == "dispatch"]
    assert sum(one["tokens"] for one in dispatched) == 5
