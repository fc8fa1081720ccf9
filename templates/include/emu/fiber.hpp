// One stack and one saved state per emulated thread.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && !defined(FG_PORTABLE_FIBERS)

namespace fg::emu {

struct Context {
  void* stack_pointer;
};

// Only the registers that a callee must preserve: a switch is an ordinary call for the compiler.
extern "C" void fg_emulate_switch(void** save, void* to);
asm(R"(
.text
.local fg_emulate_switch
.type fg_emulate_switch,@function
fg_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fg_emulate_switch,.-fg_emulate_switch
)");

inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes - 64);
  *--top = nullptr;  // the return address of `entry`, which never returns; keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}
inline void switch_context(Context& from, Context& to) { fg_emulate_switch(&from.stack_pointer, to.stack_pointer); }

}  // namespace fg::emu

#else
#include <ucontext.h>

namespace fg::emu {

// Portable, but a system call per switch.
struct Context {
  ucontext_t state;
};

inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

}  // namespace fg::emu
#endif
