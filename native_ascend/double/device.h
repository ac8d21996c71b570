// The software double of ACL: devices, memory, streams, events, faults and counts (ascend.md 9.1).
// It computes on the CPU and proves nothing about a device; it notices broken protocol.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "acl_min.h"

#define DIJ_EXPORT extern "C" __attribute__((visibility("default")))

namespace twin {

// A task's status: 0, or the code that its stream then keeps.
using Task = std::function<int()>;

struct Stream {
  std::deque<Task> tasks;
  std::condition_variable changed;
  bool busy = false, stopping = false;
  int sticky = 0;
  std::thread worker;
};

struct Event {
  int64_t recorded = 0, done = 0;  // how often it was recorded, and how far streams have got
  int waiting = 0;
};

struct Fault {
  int64_t countdown = 0;  // fires on the call that makes it 0
  int code = 0;
  bool on_device = false;
};

struct State {
  std::mutex mutex;
  std::map<uintptr_t, size_t> memory;  // live blocks by address
  size_t used = 0;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::condition_variable events_changed;
  std::map<std::string, int64_t> live;  // tensors, lists, arrays, scalars, executors
  std::map<std::string, int64_t> calls;
  std::map<std::string, Fault> faults;
  std::map<std::string, int64_t> settings;  // see `setting`
  std::map<std::string, std::string> texts;
  std::vector<std::string> violations;
};

State& state();
// A number that tests may set: devices, memory_limit, task_delay_us, gates and mutations by name.
int64_t setting(const char* name, int64_t otherwise);
// Whether an earlier task of the stream failed; operators behind it do not run.
bool has_failed(aclrtStream stream);
// Notes broken protocol. The text names the rule.
void violate(const std::string& text);
// Sets the text of aclGetRecentErrMsg for this thread.
void explain(const std::string& text);

// Counts a call of `name`; returns the code of a fault that fires at call time, else 0. A fault for
// the device is handed to `device_code`, if the caller enqueues something.
int enter(const char* name, int* device_code = nullptr);
// 107002 unless this thread has set a device.
int require_device();
// 107003 for a stream that does not exist.
int enqueue(aclrtStream stream, Task task);
// Whether [address, address + size) lies in one live block.
bool is_device_range(const void* address, int64_t size);
void count_live(const char* kind, int64_t change);

}  // namespace twin
