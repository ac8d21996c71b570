// The two XLA custom calls. Handlers use the execute stage only and keep no FFI state (ascend.md 3.2).
#include <cstring>
#include <string>

#include "plan.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dij {
namespace {

template <class Buffer> HostBuffer host_of(Buffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::S4:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      // XLA packs two a byte but states one byte each (F1).
      fail(Status::kInvalidArgument, "4-bit arrays do not cross this boundary: pass uint8, two a byte");
    default:
      return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes())};
  }
}

// Adds the arguments and results from the given places on: those before are the call's own.
void add_buffers(Call& call, ffi::RemainingArgs& args, size_t first_arg, ffi::RemainingRets& rets,
                 size_t first_result) {
  for (size_t i = first_arg; i < args.size(); i++) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) fail(Status::kInvalidArgument, buffer.error().message());
    call.operands.push_back(host_of(*buffer));
  }
  for (size_t i = first_result; i < rets.size(); i++) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) fail(Status::kInvalidArgument, buffer.error().message());
    call.results.push_back(host_of(**buffer));
  }
}

template <class F> ffi::Error guarded(F body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(static_cast<ffi::ErrorCode>(failure.status), failure.text);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("ascend: ") + error.what());
  }
}

// One operator, everything staged through the host.
ffi::Error call_operator(ffi::RemainingArgs args, ffi::RemainingRets rets, int32_t ordinal,
                         ffi::Span<const int64_t> words, std::string_view names, int64_t timeout_ms) {
  return guarded([&] {
    Call call;
    call.device = ordinal;
    call.timeout_ms = timeout_ms;
    add_buffers(call, args, 0, rets, 0);
    run_plan(read_plan(words.begin(), static_cast<int64_t>(words.size()), names), call);
  });
}

// One step of a kept plan. The first operand is the handles, uint32 [n, 2]; the second, int32 [1],
// orders steps: the first result is its successor.
ffi::Error call_step(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t plan, int64_t device,
                     int64_t timeout_ms) {
  return guarded([&] {
    auto handles = args.get<ffi::Buffer<ffi::DataType::U32>>(0);
    auto order = args.get<ffi::Buffer<ffi::DataType::S32>>(1);
    auto next = rets.get<ffi::Buffer<ffi::DataType::S32>>(0);
    if (!handles.has_value() || !order.has_value() || !next.has_value()) {
      fail(Status::kInvalidArgument, "a step takes uint32 handles and int32 order, and returns order");
    }
    Call call;
    call.device = device;
    call.timeout_ms = timeout_ms;
    const uint32_t* words = handles->typed_data();
    for (size_t i = 0; i + 1 < handles->element_count(); i += 2) {
      call.handles.push_back({words[i], words[i + 1]});
    }
    add_buffers(call, args, 2, rets, 1);
    run_plan(*kept_plan(plan), call);
    (*next)->typed_data()[0] = order->typed_data()[0] + 1;
  });
}

}  // namespace
}  // namespace dij

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(dij_call, dij::call_operator,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<ffi::Span<const int64_t>>("plan")
                                  .Attr<std::string_view>("names")
                                  .Attr<int64_t>("timeout_ms"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dij_step, dij::call_step,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("plan")
                                  .Attr<int64_t>("device")
                                  .Attr<int64_t>("timeout_ms"));
extern "C" int dij_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
#pragma GCC visibility pop
