#include "table.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <memory>
#include <mutex>

#include "errors.h"

namespace dij {
namespace {

std::atomic<const Api*> g_api{nullptr};
std::atomic<bool> g_closed{false};
std::mutex g_load;

using Libraries = std::vector<void*>;

void* find(const Libraries& libraries, const std::string& name) {
  for (void* library : libraries) {
    if (void* symbol = dlsym(library, name.c_str())) return symbol;
  }
  return nullptr;
}

// The CANN version as the runtime package says it; the package's name is unverified (ascend.md 7.1).
std::string version_of(const Api& api) {
  char package[] = "runtime";
  char version[128] = "";
  check(api.aclsysGetVersionStr(package, version), "aclsysGetVersionStr", -1);
  return version;
}

bool begins(const std::string& text, const std::string& start) {
  if (text.size() < start.size()) return false;
  for (size_t i = 0; i < start.size(); i++) {
    if (std::tolower(static_cast<unsigned char>(text[i])) !=
        std::tolower(static_cast<unsigned char>(start[i]))) return false;
  }
  return true;
}

// ascend.md 6.1 point 4 and 7.1. An allowed name is the installed one, spelled out.
void require_target(const Api& api, const Allowed& allowed) {
  if (api.version.empty()) fail(Status::kUnavailable, "the CANN version is unknown");
  if (!begins(api.version, "9.2.") && api.version != allowed.cann) {
    fail(Status::kUnavailable, "CANN 9.2 is needed, installed is " + api.version +
                                   ": set DEEPINFER_ASCEND_ALLOW_CANN to exactly that to use it");
  }
  if (api.devices == 0) fail(Status::kUnavailable, "the runtime found no device");
  if (!begins(api.soc, "Ascend950") && (api.soc.empty() || api.soc != allowed.soc)) {
    fail(Status::kUnavailable, "an Ascend950 is needed, found is " + api.soc +
                                   ": set DEEPINFER_ASCEND_ALLOW_SOC to exactly that to use it");
  }
}

}  // namespace

const std::map<std::string, Operator>& known_operators() {
  using namespace sig;
#define DIJ_KNOWN(name, ...)                                                                       \
  {#name, Operator{Signature<__VA_ARGS__>::kLetters, &Signature<__VA_ARGS__>::plan}},
  static const std::map<std::string, Operator> known{DIJ_OPERATORS(DIJ_KNOWN)};
#undef DIJ_KNOWN
  return known;
}

const Api* loaded() { return g_api.load(std::memory_order_acquire); }

const Api& api() {
  const Api* api = loaded();
  if (!api) fail(Status::kFailedPrecondition, "no CANN runtime is loaded: call native_ascend.load()");
  if (g_closed) fail(Status::kFailedPrecondition, "the runtime was closed: start a new process");
  if (api->process != getpid()) {
    fail(Status::kFailedPrecondition,
         "the runtime was loaded before a fork: load it in the process that uses it");
  }
  return *api;
}

void load(const std::vector<std::string>& paths, bool allow_double, const Allowed& allowed) {
  std::lock_guard<std::mutex> lock(g_load);
  if (loaded()) fail(Status::kFailedPrecondition, "a runtime is loaded already");
  Libraries libraries;
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(Status::kUnavailable, std::string("dlopen: ") + dlerror());
    libraries.push_back(library);
  }
  int doubles = 0;
  for (void* library : libraries) doubles += dlsym(library, "dij_double_marker") != nullptr;
  if (doubles && static_cast<size_t>(doubles) != libraries.size()) {
    fail(Status::kFailedPrecondition, "a test double may not be mixed with other libraries");
  }
  if (doubles && !allow_double) {
    fail(Status::kFailedPrecondition, paths[0] + " is a test double: it needs allow_double=True");
  }
  auto api = std::make_unique<Api>();
  std::string missing;
#define DIJ_RESOLVE(result, name, parameters)                                                      \
  api->name = reinterpret_cast<decltype(api->name)>(find(libraries, #name));                       \
  if (!api->name) missing += std::string(missing.empty() ? "" : ", ") + #name;
  DIJ_RUNTIME(DIJ_RESOLVE)
#undef DIJ_RESOLVE
  if (!missing.empty()) fail(Status::kUnavailable, "symbols are missing: " + missing);
  api->operators = known_operators();
  for (auto& [name, op] : api->operators) {
    op.first_phase = find(libraries, name + "GetWorkspaceSize");
    op.launch = reinterpret_cast<decltype(op.launch)>(find(libraries, name));
  }
  api->is_double = doubles != 0;
  aclError code = api->aclInit(nullptr);
  if (code != acl::kRepeatInitialize) check(code, "aclInit", -1);
  api->version = version_of(*api);
  check(api->aclrtGetDeviceCount(&api->devices), "aclrtGetDeviceCount", -1);
  const char* soc = api->aclrtGetSocName();
  api->soc = soc ? soc : "";
  require_target(*api, allowed);
  api->process = getpid();
  // never freed from here on: handlers may hold it, and libraries are never closed
  g_api.store(api.release(), std::memory_order_release);
}

void close() {
  const Api& table = api();
  g_closed = true;
  check(table.aclFinalize(), "aclFinalize", -1);
}

}  // namespace dij
