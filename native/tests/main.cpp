// native_tests [PART OF A NAME]... [-PART OF A NAME]...: runs the tests whose names
// contain one of the arguments, or all of them, but for those behind a dash.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "check.h"
#include "dispatch.h"

namespace longshore::testing {
namespace {

struct Test {
    const char* name;
    void (*body)();
};

// A function's static, so that registrations in other files may come first.
std::vector<Test>& registered() {
    static std::vector<Test> tests;
    return tests;
}

struct Failure {};

bool chosen(const Test& test, int argc, char** argv) {
    bool named = false, any = false;
    for (int i = 1; i < argc; ++i) {
        const bool left_out = argv[i][0] == '-';
        const bool found = std::strstr(test.name, argv[i] + (left_out ? 1 : 0)) != nullptr;
        if (left_out && found) return false;
        any = any || !left_out;
        named = named || (!left_out && found);
    }
    return named || !any;
}

bool passes(const Test& test) {
    try {
        test.body();
        return true;
    } catch (const Failure&) {
    } catch (const std::exception& error) {
        std::printf("  exception: %s\n", error.what());
    } catch (...) {
        std::printf("  an exception of no known type\n");
    }
    return false;
}

}  // namespace

Registration::Registration(const char* name, void (*body)()) { registered().push_back({name, body}); }

void fail(const char* file, int line, const std::string& what) {
    std::printf("  %s:%d: %s\n", file, line, what.c_str());
    throw Failure{};
}

int run(int argc, char** argv) {
    std::printf("instruction sets:");
    for (const InstructionSet isa : supported_instruction_sets()) std::printf(" %s", name_of(isa).c_str());
    std::printf("\n");
    int passed = 0, failed = 0;
    for (const Test& test : registered()) {
        if (!chosen(test, argc, argv)) continue;
        const auto start = std::chrono::steady_clock::now();
        const bool ok = passes(test);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        std::printf("%s %s (%.2f s)\n", ok ? "ok  " : "FAIL", test.name, seconds.count());
        std::fflush(stdout);
        ++(ok ? passed : failed);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace longshore::testing

int main(int argc, char** argv) { return longshore::testing::run(argc, argv); }
