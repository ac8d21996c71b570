// What Python calls through ctypes. Functions return 0, or 1 with the text in `message`.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "plan.h"

#define DIJ_EXPORT extern "C" __attribute__((visibility("default")))

namespace dij {
namespace {

thread_local std::string t_message;

template <class F> int guarded(F body) {
  try {
    body();
    t_message.clear();
    return 0;
  } catch (const Failure& failure) {
    t_message = std::string(name_of(failure.status)) + ": " + failure.text;
  } catch (const std::exception& error) {
    t_message = std::string("INTERNAL: ascend: ") + error.what();
  }
  return 1;
}

Handle handle_of(const uint32_t* words) { return {words[0], words[1]}; }

}  // namespace
}  // namespace dij

using namespace dij;

DIJ_EXPORT const char* dij_message() { return t_message.c_str(); }

// paths: separated by newlines.
DIJ_EXPORT int dij_load(const char* paths, int allow_double, const char* cann, const char* soc) {
  return guarded([&] {
    std::vector<std::string> all(1);
    for (const char* c = paths; *c; c++) {
      if (*c == '\n') all.emplace_back();
      else all.back() += *c;
    }
    load(all, allow_double != 0, Allowed{cann, soc});
  });
}

DIJ_EXPORT int dij_close() { return guarded([] { close(); }); }

// Whether the declarations were compared with a toolkit's headers at build time.
DIJ_EXPORT int dij_abi_checked() {
#ifdef DIJ_ABI_CHECKED
  return 1;
#else
  return 0;
#endif
}

DIJ_EXPORT int dij_unpoison(int64_t device) { return guarded([&] { unpoison(device); }); }

DIJ_EXPORT int dij_facts(char* soc, char* version, int64_t size, uint32_t* devices, int* is_double) {
  return guarded([&] {
    const Api& table = api();
    std::snprintf(soc, size, "%s", table.soc.c_str());
    std::snprintf(version, size, "%s", table.version.c_str());
    *devices = table.devices;
    *is_double = table.is_double;
  });
}

// The letters of an operator's parameters, or null for an operator the bridge cannot call.
DIJ_EXPORT const char* dij_signature(const char* name) {
  auto found = known_operators().find(name);
  return found == known_operators().end() ? nullptr : found->second.signature;
}

// Whether the loaded libraries have the operator.
DIJ_EXPORT int dij_has_operator(const char* name) {
  const Api* table = loaded();
  if (!table) return 0;
  auto found = table->operators.find(name);
  return found != table->operators.end() && found->second.present();
}

DIJ_EXPORT int dij_buffer_create(int device, int dtype, const int64_t* dims, int64_t rank, uint32_t* handle) {
  return guarded([&] {
    Handle made = create_buffer(device, dtype, std::vector<int64_t>(dims, dims + rank));
    handle[0] = made.slot;
    handle[1] = made.generation;
  });
}

DIJ_EXPORT int dij_buffer_write(const uint32_t* handle, const void* from, int64_t size) {
  return guarded([&] { write_buffer(handle_of(handle), from, size); });
}

DIJ_EXPORT int dij_buffer_read(const uint32_t* handle, void* to, int64_t size) {
  return guarded([&] { read_buffer(handle_of(handle), to, size); });
}

DIJ_EXPORT int dij_buffer_free(const uint32_t* handle) {
  return guarded([&] { free_buffer(handle_of(handle)); });
}

DIJ_EXPORT int64_t dij_live_buffers() { return live_buffers(); }

DIJ_EXPORT int dij_plan_keep(const int64_t* words, int64_t count, const char* names, int64_t* number) {
  return guarded([&] { *number = keep_plan(read_plan(words, count, names)); });
}

DIJ_EXPORT int dij_plan_drop(int64_t number) { return guarded([&] { drop_plan(number); }); }

// A plan without XLA: preparation of weights (formats, casts) before the first step.
DIJ_EXPORT int dij_plan_run(int64_t number, int device, const uint32_t* handles, int64_t count,
                            int64_t timeout_ms) {
  return guarded([&] {
    Call call;
    call.device = device;
    for (int64_t i = 0; i < count; i++) call.handles.push_back(handle_of(handles + 2 * i));
    call.timeout_ms = timeout_ms;
    run_plan(*kept_plan(number), call);
  });
}
