"""Parameter lists of the aclnn operators that the bridge may call (ascend.md 5.2)."""

#: name | parameters as name:kind | where they were read | what the tests compare with
RECORDS = """
aclnnMatmul | self:T mat2:T out:O cubeMathType:J | ops-nn 2026-06 | contract
aclnnBatchMatMul | self:T mat2:T out:O cubeMathType:J | ops-nn 2026-06 | contract_grouped
aclnnQuantMatmulV5 | x1:T x2:T x1Scale:T x2Scale:T yScale:T x1Offset:T x2Offset:T yOffset:T \
bias:T transposeX1:B transposeX2:B groupSize:I out:O | ops-nn 2026-06 | contract
aclnnDynamicMxQuantV2 | x:T axis:I roundMode:S dstType:I blocksize:I scaleAlg:I dstTypeMax:D \
yOut:O mxscaleOut:O | ops-nn 2026-06 | quantize_q8, quantize_q4m
aclnnRmsNorm | x:T gamma:T epsilon:D yOut:O rstdOut:O | ops-nn 2026-06 | rms_norm
aclnnSwigluGroupQuant | x:T weight:T groupIndex:T scale:T dstType:I quantMode:I blockSize:I \
roundScale:B clampLimit:D dstTypeMax:D outputOrigin:B yOut:O yScaleOut:O yOriginOut:O | ops-nn \
2026-06 | swiglu
aclnnGroupedMatmulWeightNz | x:L weight:L bias:L scale:L offset:L antiquantScale:L \
antiquantOffset:L perTokenScale:L groupList:T activationInput:L activationQuantScale:L \
activationQuantOffset:L splitItem:I groupType:I groupListType:I actType:I tuningConfig:A \
quantGroupSize:I out:M activationFeatureOut:M dynQuantScaleOut:M | ops-transformer 2026-06 | \
contract
aclnnNpuFormatCast | src:T dst:O | ops-math 2026-06 |
aclnnMoeGatingTopKV2 | x:T bias:T inputIds:T tid2eid:T k:I kGroup:I groupCount:I \
groupSelectMode:I renorm:I normType:I outFlag:B routedScalingFactor:D eps:D yOut:O \
expertIdxOut:O outOut:O | ops-transformer 2026-06 | route
aclnnMoeInitRoutingV3 | x:T expertIdx:T scale:T offset:T activeNum:I expertCapacity:I \
expertNum:I dropPadMode:I expertTokensNumType:I expertTokensNumFlag:B quantMode:I \
activeExpertRange:A rowIdxType:I expandedXOut:O expandedRowIdxOut:O \
expertTokensCountOrCumsumOut:O expandedScaleOut:O | ops-transformer 2026-06 |
aclnnMoeFinalizeRoutingV2 | expandedX:T expandedRowIdx:T x1:T x2:T bias:T scales:T expertIdx:T \
dropPadMode:I out:O | ops-transformer 2026-06 | combine
aclnnSparseFlashMlaMetadata | cuSeqlensQ:T cuSeqlensOriKv:T cuSeqlensCmpKv:T sequsedQ:T \
sequsedOriKv:T sequsedCmpKv:T cmpResidualKv:T oriTopkLength:T cmpTopkLength:T numHeadsQ:I \
numHeadsKv:I headDim:I batchSize:I maxSeqlenQ:I maxSeqlenOriKv:I maxSeqlenCmpKv:I oriTopk:I \
cmpTopk:I cmpRatio:I oriMaskMode:I cmpMaskMode:I oriWinLeft:I oriWinRight:I layoutQ:S layoutKv:S \
hasOriKv:B hasCmpKv:B metadata:O | ops-transformer 2026-09 |
aclnnSparseFlashMla | q:T oriKv:T cmpKv:T oriSparseIndices:T cmpSparseIndices:T oriBlockTable:T \
cmpBlockTable:T cuSeqlensQ:T cuSeqlensOriKv:T cuSeqlensCmpKv:T sequsedQ:T sequsedOriKv:T \
sequsedCmpKv:T cmpResidualKv:T oriTopkLength:T cmpTopkLength:T sinks:T metadata:T softmaxScale:D \
cmpRatio:I oriMaskMode:I cmpMaskMode:I oriWinLeft:I oriWinRight:I layoutQ:S layoutKv:S \
topkValueMode:I returnSoftmaxLse:B attnOut:O softmaxLseOut:O | ops-transformer 2026-06 | \
sparse_mla_decode
aclnnQuantLightningIndexerV2Metadata | cuSeqlensQ:T cuSeqlensK:T sequsedQ:T sequsedK:T \
cmpResidualK:T numHeadsQ:I numHeadsK:I headDim:I topk:I quantMode:I batchSize:I maxSeqlenQ:I \
maxSeqlenK:I layoutQ:S layoutK:S maskMode:I cmpRatio:I metadata:O | ops-transformer 2026-06 |
aclnnQuantLightningIndexerV2 | query:T key:T weights:T queryDequantScale:T keyDequantScale:T \
cuSeqLensQ:T cuSeqLensK:T sequsedQ:T sequsedK:T cmpResidualK:T blockTable:T outputIdxOffset:T \
metadata:T topk:I quantMode:I maxSeqlenQ:I layoutQ:S layoutK:S maskMode:I cmpRatio:I \
returnValue:I sparseIndicesOut:O sparseValuesOut:O | ops-transformer 2026-06 | indexer_logits, \
select_topk
aclnnIndexerQuantCache | cacheRef:O cacheScaleRef:O x:T slotMapping:T quantMode:I roundScale:B \
xScale:F | ops-transformer 2026-06 | quantize_q4m
aclnnMhcPre | x:T phi:T alpha:T bias:T gamma:T normEps:D hcEps:D hIn:O hPost:O hRes:O invRms:O \
hMix:O hPre:O | ops-transformer 2026-06 | mhc_pre
aclnnMhcSinkhorn | x:T eps:F numIters:I output:O normOut:O sumOut:O | ops-transformer 2026-09 | \
sinkhorn
aclnnMhcPost | x:T hRes:T hOut:T hPost:T out:O | ops-transformer 2026-06 | update
aclnnInplacePartialRotaryMul | xRef:O cos:T sin:T rotaryMode:I partialSlice:A | ops-transformer \
2026-09 | apply_rope
aclnnEmbedding | weight:T indices:T out:O | ops-nn 2026-06 |
aclnnGatherV2 | self:T dim:I index:T out:O | ops-nn 2026-06 |
aclnnInplaceIndexCopy | selfRef:O dim:I index:T source:T | ops-nn 2026-06 |
aclnnInplaceCopy | selfRef:O src:T | ops-math 2026-06 |
aclnnCast | self:T dtype:I out:O | ops-math 2026-06 |
aclnnSoftmax | self:T dim:I out:O | ops-nn 2026-06 |
aclnnReduceSum | self:T dims:A keepDims:B dtype:I out:O | ops-math 2026-06 |
aclnnMul | self:T other:T out:O | ops-math 2026-06 |
aclnnAdd | self:T other:T alpha:C out:O | ops-math 2026-06 |
aclnnAbs | self:T out:O | ops-math 2026-06 |
aclnnNeg | self:T out:O | ops-math 2026-06 |
aclnnSqrt | self:T out:O | ops-math 2026-06 |
aclnnSigmoid | self:T out:O | ops-math 2026-06 |
aclnnClampMin | self:T clipValueMin:C out:O | ops-math 2026-06 |
aclnnGeScalar | self:T other:C out:O | ops-math 2026-06 |
aclnnSWhere | condition:T self:T other:T out:O | ops-math 2026-06 |
"""
