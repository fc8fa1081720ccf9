// Primitives of sm_90a that only backward kernels use, for a CPU. The twin for GPUs is ptx/sm90_backward.cuh.j2.
#pragma once

namespace fg {

FG_DEVICE void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) { emu::start_linear_load(target, source, bytes, barrier); }
FG_DEVICE void bulk_store(float* target, u32 source, u32 bytes) { emu::start_linear_store(target, source, bytes, false); }
FG_DEVICE void bulk_add(float* target, u32 source, u32 bytes) { emu::start_linear_store(target, source, bytes, true); }
FG_DEVICE void add_global(float* address, float v0, float v1, float v2, float v3) {
  const float values[4] = {v0, v1, v2, v3};
  for (int i = 0; i < 4; ++i) atomic_add(address + i, values[i]);
}

FG_DEVICE Vector16 load_shared_freely(u32 address) { return load_shared<Vector16>(address); }
FG_DEVICE void pin_address(u32&) {}
FG_DEVICE void forget(int&) {}
template <int COUNT>
FG_DEVICE void finish_before(const float (&)[COUNT]) {}

namespace emu {
template <class Product>
struct Descriptors {
  u64 left[Product::STEPS], right[Product::STEPS];

  Descriptors(u32 left_low, u32 right_low) {
    for (int step = 0; step < Product::STEPS; ++step) {
      left[step] = descriptor(left_low, Product::left_step(step));
      right[step] = descriptor(right_low, Product::right_step(step));
    }
  }
};

template <class Product, class Element, int SIZE>
void start_shared_product(float (&result)[SIZE], u32 left, u32 right, bool accumulate) {
  static_assert(SIZE >= Product::COLUMNS / 2, "registers of the result");
  const Descriptors<Product> at(left, right);
  start_products({result, nullptr, at.left, at.right, Product::COLUMNS, Product::STEPS, accumulate, Product::LEFT_BY_COLUMNS,
                  Product::RIGHT_BY_COLUMNS, is_half<Element>});
}
template <class Product, class Element, int SIZE, int WORDS>
void start_register_product(float (&result)[SIZE], u32 (&left)[WORDS], u32 right, bool accumulate) {
  static_assert(SIZE >= Product::COLUMNS / 2 && WORDS == 4 * Product::STEPS, "registers of the result, four per step of the left operand");
  const Descriptors<Product> at(0, right);
  start_products(
      {result, left, nullptr, at.right, Product::COLUMNS, Product::STEPS, accumulate, false, Product::RIGHT_BY_COLUMNS, is_half<Element>});
}
}  // namespace emu

template <class Product, class Element, int SIZE>
FG_DEVICE void start_product(float (&result)[SIZE], u32 left, u32 right) {
  emu::start_shared_product<Product, Element>(result, left, right, false);
}
template <class Product, class Element, int SIZE>
FG_DEVICE void restart_product(float (&result)[SIZE], u32 left, u32 right) {
  emu::start_shared_product<Product, Element>(result, left, right, false);
}
template <class Product, class Element, int SIZE>
FG_DEVICE void add_shared_product(float (&result)[SIZE], u32 left, u32 right) {
  emu::start_shared_product<Product, Element>(result, left, right, true);
}
template <class Product, class Element, int SIZE, int WORDS>
FG_DEVICE void start_product(float (&result)[SIZE], u32 (&left)[WORDS], u32 right) {
  emu::start_register_product<Product, Element>(result, left, right, false);
}
template <class Product, class Element, int SIZE, int WORDS>
FG_DEVICE void restart_product(float (&result)[SIZE], u32 (&left)[WORDS], u32 right) {
  emu::start_register_product<Product, Element>(result, left, right, false);
}
template <class Product, class Element, int SIZE, int WORDS>
FG_DEVICE void add_product(float (&result)[SIZE], u32 (&left)[WORDS], u32 right) {
  emu::start_register_product<Product, Element>(result, left, right, true);
}
template <int PENDING, class... Registers>
FG_DEVICE void product_wait(Registers&...) {
  emu::wait_products(PENDING);
}

}  // namespace fg
