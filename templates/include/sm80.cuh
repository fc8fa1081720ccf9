// Asynchronous copies and tensor-core products of sm_80 and later, on a GPU or emulated.
#pragma once
#include "numeric.cuh"
#if defined(FG_EMULATE)
#include "emu/sm80.hpp"
#else
#include "ptx/sm80.cuh"
#endif
