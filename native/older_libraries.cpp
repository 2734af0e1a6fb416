// For the Python module alone: what lets it load where the C++ library is older than the compiler's.
//
// GCC's headers call this function since GCC 11 (GLIBCXX_3.4.29), and libstdc++ of manylinux_2_28 ends at
// GLIBCXX_3.4.24. Defined here, and hidden, it is no symbol that the module needs from outside.
#include <new>

#ifdef __GLIBCXX__
[[noreturn, gnu::visibility("hidden")]] void throw_bad_array_new_length() asm("_ZSt28__throw_bad_array_new_lengthv");

void throw_bad_array_new_length() { throw std::bad_array_new_length(); }
#endif
