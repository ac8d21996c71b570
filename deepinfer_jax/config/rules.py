"""Rules between fields of a config.json (model.md 1.3-1.6, 3.10, 9.12, 10.1).

A rule is a generator of problem lines over the values that were read. Values that did not pass
their own check are absent: a rule that needs one stops with `KeyError`, which `broken` ignores.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from deepinfer_jax.config.engram_primes import bucket_primes
from deepinfer_jax.config.fields import mismatch, show

Values = Mapping[str, Any]
Rule = Callable[[Values], Iterator[str]]

#: Limits of the integer hash that runs on the device (model.md 3.10.3).
MAX_PRIME, MAX_COMPRESSED_VOCAB, MAX_TABLE_ROWS = 2**25, 2**17, 2**31


def broken(rules: Iterable[Rule], values: Values, path: str) -> Iterator[str]:
    """Yields a line, with field paths under `path`, for everything the rules object to."""
    for rule in rules:
        try:
            for problem in rule(values):
                yield path + problem
        except KeyError:
            continue


def _below(values: Values, name: str, limit: int, what: str) -> Iterator[str]:
    if values[name] is not None and values[name] >= limit:
        yield mismatch(name, f"an id below {what} ({limit})", values[name])


def _multiple(name: str, value: int, divisor: int, why: str) -> Iterator[str]:
    if value % divisor:
        yield mismatch(name, f"a multiple of {divisor} ({why})", value)


def _ascending(values: Values, name: str, limit: int) -> Iterator[str]:
    ids = values[name]
    if list(ids) != sorted(set(ids)) or any(layer >= limit for layer in ids):
        yield mismatch(
            name, f"ascending layer ids, each once, below num_hidden_layers ({limit})", ids
        )


def rotary(values: Values) -> Iterator[str]:
    """Rotary width is even, and fits into the heads that carry it."""
    width = values["qk_rope_head_dim"]
    yield from _multiple("qk_rope_head_dim", width, 2, "channels are rotated in pairs")
    if width >= values["head_dim"]:
        yield mismatch("qk_rope_head_dim", f"less than head_dim ({values['head_dim']})", width)
    if width > values["index_head_dim"]:
        limit = values["index_head_dim"]
        yield mismatch("qk_rope_head_dim", f"at most index_head_dim ({limit})", width)


def output_groups(values: Values) -> Iterator[str]:
    """Output groups split the heads evenly."""
    heads, groups = values["num_attention_heads"], values["o_groups"]
    if heads % groups:
        yield mismatch("o_groups", f"a divisor of num_attention_heads ({heads})", groups)


def experts(values: Values) -> Iterator[str]:
    """No more experts are chosen than there are."""
    count, chosen = values["n_routed_experts"], values["num_experts_per_tok"]
    if chosen > count:
        yield mismatch("num_experts_per_tok", f"at most n_routed_experts ({count})", chosen)


def expert_groups(values: Values) -> Iterator[str]:
    """FP4 rows have one scale per 32 channels."""
    for name in ("hidden_size", "moe_intermediate_size"):
        yield from _multiple(name, values[name], 32, "FP4 experts have a scale per 32 channels")


def activation_groups(values: Values) -> Iterator[str]:
    """V4.1 quantises activations and cache rows in groups of 32 channels."""
    for name in ("q_lora_rank", "head_dim", "index_head_dim"):
        yield from _multiple(name, values[name], 32, "rows are quantised in groups of 32 channels")
    width = values["o_groups"] * values["o_lora_rank"]
    yield from _multiple("o_lora_rank", width, 32, "o_groups * o_lora_rank is quantised by 32")


def token_ids(values: Values) -> Iterator[str]:
    """Token ids lie inside the vocabulary."""
    limit = values["vocab_size"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if name in values:
            yield from _below(values, name, limit, "vocab_size")


def ratios_v41(values: Values) -> Iterator[str]:
    """One ratio per layer (0, 1 or 2), then a 0 per draft stage."""
    ratios, layers = values["compress_ratios"], values["num_hidden_layers"]
    stages = values["num_nextn_predict_layers"]
    if len(ratios) != layers + stages:
        words = f"{layers + stages} entries (num_hidden_layers + num_nextn_predict_layers)"
        yield mismatch("compress_ratios", words, f"{len(ratios)} entries")
        return
    for layer, ratio in enumerate(ratios):
        allowed = (0, 1, 2) if layer < layers else (0,)
        if ratio not in allowed:
            yield mismatch(f"compress_ratios[{layer}]", " or ".join(map(str, allowed)), ratio)


def sources(values: Values) -> Iterator[str]:
    """Source lists are ascending, own compressed rows, and agree with each other."""
    layers, ratios = values["num_hidden_layers"], values["compress_ratios"]
    kv, index = values["kv_source_layer_ids"], values["index_source_layer_ids"]
    before = len(ratios) < layers
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for problem in _ascending(values, name, layers):
            before = True
            yield problem
    keys = values["index_k_source_layer_ids"]
    if keys is not None and keys != kv:
        words = f"the same list as kv_source_layer_ids ({show(kv)})"
        yield mismatch("index_k_source_layer_ids", words, keys)
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        if not values[name]:
            before = True
            yield mismatch(name, "at least one layer id", ())
    if before:
        return
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in values[name]:
            if ratios[layer] == 0:
                yield mismatch(name, "only layers with compress_ratios > 0", layer)
    for layer in sorted(set(kv) - set(index)):
        words = "every layer of kv_source_layer_ids (a top-k segment may not span two KV segments)"
        yield mismatch("index_source_layer_ids", words, f"no entry {layer}")
    yield from _segments(ratios[:layers], kv, index)


def _segments(
    ratios: tuple[int, ...], kv: tuple[int, ...], index: tuple[int, ...]
) -> Iterator[str]:
    for layer, ratio in enumerate(ratios):
        if not ratio:
            continue
        source = last_source(kv, layer)
        if source is None:
            words = f"a source at or before layer {layer}, whose ratio is {ratio}"
            yield mismatch("kv_source_layer_ids", words, kv)
        elif ratios[source] != ratio:
            words = f"the ratio {ratios[source]} of its KV source, layer {source}"
            yield mismatch(f"compress_ratios[{layer}]", words, ratio)
        if last_source(index, layer) is None:
            words = f"a source at or before layer {layer}, whose ratio is {ratio}"
            yield mismatch("index_source_layer_ids", words, index)


def last_source(ids: Iterable[int], layer: int) -> int | None:
    """Returns the last id at or before `layer` (model.md 1.6)."""
    return max((source for source in ids if source <= layer), default=None)


def candidates(values: Values) -> Iterator[str]:
    """The candidate source shares the rows of its users, and its pool holds a full top-k."""
    source = values["candidate_source_layer_id"]
    if source is None:
        return
    blocks, size = values["candidate_topk_blocks"], values["candidate_block_size"]
    if (blocks - 1) * size + 1 < values["index_topk"]:
        words = f"(blocks - 1) * candidate_block_size ({size}) + 1 >= index_topk"
        yield mismatch("candidate_topk_blocks", f"{words} ({values['index_topk']})", blocks)
    index, kv = values["index_source_layer_ids"], values["kv_source_layer_ids"]
    if source not in index:
        words = f"a layer of index_source_layer_ids ({show(index)}), -1 or null"
        yield mismatch("candidate_source_layer_id", words, source)
    for layer in index:
        if layer > source and last_source(kv, layer) != last_source(kv, source):
            words = (
                f"a layer with the same KV source as index source {layer}, which uses its blocks"
            )
            yield mismatch("candidate_source_layer_id", words, source)


def engram(values: Values) -> Iterator[str]:
    """Engram tables have the rows of their primes, and the device hash can address them."""
    ids, rows = values["engram_layer_ids"], values["engram_num_embeddings"]
    if not ids:
        if rows:
            yield mismatch("engram_num_embeddings", "[] (engram_layer_ids is [])", rows)
        return
    if len(rows) != len(ids):
        words = f"{len(ids)} entries (one per Engram layer)"
        yield mismatch("engram_num_embeddings", words, f"{len(rows)} entries")
    yield from _ascending(values, "engram_layer_ids", values["num_hidden_layers"])
    yield from _multiple(
        "engram_head_dim", values["engram_head_dim"], 32, "a scale per 32 channels"
    )
    yield from _below(values, "engram_pad_token_id", values["vocab_size"], "vocab_size")
    compressed, limit = values["engram_compressed_vocab_size"], MAX_COMPRESSED_VOCAB
    if compressed > min(limit, values["vocab_size"]):
        words = (
            f"at most vocab_size ({values['vocab_size']}) and {limit} (limit of the device hash)"
        )
        yield mismatch("engram_compressed_vocab_size", words, compressed)
    yield from _engram_rows(values, ids, rows)


def _engram_rows(values: Values, ids: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[str]:
    size, orders = values["engram_vocab_size"], values["engram_max_ngram_size"] - 1
    heads = values["engram_n_heads"]
    if size >= MAX_PRIME:
        yield mismatch(
            "engram_vocab_size", f"less than {MAX_PRIME} (limit of the device hash)", size
        )
        return
    if len(ids) * orders * heads > 4096:
        words = "at most 4096 hash columns (Engram layers * orders * heads)"
        yield mismatch("engram_n_heads", words, heads)
        return
    primes = bucket_primes(num_layers=len(ids), num_orders=orders, num_heads=heads, vocab_size=size)
    sums = tuple(sum(map(sum, layer)) for layer in primes)
    if len(rows) == len(ids) and rows != sums:
        yield mismatch("engram_num_embeddings", f"{show(sums)} (the sums of the primes)", rows)
    if max(max(map(max, layer)) for layer in primes) >= MAX_PRIME or max(sums) >= MAX_TABLE_ROWS:
        words = f"primes below {MAX_PRIME} and tables below {MAX_TABLE_ROWS} rows"
        yield mismatch("engram_vocab_size", words, size)


def dspark(values: Values) -> Iterator[str]:
    """Taps are layers of the backbone, the noise id is a token, the draft has enough experts."""
    if not values["num_nextn_predict_layers"]:
        return
    taps, layers = values["dspark_target_layer_ids"], values["num_hidden_layers"]
    yield from _ascending(values, "dspark_target_layer_ids", layers)
    if not taps:
        yield mismatch("dspark_target_layer_ids", "at least one layer id", taps)
    yield from _below(values, "dspark_noise_token_id", values["vocab_size"], "vocab_size")
    count, chosen = values["dspark_n_routed_experts"], values["dspark_num_experts_per_tok"]
    if chosen > count:
        words = f"at most dspark_n_routed_experts ({count})"
        yield mismatch("dspark_num_experts_per_tok", words, chosen)


def yarn(values: Values) -> Iterator[str]:
    """YaRN is named, and its ramp descends."""
    if values["rope_type"] is None and values["type"] is None:
        yield 'rope_type: expected "yarn" (no other value is supported), received no value'
    if values["beta_fast"] <= values["beta_slow"]:
        words = f"more than beta_slow ({values['beta_slow']:g})"
        yield mismatch("beta_fast", words, values["beta_fast"])


def vision(values: Values) -> Iterator[str]:
    """Vision heads split the width and carry a two-dimensional rotary embedding."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % (4 * heads):
        words = f"a multiple of 4 * num_attention_heads ({4 * heads}), for the 2-D rotary embedding"
        yield mismatch("hidden_size", words, width)


def ratios_v4(values: Values) -> Iterator[str]:
    """One ratio per layer (0, 4 or 128), then a 0 per stored draft stage."""
    ratios, layers = values["compress_ratios"], values["num_hidden_layers"]
    if len(ratios) < layers:
        yield mismatch("compress_ratios", f"at least {layers} entries", f"{len(ratios)} entries")
        return
    for layer, ratio in enumerate(ratios):
        allowed = (0, 4, 128) if layer < layers else (0,)
        if ratio not in allowed:
            yield mismatch(f"compress_ratios[{layer}]", " or ".join(map(str, allowed)), ratio)
    if values["num_hash_layers"] > layers:
        words = f"at most num_hidden_layers ({layers})"
        yield mismatch("num_hash_layers", words, values["num_hash_layers"])


def draft_v4(values: Values) -> Iterator[str]:
    """A V4 file has one plain draft stage, or DSpark fields and their stages."""
    stages = len(values["compress_ratios"]) - values["num_hidden_layers"]
    names = [name for name in values if name.startswith("dspark_")]
    given = [name for name in names if values[name] is not None]
    for name in names:
        if given and values[name] is None:
            yield f"{name}: expected a value ({given[0]} is present), received no value"
    if given and stages < 1:
        words = "at least one entry after the layers (the dspark_* fields are present)"
        yield mismatch("compress_ratios", words, f"{max(stages, 0)} entries")
    if not given and stages > 1:
        words = "at most one draft stage without dspark_* fields"
        yield mismatch("compress_ratios", words, f"{stages} entries after the layers")
    taps, layers = values["dspark_target_layer_ids"], values["num_hidden_layers"]
    if taps is not None and (list(taps) != sorted(set(taps)) or not taps or taps[-1] >= layers):
        words = f"ascending layer ids, each once, below num_hidden_layers ({layers})"
        yield mismatch("dspark_target_layer_ids", words, taps)
    yield from _below(values, "dspark_noise_token_id", values["vocab_size"], "vocab_size")
