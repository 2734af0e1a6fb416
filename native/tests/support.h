// What the native tests share: numbers, guarded buffers, and float modes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "buffers.h"
#include "check.h"
#include "convert.h"
#include "float_mode.h"

#if defined(__SANITIZE_ADDRESS__)
#define LONGSHORE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LONGSHORE_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define LONGSHORE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LONGSHORE_TSAN 1
#endif
#endif

namespace longshore::testing {

#if defined(LONGSHORE_ASAN) || defined(LONGSHORE_TSAN)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

inline const char* name_of(DType dtype) {
    constexpr const char* names[] = {"none", "float32", "bfloat16", "float16"};
    return names[static_cast<int>(dtype)];
}

// splitmix64 (Steele, Lea and Flood, OOPSLA 2014): the same numbers everywhere.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    // In [0, end).
    std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(end)); }
    // Any of the 2^32 floats: mostly of absurd size, sometimes denormal, infinite or NaN.
    float pattern() { return float_of(static_cast<std::uint32_t>(bits() >> 32)); }
    // In [-1, 1): values as training has them.
    float ordinary() { return static_cast<float>(static_cast<std::int64_t>(bits() >> 40) - (1 << 23)) * 0x1p-23f; }

  private:
    std::uint64_t state_;
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Zeros, denormals, the edges of the range and what is beyond it.
inline constexpr std::array<float, 16> kSpecials = {
    0.0f,       -0.0f,      0x1p-149f, -0x1p-149f, 0x1.fffffcp-127f, 0x1p-126f, 1e-20f,    0.5f,
    -1.0f,      0x1.8p127f, 1e20f,     -1e20f,     0x1.fffffep127f,  kInfinity, -kInfinity, kNaN,
};

// Equal bits; any NaN equals any other, whose payloads no standard fixes.
inline bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }
// What a rule writes and what gradients add up to: with one NaN.
inline float canonical(float x) { return x != x ? float_of(0x7fc00000u) : x; }

// Elements of one dtype that begin `offset` elements past a cache line, between
// sentinels. Under AddressSanitizer the block ends with its last element
// instead, so that reads past the end are seen as well.
class Buffer {
  public:
    Buffer(DType dtype, std::size_t numel, std::size_t offset = 0)
        : dtype_(dtype), item_(item_bytes(dtype)), numel_(numel), begin_(kLine + offset * item_) {
        bytes_ = begin_ + numel * item_ + kTail;
        void* block = nullptr;
        if (posix_memalign(&block, kLine, bytes_) != 0) throw std::bad_alloc();
        block_.reset(static_cast<unsigned char*>(block));
        std::memset(block, kSentinel, bytes_);
    }
    Buffer(const Buffer& other) : Buffer(other.dtype_, other.numel_, (other.begin_ - kLine) / other.item_) {
        std::memcpy(block_.get(), other.block_.get(), bytes_);
    }
    Buffer& operator=(const Buffer&) = delete;

    DType dtype() const { return dtype_; }
    std::size_t numel() const { return numel_; }
    void* at(std::size_t i) { return block_.get() + begin_ + i * item_; }
    const void* at(std::size_t i) const { return block_.get() + begin_ + i * item_; }
    float* floats(std::size_t i = 0) { return static_cast<float*>(at(i)); }
    const float* floats(std::size_t i = 0) const { return static_cast<const float*>(at(i)); }

    // `source` holds elements of this buffer's dtype.
    void write(std::size_t i, const void* source, std::size_t numel) { std::memcpy(at(i), source, numel * item_); }
    // Rounds to this buffer's dtype.
    void set(std::size_t i, float value) {
        if (dtype_ == DType::float32) {
            std::memcpy(at(i), &value, sizeof value);
        } else {
            const std::uint16_t half = dtype_ == DType::bfloat16 ? BFloat16::round(value) : Float16::round(value);
            std::memcpy(at(i), &half, sizeof half);
        }
    }
    float get(std::size_t i) const { return value_at(begin_ + i * item_); }

    // Every byte, sentinels included, is that of `expected`.
    template <class... Context>
    void check_same(const Buffer& expected, const Context&... context) const {
        if (std::memcmp(block_.get(), expected.block_.get(), bytes_) == 0) return;
        for (std::size_t at = 0; at + item_ <= bytes_; at += item_) {
            const std::int64_t element = (static_cast<std::int64_t>(at) - static_cast<std::int64_t>(begin_)) /
                                         static_cast<std::int64_t>(item_);
            CHECK(bits_of(value_at(at)) == bits_of(expected.value_at(at)), "element ", element, " of ", numel_, " ",
                  name_of(dtype_), " is ", value_at(at), ", not ", expected.value_at(at), "; ", context...);
        }
    }

  private:
    float value_at(std::size_t byte) const {
        if (dtype_ == DType::float32) {
            float value;
            std::memcpy(&value, block_.get() + byte, sizeof value);
            return value;
        }
        std::uint16_t half;
        std::memcpy(&half, block_.get() + byte, sizeof half);
        return dtype_ == DType::bfloat16 ? BFloat16::load(half) : Float16::load(half);
    }

    struct Free {
        void operator()(unsigned char* block) const { std::free(block); }
    };
    static constexpr std::size_t kLine = 64;
#if defined(LONGSHORE_ASAN)
    static constexpr std::size_t kTail = 0;
#else
    static constexpr std::size_t kTail = 2 * kLine;
#endif
    static constexpr int kSentinel = 0xa5;  // a small negative number in each dtype
    DType dtype_;
    std::size_t item_, numel_, begin_, bytes_;
    std::unique_ptr<unsigned char, Free> block_;
};

// The calling thread's flush-to-zero mode, for one scope; threads made in it
// inherit it. On a CPU where none is known, nothing changes.
class FlushToZero {
  public:
#if defined(__x86_64__)
    FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlush); }
    ~FlushToZero() { _mm_setcsr(saved_); }
    static bool known() { return true; }
    static bool active() { return (_mm_getcsr() & kFlush) == kFlush; }

  private:
    static constexpr std::uint32_t kFlush = 0x8040;  // FTZ and DAZ
    std::uint32_t saved_;
#elif defined(__aarch64__)
    FlushToZero() : saved_(read()) { write(saved_ | kFlush); }
    ~FlushToZero() { write(saved_); }
    static bool known() { return true; }
    static bool active() { return (read() & kFlush) != 0; }

  private:
    static std::uint64_t read() {
        std::uint64_t word;
        __asm__ volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(std::uint64_t word) { __asm__ volatile("msr fpcr, %0" ::"r"(word)); }
    static constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;  // FZ
    std::uint64_t saved_;
#else
    static bool known() { return false; }
    static bool active() { return false; }
#endif
    FlushToZero(const FlushToZero&) = delete;
    FlushToZero& operator=(const FlushToZero&) = delete;
};

// Whether this thread really flushes denormals now.
inline bool flushes() {
    volatile float denormal = 0x1p-149f;
    volatile float product = denormal * 1.0f;
    return product == 0.0f;
}

}  // namespace longshore::testing
