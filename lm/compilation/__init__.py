"""Compiling for devices that are described or present, the memory of compiled programs, and a cache of them."""
