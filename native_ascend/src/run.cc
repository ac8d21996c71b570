// Runs a plan on a device: ascend.md 6.2 (who owns what) and 6.3 (order, drain, poison).
#include <memory>

#include "plan.h"

namespace dij {
namespace {

// ACL's descriptions of one call's tensors, released with the object.
class Descriptions {
 public:
  explicit Descriptions(int device) : device_(device) {}
  ~Descriptions() {
    const Api& table = *loaded();
    for (auto* list : lists_) table.aclDestroyTensorList(list);  // releases its tensors too
    for (auto* tensor : tensors_) table.aclDestroyTensor(tensor);
    for (auto* array : arrays_) table.aclDestroyIntArray(array);
    for (auto* scalar : scalars_) table.aclDestroyScalar(scalar);
  }
  Descriptions(const Descriptions&) = delete;
  Descriptions& operator=(const Descriptions&) = delete;

  const aclTensor* tensor(const TensorPlan& plan, char* address) {
    tensors_.reserve(tensors_.size() + 1);
    tensors_.push_back(create(plan, address));
    return tensors_.back();
  }
  const aclTensorList* list(const std::vector<const TensorPlan*>& plans, const std::vector<char*>& at) {
    std::vector<const aclTensor*> members;
    for (size_t i = 0; i < plans.size(); i++) {
      try {
        members.push_back(create(*plans[i], at[i]));
      } catch (...) {
        for (auto* member : members) loaded()->aclDestroyTensor(member);
        throw;
      }
    }
    const aclTensorList* made = api().aclCreateTensorList(members.data(), members.size());
    if (!made) {
      for (auto* member : members) loaded()->aclDestroyTensor(member);
      refuse("aclCreateTensorList");
    }
    lists_.push_back(made);
    return made;
  }
  const aclIntArray* array(const std::vector<int64_t>& values) {
    const aclIntArray* made = api().aclCreateIntArray(values.data(), values.size());
    if (!made) refuse("aclCreateIntArray");
    arrays_.push_back(made);
    return made;
  }
  const aclScalar* scalar(int dtype, double value) {
    if (dtype != acl::kFloat) fail(Status::kInvalidArgument, "scalars of plans are float32");
    float narrow = static_cast<float>(value);
    const aclScalar* made = api().aclCreateScalar(&narrow, dtype);
    if (!made) refuse("aclCreateScalar");
    scalars_.push_back(made);
    return made;
  }

 private:
  const aclTensor* create(const TensorPlan& p, char* address) {
    const aclTensor* made =
        api().aclCreateTensor(p.dims.data(), p.dims.size(), p.dtype, p.strides.data(), p.start, p.format,
                              p.storage.data(), p.storage.size(), address);
    if (!made) refuse("aclCreateTensor");
    return made;
  }
  [[noreturn]] void refuse(const char* call) {
    throw failure_of(500000, call, device_, "returned null");
  }

  int device_;
  std::vector<const aclTensor*> tensors_;
  std::vector<const aclTensorList*> lists_;
  std::vector<const aclIntArray*> arrays_;
  std::vector<const aclScalar*> scalars_;
};

// Waits for both streams when a call ends in any way: memory is freed and XLA's buffers are reused
// only after nothing is in flight (ascend.md 6.3, F15).
class Drain {
 public:
  explicit Drain(Device& device) : device_(device) { device_.running++; }
  ~Drain() {
    const Api& table = *loaded();
    if (!waited) {
      table.aclrtSynchronizeStream(device_.compute);
      table.aclrtSynchronizeStream(device_.copy);
    }
    std::lock_guard<std::mutex> lock(device_.mutex);
    if (--device_.running == 0) device_.retired.clear();
  }
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;
  bool waited = false;

 private:
  Device& device_;
};

struct Places {
  std::vector<std::unique_ptr<Block>> operands, results;
  std::unique_ptr<Block> scratch;
  std::vector<const Buffer*> handles;
};

char* address_of(const TensorPlan& t, const Places& places) {
  char* base = nullptr;
  int64_t size = 0;
  auto block = [&](const std::vector<std::unique_ptr<Block>>& blocks) {
    if (t.index < 0 || t.index >= static_cast<int64_t>(blocks.size())) return;
    base = blocks[t.index]->data();
    size = blocks[t.index]->size();
  };
  switch (t.source) {
    case Source::kOperand: block(places.operands); break;
    case Source::kResult: block(places.results); break;
    case Source::kScratch:
      if (places.scratch) base = places.scratch->data(), size = places.scratch->size();
      break;
    case Source::kHandle:
      if (t.index >= 0 && t.index < static_cast<int64_t>(places.handles.size())) {
        const Buffer& buffer = *places.handles[t.index];
        if (buffer.dtype != t.dtype) {
          fail(Status::kInvalidArgument, "handle " + std::to_string(t.index) + " holds data type " +
                                             std::to_string(buffer.dtype) + ", the plan reads " +
                                             std::to_string(t.dtype));
        }
        base = buffer.block->data();
        size = buffer.size;
      }
      break;
  }
  if (!base || t.offset + t.extent > size) {
    fail(Status::kInvalidArgument, "a tensor of a plan does not fit its buffer: it ends at byte " +
                                       std::to_string(t.offset + t.extent) + " of " + std::to_string(size));
  }
  return base + t.offset;
}

Argument argument_of(const ArgumentPlan& a, const Plan& plan, const Places& places, Descriptions& made) {
  Argument argument;
  argument.kind = a.kind;
  switch (a.kind) {
    case 'T':
      if (!a.null) {
        const TensorPlan& t = plan.tensors[a.numbers[0]];
        argument.object = made.tensor(t, address_of(t, places));
      }
      break;
    case 'L': {
      if (a.null) break;
      std::vector<const TensorPlan*> tensors;
      std::vector<char*> addresses;
      for (int64_t place : a.numbers) {
        tensors.push_back(&plan.tensors[place]);
        addresses.push_back(address_of(plan.tensors[place], places));
      }
      argument.object = made.list(tensors, addresses);
      break;
    }
    case 'A':
      if (!a.null) argument.object = made.array(a.numbers);
      break;
    case 'C': argument.object = made.scalar(static_cast<int>(a.numbers[0]), a.real); break;
    case 'S': argument.text = a.text; break;
    case 'D': argument.real = a.real; break;
    default: argument.integer = a.numbers[0];
  }
  return argument;
}

void launch(const OpPlan& op, const Plan& plan, const Places& places, Device& device, Descriptions& made) {
  const Api& table = api();
  const Operator& found = table.operators.at(op.name);
  if (!found.present()) {
    fail(Status::kUnimplemented, op.name + " is missing from the loaded operator libraries");
  }
  std::vector<Argument> arguments;
  for (const ArgumentPlan& a : op.arguments) arguments.push_back(argument_of(a, plan, places, made));
  Cursor cursor(arguments);
  uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  const std::string first = op.name + "GetWorkspaceSize";
  check(found.plan(found.first_phase, cursor, &size, &executor), first.c_str(), device.id, op.name);
  void* workspace = nullptr;
  try {
    workspace = device.room(static_cast<int64_t>(size));
  } catch (...) {
    // Phase two would have consumed the executor; now it is ours (ascend.md 4.2).
    table.aclSetAclOpExecutorRepeatable(executor);
    table.aclDestroyAclOpExecutor(executor);
    throw;
  }
  check(found.launch(workspace, size, executor, device.compute), op.name.c_str(), device.id, op.name);
}

void require_sizes(const std::vector<HostBuffer>& buffers, const Plan& plan, Source source) {
  for (const TensorPlan& t : plan.tensors) {
    if (t.source == source && (t.index < 0 || t.index >= static_cast<int64_t>(buffers.size()))) {
      fail(Status::kInvalidArgument, "a plan names an operand or result that the call does not have");
    }
  }
}

}  // namespace

void run_plan(const Plan& plan, const Call& call) {
  const Api& table = api();
  Device& device = device_of(call.device);
  require_sizes(call.operands, plan, Source::kOperand);
  require_sizes(call.results, plan, Source::kResult);
  // Destroyed in the opposite order: first the drain, then what the streams used.
  Pins pins;
  Places places;
  Event copied(device.id), computed(device.id);
  Descriptions made(device.id);
  std::unique_ptr<Drain> drain;
  const std::string what = plan.ops.size() == 1 ? plan.ops[0].name : "step";
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    device.require_usable();
    for (Handle handle : call.handles) places.handles.push_back(&pins.pin(handle, device.id));
    for (const HostBuffer& b : call.operands) places.operands.push_back(std::make_unique<Block>(device.id, b.size));
    for (const HostBuffer& b : call.results) places.results.push_back(std::make_unique<Block>(device.id, b.size));
    if (plan.scratch) places.scratch = std::make_unique<Block>(device.id, plan.scratch);
    drain = std::make_unique<Drain>(device);
  }
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    for (size_t i = 0; i < call.operands.size(); i++) {
      const HostBuffer& host = call.operands[i];
      if (!host.size) continue;
      check(table.aclrtMemcpyAsync(places.operands[i]->data(), places.operands[i]->size(), host.data,
                                   host.size, acl::kHostToDevice, device.copy),
            "aclrtMemcpyAsync", device.id, what);
    }
    check(table.aclrtRecordEvent(copied.get(), device.copy), "aclrtRecordEvent", device.id, what);
    check(table.aclrtStreamWaitEvent(device.compute, copied.get()), "aclrtStreamWaitEvent", device.id, what);
    for (const OpPlan& op : plan.ops) launch(op, plan, places, device, made);
    check(table.aclrtRecordEvent(computed.get(), device.compute), "aclrtRecordEvent", device.id, what);
    check(table.aclrtStreamWaitEvent(device.copy, computed.get()), "aclrtStreamWaitEvent", device.id, what);
    for (size_t i = 0; i < call.results.size(); i++) {
      const HostBuffer& host = call.results[i];
      if (!host.size) continue;
      check(table.aclrtMemcpyAsync(host.data, host.size, places.results[i]->data(), host.size,
                                   acl::kDeviceToHost, device.copy),
            "aclrtMemcpyAsync", device.id, what);
    }
  }
  aclError code =
      table.aclrtSynchronizeStreamWithTimeout(device.copy, static_cast<int32_t>(call.timeout_ms));
  const char* waited = "aclrtSynchronizeStreamWithTimeout";
  if (code == 0) {
    waited = "aclrtSynchronizeStream";
    code = table.aclrtSynchronizeStream(device.compute);
  }
  if (code != 0) {
    Failure failure = failure_of(code, waited, device.id, what);
    {
      std::lock_guard<std::mutex> lock(device.mutex);
      if (device.poisoned.empty()) device.poisoned = what + " returned " + std::to_string(code);
    }
    throw failure;
  }
  drain->waited = true;
}

}  // namespace dij
