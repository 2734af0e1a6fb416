// A test harness in one page: a fresh machine has a compiler and no test library.
#pragma once

#include <sstream>
#include <string>

namespace longshore::testing {

// A test of this name runs when main() is given no names, or a part of this one.
struct Registration {
    Registration(const char* name, void (*body)());
};

// Ends the running test; it is counted as failed.
[[noreturn]] void fail(const char* file, int line, const std::string& what);

template <class... Values>
std::string text(const Values&... values) {
    std::ostringstream out;
    out.precision(9);
    (out << ... << values);
    return out.str();
}

}  // namespace longshore::testing

#define TEST(name)                                                                    \
    static void test_##name();                                                        \
    static const longshore::testing::Registration register_##name{#name, test_##name}; \
    static void test_##name()

// CHECK(condition, values...): what follows the condition is printed when it fails.
#define CHECK(condition, ...)                                                                       \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            longshore::testing::fail(__FILE__, __LINE__,                                            \
                                     longshore::testing::text(#condition, "  " __VA_OPT__(, ) __VA_ARGS__)); \
        }                                                                                           \
    } while (false)

#define CHECK_EQUAL(found, expected, ...)                                                                      \
    do {                                                                                                       \
        const auto& found_ = (found);                                                                          \
        const auto& expected_ = (expected);                                                                    \
        if (!(found_ == expected_)) {                                                                          \
            longshore::testing::fail(__FILE__, __LINE__,                                                       \
                                     longshore::testing::text(#found, " is ", found_, ", not ", expected_,     \
                                                              "  " __VA_OPT__(, ) __VA_ARGS__));               \
        }                                                                                                      \
    } while (false)

// CHECK_THROWS(type, part of what(), statement)
#define CHECK_THROWS(type, part, ...)                                                                         \
    do {                                                                                                      \
        bool thrown_ = false;                                                                                 \
        try {                                                                                                 \
            __VA_ARGS__;                                                                                      \
        } catch (const type& error_) {                                                                        \
            thrown_ = true;                                                                                   \
            CHECK(std::string(error_.what()).find(part) != std::string::npos, "the message: ", error_.what()); \
        }                                                                                                     \
        CHECK(thrown_, #__VA_ARGS__ " did not throw " #type ": ", part);                                      \
    } while (false)
