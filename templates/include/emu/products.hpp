// Part of runtime.cpp: products of a warpgroup, which read shared memory and registers on their own until they are waited for.
#pragma once
#include "bulk.hpp"
#include "tensor_core.hpp"

namespace fg::emu {
namespace {

struct Descriptor {
  u32 start, leading, stride, layout;  // bytes; layout 0 no swizzle, 1, 2, 3 for 128, 64, 32 bytes
};
Descriptor decode_descriptor(u64 bits) {
  const auto field = [bits](int first) { return static_cast<u32>(bits >> first & 0x3FFF) << 4; };
  if (bits >> 49 & 7) fault("product", "a descriptor with a base offset, which the emulation does not follow");
  return {field(0), field(16), field(32), static_cast<u32>(bits >> 62)};
}

// Shared address of the 16 bytes that hold element (line, depth): eight elements along the depth, or along the lines when the depth runs
// over rows of the tile.
u32 piece_address(const Descriptor& d, bool by_columns, u32 line, u32 depth) {
  static const u32 WIDTH[4] = {16, 128, 64, 32}, MODE[4] = {0, 3, 2, 1};
  const u32 width = WIDTH[d.layout];
  if (d.layout == 0) {
    return by_columns ? d.start + line / 8 * d.stride + depth / 8 * d.leading + depth % 8 * 16
                      : d.start + line / 8 * d.stride + depth / 8 * d.leading + line % 8 * 16;
  }
  const u32 columns = width / 2;
  const u32 address = by_columns ? d.start + line / columns * d.leading + depth / 8 * d.stride + depth % 8 * width + line % columns * 2
                                 : d.start + line / 8 * d.stride + line % 8 * width + depth * 2;
  return swizzled(address, MODE[d.layout]);
}

// Calls act(shared address of 16 bytes, line, depth) for lines [first, end) and 16 of depth.
template <class Act>
void for_each_operand_piece(u64 bits, bool by_columns, u32 first, u32 end, Act act) {
  const Descriptor descriptor = decode_descriptor(bits);
  const u32 line_step = by_columns ? 8 : 1, depth_step = by_columns ? 1 : 8;
  for (u32 line = first; line < end; line += line_step)
    for (u32 depth = 0; depth < 16; depth += depth_step) act(piece_address(descriptor, by_columns, line, depth), line, depth);
}

using Lines = float[16][256];  // [depth][line]

// False after a report.
bool read_operand(u64 bits, bool by_columns, u32 lines, bool is_half, Lines& out, const char* who) {
  bool inside = true;
  for_each_operand_piece(bits, by_columns, 0, lines, [&](u32 address, u32 line, u32 depth) {
    const unsigned char* source = inside ? shared_bytes(address, 16, who) : nullptr;
    if (!source) {
      inside = false;
      return;
    }
    u16 elements[8];
    std::memcpy(elements, source, 16);
    for (u32 i = 0; i < 8; ++i) {
      float& element = by_columns ? out[depth][line + i] : out[depth + i][line];
      element = is_half ? decode_half(elements[i]) : decode_bfloat16(elements[i]);
    }
  });
  return inside;
}

void read_registers(const Product& product, int step, Lines& out) {
  for (int lane = 0; lane < GROUP_LANES; ++lane) {
    for (int part = 0; part < 4; ++part) {
      const u32 word = product.a[lane][4 * step + part];
      for (int half = 0; half < 2; ++half) {
        const u32 bits = word >> (16 * half) & 0xFFFFu;
        const int line = lane / 32 * 16 + lane % 32 / 4 + part % 2 * 8, depth = lane % 4 * 2 + part / 2 * 8 + half;
        out[depth][line] = product.call.is_half ? decode_half(bits) : decode_bfloat16(bits);
      }
    }
  }
}

struct Place {
  int lane, index;
};
Place place_of(int line, int column) {
  return {line / 16 * 32 + line % 8 * 4 + column % 8 / 2, column / 8 * 4 + line % 16 / 8 * 2 + column % 2};
}

using Accumulator = float[64][256];

// Sixteen products summed in the order of the depth, then added to the accumulator.
void add_step(const Lines& a, const Lines& b, int columns, Accumulator& sum) {
  for (int line = 0; line < 64; ++line) {
    float products[256];
    for (int column = 0; column < columns; ++column) products[column] = a[0][line] * b[0][column];
    for (int depth = 1; depth < 16; ++depth) {
      const float factor = a[depth][line];
      for (int column = 0; column < columns; ++column) products[column] += factor * b[depth][column];
    }
    for (int column = 0; column < columns; ++column) sum[line][column] += products[column];
  }
}

void load_accumulator(const Product& product, Accumulator& sum) {
  const int columns = product.call.columns, registers = columns / 2;
  for (int line = 0; line < 64; ++line) {
    for (int column = 0; column < columns; ++column) {
      const Place at = place_of(line, column);
      const float* saved = product.d_as_issued.empty() ? product.d[at.lane] : &product.d_as_issued[at.lane * registers];
      sum[line][column] = product.call.accumulate ? saved[at.index] : 0.0f;
    }
  }
}

void store_accumulator(const Product& product, const Accumulator& sum) {
  for (int line = 0; line < 64; ++line) {
    for (int column = 0; column < product.call.columns; ++column) {
      const Place at = place_of(line, column);
      product.d[at.lane][at.index] = sum[line][column];
    }
  }
}

void check_registers(const Product& product) {
  const size_t words = static_cast<size_t>(product.call.steps) * 4;
  for (int lane = 0; lane < GROUP_LANES; ++lane) {
    if (std::memcmp(product.a[lane], &product.a_as_issued[lane * words], words * 4) == 0) continue;
    return fault("product", "registers of the left operand changed while the product was pending, in lane %d of its warpgroup", lane);
  }
}

void execute_first(Warpgroup& group) {
  static Lines a, b;
  static Accumulator sum;
  Product& product = group.products.front();
  const ProductCall& call = product.call;
  load_accumulator(product, sum);
  if (call.a) check_registers(product);
  for (int step = 0; step < call.steps; ++step) {
    if (call.a) {
      read_registers(product, step, a);
    } else if (!read_operand(product.a_descriptors[step], call.a_by_columns, 64, call.is_half, a, "the left operand of a product")) {
      return stop();
    }
    const u32 columns = static_cast<u32>(call.columns);
    if (!read_operand(product.b_descriptors[step], call.b_by_columns, columns, call.is_half, b, "the right operand of a product"))
      return stop();
    add_step(a, b, call.columns, sum);
  }
  store_accumulator(product, sum);
  counters.multiplies += static_cast<u64>(call.steps) * 4 * (call.columns / 8);
  group.products.pop_front();
  ++group.executed;
  wake(group.waiters);
}

bool first_is_issued(const Warpgroup& group) { return !group.products.empty() && group.products.front().lanes == GROUP_LANES; }

// A whole warp has issued: from here on its share reads shared memory.
void check_shared_reads(const Product& product, int warp, u32 clock) {
  Shadow& shadow = this_block().shadow;
  shadow.issue(warp, ALL_LANES);
  const int engine = shadow.product_engine(warp);
  const auto check = [&](u32 address, u32, u32) {
    if (address - SHARED_BASE < static_cast<u32>(machine.launch.shared_bytes))
      check_engine(engine, clock, address, 16, false, "a product's read");
  };
  const ProductCall& call = product.call;
  const u32 first = static_cast<u32>(warp % 4) * 16;
  for (int step = 0; step < call.steps; ++step) {
    if (!call.a) for_each_operand_piece(product.a_descriptors[step], call.a_by_columns, first, first + 16, check);
    for_each_operand_piece(product.b_descriptors[step], call.b_by_columns, 0, static_cast<u32>(call.columns), check);
  }
}

bool same_call(const Product& product, const ProductCall& call) {
  const ProductCall& first = product.call;
  const auto same = [&](const std::vector<u64>& known, const u64* given) {
    return known.empty() || std::memcmp(known.data(), given, known.size() * sizeof(u64)) == 0;
  };
  return first.columns == call.columns && first.steps == call.steps && first.accumulate == call.accumulate && !first.a == !call.a &&
         first.is_half == call.is_half && first.a_by_columns == call.a_by_columns && first.b_by_columns == call.b_by_columns &&
         same(product.a_descriptors, call.a_descriptors) && same(product.b_descriptors, call.b_descriptors);
}

void describe_product(Product& product, const ProductCall& call) {
  product.call = call;
  if (!call.a) product.a_descriptors.assign(call.a_descriptors, call.a_descriptors + call.steps);
  product.b_descriptors.assign(call.b_descriptors, call.b_descriptors + call.steps);
  if (call.a) product.a_as_issued.resize(static_cast<size_t>(call.steps) * 4 * GROUP_LANES);
}

// Until the wait the accumulators belong to the tensor core, which is made visible by NaN in them.
void poison_accumulators(Product& product, bool chained, int lane) {
  if (!machine.launch.late_products || !machine.launch.poison || chained) return;
  const size_t registers = static_cast<size_t>(product.call.columns) / 2;
  if (product.call.accumulate) {
    product.d_as_issued.resize(registers * GROUP_LANES);
    std::copy_n(product.d[lane], registers, &product.d_as_issued[lane * registers]);
  }
  std::memset(product.d[lane], 0xFF, registers * sizeof(float));
}

Warpgroup& group_of(const Fiber& fiber) {
  Block& block = *fiber.warp->block;
  const size_t index = static_cast<size_t>(fiber.thread / GROUP_LANES);
  if (index >= block.groups.size()) {
    fault("product", "thread %d belongs to no whole warpgroup", fiber.thread);
    stop();
  }
  return block.groups[index];
}

}  // namespace

void start_products(const ProductCall& call) {
  preempt(SYNC_PREEMPTION_ODDS);
  Fiber& fiber = *machine.running;
  Block& block = this_block();
  use_engines(block);
  Warpgroup& group = group_of(fiber);
  if (call.columns < 8 || call.columns > 256 || call.columns % 8) {
    fault("product", "%d columns; a multiple of 8 up to 256 is allowed", call.columns);
    stop();
  }
  const u32 ordinal = fiber.products++;
  const size_t place = ordinal - group.executed;
  if (place == group.products.size()) {
    group.products.emplace_back();
    describe_product(group.products.back(), call);
  }
  Product& product = group.products[place];
  if (!same_call(product, call)) {
    fault("product", "lanes of warpgroup %d disagree about the operands of product %u", group.index, ordinal);
    stop();
  }
  const int lane = fiber.thread % GROUP_LANES, warp = fiber.warp->index;
  const bool chained = place > 0 && group.products[place - 1].d[lane] == call.d;
  product.d[lane] = call.d;
  product.a[lane] = call.a;
  if (call.a) std::copy_n(call.a, call.steps * 4, &product.a_as_issued[static_cast<size_t>(lane) * call.steps * 4]);
  poison_accumulators(product, chained, lane);
  ++product.lanes;
  if (++product.warp_lanes[warp % 4] == LANES && machine.launch.races) check_shared_reads(product, warp, ordinal + 1);
  while (!machine.launch.late_products && first_is_issued(group)) execute_first(group);
}

void wait_products(int pending) {
  preempt(SYNC_PREEMPTION_ODDS);
  Fiber& fiber = *machine.running;
  if (static_cast<i64>(fiber.products) <= pending) return;
  Warpgroup& group = group_of(fiber);
  const u32 need = fiber.products - static_cast<u32>(pending);
  while (group.executed < need) {
    group.wanted = std::max(group.wanted, need);
    group.waiters.push_back(&fiber);
    fiber.wait_for = need;
    suspend(IN_PRODUCT_WAIT);
  }
  fiber.products_waited = std::max(fiber.products_waited, need);
  if (!machine.launch.races) return;
  Shadow& shadow = this_block().shadow;
  use_engines(this_block());
  shadow.acquire_engine(fiber.thread, shadow.product_engine(fiber.warp->index), need);
}

}  // namespace fg::emu
