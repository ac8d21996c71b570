// Products, norms and quantisers of ascend.md 5.2 and 5.3.
#include "formats.h"
#include "tensors.h"

namespace twin {
namespace {

constexpr int64_t kWorkspace = 4096;
constexpr int64_t kMxGroups = 4295032864;  // MX (1,1,32): K | N<<16 | M<<32

// x [m, k] and w [n, k]: float32 sums, k ascending.
Values product(const float* x, const float* w, int64_t m, int64_t n, int64_t k) {
  Values y(m * n);
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) {
      float sum = 0;
      for (int64_t c = 0; c < k; c++) sum += x[i * k + c] * w[j * k + c];
      y[i * n + j] = sum;
    }
  }
  return y;
}

Values transposed(const Values& w, int64_t k, int64_t n) {
  Values t(w.size());
  for (int64_t i = 0; i < k; i++) for (int64_t j = 0; j < n; j++) t[j * k + i] = w[i * n + j];
  return t;
}

void check_matmul(const Call& c, size_t rank) {
  const aclTensor &x = c.tensor(0), &w = c.tensor(1), &y = c.tensor(2);
  c.require_dtype(0, {acl::kFloat, acl::kBf16});
  c.require(x.dtype == w.dtype && x.dtype == y.dtype, "cubeMathType 0 keeps one data type (row 3)");
  c.require(c.integer(3) == 0, "cubeMathType is 0");
  c.require(x.dims.size() == rank && w.dims.size() == rank && y.dims.size() == rank,
            rank == 3 ? "three axes only (9.1)" : "two axes only");
  c.require(x.dims[rank - 1] == w.dims[rank - 2] && y.dims[rank - 2] == x.dims[rank - 2] &&
                y.dims[rank - 1] == w.dims[rank - 1], "shapes");
}

void run_matmul(const Call& c) {
  const aclTensor &x = c.tensor(0), &w = c.tensor(1);
  size_t rank = x.dims.size();
  int64_t m = x.dims[rank - 2], k = x.dims[rank - 1], n = w.dims[rank - 1];
  int64_t batch = rank == 3 ? x.dims[0] : 1;
  Values a = read(x), b = read(w), y;
  for (int64_t g = 0; g < batch; g++) {
    Values one(b.begin() + g * k * n, b.begin() + (g + 1) * k * n);
    Values part = product(a.data() + g * m * k, transposed(one, k, n).data(), m, n, k);
    y.insert(y.end(), part.begin(), part.end());
  }
  write(c.tensor(2), y);
}

const Register kMatmul("aclnnMatmul", {[](const Call& c) { check_matmul(c, 2); }, run_matmul, kWorkspace});
const Register kBatch("aclnnBatchMatMul", {[](const Call& c) { check_matmul(c, 3); }, run_matmul, kWorkspace});

// MX only: the mode the table uses (row 1).
const Register kQuantMatmul("aclnnQuantMatmulV5", {
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &w = c.tensor(1), &y = c.tensor(12);
      c.require_dtype(0, {acl::kE4m3});
      c.require_dtype(1, {acl::kE4m3});
      c.require_dtype(12, {acl::kBf16, acl::kFloat16, acl::kFloat});
      c.require_null({4, 5, 6, 7, 8});
      c.require(c.integer(11) == kMxGroups, "groupSize of MX is 4295032864");
      c.require(!c.integer(9) && c.integer(10), "MX takes x [m, k] and a transposed x2 [n, k]");
      c.require(x.dims.size() == 2 && w.dims.size() == 2 && x.dims[1] == w.dims[1], "shapes");
      c.require_shape(2, mx_scales({x.dims[0], x.dims[1]}));
      c.require_shape(3, mx_scales({w.dims[0], w.dims[1]}));
      c.require_dtype(2, {acl::kE8m0});
      c.require_dtype(3, {acl::kE8m0});
      c.require(y.dims == std::vector<int64_t>{x.dims[0], w.dims[0]}, "shape of the output");
    },
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &w = c.tensor(1);
      Values a = scaled(read(x), read(c.tensor(2)), x.dims[1]);
      Values b = scaled(read(w), read(c.tensor(3)), w.dims[1]);
      write(c.tensor(12), product(a.data(), b.data(), x.dims[0], w.dims[0], x.dims[1]));
    }, kWorkspace});

const Register kMxQuant("aclnnDynamicMxQuantV2", {
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &y = c.tensor(7);
      c.require_dtype(0, {acl::kBf16, acl::kFloat16});
      c.require(c.integer(1) == -1 || c.integer(1) == static_cast<int64_t>(x.dims.size()) - 1, "last axis");
      c.require(c.text(2) == "rint", "roundMode rint");
      c.require(c.integer(4) == 32, "blocksize 32 (7.2)");
      bool fp8 = c.integer(3) == acl::kE4m3 && c.integer(5) == 1;
      bool fp4 = c.integer(3) == acl::kE2m1 && c.integer(5) == 2 && c.real(6) == 6;
      c.require(fp8 || fp4, "E4M3 with scaleAlg 1 or E2M1 with scaleAlg 2 and dstTypeMax 6 (rows 4, 5)");
      c.require(y.dims == x.dims && y.dtype == c.integer(3), "shape and data type of the codes");
      c.require(x.dims.back() % 32 == 0, "whole groups of 32");
      c.require_shape(8, mx_scales(x.dims));
      c.require_dtype(8, {acl::kE8m0});
    },
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      Quantised q = quantise(read(x), x.dims.back(), static_cast<int>(c.integer(3)));
      write(c.tensor(7), q.codes);
      write(c.tensor(8), q.scales);
    }, kWorkspace});

const Register kNorm("aclnnRmsNorm", {
    [](const Call& c) {
      const aclTensor &x = c.tensor(0), &gamma = c.tensor(1);
      c.require_dtype(0, {acl::kBf16, acl::kFloat16, acl::kFloat});
      c.require(gamma.dtype == x.dtype && gamma.dims.size() == 1 && gamma.dims[0] == x.dims.back(), "gamma");
      c.require(c.real(2) >= 0, "epsilon");
      c.require(c.tensor(3).dims == x.dims && c.tensor(3).dtype == x.dtype, "output as the input");
      std::vector<int64_t> rstd = x.dims;
      rstd.back() = 1;
      c.require_shape(4, rstd);
      c.require_dtype(4, {acl::kFloat});
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t width = t.dims.back();
      Values x = read(t), gamma = read(c.tensor(1)), rstd(x.size() / width);
      for (size_t r = 0; r < rstd.size(); r++) {
        double sum = 0;
        for (int64_t i = 0; i < width; i++) sum += double{x[r * width + i]} * x[r * width + i];
        rstd[r] = 1 / std::sqrt(static_cast<float>(sum / width) + static_cast<float>(c.real(2)));
        for (int64_t i = 0; i < width; i++) x[r * width + i] = x[r * width + i] * rstd[r] * gamma[i];
      }
      write(c.tensor(3), x);
      write(c.tensor(4), rstd);
    }, kWorkspace});

// Row 24: clamp, SwiGLU, weight, BF16 (unverified), MX.
const Register kSwiglu("aclnnSwigluGroupQuant", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      c.require_dtype(0, {acl::kBf16});
      c.require(x.dims.size() == 2 && x.dims[1] % 128 == 0, "[gate | up] of whole pairs of groups");
      int64_t rows = x.dims[0], width = x.dims[1] / 2;
      if (c.has(1)) c.require_shape(1, {rows});
      c.require_null({2, 3, 13});
      c.require(c.integer(4) == acl::kE4m3 && c.integer(5) == 1 && c.integer(6) == 32, "MX E4M3, groups of 32");
      c.require(c.integer(7) == 1, "roundScale is mandatory");
      c.require(c.integer(10) == 0, "no original output");
      c.require_shape(11, {rows, width});
      c.require_dtype(11, {acl::kE4m3});
      c.require_shape(12, mx_scales({rows, width}));
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t rows = t.dims[0], width = t.dims[1] / 2;
      auto limit = static_cast<float>(c.real(8));
      bool swap = setting("swap_gate_up", 0) != 0;  // a mutation for self_test
      Values x = read(t), y(rows * width), weight(rows, 1);
      if (c.has(1)) weight = read(c.tensor(1));
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < width; i++) {
          float gate = x[r * 2 * width + i + (swap ? width : 0)];
          float up = x[r * 2 * width + i + (swap ? 0 : width)];
          gate = std::fmin(gate, limit);
          up = std::fmin(std::fmax(up, -limit), limit);
          y[r * width + i] = bf16(gate / (1 + std::exp(-gate)) * up * weight[r]);
        }
      }
      Quantised q = quantise(y, width, acl::kE4m3);
      write(c.tensor(11), q.codes);
      write(c.tensor(12), q.scales);
    }, kWorkspace});

// FRACTAL_NZ of E2M1 [g, N, K]: stored [g, K/64, N/16, 16, 64].
std::vector<int64_t> nz_storage(const std::vector<int64_t>& dims) {
  return {dims[0], dims[2] / 64, dims[1] / 16, 16, 64};
}

Values read_nz(const aclTensor& t) {
  aclTensor tiles = t;
  tiles.dims = nz_storage(t.dims);
  tiles.strides.assign(5, 1);
  for (int d = 3; d >= 0; d--) tiles.strides[d] = tiles.strides[d + 1] * tiles.dims[d + 1];
  Values stored = read(tiles), x(stored.size());
  int64_t n = t.dims[1], k = t.dims[2];
  for (size_t i = 0; i < x.size(); i++) {
    int64_t g = i / (n * k), row = i / k % n, column = i % k;
    x[i] = stored[g * n * k + ((column / 64 * (n / 16) + row / 16) * 16 + row % 16) * 64 + column % 64];
  }
  return x;
}

const Register kFormat("aclnnNpuFormatCast", {
    [](const Call& c) {
      const aclTensor &from = c.tensor(0), &to = c.tensor(1);
      c.require_dtype(0, {acl::kE2m1});
      c.require(from.format == acl::kNd && to.format == acl::kNz && from.dims == to.dims, "ND to NZ");
      c.require(from.dims.size() == 3 && from.dims[1] % 16 == 0 && from.dims[2] % 64 == 0, "whole tiles");
      c.require(to.storage == nz_storage(to.dims), "storage shape of NZ");
    },
    [](const Call& c) {
      Values x = read(c.tensor(0)), stored(x.size());
      int64_t n = c.tensor(0).dims[1], k = c.tensor(0).dims[2];
      for (size_t i = 0; i < x.size(); i++) {
        int64_t g = i / (n * k), row = i / k % n, column = i % k;
        stored[g * n * k + ((column / 64 * (n / 16) + row / 16) * 16 + row % 16) * 64 + column % 64] = x[i];
      }
      aclTensor flat = c.tensor(1);
      flat.dims = {static_cast<int64_t>(stored.size())};
      flat.strides = {1};
      write(flat, stored);
    }, kWorkspace});

// Row 23: x E4M3, weight E2M1 in NZ, counts of rows by group.
const Register kGrouped("aclnnGroupedMatmulWeightNz", {
    [](const Call& c) {
      const aclTensor &x = c.only(0), &w = c.only(1), &y = c.only(18);
      c.require(x.dtype == acl::kE4m3 && w.dtype == acl::kE2m1 && y.dtype == acl::kBf16, "E4M3 x E2M1 -> BF16");
      c.require(w.format == acl::kNz && w.storage == nz_storage(w.dims), "weights lie in NZ");
      c.require_null({2, 3, 4, 6, 9, 10, 11, 16, 19, 20});
      c.require(c.integer(12) == 3 && c.integer(13) == 0 && c.integer(14) == 1 && c.integer(15) == 0,
                "splitItem 3, groupType 0, groupListType 1, no activation");
      c.require(c.integer(17) == 32, "quantGroupSize 32 (9.1)");
      c.require(w.dims.size() == 3 && w.dims[0] <= 1024, "at most 1024 groups (9.1)");
      c.require(x.dims.size() == 2 && x.dims[1] == w.dims[2] && x.dims[1] % 64 == 0, "shapes");
      c.require(y.dims == std::vector<int64_t>{x.dims[0], w.dims[1]}, "shape of the output");
      c.require(c.only(7).dims == mx_scales(x.dims) && c.only(5).dims == mx_scales(w.dims), "scales");
      c.require_dtype(8, {acl::kInt64});
      c.require_shape(8, {w.dims[0]});
    },
    [](const Call& c) {
      const aclTensor &x = c.only(0), &w = c.only(1);
      int64_t n = w.dims[1], k = w.dims[2];
      Values a = scaled(read(x), read(c.only(7)), k);
      aclTensor one = w, scale = c.only(5);  // of one group after the other
      one.dims[0] = scale.dims[0] = 1;
      Values y(x.dims[0] * n);
      int64_t row = 0, group = 0;
      for (int64_t count : read_integers(c.tensor(8))) {
        c.require(count >= 0 && row + count <= x.dims[0], "counts do not exceed the rows");
        one.address = w.address + group * n * k / 2;
        scale.address = c.only(5).address + group * n * ((k + 63) / 64 * 2);
        group++;
        if (count == 0) continue;
        Values b = scaled(read_nz(one), read(scale), k);
        Values part = product(a.data() + row * k, b.data(), count, n, k);
        std::copy(part.begin(), part.end(), y.begin() + row * n);
        row += count;
      }
      write(c.only(18), y);
    }, kWorkspace});

}  // namespace
}  // namespace twin
