"""Compilation for described or present devices, the memory of compiled programs, and a cache of them."""
