// The run-time function table: every ACL and aclnn function by dlopen and dlsym, none by linking.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "acl_min.h"
#include "arguments.h"

namespace dij {

struct Operator {
  const char* signature;  // one letter a parameter, see include/aclnn_ops.h
  aclnnStatus (*plan)(void* first_phase, Cursor& arguments, uint64_t* size, aclOpExecutor** executor);
  void* first_phase = nullptr;
  aclnnStatus (*launch)(void*, uint64_t, aclOpExecutor*, aclrtStream) = nullptr;
  bool present() const { return first_phase && launch; }
};

struct Api {
#define DIJ_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  DIJ_RUNTIME(DIJ_POINTER)
#undef DIJ_POINTER
  std::map<std::string, Operator> operators;
  bool is_double = false;
  std::string soc, version;
  uint32_t devices = 0;
  pid_t process = 0;
};

// The table, or nullptr before `load`.
const Api* loaded();
// The table. Throws FAILED_PRECONDITION before `load`, after `close` and in a forked child.
const Api& api();
// Every operator the bridge can call, whether or not a library is loaded.
const std::map<std::string, Operator>& known_operators();

// A CANN version and a SoC name that are accepted beside the supported ones.
struct Allowed {
  std::string cann, soc;
};

// Opens the libraries, resolves all names, initialises ACL. Throws if one of the runtime's is missing
// or the version, the device or their number is not what the bridge is for.
void load(const std::vector<std::string>& libraries, bool allow_double, const Allowed& allowed);
void close();

}  // namespace dij
