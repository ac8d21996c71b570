"""The sub-layers of DeepSeek-V4.1 in CANN operators: attention, experts, n-gram memory."""

from native_ascend import ops
from native_ascend.attention import Compressed, Sequences, call_attention, call_indexer
from native_ascend.network import (
    STREAMS,
    Context,
    Layer,
    cast,
    collapse,
    fp8_linear,
    linear,
    mixing,
    multiply,
    norm,
    q8_rows,
    quantised,
    rotate,
    store,
    update,
)
from native_ascend.plan import Tensor


def attention(c: Context, number: int, v: Tensor) -> Tensor:
    """Returns the output of the attention of layer `number` for its normed input."""
    net, layer, name = c.net, c.net.layers[number], f"layers.{number}"
    rows = v.shape[0]
    cos, sin, minus_sin = c.inputs.rotation["yarn" if layer.ratio else "plain"]
    quant = quantised(c, v)
    latent = norm(c, fp8_linear(c, quant, f"{name}.wq_a"), f"{name}.q_norm")
    latent_quant = quantised(c, latent)
    query = fp8_linear(c, latent_quant, f"{name}.wq_b").reshape(rows, net.heads, net.head_dim)
    query = rotate(c, query, (cos, sin))
    key = norm(c, fp8_linear(c, quant, f"{name}.wkv"), f"{name}.kv_norm")
    key = rotate(c, key.reshape(rows, 1, net.head_dim), (cos, sin)).reshape(rows, net.head_dim)
    store(c, f"window.{number}", c.inputs.window_slots, q8_rows(c, key))
    if layer.owner:
        _publish(c, number, layer, v)
    if layer.index:
        _choose(c, number, layer, v, latent_quant, (cos, sin))
    mixed = c.scratch(rows, net.heads, net.head_dim)
    sequences = Sequences(
        starts=c.inputs.starts,
        lengths=c.inputs.length,
        window_table=c.inputs.window_table,
        rows=rows,
    )
    compressed = None
    if layer.ratio:
        compressed = Compressed(
            rows=c.stored(f"main.{layer.source}"),
            indices=c.topk,
            table=c.inputs.table[layer.ratio],
            residual=c.inputs.residual[layer.ratio],
            ratio=layer.ratio,
        )
    call_attention(
        c.builder,
        query,
        c.stored(f"window.{number}"),
        sequences,
        compressed,
        c.weight(f"{name}.attn_sink"),
        net.window,
        mixed,
    )
    return _project_out(c, name, rotate(c, mixed, (cos, minus_sin)))


def _project_out(c: Context, name: str, mixed: Tensor) -> Tensor:
    """Returns the grouped product and the second product; both group axes are strides."""
    net, rows = c.net, mixed.shape[0]
    low = c.scratch(rows, net.o_groups, net.o_rank)
    grouped = mixed.reshape(rows, net.o_groups, net.heads * net.head_dim // net.o_groups)
    c.builder.call(
        "aclnnBatchMatMul",
        self=grouped.transpose(1, 0, 2),
        mat2=c.weight(f"{name}.wo_a").transpose(0, 2, 1),
        out=low.transpose(1, 0, 2),
        cubeMathType=0,
    )
    flat = low.reshape(rows, net.o_groups * net.o_rank)
    return fp8_linear(c, quantised(c, flat), f"{name}.wo_b")


def _publish(c: Context, number: int, layer: Layer, v: Tensor) -> None:
    """Writes compressed rows and index keys of the groups that this step closes."""
    net, rows, name = c.net, v.shape[0], f"layers.{number}.compressor"
    if layer.ratio == 1:
        latent = norm(c, linear(c, v, f"{name}.wkv"), f"{name}.norm")
    else:
        latent = norm(c, _pooled(c, number, layer, v), f"{name}.norm")
    cos, sin, _ = c.inputs.rotation[f"group{layer.ratio}"]
    row = rotate(c, latent.reshape(rows, 1, net.head_dim), (cos, sin))
    kept = q8_rows(c, row.reshape(rows, net.head_dim))
    store(c, f"main.{number}", c.inputs.row_slots[layer.ratio], kept)
    key = norm(c, linear(c, latent, f"{name}.index_wk"), f"{name}.index_k_norm")
    key = rotate(c, key.reshape(rows, 1, net.index_dim), (cos, sin))
    c.builder.call(
        "aclnnIndexerQuantCache",
        cacheRef=c.stored(f"index.{number}"),
        cacheScaleRef=c.stored(f"index_scale.{number}"),
        x=key.reshape(rows, net.index_dim),
        slotMapping=c.inputs.index_slots[layer.ratio],
        quantMode=3,
        roundScale=True,
        xScale=1.0,
    )


def _pooled(c: Context, number: int, layer: Layer, v: Tensor) -> Tensor:
    """Returns BF16 pooled values: per channel a softmax of gates over the tokens of a group.

    Gates and values of every token are kept in a ring, since a group may span steps.
    """
    net, rows, dim = c.net, v.shape[0], c.net.head_dim
    wide = cast(c, v, "float32")
    for part in ("wgate", "wkv"):
        rows_of = linear(c, wide, f"layers.{number}.compressor.{part}")
        c.builder.call(
            "aclnnInplaceIndexCopy",
            selfRef=c.stored(f"tail.{part}.{number}"),
            dim=0,
            index=c.inputs.tail_slots,
            source=rows_of,
        )
    found = []
    for part in ("wgate", "wkv"):
        pair = c.scratch(rows, layer.ratio, dim, dtype="float32")
        c.builder.call(
            "aclnnGatherV2",
            self=c.stored(f"tail.{part}.{number}"),
            dim=0,
            index=c.inputs.tail_pairs,
            out=pair,
        )
        found.append(pair)
    shape = (rows, layer.ratio, net.head_dim)
    share = c.builder.scratch(shape, "float32")
    c.builder.call("aclnnSoftmax", self=found[0], dim=1, out=share)
    pooled = c.scratch(rows, dim, dtype="float32")
    c.builder.call(
        "aclnnReduceSum",
        self=multiply(c, share, found[1], shape),
        dims=[1],
        keepDims=False,
        dtype=0,
        out=pooled,
    )
    return cast(c, pooled, "bfloat16")


def _choose(
    c: Context,
    number: int,
    layer: Layer,
    v: Tensor,
    latent: tuple[Tensor, Tensor],
    rotation: tuple[Tensor, Tensor],
) -> None:
    """Writes the compressed rows that this and the following layers attend to."""
    net, rows, name = c.net, v.shape[0], f"layers.{number}.indexer"
    query = fp8_linear(c, latent, f"{name}.wq_b").reshape(rows, net.index_heads, net.index_dim)
    codes = quantised(c, rotate(c, query, rotation), "float4_e2m1fn")
    weight = cast(c, linear(c, v, f"{name}.weights_proj"), "float32")
    scaled = multiply(c, weight, c.weight("index_constant"), (rows, net.index_heads))
    weight = cast(c, cast(c, scaled, "bfloat16"), "float32")
    call_indexer(
        c.builder,
        codes,
        (c.stored(f"index.{layer.source}"), c.stored(f"index_scale.{layer.source}")),
        weight,
        c.inputs.starts,
        c.inputs.keys[layer.ratio],
        c.inputs.residual[layer.ratio],
        c.inputs.table[layer.ratio],
        layer.ratio,
        rows,
        c.topk,
    )


def experts(c: Context, number: int, v: Tensor) -> Tensor:
    """Returns the output of routed and shared experts of layer `number`."""
    net, name, rows = c.net, f"layers.{number}", v.shape[0]
    slots = rows * net.experts_per_token
    logits = linear(c, cast(c, v, "float32"), f"{name}.gate")
    weights = c.scratch(rows, net.experts_per_token, dtype="float32")
    ids = c.scratch(rows, net.experts_per_token, dtype="int32")
    ops.call_gating(
        c.builder,
        logits,
        c.weight(f"{name}.gate_bias"),
        net.experts_per_token,
        net.route_factor,
        weights,
        ids,
    )
    sorted_rows, place = c.scratch(slots, net.hidden), c.scratch(slots, dtype="int32")
    counts = c.scratch(net.experts, dtype="int64")
    c.builder.call(
        "aclnnMoeInitRoutingV3",
        x=v,
        expertIdx=ids,
        activeNum=slots,
        expertCapacity=0,
        expertNum=net.experts,
        dropPadMode=0,
        expertTokensNumType=1,
        expertTokensNumFlag=True,
        quantMode=-1,
        activeExpertRange=[0, net.experts],
        rowIdxType=0,
        expandedXOut=sorted_rows,
        expandedRowIdxOut=place,
        expertTokensCountOrCumsumOut=counts,
    )
    gain = c.scratch(slots, 1, dtype="float32")
    source = weights.reshape(slots, 1)
    c.builder.call("aclnnInplaceIndexCopy", selfRef=gain, dim=0, index=place, source=source)
    routed = _expert(c, f"{name}.experts", quantised(c, sorted_rows), gain.reshape(slots), counts)
    shared = _expert(c, f"{name}.shared", quantised(c, v), None, None)
    out = c.scratch(rows, net.hidden)
    c.builder.call(
        "aclnnMoeFinalizeRoutingV2",
        expandedX=routed,
        expandedRowIdx=place,
        x1=shared,
        dropPadMode=2,
        out=out,
    )
    return out


def _expert(
    c: Context,
    name: str,
    x: tuple[Tensor, Tensor],
    gain: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Returns the SwiGLU of the shared expert, or of the routed ones by counts of sorted rows."""

    def product(x: tuple[Tensor, Tensor], part: str) -> Tensor:
        if counts is None:
            return fp8_linear(c, x, f"{name}.{part}")
        weight = c.weight(f"{name}.{part}")
        tiled = ops.as_nz(weight)
        out = c.scratch(x[0].shape[0], weight.shape[1])
        scale = c.weight(f"{name}.{part}.scale")
        ops.call_grouped_matmul(c.builder, *x, tiled, scale, counts, out)
        return out

    both = product(x, "gate_up")
    shape = (both.shape[0], both.shape[1] // 2)
    codes = c.builder.scratch(shape, "float8_e4m3fn")
    scales = c.builder.scratch(ops.mx_scale_shape(shape), "float8_e8m0fnu")
    ops.call_swiglu_quant(c.builder, both, gain, c.net.swiglu_limit, codes, scales)
    return product((codes, scales), "w2")


def engram(c: Context, place: int, streams: Tensor, into: Tensor) -> None:
    """Writes the streams plus the gated values of the n-gram memory (row 26)."""
    b, net, name = c.builder, c.net, f"engram.{place}"
    rows, _, dim = streams.shape
    codes = c.scratch(rows, net.engram_columns, net.engram_width, dtype="float8_e4m3fn")
    scales = c.scratch(rows, net.engram_columns, net.engram_width // 32, dtype="float8_e8m0fnu")
    for table, found in ((f"{name}.table", codes), (f"{name}.table.scale", scales)):
        b.call(
            "aclnnGatherV2", self=c.weight(table), dim=0, index=c.inputs.engram[place], out=found
        )
    width = net.engram_columns * net.engram_width
    x = (codes.reshape(rows, width), scales.reshape(*ops.mx_scale_shape((rows, width))))
    projected = fp8_linear(c, x, f"{name}.wkv").reshape(rows, STREAMS + 1, dim)
    keys = c.scratch(rows, STREAMS, dim)
    b.call("aclnnInplaceCopy", selfRef=keys, src=projected.cut(1, 0, STREAMS))
    value = cast(c, projected.cut(1, STREAMS, 1), "float32")
    shape, narrow = (rows, STREAMS, dim), (rows, STREAMS, 1)
    wide, inverse = cast(c, streams, "float32"), []
    for one in (streams, keys):
        rstd = b.scratch(narrow, "float32")
        b.call(
            "aclnnRmsNorm",
            x=one,
            gamma=c.weight("ones"),
            epsilon=net.norm_eps,
            yOut=b.scratch(shape, "bfloat16"),
            rstdOut=rstd,
        )
        inverse.append(rstd)
    product = multiply(c, wide, c.weight(f"{name}.weight"), shape)
    product = multiply(c, product, cast(c, keys, "float32"), shape)
    dot = b.scratch(narrow, "float32")
    b.call("aclnnReduceSum", self=product, dims=[2], keepDims=True, dtype=0, out=dot)
    for factor in (*inverse, c.weight("engram_constant")):
        dot = multiply(c, dot, factor, narrow)
    added, out = multiply(c, _gate(c, dot), value, shape), b.scratch(shape, "float32")
    b.call("aclnnAdd", self=wide, other=added, alpha=1.0, out=out)
    b.call("aclnnCast", self=out, dtype=27, out=into)


def _gate(c: Context, dot: Tensor) -> Tensor:
    """Returns sigmoid of the signed root of max(|dot|, 1e-6); a dot of +0 counts as positive."""
    b = c.builder
    size, least, root, minus, signed, gate = (b.scratch(dot.shape, "float32") for _ in range(6))
    positive = b.scratch(dot.shape, "bool")
    b.call("aclnnAbs", self=dot, out=size)
    b.call("aclnnClampMin", self=size, clipValueMin=1e-6, out=least)
    b.call("aclnnSqrt", self=least, out=root)
    b.call("aclnnNeg", self=root, out=minus)
    b.call("aclnnGeScalar", self=dot, other=0.0, out=positive)
    b.call("aclnnSWhere", condition=positive, self=root, other=minus, out=signed)
    b.call("aclnnSigmoid", self=signed, out=gate)
    return gate


def step(c: Context, logits: Tensor) -> None:
    """Adds the whole network; float32 logits [1, v] of the last row are a result."""
    rows, dim = c.sizes.rows, c.net.hidden
    embedded = c.scratch(rows, dim)
    c.builder.call("aclnnEmbedding", weight=c.weight("embed"), indices=c.inputs.ids, out=embedded)
    streams, other = c.scratch(rows, STREAMS, dim), c.scratch(rows, STREAMS, dim)
    c.builder.call("aclnnInplaceCopy", selfRef=streams, src=embedded.repeat(1, STREAMS))
    mixes = [c.scratch(rows, STREAMS, dtype="float32") for _ in range(2)]
    mix = c.weight("first_mix").reshape(1, STREAMS).repeat(0, rows)
    for number, layer in enumerate(c.net.layers):
        if layer.engram >= 0:
            mark = c.builder.mark()
            engram(c, layer.engram, streams, other)
            c.builder.release(mark)
            streams, other = other, streams
        for part, run in (("attn", attention), ("ffn", experts)):
            mark, name = c.builder.mark(), f"layers.{number}"
            mixed = mixing(c, streams, f"{name}.hc_{part}", mixes[0])
            output = run(c, number, norm(c, collapse(c, mix, streams), f"{name}.{part}_norm"))
            update(c, streams, mixed, output, other)
            c.builder.release(mark)
            streams, other, mix = other, streams, mixed.pre
            mixes.reverse()
    hidden = norm(c, collapse(c, mix, streams), "norm")
    wide = cast(c, hidden.cut(0, rows - 1, 1), "float32")
    c.builder.call(
        "aclnnMatmul",
        self=wide,
        mat2=c.weight("head").transpose(1, 0),
        out=logits,
        cubeMathType=0,
    )
