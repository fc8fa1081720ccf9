/* Runs one kernel of a bundle and compares its output with a plain computation.
 *
 *   gcc -O2 -std=c99 -I. -I$CUDA/include example.c -o example -lcuda -lm
 *   ./example FOLDER                                                     every tuned problem, shortened, on random numbers
 *   ./example FOLDER NUMBER q.bin k.bin v.bin o.bin lse.bin              one of them, whole, on the files' contents
 *
 * Files hold contiguous (batch, heads, rows, columns) arrays. Exit codes: 0 right, 1 wrong, 2 could not run.
 */
#include "flashgen.h"

#define CHECK(call)                                                                      \
  do {                                                                                   \
    CUresult status_ = (call);                                                           \
    if (status_) {                                                                       \
      const char* words_ = NULL;                                                         \
      if ((int)status_ < 90000) cuGetErrorString(status_, &words_);                      \
      if (status_ == FG_DAMAGED) words_ = "the cubin is not the one that was bundled";   \
      if (status_ == FG_NO_FILE) words_ = "the cubin is missing";                        \
      fprintf(stderr, "%s: %s (%d)\n", #call, words_ ? words_ : "failed", (int)status_); \
      exit(2);                                                                           \
    }                                                                                    \
  } while (0)

static float decode(const void* data, size_t i, int dtype) {
  uint32_t bits;
  float value;
  if (dtype == FG_FLOAT32) return ((const float*)data)[i];
  uint16_t half = ((const uint16_t*)data)[i];
  if (dtype == FG_BFLOAT16) {
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
  }
  int exponent = half >> 10 & 31, fraction = half & 1023;
  value = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
  return half >> 15 ? -value : value;
}

/* Multiples of 1/32 in [-2, 2): every type holds them exactly. */
static void fill(void* data, size_t count, int dtype, uint32_t seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    int steps = (int)(seed >> 25) - 64;
    float value = (float)steps / 32.0f;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (dtype == FG_FLOAT32) ((float*)data)[i] = value;
    if (dtype == FG_BFLOAT16) ((uint16_t*)data)[i] = (uint16_t)(bits >> 16);
    if (dtype == FG_FLOAT16) {
      int exponent = (int)(bits >> 23 & 255) - 112;
      ((uint16_t*)data)[i] = value == 0.0f ? 0 : (uint16_t)((bits >> 31) << 15 | (uint32_t)exponent << 10 | (bits >> 13 & 1023));
    }
  }
}

static void* allocate(size_t bytes) {
  void* memory = calloc(bytes ? bytes : 1, 1);
  if (!memory) exit(2);
  return memory;
}

/* Largest error over a few rows, and over their log-sum-exp, against float64. */
static double compare(const fg_problem* p, const void* q, const void* k, const void* v, const void* o, const float* lse) {
  double worst = 0.0, *weight = (double*)allocate(sizeof(double) * (size_t)p->seqlen_kv);
  for (int sample = 0; sample < 8; ++sample) {
    int batch = sample % p->batch, head = sample * 7 % p->heads_q, row = (int)((int64_t)sample * (p->seqlen_q - 1) / 7);
    int kv = head / (p->heads_q / p->heads_kv), centre = row + (p->top_left ? 0 : p->seqlen_kv - p->seqlen_q);
    size_t query = ((size_t)batch * p->heads_q + head) * p->seqlen_q + row, keys = ((size_t)batch * p->heads_kv + kv) * p->seqlen_kv;
    double most = -INFINITY, sum = 0.0;
    for (int j = 0; j < p->seqlen_kv; ++j) {
      int window = p->mask == FG_MASK_WINDOW;
      int seen = p->mask == FG_MASK_NONE || (p->mask == FG_MASK_CAUSAL && j <= centre) ||
                 (window && (p->window_left < 0 || j >= centre - p->window_left) && (p->window_right < 0 || j <= centre + p->window_right));
      double score = 0.0;
      for (int d = 0; d < p->head_dim; ++d)
        score += (double)decode(q, query * p->head_dim + d, p->dtype) * decode(k, (keys + j) * p->head_dim + d, p->dtype);
      weight[j] = seen ? score * p->scale : -INFINITY;
      most = fmax(most, weight[j]);
    }
    for (int j = 0; j < p->seqlen_kv; ++j) sum += weight[j] = most == -INFINITY ? 0.0 : exp(weight[j] - most);
    for (int d = 0; d < p->head_dim_v; ++d) {
      double value = 0.0;
      for (int j = 0; j < p->seqlen_kv; ++j) value += weight[j] * decode(v, (keys + j) * p->head_dim_v + d, p->dtype);
      worst = fmax(worst, fabs((sum > 0.0 ? value / sum : 0.0) - decode(o, query * p->head_dim_v + d, p->dtype)));
    }
    if (sum > 0.0) worst = fmax(worst, fabs(most + log(sum) - lse[query]) / fmax(1.0, fabs(most)));
  }
  free(weight);
  return worst;
}

static void transfer(const char* path, const char* mode, void* data, size_t bytes) {
  FILE* file = fopen(path, mode);
  size_t done = !file ? 0 : mode[0] == 'r' ? fread(data, 1, bytes, file) : fwrite(data, 1, bytes, file);
  if (!file || done != bytes || (mode[0] == 'r' && fgetc(file) != EOF) || fclose(file)) {
    fprintf(stderr, "%s: expected %zu bytes\n", path, bytes);
    exit(2);
  }
}

static double run(const fg_tuned* tuned, int whole, const char* folder, CUdevice device, char** files) {
  const fg_kernel* kernel = &fg_kernels[tuned->kernel];
  fg_problem p = {kernel->dtype,
                  kernel->head_dim,
                  kernel->head_dim_v,
                  kernel->mask,
                  tuned->batch,
                  tuned->batch_heads / tuned->batch,
                  1,
                  tuned->seqlen_q,
                  tuned->seqlen_kv,
                  tuned->window_left,
                  tuned->window_right,
                  tuned->top_left,
                  0};
  p.heads_kv = p.heads_q / tuned->gqa_group;
  p.scale = pow(kernel->head_dim, -0.5);
  if (!whole) {
    p.seqlen_q = (int)fg_min(p.seqlen_q, 333);
    p.seqlen_kv = (int)fg_min(p.seqlen_kv, 345);
    p.batch = 1;
  }
  size_t element = p.dtype == FG_FLOAT32 ? 4 : 2, heads_q = (size_t)p.batch * p.heads_q, heads_kv = (size_t)p.batch * p.heads_kv;
  size_t count[4] = {heads_q * p.seqlen_q * p.head_dim, heads_kv * p.seqlen_kv * p.head_dim, heads_kv * p.seqlen_kv * p.head_dim_v,
                     heads_q * p.seqlen_q * p.head_dim_v};
  size_t rows = heads_q * p.seqlen_q;
  void* host[4];
  CUdeviceptr on_device[4], lse_on_device, workspace = 0;
  for (int i = 0; i < 4; ++i) {
    host[i] = allocate(count[i] * element);
    if (i < 3 && files) transfer(files[i], "rb", host[i], count[i] * element);
    if (i < 3 && !files) fill(host[i], count[i], p.dtype, 17u + (uint32_t)i);
    CHECK(cuMemAlloc(&on_device[i], count[i] * element));
    CHECK(cuMemcpyHtoD(on_device[i], host[i], count[i] * element));
  }
  float* lse = (float*)allocate(rows * 4);
  CHECK(cuMemAlloc(&lse_on_device, rows * 4));

  fg_loaded loaded;
  CHECK(fg_load(kernel, folder, device, &loaded));
  if (fg_workspace_bytes(&loaded, &p)) CHECK(cuMemAlloc(&workspace, fg_workspace_bytes(&loaded, &p)));
  fg_forward_params params;
  memset(&params, 0, sizeof params);
  params.q = on_device[0];
  params.k = on_device[1];
  params.v = on_device[2];
  params.o = on_device[3];
  params.lse = lse_on_device;
  params.workspace = workspace;
  params.q_strides = fg_contiguous(p.heads_q, p.seqlen_q, p.head_dim);
  params.k_strides = fg_contiguous(p.heads_kv, p.seqlen_kv, p.head_dim);
  params.v_strides = fg_contiguous(p.heads_kv, p.seqlen_kv, p.head_dim_v);
  params.o_strides = fg_contiguous(p.heads_q, p.seqlen_q, p.head_dim_v);
  CHECK(fg_run(&loaded, &p, &params, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemcpyDtoH(host[3], on_device[3], count[3] * element));
  CHECK(cuMemcpyDtoH(lse, lse_on_device, rows * 4));
  if (files) {
    transfer(files[3], "wb", host[3], count[3] * element);
    transfer(files[4], "wb", lse, rows * 4);
  }
  double worst = compare(&p, host[0], host[1], host[2], host[3], lse);
  printf("%s head_dim %d/%d, q %d, kv %d, batch x heads %zu: largest error %.3g\n", kernel->file, p.head_dim, p.head_dim_v, p.seqlen_q,
         p.seqlen_kv, heads_q, worst);
  for (int i = 0; i < 4; ++i) {
    cuMemFree(on_device[i]);
    free(host[i]);
  }
  cuMemFree(lse_on_device);
  if (workspace) cuMemFree(workspace);
  fg_unload(&loaded);
  free(lse);
  return worst;
}

int main(int argc, char** argv) {
  if (argc != 2 && argc != 8) {
    fprintf(stderr, "usage: example FOLDER [NUMBER q.bin k.bin v.bin o.bin lse.bin]\n");
    return 2;
  }
  CUdevice device;
  CUcontext context;
  int major, minor, ran = 0, wrong = 0;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  CHECK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  int only = argc == 8 ? atoi(argv[2]) : -1;
  for (int i = 0; i < fg_tuned_count; ++i) {
    if ((only >= 0 && i != only) || fg_kernels[fg_tuned_problems[i].kernel].sm != 10 * major + minor) continue;
    double worst = run(&fg_tuned_problems[i], only >= 0, argv[1], device, only >= 0 ? argv + 3 : NULL);
    wrong += !(worst <= 0.04); /* outputs are below 2, half a unit of bfloat16 there is 0.004 */
    ++ran;
  }
  if (!ran) fprintf(stderr, "this bundle holds no kernel for sm_%d%d\n", major, minor);
  cuDevicePrimaryCtxRelease(device);
  return wrong ? 1 : ran ? 0 : 2;
}
