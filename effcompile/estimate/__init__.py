"""FLOPs, bytes and seconds per node; storage-level memory timeline; sensitivity; calibration of
this machine.
"""
