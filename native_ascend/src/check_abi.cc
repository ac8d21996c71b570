// Compiled only where CANN's headers are: every declaration of ours has the vendor's binary interface.
// The vendor's enumerations are passed as integers of their size, pointers as pointers to the same.
#include <type_traits>

#include "acl/acl.h"
#include "acl_min.h"
#include "aclnn/acl_meta.h"

namespace {

template <class T, bool = std::is_enum_v<T>> struct Passed { using type = T; };
template <class T> struct Passed<T, true> { using type = int; };

template <class A, class B> constexpr bool same_parameter() {
  using X = typename Passed<std::remove_cv_t<A>>::type;
  using Y = typename Passed<std::remove_cv_t<B>>::type;
  return std::is_same_v<X, Y>;
}

template <class Theirs, class Ours> struct Same : std::false_type {};
template <class R, class... P, class S, class... Q> struct Same<R (*)(P...), S (*)(Q...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(P) != sizeof...(Q)) return false;
    else return same_parameter<R, S>() && (same_parameter<P, Q>() && ...);
  }
  static constexpr bool value = compare();
};

#define DIJ_COMPARE(result, name, parameters)                                                      \
  static_assert(Same<decltype(&::name), result(*) parameters>::value, #name " differs");
DIJ_RUNTIME(DIJ_COMPARE)

static_assert(ACL_FLOAT == acl::kFloat && ACL_FLOAT16 == acl::kFloat16 && ACL_INT8 == acl::kInt8);
static_assert(ACL_INT32 == acl::kInt32 && ACL_UINT8 == acl::kUint8 && ACL_INT64 == acl::kInt64);
static_assert(ACL_BOOL == acl::kBool && ACL_BF16 == acl::kBf16);
static_assert(ACL_FLOAT8_E5M2 == acl::kE5m2 && ACL_FLOAT8_E4M3FN == acl::kE4m3);
static_assert(ACL_FLOAT8_E8M0 == acl::kE8m0 && ACL_FLOAT4_E2M1 == acl::kE2m1);
static_assert(ACL_MEMCPY_HOST_TO_DEVICE == acl::kHostToDevice);
static_assert(ACL_MEMCPY_DEVICE_TO_HOST == acl::kDeviceToHost);
static_assert(ACL_FORMAT_ND == acl::kNd && ACL_FORMAT_FRACTAL_NZ == acl::kNz);

}  // namespace
