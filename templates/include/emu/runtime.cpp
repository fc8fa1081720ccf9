// Runtime of the emulation: fibers under a scheduler, shared and global memory with checks, collectives, asynchronous engines.
//
// Every emulated thread is a fiber. A fiber runs until it waits for others (a collective, a barrier) or, under some schedules, until it
// touches memory; then the scheduler picks the next one. "Nothing can run" is the moment for asynchronous operations that come as late as
// they may, and when there is none, of a deadlock. One translation unit, one file per concern.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "blocks.hpp"

namespace fg::emu {
namespace {

// ---- crashes of a child ----

void on_crash(int signal, siginfo_t* info, void*) {
  char text[160];
  std::snprintf(text, sizeof text, "crash: signal %d (%s) at address %p%s", signal, strsignal(signal), info->si_addr,
                signal == SIGSEGV ? "; a wild pointer, or more than 192 KiB of stack" : "");
  append_fault(text + place());
  machine.result->state = CRASHED;
  _exit(1);
}

// On a stack of its own, because the fault may be that a fiber's stack is full.
void catch_crashes() {
  static char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(signal, &action, nullptr);
}

}  // namespace

// ---- launching ----

extern "C" void fg_emulate_run(const Launch* launch, Result* result) {
  counters = Counters{};
  machine.result = result;
  machine.faults_of_kind.clear();
  result->num_faults = result->text_bytes = 0;
  result->state = RUNNING;
  if (valid(*launch)) {
    reset(*launch);
    if (machine.stacks) {
      run_blocks();
      machine.tidy = !machine.stopped;
    } else {
      fault("launch", "no memory for the stacks of %d threads in %zu blocks", launch->threads, machine.blocks.size());
    }
  }
  result->counters = counters;
  result->state = FINISHED;
}

extern "C" int fg_emulate_start(const Launch* launch, Result* result) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return -errno;
  if (child > 0) return child;
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a child in an endless loop must not outlive its parent
#endif
  if (getppid() != parent) _exit(1);
  machine.result = result;
  catch_crashes();
  fg_emulate_run(launch, result);
  _exit(0);
}

extern "C" int fg_emulate_wait(int process, int milliseconds) {
  const timespec step = {0, 200000};
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double end = now.tv_sec + now.tv_nsec * 1e-9 + milliseconds * 1e-3;
  while (waitpid(process, nullptr, WNOHANG) == 0) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec + now.tv_nsec * 1e-9 > end) return 0;
    nanosleep(&step, nullptr);
  }
  return 1;  // ended now, or collected by someone else
}

extern "C" void fg_emulate_kill(int process) {
  kill(process, SIGKILL);
  waitpid(process, nullptr, 0);
}

}  // namespace fg::emu
