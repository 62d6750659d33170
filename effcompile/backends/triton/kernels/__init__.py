"""The kernels themselves: @triton.jit functions, launched by the modules beside this package.

Importing them imports triton.
"""
