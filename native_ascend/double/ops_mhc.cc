// Hyper-connection coefficients, their balancing and the update of the streams (rows 9, 11, 13).
#include "tensors.h"

namespace twin {
namespace {

constexpr int64_t kWorkspace = 2048;

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

const Register kPre("aclnnMhcPre", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      c.require_dtype(0, {acl::kBf16});
      c.require(x.dims.size() == 3 && x.dims[1] == 4, "x [t, 4, d] (9.1)");
      int64_t t = x.dims[0], n = 4, d = x.dims[2];
      c.require(d % 16 == 0 && d <= 16384, "d is a multiple of 16 up to 16384 (9.1)");
      c.require_shape(1, {n * n + 2 * n, n * d});
      c.require_dtype(1, {acl::kFloat});
      c.require_shape(2, {3});
      c.require_shape(3, {n * n + 2 * n});
      c.require_null({4});
      c.require_shape(7, {t, d});
      c.require_shape(8, {t, n});
      c.require_shape(9, {t, n, n});
      bool all = c.has(10) && c.has(11) && c.has(12), none = !c.has(10) && !c.has(11) && !c.has(12);
      c.require(all || none, "the last three outputs: all or none");
      if (all) c.require_shape(12, {t, n});
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t n = 4, width = n * t.dims[2], d = t.dims[2];
      auto eps = static_cast<float>(c.real(6));
      Values x = read(t), phi = read(c.tensor(1)), alpha = read(c.tensor(2)), bias = read(c.tensor(3));
      Values in, post, res, inverse, mixes, pre;
      for (int64_t r = 0; r < t.dims[0]; r++) {
        const float* row = x.data() + r * width;
        double square = 0;
        for (int64_t i = 0; i < width; i++) square += double{row[i]} * row[i];
        float rms = 1 / std::sqrt(static_cast<float>(square / width) + static_cast<float>(c.real(5)));
        inverse.push_back(rms);
        Values mix(n * n + 2 * n);
        for (size_t o = 0; o < mix.size(); o++) {
          float sum = 0;
          for (int64_t i = 0; i < width; i++) sum += row[i] * phi[o * width + i];
          mix[o] = sum * rms;
        }
        mixes.insert(mixes.end(), mix.begin(), mix.end());
        for (int64_t i = 0; i < n; i++) pre.push_back(sigmoid(mix[i] * alpha[0] + bias[i]) + eps);
        for (int64_t i = n; i < 2 * n; i++) post.push_back(2 * sigmoid(mix[i] * alpha[1] + bias[i]));
        for (int64_t i = 2 * n; i < n * n + 2 * n; i++) res.push_back(mix[i] * alpha[2] + bias[i]);
        for (int64_t i = 0; i < d; i++) {
          float sum = 0;
          for (int64_t s = 0; s < n; s++) sum += pre[r * n + s] * row[s * d + i];
          in.push_back(sum);
        }
      }
      write(c.tensor(7), in);
      write(c.tensor(8), post);
      write(c.tensor(9), res);
      if (!c.has(12)) return;
      aclTensor flat = c.tensor(11);
      c.require(count_of(flat.dims) == static_cast<int64_t>(mixes.size()), "hMix [t, 24]");
      write(c.tensor(10), inverse);
      write(flat, mixes);
      write(c.tensor(12), pre);
    }, kWorkspace});

const Register kSinkhorn("aclnnMhcSinkhorn", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      c.require_dtype(0, {acl::kFloat});
      c.require(x.dims.size() == 3 && x.dims[1] == x.dims[2], "x [t, n, n]");
      c.require(x.dims[1] == 4 || x.dims[1] == 6 || x.dims[1] == 8, "n is 4, 6 or 8");
      c.require(c.integer(2) >= 1 && c.integer(2) <= 100, "numIters within 1..100");
      c.require_shape(3, x.dims);
      c.require_null({4, 5});
    },
    [](const Call& c) {
      int64_t n = c.tensor(0).dims[1];
      auto eps = static_cast<float>(c.real(1));
      Values x = read(c.tensor(0));
      for (int64_t t = 0; t < c.tensor(0).dims[0]; t++) {
        float* b = x.data() + t * n * n;
        auto rows = [&] {
          for (int64_t i = 0; i < n; i++) {
            float sum = 0;
            for (int64_t j = 0; j < n; j++) sum += b[i * n + j];
            for (int64_t j = 0; j < n; j++) b[i * n + j] /= sum + eps;
          }
        };
        auto columns = [&] {
          for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t i = 0; i < n; i++) sum += b[i * n + j];
            for (int64_t i = 0; i < n; i++) b[i * n + j] /= sum + eps;
          }
        };
        for (int64_t i = 0; i < n; i++) {
          float most = b[i * n], sum = 0;
          for (int64_t j = 1; j < n; j++) most = std::fmax(most, b[i * n + j]);
          for (int64_t j = 0; j < n; j++) sum += b[i * n + j] = std::exp(b[i * n + j] - most);
          for (int64_t j = 0; j < n; j++) b[i * n + j] = b[i * n + j] / sum + eps;
        }
        columns();
        for (int64_t step = 1; step < c.integer(2); step++) rows(), columns();
      }
      write(c.tensor(3), x);
    }, kWorkspace});

const Register kPost("aclnnMhcPost", {
    [](const Call& c) {
      const aclTensor& x = c.tensor(0);
      c.require_dtype(0, {acl::kBf16});
      c.require(x.dims.size() == 3, "x [t, n, d]");
      c.require_shape(1, {x.dims[0], x.dims[1], x.dims[1]});
      c.require_shape(2, {x.dims[0], x.dims[2]});
      c.require_shape(3, {x.dims[0], x.dims[1]});
      c.require_shape(4, x.dims);
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t n = t.dims[1], d = t.dims[2];
      Values x = read(t), b = read(c.tensor(1)), y = read(c.tensor(2)), gain = read(c.tensor(3)), out;
      for (int64_t r = 0; r < t.dims[0]; r++) {
        for (int64_t j = 0; j < n; j++) {
          for (int64_t i = 0; i < d; i++) {
            float carried = 0;
            for (int64_t s = 0; s < n; s++) carried += b[(r * n + s) * n + j] * x[(r * n + s) * d + i];
            out.push_back(gain[r * n + j] * y[r * d + i] + carried);
          }
        }
      }
      write(c.tensor(4), out);
    }, kWorkspace});

}  // namespace
}  // namespace twin
