// Warpgroup products, bulk tensor copies and mbarriers of sm_90a, on a GPU or emulated.
#pragma once
#include "sm80.cuh"
#include "wgmma_layout.cuh"
#if defined(FG_EMULATE)
#include "emu/sm90.hpp"
#else
#include "ptx/sm90.cuh"
#endif
