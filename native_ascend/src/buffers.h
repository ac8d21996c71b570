// Device memory that outlives a call, named by (slot, generation) so that a stale name is noticed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device.h"

namespace dij {

struct Handle {
  uint32_t slot, generation;
};

struct Buffer {
  std::unique_ptr<Block> block;
  int device = 0;
  int dtype = 0;
  std::vector<int64_t> dims;
  int64_t size = 0;
  int pins = 0;  // running calls that use it
};

// Keeps buffers from being freed while a call runs.
class Pins {
 public:
  Pins() = default;
  ~Pins();
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  // The buffer, pinned. Throws FAILED_PRECONDITION for a stale handle or another device.
  const Buffer& pin(Handle handle, int device);

 private:
  std::vector<uint32_t> slots_;
};

Handle create_buffer(int device, int dtype, const std::vector<int64_t>& dims);
void write_buffer(Handle handle, const void* from, int64_t size);
void read_buffer(Handle handle, void* to, int64_t size);
void free_buffer(Handle handle);
int64_t live_buffers();

}  // namespace dij
