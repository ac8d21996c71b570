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
