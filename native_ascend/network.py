"""One step of DeepSeek-V4.1 as a plan, for a fixed number of rows: sizes, inputs, common parts.

One sequence, text rows, one device. Names of weights are the checkpoint's; `weights.py` says in
which layouts. Every operator is in the table; what has none `Network.require_supported` refuses.
"""

from dataclasses import dataclass

from native_ascend import ops
from native_ascend.errors import AscendUnsupported
from native_ascend.handles import DeviceCache, DeviceWeights
from native_ascend.plan import PlanBuilder, Tensor, acl_type

STREAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer does. owner: it writes compressed rows; source: whose rows it reads.

    index: it chooses compressed rows; engram: place among the Engram layers, -1 for none.
    """

    ratio: int
    source: int
    owner: bool
    index: bool
    engram: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Sizes of a V4.1 network and the options that decide whether CANN can express it."""

    layers: tuple[Layer, ...]
    vocab: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    norm_eps: float
    hc_eps: float
    hc_iterations: int
    experts: int
    experts_per_token: int
    expert_width: int
    route_factor: float
    swiglu_limit: float
    index_heads: int
    index_dim: int
    index_topk: int
    engram_columns: int
    engram_width: int
    candidate_rows: int | None  # compressed rows up to which every candidate block is kept
    fp4_rows: bool

    def require_supported(self, max_len: int) -> None:
        """Checks the steps that no operator expresses.

        Raises:
            AscendUnsupported: names the row of the operator table and what to do.
        """
        if self.fp4_rows:
            raise AscendUnsupported(
                "no CANN operator writes FP4 compressed rows (gap 6 of the operator table): use a "
                "config with use_fp4_sparse_kv=false, which is another arithmetic",
                status="UNIMPLEMENTED",
            )
        if self.candidate_rows is not None and max_len > self.candidate_rows:
            raise AscendUnsupported(
                f"no CANN operator restricts later index layers to candidate blocks (gap 20): "
                f"contexts end at {self.candidate_rows} tokens, received max_len={max_len}",
                status="UNIMPLEMENTED",
            )

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios of the layers that own compressed rows."""
        return tuple(sorted({layer.ratio for layer in self.layers if layer.owner}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of a step, tokens of a sequence, and rows of a page."""

    rows: int
    max_len: int
    tail_rows: int
    page: int = 16

    def pages(self, ratio: int) -> int:
        """Pages of a sequence; one more in the cache takes the rows that are not kept."""
        return -(-(self.max_len // ratio) // self.page)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Operands of a step, see `inputs.py`. Ints are int32, the rotations float32 [t, 1, 1, r]."""

    ids: Tensor
    starts: Tensor
    length: Tensor
    window_slots: Tensor
    window_table: Tensor
    tail_slots: Tensor
    tail_pairs: Tensor
    keys: dict[int, Tensor]
    residual: dict[int, Tensor]
    table: dict[int, Tensor]
    row_slots: dict[int, Tensor]
    index_slots: dict[int, Tensor]
    engram: tuple[Tensor, ...]
    rotation: dict[str, tuple[Tensor, Tensor, Tensor]]  # cos, sin, -sin


@dataclass(slots=True)
class Context:
    """A plan under construction."""

    builder: PlanBuilder
    net: Network
    sizes: Sizes
    weights: DeviceWeights
    cache: DeviceCache
    inputs: Inputs
    topk: Tensor

    def weight(self, name: str) -> Tensor:
        """Returns a weight."""
        return self.weights.tensor(self.builder, name)

    def stored(self, name: str) -> Tensor:
        """Returns a buffer of the cache, whose handles follow the weights'."""
        return self.cache.tensor(self.builder, name, len(self.weights.shapes))

    def scratch(self, *shape: int, dtype: str = "bfloat16") -> Tensor:
        """Returns scratch memory."""
        return self.builder.scratch(shape, dtype)


def cast(c: Context, x: Tensor, dtype: str) -> Tensor:
    """Returns x in another data type, contiguous."""
    out = c.builder.scratch(x.shape, dtype)
    c.builder.call("aclnnCast", self=x, dtype=acl_type(dtype), out=out)
    return out


def multiply(c: Context, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the float32 product, broadcast to a shape."""
    out = c.builder.scratch(shape, "float32")
    c.builder.call("aclnnMul", self=x, other=y, out=out)
    return out


def norm(c: Context, x: Tensor, name: str) -> Tensor:
    """Returns RMSNorm by a weight of the network."""
    out = c.builder.scratch(x.shape, x.dtype)
    rstd = c.builder.scratch((*x.shape[:-1], 1), "float32")
    c.builder.call(
        "aclnnRmsNorm",
        x=x,
        gamma=c.weight(name),
        epsilon=c.net.norm_eps,
        yOut=out,
        rstdOut=rstd,
    )
    return out


def quantised(c: Context, x: Tensor, dtype: str = "float8_e4m3fn") -> tuple[Tensor, Tensor]:
    """Returns codes and scales of x by groups of 32 of its last axis."""
    codes = c.builder.scratch(x.shape, dtype)
    scales = c.builder.scratch(ops.mx_scale_shape(x.shape), "float8_e8m0fnu")
    ops.call_mx_quant(c.builder, x, codes, scales)
    return codes, scales


def fp8_linear(c: Context, x: tuple[Tensor, Tensor], name: str) -> Tensor:
    """Returns the BF16 product of codes and scales with a weight of the network."""
    weight = c.weight(name)
    out = c.scratch(x[0].shape[0], weight.shape[0])
    ops.call_quant_matmul(c.builder, *x, weight, c.weight(f"{name}.scale"), out)
    return out


def linear(c: Context, x: Tensor, name: str) -> Tensor:
    """Returns the product with a weight [n, k] of the data type of x, which the result has too."""
    weight = c.weight(name)
    out = c.builder.scratch((x.shape[0], weight.shape[0]), x.dtype)
    c.builder.call("aclnnMatmul", self=x, mat2=weight.transpose(1, 0), out=out, cubeMathType=0)
    return out


def rotate(c: Context, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Returns BF16 x [t, h, d] with its last channels rotated in float32."""
    rows, heads, dim = x.shape
    wide = cast(c, x, "float32").reshape(rows, 1, heads, dim)
    c.builder.call(
        "aclnnInplacePartialRotaryMul",
        xRef=wide,
        cos=rotation[0],
        sin=rotation[1],
        rotaryMode=1,
        partialSlice=[dim - c.net.rope_dim, dim],
    )
    return cast(c, wide, "bfloat16").reshape(rows, heads, dim)


def q8_rows(c: Context, x: Tensor) -> Tensor:
    """Returns BF16 rows at the values that Q8 gives them.

    The codes are multiplied by an identity: exact, and no operator dequantises.
    """
    return fp8_linear(c, quantised(c, x), "identity")


def store(c: Context, name: str, slots: Tensor, rows: Tensor) -> None:
    """Writes rows to a paged buffer [blocks, page, 1, d]."""
    paged = c.stored(name)
    flat = paged.reshape(paged.shape[0] * paged.shape[1], paged.shape[3])
    c.builder.call("aclnnInplaceIndexCopy", selfRef=flat, dim=0, index=slots, source=rows)


def collapse(c: Context, mix: Tensor, streams: Tensor) -> Tensor:
    """Returns the BF16 input of a sub-layer: streams weighted by the mix of the one before."""
    rows, _, dim = streams.shape
    out = c.scratch(rows, 1, dim, dtype="float32")
    c.builder.call(
        "aclnnBatchMatMul",
        self=mix.reshape(rows, 1, STREAMS) if mix.strides[0] else mix,
        mat2=cast(c, streams, "float32"),
        out=out,
        cubeMathType=0,
    )
    return cast(c, out, "bfloat16").reshape(rows, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Coefficients of one sub-layer: next input mix, output gain, balanced matrix."""

    pre: Tensor
    post: Tensor
    matrix: Tensor


def mixing(c: Context, streams: Tensor, name: str, pre: Tensor) -> Mixing:
    """Returns the coefficients; the next input mix is written to `pre`, which outlives them."""
    rows, _, dim = streams.shape
    post = c.scratch(rows, STREAMS, dtype="float32")
    raw = c.scratch(rows, STREAMS, STREAMS, dtype="float32")
    matrix = c.scratch(rows, STREAMS, STREAMS, dtype="float32")
    c.builder.call(
        "aclnnMhcPre",
        x=streams,
        phi=c.weight(f"{name}.fn"),
        alpha=c.weight(f"{name}.scale"),
        bias=c.weight(f"{name}.base"),
        normEps=c.net.norm_eps,
        hcEps=c.net.hc_eps,
        hIn=c.scratch(rows, dim),  # by this sub-layer's mix: not V4.1's, ignored
        hPost=post,
        hRes=raw,
        invRms=c.scratch(rows, dtype="float32"),
        hMix=c.scratch(rows, STREAMS * (STREAMS + 2), dtype="float32"),
        hPre=pre,
    )
    c.builder.call(
        "aclnnMhcSinkhorn",
        x=raw,
        eps=c.net.hc_eps,
        numIters=c.net.hc_iterations,
        output=matrix,
    )
    return Mixing(pre=pre, post=post, matrix=matrix)


def update(c: Context, streams: Tensor, mixed: Mixing, output: Tensor, into: Tensor) -> None:
    """Writes the streams after a sub-layer."""
    c.builder.call(
        "aclnnMhcPost",
        x=streams,
        hRes=mixed.matrix,
        hOut=output,
        hPost=mixed.post,
        out=into,
    )
