#include "tensors.h"

#include <algorithm>

namespace twin {
namespace {

// Address of every element of a view in row-major order, in units of elements from the address.
std::vector<int64_t> places(const aclTensor& t) {
  int64_t count = count_of(t.dims), step = 1;
  std::vector<int64_t> found(count);
  bool contiguous = true;
  for (size_t d = t.dims.size(); d-- > 0; step *= t.dims[d]) contiguous = contiguous && t.strides[d] == step;
  if (contiguous) {
    for (int64_t i = 0; i < count; i++) found[i] = i;
    return found;
  }
  std::vector<int64_t> index(t.dims.size(), 0);
  int64_t at = 0;
  for (int64_t i = 0; i < count; i++) {
    found[i] = at;
    for (int d = static_cast<int>(t.dims.size()) - 1; d >= 0; d--) {
      at += t.strides[d];
      if (++index[d] < t.dims[d]) break;
      at -= t.strides[d] * t.dims[d];
      index[d] = 0;
    }
  }
  return found;
}

Values table_of(float (*decode)(uint8_t)) {
  Values all(256);
  for (int code = 0; code < 256; code++) all[code] = decode(static_cast<uint8_t>(code));
  return all;
}

struct Unmapped {};

void require_live(const aclTensor& t, const std::vector<int64_t>& at) {
  int64_t last = at.empty() ? -1 : *std::max_element(at.begin(), at.end());
  int64_t size = ((last + 1) * acl::bits_of(t.dtype) + 7) / 8;
  if (!is_device_range(t.address, size)) {
    violate("an operator touches device memory that is not live");
    throw Unmapped{};
  }
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

}  // namespace

std::map<std::string, Kernel>& kernels() {
  static auto* all = new std::map<std::string, Kernel>;
  return *all;
}

int64_t count_of(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

int64_t size_of(const aclTensor& t) { return (count_of(t.dims) * acl::bits_of(t.dtype) + 7) / 8; }

float bf16(float value) {
  uint32_t bits = to_bits(value);
  if (std::isnan(value)) return value;
  bits += 0x7FFF + ((bits >> 16) & 1);
  return from_bits(bits & 0xFFFF0000u);
}

float decode_e4m3(uint8_t code) {
  int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return NAN;
  float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
  return code & 0x80 ? -size : size;
}

uint8_t encode_e4m3(float value) {
  uint8_t sign = std::signbit(value) ? 0x80 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return 0x7F;
  if (size > 448) return sign | 0x7E;
  int exponent = 0;
  std::frexp(size, &exponent);
  int step = std::max(exponent - 1, -6) - 3;  // the spacing of codes around `size` is 2^step
  float rounded = std::ldexp(std::nearbyint(std::ldexp(size, -step)), step);
  static const std::vector<float> sizes = [] {
    std::vector<float> all;
    for (int code = 0; code < 0x7F; code++) all.push_back(decode_e4m3(static_cast<uint8_t>(code)));
    return all;
  }();
  auto place = std::lower_bound(sizes.begin(), sizes.end(), rounded) - sizes.begin();
  return sign | static_cast<uint8_t>(std::min<int64_t>(place, 0x7E));
}

float decode_e8m0(uint8_t code) { return code == 255 ? NAN : std::ldexp(1.0f, code - 127); }

float decode_e2m1(uint8_t code) {
  static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

uint8_t encode_e2m1(float value) {
  static const float middles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  float size = std::fabs(value);
  uint8_t code = 0;
  for (int i = 0; i < 7; i++) code += i % 2 ? size >= middles[i] : size > middles[i];
  return code | (std::signbit(value) ? 8 : 0);
}

Values read(const aclTensor& t) {
  static const Values e4m3 = table_of(decode_e4m3), e8m0 = table_of(decode_e8m0);
  std::vector<int64_t> at = places(t);
  require_live(t, at);
  if (t.dtype == acl::kInt32 || t.dtype == acl::kInt64) {
    std::vector<int64_t> whole = read_integers(t);
    return Values(whole.begin(), whole.end());
  }
  Values values(at.size());
  auto* raw = reinterpret_cast<const uint8_t*>(t.address);
  const bool swapped = setting("swap_nibbles", 0) != 0;  // a mutation for self_test
  for (size_t i = 0; i < at.size(); i++) {
    int64_t p = at[i];
    switch (t.dtype) {
      case acl::kFloat: std::memcpy(&values[i], raw + 4 * p, 4); break;
      case acl::kBf16: {
        uint16_t half;
        std::memcpy(&half, raw + 2 * p, 2);
        values[i] = from_bits(static_cast<uint32_t>(half) << 16);
        break;
      }
      case acl::kE4m3: values[i] = e4m3[raw[p]]; break;
      case acl::kE8m0: values[i] = e8m0[raw[p]]; break;
      case acl::kE2m1: {
        bool high = swapped != ((p & 1) != 0);
        values[i] = decode_e2m1(high ? raw[p / 2] >> 4 : raw[p / 2] & 15);
        break;
      }
      default: values[i] = raw[p];
    }
  }
  return values;
}

std::vector<int64_t> read_integers(const aclTensor& t) {
  std::vector<int64_t> at = places(t);
  require_live(t, at);
  std::vector<int64_t> values(at.size());
  for (size_t i = 0; i < at.size(); i++) {
    if (t.dtype == acl::kInt32) {
      int32_t one;
      std::memcpy(&one, t.address + 4 * at[i], 4);
      values[i] = one;
    } else if (t.dtype == acl::kInt64) {
      std::memcpy(&values[i], t.address + 8 * at[i], 8);
    } else {
      values[i] = static_cast<uint8_t>(t.address[at[i]]);
    }
  }
  return values;
}

void write(const aclTensor& t, const Values& values) {
  std::vector<int64_t> at = places(t);
  require_live(t, at);
  auto* raw = reinterpret_cast<uint8_t*>(t.address);
  const bool swapped = setting("swap_nibbles", 0) != 0;  // as in `read`
  for (size_t i = 0; i < at.size(); i++) {
    int64_t p = at[i];
    switch (t.dtype) {
      case acl::kFloat: std::memcpy(raw + 4 * p, &values[i], 4); break;
      case acl::kBf16: {
        auto half = static_cast<uint16_t>(to_bits(bf16(values[i])) >> 16);
        std::memcpy(raw + 2 * p, &half, 2);
        break;
      }
      case acl::kE4m3: raw[p] = encode_e4m3(values[i]); break;
      case acl::kE8m0: raw[p] = static_cast<uint8_t>(to_bits(values[i]) >> 23); break;
      case acl::kE2m1: {
        uint8_t code = encode_e2m1(values[i]);
        raw[p / 2] = swapped != ((p & 1) != 0) ? (raw[p / 2] & 0x0F) | (code << 4) : (raw[p / 2] & 0xF0) | code;
        break;
      }
      default: raw[p] = static_cast<uint8_t>(values[i]);
    }
  }
}

void write_integers(const aclTensor& t, const std::vector<int64_t>& values) {
  std::vector<int64_t> at = places(t);
  require_live(t, at);
  for (size_t i = 0; i < at.size(); i++) {
    if (t.dtype == acl::kInt32) {
      auto one = static_cast<int32_t>(values[i]);
      std::memcpy(t.address + 4 * at[i], &one, 4);
    } else {
      std::memcpy(t.address + 8 * at[i], &values[i], 8);
    }
  }
}

char* bytes(const aclTensor& t) {
  if (!is_device_range(t.address, size_of(t))) {
    violate("an operator touches device memory that is not live");
    throw Unmapped{};
  }
  return t.address;
}

const aclTensor& Call::tensor(int place) const {
  if (values_[place].null) throw Rejected{name_ + " parameter " + std::to_string(place) + " is null", 161001};
  return values_[place].tensors[0];
}

const aclTensor& Call::only(int place) const {
  require(has(place) && values_[place].tensors.size() == 1, "a list of one tensor");
  return values_[place].tensors[0];
}

void Call::require(bool good, const std::string& rule) const {
  if (!good) throw Rejected{name_ + ": " + rule};
}

void Call::require_dtype(int place, std::initializer_list<int> dtypes) const {
  int dtype = tensor(place).dtype;
  require(std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end(),
          "data type " + std::to_string(dtype) + " of parameter " + std::to_string(place));
}

void Call::require_shape(int place, const std::vector<int64_t>& dims) const {
  require(tensor(place).dims == dims, "shape of parameter " + std::to_string(place));
}

void Call::require_null(std::initializer_list<int> places) const {
  for (int place : places) {
    require(!has(place), "parameter " + std::to_string(place) + " has to be null");
  }
}

}  // namespace twin

// An executor: made by a first phase, used once by the second, unless it is repeatable.
struct aclOpExecutor {
  twin::Call call;
  const twin::Kernel* kernel;
  uint64_t workspace;
  bool repeatable = false;
};

namespace twin {

Value capture(const aclTensor* t) {
  Value value{'T', t == nullptr, {}, {}, 0, {}};
  if (t) value.tensors.push_back(*t);
  return value;
}
Value capture(const aclTensorList* l) {
  Value value{'L', l == nullptr, {}, {}, 0, {}};
  if (l) for (auto* t : l->tensors) value.tensors.push_back(*t);
  return value;
}
Value capture(const aclIntArray* a) { return {'A', a == nullptr, {}, a ? a->values : std::vector<int64_t>{}, 0, {}}; }
Value capture(const aclScalar* s) { return {'C', s == nullptr, {}, {}, s ? s->value : 0, {}}; }
Value capture(int64_t v) { return {'I', false, {}, {v}, 0, {}}; }
Value capture(int8_t v) { return {'I', false, {}, {v}, 0, {}}; }
Value capture(bool v) { return {'B', false, {}, {v}, 0, {}}; }
Value capture(double v) { return {'D', false, {}, {}, v, {}}; }
Value capture(float v) { return {'D', false, {}, {}, v, {}}; }
Value capture(const char* v) { return {'S', v == nullptr, {}, {}, 0, v ? v : ""}; }

aclnnStatus first_phase(const char* name, std::vector<Value> values, uint64_t* size, aclOpExecutor** executor) {
  if (int code = enter((std::string(name) + "GetWorkspaceSize").c_str())) return code;
  if (int code = require_device()) return code;
  const Kernel& kernel = kernels().at(name);
  Call call(name, std::move(values));
  try {
    kernel.check(call);
  } catch (const Rejected& rejected) {
    explain(rejected.text);
    return rejected.code;
  }
  *size = setting("workspace", kernel.workspace);
  *executor = new aclOpExecutor{std::move(call), &kernel, *size};
  count_live("executors", 1);
  return 0;
}

aclnnStatus second_phase(const char* name, void* workspace, uint64_t size, aclOpExecutor* executor,
                         aclrtStream stream) {
  int late = 0;
  int code = enter(name, &late);
  if (!code) code = require_device();
  if (!code && executor->call.name() != name) {
    violate(std::string("an executor of ") + executor->call.name() + " is run by " + name);
    code = 161002;
  }
  if (!code && (size < executor->workspace || (executor->workspace && !workspace))) {
    violate(std::string(name) + " got no workspace of the size it asked for");
    code = 161002;
  }
  if (!code) {
    uint64_t needed = executor->workspace;
    code = enqueue(stream, [late, workspace, needed, kernel = executor->kernel, call = executor->call] {
      if (late) return late;
      if (needed) {
        if (!is_device_range(workspace, static_cast<int64_t>(needed))) {
          violate(call.name() + " runs with a workspace that was freed");
          return 507015;
        }
        std::memset(workspace, 0xEE, needed);
      }
      try {
        kernel->run(call);
      } catch (const Rejected& rejected) {
        violate(rejected.text);
        return 507015;
      } catch (const Unmapped&) {
        return 507015;
      }
      return 0;
    });
  }
  if (!executor->repeatable) {
    delete executor;
    count_live("executors", -1);
  }
  return code;
}

}  // namespace twin

using namespace twin;

#define DIJ_RELEASE(name, kind, type)                                                              \
  DIJ_EXPORT aclnnStatus name(const type* object) {                                                \
    int fault = enter(#name);                                                                      \
    {                                                                                              \
      std::lock_guard<std::mutex> lock(state().mutex);                                             \
      if (!known_##type().erase(object)) {                                                         \
        state().violations.push_back(std::string(#name) + " of an object that is not live");       \
        return 161002;                                                                             \
      }                                                                                            \
    }                                                                                              \
    delete object;                                                                                 \
    count_live(kind, -1);                                                                          \
    return fault;                                                                                  \
  }
#define DIJ_KNOWN(type)                                                                            \
  static std::set<const type*>& known_##type() {                                                   \
    static auto* all = new std::set<const type*>;                                                  \
    return *all;                                                                                   \
  }                                                                                                \
  static type* keep(type* object, const char* kind) {                                              \
    std::lock_guard<std::mutex> lock(state().mutex);                                               \
    known_##type().insert(object);                                                                 \
    state().live[kind]++;                                                                          \
    return object;                                                                                 \
  }
DIJ_KNOWN(aclTensor)
DIJ_KNOWN(aclTensorList)
DIJ_KNOWN(aclIntArray)
DIJ_KNOWN(aclScalar)

DIJ_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
                                      int64_t offset, int format, const int64_t* storage,
                                      uint64_t storage_rank, void* address) {
  if (enter("aclCreateTensor")) return nullptr;
  if (reinterpret_cast<uintptr_t>(address) % 32) {
    explain("the address of a tensor is not aligned to 32 bytes");
    return nullptr;
  }
  auto* t = new aclTensor;
  t->dims.assign(dims, dims + rank);
  t->strides.assign(strides, strides + rank);
  t->storage.assign(storage, storage + storage_rank);
  t->dtype = dtype;
  t->format = format;
  t->address = static_cast<char*>(address) + offset * acl::bits_of(dtype) / 8;
  return keep(t, "tensors");
}
DIJ_RELEASE(aclDestroyTensor, "tensors", aclTensor)

DIJ_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  if (enter("aclCreateTensorList")) return nullptr;
  auto* list = new aclTensorList;
  list->tensors.assign(tensors, tensors + count);
  return keep(list, "lists");
}

DIJ_EXPORT aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  int fault = enter("aclDestroyTensorList");
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!known_aclTensorList().erase(list)) {
      state().violations.push_back("aclDestroyTensorList of an object that is not live");
      return 161002;
    }
  }
  for (auto* tensor : list->tensors) aclDestroyTensor(tensor);
  delete list;
  count_live("lists", -1);
  return fault;
}

DIJ_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  if (enter("aclCreateIntArray")) return nullptr;
  return keep(new aclIntArray{std::vector<int64_t>(values, values + count)}, "arrays");
}
DIJ_RELEASE(aclDestroyIntArray, "arrays", aclIntArray)

DIJ_EXPORT aclScalar* aclCreateScalar(void* value, int dtype) {
  if (enter("aclCreateScalar") || dtype != acl::kFloat) return nullptr;
  return keep(new aclScalar{*static_cast<float*>(value)}, "scalars");
}
DIJ_RELEASE(aclDestroyScalar, "scalars", aclScalar)

DIJ_EXPORT aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  int fault = enter("aclSetAclOpExecutorRepeatable");
  executor->repeatable = true;
  return fault;
}

DIJ_EXPORT aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  int fault = enter("aclDestroyAclOpExecutor");
  if (!executor->repeatable) {
    violate("aclDestroyAclOpExecutor of an executor that is not repeatable");
    return 161002;
  }
  delete executor;
  count_live("executors", -1);
  return fault;
}

// Defines both phases of every operator with the parameter list of include/aclnn_ops.h.
#define DIJ_P1(t) t a1
#define DIJ_P2(t, ...) t a2, DIJ_P1(__VA_ARGS__)
#define DIJ_P3(t, ...) t a3, DIJ_P2(__VA_ARGS__)
#define DIJ_P4(t, ...) t a4, DIJ_P3(__VA_ARGS__)
#define DIJ_P5(t, ...) t a5, DIJ_P4(__VA_ARGS__)
#define DIJ_P6(t, ...) t a6, DIJ_P5(__VA_ARGS__)
#define DIJ_P7(t, ...) t a7, DIJ_P6(__VA_ARGS__)
#define DIJ_P8(t, ...) t a8, DIJ_P7(__VA_ARGS__)
#define DIJ_P9(t, ...) t a9, DIJ_P8(__VA_ARGS__)
#define DIJ_P10(t, ...) t a10, DIJ_P9(__VA_ARGS__)
#define DIJ_P11(t, ...) t a11, DIJ_P10(__VA_ARGS__)
#define DIJ_P12(t, ...) t a12, DIJ_P11(__VA_ARGS__)
#define DIJ_P13(t, ...) t a13, DIJ_P12(__VA_ARGS__)
#define DIJ_P14(t, ...) t a14, DIJ_P13(__VA_ARGS__)
#define DIJ_P15(t, ...) t a15, DIJ_P14(__VA_ARGS__)
#define DIJ_P16(t, ...) t a16, DIJ_P15(__VA_ARGS__)
#define DIJ_P17(t, ...) t a17, DIJ_P16(__VA_ARGS__)
#define DIJ_P18(t, ...) t a18, DIJ_P17(__VA_ARGS__)
#define DIJ_P19(t, ...) t a19, DIJ_P18(__VA_ARGS__)
#define DIJ_P20(t, ...) t a20, DIJ_P19(__VA_ARGS__)
#define DIJ_P21(t, ...) t a21, DIJ_P20(__VA_ARGS__)
#define DIJ_P22(t, ...) t a22, DIJ_P21(__VA_ARGS__)
#define DIJ_P23(t, ...) t a23, DIJ_P22(__VA_ARGS__)
#define DIJ_P24(t, ...) t a24, DIJ_P23(__VA_ARGS__)
#define DIJ_P25(t, ...) t a25, DIJ_P24(__VA_ARGS__)
#define DIJ_P26(t, ...) t a26, DIJ_P25(__VA_ARGS__)
#define DIJ_P27(t, ...) t a27, DIJ_P26(__VA_ARGS__)
#define DIJ_P28(t, ...) t a28, DIJ_P27(__VA_ARGS__)
#define DIJ_P29(t, ...) t a29, DIJ_P28(__VA_ARGS__)
#define DIJ_P30(t, ...) t a30, DIJ_P29(__VA_ARGS__)
#define DIJ_C1 capture(a1)
#define DIJ_C2 capture(a2), DIJ_C1
#define DIJ_C3 capture(a3), DIJ_C2
#define DIJ_C4 capture(a4), DIJ_C3
#define DIJ_C5 capture(a5), DIJ_C4
#define DIJ_C6 capture(a6), DIJ_C5
#define DIJ_C7 capture(a7), DIJ_C6
#define DIJ_C8 capture(a8), DIJ_C7
#define DIJ_C9 capture(a9), DIJ_C8
#define DIJ_C10 capture(a10), DIJ_C9
#define DIJ_C11 capture(a11), DIJ_C10
#define DIJ_C12 capture(a12), DIJ_C11
#define DIJ_C13 capture(a13), DIJ_C12
#define DIJ_C14 capture(a14), DIJ_C13
#define DIJ_C15 capture(a15), DIJ_C14
#define DIJ_C16 capture(a16), DIJ_C15
#define DIJ_C17 capture(a17), DIJ_C16
#define DIJ_C18 capture(a18), DIJ_C17
#define DIJ_C19 capture(a19), DIJ_C18
#define DIJ_C20 capture(a20), DIJ_C19
#define DIJ_C21 capture(a21), DIJ_C20
#define DIJ_C22 capture(a22), DIJ_C21
#define DIJ_C23 capture(a23), DIJ_C22
#define DIJ_C24 capture(a24), DIJ_C23
#define DIJ_C25 capture(a25), DIJ_C24
#define DIJ_C26 capture(a26), DIJ_C25
#define DIJ_C27 capture(a27), DIJ_C26
#define DIJ_C28 capture(a28), DIJ_C27
#define DIJ_C29 capture(a29), DIJ_C28
#define DIJ_C30 capture(a30), DIJ_C29
#define DIJ_PICK(n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, n22, n23, n24, n25, n26, n27, n28, n29, n30, chosen, ...) chosen
#define DIJ_COUNT(...) DIJ_PICK(__VA_ARGS__, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
#define DIJ_JOIN2(a, b) a##b
#define DIJ_JOIN(a, b) DIJ_JOIN2(a, b)
#define DIJ_DEFINE(name, ...)                                                                      \
  DIJ_EXPORT aclnnStatus name##GetWorkspaceSize(DIJ_JOIN(DIJ_P, DIJ_COUNT(__VA_ARGS__))(__VA_ARGS__), \
                                                uint64_t* size, aclOpExecutor** executor) {        \
    return first_phase(#name, {DIJ_JOIN(DIJ_C, DIJ_COUNT(__VA_ARGS__))}, size, executor);          \
  }                                                                                                \
  DIJ_EXPORT aclnnStatus name(void* workspace, uint64_t size, aclOpExecutor* executor,             \
                              aclrtStream stream) {                                                \
    return second_phase(#name, workspace, size, executor, stream);                                 \
  }
using namespace sig;
DIJ_OPERATORS(DIJ_DEFINE)
