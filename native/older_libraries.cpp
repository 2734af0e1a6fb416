// For the Python module (and its tests): what lets it load where the C++ library is older than the compiler's.
//
// The headers of GCC 11 and newer call three functions that libstdc++ has since then (GLIBCXX_3.4.29, CXXABI_1.3.13);
// that of manylinux_2_28 ends at GLIBCXX_3.4.24 and CXXABI_1.3.11. Defined here, and hidden, they are no symbols that
// the module needs from outside. Each does what the older headers did.
#include <new>

#ifdef __GLIBCXX__

// std::__throw_bad_array_new_length()
[[noreturn, gnu::visibility("hidden")]] void throw_bad_array_new_length() asm("_ZSt28__throw_bad_array_new_lengthv");

void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// std::exception_ptr, a pointer to a counted object, has its copy constructor and destructor in every libstdc++; newer
// headers have them inline, and call these two members of it.
extern "C" {
void copy_exception_ptr(void** self, void* const* other) asm("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void** self) asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");

[[gnu::visibility("hidden")]] void add_reference(void** self) asm("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
[[gnu::visibility("hidden")]] void release(void** self) asm("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
}

void add_reference(void** self) {
    void* counted = nullptr;  // and never destroyed
    copy_exception_ptr(&counted, self);
}

void release(void** self) {
    destroy_exception_ptr(self);
    *self = nullptr;
}

#endif
