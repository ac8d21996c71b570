#include "plan.h"

#include <cstring>
#include <map>
#include <mutex>

namespace dij {
namespace {

// Reads the array front to back; every length is checked before it is used.
class Reader {
 public:
  Reader(const int64_t* words, int64_t count) : words_(words), count_(count) {}

  int64_t next() {
    if (place_ >= count_) fail(Status::kInvalidArgument, "a plan ends early");
    return words_[place_++];
  }
  double real() {
    int64_t bits = next();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::vector<int64_t> list() {
    int64_t length = next();
    if (length < 0 || length > count_ - place_) fail(Status::kInvalidArgument, "a plan ends early");
    std::vector<int64_t> values(words_ + place_, words_ + place_ + length);
    place_ += length;
    return values;
  }
  bool done() const { return place_ == count_; }

 private:
  const int64_t* words_;
  int64_t count_, place_ = 0;
};

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> lines(1);
  for (char c : text) {
    if (c == '\n') lines.emplace_back();
    else lines.back() += c;
  }
  return lines;
}

TensorPlan read_tensor(Reader& reader) {
  TensorPlan t;
  t.dtype = static_cast<int>(reader.next());
  t.format = static_cast<int>(reader.next());
  t.source = static_cast<Source>(reader.next());
  t.index = reader.next();
  t.offset = reader.next();
  t.start = reader.next();
  t.dims = reader.list();
  t.strides = reader.list();
  t.storage = reader.list();
  int64_t bits = acl::bits_of(t.dtype), last = 0;
  if (!bits || t.offset < 0 || t.start < 0 || t.strides.size() != t.dims.size()) {
    fail(Status::kInvalidArgument, "a tensor of a plan has a wrong data type, offset or stride");
  }
  bool empty = false;
  for (size_t i = 0; i < t.dims.size(); i++) {
    if (t.dims[i] < 0 || t.strides[i] < 0) fail(Status::kInvalidArgument, "a negative size");
    if (t.dims[i] == 0) empty = true;
    last += (t.dims[i] - 1) * t.strides[i];
  }
  t.extent = empty ? 0 : ((t.start + last + 1) * bits + 7) / 8;
  int64_t stored = bits;
  for (int64_t dim : t.storage) stored *= dim;
  if (t.format != acl::kNd) t.extent = (stored + 7) / 8;
  return t;
}

ArgumentPlan read_argument(Reader& reader, const std::vector<std::string>& names, size_t tensors) {
  ArgumentPlan a;
  a.kind = static_cast<char>(reader.next());
  auto require_tensor = [&](int64_t place) {
    if (place < 0 || place >= static_cast<int64_t>(tensors)) {
      fail(Status::kInvalidArgument, "an argument names a tensor that the plan does not have");
    }
  };
  switch (a.kind) {
    case 'T':
      a.numbers = {reader.next()};
      a.null = a.numbers[0] == -1;
      if (!a.null) require_tensor(a.numbers[0]);
      return a;
    case 'L':
    case 'A':
      a.null = reader.next() != 0;
      a.numbers = reader.list();
      if (a.kind == 'L') for (int64_t place : a.numbers) require_tensor(place);
      return a;
    case 'C':
      a.numbers = {reader.next()};
      a.real = reader.real();
      return a;
    case 'I':
    case 'B':
      a.numbers = {reader.next()};
      return a;
    case 'D':
      a.real = reader.real();
      return a;
    case 'S': {
      int64_t place = reader.next();
      if (place < 0 || place >= static_cast<int64_t>(names.size())) {
        fail(Status::kInvalidArgument, "a string of a plan is not in its names");
      }
      a.text = names[place];
      return a;
    }
    default:
      fail(Status::kInvalidArgument, "an argument of a plan has no kind");
  }
}

std::mutex g_plans;
int64_t g_next = 1;
std::map<int64_t, std::shared_ptr<const Plan>>& plans() {
  static auto* all = new std::map<int64_t, std::shared_ptr<const Plan>>;
  return *all;
}

}  // namespace

Plan read_plan(const int64_t* words, int64_t count, std::string_view text) {
  Reader reader(words, count);
  std::vector<std::string> names = split(text);
  Plan plan;
  plan.scratch = reader.next();
  int64_t tensors = reader.next();
  for (int64_t i = 0; i < tensors; i++) plan.tensors.push_back(read_tensor(reader));
  int64_t ops = reader.next();
  for (int64_t i = 0; i < ops; i++) {
    OpPlan op;
    int64_t name = reader.next();
    if (name < 0 || name >= static_cast<int64_t>(names.size())) {
      fail(Status::kInvalidArgument, "an operator of a plan is not in its names");
    }
    op.name = names[name];
    int64_t arguments = reader.next();
    std::string kinds;
    for (int64_t k = 0; k < arguments; k++) {
      op.arguments.push_back(read_argument(reader, names, plan.tensors.size()));
      kinds += op.arguments.back().kind;
    }
    auto known = known_operators().find(op.name);
    if (known == known_operators().end()) {
      fail(Status::kUnimplemented, op.name + " is not among the operators of this bridge");
    }
    if (kinds != known->second.signature) {
      fail(Status::kInvalidArgument, op.name + " takes " + known->second.signature + ", received " + kinds);
    }
    plan.ops.push_back(std::move(op));
  }
  if (!reader.done()) fail(Status::kInvalidArgument, "a plan has words left over");
  return plan;
}

int64_t keep_plan(Plan plan) {
  std::lock_guard<std::mutex> lock(g_plans);
  plans()[g_next] = std::make_shared<const Plan>(std::move(plan));
  return g_next++;
}

std::shared_ptr<const Plan> kept_plan(int64_t number) {
  std::lock_guard<std::mutex> lock(g_plans);
  auto found = plans().find(number);
  if (found == plans().end()) {
    fail(Status::kFailedPrecondition, "plan " + std::to_string(number) + " was dropped");
  }
  return found->second;
}

void drop_plan(int64_t number) {
  std::lock_guard<std::mutex> lock(g_plans);
  if (!plans().erase(number)) {
    fail(Status::kFailedPrecondition, "plan " + std::to_string(number) + " was dropped already");
  }
}

}  // namespace dij
