/* Launches the kernels of a flashgen bundle through the CUDA driver API alone: no Python, no NVRTC, no CUDA runtime.
 *
 * kernels.h, beside this file, lists what the bundle holds. C99, cuda.h of CUDA 12 or later; link with -lcuda -lm. Every function returns a
 * CUresult, 0 for success; FG_DAMAGED means that a cubin is not the one that was bundled, and nothing of it was loaded.
 */
#ifndef FLASHGEN_H
#define FLASHGEN_H

#include <cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FG_DAMAGED ((CUresult)90001)
#define FG_NO_KERNEL ((CUresult)90002)
#define FG_NO_FILE ((CUresult)90003)
#define FG_MAX_LAUNCHES 4

enum { FG_FLOAT32, FG_FLOAT16, FG_BFLOAT16 };
enum { FG_MASK_NONE, FG_MASK_CAUSAL, FG_MASK_WINDOW };

/* Distances in elements between neighbours of a (batch, heads, rows, columns) tensor; columns are adjacent. */
typedef struct {
  int64_t batch, head, row;
} fg_strides;

/* What a kernel is given by value: fg::ForwardParams of the kernel's text. Addresses are device addresses. */
typedef struct {
  uint64_t q, k, v, o;
  uint64_t lse;       /* float (batch, heads_q, seqlen_q), contiguous */
  uint64_t workspace; /* fg_workspace_bytes() of it */
  fg_strides q_strides, k_strides, v_strides, o_strides;
  int32_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int32_t diagonal, window_left, window_right;
  float scale_log2;
  int32_t vector_access;
} fg_forward_params;

/* The same for kernels that copy through tensor maps: fg::MappedForwardParams. */
typedef struct {
  CUtensorMap maps[4]; /* q, k, v, o */
  fg_forward_params problem;
  uint64_t counters;
  unsigned char padding[64];
} fg_mapped_params;

/* One attention computation. Windows: keys to the left and right of the diagonal, -1 for no bound. */
typedef struct {
  int dtype, head_dim, head_dim_v, mask;
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  int window_left, window_right;
  int top_left; /* 0: the diagonal ends in the bottom right corner; 1: it begins in the top left one */
  double scale; /* of the scores, 1 / sqrt(head_dim) as a rule */
} fg_problem;

/* What formulas of grids and workspaces read. */
typedef struct {
  int64_t batch, heads_q, heads_kv, gqa_group, batch_heads, seqlen_q, seqlen_kv, sm_count;
} fg_shape;

typedef int64_t (*fg_formula)(const fg_shape* s);

typedef struct {
  const char* name;
  unsigned threads, shared_bytes;
  fg_formula grid;
} fg_entry_point;

typedef struct {
  const char* file; /* below the bundle's folder */
  const char* sha256;
  size_t bytes;
  int sm;
  int dtype, head_dim, head_dim_v, mask;
  int box_rows[4]; /* rows that one copy of q, k, v, o moves; 0 where no tensor map is used */
  int counters;    /* words of device memory that a run finds zero and leaves zero */
  fg_formula workspace_bytes;
  int launches;
  fg_entry_point launch[FG_MAX_LAUNCHES];
} fg_kernel;

/* A tuned problem and the kernel that won it. */
typedef struct {
  int kernel;
  int seqlen_q, seqlen_kv, batch, batch_heads, gqa_group, window_left, window_right, top_left;
} fg_tuned;

typedef struct {
  const fg_kernel* kernel;
  CUmodule module;
  CUfunction function[FG_MAX_LAUNCHES];
  CUdeviceptr counters; /* one set: use a loaded kernel on one stream at a time */
  int sm_count;
} fg_loaded;

static inline int64_t fg_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t fg_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fg_max(int64_t a, int64_t b) { return a > b ? a : b; }

#include "kernels.h"

static inline fg_shape fg_shape_of(const fg_problem* p, int sm_count) {
  fg_shape s;
  s.batch = p->batch;
  s.heads_q = p->heads_q;
  s.heads_kv = p->heads_kv;
  s.gqa_group = p->heads_q / p->heads_kv;
  s.batch_heads = s.batch * s.heads_q;
  s.seqlen_q = p->seqlen_q;
  s.seqlen_kv = p->seqlen_kv;
  s.sm_count = sm_count;
  return s;
}

/* SHA-256 (FIPS 180-4) of `bytes` bytes as 64 lower-case hexadecimal digits. */
static inline void fg_sha256(const unsigned char* data, size_t bytes, char hex[65]) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
      0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
      0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
      0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
      0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
      0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t blocks = (bytes + 9 + 63) / 64;
  for (uint64_t block = 0; block < blocks; ++block) {
    unsigned char part[64];
    uint32_t w[64], v[8];
    for (int i = 0; i < 64; ++i) {
      uint64_t at = block * 64 + (uint64_t)i;
      int length_byte = block + 1 == blocks && i >= 56;
      part[i] = at < bytes ? data[at] : at == bytes ? 0x80 : length_byte ? (unsigned char)(((uint64_t)bytes * 8) >> (8 * (63 - i))) : 0;
    }
#define FG_ROTATED(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
    for (int i = 0; i < 16; ++i)
      w[i] = (uint32_t)part[4 * i] << 24 | (uint32_t)part[4 * i + 1] << 16 | (uint32_t)part[4 * i + 2] << 8 | part[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      uint32_t a = FG_ROTATED(w[i - 15], 7) ^ FG_ROTATED(w[i - 15], 18) ^ (w[i - 15] >> 3);
      uint32_t b = FG_ROTATED(w[i - 2], 17) ^ FG_ROTATED(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; ++i) {
      uint32_t s1 = FG_ROTATED(v[4], 6) ^ FG_ROTATED(v[4], 11) ^ FG_ROTATED(v[4], 25);
      uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      uint32_t s0 = FG_ROTATED(v[0], 2) ^ FG_ROTATED(v[0], 13) ^ FG_ROTATED(v[0], 22);
      uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      memmove(v + 1, v, 7 * sizeof v[0]);
      v[4] += t1;
      v[0] = t1 + t2;
    }
#undef FG_ROTATED
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  for (int i = 0; i < 8; ++i) snprintf(hex + 8 * i, 9, "%08x", (unsigned)h[i]);
}

/* The tuned problem nearest to `p` for SM version `sm` (90 for compute capability 9.0): the sum of |log2 ratio| over lengths, batch x heads
 * and query heads per K/V head, none of them further than a factor of four. NULL when there is none. */
static inline const fg_tuned* fg_choose(const fg_problem* p, int sm) {
  const fg_tuned* best = NULL;
  double least = INFINITY;
  for (int i = 0; i < fg_tuned_count; ++i) {
    const fg_tuned* t = &fg_tuned_problems[i];
    const fg_kernel* k = &fg_kernels[t->kernel];
    if (k->sm != sm || k->dtype != p->dtype || k->head_dim != p->head_dim || k->head_dim_v != p->head_dim_v || k->mask != p->mask) continue;
    double tuned[4] = {t->seqlen_q, t->seqlen_kv, t->batch_heads, t->gqa_group};
    double asked[4] = {p->seqlen_q, p->seqlen_kv, (double)p->batch * p->heads_q, (double)p->heads_q / p->heads_kv};
    double sum = 0.0, most = 0.0;
    for (int axis = 0; axis < 4; ++axis) {
      double apart = fabs(log2(fmax(1.0, tuned[axis])) - log2(fmax(1.0, asked[axis])));
      sum += apart;
      most = fmax(most, apart);
    }
    if (most <= 2.0 && sum < least) {
      least = sum;
      best = t;
    }
  }
  return best;
}

/* Read a cubin, compare it with its digest, and only then load it into the current context. */
static inline CUresult fg_load(const fg_kernel* kernel, const char* folder, CUdevice device, fg_loaded* out) {
  char path[4096], hex[65];
  memset(out, 0, sizeof *out);
  if (snprintf(path, sizeof path, "%s/%s", folder, kernel->file) >= (int)sizeof path) return FG_NO_FILE;
  FILE* file = fopen(path, "rb");
  if (!file) return FG_NO_FILE;
  unsigned char* image = (unsigned char*)malloc(kernel->bytes + 1);
  size_t got = image ? fread(image, 1, kernel->bytes + 1, file) : 0;
  fclose(file);
  if (image) fg_sha256(image, got, hex);
  if (!image || got != kernel->bytes || strcmp(hex, kernel->sha256) != 0) {
    free(image);
    return FG_DAMAGED;
  }
  CUresult status = cuModuleLoadData(&out->module, image);
  free(image);
  for (int i = 0; !status && i < kernel->launches; ++i) {
    status = cuModuleGetFunction(&out->function[i], out->module, kernel->launch[i].name);
    if (!status && kernel->launch[i].shared_bytes)
      status = cuFuncSetAttribute(out->function[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)kernel->launch[i].shared_bytes);
  }
  if (!status) status = cuDeviceGetAttribute(&out->sm_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  if (!status && kernel->counters) status = cuMemAlloc(&out->counters, 4 * (size_t)kernel->counters);
  if (!status && kernel->counters) status = cuMemsetD8(out->counters, 0, 4 * (size_t)kernel->counters);
  out->kernel = kernel;
  return status;
}

static inline void fg_unload(fg_loaded* loaded) {
  if (loaded->counters) cuMemFree(loaded->counters);
  if (loaded->module) cuModuleUnload(loaded->module);
  memset(loaded, 0, sizeof *loaded);
}

/* Device memory that one run needs besides its tensors. */
static inline size_t fg_workspace_bytes(const fg_loaded* loaded, const fg_problem* p) {
  fg_shape s = fg_shape_of(p, loaded->sm_count);
  return (size_t)loaded->kernel->workspace_bytes(&s);
}

/* Contiguous (batch, heads, rows, columns). */
static inline fg_strides fg_contiguous(int heads, int rows, int columns) {
  fg_strides s = {(int64_t)heads * rows * columns, (int64_t)rows * columns, columns};
  return s;
}

static inline int fg_aligned(uint64_t address, const fg_strides* s, int element_bytes) {
  return address % 16 == 0 && s->batch * element_bytes % 16 == 0 && s->head * element_bytes % 16 == 0 && s->row * element_bytes % 16 == 0;
}

/* Fill in everything of `params` but addresses and strides, which the caller has set. */
static inline void fg_complete(const fg_problem* p, fg_forward_params* params) {
  int64_t reach = fg_min((int64_t)p->seqlen_q + p->seqlen_kv, 1 << 30);
  int bytes = p->dtype == FG_FLOAT32 ? 4 : 2;
  int causal = p->mask == FG_MASK_CAUSAL, window = p->mask == FG_MASK_WINDOW;
  params->batch = p->batch;
  params->heads_q = p->heads_q;
  params->heads_kv = p->heads_kv;
  params->seqlen_q = p->seqlen_q;
  params->seqlen_kv = p->seqlen_kv;
  params->diagonal = p->top_left ? 0 : p->seqlen_kv - p->seqlen_q;
  params->window_left = (int32_t)(!window || p->window_left < 0 ? reach : fg_min(p->window_left, reach));
  params->window_right = (int32_t)(causal ? 0 : !window || p->window_right < 0 ? reach : fg_min(p->window_right, reach));
  params->scale_log2 = (float)(p->scale * 1.4426950408889634);
  params->vector_access = fg_aligned(params->q, &params->q_strides, bytes) && fg_aligned(params->k, &params->k_strides, bytes) &&
                          fg_aligned(params->v, &params->v_strides, bytes) && fg_aligned(params->o, &params->o_strides, bytes);
}

/* The tensor map of q, k, v or o (0 to 3): columns, rows, heads, batch; boxes of 64 columns of `rows` rows, 128-byte swizzle. */
static inline CUresult fg_map(const fg_problem* p, const fg_forward_params* params, int tensor, int rows, CUtensorMap* out) {
  const fg_strides* s = tensor == 0   ? &params->q_strides
                        : tensor == 1 ? &params->k_strides
                        : tensor == 2 ? &params->v_strides
                                      : &params->o_strides;
  uint64_t address = tensor == 0 ? params->q : tensor == 1 ? params->k : tensor == 2 ? params->v : params->o;
  int queries = tensor == 0 || tensor == 3, heads = queries ? p->heads_q : p->heads_kv, length = queries ? p->seqlen_q : p->seqlen_kv;
  uint64_t bytes = p->dtype == FG_FLOAT32 ? 4 : 2;
  CUtensorMapDataType type = p->dtype == FG_FLOAT32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                             : p->dtype == FG_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t dims[5] = {(cuuint64_t)(tensor < 2 ? p->head_dim : p->head_dim_v), (cuuint64_t)fg_max(1, length), (cuuint64_t)heads,
                        (cuuint64_t)fg_max(1, p->batch), 1};
  cuuint64_t strides[4] = {length > 1 ? (cuuint64_t)s->row * bytes : 16, heads > 1 ? (cuuint64_t)s->head * bytes : 16,
                           p->batch > 1 ? (cuuint64_t)s->batch * bytes : 16, 16};
  cuuint32_t box[5] = {64, (cuuint32_t)rows, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  return cuTensorMapEncodeTiled(out, type, 5, (void*)(uintptr_t)(address ? address : 16), dims, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Enqueue one run on a stream; returns at once. `params` has addresses and strides; the rest is filled in here. */
static inline CUresult fg_run(const fg_loaded* loaded, const fg_problem* p, fg_forward_params* params, CUstream stream) {
  fg_shape s = fg_shape_of(p, loaded->sm_count);
  void* arguments[1] = {params};
  fg_mapped_params mapped;
  fg_complete(p, params);
  for (int i = 0; i < 4; ++i) {
    if (!loaded->kernel->box_rows[i]) continue;
    if (arguments[0] != &mapped) {
      memset(&mapped, 0, sizeof mapped);
      mapped.problem = *params;
      mapped.counters = loaded->counters;
      arguments[0] = &mapped;
    }
    CUresult status = fg_map(p, params, i, loaded->kernel->box_rows[i], &mapped.maps[i]);
    if (status) return status;
  }
  for (int i = 0; i < loaded->kernel->launches; ++i) {
    const fg_entry_point* launch = &loaded->kernel->launch[i];
    int64_t grid = launch->grid(&s);
    if (grid < 0 || grid > INT32_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!grid) continue;
    CUresult status =
        cuLaunchKernel(loaded->function[i], (unsigned)grid, 1, 1, launch->threads, 1, 1, launch->shared_bytes, stream, arguments, NULL);
    if (status) return status;
  }
  return CUDA_SUCCESS;
}

#endif
