// Expert selection, row permutation and its inverse (ascend.md rows 21, 22).
#include <algorithm>
#include <numeric>

#include "tensors.h"

namespace twin {
namespace {

constexpr int64_t kWorkspace = 1024;

float score(float logit) {
  return std::sqrt(logit > 20 ? logit : std::log1p(std::exp(std::fmin(logit, 20.0f))));
}

const Register kGating("aclnnMoeGatingTopKV2", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      int64_t k = c.integer(4);
      c.require_dtype(0, {acl::kFloat});
      c.require(x.dims.size() == 2 && k > 0 && k <= x.dims[1], "logits [t, e], k within e");
      c.require_shape(1, {x.dims[1]});
      c.require_dtype(1, {acl::kFloat});
      c.require_null({2, 3});
      c.require(c.integer(5) == 1 && c.integer(6) == 1 && c.integer(7) == 0 && c.integer(8) == 0, "one group");
      c.require(c.integer(9) == 2, "normType 2 is sqrt(softplus) (row 21)");
      c.require(c.integer(10) == 0, "no third output");
      c.require_shape(13, {x.dims[0], k});
      c.require_shape(14, {x.dims[0], k});
      c.require_dtype(14, {acl::kInt32});
    },
    [](const Call& c) {
      int64_t rows = c.tensor(0).dims[0], experts = c.tensor(0).dims[1], k = c.integer(4);
      Values logits = read(c.tensor(0)), bias = read(c.tensor(1)), weights;
      std::vector<int64_t> ids;
      for (int64_t r = 0; r < rows; r++) {
        Values s(experts), biased(experts);
        for (int64_t e = 0; e < experts; e++) biased[e] = (s[e] = score(logits[r * experts + e])) + bias[e];
        std::vector<int64_t> order(experts);
        std::iota(order.begin(), order.end(), 0);
        if (setting("reverse_ties", 0)) std::reverse(order.begin(), order.end());  // a mutation
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return biased[a] > biased[b]; });
        float sum = 0;
        for (int64_t i = 0; i < k; i++) sum += s[order[i]];
        for (int64_t i = 0; i < k; i++) {
          ids.push_back(order[i]);
          weights.push_back(s[order[i]] / (sum + static_cast<float>(c.real(12))) * static_cast<float>(c.real(11)));
        }
      }
      write(c.tensor(13), weights);
      write_integers(c.tensor(14), ids);
    }, kWorkspace});

// Dropless. Flat slot i = token * k + place goes to row expandedRowIdx[i] (rowIdxType 0).
const Register kInit("aclnnMoeInitRoutingV3", {
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &ids = c.tensor(1);
      int64_t rows = x.dims[0], slots = rows * ids.dims[1];
      c.require(x.dims.size() == 2 && ids.dims.size() == 2 && ids.dims[0] == rows, "x [t, d], ids [t, k]");
      c.require_dtype(1, {acl::kInt32});
      c.require_null({2, 3, 16});
      c.require(c.integer(4) == slots && c.integer(5) == 0 && c.integer(7) == 0, "dropless: activeNum is t k");
      c.require(c.integer(8) == 1 && c.integer(9) == 1, "expertTokensNumType 1 counts");
      c.require(c.integer(10) == -1, "no quantisation");
      c.require(c.numbers(11) == std::vector<int64_t>({0, c.integer(6)}), "all experts are active");
      c.require(c.integer(12) == 0, "rowIdxType 0");
      c.require(c.tensor(13).dims == std::vector<int64_t>({slots, x.dims[1]}) &&
                    c.tensor(13).dtype == x.dtype, "expanded rows");
      c.require_shape(14, {slots});
      c.require_dtype(14, {acl::kInt32});
      c.require_shape(15, {c.integer(6)});
      c.require_dtype(15, {acl::kInt64});
    },
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      std::vector<int64_t> ids = read_integers(c.tensor(1)), order(ids.size()), place(ids.size());
      std::vector<int64_t> counts(c.integer(6));
      int64_t k = c.tensor(1).dims[1], width = x.dims[1];
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
      Values from = read(x), to(ids.size() * width);
      for (size_t row = 0; row < order.size(); row++) {
        c.require(ids[order[row]] >= 0 && ids[order[row]] < c.integer(6), "expert ids lie in [0, e)");
        place[order[row]] = row;
        counts[ids[order[row]]]++;
        std::copy_n(from.begin() + order[row] / k * width, width, to.begin() + row * width);
      }
      write(c.tensor(13), to);
      write_integers(c.tensor(14), place);
      write_integers(c.tensor(15), counts);
    }, kWorkspace});

// dropPadMode 2: dropless, index token * k + place. Sum over places in order, x1 last, one rounding.
const Register kFinalize("aclnnMoeFinalizeRoutingV2", {
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &out = c.tensor(8);
      c.require_dtype(0, {acl::kBf16, acl::kFloat});
      c.require_dtype(1, {acl::kInt32});
      c.require_null({3, 4, 5});
      c.require(c.integer(7) == 2, "dropPadMode 2");
      c.require(out.dims.size() == 2 && x.dims[0] % out.dims[0] == 0 && x.dims[1] == out.dims[1], "shapes");
      c.require_shape(1, {x.dims[0]});
      if (c.has(2)) c.require_shape(2, out.dims);
    },
    [](const Call& c) {
      const aclTensor& out = c.tensor(8);
      int64_t rows = out.dims[0], width = out.dims[1], k = c.tensor(0).dims[0] / rows;
      Values x = read(c.tensor(0)), shared(rows * width), y(rows * width);
      if (c.has(2)) shared = read(c.tensor(2));
      std::vector<int64_t> place = read_integers(c.tensor(1));
      for (int64_t row : place) c.require(row >= 0 && row < rows * k, "expandedRowIdx lies in [0, t k)");
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < width; i++) {
          float sum = 0;
          for (int64_t s = 0; s < k; s++) sum += x[place[r * k + s] * width + i];
          y[r * width + i] = sum + shared[r * width + i];
        }
      }
      write(out, y);
    }, kWorkspace});

}  // namespace
}  // namespace twin
