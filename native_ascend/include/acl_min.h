// Our own declarations of the part of the ACL C interface that the bridge uses (ascend.md 4.1, 4.2).
// Names, parameter types and numbers are facts of the interface; nothing here comes from a vendor file.
#pragma once

#include <cstddef>
#include <cstdint>

using aclError = int;
using aclnnStatus = int;
using aclrtStream = void*;
using aclrtEvent = void*;

struct aclTensor;
struct aclTensorList;
struct aclIntArray;
struct aclScalar;
struct aclOpExecutor;

namespace acl {

enum Copy : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum DataType : int {
  kFloat = 0, kFloat16 = 1, kInt8 = 2, kInt32 = 3, kUint8 = 4, kInt64 = 9, kBool = 12, kBf16 = 27,
  kE5m2 = 35, kE4m3 = 36, kE8m0 = 37, kE2m1 = 40,
};
enum Format : int { kNd = 2, kNz = 29 };
constexpr aclError kRepeatInitialize = 100002;
constexpr aclError kTimeout = 107020;

// Bits of one element; 0 for a number that is no data type the bridge carries.
constexpr int64_t bits_of(int dtype) {
  switch (dtype) {
    case kFloat: case kInt32: return 32;
    case kFloat16: case kBf16: return 16;
    case kInt64: return 64;
    case kInt8: case kUint8: case kBool: case kE5m2: case kE4m3: case kE8m0: return 8;
    case kE2m1: return 4;
    default: return 0;
  }
}

}  // namespace acl

// X(result, name, parameters): everything that has to exist in the libraries that are loaded.
#define DIJ_RUNTIME(X)                                                                             \
  X(aclError, aclInit, (const char* config))                                                       \
  X(aclError, aclFinalize, ())                                                                     \
  X(const char*, aclGetRecentErrMsg, ())                                                           \
  X(const char*, aclrtGetSocName, ())                                                              \
  X(aclError, aclsysGetVersionStr, (char* package, char* version))                                 \
  X(aclError, aclrtGetDeviceCount, (uint32_t * count))                                             \
  X(aclError, aclrtSetDevice, (int32_t device))                                                    \
  X(aclError, aclrtMalloc, (void** block, size_t size, int policy))                                \
  X(aclError, aclrtFree, (void* block))                                                            \
  X(aclError, aclrtGetMemInfo, (int attribute, size_t* free, size_t* total))                       \
  X(aclError, aclrtMemcpyAsync,                                                                    \
    (void* to, size_t room, const void* from, size_t size, int kind, aclrtStream stream))          \
  X(aclError, aclrtCreateStream, (aclrtStream * stream))                                           \
  X(aclError, aclrtDestroyStream, (aclrtStream stream))                                            \
  X(aclError, aclrtSynchronizeStream, (aclrtStream stream))                                        \
  X(aclError, aclrtSynchronizeStreamWithTimeout, (aclrtStream stream, int32_t milliseconds))       \
  X(aclError, aclrtCreateEventExWithFlag, (aclrtEvent * event, uint32_t flag))                     \
  X(aclError, aclrtDestroyEvent, (aclrtEvent event))                                               \
  X(aclError, aclrtRecordEvent, (aclrtEvent event, aclrtStream stream))                            \
  X(aclError, aclrtStreamWaitEvent, (aclrtStream stream, aclrtEvent event))                        \
  X(aclTensor*, aclCreateTensor,                                                                   \
    (const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides, int64_t offset,        \
     int format, const int64_t* storage, uint64_t storage_rank, void* address))                    \
  X(aclnnStatus, aclDestroyTensor, (const aclTensor* tensor))                                      \
  X(aclTensorList*, aclCreateTensorList, (const aclTensor* const* tensors, uint64_t count))        \
  X(aclnnStatus, aclDestroyTensorList, (const aclTensorList* list))                                \
  X(aclIntArray*, aclCreateIntArray, (const int64_t* values, uint64_t count))                      \
  X(aclnnStatus, aclDestroyIntArray, (const aclIntArray* array))                                   \
  X(aclScalar*, aclCreateScalar, (void* value, int dtype))                                         \
  X(aclnnStatus, aclDestroyScalar, (const aclScalar* scalar))                                      \
  X(aclnnStatus, aclSetAclOpExecutorRepeatable, (aclOpExecutor * executor))                        \
  X(aclnnStatus, aclDestroyAclOpExecutor, (aclOpExecutor * executor))
