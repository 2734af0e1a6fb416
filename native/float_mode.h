// Denormals kept, round to nearest even, no traps: for one scope.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace longshore {

class StandardFloatMode {
  public:
    StandardFloatMode() : saved_(read()) {
#if defined(__x86_64__)
        write(0x1f80);  // all exceptions masked; FTZ and DAZ clear; nearest even
#else
        write(0);
#endif
    }
    ~StandardFloatMode() { write(saved_); }
    StandardFloatMode(const StandardFloatMode&) = delete;
    StandardFloatMode& operator=(const StandardFloatMode&) = delete;

  private:
#if defined(__x86_64__)
    using Word = std::uint32_t;
    static Word read() { return _mm_getcsr(); }
    static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = std::uint64_t;
    static Word read() {
        Word word;
        __asm__ volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(Word word) { __asm__ volatile("msr fpcr, %0" ::"r"(word)); }
#else
    // No flush-to-zero mode is known for other CPUs.
    using Word = std::uint32_t;
    static Word read() { return 0; }
    static void write(Word) {}
#endif
    Word saved_;
};

}  // namespace longshore
