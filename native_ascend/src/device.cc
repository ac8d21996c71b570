#include "device.h"

#include <map>

namespace dij {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int kHugeFirst = 0;

std::mutex g_devices;
std::map<int, std::unique_ptr<Device>>& devices() {
  static auto* all = new std::map<int, std::unique_ptr<Device>>;  // outlives every handler
  return *all;
}

}  // namespace

Block::Block(int device, int64_t size) : device_(device), size_(size) {
  const Api& table = api();
  bind(device);
  void* data = nullptr;
  int64_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  aclError code = table.aclrtMalloc(&data, rounded ? rounded : kAlignment, kHugeFirst);
  if (code != 0) {
    Failure failure = failure_of(code, "aclrtMalloc", device, "");
    size_t free = 0, total = 0;
    if (table.aclrtGetMemInfo(0, &free, &total) == 0) {
      failure.text += " requested " + std::to_string(rounded) + " of " + std::to_string(free) +
                      " free and " + std::to_string(total) + " total bytes";
    }
    throw failure;
  }
  data_ = static_cast<char*>(data);
}

// A failing release has no one to tell but the next call, whose device reports it again.
Block::~Block() {
  try {
    bind(device_);
  } catch (const Failure&) {
  }
  loaded()->aclrtFree(data_);
}

Event::Event(int device) {
  check(api().aclrtCreateEventExWithFlag(&event_, 0), "aclrtCreateEventExWithFlag", device);
}

Event::~Event() { loaded()->aclrtDestroyEvent(event_); }

void* Device::room(int64_t size) {
  if (size == 0) return nullptr;
  if (!workspace || workspace->size() < size) {
    auto larger = std::make_unique<Block>(id, size);
    if (workspace) retired.push_back(std::move(workspace));
    workspace = std::move(larger);
  }
  return workspace->data();
}

void Device::require_usable() const {
  if (poisoned.empty()) return;
  fail(Status::kFailedPrecondition, "device " + std::to_string(id) + " unusable since " + poisoned +
                                        "; create a new process");
}

void unpoison(int64_t id) {
  if (!api().is_double) fail(Status::kFailedPrecondition, "only a test double forgets its failures");
  Device& device = device_of(id);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.poisoned.clear();
}

void bind(int id) {
  thread_local int bound = -1;
  if (bound == id) return;
  check(api().aclrtSetDevice(id), "aclrtSetDevice", id);
  bound = id;
}

Device& device_of(int64_t id) {
  const Api& table = api();
  if (id < 0 || id >= static_cast<int64_t>(table.devices)) {
    fail(Status::kFailedPrecondition, "there is no device " + std::to_string(id) + ": the runtime has " +
                                          std::to_string(table.devices));
  }
  int number = static_cast<int>(id);
  bind(number);
  std::lock_guard<std::mutex> lock(g_devices);
  auto& device = devices()[number];
  if (!device) device = std::make_unique<Device>();
  device->id = number;
  for (aclrtStream* stream : {&device->compute, &device->copy}) {
    if (!*stream) check(table.aclrtCreateStream(stream), "aclrtCreateStream", number);
  }
  return *device;
}

}  // namespace dij
