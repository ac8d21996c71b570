// A plan: tensors and the operators that run on them in order, as one array of integers (plan.py).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "buffers.h"

namespace dij {

enum class Source : int64_t { kOperand = 0, kResult = 1, kScratch = 2, kHandle = 3 };

struct TensorPlan {
  int dtype, format;
  Source source;
  int64_t index, offset;  // which operand, result or handle; bytes into it or into the scratch block
  int64_t start;          // elements from there to the first one of the view
  std::vector<int64_t> dims, strides, storage;
  int64_t extent;  // bytes from `offset` that the view may touch
};

struct ArgumentPlan {
  char kind;                     // as in `Argument`
  bool null = false;             // T, L, A
  std::vector<int64_t> numbers;  // T: tensor; L: tensors; A: values; I, B: value; C: data type
  double real = 0;               // D, C
  std::string text;              // S
};

struct OpPlan {
  std::string name;
  std::vector<ArgumentPlan> arguments;
};

struct Plan {
  int64_t scratch = 0;
  std::vector<TensorPlan> tensors;
  std::vector<OpPlan> ops;
};

// Throws INVALID_ARGUMENT unless every operator is known and its arguments have its signature.
Plan read_plan(const int64_t* words, int64_t count, std::string_view names);

struct HostBuffer {
  void* data;
  int64_t size;
};

struct Call {
  int64_t device;
  std::vector<HostBuffer> operands, results;
  std::vector<Handle> handles;
  int64_t timeout_ms;
};

// Copies operands in, runs the operators on the compute stream, copies results out and waits.
void run_plan(const Plan& plan, const Call& call);

// Plans that are used again and again, by number.
int64_t keep_plan(Plan plan);
std::shared_ptr<const Plan> kept_plan(int64_t number);
void drop_plan(int64_t number);

}  // namespace dij
