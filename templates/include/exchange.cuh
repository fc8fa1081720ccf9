// Named barriers and sums in global memory, on a GPU or emulated.
#pragma once
#include "sm80.cuh"
#if defined(FG_EMULATE)
#include "emu/exchange.hpp"
#else
#include "ptx/exchange.cuh"
#endif
