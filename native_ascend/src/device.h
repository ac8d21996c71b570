// One device: its two streams, its workspace, and what made it unusable. And owners of ACL objects.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "table.h"

namespace dij {

// Memory on a device, freed with the object. Its owner sees to it that no stream still uses it.
class Block {
 public:
  Block(int device, int64_t size);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  int device_;
  int64_t size_;
  char* data_ = nullptr;
};

class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  aclrtEvent get() const { return event_; }

 private:
  aclrtEvent event_ = nullptr;
};

struct Device {
  int id = 0;
  std::mutex mutex;  // around planning and launching, never around waiting
  aclrtStream compute = nullptr;
  aclrtStream copy = nullptr;
  std::unique_ptr<Block> workspace;
  std::vector<std::unique_ptr<Block>> retired;  // outgrown workspaces that a launch may still use
  int running = 0;                              // calls between their first launch and their drain
  std::string poisoned;                         // why nothing runs here any more; empty: it does

  // Workspace of at least `size` bytes. The caller holds `mutex`.
  void* room(int64_t size);
  void require_usable() const;
};

// The device, its streams made at first use. Binds the calling thread to it.
Device& device_of(int64_t id);
// Forgets why a device is unusable: for tests, refused unless the runtime is a double.
void unpoison(int64_t id);
// Binds the calling thread, unless it is bound already.
void bind(int id);

}  // namespace dij
