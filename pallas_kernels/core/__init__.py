"""Fixed-order primitives, quantisers and exact top-k in plain JAX.

Import functions as ``from pallas_kernels import core`` and call ``core.contract(...)``: tests
replace an attribute to prove that a checker notices.
"""

from pallas_kernels.core import fixed, stock
from pallas_kernels.core.codes import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
    pow2ceil,
    unpack_nibbles,
)
from pallas_kernels.core.combine import combine
from pallas_kernels.core.contract import (
    contract,
    contract_grouped,
    contract_pairs,
    contract_values,
)
from pallas_kernels.core.quant import (
    dequantize_q4m,
    dequantize_q4n,
    dequantize_q8,
    fake_q4m,
    fake_q4n,
    fake_q8,
    quantize_q4m,
    quantize_q4n,
    quantize_q8,
)
from pallas_kernels.core.quant_array import FORMATS, QuantArray, dequantize
from pallas_kernels.core.reduce import (
    fold_sum,
    log_softmax,
    logsumexp,
    mean_square,
    rms_norm,
    rms_scale,
    softmax,
    tree_sum,
)
from pallas_kernels.core.round import round_bf16
from pallas_kernels.core.tiles import K_CHUNK, ROW_TILE, map_row_tiles
from pallas_kernels.core.topk import expand_blocks, select_blocks, select_topk, top_k
from pallas_kernels.errors import KernelError, KernelUnsupported

__all__ = [
    "FORMATS",
    "K_CHUNK",
    "ROW_TILE",
    "KernelError",
    "KernelUnsupported",
    "QuantArray",
    "combine",
    "contract",
    "contract_grouped",
    "contract_pairs",
    "contract_values",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize",
    "dequantize_q4m",
    "dequantize_q4n",
    "dequantize_q8",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "expand_blocks",
    "fake_q4m",
    "fake_q4n",
    "fake_q8",
    "fixed",
    "fold_sum",
    "log_softmax",
    "logsumexp",
    "map_row_tiles",
    "mean_square",
    "pack_nibbles",
    "pow2ceil",
    "quantize_q4m",
    "quantize_q4n",
    "quantize_q8",
    "rms_norm",
    "rms_scale",
    "round_bf16",
    "select_blocks",
    "select_topk",
    "softmax",
    "stock",
    "top_k",
    "tree_sum",
    "unpack_nibbles",
]
