"""Build and test longshore for aarch64 on an x86-64 machine: a cross compiler, and qemu's user mode."""
