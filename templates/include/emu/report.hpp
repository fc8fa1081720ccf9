// Part of runtime.cpp: what a run reports.
#pragma once
#include "machine.hpp"

namespace fg::emu {
namespace {

void append_fault(const std::string& text) {
  Result& result = *machine.result;
  ++result.num_faults;
  const size_t room = REPORT_BYTES - 1 - result.text_bytes;
  if (text.size() + 1 > room) return;
  if (result.text_bytes) result.text[result.text_bytes++] = REPORT_SEPARATOR;
  std::memcpy(result.text + result.text_bytes, text.data(), text.size());
  result.text_bytes += static_cast<int>(text.size());
}

std::string place() {
  const Fiber* fiber = machine.running;
  if (!fiber && machine.landing) return " [CTA " + std::to_string(machine.landing->index) + ", asynchronous]";
  if (!fiber) return "";
  return " [CTA " + std::to_string(fiber->warp->block->index) + ", thread " + std::to_string(fiber->thread) + "]";
}

// The first faults of a kind are told, the rest only counted.
__attribute__((format(printf, 2, 3))) void fault(const char* kind, const char* format, ...) {
  if (machine.faults_of_kind[kind]++ >= FAULTS_PER_KIND) {
    ++machine.result->num_faults;
    return;
  }
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  append_fault(std::string(kind) + ": " + text + place());
}

}  // namespace
}  // namespace fg::emu
