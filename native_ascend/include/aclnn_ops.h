// Parameter lists of the aclnn operators that the bridge may call: first phases without their common
// end (uint64_t* workspaceSize, aclOpExecutor** executor). Order matters (ascend.md 5.2).
#pragma once

#include "acl_min.h"

namespace sig {
using T = const aclTensor*;      // a tensor that is read
using O = aclTensor*;            // a tensor that is written
using L = const aclTensorList*;  // tensors that are read
using M = aclTensorList*;        // tensors that are written
using A = const aclIntArray*;
using C = const aclScalar*;
using I = int64_t;
using J = int8_t;
using B = bool;
using D = double;
using F = float;
using S = const char*;
}  // namespace sig

// X(name, types...) with the one-letter types above.
#define DIJ_OPERATORS(X)                                                                           \
  X(aclnnMatmul, T, T, O, J)                                                                       \
  X(aclnnBatchMatMul, T, T, O, J)                                                                  \
  X(aclnnQuantMatmulV5, T, T, T, T, T, T, T, T, T, B, B, I, O)                                     \
  X(aclnnDynamicMxQuantV2, T, I, S, I, I, I, D, O, O)                                              \
  X(aclnnRmsNorm, T, T, D, O, O)                                                                   \
  X(aclnnSwigluGroupQuant, T, T, T, T, I, I, I, B, D, D, B, O, O, O)                               \
  X(aclnnGroupedMatmulWeightNz, L, L, L, L, L, L, L, L, T, L, L, L, I, I, I, I, A, I, M, M, M)      \
  X(aclnnNpuFormatCast, T, O)                                                                      \
  X(aclnnMoeGatingTopKV2, T, T, T, T, I, I, I, I, I, I, B, D, D, O, O, O)                          \
  X(aclnnMoeInitRoutingV3, T, T, T, T, I, I, I, I, I, B, I, A, I, O, O, O, O)                      \
  X(aclnnMoeFinalizeRoutingV2, T, T, T, T, T, T, T, I, O)                                          \
  X(aclnnSparseFlashMlaMetadata, T, T, T, T, T, T, T, T, T, I, I, I, I, I, I, I, I, I, I, I, I, I, \
    I, S, S, B, B, O)                                                                              \
  X(aclnnSparseFlashMla, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, T, D, I, I, I, I, I, S, \
    S, I, B, O, O)                                                                                 \
  X(aclnnQuantLightningIndexerV2Metadata, T, T, T, T, T, I, I, I, I, I, I, I, I, S, S, I, I, O)    \
  X(aclnnQuantLightningIndexerV2, T, T, T, T, T, T, T, T, T, T, T, T, T, I, I, I, S, S, I, I, I, O, \
    O)                                                                                             \
  X(aclnnIndexerQuantCache, O, O, T, T, I, B, F)                                                   \
  X(aclnnMhcPre, T, T, T, T, T, D, D, O, O, O, O, O, O)                                            \
  X(aclnnMhcSinkhorn, T, F, I, O, O, O)                                                            \
  X(aclnnMhcPost, T, T, T, T, O)                                                                   \
  X(aclnnInplacePartialRotaryMul, O, T, T, I, A)                                                   \
  X(aclnnEmbedding, T, T, O)                                                                       \
  X(aclnnGatherV2, T, I, T, O)                                                                     \
  X(aclnnInplaceIndexCopy, O, I, T, T)                                                             \
  X(aclnnInplaceCopy, O, T)                                                                        \
  X(aclnnCast, T, I, O)                                                                            \
  X(aclnnSoftmax, T, I, O)                                                                         \
  X(aclnnReduceSum, T, A, B, I, O)                                                                 \
  X(aclnnMul, T, T, O)                                                                             \
  X(aclnnAdd, T, T, C, O)                                                                          \
  X(aclnnAbs, T, O)                                                                                \
  X(aclnnNeg, T, O)                                                                                \
  X(aclnnSqrt, T, O)                                                                               \
  X(aclnnSigmoid, T, O)                                                                            \
  X(aclnnClampMin, T, C, O)                                                                        \
  X(aclnnGeScalar, T, C, O)                                                                        \
  X(aclnnSWhere, T, T, T, O)
