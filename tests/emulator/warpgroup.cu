// One warpgroup: tiles come by bulk loads, S = Q K^T and O += P V with P = S rounded, O leaves as float32 and, rounded, by a bulk store.
#include "sm90.cuh"

using namespace fg;
using Element = ELEMENT;

struct Params {
  TensorMap q, k, v, o;
  float *scores, *output;  // accumulators of thread t at t * registers
  int row_q, row_kv;       // first rows, which may lie outside
};

constexpr int STEPS = product_steps(HEAD_DIM), COLUMNS_V = product_columns(HEAD_DIM_V);
constexpr int Q = 0, K = Q + operand_bytes(64, HEAD_DIM), V = K + operand_bytes(BLOCK_KV, HEAD_DIM);
constexpr int O = V + operand_bytes(BLOCK_KV, HEAD_DIM_V), BARRIER = O + operand_bytes(64, HEAD_DIM_V);

template <int COLUMNS>
FG_DEVICE void load_tile(u32 target, const TensorMap* map, u32 barrier, int rows, int row) {
  if constexpr (COLUMNS % SWIZZLE_COLUMNS == 0) {
    tma_load(target, map, barrier, 0, row, 0, 1, 0);
  } else {
    FG_UNROLL
    for (int chunk = 0; chunk < chunks_of(COLUMNS); ++chunk)
      tma_load(target + chunk * chunk_bytes(rows), map, barrier, chunk * SWIZZLE_COLUMNS, row, 1, 0, 0);
  }
}

FG_KERNEL(warpgroup, Params, 128, 1) {
  const u32 base = dynamic_shared(), barrier = base + BARRIER;
  const int thread = thread_index(), lane = thread % 32;
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  block_sync();
  if (thread == 0) {
    mbarrier_expect(barrier, operand_bytes(64 + BLOCK_KV, HEAD_DIM) + operand_bytes(BLOCK_KV, HEAD_DIM_V));
    load_tile<HEAD_DIM>(base + Q, &params.q, barrier, 64, params.row_q);
    load_tile<HEAD_DIM>(base + K, &params.k, barrier, BLOCK_KV, params.row_kv);
    load_tile<HEAD_DIM_V>(base + V, &params.v, barrier, BLOCK_KV, params.row_kv);
  }
  mbarrier_wait(barrier, 0);
  float scores[BLOCK_KV / 2], output[COLUMNS_V / 2];
  u32 weights[BLOCK_KV / 4];
  score_product<STEPS, Element>(scores, row_operand(base + Q), row_operand(base + K));
  wgmma_wait<0>(scores);
  FG_UNROLL
  for (int i = 0; i < BLOCK_KV / 4; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{});
  FG_UNROLL
  for (int i = 0; i < COLUMNS_V / 2; ++i) output[i] = static_cast<float>(i);
  output_product<Element>(output, weights, column_operand(base + V, BLOCK_KV));
  wgmma_wait<0>(output, weights);
  FG_UNROLL
  for (int i = 0; i < BLOCK_KV / 2; ++i) store_global(params.scores + thread * (BLOCK_KV / 2) + i, scores[i]);
  FG_UNROLL
  for (int i = 0; i < COLUMNS_V / 2; ++i) store_global(params.output + thread * (COLUMNS_V / 2) + i, output[i]);
  const int row = thread / 32 * 16 + lane % 16;
  FG_UNROLL
  for (int j = 0; j < COLUMNS_V / 16; ++j) {
    const u32 fragment[4] = {
        pack_pair(output[8 * j], output[8 * j + 1], Element{}), pack_pair(output[8 * j + 2], output[8 * j + 3], Element{}),
        pack_pair(output[8 * j + 4], output[8 * j + 5], Element{}), pack_pair(output[8 * j + 6], output[8 * j + 7], Element{})};
    store_matrix_x4(base + O + operand_offset(64, row, 16 * j + lane / 16 * 8), fragment);
  }
  fence_proxy_async();
  barrier_sync(1, 128);
  if (thread != 0) return;
  FG_UNROLL
  for (int chunk = 0; chunk < chunks_of(HEAD_DIM_V); ++chunk)
    tma_store(&params.o, base + O + chunk * chunk_bytes(64), chunk * SWIZZLE_COLUMNS, params.row_q, 1, 0, 0);
  bulk_commit();
  bulk_wait<0>();
}
