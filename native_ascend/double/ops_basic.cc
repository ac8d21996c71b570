// Elementwise operators, copies and gathers.
#include "tensors.h"

namespace twin {
namespace {

constexpr int64_t kWorkspace = 256;

bool same(const aclTensor& a, const aclTensor& b) { return a.dims == b.dims; }

Register unary(const char* name, float (*f)(float)) {
  return {name, {[](const Call& c) {
                   c.require_dtype(0, {acl::kFloat});
                   c.require(same(c.tensor(0), c.tensor(1)), "shapes of input and output differ");
                 },
                 [f](const Call& c) {
                   Values x = read(c.tensor(0));
                   for (float& v : x) v = f(v);
                   write(c.tensor(1), x);
                 }}};
}

// Elements of `t` broadcast to `dims`: aligned at the last axis.
Values broadcast(const Call& c, const aclTensor& t, const std::vector<int64_t>& dims) {
  aclTensor view = t;
  size_t missing = dims.size() - t.dims.size();
  view.dims = dims;
  view.strides.assign(dims.size(), 0);
  for (size_t i = 0; i < t.dims.size(); i++) {
    c.require(t.dims[i] == 1 || t.dims[i] == dims[missing + i], "shapes do not broadcast");
    if (t.dims[i] != 1) view.strides[missing + i] = t.strides[i];
  }
  return read(view);
}

Register binary(const char* name, int out, float (*f)(float, float, float)) {
  return {name, {[out](const Call& c) {
                   c.require_dtype(0, {acl::kFloat});
                   c.require_dtype(1, {acl::kFloat});
                   c.require(c.tensor(0).dims.size() <= c.tensor(out).dims.size() &&
                                 c.tensor(1).dims.size() <= c.tensor(out).dims.size(),
                             "shapes do not broadcast");
                 },
                 [out, f](const Call& c) {
                   const aclTensor& y = c.tensor(out);
                   Values a = broadcast(c, c.tensor(0), y.dims), b = broadcast(c, c.tensor(1), y.dims);
                   float alpha = out == 3 ? static_cast<float>(c.real(2)) : 1;
                   for (size_t i = 0; i < a.size(); i++) a[i] = f(a[i], b[i], alpha);
                   write(y, a);
                 }}};
}

Register scalar(const char* name, int result, float (*f)(float, float)) {
  return {name, {[result](const Call& c) {
                   c.require_dtype(0, {acl::kFloat});
                   c.require_dtype(2, {result});
                   c.require(same(c.tensor(0), c.tensor(2)), "shapes of input and output differ");
                 },
                 [f](const Call& c) {
                   Values x = read(c.tensor(0));
                   for (float& v : x) v = f(v, static_cast<float>(c.real(1)));
                   write(c.tensor(2), x);
                 }}};
}

const Register kAbs = unary("aclnnAbs", [](float x) { return std::fabs(x); });
const Register kNeg = unary("aclnnNeg", [](float x) { return -x; });
const Register kSqrt = unary("aclnnSqrt", [](float x) { return std::sqrt(x); });
const Register kSigmoid = unary("aclnnSigmoid", [](float x) { return 1 / (1 + std::exp(-x)); });
const Register kMul = binary("aclnnMul", 2, [](float a, float b, float) { return a * b; });
const Register kAdd = binary("aclnnAdd", 3, [](float a, float b, float alpha) { return a + alpha * b; });
const Register kClamp =
    scalar("aclnnClampMin", acl::kFloat, [](float x, float least) { return std::fmax(x, least); });
const Register kGe = scalar("aclnnGeScalar", acl::kBool, [](float x, float y) { return x >= y ? 1.0f : 0.0f; });

const Register kWhere("aclnnSWhere", {
    [](const Call& c) {
      c.require_dtype(0, {acl::kBool});
      for (int i = 0; i < 3; i++) c.require(same(c.tensor(i), c.tensor(3)), "shapes differ");
    },
    [](const Call& c) {
      Values condition = read(c.tensor(0)), a = read(c.tensor(1)), b = read(c.tensor(2));
      for (size_t i = 0; i < a.size(); i++) a[i] = condition[i] != 0 ? a[i] : b[i];
      write(c.tensor(3), a);
    }});

const Register kCast("aclnnCast", {
    [](const Call& c) {
      c.require_dtype(0, {acl::kFloat, acl::kBf16, acl::kInt32, acl::kInt64});
      c.require_dtype(2, {acl::kFloat, acl::kBf16, acl::kInt32, acl::kInt64});
      c.require(c.integer(1) == c.tensor(2).dtype, "dtype names the output's data type");
      c.require(same(c.tensor(0), c.tensor(2)), "shapes of input and output differ");
    },
    [](const Call& c) {
      bool whole = c.tensor(2).dtype == acl::kInt32 || c.tensor(2).dtype == acl::kInt64;
      if (whole) write_integers(c.tensor(2), read_integers(c.tensor(0)));
      else write(c.tensor(2), read(c.tensor(0)));
    }});

const Register kCopy("aclnnInplaceCopy", {
    [](const Call& c) {
      c.require(c.tensor(0).dtype == c.tensor(1).dtype, "data types differ");
      c.require(same(c.tensor(0), c.tensor(1)), "shapes differ");
    },
    [](const Call& c) { write(c.tensor(0), read(c.tensor(1))); }});

const Register kSoftmax("aclnnSoftmax", {
    [](const Call& c) {
      c.require_dtype(0, {acl::kFloat});
      c.require(same(c.tensor(0), c.tensor(2)), "shapes differ");
      c.require(c.integer(1) >= 0 && c.integer(1) < static_cast<int64_t>(c.tensor(0).dims.size()), "axis");
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t axis = c.integer(1), size = t.dims[axis], inner = 1;
      for (size_t d = axis + 1; d < t.dims.size(); d++) inner *= t.dims[d];
      Values x = read(t);
      for (int64_t outer = 0; outer < static_cast<int64_t>(x.size()) / (size * inner); outer++) {
        for (int64_t i = 0; i < inner; i++) {
          float* first = x.data() + outer * size * inner + i;
          float most = first[0], sum = 0;
          for (int64_t j = 1; j < size; j++) most = std::fmax(most, first[j * inner]);
          for (int64_t j = 0; j < size; j++) sum += first[j * inner] = std::exp(first[j * inner] - most);
          for (int64_t j = 0; j < size; j++) first[j * inner] /= sum;
        }
      }
      write(c.tensor(2), x);
    }});

// One axis, kept or not.
const Register kReduce("aclnnReduceSum", {
    [](const Call& c) {
      c.require_dtype(0, {acl::kFloat});
      c.require(c.integer(3) == c.tensor(4).dtype, "dtype names the output's data type");
      c.require(c.numbers(1).size() == 1, "the double reduces one axis");
    },
    [](const Call& c) {
      const aclTensor& t = c.tensor(0);
      int64_t axis = c.numbers(1)[0], size = t.dims[axis], inner = 1;
      for (size_t d = axis + 1; d < t.dims.size(); d++) inner *= t.dims[d];
      Values x = read(t), y(x.size() / size);
      for (size_t i = 0; i < y.size(); i++) {
        int64_t base = static_cast<int64_t>(i) / inner * size * inner + static_cast<int64_t>(i) % inner;
        for (int64_t j = 0; j < size; j++) y[i] += x[base + j * inner];
      }
      write(c.tensor(4), y);
    }});

// Rows of axis 0, moved as bytes, so any data type of whole bytes goes.
void gather(const aclTensor& from, const std::vector<int64_t>& rows, const aclTensor& to, const Call& c) {
  int64_t width = size_of(from) / from.dims[0];
  char* source = bytes(from);
  char* target = bytes(to);
  for (size_t i = 0; i < rows.size(); i++) {
    c.require(rows[i] >= 0 && rows[i] < from.dims[0], "an index lies outside the table");
    std::memcpy(target + i * width, source + rows[i] * width, width);
  }
}

const Register kGather("aclnnGatherV2", {
    [](const Call& c) {
      c.require(c.integer(1) == 0, "the double gathers along axis 0");
      c.require_dtype(2, {acl::kInt32, acl::kInt64});
      std::vector<int64_t> dims = c.tensor(2).dims;
      dims.insert(dims.end(), c.tensor(0).dims.begin() + 1, c.tensor(0).dims.end());
      c.require(c.tensor(3).dims == dims && c.tensor(3).dtype == c.tensor(0).dtype, "shape of the output");
    },
    [](const Call& c) { gather(c.tensor(0), read_integers(c.tensor(2)), c.tensor(3), c); }});

const Register kEmbedding("aclnnEmbedding", {
    [](const Call& c) {
      c.require_dtype(1, {acl::kInt32, acl::kInt64});
      c.require(c.tensor(0).dims.size() == 2, "the table has two axes");
      c.require(c.tensor(2).dtype == c.tensor(0).dtype, "data types differ");
    },
    [](const Call& c) { gather(c.tensor(0), read_integers(c.tensor(1)), c.tensor(2), c); }});

const Register kIndexCopy("aclnnInplaceIndexCopy", {
    [](const Call& c) {
      c.require(c.integer(1) == 0, "the double copies along axis 0");
      c.require_dtype(2, {acl::kInt32, acl::kInt64});
      c.require(c.tensor(0).dtype == c.tensor(3).dtype, "data types differ");
      std::vector<int64_t> dims = c.tensor(0).dims;
      dims[0] = c.tensor(2).dims[0];
      c.require_shape(3, dims);
    },
    [](const Call& c) {
      const aclTensor& to = c.tensor(0);
      int64_t width = size_of(to) / to.dims[0];
      std::vector<int64_t> rows = read_integers(c.tensor(2));
      char* target = bytes(to);
      char* source = bytes(c.tensor(3));
      for (size_t i = 0; i < rows.size(); i++) {
        c.require(rows[i] >= 0 && rows[i] < to.dims[0], "an index lies outside the destination");
        std::memcpy(target + rows[i] * width, source + i * width, width);
      }
    }, kWorkspace});

}  // namespace
}  // namespace twin
