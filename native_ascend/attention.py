"""Sparse attention and the lightning indexer: each a metadata operator and the operator itself."""

from dataclasses import dataclass
from typing import Any

from native_ascend.ffi import staged
from native_ascend.plan import PlanBuilder, Tensor

METADATA = (1024,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the rows of a call belong; the tensors are int32.

    starts [b + 1]: first row of every sequence and the number of rows. lengths [b]: tokens of every
    sequence, this call's included. window_table [b, n]: pages of the window rows.
    """

    starts: Tensor
    lengths: Tensor
    window_table: Tensor
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The compressed rows of a layer.

    rows: bfloat16 [blocks, size, 1, d]. indices: int32 [t, 1, k], -1 for none. table: int32 [b, n].
    residual: int32 [b], tokens behind the last whole group.
    """

    rows: Tensor
    indices: Tensor
    table: Tensor
    residual: Tensor
    ratio: int


def call_attention(
    builder: PlanBuilder,
    query: Tensor,
    window_rows: Tensor,
    sequences: Sequences,
    compressed: Compressed | None,
    sinks: Tensor,
    window: int,
    out: Tensor,
) -> None:
    """Adds attention of query [t, h, d] over its window and its selected rows (row 14)."""
    heads, dim = query.shape[1:]
    ratio = compressed.ratio if compressed else 1
    metadata = builder.scratch(METADATA, "int32")
    common: dict[str, Any] = {
        "cuSeqlensQ": sequences.starts,
        "sequsedOriKv": sequences.lengths,
        "cmpRatio": ratio,
        "oriMaskMode": 4,
        "cmpMaskMode": 3,
        "oriWinLeft": window - 1,
        "oriWinRight": 0,
        "layoutQ": "TND",
        "layoutKv": "PA_BBND",
        "metadata": metadata,
        "cmpResidualKv": compressed.residual if compressed else None,
    }
    builder.call(
        "aclnnSparseFlashMlaMetadata",
        numHeadsQ=heads,
        numHeadsKv=1,
        headDim=dim,
        batchSize=sequences.lengths.shape[0],
        maxSeqlenQ=sequences.rows,
        maxSeqlenOriKv=window_rows.shape[0] * window_rows.shape[1],
        maxSeqlenCmpKv=compressed.rows.shape[0] * compressed.rows.shape[1] if compressed else 0,
        oriTopk=0,
        cmpTopk=compressed.indices.shape[2] if compressed else 0,
        hasOriKv=True,
        hasCmpKv=compressed is not None,
        **common,
    )
    builder.call(
        "aclnnSparseFlashMla",
        q=query,
        oriKv=window_rows,
        cmpKv=compressed.rows if compressed else None,
        cmpSparseIndices=compressed.indices if compressed else None,
        oriBlockTable=sequences.window_table,
        cmpBlockTable=compressed.table if compressed else None,
        sinks=sinks,
        softmaxScale=dim**-0.5,
        topkValueMode=1,
        returnSoftmaxLse=False,
        attnOut=out,
        **common,
    )


def call_indexer(
    builder: PlanBuilder,
    query: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    key_count: Tensor,
    residual: Tensor,
    table: Tensor,
    ratio: int,
    rows: int,
    out: Tensor,
) -> None:
    """Adds the choice of compressed rows, out int32 [t, 1, k], -1 padded (row 19).

    query, keys: E2M1 codes and E8M0 scales. weights: float32 [t, h]. key_count: int32 [b],
    compressed keys of every sequence. The order of the indices is unspecified.
    """
    heads, dim = query[0].shape[1:]
    topk = out.shape[2]
    metadata = builder.scratch(METADATA, "int32")
    common: dict[str, Any] = {
        "sequsedK": key_count,
        "cmpResidualK": residual,
        "topk": topk,
        "quantMode": 5,
        "maxSeqlenQ": rows,
        "layoutQ": "TND",
        "layoutK": "PA_BBND",
        "maskMode": 3,
        "cmpRatio": ratio,
        "metadata": metadata,
    }
    builder.call(
        "aclnnQuantLightningIndexerV2Metadata",
        cuSeqlensQ=starts,
        numHeadsQ=heads,
        numHeadsK=1,
        headDim=dim,
        batchSize=key_count.shape[0],
        maxSeqlenK=keys[0].shape[0] * keys[0].shape[1],
        **common,
    )
    builder.call(
        "aclnnQuantLightningIndexerV2",
        query=query[0],
        key=keys[0],
        weights=weights,
        queryDequantScale=query[1],
        keyDequantScale=keys[1],
        cuSeqLensQ=starts,
        blockTable=table,
        returnValue=0,
        sparseIndicesOut=out,
        **common,
    )


def sparse_attention(
    query: Any,
    window_rows: Any,
    starts: Any,
    lengths: Any,
    window_table: Any,
    sinks: Any,
    window: int,
    selected: tuple[Any, Any, Any, Any, int] | None = None,
) -> Any:
    """Returns attention of bfloat16 query [t, h, d] over paged rows, host arrays in and out.

    Args:
        query: Rows of all sequences, one sequence's after the other's.
        window_rows: bfloat16 [blocks, size, 1, d].
        starts: int32 [b + 1].
        lengths: int32 [b].
        window_table: int32 [b, n].
        sinks: float32 [h].
        window: Rows that a query sees, its own included.
        selected: (rows, indices, table, residual, ratio) as in `Compressed`, None for none.
    """
    b = PlanBuilder()
    arrays = [query, window_rows, starts, lengths, window_table, sinks]
    if selected:
        arrays += selected[:4]
    tensors = [b.operand(tuple(a.shape), str(a.dtype)) for a in arrays]
    q, rows, first, used, table, sink = tensors[:6]
    compressed = None
    if selected:
        more = tensors[6:]
        compressed = Compressed(
            rows=more[0], indices=more[1], table=more[2], residual=more[3], ratio=selected[4]
        )
    out = b.result(tuple(query.shape), "bfloat16")
    sequences = Sequences(starts=first, lengths=used, window_table=table, rows=query.shape[0])
    call_attention(b, q, rows, sequences, compressed, sink, window, out)
    return staged(b, *arrays)[0]
