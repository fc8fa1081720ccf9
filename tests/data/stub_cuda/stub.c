/* A CUDA driver in host memory, for tests: the functions that flashgen.h calls. A launch computes plain attention from its parameters and
 * appends how it was launched, with the raw parameter block, to the file that FG_STUB_LOG names. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

typedef struct {
  int64_t batch, head, row;
} Strides;

typedef struct {
  uint64_t q, k, v, o, lse, workspace;
  Strides qs, ks, vs, os;
  int32_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, diagonal, left, right;
  float scale_log2;
  int32_t vector_access;
} Params;

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static float load(uint64_t base, int64_t i) {
  uint32_t bits = (uint32_t)((const uint16_t*)(uintptr_t)base)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void store(uint64_t base, int64_t i, double value) {
  float rounded = (float)value;
  uint32_t bits;
  memcpy(&bits, &rounded, 4);
  ((uint16_t*)(uintptr_t)base)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void attend(const Params* p, int head_dim) {
  double* weight = (double*)malloc(sizeof(double) * (size_t)p->seqlen_kv);
  for (int b = 0; b < p->batch; ++b)
    for (int h = 0; h < p->heads_q; ++h)
      for (int i = 0; i < p->seqlen_q; ++i) {
        int kv = h / (p->heads_q / p->heads_kv);
        double most = -INFINITY, sum = 0;
        for (int j = 0; j < p->seqlen_kv; ++j) {
          int64_t from = (int64_t)i + p->diagonal - p->left, to = (int64_t)i + p->diagonal + p->right;
          double score = 0;
          for (int d = 0; d < head_dim; ++d)
            score += (double)load(p->q, b * p->qs.batch + h * p->qs.head + i * p->qs.row + d) *
                     load(p->k, b * p->ks.batch + kv * p->ks.head + j * p->ks.row + d);
          weight[j] = j >= from && j <= to ? score * p->scale_log2 : -INFINITY;
          most = fmax(most, weight[j]);
        }
        for (int j = 0; j < p->seqlen_kv; ++j) sum += weight[j] = most == -INFINITY ? 0 : exp2(weight[j] - most);
        for (int d = 0; d < head_dim; ++d) {
          double value = 0;
          for (int j = 0; j < p->seqlen_kv; ++j) value += weight[j] * load(p->v, b * p->vs.batch + kv * p->vs.head + j * p->vs.row + d);
          store(p->o, b * p->os.batch + h * p->os.head + i * p->os.row + d, sum > 0 ? value / sum : 0);
        }
        float* lse = (float*)(uintptr_t)p->lse;
        lse[((int64_t)b * p->heads_q + h) * p->seqlen_q + i] = sum > 0 ? (float)((most + log2(sum)) * 0.6931471805599453) : -INFINITY;
      }
  free(weight);
}

CUresult cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? number("FG_STUB_SM", 90) / 10
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? number("FG_STUB_SM", 90) % 10
                                                                       : 132;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return (void)device, *context = NULL, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return (void)device, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return *module = NULL, memcmp(image, "\177ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return (void)module, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return (void)module, *function = (CUfunction)(uintptr_t)name, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return (void)function, (void)attribute, value <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  return *address = (CUdeviceptr)(uintptr_t)aligned_alloc(512, (bytes + 511) / 512 * 512), CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { return free((void*)(uintptr_t)address), CUDA_SUCCESS; }
CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t count) {
  return memset((void*)(uintptr_t)address, value, count), CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  printf("%d %u %llu ", (int)type, rank, (unsigned long long)(uintptr_t)address);
  for (unsigned i = 0; i < rank; ++i) printf("%llu ", (unsigned long long)dims[i]);
  for (unsigned i = 0; i + 1 < rank; ++i) printf("%llu ", (unsigned long long)strides[i]);
  for (unsigned i = 0; i < rank; ++i) printf("%u ", box[i]);
  for (unsigned i = 0; i < rank; ++i) printf("%u ", steps[i]);
  printf("%d %d %d %d\n", (int)interleave, (int)swizzle, (int)promotion, (int)fill);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) { return memcpy((void*)(uintptr_t)to, from, bytes), CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) { return memcpy(to, (void*)(uintptr_t)from, bytes), CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** words) { return (void)error, *words = "an error of the stub", CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream stream, void** arguments, void** extra) {
  (void)stream, (void)extra, (void)gy, (void)gz, (void)by, (void)bz;
  FILE* log = fopen(getenv("FG_STUB_LOG"), "a");
  fprintf(log, "%s %u %u %u ", (const char*)(uintptr_t)function, gx, bx, shared);
  for (size_t i = 0; i < sizeof(Params); ++i) fprintf(log, "%02x", ((unsigned char*)arguments[0])[i]);
  fprintf(log, "\n");
  fclose(log);
  if (number("FG_STUB_COMPUTES", 1)) attend((const Params*)arguments[0], number("FG_STUB_HEAD_DIM", 64));
  return CUDA_SUCCESS;
}
