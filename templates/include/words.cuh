// Words in global memory by which CTAs of one launch wait for each other.
#pragma once
#include "sm90_backward.cuh"
#if defined(FG_EMULATE)
#include "emu/words.hpp"
#else
#include "ptx/words.cuh"
#endif
