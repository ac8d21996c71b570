// MX groups: 32 elements of the last axis share one power of two; scales come in pairs (ascend.md 5.2).
#pragma once

#include "tensors.h"

namespace twin {

struct Quantised {
  Values codes, scales;
};

// Shape of the scales of an array: [.., ceil(k / 64), 2].
std::vector<int64_t> mx_scales(std::vector<int64_t> dims);
// Values of codes [.., k] with scales [.., ceil(k / 64) * 2].
Values scaled(Values codes, const Values& scales, int64_t k);
// Codes of E4M3 (scale: ceiling of amax / 448) or E2M1 (amax / 6); k is the last axis.
Quantised quantise(const Values& x, int64_t k, int dtype);

}  // namespace twin
