// Turns the arguments of one operator, as a plan lists them, into a call of its first phase.
#pragma once

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "aclnn_ops.h"

namespace dij {

// One argument. `kind` is the letter of its type in include/aclnn_ops.h, inputs and outputs alike:
// T tensor, L list, A int array, C scalar, I integer, B bool, D real, S string.
struct Argument {
  char kind = 0;
  const void* object = nullptr;  // T, L, A, C: may be null
  int64_t integer = 0;           // I, B
  double real = 0;               // D
  std::string text;              // S
};

// Hands out arguments in order; their kinds were checked when the plan was read.
class Cursor {
 public:
  explicit Cursor(const std::vector<Argument>& arguments) : arguments_(arguments) {}
  const Argument& next() { return arguments_[place_++]; }

 private:
  const std::vector<Argument>& arguments_;
  size_t place_ = 0;
};

template <class P> struct Taken;
#define DIJ_TAKE(type, letter, expression)                                                         \
  template <> struct Taken<type> {                                                                 \
    static constexpr char kLetter = letter;                                                        \
    static type from(const Argument& a) { return expression; }                                     \
  };
DIJ_TAKE(sig::T, 'T', static_cast<sig::T>(a.object))
DIJ_TAKE(sig::O, 'T', const_cast<sig::O>(static_cast<sig::T>(a.object)))
DIJ_TAKE(sig::L, 'L', static_cast<sig::L>(a.object))
DIJ_TAKE(sig::M, 'L', const_cast<sig::M>(static_cast<sig::L>(a.object)))
DIJ_TAKE(sig::A, 'A', static_cast<sig::A>(a.object))
DIJ_TAKE(sig::C, 'C', static_cast<sig::C>(a.object))
DIJ_TAKE(sig::I, 'I', a.integer)
DIJ_TAKE(sig::J, 'I', static_cast<sig::J>(a.integer))
DIJ_TAKE(sig::B, 'B', a.integer != 0)
DIJ_TAKE(sig::D, 'D', a.real)
DIJ_TAKE(sig::F, 'D', static_cast<sig::F>(a.real))
DIJ_TAKE(sig::S, 'S', a.text.c_str())
#undef DIJ_TAKE

template <class... P> struct Signature {
  static constexpr char kLetters[] = {Taken<P>::kLetter..., '\0'};
  static aclnnStatus plan(void* first_phase, Cursor& cursor, uint64_t* size, aclOpExecutor** executor) {
    using Function = aclnnStatus (*)(P..., uint64_t*, aclOpExecutor**);
    auto function = reinterpret_cast<Function>(first_phase);
    std::tuple<P...> taken{Taken<P>::from(cursor.next())...};  // braces: left to right
    return std::apply([&](P... p) { return function(p..., size, executor); }, taken);
  }
};

}  // namespace dij
