"""Run records: their text, their hashes against other code, and what the engine puts in them."""

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.model.engram.table import HostTable
from deepinfer_jax.record.compare import differences, output_difference
from deepinfer_jax.record.logit_hash import hash_text, logit_hash_tile
from deepinfer_jax.record.recorder import Recorder
from deepinfer_jax.record.run_record import RecordedOutput, RunRecord
from deepinfer_jax.record.weights import WeightsHash, weights_root
from tests.golden.network import TINY

SIZES: dict[str, Any] = {
    "max_seqs": 4,
    "max_len": 128,
    "max_tokens_per_step": 32,
    "block_tokens": 16,
}
PROMPT = [5, 6, 7, 8, 9]
PARAMS = di.SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


def mix(x: int) -> int:
    """The finaliser of MurmurHash3 on Python integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def hash_of(logits: np.ndarray) -> str:
    """The hash of a row as `record.logit_hash` describes it."""
    first = [mix(int(u) ^ mix(i + 1)) for i, u in enumerate(logits.view(np.uint32))]
    second = [mix(a ^ 0x9E3779B9) for a in first]
    return f"{sum(first) % 2**32:08x}{sum(second) % 2**32:08x}"


@pytest.fixture(scope="module")
def model():
    return di.load(TINY, numerics="float32")


@pytest.fixture(scope="module")
def llm(model):
    return di.LLM(model, runtime=di.RuntimeConfig(**SIZES, record="logits"))


@pytest.fixture(scope="module")
def plain(model):
    return di.LLM(model, runtime=di.RuntimeConfig(**SIZES))


@pytest.fixture(scope="module")
def record(llm) -> RunRecord:
    (output,) = llm.generate([PROMPT], PARAMS, progress=False)
    return output.record


def test_logit_hash_is_the_one_described():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 33), np.float32)
    rows[1], rows[2] = rows[0], rows[0]
    rows[1, 4], rows[2, 4] = 0.0, -0.0
    rows[3, :2] = np.nan, -np.inf
    found = [hash_text(words) for words in np.asarray(jax.jit(logit_hash_tile)(rows))]
    assert found == [hash_of(row) for row in rows]
    assert len(set(found)) == len(found)


def test_logit_hash_sees_every_bit_and_every_place():
    row = np.random.default_rng(1).standard_normal(32, np.float32)
    flipped = np.tile(row, (33, 1))
    for bit in range(32):
        flipped.view(np.uint32)[bit, bit] ^= np.uint32(1 << bit)
    moved = np.tile(row, (31, 1))
    for place in range(31):
        moved[place, [place, place + 1]] = moved[place, [place + 1, place]]
    found = np.asarray(logit_hash_tile(jnp.asarray(np.concatenate([flipped, moved]))))
    assert len({hash_text(words) for words in found}) == 33 + 31


def test_weights_root_is_a_merkle_root():
    def leaf(name: str, array: np.ndarray) -> bytes:
        head = f"{name} {array.dtype.name} {list(array.shape)}\n".encode()
        return hashlib.sha256(b"\0" + head + array.tobytes()).digest()

    a, b, c = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.uint8), np.zeros(0)
    pair = hashlib.sha256(b"\1" + leaf("a", a) + leaf("b.x", b)).digest()
    root = hashlib.sha256(b"\1" + pair + leaf("c", c)).hexdigest()
    assert weights_root({"c": c, "b": {"x": b}, "a": a}) == root
    assert weights_root({"c": c, "b": {"x": jnp.asarray(b)}, "a": a}) == root
    assert weights_root({"d": c, "b": {"x": b}, "a": a}) != root
    assert weights_root({"c": c, "b": {"x": b}, "a": a.reshape(3, 2)}) != root
    a[1, 2] = np.nextafter(a[1, 2], np.float32(9))
    assert weights_root({"c": c, "b": {"x": b}, "a": a}) != root


def test_weights_root_does_not_depend_on_where_tables_are():
    class Table:  # a tree node with the fields of a quantised table
        payload = np.ones((4, 32), np.uint8)
        scale = np.full((4, 1), 3, np.uint8)

    host = HostTable(Table.payload, Table.scale, is_mapped=False)
    device = {"payload": jnp.asarray(Table.payload), "scale": jnp.asarray(Table.scale)}
    assert weights_root({"table": host}) == weights_root({"table": device})


def test_weights_root_leaves_out_what_a_mesh_repeats():
    experts, table = np.arange(24).reshape(2, 3, 4), np.arange(20).reshape(5, 4)
    gate, maps = np.zeros((2, 3, 8)), {"slots": np.zeros((2, 4))}
    one = {"layers": {"experts": {"w1": experts}, "gate": gate}, "engram": {"tables": (table,)}}
    longer = np.concatenate([experts, experts[:, :1]], axis=1)
    layers = {"experts": {"w1": longer}, "gate": gate, "replicas": maps}
    more = {"layers": layers, "engram": {"tables": (np.concatenate([table, table[:1]]),)}}
    assert weights_root(more, (5,)) == weights_root(one, (5,)) == weights_root(one)
    assert weights_root(more) != weights_root(one)


def test_a_weights_hash_is_taken_once_and_travels_alone():
    weights = WeightsHash({"a": np.arange(1000)})
    small = pickle.dumps(weights)
    assert len(small) < 500
    root = weights.root()
    weights.release()
    assert pickle.loads(small).root() == weights.root() == root
    late = WeightsHash({"a": np.arange(1000)})
    late.release()
    with pytest.raises(di.InputError, match="before replace_params"):
        late.root()


def test_text_is_canonical_and_comes_back(tmp_path, model):
    bias = {10: 1.5, 9: -0.1}
    params = replace(PARAMS, logit_bias=bias, stop=("\u00e9nd",), cache_salt="secret")
    output = RecordedOutput(
        token_ids=(1, 2), finish_reason="stop", stop_reason="\u00e9nd", logit_hashes=("0", "1")
    )
    made = Recorder(model, di.RuntimeConfig(**SIZES)).record([5], params, 2**64 - 1, [output])
    text = made.to_json()
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    assert "\u00e9nd" in text
    assert "secret" not in text
    fields = json.loads(text)
    assert fields["request"]["params"]["seed"] == 2**64 - 1
    assert fields["request"]["params"]["logit_bias"] == {"10": 1.5, "9": -0.1}
    assert list(fields) == sorted(fields)
    made.write(tmp_path / "r.json")
    again = di.read_record(tmp_path / "r.json")
    assert again.to_json().encode() == (tmp_path / "r.json").read_bytes()
    assert again == made


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "format"),
        ({"format": "x"}, "RunRecord.write"),
        ({"format_version": 2}, "upgrade"),
        ({"model": None}, "damaged"),
        ({"request": {"params": {}}}, "prompt_token_ids"),
        ({"outputs": [{"token_ids": [1]}]}, "damaged"),
        ({"outputs": [{"token_ids": [1], "finish_reason": "stop", "stop_reason": None,
                       "logit_hashes": []}]}, "1 tokens with 0"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, record, change, complaint):
    path = tmp_path / "r.json"
    text = change if isinstance(change, str) else json.dumps(json.loads(record.to_json()) | change)
    path.write_text(text)
    with pytest.raises(di.InputError, match=complaint):
        di.read_record(path)


def test_the_first_difference_of_outputs_is_named(record):
    (output,) = record.outputs

    def compare(expected=output, **changes):
        one = replace(record, outputs=(expected,))
        return output_difference(one, replace(record, outputs=(replace(output, **changes),)))

    ids, hashes = output.token_ids, output.logit_hashes
    assert compare() is None
    changed = (*hashes[:4], "f" * 16, *hashes[5:])
    assert "token 4: expected id" in compare(logit_hashes=changed)
    assert compare(replace(output, logit_hashes=None), logit_hashes=changed) is None
    short = {"token_ids": ids[:-1], "logit_hashes": hashes[:-1]}
    assert f"token {len(ids) - 1}: expected id {ids[-1]}" in compare(**short)
    assert "got id" in compare(replace(output, **short))
    assert compare(replace(output, **short, finish_reason="abort")) is None
    assert "the end ('length', None), got ('stop', 1)" in compare(
        finish_reason="stop", stop_reason=1
    )
    assert "completions" in output_difference(record, replace(record, outputs=()))
    found = list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}))
    assert [line.partition(":")[0] for line in found] == ["a.c", "a.d"]


def test_hashes_are_those_of_the_scored_logits(model, record):
    (output,) = record.outputs
    ids = [*PROMPT, *output.token_ids]
    logits = np.asarray(di.score(model.params, model.config, np.asarray(ids, np.int32)))
    rows = logits[len(PROMPT) - 1 : len(ids) - 1]
    assert output.logit_hashes == tuple(hash_of(row) for row in rows)


def test_a_record_says_the_same_alone_and_in_company(llm, record):
    params = [replace(PARAMS, n=2), PARAMS, replace(PARAMS, logprobs=1), replace(PARAMS, seed=4)]
    outputs = llm.generate([PROMPT, PROMPT, PROMPT, PROMPT[:3]], params, progress=False)
    assert outputs[1].record.to_json() == record.to_json()
    assert outputs[2].record.outputs == outputs[0].record.outputs[:1] == record.outputs
    assert len(outputs[0].record.outputs) == 2
    assert outputs[0].record.outputs[1] != record.outputs[0]
    assert pickle.loads(pickle.dumps(outputs[1])).record == record


def test_a_stop_string_cuts_hashes_with_their_tokens(llm, record):
    text = llm.generate([PROMPT], PARAMS, progress=False)[0].text
    params = replace(PARAMS, stop=(text[len(text) // 2 :][:3],))
    (output,) = llm.generate([PROMPT], params, progress=False)[0].record.outputs
    assert 0 < len(output.token_ids) == len(output.logit_hashes) < PARAMS.max_tokens
    assert output.logit_hashes == record.outputs[0].logit_hashes[: len(output.token_ids)]


def test_a_restored_request_has_all_hashes(llm, record):
    engine = llm.engine
    engine.submit(PROMPT, PARAMS)
    while not engine.counters["tokens"]:
        engine.step()
    for _ in range(3):
        engine.step()
    saved = engine.snapshot()
    engine.abort_all()
    engine.drain()
    assert saved["requests"][0]["output"]
    (request,) = engine.restore(json.loads(json.dumps(saved)))
    engine.drain()
    assert request.output().record.outputs == record.outputs


def test_without_logits_nothing_of_the_hash_is_in_the_program(llm, plain, record):
    def program(llm: di.LLM) -> str:
        (compiled,) = llm.engine._device._programs.values()
        return compiled.as_text()

    (output,) = plain.generate([PROMPT], PARAMS, progress=False)
    assert output.record.outputs == (replace(record.outputs[0], logit_hashes=None),)
    assert output.record.runtime == record.runtime | {"record": "ids"}
    factor = str(0x85EBCA6B)
    assert factor in program(llm)
    assert factor not in program(plain)


def test_replaced_weights_have_a_hash_of_their_own(model, plain):
    early, late = plain.generate([PROMPT] * 2, PARAMS, progress=False)
    before = early.record.model["weights_sha256"]
    head = model.params.head.at[0, 0].add(1)
    plain.replace_params(replace(model.params, head=head))
    assert early.record.model["weights_sha256"] == late.record.model["weights_sha256"] == before
    (unread,) = plain.generate([PROMPT], PARAMS, progress=False)
    plain.replace_params(replace(model.params, head=head + 1))
    with pytest.raises(di.InputError, match="before replace_params"):
        _ = unread.record
    newest = plain.generate([PROMPT], PARAMS, progress=False)[0].record
    assert newest.model["weights_sha256"] != before
    plain.close()
    assert plain.generate([PROMPT], PARAMS, progress=False)[0].record == newest


def test_records_can_be_switched_off(model):
    engine = di.Engine(model, di.RuntimeConfig(**SIZES, record=None))
    request = engine.submit(PROMPT, PARAMS)
    engine.abort_all()
    engine.drain()
    assert request.output().record is None
    with pytest.raises(di.ConfigError, match="record must be"):
        di.RuntimeConfig(record="all")
