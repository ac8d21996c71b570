#include "buffers.h"

#include <mutex>
#include <string>

namespace dij {
namespace {

struct Slot {
  uint32_t generation = 1;
  std::unique_ptr<Buffer> buffer;
};

std::mutex g_slots;  // lock order: a device, then this
std::vector<Slot>& slots() {
  static auto* all = new std::vector<Slot>;
  return *all;
}

std::string shown(Handle handle) {
  return "(" + std::to_string(handle.slot) + ", " + std::to_string(handle.generation) + ")";
}

// The caller holds `g_slots`.
Buffer& find(Handle handle) {
  auto& all = slots();
  if (handle.slot >= all.size() || all[handle.slot].generation != handle.generation ||
      !all[handle.slot].buffer) {
    fail(Status::kFailedPrecondition, "handle " + shown(handle) + " is stale: its buffer was freed");
  }
  return *all[handle.slot].buffer;
}

void transfer(Handle handle, void* host, int64_t size, bool upload) {
  Pins pins;
  int number;
  {
    std::lock_guard<std::mutex> lock(g_slots);
    number = find(handle).device;
  }
  Device& device = device_of(number);
  device.require_usable();
  const Buffer& buffer = pins.pin(handle, number);
  if (size != buffer.size) {
    fail(Status::kInvalidArgument, "a transfer moves all of a buffer: received " + std::to_string(size) +
                                       " bytes for " + std::to_string(buffer.size));
  }
  const Api& table = api();
  void* data = buffer.block->data();
  std::lock_guard<std::mutex> lock(device.mutex);
  check(upload ? table.aclrtMemcpyAsync(data, size, host, size, acl::kHostToDevice, device.copy)
               : table.aclrtMemcpyAsync(host, size, data, size, acl::kDeviceToHost, device.copy),
        "aclrtMemcpyAsync", number);
  aclError code = table.aclrtSynchronizeStream(device.copy);
  if (code != 0) {
    device.poisoned = "a transfer returned " + std::to_string(code);
    check(code, "aclrtSynchronizeStream", number);
  }
}

}  // namespace

Pins::~Pins() {
  std::lock_guard<std::mutex> lock(g_slots);
  for (uint32_t slot : slots_) slots()[slot].buffer->pins--;
}

const Buffer& Pins::pin(Handle handle, int device) {
  std::lock_guard<std::mutex> lock(g_slots);
  Buffer& buffer = find(handle);
  if (buffer.device != device) {
    fail(Status::kInvalidArgument, "handle " + shown(handle) + " lies on device " +
                                       std::to_string(buffer.device) + ", the call runs on " +
                                       std::to_string(device));
  }
  slots_.push_back(handle.slot);
  buffer.pins++;
  return buffer;
}

Handle create_buffer(int number, int dtype, const std::vector<int64_t>& dims) {
  int64_t bits = acl::bits_of(dtype);
  if (!bits) fail(Status::kInvalidArgument, "no data type has the number " + std::to_string(dtype));
  for (int64_t dim : dims) bits *= dim;
  Device& device = device_of(number);
  device.require_usable();
  auto buffer = std::make_unique<Buffer>();
  buffer->device = number;
  buffer->dtype = dtype;
  buffer->dims = dims;
  buffer->size = (bits + 7) / 8;
  buffer->block = std::make_unique<Block>(number, buffer->size);
  std::lock_guard<std::mutex> lock(g_slots);
  auto& all = slots();
  uint32_t slot = 0;
  while (slot < all.size() && all[slot].buffer) slot++;
  if (slot == all.size()) all.emplace_back();
  all[slot].buffer = std::move(buffer);
  return {slot, all[slot].generation};
}

void write_buffer(Handle handle, const void* from, int64_t size) {
  transfer(handle, const_cast<void*>(from), size, true);
}

void read_buffer(Handle handle, void* to, int64_t size) { transfer(handle, to, size, false); }

void free_buffer(Handle handle) {
  std::unique_ptr<Buffer> freed;
  {
    std::lock_guard<std::mutex> lock(g_slots);
    Buffer& buffer = find(handle);
    if (buffer.pins) {
      fail(Status::kFailedPrecondition, "handle " + shown(handle) + " is in use by " +
                                            std::to_string(buffer.pins) + " running calls");
    }
    freed = std::move(slots()[handle.slot].buffer);
    slots()[handle.slot].generation++;
  }
}

int64_t live_buffers() {
  std::lock_guard<std::mutex> lock(g_slots);
  int64_t live = 0;
  for (const Slot& slot : slots()) live += slot.buffer != nullptr;
  return live;
}

}  // namespace dij
