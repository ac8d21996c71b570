// Failures inside the bridge: a status of the FFI and a text that Python can take apart.
#pragma once

#include <string>

#include "acl_min.h"

namespace dij {

// Values are those of the FFI's error codes.
enum class Status : int {
  kInvalidArgument = 3, kDeadlineExceeded = 4, kNotFound = 5, kResourceExhausted = 8,
  kFailedPrecondition = 9, kUnimplemented = 12, kInternal = 13, kUnavailable = 14, kDataLoss = 15,
};

struct Failure {
  Status status;
  std::string text;
};

const char* name_of(Status status);
Status status_of(aclError code);

[[noreturn]] void fail(Status status, const std::string& text);

// Throws a Failure unless `code` is 0. Reads the recent error text first, on this thread.
void check(aclError code, const char* call, int device, const std::string& op = "");
// The text of such a failure, for callers that may not throw yet.
Failure failure_of(aclError code, const char* call, int device, const std::string& op);

}  // namespace dij
