// Words in global memory by which CTAs of one launch wait for each other, for a CPU. The twin for GPUs is ptx/words.cuh, which says what
// each promises.
#pragma once

namespace fg {

FG_DEVICE void await_word(const u32* address, u32 value) { emu::wait_word(address, value); }
FG_DEVICE void count_word(u32* address) { emu::count_word(address); }
FG_DEVICE void publish_word(u32* address, u32 value) { emu::publish_word(address, value); }

}  // namespace fg
