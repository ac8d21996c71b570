#include "device.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace twin {
namespace {

thread_local std::string t_recent, t_shown;
thread_local int t_device = -1;

void work(Stream* stream) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  while (true) {
    stream->changed.wait(lock, [&] { return stream->stopping || !stream->tasks.empty(); });
    if (stream->tasks.empty()) return;
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->busy = true;
    int64_t delay = s.settings["task_delay_us"];
    lock.unlock();
    if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    int code = task();
    lock.lock();
    if (code != 0 && stream->sticky == 0) stream->sticky = code;
    stream->busy = false;
    stream->changed.notify_all();
  }
}

bool idle(Stream* stream) { return stream->tasks.empty() && !stream->busy; }

Stream* as_stream(aclrtStream stream) {
  auto* found = static_cast<Stream*>(stream);
  return state().streams.count(found) ? found : nullptr;
}

}  // namespace

State& state() {
  static auto* s = new State;  // workers may outlive static destructors
  return *s;
}

int64_t setting(const char* name, int64_t otherwise) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().settings.find(name);
  return found == state().settings.end() ? otherwise : found->second;
}

bool has_failed(aclrtStream stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Stream* found = as_stream(stream);
  return found && found->sticky != 0;
}

void violate(const std::string& text) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().violations.push_back(text);
}

void explain(const std::string& text) { t_recent = text; }

int enter(const char* name, int* device_code) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().calls[name]++;
  auto found = state().faults.find(name);
  if (found == state().faults.end() || --found->second.countdown != 0) return 0;
  Fault fault = found->second;
  state().faults.erase(found);
  if (fault.on_device && device_code) {
    *device_code = fault.code;
    return 0;
  }
  t_recent = std::string("injected into ") + name;
  return fault.code;
}

int require_device() {
  if (t_device >= 0) return 0;
  explain("this thread has set no device");
  violate("a device call on a thread without aclrtSetDevice");
  return 107002;
}

int enqueue(aclrtStream handle, Task task) {
  std::lock_guard<std::mutex> lock(state().mutex);
  Stream* stream = as_stream(handle);
  if (!stream) return 107003;
  stream->tasks.push_back(std::move(task));
  stream->changed.notify_all();
  return 0;
}

bool is_device_range(const void* address, int64_t size) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto place = reinterpret_cast<uintptr_t>(address);
  auto after = state().memory.upper_bound(place);
  if (after == state().memory.begin()) return false;
  --after;
  return place + size <= after->first + after->second;
}

void count_live(const char* kind, int64_t change) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().live[kind] += change;
}

}  // namespace twin

using namespace twin;

DIJ_EXPORT int dij_double_marker() { return 1; }

DIJ_EXPORT aclError aclInit(const char*) { return enter("aclInit"); }
DIJ_EXPORT aclError aclFinalize() { return enter("aclFinalize"); }

DIJ_EXPORT const char* aclGetRecentErrMsg() {
  t_shown.swap(t_recent);
  t_recent.clear();
  return t_shown.c_str();
}

DIJ_EXPORT const char* aclrtGetSocName() {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& name = state().texts["soc"];
  if (name.empty()) name = "Ascend950PR_double";
  return name.c_str();
}

DIJ_EXPORT aclError aclsysGetVersionStr(char*, char* version) {
  if (int code = enter("aclsysGetVersionStr")) return code;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().texts.find("version");
  std::strcpy(version, found == state().texts.end() ? "9.2.0" : found->second.c_str());
  return 0;
}

DIJ_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(setting("devices", 1));
  return enter("aclrtGetDeviceCount");
}

DIJ_EXPORT aclError aclrtSetDevice(int32_t device) {
  if (int code = enter("aclrtSetDevice")) return code;
  if (device < 0 || device >= setting("devices", 1)) return 107001;
  t_device = device;
  return 0;
}

DIJ_EXPORT aclError aclrtMalloc(void** block, size_t size, int) {
  if (int code = enter("aclrtMalloc")) return code;
  if (int code = require_device()) return code;
  int64_t limit = setting("memory_limit", 0);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (limit && state().used + size > static_cast<size_t>(limit)) {
    explain("the double's memory limit is reached");
    return 207001;
  }
  size_t rounded = (size + 63) / 64 * 64;
  *block = std::aligned_alloc(64, rounded);
  std::memset(*block, 0xA5, rounded);
  state().memory[reinterpret_cast<uintptr_t>(*block)] = rounded;
  state().used += rounded;
  return 0;
}

// Functions that release do so even where a fault makes them report a failure.
DIJ_EXPORT aclError aclrtFree(void* block) {
  int fault = enter("aclrtFree");
  if (int code = require_device()) return code;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().memory.find(reinterpret_cast<uintptr_t>(block));
  if (found == state().memory.end()) {
    state().violations.push_back("aclrtFree of an address that is not a live block");
    return 100000;
  }
  std::memset(block, 0xDD, found->second);
  state().used -= found->second;
  state().memory.erase(found);
  std::free(block);
  return fault;
}

DIJ_EXPORT aclError aclrtGetMemInfo(int, size_t* free, size_t* total) {
  int64_t limit = setting("memory_limit", int64_t{1} << 40);
  std::lock_guard<std::mutex> lock(state().mutex);
  *total = limit;
  *free = limit - state().used;
  return 0;
}

DIJ_EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  if (int code = enter("aclrtCreateStream")) return code;
  if (int code = require_device()) return code;
  auto* made = new Stream;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().streams.insert(made);
  made->worker = std::thread(work, made);
  *stream = made;
  return 0;
}

DIJ_EXPORT aclError aclrtDestroyStream(aclrtStream handle) {
  int fault = enter("aclrtDestroyStream");
  Stream* stream;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    stream = as_stream(handle);
    if (!stream) return 107003;
    if (!idle(stream)) state().violations.push_back("a stream is destroyed with work in flight");
    state().streams.erase(stream);
    stream->stopping = true;
    stream->changed.notify_all();
  }
  stream->worker.join();
  delete stream;
  return fault;
}

static aclError synchronize(aclrtStream handle, int64_t milliseconds) {
  std::unique_lock<std::mutex> lock(state().mutex);
  Stream* stream = as_stream(handle);
  if (!stream) return 107003;
  auto done = [&] { return idle(stream); };
  if (milliseconds < 0) {
    stream->changed.wait(lock, done);
  } else if (!stream->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), done)) {
    explain("the stream is still busy");
    return acl::kTimeout;
  }
  if (stream->sticky) explain("a task of the stream failed");
  return stream->sticky;
}

DIJ_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
  int code = enter("aclrtSynchronizeStream"), late = synchronize(stream, -1);
  return code ? code : late;
}

DIJ_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
  if (int code = enter("aclrtSynchronizeStreamWithTimeout")) return code;
  return synchronize(stream, milliseconds);
}

DIJ_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int kind,
                                     aclrtStream stream) {
  int late = 0;
  if (int code = enter("aclrtMemcpyAsync", &late)) return code;
  if (int code = require_device()) return code;
  if (!to || !from || size > room) {
    explain("a copy of " + std::to_string(size) + " bytes into room for " + std::to_string(room));
    return 100000;
  }
  return enqueue(stream, [=] {
    if (late) return late;
    bool good = (kind == acl::kHostToDevice || is_device_range(from, size)) &&
                (kind == acl::kDeviceToHost || is_device_range(to, size));
    if (!good) {
      violate("a copy runs on device memory that is not live");
      return 507015;
    }
    std::memcpy(to, from, size);
    return 0;
  });
}

DIJ_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  if (int code = enter("aclrtCreateEventExWithFlag")) return code;
  if (int code = require_device()) return code;
  auto* made = new Event;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().events.insert(made);
  *event = made;
  return 0;
}

DIJ_EXPORT aclError aclrtDestroyEvent(aclrtEvent handle) {
  int fault = enter("aclrtDestroyEvent");
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().events.erase(event)) {
    state().violations.push_back("an event is destroyed twice");
    return 107000;
  }
  if (event->done < event->recorded || event->waiting) {
    state().violations.push_back("an event is destroyed while a stream still needs it");
  }
  delete event;
  return fault;
}

DIJ_EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  if (int code = enter("aclrtRecordEvent")) return code;
  if (int code = require_device()) return code;
  auto* event = static_cast<Event*>(handle);
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!state().events.count(event)) return 107000;
    event->recorded++;
  }
  return enqueue(stream, [=] {
    std::lock_guard<std::mutex> lock(state().mutex);
    event->done++;
    state().events_changed.notify_all();
    return 0;
  });
}

DIJ_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  if (int code = enter("aclrtStreamWaitEvent")) return code;
  if (int code = require_device()) return code;
  auto* event = static_cast<Event*>(handle);
  int64_t target;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!state().events.count(event)) return 107000;
    target = event->recorded;
    event->waiting++;
  }
  if (setting("ignore_waits", 0)) target = 0;  // a mutation: tests show that they notice it
  return enqueue(stream, [=] {
    std::unique_lock<std::mutex> lock(state().mutex);
    state().events_changed.wait(lock, [&] { return event->done >= target; });
    event->waiting--;
    return 0;
  });
}

// What tests call.

DIJ_EXPORT void dij_double_set(const char* name, int64_t value) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().settings[name] = value;
}

DIJ_EXPORT void dij_double_set_text(const char* name, const char* value) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().texts[name] = value;
}

// The n-th call of `name` from now on fails, at once or when its task runs.
DIJ_EXPORT void dij_double_fault(const char* name, int64_t nth, int code, int on_device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().faults[name] = Fault{nth, code, on_device != 0};
}

DIJ_EXPORT int64_t dij_double_calls(const char* name) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().calls[name];
}

DIJ_EXPORT int64_t dij_double_live(const char* kind) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (std::string(kind) == "blocks") return static_cast<int64_t>(state().memory.size());
  if (std::string(kind) == "bytes") return static_cast<int64_t>(state().used);
  if (std::string(kind) == "streams") return static_cast<int64_t>(state().streams.size());
  if (std::string(kind) == "events") return static_cast<int64_t>(state().events.size());
  return state().live[kind];
}

DIJ_EXPORT int64_t dij_double_violations(char* text, int64_t size) {
  std::lock_guard<std::mutex> lock(state().mutex);
  std::string all;
  for (const auto& one : state().violations) all += one + "\n";
  if (size > 0) {
    std::strncpy(text, all.c_str(), size - 1);
    text[size - 1] = '\0';
  }
  return static_cast<int64_t>(state().violations.size());
}

// Forgets faults, violations and the streams' failures; settings stay.
DIJ_EXPORT void dij_double_reset() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().faults.clear();
  state().violations.clear();
  for (Stream* stream : state().streams) stream->sticky = 0;
}
