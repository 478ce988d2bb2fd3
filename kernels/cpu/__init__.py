"""Compiled kernels for any CPU: C, loaded with ctypes, on numpy arrays in place. See _native.c for how it is made."""

from ._library import status as status
