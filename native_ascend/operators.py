"""What DeepSeek-V4.1 needs of CANN and what the bridge can call: data that the code consults.

`STEPS` says for every step of the model whether an operator exists (ascend.md 5.1). `OPERATORS` has
one record for every aclnn operator that the bridge may call; there is no other way to one. Nothing
here has been verified on hardware.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from native_ascend.records import RECORDS

#: "supported": bridged, its documented contract expresses the step. "unverified": bridged or not,
#: part of its contract is unknown. "missing": no operator expresses the step.
StepStatus = Literal["supported", "unverified", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the model and the operators that express it.

    Attributes:
        row: Number in ascend.md 5.1.
        step: What the model does.
        operators: What the bridge calls for it; empty if nothing does.
        status: See `StepStatus`.
        note: What is unknown or missing, and what happens then.
    """

    row: int
    step: str
    operators: tuple[str, ...]
    status: StepStatus
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a first phase.

    kind: T tensor read, O tensor written, L and M lists of them, I int64, J int8, B bool, D double,
    F float, S string, A int array, C scalar. Tensors, lists and int arrays may be null.
    """

    name: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One aclnn operator.

    Attributes:
        name: Exported name of its second phase.
        parameters: Of its first phase, in order, without workspace size and executor.
        documented_in: Where the parameter list was read.
        verified_on_hardware: Only with a record under verification/ for the SoC and CANN version.
        reference: What the tests compare it with.
    """

    name: str
    parameters: tuple[Parameter, ...]
    documented_in: str
    verified_on_hardware: bool = False
    reference: str = ""

    @property
    def signature(self) -> str:
        """Letters as the native side spells them: outputs like inputs, numbers by their class."""
        letters = {"O": "T", "M": "L", "J": "I", "F": "D"}
        return "".join(letters.get(p.kind, p.kind) for p in self.parameters)


def _step(row: int, step: str, operators: str, status: StepStatus, note: str = "") -> Step:
    return Step(row=row, step=step, operators=tuple(operators.split()), status=status, note=note)


_QUANT = "aclnnDynamicMxQuantV2 aclnnQuantMatmulV5"
STEPS: tuple[Step, ...] = (
    _step(1, "FP8 linears", _QUANT, "supported", "32x32 weight scales become one a row: exact"),
    _step(2, "grouped output projection wo_a", "aclnnBatchMatMul", "supported"),
    _step(
        3,
        "BF16 linears with a float32 result",
        "aclnnCast aclnnMatmul",
        "unverified",
        "float32 from BF16 inputs is not documented: operands are cast first",
    ),
    _step(
        4,
        "activation quantiser Q8",
        "aclnnDynamicMxQuantV2",
        "supported",
        "without the amplitude floor of 1e-4",
    ),
    _step(
        5, "index quantiser Q4m", "aclnnDynamicMxQuantV2", "unverified", "rounding of scaleAlg 2"
    ),
    _step(
        6,
        "compressed-KV quantiser Q4n",
        "",
        "missing",
        "use_fp4_sparse_kv=true is refused; false stores rows at Q8, another arithmetic",
    ),
    _step(7, "RMSNorm with eps 1e-20", "aclnnRmsNorm", "unverified", "so small an eps in float32"),
    _step(
        8,
        "rotary on the last channels",
        "aclnnInplacePartialRotaryMul",
        "unverified",
        "pairing; run in float32 between two casts, since cos and sin take the data type of x",
    ),
    _step(
        9, "mHC coefficients", "aclnnMhcPre", "supported", "its hIn is another mix and is ignored"
    ),
    _step(10, "mHC pre and Sinkhorn fused", "", "missing", "aclnnMhcPreSinkhorn does not fit 5120"),
    _step(11, "Sinkhorn", "aclnnMhcSinkhorn", "supported"),
    _step(12, "shifted input mix", "aclnnCast aclnnBatchMatMul", "supported"),
    _step(13, "update of the streams", "aclnnMhcPost", "supported"),
    _step(
        14,
        "attention over window and selected rows",
        "aclnnSparseFlashMlaMetadata aclnnSparseFlashMla",
        "supported",
        "on dequantised BF16 rows",
    ),
    _step(15, "attention on quantised rows", "", "missing", "row formats are V4's"),
    _step(
        16,
        "KV compressor of ratio 2",
        "aclnnMatmul aclnnSoftmax aclnnMul aclnnReduceSum",
        "unverified",
        "elementwise operators: aclnnCompressor lists ratios 4 and 128 only",
    ),
    _step(17, "KV compressor of ratio 1", "aclnnMatmul aclnnRmsNorm", "supported"),
    _step(
        18,
        "cache writers",
        "aclnnInplaceIndexCopy aclnnIndexerQuantCache",
        "unverified",
        "scale rounding of index rows; aclnnKvCompressEpilog writes V4 rows and is not used",
    ),
    _step(
        19,
        "lightning indexer",
        "aclnnQuantLightningIndexerV2Metadata aclnnQuantLightningIndexerV2",
        "unverified",
        "BF16 stages, order and ties of the output",
    ),
    _step(
        20,
        "candidate blocks",
        "",
        "missing",
        "contexts beyond candidate_topk_blocks * candidate_block_size are refused",
    ),
    _step(21, "expert selection", "aclnnMoeGatingTopKV2", "supported", "text rows only"),
    _step(
        22,
        "routing permutation",
        "aclnnMoeInitRoutingV3 aclnnMoeFinalizeRoutingV2",
        "unverified",
        "order of expandedRowIdx against dropPadMode 2",
    ),
    _step(
        23,
        "routed experts",
        "aclnnNpuFormatCast aclnnGroupedMatmulWeightNz",
        "supported",
        "weights in FRACTAL_NZ",
    ),
    _step(24, "SwiGLU and Q8", "aclnnSwigluGroupQuant", "unverified", "BF16 rounding before Q8"),
    _step(25, "all-to-all", "", "missing", "one device only: HcclAlltoAllV is not bridged"),
    _step(
        26,
        "Engram lookup and gate",
        "aclnnGatherV2 aclnnQuantMatmulV5 aclnnMul aclnnAdd aclnnReduceSum aclnnAbs aclnnNeg "
        "aclnnSqrt aclnnSigmoid aclnnClampMin aclnnGeScalar aclnnSWhere",
        "supported",
        "n-gram ids are computed on the host",
    ),
    _step(27, "sampling", "", "missing", "logits come back; tokens are chosen on the host"),
    _step(28, "embedding and copies", "aclnnEmbedding aclnnInplaceCopy", "supported"),
)

#: Operators that look right for V4.1 and are not: never called (ascend.md 5.1, 11.3).
FORBIDDEN: tuple[str, ...] = (
    "aclnnMhcPreSinkhorn",
    "aclnnMixedQuantSparseFlashMla",
    "aclnnQuantSparseFlashMla",
    "aclnnKvCompressEpilog",
    "aclnnGroupedMatmulV5",
)


def _records() -> dict[str, Operator]:
    found = {}
    for line in RECORDS.strip().splitlines():
        name, parameters, documented_in, reference = (part.strip() for part in line.split("|"))
        pairs = [parameter.split(":") for parameter in parameters.split()]
        found[name] = Operator(
            name=name,
            parameters=tuple(Parameter(name=n, kind=k) for n, k in pairs),
            documented_in=documented_in,
            reference=reference,
        )
    return found


OPERATORS: Mapping[str, Operator] = _records()


def table() -> str:
    """Returns the operator table as Markdown, for the documentation."""
    lines = ["| # | step | operators | status | note |", "|---|---|---|---|---|"]
    for step in STEPS:
        called = ", ".join(f"`{name}`" for name in step.operators) or "none"
        verified = step.operators and all(OPERATORS[n].verified_on_hardware for n in step.operators)
        proof = "" if verified else ", unverified on hardware"
        status = step.status if step.status == "missing" else step.status + proof
        lines.append(f"| {step.row} | {step.step} | {called} | {status} | {step.note} |")
    return "\n".join(lines) + "\n"
