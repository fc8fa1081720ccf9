// Words in global memory by which CTAs of one launch wait for each other. The twin for CPUs is emu/words.hpp.
#pragma once

namespace fg {

// Until the word holds `value`: what the publishing thread did before is done, its finished bulk sums included, and bulk sums of this
// thread come behind it. The publisher must be sure to come: it runs already, and waits for nobody who may wait for this thread.
FG_DEVICE void await_word(const u32* address, u32 value) {
  u32 found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(address) : "memory");
  } while (found != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// One more. What every counting thread knew to be done before is done for a thread that awaits the full count.
FG_DEVICE void count_word(u32* address) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(address) : "memory"); }
// After bulk_wait<0>: reading alone does not finish a bulk sum.
FG_DEVICE void publish_word(u32* address, u32 value) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace fg
