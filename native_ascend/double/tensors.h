// Tensors, executors and the frame in which the double's operators are written.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "aclnn_ops.h"
#include "device.h"

struct aclTensor {
  std::vector<int64_t> dims, strides, storage;
  int dtype = 0, format = 0;
  char* address = nullptr;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclScalar {
  float value;
};

namespace twin {

// Thrown by an operator's check: the first phase returns 161002 (161001 for a null) with this text.
struct Rejected {
  std::string text;
  int code = 161002;
};

// Thrown where an operator touches memory that is not live, after the violation was noted.
struct Unmapped {};

struct Value {
  char kind = 0;
  bool null = false;
  std::vector<aclTensor> tensors;  // copies: a description may be destroyed once phase two returned
  std::vector<int64_t> numbers;
  double real = 0;
  std::string text;
};

using Values = std::vector<float>;

// The arguments of one call, by place in the parameter list.
class Call {
 public:
  Call(std::string name, std::vector<Value> values) : name_(std::move(name)), values_(std::move(values)) {}
  const std::string& name() const { return name_; }
  bool has(int place) const { return !values_[place].null; }
  const aclTensor& tensor(int place) const;
  const aclTensor& only(int place) const;  // of a list of one
  int64_t integer(int place) const { return values_[place].numbers[0]; }
  double real(int place) const { return values_[place].real; }
  const std::string& text(int place) const { return values_[place].text; }
  const std::vector<int64_t>& numbers(int place) const { return values_[place].numbers; }

  // For checks. The text says which rule of ascend.md 5 it is.
  void require(bool good, const std::string& rule) const;
  void require_dtype(int place, std::initializer_list<int> dtypes) const;
  void require_shape(int place, const std::vector<int64_t>& dims) const;
  void require_null(std::initializer_list<int> places) const;

 private:
  std::string name_;
  std::vector<Value> values_;
};

struct Kernel {
  std::function<void(const Call&)> check;  // throws Rejected
  std::function<void(const Call&)> run;    // on the stream's thread
  int64_t workspace = 0;
};

// Every operator by its name, filled by the ops_*.cc files before main.
std::map<std::string, Kernel>& kernels();
struct Register {
  Register(const char* name, Kernel kernel) { kernels()[name] = std::move(kernel); }
};

int64_t count_of(const std::vector<int64_t>& dims);
// Elements in row-major order of the view, as float32. Integers are exact up to 2^24.
Values read(const aclTensor& tensor);
std::vector<int64_t> read_integers(const aclTensor& tensor);
// Stores with the rounding of the data type: nearest, ties to even; saturating for FP8.
void write(const aclTensor& tensor, const Values& values);
void write_integers(const aclTensor& tensor, const std::vector<int64_t>& values);
// Raw bytes of a contiguous ND tensor. Throws if they are not live device memory.
char* bytes(const aclTensor& tensor);
int64_t size_of(const aclTensor& tensor);

float bf16(float value);
float decode_e4m3(uint8_t code);
uint8_t encode_e4m3(float value);
float decode_e8m0(uint8_t code);
float decode_e2m1(uint8_t code);
uint8_t encode_e2m1(float value);

}  // namespace twin
