// One product of one warpgroup: both tiles come by bulk loads, LEFT_IN_REGISTERS takes the left one on by matrix loads.
using namespace fg;
using Element = ELEMENT;

struct Params {
  TensorMap left, right;
  float* result;  // accumulators of thread t at t * registers
};

constexpr int LEFT_BYTES = operand_bytes(LEFT_ROWS, LEFT_COLUMNS), RIGHT_BYTES = operand_bytes(RIGHT_ROWS, RIGHT_COLUMNS);
constexpr int REGISTERS = Product::COLUMNS / 2, BARRIER = LEFT_BYTES + RIGHT_BYTES;

template <int ROWS, int COLUMNS>
FG_DEVICE void load_tile(u32 target, const TensorMap* map, u32 barrier) {
  for (int chunk = 0; chunk < chunks_of(COLUMNS); ++chunk)
    tma_load(target + chunk * chunk_bytes(ROWS), map, barrier, chunk * SWIZZLE_COLUMNS, 0, 0, 0, 0);
}

FG_KERNEL(backward_product, Params, 128, 1) {
  const u32 left = dynamic_shared(), right = left + LEFT_BYTES, barrier = left + BARRIER;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  block_sync();
  if (thread == 0) {
    mbarrier_expect(barrier, LEFT_BYTES + RIGHT_BYTES);
    load_tile<LEFT_ROWS, LEFT_COLUMNS>(left, &params.left, barrier);
    load_tile<RIGHT_ROWS, RIGHT_COLUMNS>(right, &params.right, barrier);
  }
  mbarrier_wait(barrier, 0);
  const u32 a = Product::LEFT_BY_COLUMNS ? column_operand(left, LEFT_ROWS) : row_operand(left);
  const u32 b = Product::RIGHT_BY_COLUMNS ? column_operand(right, RIGHT_ROWS) : row_operand(right);
  float result[REGISTERS];
#if LEFT_IN_REGISTERS
  u32 rows[4 * Product::STEPS];
  for (int step = 0; step < Product::STEPS; ++step) {
    u32 fragment[4];
    load_matrix_x4(fragment, left + operand_offset(LEFT_ROWS, warp * 16 + lane % 16, step * 16 + lane / 16 * 8));
    for (int i = 0; i < 4; ++i) rows[4 * step + i] = fragment[i];
  }
  start_product<Product, Element>(result, rows, b);
  add_product<Product, Element>(result, rows, b);
  product_wait<0>(result, rows);
#else
  restart_product<Product, Element>(result, a, b);
  add_shared_product<Product, Element>(result, a, b);
  product_wait<0>(result);
#endif
  for (int i = 0; i < REGISTERS; ++i) store_global(params.result + thread * REGISTERS + i, result[i]);
}
