#include "errors.h"

#include "table.h"

namespace dij {

const char* name_of(Status status) {
  switch (status) {
    case Status::kInvalidArgument: return "INVALID_ARGUMENT";
    case Status::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case Status::kNotFound: return "NOT_FOUND";
    case Status::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case Status::kFailedPrecondition: return "FAILED_PRECONDITION";
    case Status::kUnimplemented: return "UNIMPLEMENTED";
    case Status::kInternal: return "INTERNAL";
    case Status::kUnavailable: return "UNAVAILABLE";
    case Status::kDataLoss: return "DATA_LOSS";
  }
  return "INTERNAL";
}

// ascend.md 4.3
Status status_of(aclError code) {
  switch (code) {
    case 161001: case 161002: case 100000: case 107000: case 107008: case 107017:
      return Status::kInvalidArgument;
    case 100001: case 107001: case 107002: case 107003:
      return Status::kFailedPrecondition;
    case 200000: case 207001: case 207018: case 207005: case 207007: case 207008:
      return Status::kResourceExhausted;
    case 200001: case 200006: case 207000: case 561003: case 561112:
      return Status::kUnimplemented;
    case 107019: case 107020: case 507014: case 507017: case 507034: case 507046: case 507047:
      return Status::kDeadlineExceeded;
    case 207004: case 507010: case 507899: case 507901:
      return Status::kUnavailable;
    case 507053: case 507054: case 507055:
      return Status::kDataLoss;
    default:
      return Status::kInternal;
  }
}

void fail(Status status, const std::string& text) { throw Failure{status, "ascend: " + text}; }

Failure failure_of(aclError code, const char* call, int device, const std::string& op) {
  const Api* api = loaded();
  const char* recent = api ? api->aclGetRecentErrMsg() : nullptr;
  std::string text = std::string("ascend: ") + call + " returned " + std::to_string(code);
  if (recent && *recent) text += std::string(": ") + recent;
  text += " [op=" + (op.empty() ? std::string("-") : op) + " device=" + std::to_string(device);
  text += " cann=" + (api ? api->version : std::string("-"));
  if (api && api->is_double) text += " double";
  return Failure{status_of(code), text + "]"};
}

void check(aclError code, const char* call, int device, const std::string& op) {
  if (code != 0) throw failure_of(code, call, device, op);
}

}  // namespace dij
