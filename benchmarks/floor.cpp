// The floor of the host step: what memory alone costs. Three fp32 arrays are
// read, changed and written in place, a fourth is read: 28 bytes an element, as
// the step reads and writes in 3 * 4 * 2 + 2 (bf16 gradient) + 2 (bf16 out).
//
// With keep = 1 and take = 0, which the compiler does not know, values stay as
// they are, so that the benchmark's arrays can be used.

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

void read_modify_write(float* __restrict a, float* __restrict b, float* __restrict c, const float* __restrict d,
                       std::size_t count, float keep, float take) {
    for (std::size_t i = 0; i < count; ++i) {
        const float x = d[i] * take;
        a[i] = a[i] * keep + x;
        b[i] = b[i] * keep + x;
        c[i] = c[i] * keep + x;
    }
}

void read_and_write(float* __restrict a, const std::uint16_t* __restrict b, std::uint16_t* __restrict c,
                    std::size_t count, float keep) {
    for (std::size_t i = 0; i < count; ++i) {
        a[i] = a[i] * keep;
        c[i] = b[i];
    }
}

template <class Part>
void divided(std::size_t count, int threads, const Part& part_of) {
    std::vector<std::thread> helpers;
    const std::size_t share = (count / threads + 15) / 16 * 16;
    for (int thread = 0; thread < threads; ++thread) {
        const std::size_t first = thread * share < count ? thread * share : count;
        const std::size_t last = first + share < count && thread + 1 < threads ? first + share : count;
        const auto part = [=] { part_of(first, last - first); };
        if (thread + 1 < threads) {
            helpers.emplace_back(part);
        } else {
            part();
        }
    }
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace

extern "C" void floor_pass(float* a, float* b, float* c, const float* d, std::size_t count, int threads, float keep,
                           float take) {
    divided(count, threads, [=](std::size_t first, std::size_t numel) {
        read_modify_write(a + first, b + first, c + first, d + first, numel, keep, take);
    });
}

// One fp32 array is changed in place, one of 2 bytes is read, and another is
// written, for which the CPU reads its lines first.
extern "C" void floor_two_bytes(float* a, const std::uint16_t* b, std::uint16_t* c, std::size_t count, int threads,
                                float keep) {
    divided(count, threads, [=](std::size_t first, std::size_t numel) {
        read_and_write(a + first, b + first, c + first, numel, keep);
    });
}
