#include "buffers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace longshore {

std::size_t item_bytes(DType dtype) {
    switch (dtype) {
        case DType::float32: return 4;
        case DType::bfloat16:
        case DType::float16: return 2;
        case DType::none: break;
    }
    throw std::invalid_argument("a buffer of unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

void check_address(const void* address, DType dtype, const char* what) {
    const std::size_t alignment = item_bytes(dtype);
    if (address == nullptr) throw std::invalid_argument(std::string(what) + " is a null address");
    if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
        throw std::invalid_argument(std::string(what) + " is not aligned to its elements");
    }
}

namespace {

const void* advance(const void* address, DType dtype, std::int64_t elements) {
    return static_cast<const char*>(address) + static_cast<std::size_t>(elements) * item_bytes(dtype);
}

std::int64_t pieces_of(std::int64_t numel) { return (numel + kPieceNumel - 1) / kPieceNumel; }

void check_numel(std::int64_t numel) {
    if (numel < 0) throw std::invalid_argument("a buffer of " + std::to_string(numel) + " elements");
}

// Calls `piece(begin, count)` for all of a buffer, on the threads of the pool.
template <typename Piece>
void run_pieces(std::int64_t numel, ThreadPool& pool, const Piece& piece) {
    const std::int64_t each = piece_numel(numel, pool.threads());
    pool.run(static_cast<std::size_t>((numel + each - 1) / each), [&](std::size_t index) {
        const std::int64_t begin = static_cast<std::int64_t>(index) * each;
        piece(begin, std::min(each, numel - begin));
    });
}

}  // namespace

std::int64_t piece_numel(std::int64_t numel, int threads) {
    constexpr std::int64_t least = 1 << 13, unit = 1 << 10;
    const std::int64_t share = numel / (4 * static_cast<std::int64_t>(threads)) / unit * unit;
    return std::clamp(share, least, kPieceNumel);
}

void accumulate(float* target, const void* source, DType dtype, std::int64_t numel, bool add, ThreadPool& pool,
                InstructionSet isa) {
    check_numel(numel);
    if (numel == 0) return;
    check_address(target, DType::float32, "the accumulator");
    check_address(source, dtype, "the gradient");
    const KernelTable& kernels = kernels_for(isa);
    const auto apply = add ? kernels.add : kernels.widen;
    run_pieces(numel, pool, [&](std::int64_t begin, std::int64_t count) {
        apply(target + begin, advance(source, dtype, begin), dtype, static_cast<std::size_t>(count));
    });
}

void sum_of_two(float* target, const void* first, const void* second, DType dtype, std::int64_t numel,
                ThreadPool& pool, InstructionSet isa) {
    check_numel(numel);
    if (numel == 0) return;
    check_address(target, DType::float32, "the accumulator");
    check_address(first, dtype, "the first gradient");
    check_address(second, dtype, "the gradient");
    const KernelTable& kernels = kernels_for(isa);
    constexpr std::int64_t cached = 1 << 11;  // of the target, between its two passes: 8 KiB
    run_pieces(numel, pool, [&](std::int64_t begin, std::int64_t count) {
        for (const std::int64_t end = begin + count; begin < end; begin += cached) {
            const auto part = static_cast<std::size_t>(std::min(cached, end - begin));
            kernels.widen(target + begin, advance(first, dtype, begin), dtype, part);
            kernels.add(target + begin, advance(second, dtype, begin), dtype, part);
        }
    });
}

std::int64_t reconcile(float* master, const void* parameter, DType dtype, std::int64_t numel, bool adopt,
                       ThreadPool& pool, InstructionSet isa) {
    check_numel(numel);
    if (numel == 0) return 0;
    check_address(master, DType::float32, "the master");
    check_address(parameter, dtype, "the parameter");
    const KernelTable& kernels = kernels_for(isa);
    std::vector<std::size_t> differing(static_cast<std::size_t>(pieces_of(numel)));
    pool.run(differing.size(), [&](std::size_t piece) {
        const std::int64_t begin = static_cast<std::int64_t>(piece) * kPieceNumel;
        const std::int64_t count = std::min(kPieceNumel, numel - begin);
        differing[piece] = kernels.reconcile(master + begin, advance(parameter, dtype, begin), dtype,
                                             static_cast<std::size_t>(count), adopt);
    });
    std::size_t total = 0;
    for (std::size_t count : differing) total += count;
    return static_cast<std::int64_t>(total);
}

// Blocks that a thread takes at a time: reading alone, it is through one in so
// little time that starting at another place in memory shows.
constexpr std::size_t kNormRun = 4;

std::vector<std::vector<double>> block_sums(const std::vector<std::vector<GradientRange>>& parameters, Scale scale,
                                            ThreadPool& pool, InstructionSet isa) {
    // One block: elements [begin, begin + count) of one parameter.
    struct Block {
        std::size_t parameter;
        std::int64_t begin, count;
    };
    std::vector<Block> blocks;
    std::vector<std::vector<double>> sums(parameters.size());
    for (std::size_t index = 0; index < parameters.size(); ++index) {
        std::int64_t numel = 0;
        for (const GradientRange& range : parameters[index]) {
            check_numel(range.numel);
            if (range.numel > 0) check_address(range.address, range.dtype, "the gradient");
            numel += range.numel;
        }
        for (std::int64_t begin = 0; begin < numel; begin += kPieceNumel) {
            blocks.push_back({index, begin, std::min(kPieceNumel, numel - begin)});
        }
        sums[index].resize(static_cast<std::size_t>(pieces_of(numel)));
    }
    const KernelTable& kernels = kernels_for(isa);
    const auto add_up = [&](std::size_t which) {
        const Block& block = blocks[which];
        // Rounded here, in the standard float mode that a piece runs in.
        const float factors[2] = {static_cast<float>(scale.first), static_cast<float>(scale.second)};
        std::array<double, kNormLanes> lanes{};
        std::int64_t range_begin = 0;
        for (const GradientRange& range : parameters[block.parameter]) {
            const std::int64_t from = std::max(block.begin, range_begin);
            const std::int64_t to = std::min(block.begin + block.count, range_begin + range.numel);
            if (from < to) {
                kernels.squares(lanes.data(), advance(range.address, range.dtype, from - range_begin), range.dtype,
                                static_cast<std::size_t>(from) % kNormLanes, static_cast<std::size_t>(to - from),
                                factors);
            }
            range_begin += range.numel;
        }
        double sum = 0.0;
        for (double lane : lanes) sum += lane;
        sums[block.parameter][static_cast<std::size_t>(block.begin / kPieceNumel)] = sum;
    };
    pool.run((blocks.size() + kNormRun - 1) / kNormRun, [&](std::size_t run) {
        const std::size_t end = std::min((run + 1) * kNormRun, blocks.size());
        for (std::size_t which = run * kNormRun; which < end; ++which) add_up(which);
    });
    return sums;
}

}  // namespace longshore
