// The aclnn interface of the double: descriptions, executors and both phases of every operator.
#include <set>

#include "tensors.h"

// An executor: made by a first phase, used once by the second, unless it is repeatable.
struct aclOpExecutor {
  twin::Call call;
  const twin::Kernel* kernel;
  uint64_t workspace;
  bool repeatable = false;
};

namespace twin {

Value capture(const aclTensor* t) {
  Value value{'T', t == nullptr, {}, {}, 0, {}};
  if (t) value.tensors.push_back(*t);
  return value;
}
Value capture(const aclTensorList* l) {
  Value value{'L', l == nullptr, {}, {}, 0, {}};
  if (l) for (auto* t : l->tensors) value.tensors.push_back(*t);
  return value;
}
Value capture(const aclIntArray* a) { return {'A', a == nullptr, {}, a ? a->values : std::vector<int64_t>{}, 0, {}}; }
Value capture(const aclScalar* s) { return {'C', s == nullptr, {}, {}, s ? s->value : 0, {}}; }
Value capture(int64_t v) { return {'I', false, {}, {v}, 0, {}}; }
Value capture(int8_t v) { return {'I', false, {}, {v}, 0, {}}; }
Value capture(bool v) { return {'B', false, {}, {v}, 0, {}}; }
Value capture(double v) { return {'D', false, {}, {}, v, {}}; }
Value capture(float v) { return {'D', false, {}, {}, v, {}}; }
Value capture(const char* v) { return {'S', v == nullptr, {}, {}, 0, v ? v : ""}; }

aclnnStatus first_phase(const char* name, std::vector<Value> values, uint64_t* size, aclOpExecutor** executor) {
  if (int code = enter((std::string(name) + "GetWorkspaceSize").c_str())) return code;
  if (int code = require_device()) return code;
  const Kernel& kernel = kernels().at(name);
  Call call(name, std::move(values));
  try {
    kernel.check(call);
  } catch (const Rejected& rejected) {
    explain(rejected.text);
    return rejected.code;
  }
  *size = setting("workspace", kernel.workspace);
  *executor = new aclOpExecutor{std::move(call), &kernel, *size};
  count_live("executors", 1);
  return 0;
}

aclnnStatus second_phase(const char* name, void* workspace, uint64_t size, aclOpExecutor* executor,
                         aclrtStream stream) {
  int late = 0;
  int code = enter(name, &late);
  if (!code) code = require_device();
  if (!code && executor->call.name() != name) {
    violate(std::string("an executor of ") + executor->call.name() + " is run by " + name);
    code = 161002;
  }
  if (!code && (size < executor->workspace || (executor->workspace && !workspace))) {
    violate(std::string(name) + " got no workspace of the size it asked for");
    code = 161002;
  }
  if (!code) {
    uint64_t needed = executor->workspace;
    code = enqueue(stream, [stream, late, workspace, needed, kernel = executor->kernel, call = executor->call] {
      if (late) return late;
      if (has_failed(stream)) return 507015;  // what it reads was never written
      if (needed) {
        if (!is_device_range(workspace, static_cast<int64_t>(needed))) {
          violate(call.name() + " runs with a workspace that was freed");
          return 507015;
        }
        std::memset(workspace, 0xEE, needed);
      }
      try {
        kernel->run(call);
      } catch (const Rejected& rejected) {
        violate(rejected.text);
        return 507015;
      } catch (const Unmapped&) {
        return 507015;
      }
      return 0;
    });
  }
  if (!executor->repeatable) {
    delete executor;
    count_live("executors", -1);
  }
  return code;
}

}  // namespace twin

using namespace twin;

#define DIJ_RELEASE(name, kind, type)                                                              \
  DIJ_EXPORT aclnnStatus name(const type* object) {                                                \
    int fault = enter(#name);                                                                      \
    {                                                                                              \
      std::lock_guard<std::mutex> lock(state().mutex);                                             \
      if (!known_##type().erase(object)) {                                                         \
        state().violations.push_back(std::string(#name) + " of an object that is not live");       \
        return 161002;                                                                             \
      }                                                                                            \
    }                                                                                              \
    delete object;                                                                                 \
    count_live(kind, -1);                                                                          \
    return fault;                                                                                  \
  }
#define DIJ_KNOWN(type)                                                                            \
  static std::set<const type*>& known_##type() {                                                   \
    static auto* all = new std::set<const type*>;                                                  \
    return *all;                                                                                   \
  }                                                                                                \
  static type* keep(type* object, const char* kind) {                                              \
    std::lock_guard<std::mutex> lock(state().mutex);                                               \
    known_##type().insert(object);                                                                 \
    state().live[kind]++;                                                                          \
    return object;                                                                                 \
  }
DIJ_KNOWN(aclTensor)
DIJ_KNOWN(aclTensorList)
DIJ_KNOWN(aclIntArray)
DIJ_KNOWN(aclScalar)

DIJ_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int dtype, const int64_t* strides,
                                      int64_t offset, int format, const int64_t* storage,
                                      uint64_t storage_rank, void* address) {
  if (enter("aclCreateTensor")) return nullptr;
  if (reinterpret_cast<uintptr_t>(address) % 32) {
    explain("the address of a tensor is not aligned to 32 bytes");
    return nullptr;
  }
  auto* t = new aclTensor;
  t->dims.assign(dims, dims + rank);
  t->strides.assign(strides, strides + rank);
  t->storage.assign(storage, storage + storage_rank);
  t->dtype = dtype;
  t->format = format;
  t->address = static_cast<char*>(address) + offset * acl::bits_of(dtype) / 8;
  return keep(t, "tensors");
}
DIJ_RELEASE(aclDestroyTensor, "tensors", aclTensor)

DIJ_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  if (enter("aclCreateTensorList")) return nullptr;
  auto* list = new aclTensorList;
  list->tensors.assign(tensors, tensors + count);
  return keep(list, "lists");
}

DIJ_EXPORT aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  int fault = enter("aclDestroyTensorList");
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (!known_aclTensorList().erase(list)) {
      state().violations.push_back("aclDestroyTensorList of an object that is not live");
      return 161002;
    }
  }
  for (auto* tensor : list->tensors) aclDestroyTensor(tensor);
  delete list;
  count_live("lists", -1);
  return fault;
}

DIJ_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  if (enter("aclCreateIntArray")) return nullptr;
  return keep(new aclIntArray{std::vector<int64_t>(values, values + count)}, "arrays");
}
DIJ_RELEASE(aclDestroyIntArray, "arrays", aclIntArray)

DIJ_EXPORT aclScalar* aclCreateScalar(void* value, int dtype) {
  if (enter("aclCreateScalar") || dtype != acl::kFloat) return nullptr;
  return keep(new aclScalar{*static_cast<float*>(value)}, "scalars");
}
DIJ_RELEASE(aclDestroyScalar, "scalars", aclScalar)

DIJ_EXPORT aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  int fault = enter("aclSetAclOpExecutorRepeatable");
  executor->repeatable = true;
  return fault;
}

DIJ_EXPORT aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  int fault = enter("aclDestroyAclOpExecutor");
  if (!executor->repeatable) {
    violate("aclDestroyAclOpExecutor of an executor that is not repeatable");
    return 161002;
  }
  delete executor;
  count_live("executors", -1);
  return fault;
}

// Defines both phases of every operator with the parameter list of include/aclnn_ops.h.
#define DIJ_P1(t) t a1
#define DIJ_P2(t, ...) t a2, DIJ_P1(__VA_ARGS__)
#define DIJ_P3(t, ...) t a3, DIJ_P2(__VA_ARGS__)
#define DIJ_P4(t, ...) t a4, DIJ_P3(__VA_ARGS__)
#define DIJ_P5(t, ...) t a5, DIJ_P4(__VA_ARGS__)
#define DIJ_P6(t, ...) t a6, DIJ_P5(__VA_ARGS__)
#define DIJ_P7(t, ...) t a7, DIJ_P6(__VA_ARGS__)
#define DIJ_P8(t, ...) t a8, DIJ_P7(__VA_ARGS__)
#define DIJ_P9(t, ...) t a9, DIJ_P8(__VA_ARGS__)
#define DIJ_P10(t, ...) t a10, DIJ_P9(__VA_ARGS__)
#define DIJ_P11(t, ...) t a11, DIJ_P10(__VA_ARGS__)
#define DIJ_P12(t, ...) t a12, DIJ_P11(__VA_ARGS__)
#define DIJ_P13(t, ...) t a13, DIJ_P12(__VA_ARGS__)
#define DIJ_P14(t, ...) t a14, DIJ_P13(__VA_ARGS__)
#define DIJ_P15(t, ...) t a15, DIJ_P14(__VA_ARGS__)
#define DIJ_P16(t, ...) t a16, DIJ_P15(__VA_ARGS__)
#define DIJ_P17(t, ...) t a17, DIJ_P16(__VA_ARGS__)
#define DIJ_P18(t, ...) t a18, DIJ_P17(__VA_ARGS__)
#define DIJ_P19(t, ...) t a19, DIJ_P18(__VA_ARGS__)
#define DIJ_P20(t, ...) t a20, DIJ_P19(__VA_ARGS__)
#define DIJ_P21(t, ...) t a21, DIJ_P20(__VA_ARGS__)
#define DIJ_P22(t, ...) t a22, DIJ_P21(__VA_ARGS__)
#define DIJ_P23(t, ...) t a23, DIJ_P22(__VA_ARGS__)
#define DIJ_P24(t, ...) t a24, DIJ_P23(__VA_ARGS__)
#define DIJ_P25(t, ...) t a25, DIJ_P24(__VA_ARGS__)
#define DIJ_P26(t, ...) t a26, DIJ_P25(__VA_ARGS__)
#define DIJ_P27(t, ...) t a27, DIJ_P26(__VA_ARGS__)
#define DIJ_P28(t, ...) t a28, DIJ_P27(__VA_ARGS__)
#define DIJ_P29(t, ...) t a29, DIJ_P28(__VA_ARGS__)
#define DIJ_P30(t, ...) t a30, DIJ_P29(__VA_ARGS__)
#define DIJ_C1 capture(a1)
#define DIJ_C2 capture(a2), DIJ_C1
#define DIJ_C3 capture(a3), DIJ_C2
#define DIJ_C4 capture(a4), DIJ_C3
#define DIJ_C5 capture(a5), DIJ_C4
#define DIJ_C6 capture(a6), DIJ_C5
#define DIJ_C7 capture(a7), DIJ_C6
#define DIJ_C8 capture(a8), DIJ_C7
#define DIJ_C9 capture(a9), DIJ_C8
#define DIJ_C10 capture(a10), DIJ_C9
#define DIJ_C11 capture(a11), DIJ_C10
#define DIJ_C12 capture(a12), DIJ_C11
#define DIJ_C13 capture(a13), DIJ_C12
#define DIJ_C14 capture(a14), DIJ_C13
#define DIJ_C15 capture(a15), DIJ_C14
#define DIJ_C16 capture(a16), DIJ_C15
#define DIJ_C17 capture(a17), DIJ_C16
#define DIJ_C18 capture(a18), DIJ_C17
#define DIJ_C19 capture(a19), DIJ_C18
#define DIJ_C20 capture(a20), DIJ_C19
#define DIJ_C21 capture(a21), DIJ_C20
#define DIJ_C22 capture(a22), DIJ_C21
#define DIJ_C23 capture(a23), DIJ_C22
#define DIJ_C24 capture(a24), DIJ_C23
#define DIJ_C25 capture(a25), DIJ_C24
#define DIJ_C26 capture(a26), DIJ_C25
#define DIJ_C27 capture(a27), DIJ_C26
#define DIJ_C28 capture(a28), DIJ_C27
#define DIJ_C29 capture(a29), DIJ_C28
#define DIJ_C30 capture(a30), DIJ_C29
#define DIJ_PICK(n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, n22, n23, n24, n25, n26, n27, n28, n29, n30, chosen, ...) chosen
#define DIJ_COUNT(...) DIJ_PICK(__VA_ARGS__, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
#define DIJ_JOIN2(a, b) a##b
#define DIJ_JOIN(a, b) DIJ_JOIN2(a, b)
#define DIJ_DEFINE(name, ...)                                                                      \
  DIJ_EXPORT aclnnStatus name##GetWorkspaceSize(DIJ_JOIN(DIJ_P, DIJ_COUNT(__VA_ARGS__))(__VA_ARGS__), \
                                                uint64_t* size, aclOpExecutor** executor) {        \
    return first_phase(#name, {DIJ_JOIN(DIJ_C, DIJ_COUNT(__VA_ARGS__))}, size, executor);          \
  }                                                                                                \
  DIJ_EXPORT aclnnStatus name(void* workspace, uint64_t size, aclOpExecutor* executor,             \
                              aclrtStream stream) {                                                \
    return second_phase(#name, workspace, size, executor, stream);                                 \
  }
using namespace sig;
DIJ_OPERATORS(DIJ_DEFINE)
