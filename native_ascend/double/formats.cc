#include "formats.h"

namespace twin {
namespace {

// The least power of two that is not below `ratio`, at least 2^-127; a mutation takes the greatest
// that is not above it.
float power_above(double ratio, bool floor) {
  if (std::isnan(ratio) || std::isinf(ratio)) return NAN;
  if (ratio <= std::ldexp(1.0, -127)) return std::ldexp(1.0f, -127);
  int exponent = 0;
  double fraction = std::frexp(ratio, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, floor || fraction == 0.5 ? exponent - 1 : exponent);
}

}  // namespace

std::vector<int64_t> mx_scales(std::vector<int64_t> dims) {
  dims.back() = (dims.back() + 63) / 64;
  dims.push_back(2);
  return dims;
}

Values scaled(Values codes, const Values& scales, int64_t k) {
  int64_t stored = (k + 63) / 64 * 2;
  for (size_t i = 0; i < codes.size(); i++) codes[i] *= scales[i / k * stored + i % k / 32];
  return codes;
}

Quantised quantise(const Values& x, int64_t k, int dtype) {
  int64_t groups = k / 32, stored = (k + 63) / 64 * 2, rows = static_cast<int64_t>(x.size()) / k;
  double most = dtype == acl::kE4m3 ? 448 : 6;
  bool floor = setting("floor_scales", 0) != 0;  // a mutation for self_test
  Quantised q{Values(x.size()), Values(rows * stored, std::ldexp(1.0f, -127))};
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t g = 0; g < groups; g++) {
      const float* from = x.data() + r * k + g * 32;
      float amax = 0;
      for (int i = 0; i < 32; i++) {
        float size = std::fabs(from[i]);
        if (!(size <= amax)) amax = std::isnan(amax) ? amax : size;  // NaN stays
      }
      float scale = power_above(amax / most, floor);
      q.scales[r * stored + g] = scale;
      for (int i = 0; i < 32; i++) q.codes[r * k + g * 32 + i] = from[i] / scale;
    }
  }
  return q;
}

}  // namespace twin
