"""Custom operators of effcompile: exact building blocks that stock torch lacks, each with shapes for tracing
and a plain kernel.
"""
